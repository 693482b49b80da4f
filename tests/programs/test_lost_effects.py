"""What a program does beside its results (MISSION A3, A5, A7): backwards of custom functions, hooks, gradients it sets, seeds, freed graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opforge
from opforge.aot import nop

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    opforge.reset_stats()


class Reverse(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def _compiled(fn: Run, how: str) -> Run:
    if how == "aot_function":
        return opforge.aot_function(fn, fw_compiler=nop)
    return torch.compile(fn, backend="opforge")


def _reversed_input(x: Tensor) -> Tensor:
    return Reverse.apply(x)


def _written_before(x: Tensor) -> Tensor:
    y = x * 2
    y.mul_(3)
    return Reverse.apply(y)


def _features_and_reversal(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    return h, Reverse.apply(h)


def _hooked(x: Tensor) -> Tensor:
    v = x.view(-1)
    v.register_hook(lambda g: g * 10)
    return v


def _hooked_part(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = x.split(2)
    a.register_hook(lambda g: g * 10)
    return a, b, a + b


@pytest.mark.parametrize("how", ["compile", "aot_function"])
@pytest.mark.parametrize(
    "fn", [_reversed_input, _written_before, _features_and_reversal, _hooked, _hooked_part], ids=lambda f: f.__name__
)
def test_the_gradient_of_an_alias_goes_through_what_made_it(fn: Run, how: str) -> None:
    """The caller's view of the source would go around a custom backward, or a hook."""
    gradients = []
    for run in (fn, _compiled(fn, how)):
        x = torch.arange(4.0, requires_grad=True)
        results = run(x)
        results = results if isinstance(results, tuple) else (results,)
        sum((k + 1) * r.sum() for k, r in enumerate(results)).backward()  # type: ignore[union-attr]
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("fn", "again"),
    [
        (lambda x: x * 2, False),
        (lambda x: x.exp(), False),
        (lambda x: x + 1, True),
        (lambda x: -x, True),
        (lambda x: x.sum(), True),
    ],
)
def test_a_second_backward_is_refused_where_eager_has_freed_the_graph(fn: Run, again: bool) -> None:
    for run in (fn, torch.compile(fn, backend="opforge")):
        x = torch.ones(3, requires_grad=True)
        y = run(x).sum()
        y.backward()
        if again:
            y.backward()
        else:
            with pytest.raises(RuntimeError, match="second time"):
                y.backward()


