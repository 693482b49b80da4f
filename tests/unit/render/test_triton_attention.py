"""Two products around a softmax as one kernel: planned as for a GPU, checked, run by Triton's interpreter, and judged by float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

pytest.importorskip("triton")

from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.kernels.plan import ExternStep, Plan
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets import cuda
from tests.support.gpu_plan import planned
from tests.support.triton_run import job_of, launch_interpreted, results

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called", "ignore:return_lse")

FEW = 4  # processors: small programs are worth a kernel
INF = float("inf")
Case = tuple[Callable[..., Any], Callable[[], list[Tensor]]]


def captured(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Plan, list[Tensor]]:
    """The checked plan of the graph that Dynamo captures, and its inputs in order."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=keep, fullgraph=True, dynamic=False)(*inputs)
    (gm,) = graphs
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    known = {f"l_{name}_": t for name, t in zip(names, inputs, strict=True)}
    given = [known[n.name.lower()] for n in gm.graph.nodes if n.op == "placeholder"]
    return planned(gm, given, FEW), given


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def heads(
    steps: int = 65, width: int = 32, dtype: torch.dtype = torch.bfloat16, keys: int | None = None
) -> list[Tensor]:
    return [half(2, 2, n, width, dtype=dtype) for n in (steps, keys or steps, keys or steps)]


def composed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.125 + bias, -1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2) * 0.125).masked_fill(mask, -INF), -1) @ v


def lowest(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2) * 0.125).masked_fill(mask, torch.finfo(torch.bfloat16).min)
    return torch.softmax(scores, -1) @ v


def in_float32(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).to(bias.dtype) * 0.2 + bias
    return torch.softmax(scores, -1).to(v.dtype) @ v


def by_steps(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Heads behind the steps, as a projection leaves them."""
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * 0.125 + bias
    return (torch.softmax(scores, -1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2)


def plain_matrices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.t() * 0.3, -1) @ v


def with_themselves(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(-1, -2), -1) @ x


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: 20 * torch.tanh(s / 20))


def slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + torch.exp2(-(h + 1.0)) * (j - i))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -INF))


def causal_slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s + torch.exp2(-(h + 1.0)) * (j - i), -INF)
    )


def later_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last row has no column."""
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i < j, s, -INF))


def sliding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where((i >= j) & (i - j < 40), s, -INF))


def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, -INF))


