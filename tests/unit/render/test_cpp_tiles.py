"""C++ kernels that read or write across their lanes: whole and partial tiles, every element size, several accesses, masks, sizes at run time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from opforge.runtime.ir.index import Sym, of
from opforge.runtime.ir.nodes import Buffer, Output, Program, contiguous_strides, index_node
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.lower.language.builder import Builder
from opforge.runtime.lower.language.tensor import Tensor
from opforge.runtime.render.cpp_unit import render_unit
from tests.support.loops import agree, cat, permute, plan_of, pointwise, reduce, run, softmax
from tests.support.machines import AVX2


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def add_transposed(b: Any, x: Any, y: Any) -> Any:
    return pointwise(b, s.add, x, permute(b, y, (1, 0)))


def pad_transposed(b: Any, x: Any, y: Any) -> Any:
    """Zeros around the transpose of x, plus y."""
    shape = (x.shape[1] + 5, x.shape[0] + 6)
    i = b.coords(shape)
    rows = s.logical_and(s.ge(index_node(i[0]), 2), s.lt(index_node(i[0]), 2 + x.shape[1]))
    columns = s.logical_and(s.ge(index_node(i[1]), 3), s.lt(index_node(i[1]), 3 + x.shape[0]))
    padded = b.define(shape, b.guarded(s.logical_and(rows, columns), b.at(x, [i[1] - 3, i[0] - 2]), 0.5))
    return pointwise(b, s.add, padded, y)


def triangle(b: Any, x: Any, y: Any) -> Any:
    """The transpose of x where the row is below a limit that y gives, else y: the load is under a mask of both loops."""
    i = b.coords(y.shape)
    here = b.at(y, i)
    return b.define(y.shape, b.guarded(s.gt(here, 0.0), b.at(x, [i[1], i[0]]), here))


def two_layouts(b: Any, x: Any, y: Any) -> Any:
    total = pointwise(b, s.add, x, y)
    return pointwise(b, s.exp, total), permute(b, pointwise(b, s.neg, total), (1, 0))


CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "whole tiles": (add_transposed, lambda: [rand(128, 64), rand(64, 128)]),
    "partial tiles": (add_transposed, lambda: [rand(131, 77), rand(77, 131)]),
    "less than a tile": (add_transposed, lambda: [rand(9, 8), rand(8, 9)]),
    "less than a vector": (add_transposed, lambda: [rand(70, 3), rand(3, 70)]),
    "to channels last": (lambda b, x: permute(b, x, (0, 2, 3, 1)), lambda: [rand(3, 33, 7, 9)]),
    "from channels last": (lambda b, x: permute(b, x, (0, 3, 1, 2)), lambda: [rand(3, 7, 9, 33)]),
    "a copy beside work": (
        lambda b, x, y: (pointwise(b, s.exp, add_transposed(b, x, y)), permute(b, y, (1, 0))),
        lambda: [rand(70, 90), rand(90, 70)],
    ),
    "copy then work": (
        lambda b, x: pointwise(b, s.exp, permute(b, x, (0, 2, 1))),
        lambda: [rand(3, 40, 50)],
    ),
    "several transposed": (
        lambda b, x, y, z: pointwise(
            b, lambda p, q, r: s.mul(s.add(p, q), r), x, permute(b, y, (1, 0)), permute(b, z, (1, 0))
        ),
        lambda: [rand(70, 90), rand(90, 70), rand(90, 70)],
    ),
    "one transposed twice": (
        lambda b, x, y: pointwise(b, lambda p, q: s.mul(s.add(p, q), q), x, permute(b, y, (1, 0))),
        lambda: [rand(70, 90), rand(90, 70)],
    ),
    "two directions": (
        lambda b, x, y, z: pointwise(
            b, lambda p, q, r: s.add(s.mul(p, q), r), permute(b, x, (2, 0, 1)), permute(b, y, (1, 2, 0)), z
        ),
        lambda: [rand(20, 30, 40), rand(30, 40, 20), rand(40, 20, 30)],
    ),
    "written across": (two_layouts, lambda: [rand(70, 90), rand(70, 90)]),
    "a column for each row": (
        lambda b, x, y, z: pointwise(b, lambda p, q, r: s.add(s.mul(p, q), r), x, permute(b, y, (1, 0)), z),
        lambda: [rand(40, 50), rand(50, 40), rand(50)],
    ),
    "bfloat16": (add_transposed, lambda: [rand(100, 70).bfloat16(), rand(70, 100).bfloat16()]),
    "float16 copy": (lambda b, x: permute(b, x, (1, 0)), lambda: [rand(100, 70).half()]),
    "float64": (add_transposed, lambda: [rand(100, 70).double(), rand(70, 100).double()]),
    "mixed": (add_transposed, lambda: [rand(100, 70), rand(70, 100).bfloat16()]),
    "int8": (add_transposed, lambda: [whole(torch.int8, 100, 70), whole(torch.int8, 70, 100)]),
    "int64": (add_transposed, lambda: [whole(torch.int64, 100, 70), whole(torch.int64, 70, 100)]),
    "bool copy": (lambda b, x: permute(b, x, (1, 0)), lambda: [rand(100, 70) > 0]),
    "pad": (pad_transposed, lambda: [rand(40, 50), rand(55, 46)]),
    "under a mask": (triangle, lambda: [rand(40, 50), rand(50, 40)]),
    "concatenate": (
        lambda b, x, y: cat(b, [permute(b, x, (1, 0)), y], 1),
        lambda: [rand(30, 40), rand(40, 33)],
    ),
    "an input with an offset": (add_transposed, lambda: [rand(70, 90), rand(95, 80)[5:, 3:73]]),
    "every second column": (add_transposed, lambda: [rand(70, 90), rand(90, 140)[:, ::2]]),
    "softmax of a sum with a transpose": (
        lambda b, x, y: softmax(b, add_transposed(b, x, y), 1),
        lambda: [rand(70, 90), rand(90, 70)],
    ),
    "softmax of a transpose": (lambda b, x: softmax(b, permute(b, x, (1, 0)), 1), lambda: [rand(130, 90)]),
    "sum of a product with a transpose": (
        lambda b, x, y: reduce(b, "sum", pointwise(b, s.mul, x, permute(b, y, (0, 2, 1))), 2),
        lambda: [rand(3, 50, 90).bfloat16(), rand(3, 90, 50).bfloat16()],
    ),
    "argmax beside a transpose": (
        lambda b, x, y: reduce(b, "argmax", add_transposed(b, x, y), 1),
        lambda: [rand(70, 90), rand(90, 70)],
    ),
    "empty": (add_transposed, lambda: [rand(0, 20), rand(20, 0)]),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str) -> None:
    build, inputs = CASES[name]
    agree(run(build, inputs()))


@pytest.mark.parametrize(
    "name", ["partial tiles", "written across", "bfloat16", "int8", "int64", "pad", "softmax of a sum with a transpose"]
)
@pytest.mark.parametrize("lanes", [4, 16])
def test_kernel_with_other_lane_counts(name: str, lanes: int) -> None:
    build, inputs = CASES[name]
    agree(run(build, inputs(), lanes=lanes))


@pytest.mark.parametrize(
    ("name", "arrays", "turns"),
    [
        ("whole tiles", 1, 1),
        ("to channels last", 0, 1),  # straight from the one layout to the other
        ("a copy beside work", 1, 1),
        ("several transposed", 2, 2),
        ("one transposed twice", 1, 1),
        ("under a mask", 0, 0),
        ("less than a vector", 0, 0),
        ("softmax of a sum with a transpose", 1, 1),
        ("sum of a product with a transpose", 1, 1),
    ],
)
def test_what_is_turned_round(name: str, arrays: int, turns: int) -> None:
    build, inputs = CASES[name]
    source = run(build, inputs()).source
    assert len(re.findall(r"(?:transposed|strips)\d+\[", source)) == arrays
    assert source.count("transpose(") == turns


def test_whole_tiles_have_no_remainder() -> None:
    build, inputs = CASES["whole tiles"]
    assert "live" not in run(build, inputs()).source


def test_sizes_known_at_run_time() -> None:
    m, n = of(Sym("m", 100)), of(Sym("n", 60))
    b = Builder({}, {})
    x, y = Buffer("x", (m, n), "float32", (n, 1)), Buffer("y", (n, m), "float32", (m, 1))
    out = add_transposed(b, *(Tensor(t.name, t.shape, t.dtype, b) for t in (x, y)))
    program = Program((x, y), b.items, (Output(out.name, contiguous_strides(out.shape)),), symbols=("m", "n"))
    source = render_unit(plan_of(program), AVX2, threads=2, threshold=1000).source
    assert source.count("transpose(") == 1
    assert "_t < m;" in source
