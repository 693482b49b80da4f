"""Sums that keep up with another reduction of their loop, as Triton."""

from __future__ import annotations

from ..tile.passes import Online


def update_online(st: Online, value: str, mask: str, dtype: str, count: str) -> tuple[list[str], list[str], list[str]]:
    """Lines before the loop, inside of it (before those of `st.base`) and after it (after those): an accumulator for each place of a tile.

    value, dtype  the block of the value, and its Triton type.
    count         of points.
    """
    n, block = st.name, "[XBLOCK, RBLOCK]"
    if st.of == "exp":
        before = [f"{n}_acc = tl.full({block}, 0.0, {dtype})"]
        inside = [f"{n}_acc = tl.where({mask}, tp.online_exp({st.base}_acc, {n}_acc, {value}), {n}_acc)"]
        return before, inside, [f"{n} = tp.online_exp_total({st.base}_acc, {n}_acc, {st.base})"]
    if st.of == "apart":
        return [], [], [f"{n} = tp.online_apart_total({st.beside}_mean, {st.base}, {count}, RBLOCK)"]
    before = [
        f"{n}_steps = tl.full([1, 1], 0.0, {dtype})",
        f"{n}_mean = tl.full({block}, 0.0, {dtype})",
        f"{n}_acc = tl.full({block}, 0.0, {dtype})",
    ]
    inside = [
        f"{n}_steps += 1.0",
        f"{n}_new, {n}_squares = tp.online_squares({n}_mean, {n}_acc, {n}_steps, {value})",
        f"{n}_mean = tl.where({mask}, {n}_new, {n}_mean)",
        f"{n}_acc = tl.where({mask}, {n}_squares, {n}_acc)",
    ]
    after = [f"{n} = tp.online_squares_total({n}_mean, {n}_acc, {st.base}, {count}, RBLOCK)"]
    return before, inside, after


__all__ = ["update_online"]
