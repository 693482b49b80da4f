"""Kernels of equal text as one: a program looks up whose points it computes, by a tree of comparisons, and then runs the text for RBLOCK blocks
of XBLOCK of them, one after the other.

The tree is cheap to write and slow to run: compilers make selections of all addresses of it, which take as long as some thousand elements do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...generated.tuning import Rule
from ..schedule.plan import Kernel
from .triton_flat import is_points
from .triton_launch import Launch

MEMBERS = 32  # of a group at most: with more a kernel takes seconds to compile, and little of a launch is left to save
ARGUMENTS = 512 - 2  # 64-bit numbers that all devices take (4 KB), without Triton's own two
UNIT = 16  # points: with a multiple of it a mask is the same for all that a thread loads at once


@dataclass(frozen=True)
class Members:
    """How a kernel for `count` others is written. unit: their numbers of points are told in so many."""

    count: int
    unit: int


@dataclass(frozen=True)
class Group:
    """Kernels that run as one, called `name`, by name; `points` of each, all multiples of `unit`."""

    name: str
    kernels: tuple[str, ...]
    points: tuple[int, ...]
    unit: int

    def programs(self, span: int) -> int:
        """Programs of `span` points, each member's own."""
        return sum(-(-n // span) for n in self.points)

    def numbers(self, span: int) -> list[int]:
        """What follows the addresses: each member's number of points, in units, and its first program."""
        firsts = [0]
        for n in self.points[:-1]:
            firsts.append(firsts[-1] + -(-n // span))
        return [n // self.unit for n in self.points] + firsts


def can_join(kernel: Kernel, shape: Launch) -> bool:
    """Whether a kernel can be a member: points without inner loops, of a known number."""
    return (
        is_points(kernel) and not kernel.walk and shape.inner == 1 and isinstance(shape.outer, int) and not shape.square
    )


def unit_of(points: int) -> int:
    return 1 if points % UNIT else UNIT


def steps(points: Sequence[int], rule: Rule) -> int:
    """How many blocks a program of a group with so many points goes through: with more points than the programs that keep a GPU busy have in
    one block each, they go through several.
    """
    most_useful = min(sum(points) // (rule.x * rule.programs), max(points) // rule.x, rule.r)
    return 1 << max(most_useful, 1).bit_length() - 1


def most(pointers: int) -> int:
    """How many kernels with so many pointers one can stand for."""
    return min(MEMBERS, ARGUMENTS // (pointers + 2))


def arguments(pointers: int, members: Members) -> list[str]:
    """Addresses of each member, numbers of points, first programs."""
    numbered = range(members.count)
    addresses = [f"p{k}_{i}" for k in numbered for i in range(pointers)]
    return [*addresses, *(f"points{k}" for k in numbered), *(f"first{k}" for k in numbered)]


def selection(buffers: tuple[str, ...], members: Members) -> list[str]:
    """Lines that give each of `buffers` the address that it has for this program's member, and the member's `points` and `first` program."""
    return ["program = tl.program_id(0)", *_tree(buffers, 0, members.count)]


def blocks_of(lines: list[str], members: Members, wide: bool) -> list[str]:
    """The lines for each block that a program goes through, with `xindex` and `xmask`."""
    times = "" if members.unit == 1 else f" * {members.unit}"
    short = "" if wide else ".to(tl.int32)"
    return [
        "for block in range(0, RBLOCK):",
        f"    xindex = ((program - first){short} * RBLOCK + block) * XBLOCK + tl.arange(0, XBLOCK)",
        f"    xmask = xindex < points{short}{times}",
        *(f"    {line}" for line in lines),
    ]


def _tree(buffers: tuple[str, ...], start: int, end: int) -> list[str]:
    """For the members start, …, end - 1."""
    if end - start == 1:
        lines = [f"{b} = p{start}_{i}" for i, b in enumerate(buffers)]
        return [*lines, f"points = points{start}", f"first = first{start}"]
    middle = (start + end) // 2
    return [
        f"if program < first{middle}:",
        *(f"    {line}" for line in _tree(buffers, start, middle)),
        "else:",
        *(f"    {line}" for line in _tree(buffers, middle, end)),
    ]


__all__ = ["Group", "Members", "arguments", "blocks_of", "can_join", "most", "selection", "steps", "unit_of"]
