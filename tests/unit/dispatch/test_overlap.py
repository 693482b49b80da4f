"""Overlap is decided on layouts: never a wrong no (against brute force), and a no where programs need it."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from opforge.runtime.dispatch.storage.overlap import can_view, inside, is_dense, may_overlap, overlaps_itself
from opforge.runtime.dispatch.storage.regions import Layout


def layout(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, dtype: torch.dtype = torch.float32
) -> Layout:
    return Layout(dtype, size, stride, offset)


def elements(a: Layout) -> list[int]:
    indices = itertools.product(*(range(n) for n in a.size))
    return [a.offset + sum(i * s for i, s in zip(index, a.stride, strict=True)) for index in indices]


def bytes_of(a: Layout) -> set[int]:
    n = a.dtype.itemsize
    return {e * n + k for e in elements(a) for k in range(n)}


def random_layout(rng: random.Random) -> Layout:
    dims = rng.randint(0, 3)
    size = tuple(rng.choice((0, 1, 2, 3, 4)) if rng.random() < 0.9 else 5 for _ in range(dims))
    stride = tuple(rng.choice((0, 1, 2, 3, 4, 6, 8, 12)) for _ in range(dims))
    return layout(size, stride, rng.randint(0, 20), rng.choice((torch.float32, torch.int32, torch.int16)))


def test_never_a_wrong_no() -> None:
    rng = random.Random(0)
    decided = 0
    for _ in range(4000):
        a, b = random_layout(rng), random_layout(rng)
        if not may_overlap(a, b):
            decided += 1
            assert not bytes_of(a) & bytes_of(b), (a, b)
        if not overlaps_itself(a):
            assert len(set(elements(a))) == len(elements(a)), a
        if is_dense(a) and elements(a):
            assert sorted(elements(a)) == list(range(a.offset, a.offset + len(elements(a)))), a
        if elements(a) and elements(b):
            within = min(bytes_of(b)) <= min(bytes_of(a)) and max(bytes_of(a)) <= max(bytes_of(b))
            assert inside(a, b) == within, (a, b)
    assert decided > 400


APART = {
    "ranges": (layout((8,), (1,)), layout((4,), (1,), 8)),
    "columns": (layout((4, 3), (6, 1)), layout((4, 3), (6, 1), 3)),
    "one column": (layout((4,), (6,), 2), layout((4, 2), (6, 1), 3)),
    "even and odd": (layout((4,), (2,)), layout((4,), (2,), 1)),
    "heads": (layout((2, 4, 8), (96, 24, 1)), layout((2, 4, 8), (96, 24, 1), 8)),
    "transposed columns": (layout((3, 4), (1, 6)), layout((4, 3), (6, 1), 3)),
    "empty": (layout((0,), (1,)), layout((4,), (1,))),
}


@pytest.mark.parametrize("name", sorted(APART))
def test_apart(name: str) -> None:
    a, b = APART[name]
    assert not may_overlap(a, b)
    assert not may_overlap(b, a)


def test_dense() -> None:
    assert is_dense(layout((3, 4), (1, 3)))
    assert is_dense(layout((1, 4), (77, 1)))
    assert not is_dense(layout((3, 4), (8, 1)))
    assert not is_dense(layout((3, 4), (0, 1)))


def test_views_as_eager_makes_them() -> None:
    """All layouts of three small dimensions (some repeated, some with gaps) in all shapes of as many elements."""
    memory, refused = torch.zeros(4096), 0
    for size in itertools.product((0, 1, 2, 4), repeat=3):
        total = math.prod(size)
        shapes = [s for n in (1, 2, 3) for s in itertools.product((1, 2, 4, 8, 16), repeat=n) if math.prod(s) == total]
        for stride in itertools.product((0, 1, 2, 4, 8), repeat=3):
            t = memory.as_strided(size, stride)
            for shape in [*shapes, (-1,), (-1, 2), (1, -1, 1)]:
                if -1 in shape and (total == 0 or total % (shape[-1] if len(shape) == 2 else 1)):
                    continue
                try:
                    t.view(shape)
                    seen = True
                except RuntimeError:
                    seen, refused = False, refused + 1
                assert can_view(Layout.of(t), shape) == seen, (size, stride, shape)
    assert refused > 10000
