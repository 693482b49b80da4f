"""The snapshot of torch's operator schemas: all of it parses, and the installed torch agrees where specs rely on it."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opforge.generator.run import load_model
from opforge.generator.schema_file import SchemaFile
from opforge.generator.torch_schemas import SNAPSHOT, TorchSchemas, parse_schema, torch_lines
from opforge.runtime.torch_compat import minor_version


def test_every_line_parses_and_is_sorted() -> None:
    file = SchemaFile.read(SNAPSHOT)
    lines = list(file.lines)
    assert file.text() == SNAPSHOT.read_text()
    assert lines == sorted(set(lines))
    assert len(lines) > 3000
    for line in lines:
        schema = parse_schema(line)
        assert schema.text == line
        assert all(a.name.isidentifier() for a in schema.args), line
        assert all("(" not in a.type and a.type for a in (*schema.args, *schema.returns)), line


def test_parts_of_a_schema() -> None:
    s = parse_schema(
        'aten::f.x(Tensor(a!) self, int[2] k=[1, 2], *, str how="a, b", Tensor(b -> *)[] l, float? p=None)'
        " -> (Tensor(a!), Tensor(c|d)[], int n)"
    )
    assert s.id == "aten.f.x"
    assert [(a.name, a.type, a.default, a.kwarg_only, a.alias, a.writes) for a in s.args] == [
        ("self", "Tensor", None, False, "a", True),
        ("k", "int[2]", "[1, 2]", False, "", False),
        ("how", "str", '"a, b"', True, "", False),
        ("l", "Tensor[]", None, True, "b", False),
        ("p", "float?", "None", True, "", False),
    ]
    assert [r.type for r in s.returns] == ["Tensor", "Tensor[]", "int"]
    assert s.mutates
    assert not s.is_out
    assert parse_schema("aten::g(Tensor(a) self) -> Tensor(a)").is_view
    assert parse_schema("aten::h(Tensor self) -> ()").returns == ()
    with pytest.raises(ValueError, match="not an operator schema"):
        parse_schema("nonsense")


def test_lookup_by_packet_and_overload() -> None:
    schemas = TorchSchemas(["n::f.b(Tensor x) -> Tensor", "n::f(Tensor x) -> Tensor", "n::g(Tensor x) -> Tensor"])
    assert [s.id for s in schemas.get("n.f")] == ["n.f.b", "n.f.default"]
    assert [s.id for s in schemas.get("n.f.default")] == ["n.f.default"]
    assert schemas.get("n.nothing") == ()
    assert schemas.get("f") == ()
    assert schemas.packets() == ("n.f", "n.g")
    assert [s.id for s in schemas.extended(["m::k(Tensor x) -> Tensor"]).get("m.k")] == ["m.k.default"]


def same(ours: Any, theirs: Any) -> bool:
    """Whether calls of the installed torch's operator fit what the specs know, which is the newest version's.

    The dispatcher passes arguments by position, but for those that only a keyword may pass: names of the others may differ. What a version
    has added last, with a default, is missing in calls of older ones. Defaults may be spelled differently (`-1` and `-1.`).
    """

    def told(schema: Any) -> list[tuple[Any, ...]]:
        args = [(a.name if a.kwarg_only else "", a.type, a.kwarg_only, a.alias, a.writes) for a in schema.args]
        return [*args, *((a.type, a.alias, a.writes) for a in schema.returns)]

    common = {a.name for a in theirs.args}
    added = [a for a in ours.args if a.kwarg_only and a.default is not None and a.name not in common]
    return told(dataclasses.replace(ours, args=tuple(a for a in ours.args if a not in added))) == told(theirs)


def test_installed_torch_agrees_where_specs_name_operators() -> None:
    live = TorchSchemas(torch_lines())
    model = load_model()
    wrong = []
    for entry in model.part("ops"):
        for schema in entry.schemas:
            theirs = live.get(schema.id)
            # An operator that an older torch lacks can never reach the compiler there.
            if theirs and not same(schema, theirs[0]):
                wrong.append(f"{schema.text}\n{theirs[0].text}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def versions(tmp_path: Path) -> SchemaFile:
    path = tmp_path / "schemas.txt"
    path.write_text(
        "# versions: 2.9 2.10 2.11\nn::all() -> int\nn::middle() -> int  # only 2.10\nn::new() -> int  # since 2.10\nn::old() -> int  # until 2.10\n"
    )
    return SchemaFile.read(path)


def test_lines_of_each_version(versions: SchemaFile) -> None:
    assert versions.of("2.9") == ["n::all() -> int", "n::old() -> int"]
    assert versions.newest == ["n::all() -> int", "n::new() -> int"]
    assert versions.older == ["n::middle() -> int", "n::old() -> int"]


def test_a_version_is_brought_up_to_date(versions: SchemaFile) -> None:
    assert versions.updated("2.10", versions.of("2.10")).text() == versions.text()
    later = versions.updated("2.12", ["n::all() -> int", "n::later() -> int"])
    assert later.text().splitlines() == [
        "# versions: 2.9 2.10 2.11 2.12",
        "n::all() -> int",
        "n::later() -> int  # since 2.12",
        "n::middle() -> int  # only 2.10",
        "n::new() -> int  # only 2.10 2.11",
        "n::old() -> int  # until 2.10",
    ]
    assert "n::old() -> int  # until 2.9" in versions.updated("2.10", ["n::all() -> int"]).text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("n::f() -> int  # since 3.0", r"schemas.txt:2: .*2\.9 2\.10.*'since 3.0'"),
        ("n::f() -> int  # until 2.9 2.10", "expected 'since V'"),
        ("n::f() -> int  # before 2.9", "expected 'since V'"),
    ],
)
def test_a_wrong_mark_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "schemas.txt"
    path.write_text(f"# versions: 2.9 2.10\n{line}\n")
    with pytest.raises(ValueError, match=message):
        SchemaFile.read(path)


def test_operators_that_the_newest_version_has_no_more(versions: SchemaFile) -> None:
    schemas = TorchSchemas(
        ["n::f(Tensor x) -> Tensor", "n::g(Tensor self) -> Tensor"],
        ["n::f.x(Tensor x) -> Tensor", "n::g(Tensor input) -> Tensor", "n::h(Tensor x) -> Tensor"],
    )
    assert [s.id for s in schemas.older] == ["n.f.x", "n.h.default"]
    assert [s.id for s in schemas.get("n.f")] == ["n.f.default"]
    assert [s.id for s in schemas.get("n.f.x")] == ["n.f.x"]
    assert [s.id for s in schemas.get("n.h")] == ["n.h.default"]
    assert schemas.get("n.g")[0].args[0].name == "self"


def test_snapshot_is_what_the_installed_torch_gives() -> None:
    file, version = SchemaFile.read(SNAPSHOT), minor_version()
    # In a process of its own: whatever else a test session imported may have registered operators of its own.
    code = "from opforge.generator.torch_schemas import torch_lines; print('\\n'.join(torch_lines()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == file.of(version), "run `opforge schemas --refresh`"
