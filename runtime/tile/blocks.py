"""Block sizes of Triton kernels, out of the tables of specs/tuning, and the ones next to them that `max_autotune` tries."""

from __future__ import annotations

from collections.abc import Sequence

from ...generated.tuning import Rule, Tuning
from ..machine import tuning_of
from .horizontal import steps
from .launch import Launch

UNKNOWN = 1 << 30  # points of a loop whose extent is a symbol
Blocks = tuple[int, int, int]
"""XBLOCK, RBLOCK, warps."""


def kind_of(shape: Launch) -> str:
    """The kind of a kernel in the tuning tables, by its launch."""
    if shape.attention:
        return "attention"
    if shape.product:
        return "product"
    if shape.inner == 1 or shape.gathers:
        return "pointwise"
    if shape.transpose:
        return "transpose"
    if shape.outer_reduction:
        return "outer_reduction" if shape.persistent else "looped_outer_reduction"
    if shape.persistent:
        return "persistent_reduction"
    return "looped_reduction" if shape.passes < 2 else "multi_pass_reduction"


def rule_of(shape: Launch, tuning: Tuning) -> Rule:
    """The first rule of the table that holds."""
    return next(rule for rule in tuning.rules[kind_of(shape)] if _holds(rule, shape))


def _holds(rule: Rule, shape: Launch) -> bool:
    limits = (
        (rule.points, _extents(shape)[1]),
        (rule.loads, shape.loads),
        (rule.bytes, shape.bytes),
        (rule.row, shape.row),
        (rule.buffers, shape.rows),
        (rule.block, shape.product),
    )
    wanted = ((rule.strided, shape.strided), (rule.sums, shape.sums), (rule.alignment_groups, shape.alignment_groups))
    if any(asked and not found for asked, found in wanted) or shape.cost < rule.cost:
        return False
    return all(not most or found <= most for most, found in limits)


def blocks(shape: Launch, tuning: Tuning | None = None) -> Blocks:
    """XBLOCK, RBLOCK and the number of warps, by the table of a GPU."""
    if shape.tile is not None:
        return shape.tile
    rule = rule_of(shape, tuning or tuning_of())
    inner, outer = _extents(shape)
    x, r = power(outer), power(inner)
    x, r = min(x, rule.x or x), min(r, rule.r or r)
    while outer < rule.programs * x and x > rule.least:
        x //= 2
    if rule.tile and shape.persistent:
        x = max(1, min(x, rule.tile // r))  # the tile holds whole rows: fewer of them
    elif rule.tile:
        r = max(1, min(r, rule.tile // x))
    if rule.even and rule.even <= shape.even < r:
        r = shape.even
    return x, r, max(1, min(rule.warps, x * r // (shape.gpu.limits.warp * rule.each))) if rule.each else rule.warps


def group_rule(tuning: Tuning, table: bool = False) -> Rule:
    """Of horizontally fused kernels, whose programs go through several blocks."""
    return tuning.rules["horizontal_table" if table else "horizontal"][0]


def group_blocks(points: Sequence[int], table: bool, shape: Launch, tuning: Tuning) -> Blocks:
    """Of horizontally fused kernels of so many points, found by a tree or in a pointer table. shape: of the longest."""
    rule = group_rule(tuning, table)
    many = steps(points, rule)
    if many > 1 or not table:
        return (rule.x, many, rule.warps) if many > 1 else blocks(shape, tuning)
    x = min(rule.x, power(max(points)))
    return x, 1, max(1, rule.warps * x // rule.x)


def most_points(size: int, tuning: Tuning) -> int:
    """XBLOCK of kernels without inner loops, at most, whose smallest elements have `size` bytes."""
    return max(rule.x for rule in tuning.rules["pointwise"] if not rule.bytes or size <= rule.bytes)


def neighbours(start: Blocks, shape: Launch, points: int, *, wide: bool = False) -> list[Blocks]:
    """The blocks themselves, then those with half and twice as many points, steps or warps, as far as the kernel can be launched with them.

    points  beyond which more points of a block gain nothing (where its programs choose a branch: with which it would be wrong).
    wide    all combinations of them, and a quarter: for measuring a table.
    """
    x, r, w = start
    if wide:
        loop = not shape.persistent and not shape.product
        some = (1, 0.5, 2, 0.25)
        found = [(x * a, r * b, w * c) for a in (1, 0.5, 2, 1 if loop else 4) for b in some for c in some]
    else:
        # One of them, or two so that a thread has as many elements as before.
        found = [(x * a, r * b, w * c) for f in (1, 0.5, 2) for a, b, c in _steps(f)]
    whole = [(int(a), int(b), int(c)) for a, b, c in found if a >= 1 and b >= 1 and c >= 1]
    fit = [b for b in whole if _fits(b, start, shape, points)]
    return list(dict.fromkeys([start, *fit]))


def _steps(f: float) -> tuple[tuple[float, float, float], ...]:
    return (f, 1, 1), (1, f, 1), (1, 1, f), (f, 1, f), (1, f, f)


def _fits(found: Blocks, start: Blocks, shape: Launch, points: int) -> bool:
    x, r, w = found
    inner, outer = _extents(shape)
    limits = shape.gpu.limits
    if (
        not limits.warp * w <= x * r <= shape.gpu.budgets.tile
        or w > limits.warps
        or x > max(start[0], min(points, power(outer)))
    ):
        return False
    if shape.attention:
        edge = limits.mma.edge
        return edge <= x <= shape.gpu.tuning.attention.rows and edge <= r <= max(start[1], power(inner))
    if shape.product:
        contraction = shape.gpu.tuning.contraction
        most = contraction.wide_edge if shape.alignment_groups else contraction.edge
        return limits.mma.edge <= x <= most and limits.mma.steps <= r <= max(start[1], power(inner))
    # A tile that holds whole rows must go on to do so; of other loops it is a part.
    return r == start[1] if shape.persistent else r <= max(start[1], power(inner))


def _extents(shape: Launch) -> tuple[int, int]:
    return (
        # A gathering loop takes one step at a time: all threads of a row wait for its position.
        1 if shape.gathers else shape.inner if isinstance(shape.inner, int) else UNKNOWN,
        shape.outer if isinstance(shape.outer, int) else UNKNOWN,
    )


def power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(n - 1, 0).bit_length()


__all__ = [
    "Blocks",
    "blocks",
    "group_blocks",
    "group_rule",
    "kind_of",
    "most_points",
    "neighbours",
    "rule_of",
]
