"""The rooms in docs/architecture.md are those of the code, and what draws them reads imports of every form."""

from pathlib import Path

import networkx as nx
import pytest

from opforge.tools.flow import BEGIN, END, PAGE, drawn, import_graph, in_order, rooms_of, updated

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    files = {
        "__init__.py": '"""The engine."""',
        "ir/__init__.py": '"""The IR: `Node`. More of it."""',
        "ir/nodes.py": "import os",
        "lower/__init__.py": '"""Lowers."""',
        "lower/deep/__init__.py": "",
        "lower/deep/sizes.py": "from ...ir.nodes import Node\nfrom ... import config\nfrom ....errors import E\nfrom . import near",
        "fuse/__init__.py": "",
        "fuse/build.py": "def late():\n    import opforge.runtime.lower.deep\n    from ..ir import nodes",
        "observe/__init__.py": '"""Reports."""',
        "observe/watch.py": "from .. import config",
        "schedule/__init__.py": '"""Schedules."""',
        "schedule/pipeline.py": "from ..fuse import build\nPASSES: tuple = (group, place)",
        "config.py": '"""Settings."""',
        "compile_fx.py": "from .schedule.pipeline import schedule\nfrom . import config",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_page_is_fresh() -> None:
    page = PAGE.read_text()
    assert updated(page, drawn(ROOT / "runtime")) == page, "run: .venv/bin/python tools/flow.py"


def test_imports_of_every_form_are_arrows(runtime: Path) -> None:
    graph = rooms_of(import_graph(runtime), "The engine.")
    assert sorted(graph.edges) == [
        ("fuse", "schedule"),
        ("ir", "fuse"),
        ("ir", "lower"),
        ("lower", "fuse"),
        ("schedule", "driver"),
    ]
    assert in_order(graph) == ["ir", "lower", "fuse", "schedule", "driver"]


def test_what_is_drawn(runtime: Path) -> None:
    text = drawn(runtime)
    assert "  ir --> lower\n  lower --> fuse\n  fuse --> schedule\n  schedule --> driver\n" in text
    assert "| [`ir`](../runtime/ir/) | The IR: `Node`. |  |" in text
    assert "| [`fuse`](../runtime/fuse/) |  | ir, lower |" in text
    assert "| `driver`: `runtime/*.py` | The engine. | schedule |" in text
    assert "group, place." in text
    assert text.endswith("Open to all rooms:\n\n- `config`: Settings.\n- `observe`: Reports.\n")


def test_a_circle_is_refused(runtime: Path) -> None:
    (runtime / "ir" / "nodes.py").write_text("from ..fuse import build")
    with pytest.raises(nx.NetworkXException):
        drawn(runtime)


def test_only_the_marked_part_changes() -> None:
    assert updated(f"a\n{BEGIN}old\n{END}b\n", "new\n") == f"a\n{BEGIN}\nnew\n\n{END}b\n"
    with pytest.raises(ValueError, match="has no lines"):
        updated("a page without marks", "new\n")
