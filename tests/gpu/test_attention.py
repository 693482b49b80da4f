"""Two products around a softmax as one kernel, on a CUDA device, judged by a float64 run. `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import opforge
from tests.support.accuracy import assert_as_accurate

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:flex_attention called")]

INF = float("inf")
Program = Callable[..., Tensor]


def composed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias, -1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(mask, -INF), -1) @ v


def lowest(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2) * 0.125).masked_fill(mask, torch.finfo(torch.float16).min), -1) @ v


def by_steps(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return composed(q, k, v, bias).transpose(1, 2).flatten(2)


def transposed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Keys with their columns side by side in memory, queries and values out of one wider tensor."""
    return torch.softmax(q @ k * 0.125 + bias, -1) @ v


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
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i < j, s, -INF))


def sliding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where((i >= j) & (i - j < 100), s, -INF))


def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, -INF))


def causal_documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where((i >= j) & (ids[i] == ids[j]), s, -INF))


def lengths(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(j < n[b], s, -INF))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def heads(steps: int = 515, width: int = 64, dtype: torch.dtype = torch.bfloat16, keys: int = 0) -> list[Tensor]:
    return [half(2, 4, n, width, dtype=dtype) for n in (steps, keys or steps, keys or steps)]


def mask_of(*shape: int, empty: bool = False) -> Tensor:
    mask = torch.rand(shape, device="cuda") > 0.6
    mask[..., 0] = False
    if empty:
        mask[..., 5, :] = True
    return mask


def apart() -> list[Tensor]:
    wide = half(2, 4, 300, 3 * 64 + 2)
    return [wide[..., :64], half(2, 4, 64, 300), wide[..., 129 : 129 + 64], half(300, 300)]


def at_odd_addresses() -> list[Tensor]:
    return [half(2 * 4 * 256 * 64 + 1)[1:].view(2, 4, 256, 64) for _ in range(3)] + [
        half(256 * 256 + 3)[3:].view(256, 256)
    ]


