"""The snapshot of torch's operator schemas: all of it parses, and the installed torch agrees where specs rely on it."""

import subprocess
import sys
from typing import Any

import pytest

from opforge.generator.run import load_model
from opforge.generator.torch_schemas import SNAPSHOT, TorchSchemas, parse_schema, torch_lines


def test_every_line_parses_and_is_sorted() -> None:
    lines = SNAPSHOT.read_text().splitlines()
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
    """Whether two schemas mean the same: versions of torch may spell a default differently (`-1` and `-1.`)."""
    return [(a.name, a.type, a.kwarg_only, a.alias, a.writes) for a in (*ours.args, *ours.returns)] == [
        (a.name, a.type, a.kwarg_only, a.alias, a.writes) for a in (*theirs.args, *theirs.returns)
    ]


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


def test_snapshot_is_what_its_version_of_torch_gives() -> None:
    import torch

    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"the snapshot was made with torch 2.13, this is {torch.__version__}")
    # In a process of its own: whatever else a test session imported may have registered operators of its own.
    code = "from opforge.generator.torch_schemas import torch_lines; print('\\n'.join(torch_lines()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == SNAPSHOT.read_text().splitlines(), "run `opforge schemas --refresh`"