def test_a_second_backward_of_a_retained_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    y = torch.compile(lambda x: x * 2, backend="opforge")(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert torch.equal(x.grad, torch.full((3,), 4.0))  # type: ignore[arg-type]


def _runs_backward(x: Tensor, w: Tensor) -> Tensor:
    (x * w).sum().backward()
    return x * 1


def _retains(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x * w
    y.retain_grad()
    return y * 3, y


def _makes_a_leaf(x: Tensor, w: Tensor) -> Tensor:
    return x.detach().requires_grad_() * 2


def _seeds(x: Tensor, w: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand(3)


@pytest.mark.filterwarnings("ignore:opforge")
@pytest.mark.parametrize("fn", [_runs_backward, _retains, _makes_a_leaf, _seeds], ids=lambda f: f.__name__)
def test_what_only_eager_does_runs_eagerly(fn: Run) -> None:
    seen = []
    for run in (fn, opforge.aot_function(fn, fw_compiler=nop)):
        torch.manual_seed(0)
        x, w = torch.ones(3), torch.full((3,), 2.0, requires_grad=fn is not _makes_a_leaf)
        results = run(x, w)
        results = results if isinstance(results, tuple) else (results,)
        if fn is _retains:
            results[0].sum().backward()
        shown = [r.detach() for r in results] + [g for t in (w, *results) if t.is_leaf and (g := t.grad) is not None]
        shown += [results[1].grad] if fn is _retains else []
        seen.append((shown, [r.requires_grad for r in results]))
    assert seen[0][1] == seen[1][1]
    assert all(torch.equal(a, b) for a, b in zip(seen[0][0], seen[1][0], strict=True))
    assert opforge.stats()["fallbacks"]


@pytest.mark.filterwarnings("ignore:opforge")
def test_a_generator_of_the_program() -> None:
    """It has no source text that a user's compiler could be given."""
    made = [torch.Generator().manual_seed(1) for _ in range(2)]
    results = []
    for g, wrap in zip(made, (lambda f: f, lambda f: opforge.aot_function(f, fw_compiler=nop)), strict=True):
        results.append(wrap(lambda x, g=g: x + torch.rand(3, generator=g))(torch.ones(3)))
    assert torch.equal(*results)


def test_numbers_are_told_apart_by_their_sign() -> None:
    run = opforge.aot_function(lambda x, a: torch.copysign(x, torch.full_like(x, a)), fw_compiler=nop)
    assert run(torch.ones(1), 0.0) == 1
    assert run(torch.ones(1), -0.0) == -1


def test_a_slice_as_an_argument() -> None:
    run = opforge.aot_function(lambda x, s: x[s] * 2, fw_compiler=nop)
    assert run(torch.arange(6), slice(1, 5)).tolist() == [2, 4, 6, 8]
    assert run(torch.arange(6), slice(0, 2)).tolist() == [0, 2]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_view_that_a_users_compiler_returns_can_be_written(requires_grad: bool) -> None:
    x = torch.ones(3, 3, requires_grad=requires_grad)
    y = opforge.aot_function(lambda x: (x * 2)[0], fw_compiler=nop)(x)
    y.mul_(3)
    assert y.tolist() == [6, 6, 6]


def test_training_on_the_device_meta() -> None:
    model = nn.Linear(4, 4, device="meta")
    torch.compile(model, backend="opforge")(torch.empty(2, 4, device="meta")).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.device.type == "meta"


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (checkpoint(self.inner, x, use_reentrant=False).pow(3).sum(),)


def test_a_checkpointed_submodule_has_traced_parameters_in_the_backward_too() -> None:
    """It runs once more there."""
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(4, 3)
    opforge.aot_export_module(model, (x,), trace_joint=True, output_loss_index=0)
    run = opforge.aot_module(model, fw_compiler=nop)
    run(x)[0].backward()
    weight = model.inner[0].weight
    ours, weight.grad = weight.grad, None
    model(x)[0].backward()
    torch.testing.assert_close(ours, weight.grad)
    assert not opforge.stats()["fallbacks"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        nn.GroupNorm(2, 8),
    ],
    ids=["layer norm", "batch norm", "group norm"],
)
def test_floats_of_modules_are_known_in_training_with_dynamic_sizes(model: nn.Module) -> None:
    """Dynamo gives them as tensors, of which the traced copies know the number too."""
    run = torch.compile(model, backend="opforge", dynamic=True)
    for rows in (4, 7):
        run(torch.randn(rows, 8, requires_grad=True)).sum().backward()
    assert opforge.stats()["graphs"] == 1
    assert not opforge.stats()["fallbacks"]


class Noting(torch.autograd.Function):
    """The double, whose backward adds its gradient to a tensor that the forward was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.seen.add_(g)
        return g * 2, None


class Notebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return Noting.apply(x.sin(), self.seen).exp()


@torch.library.custom_op("lost_effects::double", mutates_args=())
def double(x: Tensor, seen: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("lost_effects::double_backward", mutates_args={"seen"})
def double_backward(grad: Tensor, seen: Tensor) -> Tensor:
    seen.add_(grad)
    return grad * 2


double.register_fake(lambda x, seen: torch.empty_like(x))
double_backward.register_fake(lambda grad, seen: torch.empty_like(grad))
double.register_autograd(
    lambda ctx, grad: (double_backward(grad, ctx.seen), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "seen", inputs[1]),
)


@pytest.mark.parametrize("how", ["compile", "aot_function"])
@pytest.mark.parametrize("note", [Noting.apply, double], ids=["function", "operator"])
@pytest.mark.parametrize("part", [False, True], ids=["whole", "view"])
def test_what_a_backward_writes_to_an_input_is_not_lost(note: Run, part: bool, how: str) -> None:
    def program(x: Tensor, seen: Tensor) -> Tensor:
        return note(x.sin(), seen[:4] if part else seen).exp()

    results = []
    for run in (program, _compiled(program, how)):
        x, seen = torch.ones(4, requires_grad=True), torch.zeros(6 if part else 4)
        run(x, seen).sum().backward()
        results.append((x.grad, seen))
    torch.testing.assert_close(results[1], results[0])


SHOWN: dict[str, Run] = {
    "whole": lambda note, x, seen: (note(x.sin(), seen).exp(), seen),
    "a view": lambda note, x, seen: (note(x.sin(), seen).exp(), seen[1:]),
    "two views": lambda note, x, seen: (note(x.sin(), seen[:]).exp(), seen.view(2, 2), seen[::2]),
    "a part": lambda note, x, seen: (note(x[:2].sin(), seen[1:3]).exp(), seen),
}


@pytest.mark.parametrize("how", ["compile", "aot_function"])
@pytest.mark.parametrize("note", [Noting.apply, double], ids=["function", "operator"])
@pytest.mark.parametrize("shown", SHOWN)
def test_what_a_backward_writes_to_a_result_is_not_lost(shown: str, note: Run, how: str) -> None:
    """A result that autograd does not follow, computed by the program: the caller saw it as the forward had left it."""

    def program(x: Tensor, given: Tensor) -> Any:
        return SHOWN[shown](note, x, given * 2)

    results = []
    for run in (program, _compiled(program, how)):
        x, given = torch.ones(4, requires_grad=True), torch.arange(4.0)
        loss, *seen = run(x, given)
        loss.sum().backward()
        results.append((x.grad, *seen))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("how", ["compile", "aot_module"])
def test_what_a_backward_writes_to_a_buffer_is_not_lost(how: str) -> None:
    results = []
    for k in range(2):
        net, x = Notebook(), torch.ones(4, requires_grad=True)
        run: Run = net
        if k:
            run = (
                opforge.aot_module(net, fw_compiler=nop)
                if how == "aot_module"
                else torch.compile(net, backend="opforge")
            )
        run(x).sum().backward()
        results.append((x.grad, net.seen))
    torch.testing.assert_close(results[1], results[0])


def _leaf_of_input(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    row = x[1].requires_grad_()
    return (row * w).sum(), row


def _leaf_of_result(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    row = (x + 1)[1].requires_grad_()
    return (row * w).sum(), row


@pytest.mark.parametrize("fn", [_leaf_of_input, _leaf_of_result], ids=lambda f: f.__name__)
def test_a_view_that_is_made_a_leaf_gets_its_gradient(fn: Run) -> None:
    results = []
    for run in (fn, _compiled(fn, "aot_function")):
        x, w = torch.arange(12.0).view(4, 3), torch.ones(3, requires_grad=True)
        loss, row = run(x, w)
        loss.backward()
        results.append((row.requires_grad, row.is_leaf, row.grad, w.grad))
    torch.testing.assert_close(results[1], results[0])


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(12.0).view(4, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        row = self.table[1].requires_grad_()
        return (row * self.weight * x).sum(), row


def test_a_view_of_a_buffer_that_is_made_a_leaf_gets_its_gradient() -> None:
    results = []
    for k in range(2):
        net = Rows()
        loss, row = (opforge.aot_module(net, fw_compiler=nop) if k else net)(torch.ones(3))
        loss.backward()
        results.append((row.requires_grad, row.grad, net.weight.grad))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_write_to_a_view_makes_inputs_beside_it_require_grad(rows: int) -> None:
    """One without elements too: autograd follows the view's base."""

    def program(x: Tensor, w: Tensor, part: Tensor) -> Tensor:
        part.mul_(w)
        return x.atan()

    results = []
    for k in range(2):
        base, w = torch.ones(rows, 2), torch.full((2,), 0.5, requires_grad=True)
        args = (base[-1:], w, base[:-1]) if rows > 1 else (base, w, base[:-1])
        y = (opforge.compile_fx(Called(program), list(args)) if k else program)(*args)
        results.append((y.requires_grad, args[0].requires_grad, args[2].requires_grad, y.detach()))
    torch.testing.assert_close(results[1], results[0])


class Called(nn.Module):
    def __init__(self, fn: Run) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Tensor) -> Any:
        return self.fn(*args)
