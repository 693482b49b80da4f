"""Gradients of a loss that the forward computes: for every use of the loss they are those of eager, and where nobody else looks they are given
out in the memory that they were kept in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge
from opforge.runtime.compile_fx import HISTORY

ROWS, CLASSES = 128, 4096


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    opforge.reset_stats()
    yield
    assert not opforge.stats()["fallbacks"], "nothing here should run eagerly as a whole"


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, label_smoothing=0.1)


def distilled(logits: Tensor, targets: Tensor) -> Tensor:
    wanted = F.one_hot(targets, CLASSES).to(logits.dtype)
    return F.kl_div(F.log_softmax(logits, -1), wanted, reduction="batchmean")


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(0, CLASSES, (ROWS,))
    return torch.randn(ROWS, CLASSES, dtype=dtype), targets


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="opforge", options={"strict": True, **options})  # type: ignore[no-any-return]


def is_early() -> bool:
    """Whether the backward of the last graph only multiplies what the forward has made."""
    return "else scaled(arguments, " in HISTORY[-1].function


def near(got: Tensor, want: Tensor, eager: Tensor | None = None) -> None:
    error = (got.double() - want).norm() / want.norm()
    mistake = 0.0 if eager is None else float((eager.double() - want).norm() / want.norm())
    assert error <= max(2 * mistake, 2e-6), (float(error), mistake)


@pytest.mark.parametrize("fn", [loss_of, smoothed, distilled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("factor", [None, 3.0])
def test_gradients_are_eagers(fn: Callable[..., Any], dtype: torch.dtype, factor: float | None) -> None:
    logits, targets = drawn(dtype)

    def both(call: Callable[..., Any], logits: Tensor, targets: Tensor = targets) -> tuple[Tensor, Tensor]:
        x = logits.clone().requires_grad_()
        loss = call(x, targets)
        (loss if factor is None else loss * factor).backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    run = compiled(fn)
    got, eager, want = both(run, logits), both(fn, logits), both(fn, logits.double())
    for g, e, w in zip(got, eager, want, strict=True):
        assert g.dtype == e.dtype
        near(g, w, e)
    assert fn is not loss_of or is_early()


@pytest.mark.parametrize("early", [True, False])
def test_in_the_memory_that_was_saved(early: bool) -> None:
    logits, targets = drawn()
    run = compiled(loss_of, early_gradients=early)
    for factor in (1.0, 2.0):
        x = logits.clone().requires_grad_()
        loss = run(x, targets)
        place = _kept(loss).data_ptr()
        (loss * factor).backward()
        assert x.grad is not None
        assert x.grad.data_ptr() == place
        near(x.grad, _exact(logits, targets, factor))
    assert is_early() == early


def _kept(loss: Tensor) -> Tensor:
    assert loss.grad_fn is not None
    return max(loss.grad_fn.saved_tensors, key=Tensor.numel)  # type: ignore[attr-defined, no-any-return]


def _exact(logits: Tensor, targets: Tensor, factor: float = 1.0) -> Tensor:
    x = logits.double().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(x, targets) * factor, x)
    return grad


@pytest.mark.parametrize("early", [True, False])
def test_what_others_hold_is_not_written(early: bool) -> None:
    logits, targets = drawn()
    run = compiled(loss_of, early_gradients=early)
    x = logits.clone().requires_grad_()
    loss = run(x, targets)
    held = _kept(loss)
    before = held.clone()
    (loss * 5).backward()
    assert x.grad is not None
    near(x.grad, _exact(logits, targets, 5.0))
    assert held.equal(before)
    loss = run(x, targets)
    view = _kept(loss)[1:]
    (loss * 5).backward()
    assert view.equal(before[1:])
    loss = run(x, targets)
    memory = _kept(loss).untyped_storage()  # the Python object of which there is one
    (loss * 5).backward()
    assert torch.empty(0).set_(memory, 0, before.shape).equal(before)  # type: ignore[call-overload]


@pytest.mark.parametrize("early", [True, False])
def test_graph_that_is_retained_gives_the_same_again(early: bool) -> None:
    logits, targets = drawn()
    x = logits.clone().requires_grad_()
    loss = compiled(loss_of, early_gradients=early)(x, targets)
    first = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)[0]
    first.zero_()  # it is the caller's own
    for factor in (3.0, 1.0, -2.0):
        (grad,) = torch.autograd.grad(loss, x, torch.tensor(factor), retain_graph=True)
        near(grad, _exact(logits, targets, factor))
    (last,) = torch.autograd.grad(loss, x)
    near(last, _exact(logits, targets))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


@pytest.mark.parametrize("early", [True, False])
def test_several_gradients_at_once(early: bool) -> None:
    """`is_grads_batched`: one row for each."""
    logits, targets = drawn()
    x = logits.clone().requires_grad_()
    loss = compiled(loss_of, early_gradients=early)(x, targets)
    factors = torch.tensor([1.0, -2.0])
    (grads,) = torch.autograd.grad(loss, x, factors, is_grads_batched=True)
    for grad, factor in zip(grads, factors.tolist(), strict=True):
        near(grad, _exact(logits, targets, factor))


@pytest.mark.parametrize("early", [True, False])
def test_saved_tensors_that_hooks_move(early: bool) -> None:
    logits, targets = drawn()
    x = logits.clone().requires_grad_()
    kept: list[Tensor] = []

    def pack(t: Tensor) -> int:
        kept.append(t)
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda k: kept[k]):
        loss = compiled(loss_of, early_gradients=early)(x, targets)
    before = [t.clone() for t in kept]
    (loss * 2).backward()
    assert x.grad is not None
    near(x.grad, _exact(logits, targets, 2.0))
    assert all(t.equal(b) for t, b in zip(kept, before, strict=True))


@pytest.mark.parametrize("early", [True, False])
def test_gradients_add_up(early: bool) -> None:
    """Two losses of one leaf: the second gradient is added to the first, which was the saved memory of the first."""
    logits, targets = drawn()
    run = compiled(loss_of, early_gradients=early)
    x = logits.clone().requires_grad_()
    for _ in range(2):
        run(x, targets).backward()
    assert x.grad is not None
    near(x.grad, 2 * _exact(logits, targets))


def test_a_write_to_the_logits_does_not_matter() -> None:
    """Eager's backward does not read them."""
    logits, targets = drawn()
    x = logits.clone().requires_grad_()
    loss = compiled(loss_of)(x, targets)
    with torch.no_grad():
        x.zero_()
    loss.backward()
    assert x.grad is not None
    near(x.grad, _exact(logits, targets))


