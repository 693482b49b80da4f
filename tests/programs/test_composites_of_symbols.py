"""Operators that torch makes of others by a kernel that reads sizes as numbers are compiled once for all sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opforge
from opforge.generated.decompositions import COMPOSITES

PROGRAMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "matrices": (lambda x, y: torch.kron(x.tanh(), y) * 2, lambda n: (torch.randn(n, 3), torch.randn(2, n))),
    "a vector and a matrix": (lambda x, y: x.kron(y), lambda n: (torch.randn(n), torch.randn(2, n + 1))),
    "more dimensions before": (lambda x, y: torch.kron(x, y), lambda n: (torch.randn(2, n, 3), torch.randn(n))),
    "other dtypes": (
        lambda x, y: torch.kron(x, y),
        lambda n: (torch.randn(n, 3), torch.randn(2, n, dtype=torch.float64)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_for_all_sizes(name: str) -> None:
    program, inputs = PROGRAMS[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    opforge.reset_stats()
    with opforge.config.patch(strict=True):
        compiled = torch.compile(program, backend="opforge", fullgraph=True, dynamic=True)
        for n in (4, 5, 7):
            given = inputs(n)
            results = []
            for f in (compiled, program):
                leaves = [t.clone().requires_grad_() for t in given]
                out = f(*leaves)
                results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
            torch.testing.assert_close(*results)
            assert results[0][0].stride() == results[1][0].stride()
    assert opforge.stats()["graphs"] == 1


@pytest.mark.parametrize(
    "sizes", [((), ()), ((), (3,)), ((2, 0), (3, 2)), ((2,), (1, 2, 3)), ((1, 1), (4, 4))], ids=str
)
def test_the_body_is_what_torch_computes(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    (op,) = (op for op in COMPOSITES if str(op) == "aten.kron.default")
    x, y = (torch.randn(size) for size in sizes)
    ours, theirs = COMPOSITES[op](x, y), torch.kron(x, y)
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()


def test_it_raises_what_torch_raises() -> None:
    (op,) = (op for op in COMPOSITES if str(op) == "aten.kron.default")
    x, y = torch.randn(3), torch.randn(2, 4).t()
    for f in (torch.kron, COMPOSITES[op]):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            f(x, y)
