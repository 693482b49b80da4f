"""Products of few multiply-adds are loops on the CPU: what must not change by that."""

import pytest
import torch

import opforge


def reasons(function: object, *arguments: object, **options: object) -> dict[str, int]:
    opforge.reset_stats()
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="opforge", **options)  # type: ignore[call-overload]
    torch.testing.assert_close(compiled(*arguments), function(*arguments), equal_nan=True)  # type: ignore[operator]
    found: dict[str, int] = opforge.stats()["reasons"]
    return found


def test_few_multiply_adds_are_loops_and_more_are_the_library_s() -> None:
    assert not reasons(torch.mm, torch.randn(25, 25), torch.randn(25, 25))
    assert "aten.mm.default: a BLAS call is faster than loops" in reasons(
        torch.mm, torch.randn(26, 26), torch.randn(26, 26)
    )


def test_the_setting_says_how_many() -> None:
    assert reasons(torch.mm, torch.randn(3, 3), torch.randn(3, 3), options={"loop_products": 0})


def test_a_beta_of_zero_reads_nothing() -> None:
    c = torch.full((3, 5), float("nan"))

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.addmm(c, a, b, beta=0, alpha=2)

    assert not reasons(program, torch.randn(3, 4), torch.randn(4, 5))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_integers_wrap(dtype: torch.dtype) -> None:
    a = torch.arange(60).mul(7919).to(dtype).view(6, 10)
    assert not reasons(torch.mm, a, a.t().contiguous())


def test_symbolic_sizes_are_the_library_s() -> None:
    assert reasons(torch.mm, torch.randn(4, 6), torch.randn(6, 5), dynamic=True)


def test_gradients_of_a_small_convolution_are_loops() -> None:
    x = torch.randn(1, 2, 5, 5, requires_grad=True)
    w = torch.randn(3, 2, 3, 3, requires_grad=True)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, w, padding=1).sin().sum()

    opforge.reset_stats()
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(program, backend="opforge")(x, w), (x, w))
    assert not opforge.stats()["reasons"]
    for ours, eager in zip(found, torch.autograd.grad(program(x, w), (x, w)), strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_longer_row_is_added_to_a_product_of_one_column(dynamic: bool) -> None:
    """The product and the row became an `addmm`, whose kernel takes no row that is longer than its result: a RuntimeError."""

    def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b) + c

    assert not any("addmm" in r for r in reasons(program, *map(torch.randn, ((1, 30), (30, 1), 7)), dynamic=dynamic))
    assert "aten.addmm.default: a BLAS call is faster than loops" in reasons(
        program, torch.randn(30, 30), torch.randn(30, 30), torch.randn(30)
    )
