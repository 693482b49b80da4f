"""The examples of clients run, each in a process of its own; each compares its results with eager's and with float64 itself."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "examples" / "clients"
#: By example: the package that it needs, and the most graphs that it may compile: sizes change in most of them.
EXAMPLES = {
    "generate": ("transformers", 2),
    "hf_trainer": ("accelerate", 1),
    "optimizer_step": ("torch", 6),
    "lightning_fit": ("lightning", 2),
    "diffusers_blocks": ("diffusers", 3),
    "timm_families": ("timm", 20),
    "sentence_embeddings": ("sentence_transformers", 2),
    "geometric_graphs": ("torch_geometric", 1),
    "torchao_int8": ("torchao", 2),
}


def run(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(path), *words], capture_output=True, text=True, timeout=540)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "timm_families" else n for n in EXAMPLES]
)
def test_client(name: str, tmp_path: Path) -> None:
    package, graphs = EXAMPLES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"C20: {package} is not installed")
    ran = run(CLIENTS / f"{name}.py", "--json", str(tmp_path / "report.json"))
    assert ran.returncode == 0, ran.stderr
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert 1 <= report["graphs"] <= graphs
    assert not report["fallbacks"]
    # Torch's optimizers break the graph themselves, in a wrapper around their step.
    assert bool(report["breaks"]) == (name == "optimizer_step")
    assert f"{report['client']} {report['version']}" in ran.stdout


def test_every_example_is_here() -> None:
    """And stands in the table, whose command has a list of its own."""
    found = {p.stem for p in CLIENTS.glob("*.py")} - {"client", "__main__"}
    assert found == set(EXAMPLES)
    table = json.loads((ROOT / "benchmarks" / "results" / "clients.json").read_text())["clients"]
    assert set(table) == found
    assert all((CLIENTS / f"{name}.py").read_text().count("\n") <= 60 for name in found)


def test_a_client_that_is_not_installed(tmp_path: Path) -> None:
    text = (CLIENTS / "torchao_int8.py").read_text().replace("torchao", "no_such_client")
    (tmp_path / "program.py").write_text(text)
    (tmp_path / "client.py").write_text((CLIENTS / "client.py").read_text())
    ran = run(tmp_path / "program.py")
    assert ran.returncode == 2
    assert ran.stderr.endswith("this example needs the package 'no_such_client': pip install no_such_client\n")
