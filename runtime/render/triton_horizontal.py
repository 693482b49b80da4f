"""Horizontal fusion: kernels of equal text as one. A program finds out which member it computes, and runs the text for RBLOCK blocks of XBLOCK
points, one after another.

Few members are found by a tree of comparisons over the kernel's arguments. It is cheap to set up and slow to run: compilers turn it into selections
among all addresses, which take as long as some thousand elements do. More members are in a pointer table in the device's memory: each member's
number of points, then each one's first program, then the addresses of each. A program counts the members that begin at or before it, and reads its
member's addresses; the launcher keeps the table (`execute.pointer_tables`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tile.horizontal import Members

LAST = 1 << 62  # more than any number of programs
FILL = 448  # numbers that one launch writes into a table
FILL_NAME = "fill_table"


def arguments(pointers: int, members: Members) -> list[str]:
    """A pointer table and how many members it has; or addresses of each member, numbers of points, first programs."""
    if members.pointer_table:
        return ["table", "members"]
    numbered = range(members.count)
    addresses = [f"p{k}_{i}" for k in numbered for i in range(pointers)]
    return [*addresses, *(f"points{k}" for k in numbered), *(f"first{k}" for k in numbered)]


def constants(members: Members | None) -> list[str]:
    """What a kernel is compiled for. ALIGNED: addresses in a pointer table are multiples of it."""
    return [
        "XBLOCK: tl.constexpr",
        "RBLOCK: tl.constexpr",
        *(["ALIGNED: tl.constexpr"] * (members is not None and members.pointer_table)),
    ]


def selection(buffers: Sequence[str], types: Sequence[str], members: Members) -> list[str]:
    """Lines that give each of `buffers`, of elements of so many `types`, the address that it has for this program's member, and the member's
    `points` and `first` program.
    """
    start = ["program = tl.program_id(0)"]
    if not members.pointer_table:
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


def blocks_of(lines: list[str], members: Members, int64_index: bool) -> list[str]:
    """The lines for each block that a program goes through, with `xindex` and `xmask`."""
    times = "" if members.unit == 1 else f" * {members.unit}"
    short = "" if int64_index else ".to(tl.int32)"
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


__all__ = ["FILL", "FILL_NAME", "arguments", "blocks_of", "constants", "fill_source", "selection"]
