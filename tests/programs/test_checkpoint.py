"""Checkpointed regions under torch.compile: gradients as eager's, random numbers drawn once, less kept for the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import opforge
from opforge.errors import UnsupportedError
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.training import split

OPS = torch.ops.aten


def block(x: Tensor, w: Tensor, drop: float = 0.0) -> Tensor:
    return F.dropout(F.gelu(F.layer_norm(x, (16,)) @ w), drop) @ w


def net(call: Callable[..., Tensor], drop: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = x + call(functools.partial(block, drop=drop), x, w)
        return x.sin().square().sum()  # of positive terms: how they are added up hardly matters

    return f


def plain(f: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return f(*args)


def again(f: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return checkpoint(f, *args, use_reentrant=False)


def reentrant(f: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return checkpoint(f, *args, use_reentrant=True)


def nested(f: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return checkpoint(lambda *a: checkpoint(f, *a, use_reentrant=False).cos(), *args, use_reentrant=False)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is OPS.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def selective(f: Callable[..., Tensor], *args: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    return checkpoint(f, *args, use_reentrant=False, context_fn=contexts)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(32, 16, requires_grad=True), torch.randn(16, 16).mul(0.2).requires_grad_()


def run(f: Callable[..., Tensor], x: Tensor, w: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    y = f(x, w)
    y.backward()  # eager's reentrant form refuses torch.autograd.grad
    assert x.grad is not None
    assert w.grad is not None
    return [y.detach(), x.grad, w.grad]


def halves(f: Callable[..., Tensor]) -> Any:
    """The two graphs that torch.compile of `f` is split into."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        found.append(split(trace(gm, example_inputs, training=True)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(f, backend=backend)(*inputs())
    return found[0]


def kept_bytes(f: Callable[..., Tensor]) -> int:
    """Bytes that the forward returns beside its result."""
    parts = halves(f)
    (end,) = (n for n in parts.forward.graph.nodes if n.op == "output")
    return sum(n.meta["val"].untyped_storage().nbytes() for n in end.args[0][parts.backward.results :])


@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("call", [again, reentrant, nested, selective])
def test_as_eager(call: Callable[..., Tensor], drop: float) -> None:
    torch._dynamo.reset()
    opforge.reset_stats()
    f = net(call, drop)
    want = run(f, *inputs())
    exact = run(f, *(t.detach().double().requires_grad_() for t in inputs())) if not drop else want
    got = run(torch.compile(f, backend="opforge", options={"random": "eager"}), *inputs())
    assert opforge.stats()["fallbacks"] == {}
    for g, w, e in zip(got, want, exact, strict=True):
        if drop:  # float64 draws other random numbers: other summation orders of a few hundred terms are allowed
            assert torch.allclose(g, w, rtol=1e-4, atol=1e-4 * float(w.abs().max()))
        else:
            floor = torch.finfo(w.dtype).eps * float(e.abs().max())
            assert (g - e).abs().max() <= max(2 * float((w - e).abs().max()), floor)


@pytest.mark.parametrize("random", ["eager", "philox"])
def test_the_backward_has_the_forwards_random_numbers(random: str) -> None:
    torch._dynamo.reset()

    def f(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5) * x, x, use_reentrant=False)

    x = torch.randn(64, 64, requires_grad=True)
    y = torch.compile(f, backend="opforge", options={"random": random})(x)
    mask = y.detach().div(x.detach().sin() * x.detach()).round()
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    (got,) = torch.autograd.grad(y.sum(), x)
    t = x.detach().double()
    want = mask * (t.cos() * t + t.sin())
    assert (got - want).abs().max() <= 4 * torch.finfo(torch.float32).eps * want.abs().max()


def test_less_is_kept_than_without() -> None:
    without, with_, products = (kept_bytes(net(call)) for call in (plain, again, selective))
    assert with_ < 0.5 * without
    assert with_ < products <= without


def test_random_numbers_of_a_region_are_drawn_once() -> None:
    parts = halves(net(again, 0.5))

    def draws(gm: torch.fx.GraphModule) -> int:
        return sum(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in gm.graph.nodes)

    assert draws(parts.forward) == 3
    assert draws(parts.backward.graph) == 0


def test_products_that_the_policy_keeps_are_computed_once() -> None:
    def products(f: Callable[..., Tensor]) -> int:
        return sum(n.target is OPS.mm.default for n in halves(f).backward.graph.graph.nodes)

    gradients = products(net(plain))
    assert products(net(selective)) == gradients
    assert products(net(again)) > gradients


def test_a_nested_region_is_part_of_the_outer_one() -> None:
    assert kept_bytes(net(nested)) == kept_bytes(net(again))


def test_a_function_that_torch_runs_twice_must_not_draw() -> None:
    """Outside of Dynamo the recorder sees the region's second run itself."""
    with pytest.raises(UnsupportedError, match="second time"):
        trace(net(again, 0.5), inputs(), training=True)
    traced = trace(net(again), inputs(), training=True)
    assert traced.gradients is not None
