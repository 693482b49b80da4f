"""`scaled_dot_product_attention` with all kinds of masks, with gradients, judged by a float64 run; masks that say nothing are dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import opforge
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.lower.known import truth
from opforge.runtime.torch_compat import minor_version

BATCH, HEADS, STEPS, WIDTH = 2, 4, 7, 8
Mask = Callable[[int, int, int], Tensor]


def library_mask(holds: Callable[[Tensor, Tensor], Tensor]) -> Mask:
    """A mask as transformers makes it of a function of positions: expanded, so that its last stride may be 0."""

    def make(batch: int, queries: int, keys: int) -> Tensor:
        q, k = torch.arange(queries) + 0, torch.arange(keys) + 0
        return holds(q[None, None, :, None], k[None, None, None, :]).expand(batch, -1, queries, keys)

    return make


def and_mask(q: Tensor, k: Tensor) -> Tensor:
    return q.new_ones((), dtype=torch.bool) & (k <= q) & (q >= 0)


def of_padding(batch: int, queries: int, keys: int) -> Tensor:
    kept = torch.ones(batch, keys, dtype=torch.long).to(torch.bool)
    return kept[torch.arange(batch)[:, None, None, None], torch.arange(keys)[None, None, None, :]]


def written(batch: int, queries: int, keys: int) -> Tensor:
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    mask[:] = True
    return mask


def of_numbers(hidden: Callable[[], float], holds: Callable[[Tensor, Tensor], Tensor]) -> Mask:
    """What is added to the scores: 0, and a low number where a library wants them to vanish."""

    def make(batch: int, queries: int, keys: int) -> Tensor:
        q, k = torch.arange(queries), torch.arange(keys)
        mask = torch.full((queries, keys), hidden())
        return mask.masked_fill_(holds(q[:, None], k), 0.0)[None, None].expand(batch, 1, -1, -1)

    return make


def written_once_more(batch: int, queries: int, keys: int) -> Tensor:
    mask = torch.ones(queries, keys, dtype=torch.bool)
    mask[:, 0] = False
    return mask


def of_packed(batch: int, queries: int, keys: int) -> Tensor:
    """As transformers keeps packed sequences apart, here one sequence: positions that do not follow each other begin another."""
    positions = torch.arange(queries)[None].expand(batch, -1)
    begins = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    sequence = begins.cumsum(-1)
    q, k = torch.arange(queries), torch.arange(keys)
    return (k[None, :] <= q[:, None]) & (sequence[:, None, :, None] == sequence[:, None, None, :])


def square(f: Callable[[Tensor], Tensor]) -> Mask:
    return lambda batch, queries, keys: f(torch.ones(queries, keys, dtype=torch.bool))


ALL_TRUE: dict[str, Mask] = {
    "both ways": library_mask(lambda q, k: q >= 0),
    "ones": square(lambda ones: ones),
    "ones of all": lambda batch, queries, keys: torch.ones(batch, 1, queries, keys, dtype=torch.bool),
    "one number": lambda batch, queries, keys: torch.ones(1, 1, dtype=torch.bool),
    "padding that is none": of_padding,
    "written": written,
    "zeros": lambda batch, queries, keys: torch.zeros(queries, keys),
    "all filled": of_numbers(lambda: -torch.inf, lambda q, k: (q >= 0) & (k >= 0)),
    "one of two": square(lambda ones: ones.tril() | ones),
}
LOWER: dict[str, Mask] = {
    "causal": library_mask(lambda q, k: k <= q),
    "several functions": library_mask(and_mask),
    "tril": square(torch.tril),
    "tril of numbers": lambda batch, queries, keys: torch.ones(queries, keys).tril() == 1,
    "no triu": square(lambda ones: ~ones.triu(1)),
    "nothing of triu": lambda batch, queries, keys: torch.ones(queries, keys).triu(1) == 0,
    "lowest above": of_numbers(lambda: torch.finfo(torch.float32).min, lambda q, k: k <= q),
    "minus infinity above": lambda batch, queries, keys: torch.triu(torch.full((queries, keys), -torch.inf), 1),
    "filled": square(lambda ones: torch.zeros_like(ones).masked_fill(ones.tril(), True)),
}
OTHERS: dict[str, Mask] = {
    "one diagonal more": square(lambda ones: ones.tril(1)),
    "upper triangle": square(torch.triu),
    "window": library_mask(lambda q, k: (k <= q) & (k > q - 3)),
    "last written": written_once_more,
    "some more than others": of_numbers(lambda: -10000.0, lambda q, k: k <= q),
    "ones to be added": lambda batch, queries, keys: torch.ones(queries, keys),
    "all but one": square(lambda ones: ones.cumsum(0) != 3),
    "of steps": library_mask(lambda q, k: q % 2 == k % 2),
    "none for the first": library_mask(lambda q, k: q > 0),
}


def tensors(steps: int = STEPS, keys: int = STEPS, batch: int = BATCH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(steps + keys)
    q = torch.randn(batch, HEADS, steps, WIDTH, generator=generator)
    return [q, *(torch.randn(batch, HEADS, keys, WIDTH, generator=generator) for _ in range(2))]


def attends(mask: Mask, **more: Any) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask(q.shape[0], q.shape[2], k.shape[2]), **more)

    return run


def calls(f: Callable[..., Tensor], inputs: list[Tensor], dynamic: bool = False) -> list[tuple[bool, bool]]:
    """For each call of the CPU's fused attention in the traced graph: whether it has a mask, and whether it is causal by itself."""
    found: list[tuple[bool, bool]] = []

    def keep(gm: fx.GraphModule, example: list[Any]) -> Any:
        for node in trace(gm, example, truth=truth).graph.graph.nodes:
            if "flash_attention" in str(node.target):
                causal = len(node.args) > 4 and bool(node.args[4])
                found.append((node.kwargs.get("attn_mask") is not None, causal))
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(f, backend=keep, dynamic=dynamic)(*inputs)
    return found


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ALL_TRUE)
def test_mask_that_is_all_true_is_no_mask(name: str, dynamic: bool) -> None:
    assert calls(attends(ALL_TRUE[name]), tensors(), dynamic) == [(False, False)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LOWER)
