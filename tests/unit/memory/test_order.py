"""The order of steps that keeps least memory alive: never more than in the given one, and every value before its readers."""

from __future__ import annotations

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from opforge.runtime.ir.nodes import Buffer, Extern, Ref
from opforge.runtime.kernels.plan import ExternStep, KernelStep, Step
from opforge.runtime.kernels.steps import step_reads, step_writes
from opforge.runtime.memory import order
from tests.support.plans import kernel

LARGE, SMALL = 8192, 8
BYTES = 4 * LARGE
Made = tuple[list[Step], dict[str, Buffer]]


def steps_of(rows: list[tuple[str, list[str], int, bool]]) -> Made:
    """Each row: the buffer written, those read at the same element, its size, and whether an eager kernel writes it."""
    layouts = {"x": Buffer("x", (LARGE,), "float32", (1,))}
    steps: list[Step] = []
    for name, reads, size, eager in rows:
        layouts[name] = Buffer(name, (size,), "float32", (1,))
        if eager:
            args = tuple(Ref(r) for r in reads)
            steps.append(ExternStep(Extern((layouts[name],), "aten.add.Tensor", args), args, ()))
        else:
            value = reduce(lambda a, b: f"add({a}, {b})", [f"{r}[r0]" for r in reads] or ["x[r0]"])
            phases = [(f"r0<{size}", [f"store {name}[r0] {value}"])]
            steps.append(KernelStep(kernel(f"k_{name}", "", phases, dict.fromkeys(layouts, "float32"))))
    return steps, layouts


def peak(steps: list[Step], layouts: dict[str, Buffer], held: set[str]) -> int:
    return order._peak(order._steps(steps, layouts, BYTES), range(len(steps)), held)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Made, set[str]]:
    n = draw(st.integers(3, 14))
    rows = []
    for k in range(n):
        reads = draw(st.lists(st.integers(0, k - 1), max_size=3, unique=True)) if k else []
        size = draw(st.sampled_from([LARGE, LARGE, SMALL]))
        rows.append((f"b{k}", [f"b{j}" for j in reads], size, draw(st.booleans()) and bool(reads)))
    held = {f"b{k}" for k in draw(st.sets(st.integers(0, n - 1), max_size=4))} | {f"b{n - 1}"}
    return steps_of(rows), held


@given(programs())
def test_valid_and_never_worse(case: tuple[Made, set[str]]) -> None:
    (steps, layouts), held = case
    found = order.least_memory(list(steps), layouts, held, BYTES)
    assert sorted(map(id, found)) == sorted(map(id, steps))
    written: set[str] = {"x"}
    for step in found:
        assert set(step_reads(step)) <= written
        written.update(step_writes(step))
    eager = [s for s in steps if isinstance(s, ExternStep)]
    assert [s for s in found if isinstance(s, ExternStep)] == eager
    assert peak(found, layouts, held) <= peak(steps, layouts, held)


def test_a_large_value_waits_until_it_is_needed() -> None:
    """`late` is read at the end only: made before the chain of large values, it is alive beside all of them."""
    steps, layouts = steps_of(
        [
            ("late", [], LARGE, False),
            ("a", [], LARGE, False),
            ("b", [], LARGE, False),
            ("small", ["a", "b"], SMALL, False),
            ("end", ["late", "small"], SMALL, False),
        ]
    )
    found = order.least_memory(steps, layouts, {"end"}, BYTES)
    assert [step_writes(s)[0] for s in found] == ["a", "b", "small", "late", "end"]


def test_sums_come_before_what_can_be_written_in_place() -> None:
    steps, layouts = steps_of(
        [
            ("a", [], LARGE, False),
            ("result", ["a"], LARGE, False),
            ("sum", ["a"], SMALL, False),
        ]
    )
    found = order.least_memory(steps, layouts, {"result", "sum"}, BYTES)
    assert [step_writes(s)[0] for s in found][-2:] == ["sum", "result"]


def test_small_programs_and_symbolic_sizes_stay() -> None:
    steps, layouts = steps_of([("a", [], LARGE, False), ("b", ["a"], LARGE, False)])
    assert order.least_memory(steps, layouts, {"b"}, BYTES) is steps