def wide_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Some blocks of columns are whole inside of it."""
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where((i >= j) & (i - j < 100), s, -INF))


def causal_documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where((i >= j) & (ids[i] == ids[j]), s, -INF))


def lengths(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(j < n[b], s, -INF))


def in_order(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(ids[i] <= ids[j], s, -INF))


def positive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(s > 0, s, -INF))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def flex_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, i, j])


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def flex_by_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2).transpose(1, 2).flatten(2)


def with_bias(*shape: int, **kwargs: Any) -> Callable[[], list[Tensor]]:
    return lambda: [*heads(**kwargs), half(*shape, dtype=kwargs.get("dtype", torch.bfloat16))]


def mask_of(*shape: int, empty: bool = False) -> Tensor:
    mask = torch.rand(shape) > 0.6
    mask[..., 0] = empty
    if empty:
        mask[..., 5 % shape[-2], :] = True
    return mask


def beyond(*ends: int, before: bool = False) -> Tensor:
    """Which of 130 columns to leave out, of each batch another number: those behind the ends, or before them."""
    columns, given = torch.arange(130)[None, None, None, :], torch.tensor(ends)[:, None, None, None]
    return columns < given if before else columns >= given


def steps_first() -> list[Tensor]:
    return [half(2, 50, 2, 32) for _ in range(3)]


def spoiled(make: Callable[[], list[Tensor]], which: int, bad: float) -> Callable[[], list[Tensor]]:
    """Inputs of which one has some odd number, in the last head."""

    def made() -> list[Tensor]:
        inputs = make()
        inputs[which][..., -1, 50, 3] = bad
        return inputs

    return made


CASES: dict[str, Case] = {
    "bias": (composed, with_bias(2, 65, 65)),
    "bias of one head": (composed, with_bias(1, 65, 65)),
    "bias of columns": (composed, with_bias(2, 1, 1, 65)),
    "expanded bias": (composed, lambda: [*heads(), half(65, 1).expand(65, 65)]),
    "float16": (composed, with_bias(2, 65, 65, dtype=torch.float16)),
    "width of 80": (composed, with_bias(2, 40, 40, steps=40, width=80)),
    "width of 128": (composed, with_bias(2, 33, 33, steps=33, width=128)),
    "width of 20": (composed, with_bias(2, 40, 40, steps=40, width=20)),
    "more keys": (composed, with_bias(2, 33, 140, steps=33, keys=140)),
    "more queries": (composed, with_bias(140, 33, steps=140, keys=33)),
    "large logits": (composed, lambda: [*(t * 12 for t in heads()[:2]), heads()[2], half(65, 65) * 30]),
    "mask": (masked, lambda: [*heads(), mask_of(2, 1, 1, 65)]),
    "mask of whole rows": (masked, lambda: [*heads(), mask_of(65, 65, empty=True)]),
    "mask of the lowest number": (lowest, lambda: [*heads(), mask_of(65, 65, empty=True)]),
    "softmax in float32": (in_float32, lambda: [*heads(), torch.randn(65, 65)]),
    "heads behind the steps": (by_steps, lambda: [*steps_first(), half(2, 50, 50)]),
    "matrices": (plain_matrices, lambda: [half(70, 64), half(90, 64), half(90, 48)]),
    "of themselves": (with_themselves, lambda: [half(4, 64, 32)]),
    "soft cap": (soft_cap, heads),
    "soft cap in float16": (soft_cap, lambda: heads(dtype=torch.float16)),
    "slopes": (slopes, heads),
    "causal": (causal, lambda: heads(130)),
    "causal slopes": (causal_slopes, lambda: heads(130)),
    "only later columns": (later_only, heads),
    "causal, more keys": (causal, lambda: heads(40, keys=150)),
    "causal, more queries": (causal, lambda: heads(150, keys=40)),
    "sliding window": (sliding, lambda: heads(150)),
    "sliding window, more queries": (sliding, lambda: heads(180, keys=60)),
    "documents": (documents, lambda: [*heads(), torch.arange(65) // 11]),
    "plain": (plain, lambda: heads(130)),
    "plain in float16": (plain, lambda: heads(130, dtype=torch.float16)),
    "plain in float16, width of 80": (plain, lambda: heads(40, 80, torch.float16)),
    "plain, scores of 1e30": (plain, lambda: [*(t * 1e15 for t in heads()[:2]), heads()[2]]),
    "window with whole blocks": (wide_window, lambda: heads(200)),
    "long documents": (documents, lambda: [*heads(200), torch.arange(200) // 50]),
    "causal documents": (causal_documents, lambda: [*heads(130), torch.arange(130) // 33]),
    "documents with a nan in the next": (documents, lambda: [*spoiled(lambda: heads(100), 2, float("nan"))(), torch.arange(100) // 25]),
    "lengths": (lengths, lambda: [*heads(130), torch.tensor([40, 97])]),
    "lengths of nothing": (lengths, lambda: [*heads(130), torch.tensor([0, 97])]),
    "in order": (in_order, lambda: [*heads(130), torch.arange(130) // 20]),
    "columns behind": (masked, lambda: [*heads(130), beyond(50, 100)]),
    "columns before": (masked, lambda: [*heads(130), beyond(50, 100, before=True)]),
    "positive scores": (positive, heads),
    "flexible bias": (flex_bias, with_bias(2, 65, 65)),
    "grouped queries": (grouped, lambda: [half(2, 4, 40, 32) for _ in range(3)]),
    "flexible, heads behind the steps": (flex_by_steps, steps_first),
}  # fmt: skip


@pytest.fixture(scope="module")
def given() -> dict[str, list[Tensor]]:
    torch.manual_seed(0)
    return {name: make() for name, (_, make) in CASES.items()}


@pytest.fixture(scope="module")
def plans(given: dict[str, list[Tensor]]) -> dict[str, tuple[Plan, list[Tensor]]]:
    return {name: captured(fn, given[name]) for name, (fn, _) in CASES.items()}


@pytest.fixture(scope="module")
def ran(plans: dict[str, tuple[Plan, list[Tensor]]]) -> dict[str, Tensor]:
    """Every case in one process of Triton's interpreter."""
    found = {}
    jobs = {name: job_of(plan, inputs) for name, (plan, inputs) in plans.items() if is_joined(plan)}
    for name, memory in zip(jobs, launch_interpreted(list(jobs.values())), strict=True):
        (found[name],) = results(plans[name][0], memory)
    return found