def test_lower_triangle_is_causal(name: str, dynamic: bool) -> None:
    assert calls(attends(LOWER[name]), tensors(), dynamic) == [(False, True)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay(name: str, dynamic: bool) -> None:
    assert calls(attends(OTHERS[name]), tensors(), dynamic) == [(True, False)]


def test_elements_of_known_sizes_are_looked_at() -> None:
    """Where no expression says it for all sizes."""
    squares = library_mask(lambda q, k: (k - q) ** 2 >= 0)
    assert calls(attends(squares), tensors()) == [(False, False)]
    assert calls(attends(squares), tensors(), dynamic=True) == [(True, False)]
    assert calls(attends(of_packed), tensors()) == [(False, True)]
    of_data = square(lambda ones: ones & (torch.ones(STEPS, STEPS).sin() > 0))
    assert calls(attends(of_data), tensors()) == [(True, False)]  # floats may differ from device to device


def test_sizes_decide() -> None:
    """A window that no position leaves is no mask, where the sizes are known; one that is as wide as the sequence is one that some do."""
    window = attends(library_mask(lambda q, k: k > q - 8))
    assert calls(window, tensors(7)) == [(False, False)]
    assert calls(window, tensors(9, 9)) == [(True, False)]
    assert calls(window, tensors(7), dynamic=True) == [(True, False)]
    triangle = attends(LOWER["causal"])
    assert calls(triangle, tensors(5, 7)) == [(True, False)]
    assert calls(attends(ALL_TRUE["both ways"]), tensors(5, 7)) == [(False, False)]


def test_mask_that_would_make_the_result_larger_is_refused_as_by_eager() -> None:
    """Eager adds a mask of five batches to the scores of one in place."""
    f = attends(lambda batch, queries, keys: torch.ones(5, 1, queries, keys, dtype=torch.bool))
    inputs = tensors(batch=1)
    for run in (f, torch.compile(f, backend="opforge", dynamic=False)):
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            run(*inputs)


PROGRAMS: dict[str, Callable[..., Tensor]] = {
    **{name: attends(ALL_TRUE[name]) for name in ("both ways", "padding that is none", "zeros")},
    **{name: attends(LOWER[name]) for name in ("causal", "nothing of triu", "lowest above")},
    **{name: attends(OTHERS[name]) for name in ("one diagonal more", "window", "last written")},
    "no mask": F.scaled_dot_product_attention,
    "causal by itself": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scaled": attends(ALL_TRUE["both ways"], scale=0.7),
    "causal and scaled": attends(LOWER["causal"], scale=0.7),
    "grouped": lambda q, k, v: attends(ALL_TRUE["ones of all"], enable_gqa=True)(q, k[:, :2], v[:, :2]),
    "grouped and causal": lambda q, k, v: attends(LOWER["causal"], enable_gqa=True)(q, k[:, :2], v[:, :2]),
    "without heads": lambda q, k, v: F.scaled_dot_product_attention(
        q[0], k[0], v[0], torch.ones(q.shape[2], k.shape[2]).tril().bool()
    ),
    "the overload": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(
        q, k, v, ALL_TRUE["ones"](1, *q.shape[2:3], k.shape[2])
    ),
    "bias of numbers": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, (q[:, :1] @ k[:, :1].mT).tanh()),
    "padding of data": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, (v[:, :1, :, 0] > -1)[:, :, None].expand(-1, -1, q.shape[2], -1)
    ),
}


