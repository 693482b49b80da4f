"""On which devices operators can be native, and what docs/operators.md says of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from opforge.generated.kernels import GPU_ROUTINES
from opforge.generator.devices import GPU, PROCESSOR, native_on, updates_left
from opforge.generator.model import Model
from opforge.generator.op_entries import OpEntry
from opforge.generator.run import load_model
from opforge.generator.user import load_user_model

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def base() -> Model:
    return load_model()


def entries(text: str, base: Model, folder: Path) -> tuple[OpEntry, ...]:
    path = folder / "my_ops.yaml"
    path.write_text(dedent(text))
    found: tuple[OpEntry, ...] = load_user_model(path, base).part("ops")
    return found


def composite(body: str, op: str = "aten.abs", condition: str = "numel(self) > 0") -> str:
    lines = "".join(f"    {line}\n" for line in dedent(body).strip().splitlines())
    return f"- op: {op}\n  doc: a test\n  kind: composite\n  native_if: {condition}\n  body: |\n{lines}"


@pytest.mark.parametrize(
    "condition",
    [
        "not is_on_gpu(self)",
        "pays_as_loops(self, numel(self)) and numel(self) > 0",
        "is_float(dtype(self)) and (pays_as_loops(self, 1) or not is_on_gpu(self))",
        "pays_as_loops(self, 1) if rank(self) > 1 else not is_on_gpu(self)",
    ],
)
def test_a_condition_that_no_call_fulfils(condition: str, base: Model, tmp_path: Path) -> None:
    made = entries(composite("return self", condition=condition), base, tmp_path)
    assert native_on(GPU, made) == frozenset()
    assert native_on(PROCESSOR, made) == {"aten.abs.default"}


@pytest.mark.parametrize(
    "condition",
    [
        "not is_on_gpu(self) or rank(self) == 2",
        "pays_as_loops(self, 1) or is_float(dtype(self))",
        "is_on_gpu(self) or pays_as_loops(self, 1)",
        "rank(self) == 2 if is_on_gpu(self) else pays_as_loops(self, 1)",
    ],
)
def test_a_condition_that_some_call_fulfils(condition: str, base: Model, tmp_path: Path) -> None:
    assert native_on(GPU, entries(composite("return self", condition=condition), base, tmp_path))


CALL = 'routine("special.frexp", [self], [(shape(self), dtype(self))], [])[0]'
LEADS_TO_A_ROUTINE = {
    "at once": f"return {CALL}",
    "both ways": f"""
        if rank(self) == 2:
            x = {CALL}
        else:
            return {CALL}
        return x
    """,
    "a choice": f"return {CALL} if rank(self) == 2 else neg({CALL})",
    "the way of a GPU": f"""
        x = self
        if is_on_gpu(self):
            x = {CALL}
        return x
    """,
    "through another": "return reciprocal(self)",
}
LEADS_AROUND_ONE = {
    "one way": f"""
        if rank(self) == 2:
            return {CALL}
        return self
    """,
    "a choice": f"return {CALL} if rank(self) == 2 else self",
    "the way of a processor": f"return self if is_on_gpu(self) else {CALL}",
}


@pytest.mark.parametrize("name", LEADS_TO_A_ROUTINE)
def test_every_way_leads_to_a_routine(name: str, base: Model, tmp_path: Path) -> None:
    other = composite(f"return {CALL}", op="aten.reciprocal")
    made = entries(composite(LEADS_TO_A_ROUTINE[name]) + other, base, tmp_path)
    assert native_on(GPU, made) == frozenset()
    assert native_on(PROCESSOR, made) == {"aten.abs.default", "aten.reciprocal.default"}


def test_a_routine_that_the_device_has(base: Model, tmp_path: Path) -> None:
    made = entries(composite(f"return {CALL}"), base, tmp_path)
    assert native_on(replace(GPU, routines=frozenset({"special.frexp"})), made) == {"aten.abs.default"}
    assert native_on(replace(GPU, routines=frozenset({"sorting.sort"})), made) == frozenset()


@pytest.mark.parametrize("name", LEADS_AROUND_ONE)
def test_a_way_leads_around_the_routine(name: str, base: Model, tmp_path: Path) -> None:
    assert native_on(GPU, entries(composite(LEADS_AROUND_ONE[name]), base, tmp_path)) == {"aten.abs.default"}


@pytest.mark.parametrize(
    ("mode", "native", "left"),
    [
        ("sum", True, set()),
        ("set", True, set()),
        ("'\"max\"'", False, set()),
        ('\'"sum" if rank(self) == 2 else "set"\'', True, set()),
        ('\'"sum" if rank(self) == 2 else "max"\'', True, {"sum"}),
    ],
)
def test_updates(mode: str, native: bool, left: set[str], base: Model, tmp_path: Path) -> None:
    text = f"""\
    - op: aten.take
      doc: a test
      kind: scatter
      over: shape(index)
      base: self
      into: "[place_of(index[*r], size(self, 0))]"
      mode: {mode}
      at: self[r[0]]
    """
    made = entries(text, base, tmp_path)
    assert native_on(GPU, made) == ({"aten.take.default"} if native else set())
    assert [updates_left(GPU, e) for e in made] == [left]
    assert [updates_left(PROCESSOR, e) for e in made] == [set()]


def test_the_page_counts_native_overloads(base: Model) -> None:
    """At least six hundred on either target."""
    text = (ROOT / "docs/operators.md").read_text()
    told = re.search(r"native in some of their calls: (\d+) on C\+\+ and (\d+) on Triton\.", text)
    assert told is not None
    counts = [
        sum(name.startswith(("aten.", "prims.")) for name in native_on(device, base.part("ops")))
        for device in (PROCESSOR, replace(GPU, routines=GPU_ROUTINES))
    ]
    assert counts == [int(n) for n in told.groups()]
    assert min(counts) >= 600


def test_the_page_names_the_targets_of_an_entry() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]+) \|", (ROOT / "docs/operators.md").read_text(), re.MULTILINE)
    targets = {name: told for name, _, told in rows}
    kinds = {told: kind for _, kind, told in rows}
    assert set(targets.values()) == {"C++", "C++, Triton", "C++, Triton (sum)"}
    assert kinds["C++, Triton (sum)"] == "scatter"
    assert (targets["aten.exp"], targets["aten.median.dim"], targets["aten.max_unpool2d"]) == (
        "C++, Triton",
        "C++",
        "C++, Triton",
    )
