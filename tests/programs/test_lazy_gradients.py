"""Tensors whose elements are not what their memory holds: lazily negated, lazily conjugated, zeros without memory. Compiled code reads memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

LAZY: list[tuple[str, Callable[[tuple[int, ...]], Tensor]]] = [
    ("negated", lambda shape: torch._neg_view(torch.full(shape, 3.0))),
    ("part of a conjugate", lambda shape: torch.full(shape, 1 + 3j).conj().imag),
    ("zeros without memory", lambda shape: torch._efficientzerotensor(shape)),
]
KINDS = pytest.mark.parametrize("lazy", [make for _, make in LAZY], ids=[name for name, _ in LAZY])
SHAPES = pytest.mark.parametrize("shape", [(), (1,), (3, 4)], ids=str)


def _leaves(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(shape, generator=generator, requires_grad=True) for _ in range(2)]


@KINDS
@SHAPES
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_gradients_of_results(lazy: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...], dynamic: bool) -> None:
    program = lambda x, w: ((x * w).exp(), x.sin() * w)  # noqa: E731
    found = []
    for run in (program, torch.compile(program, backend="opforge", dynamic=dynamic)):
        x, w = _leaves(shape)
        first, second = run(x, w)
        found.append(torch.autograd.grad(first, [x, w], lazy(shape), retain_graph=True))
        found[-1] += torch.autograd.grad([first, second], [x, w], [lazy(shape), torch.ones(shape)])
    torch.testing.assert_close(found[1], found[0])


def test_the_imaginary_part_of_a_conjugate_has_its_sign() -> None:
    """Autograd hands such a gradient to the graph by itself: it had the other sign (the tensor has no dimension, so no stride gave it away)."""
    program = lambda x: (x * x).sum()  # noqa: E731
    found = []
    for run in (program, torch.compile(program, backend="opforge")):
        x = torch.arange(1.0, 4.0, requires_grad=True)
        z = torch.complex(torch.ones(()), run(x)).conj()
        found.append(torch.autograd.grad((z * z * (0.3 + 0.7j)).real, x))
    torch.testing.assert_close(found[1], found[0])


@KINDS
def test_data_that_replaces_a_saved_input(lazy: Callable[[tuple[int, ...]], Tensor]) -> None:
    program = lambda x, w: x * w  # noqa: E731
    found = []
    for run in (program, torch.compile(program, backend="opforge")):
        x, w = _leaves((3, 4))
        result = run(x, w).sum()
        x.data = lazy((3, 4))
        found.append(torch.autograd.grad(result, w))
    torch.testing.assert_close(found[1], found[0])


@KINDS
def test_arguments(lazy: Callable[[tuple[int, ...]], Tensor]) -> None:
    program = lambda x, y: x * y.exp()  # noqa: E731
    compiled = torch.compile(program, backend="opforge")
    for x in (torch.ones(3), lazy((3,)), torch.ones(3)):
        torch.testing.assert_close(compiled(x, torch.ones(3)), program(x, torch.ones(3)))


def test_a_failed_trace_leaves_no_transform_behind() -> None:
    """What a graph enters in one call and leaves in another (`vmap` of `grad`) is left where an error between them ends its trace."""
    x = torch.randn(3, 2, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda a: (a.sin() * a).sum()))(x)

    torch._dynamo.reset()
    found = torch.compile(program, backend="opforge")(x)
    assert torch.equal(found, program(x))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
