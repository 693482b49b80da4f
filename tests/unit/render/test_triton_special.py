"""Rare special functions in Triton: compiled to cubins for sm_90 without a GPU. (Their numbers: tests/generated/test_scalars.py.)"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.lower.language.builder import Builder
from opforge.runtime.lower.language.tensor import Tensor
from tests.support.gpu_plan import planned
from tests.support.loops import plan_of, pointwise, program_of
from tests.support.triton_run import compile_sm90, job_of, launch_interpreted, results

ONE = ("j0", "j1", "y0", "k0", "k1", "k0e", "k1e", "erfcx", "trigamma")
TWO = ("zeta",)


def compiles(build: object, inputs: list[torch.Tensor]) -> None:
    plan = plan_of(program_of(build, inputs))  # type: ignore[arg-type]
    for k in plan.kernels():
        assert compile_sm90(k, plan.layouts)[:4] == b"\x7fELF"


@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_argument_compile_for_sm90(name: str) -> None:
    def build(b: Builder, x: Tensor) -> Tensor:
        return pointwise(b, lambda a: getattr(s, name)(a), x)

    compiles(build, [torch.rand(300)])


@pytest.mark.parametrize("name", TWO)
def test_functions_of_two_arguments_compile_for_sm90(name: str) -> None:
    def build(b: Builder, x: Tensor, n: Tensor) -> Tensor:
        return pointwise(b, lambda a, c: getattr(s, name)(a, c), x, n)

    compiles(build, [torch.rand(300), torch.rand(300)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_divisors_of_a_number_for_all_compile_for_sm90(dtype: torch.dtype) -> None:
    """A loop keeps the types of its variables: a number became a block in it."""

    def build(b: Builder, x: Tensor, n: Tensor) -> Tensor:
        return pointwise(b, lambda a, c: s.gcd(a, c) + s.gcd(c, a), x, n)

    compiles(build, [torch.ones(300, dtype=dtype), torch.ones((), dtype=dtype)])


EXPONENTS = (2.0, 3.0, -1.0, 0.5, -0.5, -2.0, 1.7)


def product_or_root(x: torch.Tensor, n: float) -> torch.Tensor:
    """Each operation rounded to float32."""
    power = x.double().sqrt().float() if abs(n) == 0.5 else x * x * x if n == 3 else x * x if abs(n) == 2 else x
    return power if n > 0 else 1 / power


def test_powers_by_one_exponent() -> None:
    """An exponent that changes from call to call: where eager computes products and roots, so does the kernel. Torch's own root is not rounded
    correctly on every processor.
    """
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -2.0, 1e-20, 2e19, -1e30, 1e-38])
    x = torch.cat([torch.linspace(0.1, 4, 90), ends])
    plans = [planned(torch.pow, [x, torch.tensor(n)]) for n in EXPONENTS]
    memories = launch_interpreted([job_of(p, [x, torch.tensor(n)]) for p, n in zip(plans, EXPONENTS, strict=True)])
    for n, plan, memory in zip(EXPONENTS, plans, memories, strict=True):
        (got,) = results(plan, memory)
        torch.testing.assert_close(got, (x.double() ** torch.tensor(n)).float(), rtol=2e-7, atol=0, equal_nan=True)
        if n != 1.7:
            assert torch.equal(got[:90], product_or_root(x[:90], n)), n
    (kernel,) = plans[0].kernels()
    assert compile_sm90(kernel, plans[0].layouts)[:4] == b"\x7fELF"
