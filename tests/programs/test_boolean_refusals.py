"""What eager kernels do not compute of booleans, and fake kernels accept: the error is not lost, not even where nobody reads the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opforge
from tests.support.matrix import symbolic

CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "argmax": lambda b, x: b.argmax(-1),
    "argmin": lambda b, x: b.argmin(-1),
    "difference of a number and booleans": lambda b, x: x - b,
    "difference of booleans and a number": lambda b, x: b - 1,
    "a number less booleans": lambda b, x: 1 - b,
    "rsub": lambda b, x: torch.rsub(b, x),
    "logcumsumexp": lambda b, x: b.logcumsumexp(0),
    "abs": lambda b, x: b.abs(),
    "round": lambda b, x: b.round(),
    "floor": lambda b, x: b.floor(),
    "ceil": lambda b, x: b.ceil(),
    "trunc": lambda b, x: b.trunc(),
    "topk": lambda b, x: b.topk(1),
    "kthvalue": lambda b, x: b.kthvalue(1),
    "median": lambda b, x: b.median(),
    "relu": lambda b, x: b.relu(),
    "threshold": lambda b, x: torch.threshold(b, 0.5, 0),
    "trace": lambda b, x: b.trace(),
    "bits of floating numbers": lambda b, x: x.bitwise_not(),
}


@pytest.mark.parametrize("read", [False, True], ids=["nobody reads it", "a result"])
@pytest.mark.parametrize("name", CALLS)
def test_as_eager(name: str, read: bool) -> None:
    def program(b: Tensor, x: Tensor) -> object:
        y = CALLS[name](b, x)
        return (y, x.sin()) if read else x.sin()

    inputs = torch.tensor([[True, False], [False, True]]), torch.randn(2, 2)
    with pytest.raises(RuntimeError) as eager:
        program(*inputs)
    gm = torch.fx.symbolic_trace(program)
    if not read:  # as `compile_fx` gets it: the call is there, without users
        assert len(gm.graph.nodes) > 3
    with pytest.raises(eager.type):
        opforge.compile_fx(gm, list(inputs))(*inputs)


@pytest.mark.parametrize("name", CALLS)
def test_as_eager_for_symbolic_sizes(name: str) -> None:
    """Nobody reads the result, and its sizes are not known: the call is tried with those of the example inputs."""

    def program(b: Tensor, x: Tensor) -> object:
        CALLS[name](b, x)
        return x.sin()

    inputs = (torch.ones(3, 3) > 0), torch.randn(3, 3)
    with pytest.raises(RuntimeError) as eager:
        program(*inputs)
    with pytest.raises(eager.type):
        opforge.compile_fx(torch.fx.symbolic_trace(program), symbolic(list(inputs))[0])(*inputs)
