"""Backwards that compiled autograd captures, against eager ones: values, the order of hooks, and what leaves have meanwhile (MISSION G1-G4)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd as torch_capture
from torch.utils.checkpoint import checkpoint

import opforge
from opforge import compiled_autograd

Tensor = torch.Tensor
Compile = Callable[[torch.fx.GraphModule], Callable[..., Any]]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    opforge.reset_stats()
    torch._dynamo.reset()
    compiled_autograd.reset()
    yield
    torch._dynamo.reset()
    compiled_autograd.reset()


def as_it_is(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return graph


# Hooks, beyond the matrix of `specs/hooks.yaml`.


@pytest.mark.parametrize("compile", [as_it_is, torch.compile(backend="opforge")], ids=["graph", "opforge"])
def test_each_backward_runs_in_its_own_order(compile: Any) -> None:
    """Eager runs first what was made last; the engine captures graphs with the same nodes once."""

    def order(turned: bool, captured: bool) -> list[str]:
        seen: list[str] = []
        x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
        made = {"y": y.cos(), "x": x.sin()} if turned else {"x": x.sin(), "y": y.cos()}
        for name, t in made.items():
            t.register_hook(lambda _, name=name: seen.append(name))
        with compiled_autograd.enable(compile) if captured else nullcontext():
            (made["x"] * made["y"]).sum().backward()
        torch.testing.assert_close(x.grad, made["y"].detach() * x.detach().cos())
        return seen

    for turned in (False, True, False, True):
        assert order(turned, True) == order(turned, False) == (["x", "y"] if turned else ["y", "x"])


class Scaled(torch.autograd.Function):
    """With an argument that is no tensor. Its backward gives whatever `give` makes of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: int, give: Callable[[Tensor | None], Any]) -> Tensor:
        ctx.give = give
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        return ctx.give(grad)


class WithoutZeros(Scaled):
    """Its backward gets None where there is no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: int, give: Callable[[Tensor | None], Any]) -> Tensor:
        ctx.set_materialize_grads(False)
        return Scaled.forward(ctx, x, scale, give)


def ended(program: Callable[[Tensor], Tensor], captured: bool) -> tuple[str, Tensor | None]:
    """The error of a backward, and the gradient of its leaf."""
    x = torch.ones(3, requires_grad=True)
    try:
        with compiled_autograd.enable(as_it_is) if captured else nullcontext():
            program(x).sum().backward()
    except RuntimeError as error:
        return str(error), x.grad
    return "", x.grad


@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda g: (g * 2, None, None), ""),
        (lambda g: (g * 2, None, None, None, None), ""),
        (lambda g: (g * 2, None), "expected 3, got 2"),
        (lambda g: (g * 2, g, None), "at position 2, but the corresponding forward input was not a Variable"),
        (lambda g: (1, None, None), "expected Variable or None"),
        (lambda g: (g[:2], None, None), "invalid gradient at index 0"),
        (lambda g: (g.expand(2, 3), None, None), ""),
    ],
)
def test_what_the_backward_of_a_function_may_give(give: Any, text: str) -> None:
    found, want = (ended(lambda x: Scaled.apply(x, 3, give), captured) for captured in (True, False))
    assert found[0] == want[0]
    assert text in found[0]
    assert (not text) == (not found[0])
    torch.testing.assert_close(found[1], want[1])


@pytest.mark.parametrize("function", [Scaled, WithoutZeros])
def test_a_function_without_a_gradient(function: type[Scaled]) -> None:
    """It gets zeros, unless it wants none."""
    given: list[bool] = []

    def give(grad: Tensor | None) -> Any:
        given.append(grad is None)
        return (torch.ones(3) if grad is None else grad + 1), None, None

    def program(x: Tensor) -> Tensor:
        nothing = lambda grad: (None, None, None)  # noqa: E731
        return Scaled.apply(function.apply(x, 3, give), 2, nothing)

    found, want = (ended(program, captured) for captured in (True, False))
    assert given == [function is WithoutZeros] * 2
    assert found[0] == want[0] == ""
    torch.testing.assert_close(found[1], want[1])
    torch.testing.assert_close(found[1], torch.ones(3))


# Backwards of compiled graphs become part of the captured graph.


def dropped(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x @ w, 0.5).square().sum()


def mixed(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ w).float().sin().sum()


def normalized(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x @ w, (8,)).exp().mean()


def attended(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w).view(1, 2, 4, 8)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q.cos(), is_causal=True).square().sum()


def rebuilt(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda t: (t @ w).sin().exp(), x, use_reentrant=False).sum()


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).t().softmax(0).square().sum()


@pytest.mark.parametrize("program", [dropped, mixed, normalized, attended, rebuilt, transposed])
@pytest.mark.parametrize("enable", [compiled_autograd.enable, torch_capture._enable], ids=["ours", "torch"])
def test_the_backward_of_a_compiled_graph_is_followed(program: Any, enable: Any) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    forward = torch.compile(program, backend="opforge")
    torch.manual_seed(1)
    forward(x, w).backward()
    want, (x.grad, w.grad) = (x.grad, w.grad), (None, None)
    opforge.reset_stats()
    torch.manual_seed(1)
    loss = forward(x, w)
    with enable(torch.compile(backend="opforge", fullgraph=True)):
        loss.backward()
    torch.testing.assert_close((x.grad, w.grad), want)
    assert not opforge.stats()["fallbacks"]


@pytest.mark.parametrize("backend", ["opforge", "aot_eager"])
def test_a_hook_of_a_compiled_forward(backend: str) -> None:
    def program(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda grad: grad * 2)
        return y.exp().sum()

    x, want = torch.randn(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    want.data.copy_(x.data)
    program(want).backward()
    with compiled_autograd.enable():
        torch.compile(program, backend=backend)(x).backward()
    torch.testing.assert_close(x.grad, want.grad)
    assert not opforge.stats()["fallbacks"]


@pytest.mark.parametrize("turned", [False, True])
def test_a_result_that_is_written_through_a_view(turned: bool) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x.t() * 2 if turned else x * 2), x.exp()

    def backward(forward: Any, compile: Compile | None) -> Tensor | None:
        x = torch.linspace(0, 1, 20).view(4, 5).requires_grad_()
        y, z = forward(x)
        y[1:].mul_(z.view_as(y)[1:])
        with compiled_autograd.enable(compile) if compile is not None else nullcontext():
            y.sin().sum().backward()
        return x.grad

    forward = torch.compile(program, backend="opforge")
    torch.testing.assert_close(backward(forward, torch.compile(backend="opforge")), backward(program, None))


@pytest.mark.parametrize("enable", [compiled_autograd.enable, torch_capture._enable], ids=["ours", "torch"])
def test_results_without_a_gradient(enable: Any) -> None:
    """Nothing is computed from zeros: 0 x inf would be nan."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.sqrt()

    forward = torch.compile(program, backend="opforge")
    for which in (0, 1, 0):
        x = torch.zeros(4, requires_grad=True)
        out = forward(x)[which]
        with enable(torch.compile(backend="opforge", fullgraph=True)):
            out.sum().backward()
        want = torch.zeros(4, requires_grad=True)
        program(want)[which].sum().backward()
        torch.testing.assert_close(x.grad, want.grad)


