"""Calls that eager refuses: a compiled program raises the same type of exception, and leaves its inputs as they were.

Positions out of range are in `test_index_errors`. Where Dynamo raises while it runs a program on fake tensors no backend has been asked; its
exception counts if every backend gets it (`torch.compile(backend="eager")`), and if the type is eager's where Dynamo is told to leave such programs
to eager (`torch._dynamo.config.suppress_errors`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

Program = Callable[..., Any]
CASES: dict[str, tuple[Program, tuple[torch.Tensor, ...]]] = {}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def reals(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape) / 7


def invalid(name: str, program: Program, *args: torch.Tensor) -> None:
    assert name not in CASES
    CASES[name] = program, args


X = reals(5, 6)
for v in (-0.1, 1.1, float("nan")):
    for red in ("mean", "none", "sum"):
        invalid(
            f"bce {v} {red}",
            lambda x, t, red=red: F.binary_cross_entropy(x, t, reduction=red),
            torch.tensor([0.5, v, 0.2]),
            torch.tensor([0.0, 1.0, 1.0]),
        )
    invalid(
        f"bce target {v}",
        lambda x, t: F.binary_cross_entropy(x, t),
        torch.tensor([0.5, 0.1, 0.2]),
        torch.tensor([0.0, v, 1.0]),
    )
for op in (
    torch.floor_divide,
    torch.remainder,
    torch.fmod,
    lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    lambda a, b: torch.div(a, b, rounding_mode="floor"),
    lambda a, b: a // b,
    lambda a, b: a % b,
):
    for dt in (torch.int64, torch.int32, torch.uint8, torch.int8):
        invalid(
            f"div0 {len(CASES)}",
            lambda a, b, op=op: op(a, b) + 1,
            torch.tensor([4, 5, 6], dtype=dt),
            torch.tensor([1, 0, 2], dtype=dt),
        )
invalid("pow int neg", lambda a: a**-1, ints(1, 2, 3))
invalid("pow int scalar", lambda a: torch.pow(a, -2), ints(1, 2))
invalid("one_hot neg", lambda k: F.one_hot(k, 5), ints(0, -1))
invalid("one_hot big", lambda k: F.one_hot(k, 5), ints(0, 5))
invalid("bincount neg", lambda k: torch.bincount(k), ints(0, -1))
invalid("multinomial neg", lambda p: torch.multinomial(p, 2), torch.tensor([0.5, -1.0, 0.2]))
invalid("multinomial zero", lambda p: torch.multinomial(p, 2), torch.zeros(3))
invalid("multinomial many", lambda p: torch.multinomial(p, 5), torch.ones(3))
invalid("multinomial inf", lambda p: torch.multinomial(p, 2), torch.tensor([1.0, float("inf"), 1]))
invalid("bernoulli 2", lambda p: torch.bernoulli(p), torch.tensor([0.5, 2.0]))
invalid("bernoulli neg", lambda p: torch.bernoulli(p) * 1, torch.tensor([0.5, -0.1]))
invalid("bernoulli_ p", lambda x: torch.empty_like(x).bernoulli_(2.0), X)
invalid("normal neg std", lambda x: torch.normal(x, -1.0), X)
invalid("normal neg std tensor", lambda x, s: torch.normal(x, s), X, -X)
invalid("dropout p", lambda x: F.dropout(x, 1.5), X)
invalid("exponential", lambda x: torch.empty_like(x).exponential_(-1), X)
invalid("geometric", lambda x: torch.empty_like(x).geometric_(1.5), X)
invalid("cauchy", lambda x: torch.empty_like(x).cauchy_(0, -1), X)
invalid("log_normal", lambda x: torch.empty_like(x).log_normal_(0, -1), X)
invalid("uniform", lambda x: torch.empty_like(x).uniform_(2, 1), X)
invalid("random", lambda x: torch.empty_like(x).random_(5, 2), X)
invalid("poisson neg", lambda x: torch.poisson(x), -X)
invalid("randint", lambda x: x + torch.randint(5, 2, (3,)), reals(3))
invalid("randperm", lambda x: x + torch.randperm(-1), reals(3))
invalid("linspace steps", lambda x: x + torch.linspace(0, 1, -3), reals(3))
invalid("arange sign", lambda x: x + torch.arange(0, 3, -1), reals(3))
invalid("arange zero", lambda x: x + torch.arange(0, 3, 0), reals(3))
invalid("arange of booleans", lambda x: x + torch.arange(0, 3, dtype=torch.bool), reals(3))
invalid("cholesky", lambda a: torch.linalg.cholesky(a), -torch.eye(3))
invalid("inv", lambda a: torch.linalg.inv(a), torch.zeros(3, 3))
invalid("solve", lambda a: torch.linalg.solve(a, a), torch.zeros(3, 3))
invalid("inv rect", lambda a: torch.linalg.inv(a), X)
invalid("svd nan", lambda a: torch.linalg.svdvals(a), torch.full((3, 3), float("nan")))
invalid("repeat_interleave neg", lambda x, k: x.repeat_interleave(k), reals(2), ints(1, -1))
invalid("split sizes", lambda x: x.split([2, 2], 0)[0] * 2, X)
invalid("split neg", lambda x: x.split(-1)[0] * 2, X)
invalid("chunk 0", lambda x: x.chunk(0)[0], X)
invalid("unfold size", lambda x: x.unfold(0, 9, 1) * 2, X)
invalid("unfold step", lambda x: x.unfold(0, 2, 0) * 2, X)
invalid("narrow", lambda x: x.narrow(0, 3, 4) * 2, X)
invalid("narrow start", lambda x: x.narrow(0, 9, 1) * 2, X)
invalid("select", lambda x: x.select(0, 5) * 2, X)
invalid("x[9]", lambda x: x[9] * 2, X)
invalid("x[1,2,3]", lambda x: x[1, 2, 3] * 2, X)
invalid("bool mask", lambda x, m: x[m] * 2, X, torch.ones(4, dtype=torch.bool))
invalid("masked_fill dtype", lambda x, m: x.masked_fill(m, 1), X, torch.ones(5, 6))
invalid("masked_fill shape", lambda x, m: x.masked_fill(m, 1.0) * 2, X, torch.ones(4, 6, dtype=torch.bool))
invalid("masked_scatter few", lambda x, m, s: x.masked_scatter(m, s) * 2, X, X > 0, reals(3))
invalid("masked_select", lambda x, m: x.masked_select(m) * 2, X, torch.ones(4, 6, dtype=torch.bool))
invalid("where shapes", lambda m, x, y: torch.where(m, x, y) * 2, X > 1, X, reals(4))
invalid("add shapes", lambda x, y: x + y, X, reals(4))
invalid("add_ shapes", lambda x, y: x.add_(y), reals(6), X)
invalid("add_ result type", lambda x, y: x.add_(y) * 2, ints(1, 2), reals(2))
invalid("div_ int", lambda x: x.div_(2), ints(1, 2))
invalid("sqrt_ int", lambda x: x.sqrt_(), ints(1, 2))
invalid("bitwise float", lambda x: x & 1, X)
invalid("shift float", lambda x: x << 1, X)
invalid("neg bool", lambda x: -x, X > 1)
invalid("sub bool", lambda x, y: x - y, X > 1, X > 2)
invalid("sub bool num", lambda x: 1 - x, X > 1)
invalid("mm", lambda x, y: x @ y, X, X)
invalid("mm dtype", lambda x, y: x @ y, X, reals(6, 2).double())
invalid("mm 3d", lambda x: torch.mm(x, x), reals(2, 3, 3))
invalid("bmm", lambda x, y: torch.bmm(x, y), reals(2, 3, 4), reals(3, 4, 5))
invalid("mv", lambda x, y: torch.mv(x, y), X, reals(5))
invalid("dot", lambda x, y: torch.dot(x, y), reals(3), reals(4))
invalid("dot dtype", lambda x, y: torch.dot(x, y), reals(3), ints(1, 2, 3))
invalid("addmm bias", lambda b, x, y: torch.addmm(b, x, y), reals(5), X, reals(6, 2))
invalid("linear", lambda x, w: F.linear(x, w), X, reals(3, 5))
invalid("baddbmm", lambda b, x, y: torch.baddbmm(b, x, y), reals(3, 5, 4), reals(2, 3, 4), reals(2, 4, 5))
invalid("einsum", lambda x: torch.einsum("ij,jk->ik", x, x), X)
invalid("conv channels", lambda x, w: F.conv2d(x, w), reals(1, 3, 8, 8), reals(4, 2, 3, 3))
invalid("conv kernel", lambda x, w: F.conv2d(x, w), reals(1, 3, 2, 2), reals(4, 3, 3, 3))
invalid("conv stride", lambda x, w: F.conv2d(x, w, stride=0), reals(1, 3, 8, 8), reals(4, 3, 3, 3))
invalid("conv pad", lambda x, w: F.conv2d(x, w, padding=-1), reals(1, 3, 8, 8), reals(4, 3, 3, 3))
invalid("conv groups", lambda x, w: F.conv2d(x, w, groups=2), reals(1, 3, 8, 8), reals(4, 3, 3, 3))
invalid("conv bias", lambda x, w, b: F.conv2d(x, w, b), reals(1, 3, 8, 8), reals(4, 3, 3, 3), reals(3))
invalid("conv dtype", lambda x, w: F.conv2d(x, w), reals(1, 3, 8, 8), reals(4, 3, 3, 3).double())
invalid(
    "conv_transpose opad", lambda x, w: F.conv_transpose2d(x, w, output_padding=2), reals(1, 3, 8, 8), reals(3, 4, 3, 3)
)
invalid("max_pool kernel", lambda x: F.max_pool2d(x, 9), reals(1, 3, 8, 8))
invalid("max_pool pad", lambda x: F.max_pool2d(x, 2, padding=2), reals(1, 3, 8, 8))
invalid("max_pool stride", lambda x: F.max_pool2d(x, 2, stride=0), reals(1, 3, 8, 8))
invalid("avg_pool pad", lambda x: F.avg_pool2d(x, 2, padding=2), reals(1, 3, 8, 8))
invalid("avg_pool div", lambda x: F.avg_pool2d(x, 2, divisor_override=0), reals(1, 3, 8, 8))
invalid("adaptive neg", lambda x: F.adaptive_avg_pool2d(x, -1), reals(1, 3, 8, 8))
invalid("unpool", lambda x, k: F.max_unpool2d(x, k, 2), reals(1, 1, 2, 2), torch.full((1, 1, 2, 2), 99))
invalid("pad reflect", lambda x: F.pad(x, (9, 0), mode="reflect"), reals(1, 3, 8))
invalid("pad circular", lambda x: F.pad(x, (9, 0), mode="circular"), reals(1, 3, 8))
invalid("pad neg", lambda x: F.pad(x, (-5, -5)) * 2, reals(1, 3, 8))
invalid("interp", lambda x: F.interpolate(x, size=(0, 0)), reals(1, 3, 8, 8))
invalid("interp mode", lambda x: F.interpolate(x, scale_factor=2, mode="linear"), reals(1, 3, 8, 8))
invalid("grid_sample", lambda x, g: F.grid_sample(x, g), reals(1, 3, 8, 8), reals(2, 4, 4, 2))
invalid("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), reals(1, 3, 4, 4))
invalid("fold", lambda x: F.fold(x, (4, 4), (2, 2)), reals(1, 4, 5))
invalid("batch_norm 1", lambda x: F.batch_norm(x, None, None, training=True), reals(1, 3))
invalid("batch_norm size", lambda x, m, v: F.batch_norm(x, m, v), reals(2, 3, 4), reals(4), reals(4))
invalid("batch_norm eval", lambda x: F.batch_norm(x, None, None, training=False), reals(2, 3))
invalid("instance_norm", lambda x: F.instance_norm(x), reals(2, 3, 1))
invalid("group_norm", lambda x: F.group_norm(x, 2), reals(2, 3, 4))
invalid("layer_norm", lambda x: F.layer_norm(x, (5,)), X)
invalid("layer_norm w", lambda x, w: F.layer_norm(x, (6,), w), X, reals(5))
invalid("rms_norm", lambda x: F.rms_norm(x, (5,)), X)
invalid("softmax dim", lambda x: x.softmax(2), X)
invalid("sum dim", lambda x: x.sum(3), X)
invalid("sum dims twice", lambda x: x.sum((0, 0)), X)
invalid("mean int", lambda x: x.mean(), ints(1, 2))
invalid("std int", lambda x: x.std(), ints(1, 2))
invalid("norm int", lambda x: torch.linalg.vector_norm(x), ints(1, 2))
invalid("max empty", lambda x: x.max(), torch.empty(0))
invalid("max dim empty", lambda x: x.max(0), torch.empty(0, 3))
invalid("argmax empty", lambda x: x.argmax(), torch.empty(0))
invalid("argmax dim empty", lambda x: x.argmax(1), torch.empty(3, 0))
invalid("median dim empty", lambda x: x.median(1), torch.empty(3, 0))
invalid("kthvalue", lambda x: x.kthvalue(9), X)
invalid("topk", lambda x: x.topk(9), X)
invalid("topk neg", lambda x: x.topk(-1), X)
invalid("sort dim", lambda x: x.sort(4), X)
invalid("quantile", lambda x: x.quantile(1.5), X)
invalid("quantile tensor", lambda x, q: x.quantile(q), X, torch.tensor([0.5, 2.0]))
invalid("cumsum dim", lambda x: x.cumsum(3), X)
invalid("logcumsumexp int", lambda x: x.logcumsumexp(0), ints(1, 2))
invalid("cat shapes", lambda x, y: torch.cat([x, y]), X, reals(4, 4))
invalid("cat none", lambda x: torch.cat([]), X)
invalid("stack shapes", lambda x, y: torch.stack([x, y]), X, reals(4, 4))
invalid("view", lambda x: x.view(4, 4) * 2, X)
invalid("view strides", lambda x: x.t().view(-1) * 2, X)
invalid("view -1 -1", lambda x: x.view(-1, -1) * 2, X)
invalid("reshape", lambda x: x.reshape(4, -1) * 2, X)
invalid("view dtype", lambda x: x.view(torch.float64), reals(5, 5))
invalid("expand", lambda x: x.expand(5, 7) * 2, X)
invalid("expand few", lambda x: x.expand(6) * 2, X)
invalid("permute", lambda x: x.permute(0, 0) * 2, X)
invalid("permute few", lambda x: x.permute(0) * 2, X)
invalid("transpose", lambda x: x.transpose(0, 2) * 2, X)
invalid("t 3d", lambda x: x.t() * 2, reals(2, 2, 2))
invalid("squeeze", lambda x: x.squeeze(4) * 2, X)
invalid("unsqueeze", lambda x: x.unsqueeze(5) * 2, X)
invalid("flip", lambda x: x.flip(3), X)
invalid("roll", lambda x: x.roll((1, 2), 0), X)
invalid("repeat few", lambda x: x.repeat(2), X)
invalid("repeat neg", lambda x: x.repeat(-1, 2), X)
invalid("diag", lambda x: torch.diag(x), reals(2, 2, 2))
invalid("diagonal", lambda x: x.diagonal(0, 1, 1) * 2, X)
invalid("tril 1d", lambda x: x.tril(), reals(3))
invalid("cross", lambda x, y: torch.cross(x, y, dim=0), reals(4), reals(4))
invalid("cdist", lambda x, y: torch.cdist(x, y), X, reals(3, 4))
invalid("as_strided", lambda x: x.as_strided((50,), (1,)) * 2, X)
invalid("as_strided neg", lambda x: x.as_strided((5,), (-1,)) * 2, X)
invalid("as_strided copied, neg", lambda x: torch.as_strided_copy(x, (5,), (-1,)) * 2, X)
invalid("empty_strided neg", lambda x: torch.empty_strided((5,), (-1,)).fill_(1) * x.sum(), X)
invalid("new_empty_strided neg", lambda x: x.new_empty_strided((5,), (-1,)).fill_(1) * 2, X)
invalid("expanded write", lambda x: x.expand(3, 4).add_(1), reals(1, 4))
invalid("expanded copy", lambda x: x.expand(3, 4).copy_(reals(3, 4)), reals(1, 4))
invalid("overlap write", lambda x: x[1:].copy_(x[:-1]), reals(5))
invalid("overlap add", lambda x: x[1:].add_(x[:-1]), reals(5))
invalid("out dtype", lambda x, o: torch.add(x, 1, out=o), X, torch.empty(5, 6, dtype=torch.int64))
invalid("out expanded", lambda x, o: torch.exp(x, out=o), reals(3, 4), torch.empty(1, 4).expand(3, 4))
invalid("copy_ shape", lambda x, y: x.copy_(y), X, reals(4))
invalid("fill_ tensor", lambda x, y: x.fill_(y), X, reals(4))
invalid("leaf write", lambda x: x.add_(1), reals(3).requires_grad_())
invalid("lerp dtype", lambda x, y: torch.lerp(x, y, 0.5), X, X.double())
invalid("clamp none", lambda x: x.clamp(), X)
invalid("addcmul shapes", lambda x, y: torch.addcmul(x, y, y), X, reals(4))
invalid("mse shapes", lambda x, y: F.mse_loss(x, y), X, reals(4))
invalid("ce shapes", lambda x, y: F.cross_entropy(x, y), X, ints(1, 2))
invalid("ce dtype", lambda x, y: F.cross_entropy(x, y), X, ints(1, 2, 3, 4, 5).int())
invalid("nll weights", lambda x, y, w: F.nll_loss(x, y, w), X, ints(1, 2, 3, 4, 5), reals(3))
invalid("bce shapes", lambda x, y: F.binary_cross_entropy(x, y), reals(3) / 9, reals(4) / 9)
invalid("kl", lambda x, y: F.kl_div(x, y), X, reals(4))
invalid("huber delta", lambda x, y: F.huber_loss(x, y, delta=-1.0), X, X)
invalid("smooth beta", lambda x, y: F.smooth_l1_loss(x, y, beta=-1.0), X, X)
invalid("cosine", lambda x, y: F.cosine_similarity(x, y), X, reals(4))
invalid("triplet", lambda x, y: F.triplet_margin_loss(x, y, y, margin=-1.0), X, X)
invalid("ctc", lambda x: F.ctc_loss(x.log_softmax(-1), ints(1, 2)[None], (9,), (2,)), reals(3, 1, 6))
invalid("embedding 2d w", lambda k: F.embedding(k, reals(3)), ints(0, 1))
invalid("embedding float", lambda x: F.embedding(x, X), reals(3))
invalid("embedding pad", lambda k: F.embedding(k, X, padding_idx=9), ints(0, 1))
invalid("gather float idx", lambda x, k: x.gather(0, k), X, X)
invalid("gather rank", lambda x, k: x.gather(0, k), X, ints(0, 1))
invalid("gather large", lambda x, k: x.gather(0, k), X, torch.zeros(2, 9, dtype=torch.int64))
invalid(
    "scatter dtype",
    lambda x, k, s: x.scatter(0, k, s),
    X,
    torch.zeros(2, 2, dtype=torch.int64),
    torch.ones(2, 2, dtype=torch.int64),
)
invalid("scatter shape", lambda x, k, s: x.scatter(0, k, s), X, torch.zeros(3, 2, dtype=torch.int64), reals(2, 2))
invalid("index_add shape", lambda x, k, s: x.index_add(0, k, s), X, ints(0, 1), reals(3, 6))
invalid("index_add dtype", lambda x, k, s: x.index_add(0, k, s), X, ints(0, 1), reals(2, 6).double())
invalid("index_select float", lambda x, k: x.index_select(0, k), X, reals(2))
invalid("index_select 2d", lambda x, k: x.index_select(0, k), X, torch.zeros(2, 2, dtype=torch.int64))
invalid("index_copy shape", lambda x, k, s: x.index_copy(0, k, s), X, ints(0, 1), reals(3, 6))
invalid("index shapes", lambda x, k, j: x[k, j], X, ints(0, 1), ints(0, 1, 2))
invalid("index float", lambda x, k: x[k], X, reals(2))
invalid("index_put shape", lambda x, k, s: x.index_put((k,), s), X, ints(0, 1), reals(3, 6))
invalid("index_put dtype", lambda x, k, s: x.index_put((k,), s), X, ints(0, 1), reals(2, 6).double())
invalid("take float", lambda x, k: x.take(k), X, reals(2))
invalid("searchsorted", lambda x, y: torch.searchsorted(x, y), X, reals(4, 2))
invalid("bucketize", lambda x, b: torch.bucketize(x, b), X, X)
invalid("histc", lambda x: x.histc(0), X)
invalid("item", lambda x: x * x.sum(0).item(), X)
invalid("bool of many", lambda x: x * 2 if (x > 1) else x, X)
invalid("sdpa", lambda q, k: F.scaled_dot_product_attention(q, k, k), reals(1, 2, 3, 4), reals(1, 2, 3, 5))
invalid("sdpa mask", lambda q, m: F.scaled_dot_product_attention(q, q, q, m), reals(1, 2, 3, 4), reals(5, 5))
invalid("glu", lambda x: F.glu(x), reals(3, 5))
invalid("prelu", lambda x, w: F.prelu(x, w), X, reals(4))
invalid("rrelu", lambda x: F.rrelu(x, 0.5, 0.1, training=True), X)
invalid("threshold", lambda x: F.hardtanh(x, 1, -1), X)
invalid("celu", lambda x: F.celu(x, 0.0), X)
invalid("fft n", lambda x: torch.fft.fft(x, n=0), X)
invalid("stft", lambda x: torch.stft(x, 64, return_complex=True), reals(10))
invalid("complex", lambda x: torch.complex(x, x.double()), X)
invalid("view_as_complex", lambda x: torch.view_as_complex(x), reals(3, 3))
invalid("angle", lambda x: torch.polar(x, x.double()), X)
invalid("floor complex", lambda x: x.floor(), X.cfloat())
invalid("lt complex", lambda x: x < x, X.cfloat())
invalid("erf complex", lambda x: x.erf(), X.cfloat())
invalid("to neg size", lambda x: x + torch.zeros(-1), reals(1))
invalid("full dtype", lambda x: x + torch.full((2,), 1e300, dtype=torch.int32), reals(2))
invalid("unflatten", lambda x: x.unflatten(1, (4, 2)), X)
invalid("tensor_split", lambda x: x.tensor_split(0)[0], X)
invalid("hstack", lambda x: torch.hstack([x, reals(3, 6)]), X)
invalid("block_diag", lambda x: torch.block_diag(x, reals(2, 2, 2)), X)
invalid("meshgrid", lambda x: torch.meshgrid(x, x)[0], X)
invalid("cov", lambda x: torch.cov(x), reals(2, 2, 2))
invalid("unique dim", lambda x: x.unique(dim=3), X)
invalid("nonzero_static", lambda x: torch.nonzero_static(x, size=-1), X)


def _outcome(program: Program, args: tuple[torch.Tensor, ...]) -> tuple[type[BaseException] | None, list[torch.Tensor]]:
    """The type of what is raised, and the inputs afterwards."""
    given = [t if 0 in t.stride() else t.detach().clone().requires_grad_(t.requires_grad) for t in args]
    try:
        program(*given)
    except Exception as error:  # noqa: BLE001  # its type is what is tested
        return type(error), given
    return None, given


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_refused_as_by_eager(name: str) -> None:
    program, args = CASES[name]
    expected, _ = _outcome(program, args)
    assert expected is not None, "not an invalid call"
    torch._dynamo.reset()
    raised, after = _outcome(torch.compile(program, backend="opforge"), args)
    assert raised is not None, f"{expected.__name__} is lost"
    if not issubclass(raised, expected):
        torch._dynamo.reset()
        assert _outcome(torch.compile(program, backend="eager"), args)[0] is raised
        torch._dynamo.reset()
        with torch._dynamo.config.patch(suppress_errors=True):
            left, after = _outcome(torch.compile(program, backend="opforge"), args)
        assert left is expected
    assert all(torch.equal(a, b) or bool(a.isnan().any()) for a, b in zip(after, args, strict=True))
