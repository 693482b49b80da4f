"""Kernels of equal text as one: a program looks up whose points it computes, and then runs the text for RBLOCK blocks of XBLOCK of them, one
after the other.

Few members are found by a tree of comparisons over the kernel's arguments. It is cheap to write and slow to run: compilers make selections of
all addresses of it, which take as long as some thousand elements do. More are rows of a table in the device's memory: each member's number of
points, then each one's first program, then the addresses of each. A program counts the members that begin at or before it, and reads its own
addresses; who launches the kernel keeps the table (`execute.tables`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...generated.tuning import Rule
from ..kernels.plan import Kernel
from .triton_flat import is_points
from .triton_launch import Launch

FEW = 8  # members at most that a tree finds
MEMBERS = 512  # of a group at most: a program looks at all of them at once
ARGUMENTS = 512 - 2  # 64-bit numbers that all devices take (4 KB), without Triton's own two
UNIT = 16  # points: with a multiple of it a mask is the same for all that a thread loads at once
LAST = 1 << 62  # more than any number of programs
FILL = 448  # numbers that one launch writes into a table
FILL_NAME = "fill_table"


@dataclass(frozen=True)
class Members:
    """How a kernel for `count` others is written. unit: their numbers of points are told in so many. table: they are rows of one, and `count`
    is the least power of two that is enough for them.
    """

    count: int
    unit: int
    table: bool = False


@dataclass(frozen=True)
class Group:
    """Kernels that run as one, called `name`, by name; `points` of each, all multiples of `unit`, and the number of addresses of each."""

    name: str
    kernels: tuple[str, ...]
    points: tuple[int, ...]
    unit: int
    pointers: int = 1

    @property
    def table(self) -> bool:
        """Whether its members are rows of a table: they are many, or have more addresses than a kernel has arguments."""
        count = len(self.kernels)
        return count > FEW or count * (self.pointers + 2) > ARGUMENTS

    @property
    def members(self) -> Members:
        count = len(self.kernels)
        return Members(1 << (count - 1).bit_length() if self.table else count, self.unit, self.table)

    def programs(self, span: int) -> int:
        """Programs of `span` points, each member's own."""
        return sum(-(-n // span) for n in self.points)

    def numbers(self, span: int) -> list[int]:
        """What stands beside the addresses: each member's number of points, in units, and its first program."""
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


def arguments(pointers: int, members: Members) -> list[str]:
    """A table and how many members it has; or addresses of each member, numbers of points, first programs."""
    if members.table:
        return ["table", "members"]
    numbered = range(members.count)
    addresses = [f"p{k}_{i}" for k in numbered for i in range(pointers)]
    return [*addresses, *(f"points{k}" for k in numbered), *(f"first{k}" for k in numbered)]


def constants(members: Members | None) -> list[str]:
    """What a kernel is compiled for. ALIGNED: addresses in a table are multiples of it."""
    return [
        "XBLOCK: tl.constexpr",
        "RBLOCK: tl.constexpr",
        *(["ALIGNED: tl.constexpr"] * (members is not None and members.table)),
    ]


def selection(buffers: Sequence[str], types: Sequence[str], members: Members) -> list[str]:
    """Lines that give each of `buffers`, of elements of so many `types`, the address that it has for this program's member, and the member's
    `points` and `first` program.
    """
    start = ["program = tl.program_id(0)"]
    if not members.table:
        return [*start, *_tree(buffers, 0, members.count)]
    return [
        *start,
        f"each = tl.arange(0, {members.count})",
        f"firsts = tl.load(table + members + each, each < members, {LAST})",
        "member = tl.sum((firsts <= program).to(tl.int32), 0) - 1",
        "points = tl.load(table + member)",
        "first = tl.load(table + members + member)",
        f"addresses = table + 2 * members + member * {len(buffers)}",
        *(
            f"{b} = tl.multiple_of(tl.load(addresses + {i}).to(tl.pointer_type({t})), ALIGNED)"
            for i, (b, t) in enumerate(zip(buffers, types, strict=True))
        ),
    ]


def fill_source() -> str:
    """The Triton module of a kernel that writes FILL numbers, its arguments, into memory."""
    numbers = [f"n{k}" for k in range(FILL)]
    lines = [
        "import triton",
        "import triton.language as tl",
        "",
        "",
        "@triton.jit",
        f"def {FILL_NAME}({', '.join(['table', *numbers, *constants(None)])}):",
        *(f"    tl.store(table + {k}, {n})" for k, n in enumerate(numbers)),
    ]
    return "\n".join(lines) + "\n"


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


def _tree(buffers: Sequence[str], start: int, end: int) -> list[str]:
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


__all__ = [
    "FILL",
    "FILL_NAME",
    "Group",
    "Members",
    "arguments",
    "blocks_of",
    "can_join",
    "constants",
    "fill_source",
    "selection",
    "steps",
    "unit_of",
]