def test_a_written_tensor_is_refused() -> None:
    def program(x: Tensor, scale: Tensor) -> Tensor:
        return (x.exp() * scale).sum()

    forward = torch.compile(program, backend="opforge")
    for write in (False, True):
        x, scale = torch.randn(4, requires_grad=True), torch.randn(4)
        loss = forward(x, scale)
        if write:
            scale.add_(1)
        with compiled_autograd.enable(torch.compile(backend="opforge")):
            if write:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()


# Steps of training.


class Model(torch.nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(torch.nn.functional.gelu(y)).square().mean()


def losses(model: Any, compile: Compile | None, sizes: list[int]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for k, size in enumerate(sizes):
        torch.manual_seed(k)
        loss = model(torch.randn(size, 8))
        with compiled_autograd.enable(compile) if compile is not None else nullcontext():
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
    return found


@pytest.mark.parametrize("breaks", [False, True])
def test_steps_of_training_compile_once(breaks: bool) -> None:
    sizes = [4, 4, 6, 6, 4, 5, 7]
    torch.manual_seed(0)
    model = Model(breaks)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    want = losses(model, None, sizes)
    model.load_state_dict(start)
    compiled: list[int] = []

    def compile(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        compiled.append(1)
        return torch.compile(graph, backend="opforge", fullgraph=True)

    found = losses(torch.compile(model, backend="opforge"), compile, sizes)
    torch.testing.assert_close(found, want)
    assert len(compiled) <= 2  # the forward is compiled again once, for sizes that change


def test_gradients_are_added_to_those_that_are_there() -> None:
    x = torch.randn(4, requires_grad=True)
    for _ in range(3):
        with compiled_autograd.enable():
            x.sin().sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach().cos())


@pytest.mark.parametrize("compile", [as_it_is, torch.compile(backend="opforge")], ids=["graph", "opforge"])
def test_callbacks_run_when_all_gradients_are_there(compile: Any) -> None:
    told: list[bool] = []
    x = torch.randn(4, requires_grad=True)
    y = x.sin()

    def hook(grad: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: told.append(x.grad is not None))

    y.register_hook(hook)
    with compiled_autograd.enable(compile):
        y.sum().backward()
    assert told == [True]


@pytest.mark.parametrize("enable", [compiled_autograd.enable, torch_capture._enable], ids=["ours", "torch"])
def test_a_gradient_of_a_gradient_is_refused(enable: Any) -> None:
    """Values that the forward kept have no history: the second gradient would be wrong without a word."""
    x = torch.randn(4, requires_grad=True)
    y = torch.compile(lambda t: t.sin().exp().sum(), backend="opforge")(x)
    with enable(torch.compile(backend="opforge")), pytest.raises(RuntimeError, match="no gradient of its gradient"):
        torch.autograd.grad(y, x, create_graph=True)


def test_a_retained_graph_runs_again() -> None:
    x = torch.randn(4, requires_grad=True)
    y = torch.compile(lambda t: t.sin().exp().sum(), backend="opforge")(x)
    with compiled_autograd.enable(torch.compile(backend="opforge")):
        y.backward(retain_graph=True)
        first = x.grad.clone()  # type: ignore[union-attr]
        y.backward()
        torch.testing.assert_close(x.grad, 2 * first)
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()


def test_gradients_in_a_batch() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x.sin()
    with compiled_autograd.enable(as_it_is):
        (rows,) = torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)
    torch.testing.assert_close(rows, torch.diag(x.detach().cos()))


def test_a_checkpoint_that_runs_a_backward_inside() -> None:
    x = torch.randn(4, requires_grad=True)
    with compiled_autograd.enable(torch.compile(backend="opforge")):
        checkpoint(lambda t: t.sin().exp(), x, use_reentrant=True).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * x.detach().sin().exp())


