"""Attention that a program writes out: one call of torch's kernel where there is no backward, right to eager's error, and eager's NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opforge
from opforge.generated.rewrites import RULES
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite

INF = math.inf
B, H, T, S, D = 2, 4, 352, 384, 16
KERNEL = {
    "cpu": "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "cuda": "aten.scaled_dot_product_attention.default",
}


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def flat(x: Tensor) -> Tensor:
    return heads(x).reshape(B * H, -1, D)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).transpose(-2, -1) / math.sqrt(D)
    return joined(scores.softmax(-1) @ heads(v))


def scaled_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (heads(q) * D**-0.5) @ heads(k).mT
    return joined(F.softmax(scores, dim=3) @ heads(v))


def by_permutations(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a, b, c = (
        x.view(B, -1, H, D).permute(dims) for x, dims in ((q, (0, 2, 1, 3)), (k, (0, 2, 3, 1)), (v, (0, 2, 1, 3)))
    )
    return joined(torch.matmul((torch.matmul(a, b) * 0.3).softmax(-1), c))


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(heads(q), heads(k).transpose(2, 3)) * D**-0.5
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, 0.1, training=False)
    return torch.matmul(weights, heads(v)).transpose(1, 2).contiguous()


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhtd,bhsd->bhts", heads(q), heads(k)) / 4.5
    return torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), heads(v))


def contiguous_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a, b, c = (heads(x).contiguous() for x in (q, k, v))
    return (a @ b.mT / 4).softmax(-1) @ c


def three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a, b, c = (x if x.dim() == 3 and x.shape[-1] == D else flat(x) for x in (q, k, v))
    return torch.bmm((torch.bmm(a, b.transpose(1, 2)) / 7.0).softmax(2), c)


def flat_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(flat(q) * 0.25, flat(k).transpose(1, 2)).view(B, H, T, S) + 0.0 * torch.arange(
        S, device=q.device
    ).to(q.dtype)
    return joined(torch.bmm(scores.view(B * H, T, S).softmax(-1), flat(v)).view(B, H, T, D))


UNMASKED = {
    f.__name__: f
    for f in (
        plain,
        scaled_queries,
        by_permutations,
        in_float32,
        by_einsum,
        contiguous_heads,
        three_dimensions,
        flat_batch,
    )
}


def added(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).mT / math.sqrt(D) + m
    return joined(scores.softmax(-1) @ heads(v))


def added_first(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = m + heads(q) @ heads(k).mT
    return joined(scores.float().softmax(-1).to(v.dtype) @ heads(v))


def filled(fill: float) -> Callable[..., Tensor]:
    def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        scores = (heads(q) @ heads(k).mT / math.sqrt(D)).masked_fill(m == 0, fill)
        return joined(scores.softmax(-1) @ heads(v))

    return f


def chosen(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = torch.where(m, heads(q) @ heads(k).mT * 0.2, -INF)
    return joined(scores.softmax(-1) @ heads(v))


def chosen_otherwise(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).mT * 0.2
    scores = torch.where(~m, torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype), scores)
    return joined(scores.softmax(-1) @ heads(v))


def visible(*shape: int) -> Tensor:
    """Positions that count: some, but in two rows none."""
    m = torch.rand(shape) > 0.4
    if shape[-2] > 2:
        m[..., 1, :] = False
        m[..., -1, :] = False
    else:
        m[-1] = False
    return m


def queries_keys_values(dtype: torch.dtype, width: int = H * D) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, n, width, dtype=torch.float64).to(dtype) for n in (T, S, S)]


def calls(f: Callable[..., Any], *args: Tensor, device: str = "cpu") -> int:
    """How often the rewritten graph calls the kernel of attention."""
    with torch.no_grad():
        traced = trace(f, list(args))
    rewrite(traced.graph, RULES, device=device)
    return sum(str(n.target) == KERNEL[device] for n in traced.graph.graph.nodes)


def check(f: Callable[..., Tensor], *args: Tensor, fires: int = 1) -> Tensor:
    """As near to float64 as eager, NaN where eager has NaN, and so many calls of the kernel."""
    torch._dynamo.reset()
    opforge.reset_stats()
    with torch.no_grad():
        got = torch.compile(f, backend="opforge", options={"strict": True}, dynamic=False)(*args)
        want = f(*args)
        exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    assert opforge.stats()["externs"].get(KERNEL["cpu"], 0) == fires
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    assert torch.equal(got.isnan(), want.isnan())
    floor = 2 * torch.finfo(want.dtype).eps * float(exact.nan_to_num().abs().max())
    error, eager = (float((x.double() - exact).nan_to_num().abs().max()) for x in (got, want))
    assert error <= max(2 * eager, floor), (error, eager)
    return got


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNMASKED)
def test_spellings(name: str, dtype: torch.dtype) -> None:
    check(UNMASKED[name], *queries_keys_values(dtype))


SHAPES = [(T, S), (1, 1, T, S), (B, 1, 1, S), (B, 1, T, S), (B, H, T, S), (1, H, T, 1), (H, 1, S)]
# Products of 16-bit values are slow on the CPU: fewer of them.
MASKS = [(s, torch.float32) for s in SHAPES] + [(s, d) for s in SHAPES[:3:2] for d in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("f", [added, added_first])
def test_biases(f: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    qkv = queries_keys_values(torch.float32)
    check(f, *qkv, torch.randn(shape))
    got = check(f, *qkv, torch.randn(shape).masked_fill(~visible(*shape), -INF))
    assert got.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biases_of_other_dtypes(dtype: torch.dtype) -> None:
    qkv = queries_keys_values(dtype)
    check(added, *qkv, torch.randn(T, S).to(dtype))
    check(added_first, *qkv, torch.randn(B, 1, T, S))
    check(added, *qkv, torch.randn(S, T).to(dtype).t())


@pytest.mark.parametrize(("shape", "dtype"), MASKS)
def test_fills_of_nothing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A row of which nothing is left is NaN, as in eager code."""
    m = visible(*shape)
    for f in (filled(-INF), chosen):
        assert check(f, *queries_keys_values(dtype), m).isnan().any()