def test_a_write_to_the_targets_is_refused() -> None:
    logits, targets = drawn()
    loss = compiled(loss_of)(logits.clone().requires_grad_(), targets)
    targets.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_dynamic_sizes() -> None:
    run = compiled(loss_of)
    torch._dynamo.config.automatic_dynamic_shapes = True
    for rows in (ROWS, ROWS + 3, 2 * ROWS):
        logits, targets = torch.randn(rows, CLASSES), torch.randint(0, CLASSES, (rows,))
        for factor in (1.0, 2.0):
            x = logits.clone().requires_grad_()
            (run(x, targets) * factor).backward()
            assert x.grad is not None
            near(x.grad, _exact(logits, targets, factor))


@pytest.mark.parametrize("case", ["float16", "two losses", "off", "small", "product"])
def test_where_it_is_not_done(case: str) -> None:
    """Float16 (its small gradients vanish before they are scaled), several tangents, a heavy backward, little to gain."""
    logits, targets = drawn(torch.float16 if case == "float16" else torch.float32)
    fn: Callable[..., Any] = loss_of
    if case == "two losses":

        def fn(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            return loss_of(x, t), x.exp().mean()

    elif case == "product":

        def fn(x: Tensor, t: Tensor) -> Tensor:
            return loss_of(x @ torch.ones(CLASSES, 64), t % 64)

    elif case == "small":
        logits, targets = logits[:4], targets[:4]
    out = compiled(fn, early_gradients=case != "off")(logits.requires_grad_(), targets)
    (sum(out) if isinstance(out, tuple) else out).backward()
    assert not is_early()


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.5, 0.5)


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def fn(logits: Tensor, targets: Tensor) -> Tensor:
        scaled = logits * 2
        scaled.register_hook(hook)
        return F.cross_entropy(scaled, targets)

    return fn


def clipped(logits: Tensor, targets: Tensor) -> Tensor:
    return _Clipped.apply(F.cross_entropy(logits, targets))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    "fn",
    [
        clipped,
        hooked(torch.sign),
        hooked(lambda g: g + 0.25),
        hooked(lambda g: g / (g.norm() + 1e-6)),
        hooked(lambda g: torch.where(g > 0, g, 0)),
        hooked(lambda g: g * g),
        hooked(lambda g: g.masked_fill(g.isnan(), 0)),
    ],
)
def test_a_backward_that_is_no_multiple_of_the_losss_gradient_stays_one(fn: Callable[..., Any]) -> None:
    """Each was computed for a gradient of 1 and multiplied by -5."""
    logits, targets = drawn()

    def gradient(call: Callable[..., Any], logits: Tensor) -> Tensor:
        x = logits.clone().requires_grad_()
        (call(x, targets) * -5).backward()
        assert x.grad is not None
        return x.grad

    near(gradient(compiled(fn), logits), gradient(fn, logits.double()), gradient(fn, logits))
    assert not is_early()


def test_values_in_float16_on_the_way_are_made_from_the_scaled_loss() -> None:
    """Most were 0 for a gradient of 1."""
    logits, targets = drawn()

    through_half = hooked(lambda g: g.half().float())

    def gradient(call: Callable[..., Any], logits: Tensor) -> Tensor:
        x = logits.clone().requires_grad_()
        (call(x, targets) * 2.0**20).backward()
        assert x.grad is not None
        return x.grad

    exact = gradient(hooked(lambda g: g), logits.double())
    near(gradient(compiled(through_half), logits), exact, gradient(through_half, logits))
    assert not is_early()