CASES: dict[str, tuple[Program, Callable[[], list[Tensor]]]] = {
    **{
        f"bias, width {width}, {steps} steps, {dtype}": (
            composed,
            lambda width=width, steps=steps, dtype=dtype: [
                *heads(steps, width, getattr(torch, dtype)),
                half(4, steps, steps, dtype=getattr(torch, dtype)),
            ],
        )
        for width in (64, 80, 128)
        for steps in (256, 515)
        for dtype in ("float16", "bfloat16")
    },
    "width 256": (composed, lambda: [*heads(200, 256), half(200, 200)]),
    "width 20": (composed, lambda: [*heads(200, 20), half(200, 200)]),
    "bias of columns": (composed, lambda: [*heads(), half(2, 1, 1, 515)]),
    "bias of rows": (composed, lambda: [*heads(), half(1, 4, 515, 1)]),
    "expanded bias": (composed, lambda: [*heads(), half(515, 1, 515).transpose(0, 1).expand(4, 515, 515)]),
    "bias out of a wider one": (composed, lambda: [*heads(), half(4, 515, 520)[..., 3:518]]),
    "more keys": (composed, lambda: [*heads(130, keys=1000), half(130, 1000)]),
    "more queries": (composed, lambda: [*heads(1000, keys=130), half(1000, 130)]),
    "large logits": (composed, lambda: [*(t * 12 for t in heads()[:2]), half(2, 4, 515, 64), half(515, 515) * 30]),
    "large logits in float16": (
        composed,
        lambda: [*(t * 8 for t in heads(dtype=torch.float16)[:2]), *(half(*s, dtype=torch.float16) for s in ((2, 4, 515, 64), (515, 515)))],
    ),
    "mask": (masked, lambda: [*heads(), mask_of(2, 1, 1, 515)]),
    "mask of whole rows": (masked, lambda: [*heads(), mask_of(515, 515, empty=True)]),
    "mask of a low number": (lowest, lambda: [*heads(), mask_of(515, 515, empty=True)]),
    "heads behind the steps": (by_steps, lambda: [*(half(2, 300, 4, 64) for _ in range(3)), half(4, 300, 300)]),
    "strides": (transposed, apart),
    "odd addresses": (composed, at_odd_addresses),
    "soft cap": (soft_cap, heads),
    "soft cap in float16": (soft_cap, lambda: heads(dtype=torch.float16)),
    "slopes": (slopes, heads),
    "causal": (causal, lambda: heads(1030)),
    "causal, more keys": (causal, lambda: heads(200, keys=700)),
    "causal, more queries": (causal, lambda: heads(700, keys=200)),
    "causal slopes": (causal_slopes, lambda: heads(1030)),
    "only later columns": (later_only, heads),
    "sliding window": (sliding, lambda: heads(1030)),
    "documents": (documents, lambda: [*heads(), torch.arange(515, device="cuda") // 91]),
    **{
        f"plain, {dtype}, {steps} steps, width {width}": (
            plain,
            lambda dtype=dtype, steps=steps, width=width: heads(steps, width, getattr(torch, dtype)),
        )
        for dtype, steps, width in (("bfloat16", 1024, 64), ("float16", 515, 64), ("float16", 256, 128), ("bfloat16", 515, 128))
    },
    "long documents": (documents, lambda: [*heads(2000), torch.arange(2000, device="cuda") // 300]),
    "causal documents": (causal_documents, lambda: [*heads(1030), torch.arange(1030, device="cuda") // 170]),
    "lengths": (lengths, lambda: [*heads(1500), torch.tensor([0, 1201], device="cuda")]),
    "grouped queries": (grouped, lambda: [half(2, 8, 300, 64), *heads(300)[1:]]),
}  # fmt: skip


@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
@pytest.mark.parametrize("name", CASES)
def test_as_accurate_as_eager(name: str, graphs: bool) -> None:
    program, make = CASES[name]
    torch.manual_seed(0)
    given = make()
    found, made = compiled(program, given, graphs and "cap" not in name)
    assert made["externs"] == {}, "the products are not joined"
    wide = [t.double() if t.is_floating_point() else t for t in given]
    assert_as_accurate(found, program(*given), program(*wide))


@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
@pytest.mark.parametrize("which", ["queries", "keys", "values", "bias"])
@pytest.mark.parametrize("name", ["composed", "causal", "plain", "documents"])
def test_infinities_and_nans_spread_as_in_eager(bad: float, which: str, name: str) -> None:
    torch.manual_seed(0)
    more = {"composed": lambda: [half(200, 200)], "documents": lambda: [torch.arange(200, device="cuda") // 60]}
    given = [*heads(200), *more.get(name, list)()]
    if name != "composed" and which == "bias":
        pytest.skip("C8: it has no bias")
    given[("queries", "keys", "values", "bias").index(which)][..., 70, 3] = bad
    program = {"composed": composed, "causal": causal, "plain": plain, "documents": documents}[name]
    found, _ = compiled(program, given, False)
    assert_as_accurate(found, program(*given), program(*(t.double() for t in given)))


def test_rows_of_infinitely_small_scores() -> None:
    """Eager's softmax of such a row is nan: the library's kernels give numbers."""
    given = heads(200)
    given[0][..., 70, 3] = -INF
    given[1][..., 3] = given[1][..., 3].abs() + 1
    found, _ = compiled(plain, given, False)
    assert bool(found[..., 70, :].isnan().all())
    assert_as_accurate(found, plain(*given), plain(*(t.double() for t in given)))


def test_plain_values_near_the_greatest_number() -> None:
    """The library's kernels overflow there."""
    q, k, v = heads(200)
    given = [q, k, v.sign() * 3e38]
    found, _ = compiled(plain, given, False)
    assert bool(found.isfinite().all())
    assert_as_accurate(found, plain(*given), plain(*(t.double() for t in given)))


def test_values_near_the_greatest_number() -> None:
    """Weighted sums are divided at the end, and do not overflow before."""
    q, k, v = heads(200)
    given = [q, k, v.sign() * 3e38, half(200, 200)]
    found, made = compiled(composed, given, False)
    assert made["externs"] == {}
    assert bool(found.isfinite().all())
    assert_as_accurate(found, composed(*given), composed(*(t.double() for t in given)))


def test_float32_is_left_to_the_library() -> None:
    given = [t.float() for t in [*heads(200), half(200, 200)]]
    found, made = compiled(composed, given, False)
    assert sum(made["externs"].values()) == 2
    assert_as_accurate(found, composed(*given), composed(*(t.double() for t in given)))


def test_gradients() -> None:
    """The backward reads the probabilities: the products stay."""
    torch.manual_seed(0)
    given = [*heads(300), half(300, 300)]
    call = torch.compile(composed, backend="opforge", options={"strict": True}, dynamic=False)

    def run(function: Program, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in given]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, out.detach().cos())]

    exact, eager, found = run(composed, torch.float64), run(composed, torch.bfloat16), run(call, torch.bfloat16)
    for one in zip(found, eager, exact, strict=True):
        assert_as_accurate(*one)


def test_blocks_of_a_mask() -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512, device="cuda")
    given = heads(512)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    found, made = compiled(program, given, False)
    assert made["externs"] == {}
    assert_as_accurate(found, program(*given), program(*(t.double() for t in given)))


def compiled(program: Program, given: list[Tensor], graphs: bool) -> tuple[Tensor, Any]:
    """What a compiled program gives, and the counters."""
    torch._dynamo.reset()
    opforge.reset_stats()
    options = {"strict": True, **({"cudagraphs": True} if graphs else {})}
    call = torch.compile(program, backend="opforge", options=options, dynamic=False)
    with torch.no_grad():
        for _ in range(4 if graphs else 1):
            found = call(*given)
    stats = opforge.stats()
    assert stats["fallbacks"] == {}
    return found, stats