@pytest.mark.parametrize(("shape", "dtype"), [case for case in MASKS if case[1] != torch.float16])
def test_fills_that_are_finite(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A row of which nothing is left is the mean of the values, also where its scores are large."""
    q, k, v = queries_keys_values(dtype)
    for f in (filled(-1e9), chosen_otherwise):
        assert not check(f, q * 30, k, v, visible(*shape)).isnan().any()


@pytest.mark.parametrize("f", [plain, by_permutations, scaled_queries])
def test_one_query_of_many_keys(f: Callable[..., Tensor]) -> None:
    """A step of decoding: the keys are not copied."""
    torch.manual_seed(0)
    check(f, torch.randn(B, 1, H * D), torch.randn(B, 8200, H * D), torch.randn(B, 8200, H * D))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.view(B, -1, 2, 1, D).expand(-1, -1, -1, H // 2, -1).flatten(2, 3).transpose(1, 2) for x in (k, v))
    return joined((heads(q) @ k.mT * 0.25).softmax(-1) @ v)


def grouped_by_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (
        x.view(B, -1, 1, D).transpose(1, 2).expand(-1, H, -1, -1)
        for x in (k[..., :D].contiguous(), v[..., :D].contiguous())
    )
    return joined((heads(q) @ k.mT * 0.25).softmax(-1) @ v)


def test_heads_that_share_keys() -> None:
    q, k, v = queries_keys_values(torch.float32)
    check(grouped, q, k[..., : 2 * D].contiguous(), v[..., : 2 * D].contiguous())
    check(grouped_by_a_view, q, k, v)


def test_nan_and_infinities() -> None:
    """Where they come from queries, keys or values that nothing hides."""
    for number in (math.nan, INF):
        for which in range(3):
            qkv = queries_keys_values(torch.float32)
            qkv[which][0, 5, 3] = number
            check(plain, *qkv)
            check(added, *qkv, torch.zeros(T, S))
            check(filled(-INF), *qkv, torch.ones(T, S))


def test_inputs_of_three_dimensions() -> None:
    torch.manual_seed(0)
    check(three_dimensions, *(torch.randn(B * H, n, D) for n in (T, S, S)))


def test_small_ones_run_as_written() -> None:
    q, k, v = (x[:, :16] for x in queries_keys_values(torch.float32))
    assert calls(plain, q, k, v) == 0


def test_a_causal_mask() -> None:
    m = torch.ones(T, S, dtype=torch.bool).tril()
    for f in (filled(-INF), chosen):
        assert not check(f, *queries_keys_values(torch.float32), m).isnan().any()


class Block(nn.Module):
    """Self-attention as small language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)
        self.register_buffer("seen", torch.tril(torch.ones(400, 400)).view(1, 1, 400, 400))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = (heads(y) for y in self.inner(x).split(H * D, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.seen[:, :, :n, :n] == 0, float("-inf"))
        return self.outer((self.drop(F.softmax(scores, dim=-1)) @ v).transpose(1, 2).contiguous().view(x.shape))


def test_a_module() -> None:
    torch.manual_seed(0)
    block, x = Block().eval(), torch.randn(B, S, H * D)
    opforge.reset_stats()
    with torch.no_grad():
        got, want = torch.compile(block, backend="opforge", options={"strict": True})(x), block(x)
    assert opforge.stats()["externs"][KERNEL["cpu"]] == 1
    torch.testing.assert_close(got, want)


def test_not_in_training() -> None:
    torch.manual_seed(0)
    for block in (Block(), Block().eval()):
        opforge.reset_stats()
        torch._dynamo.reset()
        x = torch.randn(B, S, H * D, requires_grad=True)
        torch.compile(block, backend="opforge", options={"strict": True})(x).sum().backward()
        assert KERNEL["cpu"] not in opforge.stats()["externs"]


def test_not_with_dropout() -> None:
    torch.manual_seed(0)
    assert calls(Block().train(), torch.randn(B, S, H * D)) == 0


NOT = {
    "scores are returned": lambda q, k, v: ((s := q @ k.mT).softmax(-1) @ v, s),
    "weights are returned": lambda q, k, v: ((w := (q @ k.mT).softmax(-1)) @ v, w),
    "weights are summed": lambda q, k, v: ((w := (q @ k.mT).softmax(-1)) @ v).sum() + w.sum(1).sum(),
    "another dimension": lambda q, k, v: (q @ k.mT).softmax(1) @ v,
    "scale in a tensor": lambda q, k, v: (q @ k.mT * q[0, 0, 0]).softmax(-1) @ v,
    "a finite fill of some weight": lambda q, k, v: (q @ k.mT).masked_fill(k[0, :, 0] > 0, -100.0).softmax(-1) @ v,
    "a fill that overflows": lambda q, k, v: (
        torch.where(k[0, :, 0] > 0, (q @ k.mT).bfloat16(), -3.4e38).softmax(-1).float() @ v
    ),
    "a bias that broadcasts the scores": lambda q, k, v: ((q @ k.mT)[:1] + v[:, :1, :1]).softmax(-1) @ v,
    "values of another width": lambda q, k, v: (q @ k.mT).softmax(-1) @ v[..., :8].contiguous(),
    "a scale below zero": lambda q, k, v: (q @ k.mT * -0.5).softmax(-1) @ v,
    "softmax of longer rows": lambda q, k, v: (q @ k.mT).view(4, 384, -1).softmax(-1).view(8, 384, -1) @ v,
    "another batch for the values": lambda q, k, v: (q @ k.mT).view(4, 768, -1).softmax(-1) @ v[:4],
    "queries that repeat": lambda q, k, v: (q[:1].expand(8, -1, -1) @ k.mT).softmax(-1) @ v,
    "log_softmax": lambda q, k, v: (q @ k.mT).log_softmax(-1) @ v,
}


@pytest.mark.parametrize("name", NOT)
def test_not_where_it_is_no_attention(name: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, 384, 16) for _ in range(3))
    assert calls(NOT[name], q, k, v) == 0