def test_what_a_captured_backward_is_given_is_freed_while_it_runs() -> None:
    left: list[int] = []
    compiled = torch.compile(backend="opforge")

    def compile(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        call = compiled(graph)

        def run(inputs: list[Tensor], *rest: Any) -> Any:
            saved = [weakref.ref(t) for t in inputs]
            result = call(inputs, *rest)
            left.append(sum(t() is not None for t in saved))
            return result

        return run

    x = torch.randn(4, requires_grad=True)
    loss = torch.nn.functional.gelu(x.sin()).exp().sum()
    with compiled_autograd.enable(compile):
        loss.backward()
    want = x.detach().requires_grad_()
    torch.nn.functional.gelu(want.sin()).exp().sum().backward()
    torch.testing.assert_close(x.grad, want.grad)
    assert left == [2]  # the leaf, and the gradient of the loss, which the engine holds


# On and off.


def test_blocks_are_nested() -> None:
    captured: list[str] = []

    def named(name: str) -> Compile:
        def compile(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
            captured.append(name)
            return graph

        return compile

    def backward() -> None:
        torch._C._dynamo.compiled_autograd.clear_cache()
        torch.randn(3, requires_grad=True).sin().sum().backward()

    with compiled_autograd.enable(named("outer")):
        backward()
        with compiled_autograd.enable(named("inner")):
            backward()
        with compiled_autograd.disable():
            backward()
            with compiled_autograd.enable(named("not"), ignore_active_disable_ctx=False):
                backward()
            with compiled_autograd.enable(named("within")):
                backward()
        backward()
    backward()
    assert captured == ["outer", "inner", "within", "outer"]


def test_installed_it_serves_the_switch_of_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    from opforge.runtime.capture.recorder import Recorder

    ended: list[bool] = []
    end_capture = Recorder.end_capture

    def end(self: Recorder, outputs: Any) -> Any:
        ended.append(True)
        return end_capture(self, outputs)

    monkeypatch.setattr(Recorder, "end_capture", end)
    x = torch.randn(4, requires_grad=True)

    def step() -> None:
        x.sin().sum().backward()

    before = torch_capture._enable
    with torch._dynamo.config.patch(compiled_autograd=True):
        with opforge.install():
            torch.compile(step)()
        assert torch_capture._enable is before
        assert ended == [True]
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_a_region_is_told() -> None:
    told: list[bool] = []
    x = torch.randn(3, requires_grad=True)
    x.register_hook(lambda g: told.append(compiled_autograd.in_compiled_autograd_region))
    with compiled_autograd.enable(as_it_is):
        x.sin().sum().backward()
    assert told == [True]
    assert not compiled_autograd.in_compiled_autograd_region


def test_force_eager_captures_nothing() -> None:
    def refuse(graph: torch.fx.GraphModule) -> Any:
        raise AssertionError

    with torch.compiler.set_stance("force_eager"), compiled_autograd.enable(refuse):
        torch.randn(3, requires_grad=True).sin().sum().backward()


def test_nodes_are_named_after_what_they_come_from() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with compiled_autograd.enable(keep):
        torch.randn(3, requires_grad=True).sin().sum().backward()
    names = {n.name for n in graphs[0].graph.nodes}
    assert {"inputs", "sum_backward0", "sin_backward0"} <= names


def test_what_an_unknown_torch_calls_is_named() -> None:
    from opforge.runtime.capture.recorder import Recorder

    with pytest.raises(opforge.errors.UnsupportedError, match=r"'brand_new_hook'.*docs/versions\.md"):
        Recorder(as_it_is).brand_new_hook()


def test_anomaly_mode_finds_nan() -> None:
    x = torch.zeros(3, requires_grad=True)
    with (
        torch.autograd.set_detect_anomaly(True),
        compiled_autograd.enable(as_it_is),
        pytest.raises(RuntimeError, match="nan"),
    ):
        (x.sqrt() * 0).sum().backward()
