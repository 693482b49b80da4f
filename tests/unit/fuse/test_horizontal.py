"""Which kernels run as one launch: those that have nothing to do with each other, in names and in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opforge.runtime.fuse.horizontal import REACH, horizontal_groups
from opforge.runtime.kernels.plan import Allocation, CopyStep, Kernel, Plan
from tests.support.ir_text import parse
from tests.support.plans import dtypes_of, kernel, plan_of

NAMES = "abcdefgh"
PROGRAM = parse(
    "".join(f"input x{n}: float32[64]\n" for n in NAMES)
    + "".join(f"nest {n}: float32[64] for (i0<64)\n  value neg(x{n}[i0])\n" for n in NAMES)
    + "".join(f"output {n}\n" for n in NAMES)
)
TYPES = dtypes_of(PROGRAM)


def one(writes: str, reads: str = "", width: int = 64) -> Kernel:
    """Called as what it writes; reads the input of that name, or another buffer."""
    return kernel(writes, f"o0<{width}", [("", [f"store {writes}[o0] neg({reads or 'x' + writes}[o0])"])], TYPES)


def grouped(
    steps: list[Any], allocations: Mapping[str, Allocation] | None = None, most: int = 8, **kwargs: Any
) -> list[str]:
    """Members of each group, in one word; kernels are alike where their loops are."""
    boxed = kwargs.pop("boxed", False)
    plan = plan_of(PROGRAM, steps, dict(allocations or {}), arena=1 << 20, **kwargs)
    return ["".join(names) for names in horizontal_groups(plan, lambda k: (k.outer[0].extent, most), boxed=boxed)]


def arena(at: int) -> Allocation:
    return Allocation("arena", at)


def test_alike_and_independent() -> None:
    assert grouped([one("a"), one("b"), one("c")]) == ["abc"]
    assert grouped([one(n) for n in NAMES], most=3) == ["abc", "def", "gh"]
    assert grouped([one(n) for n in NAMES], most=7) == ["abcdefg"]
    assert grouped([one("a"), one("b", width=32)]) == []


def test_reads_what_a_member_writes() -> None:
    assert grouped([one("a"), one("b", "a")]) == []
    assert grouped([one("a"), one("b", "a"), one("c")]) == ["bc"]
    assert grouped([one("a"), one("b"), one("c", "b"), one("d")]) == ["ab", "cd"]


def test_memory_of_a_member() -> None:
    """In place of an input that another reads or writes, and in parts of the arena that are used again."""
    assert grouped([one("a"), one("b")], {"b": Allocation("alias", 0, "xa")}) == []  # read before
    assert grouped([one("a"), one("b", "xa")], {"a": Allocation("alias", 0, "xa")}) == []  # written before
    assert grouped([one("a"), one("b")], {"a": Allocation("alias", 0, "xa"), "b": Allocation("alias", 0, "xb")}) == [
        "ab"
    ]
    assert grouped([one("a"), one("b")], {"a": arena(0), "b": arena(256)}) == ["ab"]
    assert grouped([one("a"), one("b")], {"a": arena(0), "b": arena(192)}) == []
    assert grouped([one("a"), one("b")], {"a": arena(192), "b": arena(0)}) == []
    assert grouped([one("a"), one("b"), one("c", "a")], {"a": arena(0), "b": arena(512), "c": arena(256)}) == ["ab"]
    three = {"a": arena(0), "b": arena(512), "c": arena(256), "d": arena(576)}
    assert grouped([one("a"), one("b"), one("c"), one("d")], three) == ["abc"]


def test_moved_over_others() -> None:
    other = one("b", width=32)
    assert grouped([one("a"), other, one("c")]) == ["ac"]
    assert grouped([one("a"), other, one("c", "b")]) == []
    assert grouped([one("a"), one("b", "a", 32), one("c")]) == ["ac"]
    assert grouped([one("a"), one("b", "xc", 32), one("c")], {"c": Allocation("alias", 0, "xc")}) == []
    assert grouped([one("a"), CopyStep("xh", "h"), one("c")]) == []


def test_pairs_become_two_groups() -> None:
    """a and b, c and d, e and f: the second reads what the first writes, which runs earlier."""
    steps = [one("a"), one("b", "a", 32), one("c"), one("d", "c", 32), one("e"), one("f", "e", 32)]
    assert grouped(steps) == ["ace", "bdf"]


def test_memory_does_not_grow() -> None:
    steps = [one("a"), one("b"), one("c")]
    freed: dict[str, Any] = {"frees": {0: ("h",)}}
    assert grouped(steps, **freed) == ["bc"]
    in_place = {n: Allocation("alias", 0, f"x{n}") for n in "abc"}
    assert grouped(steps, in_place, **freed) == ["abc"]
    assert grouped(steps, boxed=True) == []
    assert grouped(steps, in_place, boxed=True) == ["abc"]


def test_not_from_afar() -> None:
    plan = plan_of(PROGRAM, [one("a"), *[one("b", width=32)] * REACH, one("c")])
    assert isinstance(plan, Plan)
    assert horizontal_groups(plan, lambda k: None if k.name == "b" else (0, 8)) == []
