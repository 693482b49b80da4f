"""Training through the whole path: losses, gradients, buffers and refusals as eager has them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opforge


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    opforge.reset_stats()
    yield
    assert not opforge.stats()["fallbacks"], "nothing here should run eagerly as a whole"


def compiled(fn: Callable[..., Any], **kw: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="opforge", **kw)  # type: ignore[no-any-return]


# --- models


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.out = nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.layer(self.embed(ids))).reshape(-1, 50)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(8, 16), nn.Linear(16, 4)

    def forward(self, xs: Tensor) -> Tensor:
        h = c = xs.new_zeros(xs.shape[1], 16)
        for x in xs:
            h, c = self.cell(x, (h, c))
        return self.out(h)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.0), nn.Linear(16, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "perceptron": (perceptron, lambda: (torch.randn(5, 8), torch.randint(0, 4, (5,)))),
    "convolutional": (convolutional, lambda: (torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4,)))),
    "encoder": (Encoder, lambda: (torch.randint(0, 50, (2, 12)), torch.randint(0, 50, (24,)))),
    "recurrent": (Recurrent, lambda: (torch.randn(6, 5, 8), torch.randint(0, 4, (5,)))),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
}


def train(run: Callable[..., Any], model: nn.Module, batch: Any, optimizer: Any, steps: int = 5) -> list[float]:
    """Losses of `steps` steps on fresh seeded batches."""
    update, losses = optimizer(model.parameters()), []
    wide = next(model.parameters()).dtype
    for step in range(steps):
        torch.manual_seed(step)
        x, target = batch()
        loss = F.cross_entropy(run(x.to(wide) if x.is_floating_point() else x), target)
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def far(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_eager(name: str, optimizer: str) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(0)
    eager = make()
    mine, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    curves = [
        train(run, model, batch, OPTIMIZERS[optimizer])
        for run, model in ((eager, eager), (compiled(mine), mine), (exact, exact))
    ]
    assert opforge.stats()["graphs"] == 1
    scale = max(float(p.detach().abs().max()) for p in exact.parameters())
    # Adam divides by the root of tiny squares: there a rounding step of the gradient is a rounding step of the learning rate.
    slack = (1e-3 if optimizer == "adamw" else 4e-7) * scale
    assert far(mine, exact) <= 2 * far(eager, exact) + slack
    for a, b, c in zip(*curves, strict=True):
        assert abs(b - c) <= 2 * abs(a - c) + 1e-5 * abs(c)


def test_dropout_uses_eagers_stream() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.4), nn.Linear(64, 4))
    mine = copy.deepcopy(model)
    run, x = compiled(mine, options={"random": "eager"}), torch.randn(16, 8)
    for f in (model, run):
        torch.manual_seed(3)
        f(x).square().sum().backward()
    for p, q in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# --- gradients of functions


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * x.exp() * 2


def autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.relu(x @ w).sum(-1)


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[0] = w[0]
    y[:, 1] *= 2
    return y.cumsum(0)


def half_without_grad(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        scale = (x * w).sigmoid()
    return x * scale, w.detach() + x, scale


def mutates(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    x.mul_(w)
    return x.view(-1), x.detach(), w.sin()


def many_views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x * w
    return (*y.split(2), y.t(), y[0], x[1:])


def recomputed(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda a: torch.sin(a @ w).exp(), x, use_reentrant=False)  # type: ignore[no-any-return]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "custom function": lambda x, w: Doubled.apply(x) * w,
    "softmax": lambda x, w: torch.softmax(x @ w, -1),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None], scale=0.5),
    "max and sort": lambda x, w: (x.max(1)[0], x.sort(0)[0], w.topk(2)[0]),
    "gather": lambda x, w: x[torch.tensor([1, 1, 3])].sum(0) + w.gather(0, torch.tensor([[0], [2]])).sum(),
    "one unused": lambda x, w: x.sin(),
    "returns an input": lambda x, w: (x, x * 2, w),
    "a number beside": lambda x, w: (x * w, x.shape[0] * 2, None),
    "autocast": autocast,
    "in place": in_place,
    "half without grad": half_without_grad,
    "mutates": mutates,
    "many views": many_views,
    "recomputed": recomputed,
}


def results(fn: Callable[..., Any], args: list[Tensor]) -> list[Tensor | None]:
    """Outputs, gradients of the leaves behind `args`, and the inputs afterwards."""
    inputs = [a * 1 for a in args]  # not leaves: a program may write to them
    out = fn(*inputs)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, Tensor)]
    weights = [torch.linspace(0.5, 1.5, o.numel()).reshape(o.shape) for o in outs]
    sum((o * w).sum() for o, w in zip(outs, weights, strict=True) if o.requires_grad).backward()  # type: ignore[union-attr]
    return [*outs, *(a.grad for a in args), *inputs]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_as_eager(name: str, dynamic: bool) -> None:
    fn = FUNCTIONS[name]
    run = compiled(fn, dynamic=dynamic)
    for size in (4, 6) if dynamic and name != "many views" else (4,):  # a split has other results for other sizes
        pairs = []
        for f in (fn, run):
            torch.manual_seed(size)
            args = [torch.randn(size, size, requires_grad=True) for _ in range(2)]
            pairs.append(results(f, args))
        for a, b in zip(*pairs, strict=True):
            assert (a is None) == (b is None)
            if a is None or b is None:
                continue
            assert (a.requires_grad, a.is_leaf, a.stride()) == (b.requires_grad, b.is_leaf, b.stride())
            assert (a.grad_fn is None) == (b.grad_fn is None)
            torch.testing.assert_close(a, b)


# --- refusals: what eager refuses, and nothing else

WRITES: dict[str, Callable[[list[Tensor], list[Tensor]], Any]] = {
    "nothing": lambda inputs, outs: None,
    "first input": lambda inputs, outs: inputs[0].add_(1),
    "last input": lambda inputs, outs: inputs[-1].add_(1),
    "first output": lambda inputs, outs: outs[0].add_(1),
    "last output": lambda inputs, outs: outs[-1].mul_(1),
}
SAVING: dict[str, Callable[..., Any]] = {
    "product": lambda x, w: ((x * w).exp().relu(), w.sin()),
    "results": lambda x, w: (torch.softmax(x, -1).sum(), w.sigmoid()),
    "written": lambda x, w: (x.mul_(2).cos(), w.tanh()),
}


def gradients(outs: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
    """Gradients of the sum of `outs`; none at all where autograd refuses."""
    try:
        sum(o.sum() for o in outs).backward()  # type: ignore[union-attr]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return []
    return [a.grad for a in leaves]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", SAVING)
def test_backward_refuses_what_eager_refuses(name: str, write: str) -> None:
    found = []
    for f in (SAVING[name], compiled(SAVING[name])):
        torch.manual_seed(0)
        leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
        inputs = [a * 1 for a in leaves]
        outs = list(f(*inputs))
        with torch.no_grad():
            WRITES[write](inputs, outs)
        found.append(gradients(outs, leaves))
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_any_layout() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    out = compiled(lambda t: t.sin().t())(x)
    g = torch.randn(4, 6).t()
    for layout in (g, g.contiguous(), torch.ones(()).expand(6, 4)):
        (mine,) = torch.autograd.grad(out, x, layout, retain_graph=True)
        torch.testing.assert_close(mine, layout.t() * x.cos())


def test_hooks_and_retained_gradients() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x * 2
    seen: list[Tensor] = []
    y.retain_grad()
    y.register_hook(seen.append)
    compiled(lambda t: t.square())(y).sum().backward()
    torch.testing.assert_close(y.grad, 2 * y.detach())
    torch.testing.assert_close(seen[0], 2 * y.detach())


def test_an_optimizer_of_single_tensors_needs_no_eager_kernels() -> None:
    """Dynamo of torch 2.13 writes `addcdiv_` with a value, and `add_` with a tensor `lr`, by an operator of its own."""
    makers = [
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), foreach=False),
    ]
    for make in makers:
        steps = []
        for backend in (None, "opforge"):
            torch._dynamo.reset()
            opforge.reset_stats()
            torch.manual_seed(0)
            parameters = [torch.nn.Parameter(torch.randn(5, 7))]
            optimizer = make(parameters)
            step = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
            for _ in range(3):
                parameters[0].grad = torch.ones(5, 7)
                step()
            steps.append(parameters[0].detach())
        assert opforge.stats()["externs"] == {}
        torch.testing.assert_close(steps[1], steps[0])
