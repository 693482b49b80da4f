"""What eager kernels do not compute of booleans, and fake kernels accept: the error is not lost, not even where nobody reads the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opforge
from opforge.runtime.torch_compat import minor_version
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


FACTORS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "add": lambda x, factor: torch.add(x, x, alpha=factor),
    "add in place": lambda x, factor: x.clone().add_(x, alpha=factor),
    "add a number": lambda x, factor: torch.add(x, 2, alpha=factor),
    "add integers": lambda x, factor: torch.add(x.int(), x.int(), alpha=factor),
    "add to booleans": lambda x, factor: torch.add(x > 0, x, alpha=factor),
    "sub": lambda x, factor: torch.sub(x, x, alpha=factor),
    "sub a number": lambda x, factor: torch.sub(x, 2, alpha=factor),
    "rsub": lambda x, factor: torch.rsub(x, x, alpha=factor),
    "rsub from a number": lambda x, factor: torch.rsub(x, 2, alpha=factor),
    "foreach add": lambda x, factor: torch._foreach_add([x > 0, x], [x > 0, x], alpha=factor)[1],
    "foreach add a tensor": lambda x, factor: torch._foreach_add([x], torch.tensor(2.0), alpha=factor)[0],
    "foreach sub": lambda x, factor: torch._foreach_sub([x], [x], alpha=factor)[0],
    "addr": lambda x, factor: torch.addr(x, x[:, 0], x[0], alpha=factor),
    "addr, of what it adds to": lambda x, factor: torch.addr(x, x[:, 0], x[0], beta=factor),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_boolean_factor_made_of_sizes(name: str) -> None:
    """Eager raises "Boolean alpha only supported for Boolean results."; opforge computed with 0 or 1."""

    def program(x: Tensor) -> Tensor:
        return FACTORS[name](x, x.shape[0] > 6)

    if name == "add in place" and minor_version() == "2.11":
        pytest.skip("C18: Dynamo of torch 2.11 makes a multiplication of the factor before a backend sees the call")
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="opforge", dynamic=True)
    for rows in (7, 4):
        x = torch.randn(rows, 3)
        with pytest.raises(RuntimeError, match=r"Boolean (alpha|beta) only supported for Boolean results"):
            program(x)
        with pytest.raises(RuntimeError, match=r"Boolean (alpha|beta) only supported for Boolean results"):
            compiled(x)


FACTORS_THAT_EAGER_TAKES: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "add": lambda x, factor: torch.add(x > 0, x < 1, alpha=factor),
    "add a boolean": lambda x, factor: torch.add(x > 0, True, alpha=factor),
    "foreach add": lambda x, factor: torch._foreach_add([x > 0], [x < 1], alpha=factor)[0],
    "addmm": lambda x, factor: torch.addmm(x, x, torch.ones(3, 3), beta=factor, alpha=factor),
    "addcmul": lambda x, factor: torch.addcmul(x, x, x, value=factor),
    "addcdiv": lambda x, factor: torch.addcdiv(x, x, x + 3, value=factor),
    "index_add": lambda x, factor: x.index_add(0, torch.tensor([0]), x[:1], alpha=factor),
    "threshold": lambda x, factor: torch.threshold(x, factor, factor),
    "clamp": lambda x, factor: x.clamp(min=factor),
}


@pytest.mark.parametrize("name", FACTORS_THAT_EAGER_TAKES)
def test_a_boolean_made_of_sizes_that_eager_takes(name: str) -> None:
    def program(x: Tensor) -> Tensor:
        return FACTORS_THAT_EAGER_TAKES[name](x, x.shape[0] > 6)

    torch._dynamo.reset()
    opforge.reset_stats()
    compiled = torch.compile(program, backend="opforge", dynamic=True)
    for rows in (7, 4):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), program(x))
    assert not opforge.stats()["fallbacks"]