def is_joined(plan: Plan) -> bool:
    return sum(bool(k.parts) for k in plan.kernels()) == 1 and not any(isinstance(s, ExternStep) for s in plan.steps)


CASES |= {
    f"{bad} in {('queries', 'keys', 'values', 'bias')[which]}, {name}": (fn, spoiled(make, which, bad))
    for name, fn, make in (("composed", composed, with_bias(2, 65, 65)), ("causal", causal, lambda: heads(100)))
    for which in range(4 if fn is composed else 3)
    for bad in (INF, -INF, float("nan"))
}


@pytest.mark.parametrize("name", CASES)
def test_joined(plans: dict[str, tuple[Plan, list[Tensor]]], name: str) -> None:
    """No product is left, and neither scores nor probabilities are in memory."""
    plan, _ = plans[name]
    assert is_joined(plan)
    (kernel,) = (k for k in plan.kernels() if k.parts)
    made = [b for part in kernel.parts for b in ([*part.out] if isinstance(part, ExternStep) else part.kernel.writes)]
    assert {plan.allocations[b].kind for b in made if b not in kernel.writes} == {"elided"}


@pytest.mark.parametrize("name", CASES)
def test_right(ran: dict[str, Tensor], given: dict[str, list[Tensor]], name: str) -> None:
    fn, inputs = CASES[name][0], given[name]
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    # oneDNN's bfloat16 kernels for AMX give a row's neighbours its NaN: eager means the ones without it.
    with torch.backends.mkldnn.flags(enabled=False):
        eager = fn(*inputs)
    assert_as_accurate(ran[name], eager, fn(*wide))


def assert_as_accurate(found: Tensor, eager: Tensor, exact: Tensor) -> None:
    assert (found.dtype, found.shape) == (eager.dtype, eager.shape)
    odd = ~torch.isfinite(eager)
    assert torch.equal(torch.nan_to_num(found, 9, 1, -1)[odd], torch.nan_to_num(eager, 9, 1, -1)[odd])
    truth = exact[~odd]
    ours, theirs = ((t.double()[~odd] - truth) for t in (found, eager))
    scale = float(truth.abs().max())
    assert float(ours.abs().max()) <= 2 * float(theirs.abs().max()) + 1e-7 * scale
    assert float(ours.square().mean()) <= 4 * float(theirs.square().mean()) + 1e-7 * scale


@pytest.mark.parametrize("name", ["mask", "lengths", "causal documents", "columns behind"])
def test_data_are_looked_at_first(plans: dict[str, tuple[Plan, list[Tensor]]], name: str) -> None:
    (kernel,) = render_triton(plans[name][0]).kernels.values()
    assert "stop = tl.minimum(stop, end)" in kernel.source


@pytest.mark.parametrize("name", ["bias", "causal", "mask of whole rows", "positive scores"])
def test_nothing_is_looked_at_for_nothing(plans: dict[str, tuple[Plan, list[Tensor]]], name: str) -> None:
    (kernel,) = render_triton(plans[name][0]).kernels.values()
    assert "coffset" not in kernel.source


@pytest.mark.parametrize(
    "name",
    [
        "bias", "float16", "width of 80", "soft cap", "slopes", "heads behind the steps", "causal", "causal slopes", "causal documents",
        "columns behind", "sliding window", "plain",
    ],
)  # fmt: skip
def test_compiles_for_sm90(plans: dict[str, tuple[Plan, list[Tensor]]], name: str, tmp_path: Path) -> None:
    for kernel in render_triton(plans[name][0]).kernels.values():
        assert compile_job(cuda.job_of(kernel, 90), tmp_path).cubin[:4] == b"\x7fELF"
