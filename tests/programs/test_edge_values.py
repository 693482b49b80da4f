"""Values and errors at the edges of the dtypes: a compiled operator gives eager's numbers, or raises what eager raises.

All programs are compiled through Dynamo. The values stand where an easier formula would overflow, lose a sign, or miss a rounding that eager
makes; the errors are those of dtypes that eager's kernels refuse (such calls run by those kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opforge  # noqa: F401

L = torch.tensor
INF = float("inf")
HALF, BRAIN, INT8 = torch.float16, torch.bfloat16, torch.int8
PLAIN = torch.arange(-6.0, 6.0).reshape(3, 4) / 7
Program = Callable[..., Any]


def compiled(program: Program, *args: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(program, backend="opforge")(*args)


VALUES: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "norms of one element": (
        lambda x: (torch.linalg.vector_norm(x, 2, 1), torch.linalg.vector_norm(x, 3, 1), F.normalize(x, dim=1)),
        (L([[2e38], [1e-30], [-3e19]]),),
    ),
    "renorm of one element": (lambda x: torch.renorm(x, 2, 0, 1.0), (L([[3e38], [1e-30]]),)),
    "products over dimensions in any order": (
        lambda x: [torch.ops.prims.prod(x, d) for d in ([2, 0], [2, 1], [1, 0], [2, 1, 0])],
        (torch.arange(1.0, 25.0).reshape(2, 3, 4) / 10,),
    ),
    "lcm int8": (torch.lcm, (L([64, -128, 100], dtype=INT8), L([3, 5, 7], dtype=INT8))),
    "ldexp up": (torch.ldexp, (L([0.0, -0.0, 1e-30, 1e-38]), L([200, 32767, 150, 130], dtype=torch.int32))),
    "ldexp down": (torch.ldexp, (L([1e30, 3e38, 3e-38]), L([-160, -200, -20], dtype=torch.int32))),
    "ldexp far": (torch.ldexp, (L([1.0, 2.0]), L([2**33 + 1, -(2**40)]))),
    "ldexp half": (torch.ldexp, (L([0.0, 1.5, 1.0], dtype=HALF), L([200, 3, -20]))),
    "sqrt as a power": (lambda x: (x**0.5, x**-0.5), (L([-INF, -0.0, 4.0], dtype=HALF),)),
    "nextafter promoted": (torch.nextafter, (L([70000, 3, 0], dtype=torch.int32), L([2.0, 9.0, -1.0], dtype=HALF))),
    "remainder number": (lambda x: (x % 0.7, torch.fmod(x, 0.7)), (L([65504.0, 1000.0, 20.0, 7.0], dtype=HALF),)),
    "number first": (lambda x: (0.7 // x, torch.remainder(0.7, x)), (L([-0.349609375, 0.349609375], dtype=BRAIN),)),
    "xlogy number": (lambda x: torch.xlogy(x, 1e-30), (L([1.0, 2.0, 0.0], dtype=HALF),)),
    "addcdiv order": (lambda a, b, c: torch.ops.aten.addcdiv(a, b, c, value=2), (L([0.0]), L([2e38]), L([1.5]))),
    "addcdiv tiny": (lambda a, b, c: torch.ops.aten.addcdiv(a, b, c, value=1e30), (L([0.0]), L([1e-30]), L([1e30]))),
    "var_mean of infinity": (torch.var_mean, (L([INF, 1.0, 2.0]),)),
    "var_mean of one infinity": (lambda x: torch.var_mean(x, 0, correction=0), (L([[INF, 1.0]]),)),
    "std near the end of the range": (torch.std, (L([1.5e38, -1.5e38, 1e38]),)),
    "std_mean of tiny numbers": (torch.std_mean, (L([1e-30, -2e-30, 4e-30]),)),
    "variance of one outlier": (torch.var, (torch.cat((L([3e19]), torch.zeros(99))),)),
    "nansum over no dimensions, with a dtype": (lambda x: x.nansum(dim=(), dtype=torch.float64), (PLAIN,)),
    "nansum over no dimensions": (lambda x: x.nansum(dim=()), (PLAIN,)),
    "nanmean over no dimensions": (lambda x: x.nanmean(dim=(), keepdim=True), (PLAIN,)),
    "sum of one negative zero": (lambda x: (1 / x.sum(1), 1 / x.cumsum(1)), (L([[-0.0], [0.0]]),)),
    "sum of a window of negative zeros": (lambda x: 1 / F.avg_pool1d(x, 2, 1), (L([[-0.0, -0.0, 0.0]]),)),
    "large integer to a power": (lambda x: (x**1.7, x**-0.3), (L([2**63 - 1, 5]),)),
    "threshold of a large integer": (lambda x: F.threshold(x, -1, 7), (L([2**62 + 1, -5]),)),
    "ldexp of integers": (torch.ldexp, (L([3, 0, 2**40]), L([2**63 - 1, 200, -3]))),
    "gradient of resizing by lines, beside a NaN": (
        lambda g: torch.ops.aten.upsample_linear1d_backward(g, [9], [1, 1, 5], False),
        (L([[[1.0, 2.0, float("nan"), 4.0, 5.0, 6.0, INF, 8.0, 9.0]]]),),
    ),
    "gradient of resizing in two dimensions, beside a NaN": (
        lambda g: torch.ops.aten.upsample_bilinear2d_backward(g, [7, 9], [1, 1, 4, 5], True),
        (torch.arange(63.0).reshape(1, 1, 7, 9).index_fill(3, L(4), float("nan")),),
    ),
    "max of booleans": (lambda x: x.max(0), (L([False, True, True]),)),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_at_the_edges(name: str) -> None:
    program, args = VALUES[name]
    torch.testing.assert_close(compiled(program, *args), program(*args), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, HALF])
def test_signs_of_zeros(dtype: torch.dtype) -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        return [x - 0.0, x - (-0.0), x + 0.0, x + (-0.0), x * 0.0, x * -0.0, F.elu(x, -2.0), F.elu(x, 2.0)]

    x = L([-0.0, 0.0, 1.0], dtype=dtype)
    for mine, eager in zip(compiled(program, x), program(x), strict=True):
        assert torch.equal(mine, eager)
        assert torch.equal(mine.signbit(), eager.signbit())


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_half_quotients_are_rounded_as_eager_rounds_them(dtype: torch.dtype) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        modes = ("trunc", "floor")
        return [torch.div(a, x, rounding_mode=m) for x in (b, 0.7) for m in modes] + [torch.xlogy(a, b)]

    a, b = torch.arange(1, 300, dtype=dtype)[:, None] / 7, torch.arange(1, 30, dtype=dtype) / 3
    for mine, eager in zip(compiled(program, a, b), program(a, b), strict=True):
        assert torch.equal(mine, eager)


def test_log_ndtr_is_accurate_in_double() -> None:
    x = torch.linspace(-40, 3, 501, dtype=torch.float64)
    torch.testing.assert_close(
        compiled(torch.special.log_ndtr, x), torch.special.log_ndtr(x), rtol=4e-15, atol=0, check_dtype=True
    )


INTS, BITS, REALS = L([-3, 2, 100], dtype=INT8), L([True, False, True]), L([0.5, -1.0, 2.0])
REFUSED: dict[str, tuple[Program, tuple[Any, ...]]] = {
    **{
        f"{f.__name__} of integers": (f, (INTS,))
        for f in (F.gelu, F.silu, F.mish, F.softplus, F.hardswish, F.hardsigmoid, F.celu, F.hardshrink, torch.frac)
    },
    "lerp of integers": (lambda x: torch.lerp(x, x + 1, 3), (INTS,)),
    "hypot of integers": (torch.hypot, (INTS, INTS)),
    "nextafter of integers": (torch.nextafter, (INTS, INTS)),
    "addcmul of booleans": (torch.addcmul, (BITS, BITS, BITS)),
    "floor of booleans": (torch.floor, (BITS,)),
    "number - booleans": (lambda x: 1 - x, (BITS,)),
    "reals - booleans": (torch.sub, (REALS, BITS)),
    "ldexp by booleans": (torch.ldexp, (REALS, BITS)),
    "heaviside of two dtypes": (torch.heaviside, (REALS, REALS.double())),
    "prelu of integers": (F.prelu, (INTS, L([2], dtype=INT8))),
    "log_ndtr of bfloat16": (torch.special.log_ndtr, (REALS.bfloat16(),)),
    "alpha not whole": (lambda x: torch.add(x, x, alpha=2.5), (BITS,)),
    "index_put of another dtype": (lambda x, i: x.index_put((i,), L(9)), (REALS, L([1]))),
    "argmax of booleans": (torch.argmax, (BITS,)),
    "cumsum in booleans": (lambda x: x.cumsum(0, dtype=torch.bool), (REALS,)),
    "integers *= reals": (lambda x, y: x.clone().mul_(y), (INTS, REALS)),
    "input of integers *= reals": (lambda x, y: x.mul_(y), (INTS, REALS)),
    "booleans *= integers": (lambda x, y: x.clone().mul_(y), (BITS, INTS)),
    "reals into integers": (lambda x, y: torch.add(x, y, out=torch.empty(3, dtype=torch.int64)), (INTS, REALS)),
    "class too large": (lambda i: F.one_hot(i, 4), (L([9, 1]),)),
    "class negative": (lambda i: F.one_hot(i, num_classes=4).sum(0), (L([1, -1]),)),
    "max of nothing": (lambda x: x.max(), (torch.zeros(0, 3),)),
    "max of an empty dimension": (lambda x: x.max(0), (torch.zeros(0, 3),)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused(name: str) -> None:
    program, args = REFUSED[name]
    with pytest.raises((RuntimeError, IndexError)) as eager:
        program(*args)
    with pytest.raises(type(eager.value)):
        compiled(program, *args)


DIVISIONS: dict[str, Program] = {
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "//": lambda x, n: x // n,
}


@pytest.mark.parametrize("program", DIVISIONS.values(), ids=DIVISIONS)
def test_a_divisor_may_turn_out_to_be_zero(program: Program) -> None:
    torch._dynamo.reset()
    c = torch.compile(program, backend="opforge", dynamic=True)
    x = torch.arange(-4, 4)
    for n in (3, -3):
        assert torch.equal(c(x, n), program(x, n))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        c(x, 0)


NUMBERS: dict[str, Program] = {
    "arithmetic": lambda x, n: (x * (n // 2), x + n % 5, x < n, torch.clamp(x, max=n), torch.full((3,), n) > -1),
    "triangle": lambda x, n: torch.tril(x.reshape(1, -1), n),
    "rolled": lambda x, n: torch.roll(x, n),
    "power": lambda x, n: x.double() ** n,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_dynamic_programs_may_be_negative(name: str) -> None:
    torch._dynamo.reset()
    c = torch.compile(NUMBERS[name], backend="opforge", dynamic=True, options={"strict": True})
    x = torch.arange(1, 7)
    for n in (3, 2, -2, -7):
        torch.testing.assert_close(c(x, n), NUMBERS[name](x, n), rtol=1e-15, atol=0)


def test_integers_are_not_raised_to_negative_powers() -> None:
    torch._dynamo.reset()
    c = torch.compile(lambda x, n: x**n, backend="opforge", dynamic=True)
    x = torch.arange(1, 5)
    assert torch.equal(c(x, 3), x**3)
    with pytest.raises(RuntimeError, match="negative integer powers"):
        c(x, -1)


def test_sums_of_a_few_dozen_rows_lose_no_more_than_a_pairwise_sum() -> None:
    """Fifty-six equal numbers, added one by one, lose four and a half units in the last place."""
    x = torch.full((56, 8), 1.1)
    total, exact = compiled(lambda x: x.sum(0), x), x.double().sum(0)
    assert float(((total - exact) / exact).abs().max()) <= 1.5 * torch.finfo(torch.float32).eps
