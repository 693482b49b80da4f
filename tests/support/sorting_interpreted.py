"""Sorts, selections and running extremes by the kernels of a GPU, in Triton's interpreter, bit for bit beside eager's stable sort: a process of its
own, since the interpreter is loaded with Triton.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import opforge

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "float16", "bfloat16", "int8", "int16", "int32", "uint8", "bool")
SHAPES = (((3, 5), 1), ((2, 17, 3), 1))
MORE_SHAPES = (((70,), 0), ((4, 33, 3), 1), ((2, 3, 1), 2), ((17, 6), 0), ((3, 64), -1))
WHOLE = "whole"
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 65504.0)


def check_interpreted(*dtypes: str) -> None:
    """Raises AssertionError with what differs; in all shapes if one of the names is WHOLE."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.support.sorting_interpreted", *dtypes]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]


def numbers(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """With many equal ones, the ends of the dtype, NaN and infinities."""
    if dtype == torch.bool:
        return torch.rand(*shape) > 0.5
    if dtype.is_floating_point:
        x = torch.randn(*shape).round(decimals=1).to(dtype)
        for k, value in enumerate(SPECIAL):
            x.view(-1)[k::11] = value
        return x
    ends = torch.iinfo(dtype)
    x = torch.randint(-9 if ends.min else 0, 10, tuple(shape)).to(dtype)
    x.view(-1)[::5] = ends.max
    x.view(-1)[1::7] = ends.min
    return x


def same(fn: Callable[..., Any], expected: Callable[..., Any], x: Tensor, what: str) -> None:
    """One graph of our kernels, whose results are those of `expected` bit for bit."""
    torch._dynamo.reset()
    opforge.reset_stats()
    found = torch.compile(fn, backend="opforge", fullgraph=True)(x)
    stats = opforge.stats()
    assert not stats["reasons"], (what, stats["reasons"])
    assert not stats["fallbacks"], (what, stats["fallbacks"])
    for ours, eager in zip(found, expected(x), strict=True):
        assert ours.shape == eager.shape, what
        assert ours.dtype == eager.dtype, what
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, eager))
        assert torch.equal(a, b), (what, x, ours, eager)


def sorted_first(x: Tensor, dim: int, descending: bool, k: int | None = None) -> tuple[Tensor, ...]:
    found = torch.sort(x, stable=True, dim=dim, descending=descending)
    return tuple(t if k is None else t.narrow(dim, 0, k) for t in found)


def sorted_by_network(x: Tensor, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    """A sort on a GPU that need not be stable, as eager's kernels do it: up to 32 elements go through a bitonic network of 32, longer rows are
    sorted stably.
    """
    if x.dim() == 0 or x.shape[dim] > 32:
        found = sorted_first(x, dim, descending)
        return found[0], found[1]
    lines = x.movedim(dim, -1)
    rows = lines.reshape(-1, x.shape[dim]).tolist()
    order = torch.tensor([_network(row, descending) for row in rows]).reshape(lines.shape).movedim(-1, dim)
    # Eager's `gather` of bfloat16 writes another NaN than it reads.
    bits = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
    return bits.gather(dim, order).view(x.dtype), order


def _network(row: Sequence[float], descending: bool) -> list[int]:
    """Where the elements of a row come from, by compare and exchange of two at a time."""

    def before(a: int, b: int) -> bool:
        """Whether place a holds an element that has to come before that of place b; NaN is the greatest, what is no element the last."""
        if b >= len(row):
            return True
        if a >= len(row):
            return False
        low, high = (row[b], row[a]) if descending else (row[a], row[b])
        return low < high or (math.isnan(high) and not math.isnan(low))

    order = list(range(32))
    run = 2
    while run <= 32:
        stride = run // 2
        while stride:
            for at in range(32):
                if not at & stride:
                    a, b = order[at], order[at + stride]
                    if before(a, b) == bool(at & run):
                        order[at], order[at + stride] = b, a
            stride //= 2
        run *= 2
    return order[: len(row)]


def _main(names: Sequence[str]) -> None:
    from .interpreted import interpreted

    torch.manual_seed(0)
    shapes = (*SHAPES, *MORE_SHAPES) if WHOLE in names else SHAPES
    dtypes = [name for name in names if name != WHOLE]
    with tempfile.TemporaryDirectory() as folder, interpreted(Path(folder)):
        for name, (shape, dim), reverse in itertools.product(dtypes, shapes, (False, True)):
            x = numbers(getattr(torch, name), shape)
            what = f"{name} {shape} {dim} {reverse}"
            same(
                lambda x, d=dim, r=reverse: (*torch.sort(x, d, r), *torch.sort(x, stable=True, dim=d, descending=r)),
                lambda x, d=dim, r=reverse: (*sorted_by_network(x, d, r), *sorted_first(x, d, r)),
                x,
                f"sort {what}",
            )
            if name == "bool":
                continue
            running = torch.cummax if reverse else torch.cummin
            same(lambda x, d=dim, f=running: f(x, d), lambda x, d=dim, f=running: f(x, d), x, f"running {what}")
            for k in {1, x.shape[dim] // 2 + 1}:
                same(
                    lambda x, d=dim, r=reverse, k=k: torch.topk(x, k, d, r),
                    lambda x, d=dim, r=reverse, k=k: sorted_first(x, d, r, k),
                    x,
                    f"top {k} {what}",
                )


if __name__ == "__main__":
    _main(sys.argv[1:] or (*DTYPES, WHOLE))
