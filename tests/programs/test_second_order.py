"""Gradients of gradients through compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import opforge

STRICT = {"strict": True}


def compiled(program: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(program, backend="opforge", options=STRICT | options)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def twice(program: Callable[..., Any], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a program's results for its arguments, then those of all these gradients for arguments and cotangents."""
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in given]
    followed = [t for t in leaves if t.requires_grad]
    out = program(*leaves)
    results = [out] if isinstance(out, torch.Tensor) else list(out)
    cotangents = [numbers(*r.shape, seed=k + 1).to(r.device).requires_grad_() for k, r in enumerate(results)]
    first = torch.autograd.grad(results, followed, cotangents, create_graph=True)
    moving = [g for g in first if g.requires_grad]
    ways = [numbers(*g.shape, seed=k + 10).to(g.device) for k, g in enumerate(moving)]
    second = torch.autograd.grad(moving, [*followed, *cotangents], ways, materialize_grads=True)
    return [*(g.detach() for g in first), *second]


def same(ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> None:
    assert len(ours) == len(eager)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * 3 * x**2


def mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
    return torch.tanh(x @ w + b) @ v


def written_inside(x: Any, y: Any) -> Any:
    z = x * y
    z[0].mul_(x[1])
    z.sigmoid_()
    return z * y


PROGRAMS: dict[str, tuple[Callable[..., Any], Sequence[torch.Tensor]]] = {
    "sin": (lambda x: x.sin(), [numbers(5)]),
    "mlp": (mlp, [numbers(6, 4), numbers(4, 5), numbers(5), numbers(5, 2)]),
    "sum of both": (lambda x, y: (x + y).square(), [numbers(5, 4), numbers(4)]),
    "sine of a sum": (lambda x, y, z: (x * y + z).sin(), [numbers(5, 4), numbers(4), numbers(5, 1)]),
    "detached": (lambda x, y: x * y.detach() * x * y.sin(), [numbers(4), numbers(4, seed=1)]),
    "norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b).square(), [numbers(4, 6), numbers(6), numbers(6)]),
    "softmax": (lambda x: x.softmax(-1).log().square().sum(), [numbers(4, 5)]),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t), [numbers(4, 5), torch.tensor([1, 2, 0, 4])]),
    "convolution": (lambda x, w: F.conv2d(x, w).relu().square(), [numbers(2, 3, 5, 5), numbers(4, 3, 3, 3)]),
    "attention": (
        lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v,
        [numbers(2, 5, 4), numbers(2, 5, 4, seed=1), numbers(2, 5, 4, seed=2)],
    ),
    "views": (lambda x: F.gelu(x[1:].mT).cumsum(0).expand(2, 3, 4), [numbers(5, 3)]),
    "own function": (lambda x, y: Cubed.apply(x * y).sum(0), [numbers(4, 3), numbers(3)]),
    "written inside": (written_inside, [numbers(3, 2), numbers(3, 2, seed=1)]),
    "several results": (lambda x, y: (x * y, (x / y.exp()).sum(), x.cos()), [numbers(3), numbers(3, seed=1)]),
    "one gradient for two": (lambda x, y: (x + y).sin() + 0 * x, [numbers(3), numbers(3, seed=1)]),
    "the cotangent itself": (lambda x, y: x + y * y, [numbers(3), numbers(3, seed=1)]),
    "checkpoint": (
        lambda x, w: checkpoint(lambda a: (a @ w).sin(), x, use_reentrant=False).exp(),
        [numbers(4, 4), numbers(4, 4, seed=1)],
    ),
    "fft": (lambda x: torch.fft.rfft(x).abs().square(), [numbers(8)]),
    "solve": (lambda a, b: torch.linalg.solve(a, b), [numbers(4, 4), numbers(4, 2)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_gradients_are_eagers(name: str) -> None:
    program, given = PROGRAMS[name]
    same(twice(compiled(program), given), twice(program, given))


def test_they_are_compiled() -> None:
    opforge.reset_stats()
    twice(compiled(PROGRAMS["mlp"][0]), PROGRAMS["mlp"][1])
    stats = opforge.stats()
    assert stats["graphs"] == 2, "the program, and its gradients as a program"
    assert not stats["fallbacks"]


def test_through_several_graphs() -> None:
    """Inputs of the second graph have a history, and its backward needs them no more than the first."""

    def inner(x: Any, w: Any) -> Any:
        return (x @ w).sin()

    def outer(x: Any, w: Any) -> Any:
        h = inner(x, w)
        torch._dynamo.graph_break()
        return (h + x).sin() * w.sum()

    given = [numbers(4, 4), numbers(4, 4, seed=1)]
    same(twice(compiled(outer), given), twice(outer, given))


def test_an_input_written_afterwards_keeps_its_old_history() -> None:
    def program(run: Callable[..., Any]) -> list[torch.Tensor]:
        x, w = numbers(4).requires_grad_(), numbers(4, seed=1).requires_grad_()
        h = x * 2
        y = run(h, w)
        h.mul_(w)  # the backward reads its sum
        first = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
        return [*first, *torch.autograd.grad((first[0] * first[1]).sum(), [x, w])]

    def total(h: Any, w: Any) -> Any:
        return h.sum() * w.sum()

    same(program(compiled(total)), program(total))


def test_what_is_written_meanwhile_is_refused() -> None:
    def program(run: Callable[..., Any]) -> None:
        x = numbers(4).requires_grad_()
        h = x * 2
        y = run(h)
        h.mul_(3)
        torch.autograd.grad(y.sum(), x, create_graph=True)

    for run in (lambda h: h.exp() * h, compiled(lambda h: h.exp() * h)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            program(run)


def test_random_numbers_are_those_of_the_forward() -> None:
    masks = []

    def program(x: Any, w: Any, mask: Any = None) -> Any:
        mask = F.dropout(torch.ones_like(x), 0.5) if mask is None else mask
        return (torch.tanh(x @ w) * mask).sin() @ w, mask

    def run(f: Callable[..., Any], mask: Any = None) -> list[torch.Tensor]:
        def result(x: Any, w: Any) -> Any:
            out, used = f(x, w, mask)
            masks.append(used)
            return out

        return twice(result, [numbers(6, 4), numbers(4, 4, seed=1)])

    for random in ("eager", "philox"):
        masks.clear()
        ours = run(compiled(program, random=random))
        same(ours, run(program, masks[0]))


def test_masks_that_are_made_again_from_their_seed() -> None:
    x, c = numbers(50).requires_grad_(), numbers(50, seed=1).requires_grad_()
    y = compiled(lambda t: F.dropout(t.sin(), 0.5) * t)(x)
    (first,) = torch.autograd.grad(y, x, c, create_graph=True)
    mask = (y.detach() != 0).double() * 2
    expected = c * mask * (x.cos() * x + x.sin())
    same([first], [expected])
    same(torch.autograd.grad(first.sum(), [x, c]), torch.autograd.grad(expected.sum(), [x, c]))


def test_a_result_without_a_gradient_counts_for_nothing() -> None:
    """Not for zeros, which are NaN where they meet an infinite derivative."""

    def program(run: Callable[..., Any]) -> list[torch.Tensor]:
        x = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
        found = []
        for k in range(2):
            (first,) = torch.autograd.grad(run(x)[k].sum(), x, create_graph=True)
            found += [first.detach(), *torch.autograd.grad(first.sum(), x)]
        return found

    def network(x: Any) -> Any:
        return x.sqrt(), x.sin()

    ours, eager = program(compiled(network)), program(network)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    torch._dynamo.reset()
    run = torch.compile(network, backend="opforge", options=STRICT, dynamic=True)
    for a, b in zip(program(run), eager, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_gradients_given_lazily_and_sparse() -> None:
    def program(run: Callable[..., Any]) -> list[torch.Tensor]:
        z = torch.complex(numbers(4), numbers(4, seed=1)).requires_grad_()
        c = torch.complex(numbers(4, seed=2), numbers(4, seed=3)).requires_grad_()
        y = run(z)
        found = []
        for cotangent in (c, c.conj(), c.expand(2, 4).conj()[0]):
            (first,) = torch.autograd.grad(y, z, cotangent, create_graph=True)
            found += [first, *torch.autograd.grad(first.abs().square().sum(), [z, c], retain_graph=True)]
        return found

    same(program(compiled(lambda z: z * z.exp())), program(lambda z: z * z.exp()))

    def looked_up(run: Callable[..., Any]) -> torch.Tensor:
        x = numbers(4, 3).requires_grad_()
        rows = F.embedding(torch.tensor([1, 1, 2]), run(x), sparse=True)
        (first,) = torch.autograd.grad(rows.square().sum(), x, create_graph=True)
        return first.to_dense() if first.is_sparse else first

    same([looked_up(compiled(torch.sin))], [looked_up(torch.sin)])


def forces(energy: Callable[..., Any], model: torch.nn.Module, steps: int) -> list[float]:
    """Training of a model of energies on forces, as models of atoms are."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        places = numbers(5, 3, seed=step).to(next(model.parameters()).device).requires_grad_()
        (force,) = torch.autograd.grad(energy(places), places, create_graph=True)
        loss = (force - places.detach().sin()).square().mean() + energy(places).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Energy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(1, 16), torch.nn.SiLU(), torch.nn.Linear(16, 16), torch.nn.SiLU()]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1)).double()

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        away = (places[:, None] - places[None]).square().sum(-1) + torch.eye(
            len(places), dtype=places.dtype, device=places.device
        )
        return (self.net((-away.sqrt())[..., None].exp())).sum()


def test_training_on_forces() -> None:
    plain, ours = Energy(), Energy()
    expected = forces(plain, plain, 5)
    found = forces(compiled(ours), ours, 5)
    assert found == pytest.approx(expected, rel=1e-9)
    same([*ours.parameters()], [*plain.parameters()])


def test_a_penalty_of_gradients() -> None:
    """Weights get gradients through the gradient of an input, for a part of the results only."""

    def program(run: Callable[..., Any]) -> list[torch.Tensor]:
        x, w = numbers(6, 4).requires_grad_(), numbers(4, 1, seed=1).requires_grad_()
        score, hidden = run(x, w)
        (g,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        ((g.norm(dim=1) - 1).square().mean() + hidden.mean() + score.mean()).backward()
        return [x.grad, w.grad]  # type: ignore[list-item]

    def network(x: Any, w: Any) -> Any:
        hidden = F.leaky_relu(x @ w)
        return hidden.tanh() * x.sin(), hidden

    same(program(compiled(network)), program(network))


def test_a_hessian_by_rows() -> None:
    x = numbers(4).requires_grad_()

    def hessian(f: Callable[..., Any]) -> list[torch.Tensor]:
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        return [torch.autograd.grad(g[k], x, retain_graph=True)[0] for k in range(4)]

    def program(t: Any) -> Any:
        return (t.exp() * t.roll(1)).sum().square()

    same(hessian(compiled(program)), hessian(program))
    ours = torch.autograd.functional.hessian(compiled(program), x.detach())
    torch.testing.assert_close(ours, torch.autograd.functional.hessian(program, x.detach()))


def test_the_graph_can_be_asked_again() -> None:
    x = numbers(4).requires_grad_()
    y = compiled(lambda t: t.sin().exp())(x).sum()
    first = [torch.autograd.grad(y, x, create_graph=True)[0] for _ in range(2)]
    plain = torch.autograd.grad(y, x)[0]
    same([first[0], first[1]], [plain, plain])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, create_graph=True)


def test_a_third_gradient_is_refused() -> None:
    x = numbers(4).requires_grad_()
    (g,) = torch.autograd.grad(compiled(lambda t: t.sin().exp())(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*without torch.compile"):
        torch.autograd.grad((g * g).sum(), x, create_graph=True)


def test_an_operator_without_a_second_gradient_is_named() -> None:
    def program(q: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, q, q)

    q = numbers(1, 2, 8, 16).float().requires_grad_()
    y = compiled(program)(q)
    with pytest.raises(RuntimeError, match="attention"):
        torch.autograd.grad(y.sum(), q, create_graph=True)
    torch.autograd.grad(y.sum(), q)  # nothing is lost


def test_rows_at_once() -> None:
    """`is_grads_batched`, of a gradient and of a gradient's gradient."""

    def program(run: Callable[..., Any]) -> list[torch.Tensor]:
        x = numbers(3, 4).requires_grad_()
        y = run(x)
        rows = torch.eye(3, dtype=torch.float64)
        (g,) = torch.autograd.grad(y, x, rows, is_grads_batched=True, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), x, retain_graph=True)
        (once,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (k,) = torch.autograd.grad(once, x, numbers(5, 3, 4), is_grads_batched=True)
        return [g.detach(), h, k]

    def network(x: Any) -> Any:
        return (x.sin() * x.roll(1, 0)).sum(1).exp()

    same(program(compiled(network)), program(network))
    x = numbers(4)
    vectorized = torch.autograd.functional.hessian(compiled(lambda t: network(t[:, None]).sum()), x, vectorize=True)
    torch.testing.assert_close(vectorized, torch.autograd.functional.hessian(lambda t: network(t[:, None]).sum(), x))


@pytest.mark.parametrize("name", ["mlp", "norm", "sine of a sum", "views", "cross entropy", "written inside"])
def test_sizes_that_are_symbols(name: str) -> None:
    program, given = PROGRAMS[name]
    torch._dynamo.reset()
    run = torch.compile(program, backend="opforge", options=STRICT, dynamic=True)
    same(twice(run, given), twice(program, given))
    taller = [torch.cat([t, t]) if k == 0 or t.shape[0] == given[0].shape[0] else t for k, t in enumerate(given)]
    if name in ("mlp", "norm", "cross entropy", "written inside"):
        opforge.reset_stats()
        same(twice(run, taller), twice(program, taller))
        assert opforge.stats()["graphs"] == 1, "only what depends on the sizes is compiled again"


def test_sizes_from_data() -> None:
    def program(x: Any) -> Any:
        return x[x > 0].sin() * x.sum()

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(program, backend="opforge", options=STRICT, fullgraph=True)
        for seed in range(2):
            same(twice(run, [numbers(6, seed=seed)]), twice(program, [numbers(6, seed=seed)]))
