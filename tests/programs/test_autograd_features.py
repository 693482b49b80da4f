"""Autograd around and inside compiled code (MISSION A7): hooks, saved tensors, custom functions, autocast, threads; as eager has them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import opforge

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    opforge.reset_stats()


def same(program: Callable[[Run], Any], fn: Run, *, eager: bool = False) -> None:
    """`program(run)` gives the same for `fn` and for `fn` compiled; `eager`: as a whole by eager kernels, with a counted reason."""
    seen = []
    for run in (fn, torch.compile(fn, backend="opforge")):
        torch.manual_seed(0)
        seen.append(program(run))
    assert bool(opforge.stats()["fallbacks"]) == eager, opforge.stats()["fallbacks"]
    check(*seen)


def check(expected: Any, actual: Any) -> None:
    """The same leaves, tensors within rounding."""
    assert type(expected) is type(actual), (expected, actual)
    if isinstance(expected, (list, tuple)):
        assert len(expected) == len(actual)
        for e, a in zip(expected, actual, strict=True):
            check(e, a)
    elif isinstance(expected, torch.Tensor):
        assert (expected.dtype, expected.shape, expected.requires_grad) == (
            actual.dtype,
            actual.shape,
            actual.requires_grad,
        )
        torch.testing.assert_close(actual, expected)
    else:
        assert expected == actual


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w).sin() * x


# --- the program's own features


def test_checkpoint() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, w, use_reentrant=False).sum()

    def program(run: Run) -> Any:
        x, w = leaf(4, 4), leaf(4, 4)
        y = run(x, w)
        y.backward()
        return y, x.grad, w.grad

    same(program, fn)


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast(inside: bool) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if inside:
            with torch.autocast("cpu", torch.bfloat16):
                return (x @ w).relu()
        return (x @ w).relu()

    def program(run: Run) -> Any:
        x, w = leaf(4, 4), leaf(4, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            y = run(x, w)
        y.float().sum().backward()
        return y, x.grad, w.grad

    same(program, fn)


def test_backward_under_autocast() -> None:
    """The backward runs with the forward's casts, whatever the mode is then."""

    def program(run: Run) -> Any:
        x, w = leaf(4, 4), leaf(4, 4)
        y = run(x, w)
        with torch.autocast("cpu", torch.bfloat16):
            y.sum().backward()
        return y, x.grad.dtype, w.grad.dtype

    same(program, lambda x, w: (x @ w).relu())


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * x * 3  # not the true gradient, so that it is seen to be used


class View(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g.view(2, 3) * 5


class Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        value, index = x.max(-1)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index)
        return value, index

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, unused: Any) -> torch.Tensor:
        (index,) = ctx.saved_tensors
        return torch.zeros(2, 3).scatter(1, index[:, None], g[:, None])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 7


