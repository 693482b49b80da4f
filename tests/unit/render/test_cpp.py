"""C++ kernels against the reference interpreter: every loop shape, tails, dtypes, layouts. The plan of each is proved by the checker."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from opforge.runtime.ir.nodes import index_node
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.tile.loops import flatten
from opforge.runtime.tile.pieces import split_kernel
from tests.support.loops import agree, cat, permute, pointwise, reduce, run, softmax, view


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def embedding(b: Any, w: Any, idx: Any) -> Any:
    shape = [*idx.shape, w.shape[1]]
    i = b.coords(shape)
    return b.define(shape, b.at(w, [b.index_of(b.at(idx, i[:-1]), w.shape[0]), i[-1]]))


def gather(b: Any, w: Any, idx: Any) -> Any:
    i = b.coords(idx.shape)
    return b.define(idx.shape, b.at(w, [i[0], b.index_of(b.at(idx, i), w.shape[1])]))


def gather_best(b: Any, x: Any) -> Any:
    best = reduce(b, "argmax", x, 1, True)
    i = b.coords(best.shape)
    return b.define(best.shape, b.at(x, [i[0], b.index_of(b.at(best, i), x.shape[1]), *i[2:]]))


def gather_best_computed(b: Any, x: Any) -> Any:
    """What is computed lives in a scratch tile, of which each lane takes an element of its own."""
    return gather_best(b, pointwise(b, s.exp, x))


def index_add(b: Any, x: Any, idx: Any, src: Any) -> Any:
    r = b.rcoords(src.shape)
    return b.scatter(x, r, b.at(src, r), [b.index_of(b.at(idx, [r[0]]), x.shape[0]), r[1]], "sum")


def pad(b: Any, x: Any) -> Any:
    shape = (x.shape[0] + 4, x.shape[1] + 6)
    i = b.coords(shape)
    rows = s.logical_and(s.ge(index_node(i[0]), 2), s.lt(index_node(i[0]), 2 + x.shape[0]))
    columns = s.logical_and(s.ge(index_node(i[1]), 3), s.lt(index_node(i[1]), 3 + x.shape[1]))
    return b.define(shape, b.guarded(s.logical_and(rows, columns), b.at(x, [i[0] - 2, i[1] - 3]), 0.5))


def max_pool(b: Any, x: Any) -> Any:
    shape = (x.shape[0], x.shape[1] // 2, x.shape[2] // 2)
    i, r = b.coords(shape), b.rcoords((2, 2))
    return b.reduce("max", shape, r, b.at(x, [i[0], i[1] * 2 + r[0], i[2] * 2 + r[1]]))


def first_totals(b: Any, x: Any) -> Any:
    """One row of cumulative sums of columns: the sums themselves live in a scratch tile, a vector for each row."""
    totals = b.scan("sum", x.shape, 0, b.at(x, b.coords(x.shape)))
    i = b.coords((x.shape[1],))
    return b.define((x.shape[1],), b.at(totals, [1, i[0]]))


def layer_norm(b: Any, x: Any) -> Any:
    n = x.shape[-1]
    mean = pointwise(b, lambda a: s.div(a, float(n)), reduce(b, "sum", x, -1, True))
    d = pointwise(b, s.sub, x, mean)
    var = reduce(b, "sum", pointwise(b, lambda a: s.mul(a, a), d), -1, True)
    return pointwise(b, lambda a, v: s.mul(a, s.rsqrt(s.add(s.div(v, float(n)), 1e-5))), d, var)


def exp_sum_neg(b: Any, x: Any) -> Any:
    e = pointwise(b, s.exp, x)
    return e, reduce(b, "sum", e, 1), pointwise(b, s.neg, e)


def two_losses(b: Any, x: Any, y: Any) -> Any:
    """A difference that one sum reads at several places of its expression, and another sum of the same points."""
    d = pointwise(b, s.sub, x, y)
    size = pointwise(b, s.abs, d)
    near = pointwise(b, lambda a: s.mul(s.mul(a, a), 0.5), size)
    far = pointwise(b, lambda a: s.sub(a, 0.5), size)
    huber = pointwise(b, lambda a, c, e: s.where(s.le(a, 1.0), c, e), size, near, far)
    square = pointwise(b, lambda a: s.mul(a, a), d)
    return pointwise(b, s.add, reduce(b, "sum", huber, [0, 1]), reduce(b, "sum", square, [0, 1]))


def product_and_its_sum(b: Any, x: Any, y: Any) -> Any:
    d = pointwise(b, s.mul, x, y)
    return d, reduce(b, "sum", d, [0, 1])


CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "broadcast": (lambda b, x, y: pointwise(b, s.add, x, y), lambda: [rand(7, 13), rand(13)]),
    "transcendental": (lambda b, x: pointwise(b, lambda a: s.mul(s.erf(a), s.tanh(a)), x), lambda: [rand(64, 129)]),
    "softmax rows": (lambda b, x: softmax(b, x, -1), lambda: [rand(33, 129)]),
    "softmax few long rows": (lambda b, x: softmax(b, x, -1), lambda: [rand(2, 40000)]),
    "softmax middle": (lambda b, x: softmax(b, x, 1), lambda: [rand(5, 33, 17)]),
    "softmax long columns": (lambda b, x: softmax(b, x, 0), lambda: [rand(200, 33)]),
    "softmax long columns of whole vectors": (lambda b, x: softmax(b, x, 0), lambda: [rand(200, 64)]),
    "layer norm": (layer_norm, lambda: [rand(31, 100)]),
    "layer norm over a view": (lambda b, x: layer_norm(b, view(b, x, (2, 8, 40))), lambda: [rand(16, 40)]),
    "sum of all": (lambda b, x: reduce(b, "sum", x, (0, 1)), lambda: [rand(500, 333)]),
    "sum of columns": (lambda b, x: reduce(b, "sum", x, 0), lambda: [rand(500, 333)]),
    "sum of columns in registers": (lambda b, x: reduce(b, "sum", x, 0), lambda: [rand(500, 64)]),
    "sum of outer two": (lambda b, x: reduce(b, "sum", x, (0, 1)), lambda: [rand(50, 33, 48)]),
    "sum of first and last": (lambda b, x: reduce(b, "sum", x, (0, 2)), lambda: [rand(50, 33, 48)]),
    "max middle": (lambda b, x: reduce(b, "max", x, 1), lambda: [rand(50, 33, 48)]),
    "argmax rows": (lambda b, x: reduce(b, "argmax", x, 1), lambda: [rand(50, 333)]),
    "argmax all": (lambda b, x: reduce(b, "argmax", x, (0, 1)), lambda: [rand(50, 333)]),
    "argmax ties": (lambda b, x: reduce(b, "argmax", x, 1), lambda: [integers(3, 50, 333).float()]),
    "argmin columns": (lambda b, x: reduce(b, "argmin", x, 0), lambda: [rand(150, 33)]),
    "argmax long": (lambda b, x: reduce(b, "argmax", x, 0), lambda: [rand(100000)]),
    "any": (lambda b, x: reduce(b, "any", x, 1), lambda: [rand(50, 333) > 3]),
    "transpose and add": (
        lambda b, x, y: pointwise(b, s.add, permute(b, x, (1, 0)), y),
        lambda: [rand(70, 130), rand(130, 70)],
    ),
    "concatenate columns": (
        lambda b, x, y: cat(b, [pointwise(b, s.exp, x), y, x], 1),
        lambda: [rand(7, 13), rand(7, 20)],
    ),
    "concatenate rows": (
        lambda b, x, y: cat(b, [pointwise(b, s.exp, x), y, x], 0),
        lambda: [rand(7, 13), rand(20, 13)],
    ),
    "bfloat16": (lambda b, x: softmax(b, x, 1), lambda: [rand(16, 41).bfloat16()]),
    "float16": (lambda b, x: softmax(b, x, 1), lambda: [rand(16, 41).half()]),
    "float64": (lambda b, x: softmax(b, x, 1), lambda: [rand(16, 41).double()]),
    "mixed integers": (
        lambda b, x, y: pointwise(b, s.mul, x, y),
        lambda: [integers(9, 5, 17), integers(9, 5, 17, low=-9, dtype=torch.int32)],
    ),
    "comparison": (lambda b, x, y: pointwise(b, s.lt, x, y, promote="bool"), lambda: [rand(5, 17), rand(5, 17)]),
    "embedding": (embedding, lambda: [rand(50, 37), integers(50, 4, 9, low=-50)]),
    "gather": (gather, lambda: [rand(50, 37), integers(37, 50, 9)]),
    "cumulative rows": (lambda b, x: b.scan("sum", x.shape, 1, b.at(x, b.coords(x.shape))), lambda: [rand(50, 333)]),
    "cumulative columns": (lambda b, x: b.scan("sum", x.shape, 0, b.at(x, b.coords(x.shape))), lambda: [rand(50, 33)]),
    "cumulative columns, one row": (first_totals, lambda: [rand(3, 33)]),
    "best of computed columns": (gather_best_computed, lambda: [rand(4, 3, 21)]),
    "best of long computed columns": (gather_best_computed, lambda: [rand(3, 200, 21)]),
    "gather by an index of each lane": (gather_best, lambda: [rand(2, 4, 6, 6)]),
    "gather by an index of each lane, channels last": (
        gather_best,
        lambda: [rand(2, 4, 6, 6).to(memory_format=torch.channels_last)],
    ),
    "index add": (index_add, lambda: [rand(50, 33), integers(50, 70), rand(70, 33)]),
    "pad": (pad, lambda: [rand(10, 21)]),
    "pool": (max_pool, lambda: [rand(3, 20, 32)]),
    "three outputs": (exp_sum_neg, lambda: [rand(10, 21)]),
    "two losses": (two_losses, lambda: [rand(40, 50), rand(40, 50)]),
    "product and its sum": (product_and_its_sum, lambda: [rand(40, 50), rand(40, 50)]),
    "sums of the columns of a concatenation": (
        lambda b, x, y: reduce(b, "sum", cat(b, [x, y, x], 1), 0),
        lambda: [rand(40, 21), rand(40, 13)],
    ),
    "concatenation and sums of its columns": (
        lambda b, x, y: (c := cat(b, [x, y], 1), reduce(b, "sum", c, 0)),
        lambda: [rand(70, 24), rand(70, 40)],
    ),
    "softmax over rows of a concatenation": (
        lambda b, x, y: softmax(b, cat(b, [x, y], 1), 0),
        lambda: [rand(40, 21), rand(40, 13)],
    ),
    "softmax of a concatenation": (
        lambda b, x, y: softmax(b, cat(b, [x, y], 1), 1),
        lambda: [rand(9, 21), rand(9, 13)],
    ),
    "empty": (lambda b, x: pointwise(b, s.exp, x), lambda: [rand(0, 5)]),
    "sum of nothing": (lambda b, x: reduce(b, "sum", x, 0), lambda: [rand(0, 5)]),
    "no dimensions": (lambda b, x: pointwise(b, s.exp, x), lambda: [torch.tensor(2.0)]),
    "permuted input": (lambda b, x: softmax(b, x, 1), lambda: [rand(8, 9, 10).permute(2, 0, 1)]),
    "expanded input": (lambda b, x: pointwise(b, s.exp, x), lambda: [rand(8, 1).expand(8, 20)]),
    "input with an offset": (lambda b, x: softmax(b, x, 1), lambda: [rand(12, 30)[3:, 5:21]]),
    "channels last": (lambda b, x: softmax(b, x, 1), lambda: [rand(2, 8, 5, 7).to(memory_format=torch.channels_last)]),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str) -> None:
    build, inputs = CASES[name]
    agree(run(build, inputs()))


@pytest.mark.parametrize(
    "name",
    [
        "softmax rows",
        "sum of columns",
        "pool",
        "concatenate columns",
        "argmax rows",
        "gather",
        "cumulative columns",
        "best of computed columns",
    ],
)
@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_kernel_with_other_lane_counts(name: str, lanes: int) -> None:
    build, inputs = CASES[name]
    agree(run(build, inputs(), lanes=lanes))


@pytest.mark.parametrize("name", ["layer norm over a view", "three outputs", "softmax middle", "concatenate rows"])
def test_without_fusion(name: str) -> None:
    build, inputs = CASES[name]
    agree(run(build, inputs(), fusion=False))


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("layer norm over a view", 1),
        ("softmax rows", 1),
        ("softmax middle", 1),
        ("three outputs", 1),
        ("two losses", 1),
        ("product and its sum", 1),
        ("concatenate columns", 1),
        ("transpose and add", 1),
    ],
)
def test_fused_into_one_kernel(name: str, kernels: int) -> None:
    build, inputs = CASES[name]
    assert len(run(build, inputs()).plan.kernels()) == kernels


def test_nan_wins_in_max_and_argmax() -> None:
    x = rand(5, 40)
    x[2, 7] = x[2, 30] = float("nan")
    ran = run(lambda b, t: (reduce(b, "max", t, 1), reduce(b, "argmax", t, 1)), [x])
    assert torch.equal(ran.got[0].isnan(), x.amax(1).isnan())
    assert torch.equal(ran.got[1], x.argmax(1))


def test_a_concatenation_of_many_is_a_loop_for_each() -> None:
    ran = run(
        lambda b, x: cat(b, [pointwise(b, lambda a, k=k: s.add(a, float(k)), x) for k in range(100)], 0), [rand(4, 6)]
    )
    agree(ran)
    (kernel,) = ran.plan.kernels()
    assert len(split_kernel(flatten(kernel, dict(ran.plan.layouts)))) == 100


@pytest.mark.parametrize("lanes", [1, 8, 16])
def test_long_float64_sums_keep_what_their_totals_lose(lanes: int) -> None:
    """There is no wider type for the totals: of rows that do not lie one after the other, each is one step of them."""
    x = (rand(4000, 9, 2).double() + 5)[..., 0]
    ran = run(lambda b, t: reduce(b, "sum", t, (0, 1)), [x], lanes=lanes)
    assert "add_exactly" in ran.source
    exact = math.fsum(x.flatten().tolist())
    assert abs(ran.got[0].item() - exact) <= 2 * math.ulp(exact)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_long_float64_sums_of_what_is_not_finite(value: float) -> None:
    x = rand(400, 9, 2).double()[..., 0]
    x[200, 1] = value
    ran = run(lambda b, t: reduce(b, "sum", t, (0, 1)), [x])
    assert "add_exactly" in ran.source
    (got,) = ran.got
    assert got.isnan().all() if math.isnan(value) else got.item() == value