def test_not_of_float64() -> None:
    assert calls(plain, *queries_keys_values(torch.float64)) == 0


def test_symbolic_sizes_run_as_written() -> None:
    f = torch.compile(three_dimensions, backend="opforge", options={"strict": True}, dynamic=True)
    opforge.reset_stats()
    with torch.no_grad():
        for n in (390, 400):
            x = torch.randn(8, n, 16)
            torch.testing.assert_close(f(x, x, x), three_dimensions(x, x, x))
    assert KERNEL["cpu"] not in opforge.stats()["externs"]


@pytest.mark.parametrize("name", UNMASKED)
def test_a_gpu_takes_the_same_spellings(name: str) -> None:
    assert calls(UNMASKED[name], *queries_keys_values(torch.bfloat16), device="cuda") == 1


@pytest.mark.parametrize("f", [added, filled(-INF), chosen, chosen_otherwise])
def test_a_gpu_takes_masks(f: Callable[..., Tensor]) -> None:
    qkv = queries_keys_values(torch.bfloat16)
    m = torch.randn(T, S).bfloat16() if f is added else visible(B, 1, T, S)
    assert calls(f, *qkv, m, device="cuda") == 1


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_of_products(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def activations(f: Callable[..., Any], *args: Tensor, device: str = "cuda") -> list[bool]:
    """Of the products with an activation in the rewritten graph, whether it is gelu."""
    with torch.no_grad():
        traced = trace(f, list(args))
    rewrite(traced.graph, RULES, device=device)
    found = [n for n in traced.graph.graph.nodes if str(n.target) == "aten._addmm_activation.default"]
    return [bool(n.kwargs.get("use_gelu")) for n in found]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 16), (2, 7, 16)])
def test_activations_of_products_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(s).to(dtype) for s in (shape, (24, 16), (24,)))
    for act, gelu in ((F.relu, False), (gelu_new, True), (lambda y: F.gelu(y, approximate="tanh"), True)):
        assert activations(lambda x, w, b, act=act: act(F.linear(x, w, b)), x, w, b) == [gelu]
        assert activations(lambda x, w, b, act=act: act(F.linear(x, w, b)), x, w, b, device="cpu") == []
        assert activations(lambda x, w, b, act=act: (y := F.linear(x, w, b), act(y)), x, w, b) == []
        assert activations(lambda x, w, b, act=act: act(F.linear(x, w, b[:1].expand(24))), x, w, b) == []
        assert activations(lambda x, w, b, act=act: act(torch.addmm(b, x.view(-1, 16), w.t(), beta=2)), x, w, b) == []
    assert activations(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b) == []
    assert activations(lambda x, w, b: gelu_of_products(F.linear(x, w, b)), x, w, b) in ([True], [])