FUNCTIONS: dict[str, Run] = {
    "square": lambda x: Square.apply(x).sin(),
    "view": lambda x: View.apply(x) * 2,
    "view_returned": lambda x: View.apply(x * 1),
    "not_differentiable": lambda x: Largest.apply(x),
    "dirty": lambda x: Doubled.apply(x * 1).cos(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_custom_functions(name: str) -> None:
    def program(run: Run) -> Any:
        x = leaf(2, 3)
        y = run(x)
        first = y[0] if isinstance(y, tuple) else y
        first.sum().backward()
        return y, x.grad

    same(program, FUNCTIONS[name])


def test_requires_grad_inside() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.detach() * 2
        y.requires_grad_()
        return (y * y).sum()

    def program(run: Run) -> Any:
        y = run(leaf(3))
        return y.detach(), y.requires_grad

    seen = [program(run) for run in (fn, torch.compile(fn, backend="opforge"))]
    assert seen[0][1] == seen[1][1]


def test_hook_inside() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda g: g * 10)
        return y.sin().sum()

    def program(run: Run) -> Any:
        x = leaf(3)
        run(x).backward()
        return x.grad

    same(program, fn)


def test_a_leaf_made_inside_that_stays_inside() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = (x.detach() * 3).requires_grad_()
        return x.sin() * 2 + y.detach()

    def program(run: Run) -> Any:
        x = leaf(3)
        y = run(x)
        y.sum().backward()
        return y, x.grad

    same(program, fn)


# --- features of the caller


def test_saved_tensor_hooks_see_what_is_saved() -> None:
    """Hooks around the call pack what the compiled forward saves, and unpack it for its backward."""

    def program(run: Run) -> Any:
        packed, unpacked = [], []

        def pack(t: torch.Tensor) -> Any:
            packed.append(t.shape)
            return t.clone()

        def unpack(t: torch.Tensor) -> torch.Tensor:
            unpacked.append(t.shape)
            return t

        x, w = leaf(4, 4), leaf(4, 4)
        with saved_tensors_hooks(pack, unpack):
            y = run(x, w)
        y.sum().backward()
        return y, x.grad, w.grad, bool(packed), len(packed) == len(unpacked)

    same(program, block)


def test_save_on_cpu() -> None:
    def program(run: Run) -> Any:
        x, w = leaf(4, 4), leaf(4, 4)
        with save_on_cpu():
            y = run(x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    same(program, block)


def test_retain_grad_and_hooks() -> None:
    def program(run: Run) -> Any:
        order: list[str] = []
        x, w = leaf(4, 4), leaf(4, 4)
        before = x * 2
        before.retain_grad()
        before.register_hook(lambda g: order.append("before"))
        x.register_post_accumulate_grad_hook(lambda p: order.append("accumulated"))
        w.register_hook(lambda g: g * 2)
        y = run(before, w)
        y.retain_grad()
        y.register_hook(lambda g: order.append("after"))
        y.sum().backward()
        return order, y.grad, before.grad, x.grad, w.grad

    same(program, block)


def test_module_hooks() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu())

    seen = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = Net()
        norms: list[torch.Tensor] = []
        net.a.weight.register_post_accumulate_grad_hook(lambda p, norms=norms: norms.append(p.grad.norm()))
        run = torch.compile(net, backend="opforge") if compiles else net
        x = torch.randn(5, 3)
        for _ in range(2):
            run(x).square().sum().backward()
        seen.append([norms, [p.grad for p in net.parameters()]])
    check(*seen)
    assert not opforge.stats()["fallbacks"]


def test_anomaly_mode() -> None:
    def program(run: Run) -> Any:
        x = torch.zeros(3, requires_grad=True)
        with torch.autograd.detect_anomaly(check_nan=True):
            y = run(x)
            with pytest.raises(RuntimeError, match="returned nan values"):
                y.backward(torch.zeros(()))
        return y

    with pytest.warns(UserWarning, match="Anomaly"):
        same(program, lambda x: (x.sqrt() * 0).sum())


def test_gradients_asked_for() -> None:
    def program(run: Run) -> Any:
        x, w, unused = leaf(4, 4), leaf(4, 4), leaf(2)
        y = run(x, w)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(y.sum(), [unused], retain_graph=True)
        return torch.autograd.grad(y.sum(), [w, unused], allow_unused=True)

    same(program, block)


def test_inputs_without_gradient() -> None:
    def program(run: Run) -> Any:
        x, w, c = leaf(4, 4), leaf(4, 4), torch.randn(4)
        a, b = run(x, w, c)
        a.sum().backward()
        return a, b, x.grad, w.grad, b.requires_grad

    same(program, lambda x, w, c: (x.sin() + c, w.detach() * c))


def test_some_results_have_no_gradient() -> None:
    def program(run: Run) -> Any:
        x = leaf(4)
        _, b = run(x)
        b.sum().backward()
        return x.grad

    same(program, lambda x: (x.sin(), x.cos()))


def test_backward_twice() -> None:
    def program(run: Run) -> Any:
        x, w = leaf(4, 4), leaf(4, 4)
        y = run(x, w).sum()
        y.backward(retain_graph=True)
        y.backward()
        first = x.grad
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
        return first, w.grad

    same(program, block)


def test_several_calls_before_one_backward() -> None:
    def program(run: Run) -> Any:
        x, w = leaf(4, 4), leaf(4, 4)
        y = run(x, w)
        z = run(run(y, w) + x, w)
        (y.sum() + z.sum()).backward()
        return x.grad, w.grad

    same(program, block)


def test_backward_from_another_thread() -> None:
    def program(run: Run) -> Any:
        x, w = leaf(4, 4), leaf(4, 4)
        y = run(x, w).sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
        return x.grad, w.grad

    same(program, block)


def test_threads_at_once() -> None:
    run = torch.compile(block, backend="opforge")
    x0, w0 = torch.randn(32, 32), torch.randn(32, 32)
    run(x0.clone().requires_grad_(), w0.clone().requires_grad_()).sum().backward()
    found: list[Any] = [None] * 4

    def work(k: int) -> None:
        x, w = (x0 + k).requires_grad_(), w0.clone().requires_grad_()
        for _ in range(10):
            x.grad = w.grad = None
            run(x, w).sum().backward()
        found[k] = (x.grad, w.grad)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k in range(4):
        x, w = (x0 + k).requires_grad_(), w0.clone().requires_grad_()
        run(x, w).sum().backward()
        assert torch.equal(x.grad, found[k][0]), "the very numbers of a call alone"
        assert torch.equal(w.grad, found[k][1])


def test_gradients_accumulate() -> None:
    def program(run: Run) -> Any:
        x, w = leaf(4, 4), leaf(4, 4)
        for _ in range(3):
            run(x, w).sum().backward()
        return x.grad, w.grad

    same(program, block)


def test_a_graph_that_first_ran_in_inference_mode() -> None:
    """Its intermediate memory is that of later calls, which write matrix products into it."""

    def program(run: Run) -> Any:
        x, w = leaf(210, 4), leaf(4, 4)  # more memory than what waits after the tests above
        with torch.inference_mode():
            first = run(x, w).clone()
        y = run(x, w)
        total = y.sum()
        with torch.inference_mode():  # the backward is run there first, too
            total.backward(retain_graph=True)
        x.grad = w.grad = None
        total.backward()
        return torch.tensor(first.tolist()), y, x.grad, w.grad

    same(program, lambda x, w: torch.sin((x @ w).cos() @ w))


def test_forward_mode_tangents_are_kept() -> None:
    def program(run: Run) -> Any:
        x, w = leaf(4), leaf(4)
        outside = run(x, w)
        with forward_ad.dual_level():
            y = forward_ad.unpack_dual(run(forward_ad.make_dual(x.detach(), torch.ones(4)), w))
        return outside, y.primal, y.tangent, run(x, w)

    same(program, lambda x, w: (x * w).sin())


@pytest.mark.parametrize("mode", [True, False])
def test_a_program_that_leaves_another_grad_mode_behind(mode: bool) -> None:
    def program(run: Run) -> Any:
        with torch.set_grad_enabled(not mode):
            y = run(leaf(4))
            return y, torch.is_grad_enabled()

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch.set_grad_enabled(mode)
        return y * x

    same(program, fn)


def test_results_made_in_inference_mode() -> None:
    def program(run: Run) -> Any:
        y = run(leaf(4))
        return y.is_inference()

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x * 2

    same(program, fn, eager=True)


def several(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    root = torch.where(x > 0, x.sqrt(), x * 0)  # the gradient of the root at zero is infinite
    return root, (x @ w).tanh(), w.exp(), x.floor() + x * 2, x.detach() * w


@pytest.mark.parametrize("given", [(1,), (2,), (3,), (4,), (1, 3), (2, 4), (1, 2, 3, 4)])
def test_results_without_gradients_add_nothing(given: tuple[int, ...]) -> None:
    """Inputs that no given gradient reaches get None; zeros for the others would be nan where a derivative is infinite."""

    def program(run: Run) -> Any:
        x, w = torch.arange(9.0).view(3, 3).requires_grad_(), torch.eye(3).requires_grad_()
        results = run(x, w)
        found = torch.autograd.grad([results[k].sum() for k in given], [x, w], allow_unused=True, retain_graph=True)
        some = [results[k].sum() for k in given]
        torch.autograd.backward(some)
        return found, (x.grad, w.grad)

    same(program, several)


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda t: t.detach().numpy().copy(), torch.from_numpy),
        (lambda t: t.contiguous(), lambda t: t),
        (lambda t: t, lambda t: t.double()),
        (lambda t: t, lambda t: torch._neg_view(-t)),
        (lambda t: t, lambda t: t.repeat_interleave(2, -1)[..., ::2]),
    ],
    ids=["other strides, offloaded", "other strides", "another dtype", "lazily negated", "gaps"],
)
def test_hooks_of_saved_tensors_may_return_another_layout(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> None:
    """The compiled backward reads what was saved by the layout that it was made for."""
    gradients = []
    for f in (lambda x: x.sin() * x, torch.compile(lambda x: x.sin() * x, backend="opforge")):
        leaf = torch.arange(1.0, 7).view(2, 3).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = f(leaf.t())
        out.sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_hooks_of_saved_tensors_that_return_other_sizes_are_told_of() -> None:
    f = torch.compile(lambda x: x.sin() * x, backend="opforge")
    x = torch.ones(3, 2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t[:1]):
        out = f(x)
    with pytest.raises(RuntimeError, match=r"sizes \[1, 2\] on cpu for one of sizes \[3, 2\]"):
        out.sum().backward()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.select(0, 0),
        lambda x: (x[0] @ x[1].t(), x[:, 1:]),
        lambda x: x.view_as(x),
        lambda x: x.transpose(0, 1),
    ],
    ids=["select", "slice", "alias", "transpose"],
)
def test_views_of_a_leaf_whose_elements_share_memory(fn: Callable[..., Any]) -> None:
    """Each element has a gradient of its own; `as_strided`, by which views are made again, would share them out among those in one place."""

    def gradient(run: Run) -> Any:
        leaf = torch.arange(6.0).view(1, 2, 3).expand(2, 2, 3).requires_grad_()
        out = run(leaf)
        sum(
            (t * torch.arange(t.numel()).view(t.shape)).sum() for t in (out if isinstance(out, tuple) else (out,))
        ).backward()
        return leaf.grad

    same(gradient, fn, eager=True)


def test_an_expanded_view_of_a_leaf() -> None:
    def gradient(run: Run) -> Any:
        leaf = torch.arange(6.0).view(1, 2, 3).requires_grad_()
        (run(leaf) * torch.arange(12.0).view(2, 2, 3)).sum().backward()
        return leaf.grad

    same(gradient, lambda x: x.expand(2, 2, 3))
