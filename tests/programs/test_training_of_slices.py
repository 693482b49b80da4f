"""Gradients of normalizations of a slice: the values lie in scratch, and the gradient is wider than they are (issue 35).

For `softmax(x[:, :8], -1)` of 256 x 128 values the process ended with a segmentation fault: rows 8 to 127 of a tile of 8 rows were read.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F


def noisy_softmax(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """As `gumbel_softmax` makes it, with noise that both routes know."""
    noise = torch.linspace(0.1, 0.9, last - first, dtype=x.dtype)
    return torch.softmax((x[:, first:last] - (-noise.log()).log()) / 0.7, -1)


def rotated(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """A rotary embedding of normalized values: halves change places, and one is negated."""
    y = F.layer_norm(x[:, first:last], (last - first,))
    half = (last - first) // 2
    angle = torch.linspace(0, 3, last - first, dtype=x.dtype)
    return y * angle.cos() + torch.cat([-y[:, half:], y[:, :half]], -1) * angle.sin()


PROGRAMS: dict[str, Callable[[torch.Tensor, int, int], torch.Tensor]] = {
    "softmax": lambda x, first, last: torch.softmax(x[:, first:last], -1),
    "log_softmax": lambda x, first, last: torch.log_softmax(x[:, first:last], -1),
    "layer_norm": lambda x, first, last: F.layer_norm(x[:, first:last], (last - first,)),
    "noisy softmax": noisy_softmax,
    "rotary": rotated,
}


@pytest.mark.parametrize(("rows", "columns", "first", "last"), [(256, 128, 0, 8), (37, 1000, 500, 506)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradient_of_a_slice(name: str, rows: int, columns: int, first: int, last: int) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return PROGRAMS[name](x, first, last).pow(3).sum()

    torch._dynamo.reset()
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    torch.compile(loss, backend="opforge", dynamic=False, fullgraph=True)(ours).backward()
    loss(exact).backward()
    assert ours.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-4, rtol=1e-4)