def gradients(f: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = f(*leaves)
    return [out.detach(), *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)]


def exact_of(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The program in float64: its numbers are made so too."""

    def run(*inputs: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return f(*inputs)
        finally:
            torch.set_default_dtype(before)

    return run


DYNAMIC = ("both ways", "causal", "window", "grouped", "bias of numbers", "padding of data")


@pytest.mark.parametrize(("name", "dynamic"), [*((p, False) for p in PROGRAMS), *((p, True) for p in DYNAMIC)])
def test_values_and_gradients(name: str, dynamic: bool) -> None:
    f = PROGRAMS[name]
    torch._dynamo.reset()
    with opforge.config.patch(strict=True):
        compiled = torch.compile(f, backend="opforge", dynamic=dynamic)
        for steps in (STEPS, 12) if dynamic else (STEPS,):
            inputs = tensors(steps, steps)
            exact = gradients(exact_of(f), [t.double() for t in inputs])
            with torch.no_grad():
                assert (compiled(*inputs) - exact[0]).abs().max() < 2e-6
            for ours, theirs, true in zip(gradients(compiled, inputs), gradients(f, inputs), exact, strict=True):
                assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
                assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + 1e-6 * true.abs().max()


def test_rows_without_keys_are_as_in_eager() -> None:
    f, inputs = attends(OTHERS["none for the first"]), tensors()
    compiled = torch.compile(f, backend="opforge", dynamic=False)
    torch.testing.assert_close(compiled(*inputs), f(*inputs), equal_nan=True)


def test_dropout_draws_as_the_setting_says() -> None:
    """Other kernels draw other numbers: with eager's stream, the mask stays, and the numbers are eager's."""
    f, inputs = attends(ALL_TRUE["ones"], dropout_p=0.5), tensors()
    with opforge.config.patch(strict=True, random="eager"):
        compiled = torch.compile(f, backend="opforge", dynamic=False)
        torch.manual_seed(0)
        found = compiled(*inputs)
    torch.manual_seed(0)
    torch.testing.assert_close(found, f(*inputs))
    with opforge.config.patch(strict=True, random="philox"):
        torch._dynamo.reset()
        compiled = torch.compile(f, backend="opforge", dynamic=False)
        exact = attends(ALL_TRUE["ones"])(*inputs)
        mean = torch.stack([compiled(*inputs) for _ in range(600)]).mean(0)
    assert (mean - exact).abs().mean() < 0.1 * exact.abs().mean() + 0.02


def test_mask_beside_is_causal_is_as_in_eager() -> None:
    """Some kernels take both, others raise an error; since torch 2.14 all do."""
    f, inputs = attends(ALL_TRUE["ones"], is_causal=True), tensors()
    if minor_version() not in ("2.11", "2.12", "2.13"):
        for run in (f, torch.compile(f, backend="opforge", dynamic=False)):
            with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True"):
                run(*inputs)
        return
    assert calls(f, inputs) == [(True, True)]
    torch.testing.assert_close(torch.compile(f, backend="opforge", dynamic=False)(*inputs), f(*inputs))


def test_programs_that_are_no_graph() -> None:
    """A function that the recorder runs itself goes the same way."""
    targets: list[str] = []
    traced = trace(attends(ALL_TRUE["both ways"]), tensors(), truth=truth)
    targets = [str(n.target) for n in traced.graph.graph.nodes if n.op == "call_function"]
    assert targets[0].startswith("aten._scaled_dot_product_flash_attention")
