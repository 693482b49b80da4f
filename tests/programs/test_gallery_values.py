"""The programs of the gallery (`tests/snapshots`) run: their values and gradients beside eager's. Their text is compared elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.snapshots.programs import GALLERY


def _inputs(name: str, grad: bool) -> list[Any]:
    """Other values than the gallery's ones, of the same sizes and dtypes."""
    generator = torch.Generator().manual_seed(len(name))
    found = []
    for t in GALLERY[name].inputs():
        x = torch.rand(t.shape, generator=generator).to(t.dtype) + 0.5 if t.is_floating_point() else t
        found.append(x.requires_grad_(grad and x.is_floating_point()))
    return found


def _run(run: Any, inputs: list[Any], grad: bool) -> list[Any]:
    given = [t.clone() for t in inputs] if grad else inputs  # a program may write to its inputs
    result = run(*given)
    results = list(result) if isinstance(result, tuple) else [result]
    followed = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
    gradients: list[Any] = []
    if followed:
        wanted = [t for t in inputs if t.requires_grad]
        gradients = list(torch.autograd.grad(sum(t.float().sin().sum() for t in followed), wanted, allow_unused=True))
    return [t.detach() if isinstance(t, torch.Tensor) else t for t in [*results, *given, *gradients]]


def _exact(inputs: list[Any]) -> list[Any]:
    """The same inputs in float64."""
    return [
        t.detach().double().requires_grad_(t.requires_grad)
        if isinstance(t, torch.Tensor) and t.is_floating_point()
        else t
        for t in inputs
    ]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", GALLERY)
def test_values(name: str, grad: bool) -> None:
    """Within twice eager's own error against float64, or a few roundings of the largest value."""
    program = GALLERY[name]
    eager, exact, ours = (copy.deepcopy(program.run) for _ in range(3))
    if isinstance(exact, torch.nn.Module):
        exact.double()
    compiled = torch.compile(ours, backend="opforge", dynamic=program.dynamic, options={"strict": True})
    found, expected = (_run(run, _inputs(name, grad), grad) for run in (compiled, eager))
    right = _run(exact, _exact(_inputs(name, grad)), grad)
    for a, b, c in zip(found, expected, right, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        floor = 4 * torch.finfo(b.dtype).eps * float(c.abs().max()) if b.is_floating_point() else 0
        assert float((a.double() - c).abs().max()) <= 2 * float((b.double() - c).abs().max()) + floor
