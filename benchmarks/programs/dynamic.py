"""Programs whose sizes, strides or numbers change from call to call: each a function, how it is compiled, and the calls."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch.nn import functional as F


@dataclass(frozen=True)
class Dynamic:
    """`dynamic` as torch.compile takes it (None: what changes becomes a symbol). `make` returns the function and the arguments of each call."""

    what: str
    dynamic: bool | None
    make: Callable[[], tuple[Callable[..., Any], list[tuple[Any, ...]]]]


PROGRAMS: dict[str, Dynamic] = {}


def program(name: str, what: str, dynamic: bool | None) -> Callable[[Any], Any]:
    """Put the function below it into `PROGRAMS`."""

    def put(make: Any) -> Any:
        PROGRAMS[name] = Dynamic(what, dynamic, make)
        return make

    return put


def marked(x: Tensor, *dims: int) -> Tensor:
    """The tensor with these sizes marked as ones that change."""
    for d in dims:
        mark_dynamic(x, d)
    return x


LENGTHS = (2, 3, 7, 16, 31, 64, 65, 100, 128)


@program("mlp", "batches of nine sizes", None)
def _mlp() -> Any:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    return model.forward, [(torch.randn(n, 16),) for n in LENGTHS]


@program("mlp, marked", "the same, `mark_dynamic` before the first call", None)
def _mlp_marked() -> Any:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    return model.forward, [(marked(torch.randn(n, 16), 0),) for n in LENGTHS]


@program("batches of 1 and 0", "between others", True)
def _batches() -> Any:
    return (lambda x: (x.softmax(-1) * 2).sum(-1)), [(torch.randn(n, 8),) for n in (4, 1, 0, 7, 1, 0, 2)]


@program("batches of 1 and 0, automatic", "between others", None)
def _batches_automatic() -> Any:
    return (lambda x: (x.softmax(-1) * 2).sum(-1)), [(torch.randn(n, 8),) for n in (4, 1, 0, 7, 1, 0, 2)]


@program("attention", "causal, nine lengths", True)
def _attention() -> Any:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.shape[-2]
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v

    return attention, [tuple(torch.randn(2, 4, n, 16) for _ in range(3)) for n in LENGTHS]


@program("scaled_dot_product_attention", "nine lengths of queries, others of keys", None)
def _sdpa() -> Any:
    return F.scaled_dot_product_attention, [
        (torch.randn(2, 4, n, 16), torch.randn(2, 4, n + 5, 16), torch.randn(2, 4, n + 5, 16)) for n in LENGTHS
    ]


@program("transformer block", "two sizes at once", None)
def _block() -> Any:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train()
    return layer.forward, [(torch.randn(b, n, 32),) for b, n in ((2, 5), (3, 9), (4, 16), (2, 33), (7, 12))]


@program("embedding", "positions cut to the length", None)
def _embedding() -> Any:
    words, positions = nn.Embedding(50, 16), nn.Parameter(torch.randn(256, 16))
    norm = nn.LayerNorm(16)
    return (lambda x: norm(words(x) + positions[: x.shape[1]])), [(torch.randint(0, 50, (2, n)),) for n in LENGTHS]


@program("key-value cache", "grows by one", None)
def _cache() -> Any:
    def step(k: Tensor, new: Tensor, q: Tensor) -> Tensor:
        k = torch.cat([k, new], 1)
        return (q @ k.transpose(1, 2)).softmax(-1) @ k

    return step, [(torch.randn(2, n, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)) for n in range(3, 12)]


@program("heads", "views of a changing length", True)
def _heads() -> Any:
    def heads(x: Tensor) -> Tensor:
        b, s, d = x.shape
        return x.view(b, s, 4, d // 4).transpose(1, 2).reshape(b * 4, s, -1).sum(-1) + 1

    return heads, [(torch.randn(b, n, 32),) for b, n in ((2, 5), (3, 9), (2, 16), (5, 7))]


@program("convolutions", "images of five sizes", None)
def _convolutions() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)
    )
    return model.eval().forward, [(torch.randn(2, 3, n, n + 2),) for n in (16, 20, 25, 32, 41)]


@program("training", "a loss and its gradients, batches of six sizes", None)
def _training() -> Any:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4))

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return step, [(torch.randn(n, 16, requires_grad=True), torch.randint(0, 4, (n,))) for n in LENGTHS[:6]]


@program("padded to eight", "sizes by arithmetic", True)
def _padded() -> Any:
    return (lambda x: F.pad(x, (0, -x.shape[-1] % 8)).reshape(x.shape[0], -1, 8).mean(-1)), [
        (torch.randn(3, n),) for n in (5, 8, 9, 16, 23, 40)
    ]


@program("halves", "a split of a changing size", True)
def _halves() -> Any:
    def gated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return a * b.sigmoid()

    return gated, [(torch.randn(3, n),) for n in (4, 6, 10, 32, 64)]


@program("joined", "two changing sizes", True)
def _joined() -> Any:
    return (lambda x, y: torch.cat([x, y]).cumsum(0)), [
        (torch.randn(a, 4), torch.randn(b, 4)) for a, b in ((2, 3), (3, 3), (5, 2), (9, 30), (30, 9))
    ]


@program("strides", "the same sizes, transposed now and then", True)
def _strides() -> Any:
    return (lambda x: (x.exp() + 1).sum(0)), [
        (t,) for n in (4, 6, 9) for t in (torch.randn(n, n + 1), torch.randn(n + 1, n).t())
    ]


@program("broadcast", "a size that is now and then 1", None)
def _broadcast() -> Any:
    return (lambda x, y: x * y + 1), [
        (torch.randn(n, 6), torch.randn(m, 6)) for n, m in ((4, 4), (5, 5), (6, 1), (7, 1), (8, 8), (9, 9))
    ]


@program("numbers", "an integer that changes", None)
def _numbers() -> Any:
    return (lambda x, k: x * k + k), [(torch.randn(5, 6), k) for k in (2, 3, 5, 8, 1, 0, -4)]


@program("number of columns", "a slice by an integer", None)
def _columns() -> Any:
    return (lambda x, k: x[:, :k].sum(1)), [(torch.randn(5, 40), k) for k in (2, 3, 5, 8, 13, 21)]


@program("real numbers", "a learning rate that changes", None)
def _reals() -> Any:
    return (lambda p, g, rate: p - rate * g), [(torch.randn(8), torch.randn(8), 0.1 / (k + 1)) for k in range(6)]


@program("nonzero", "sizes from data", None)
def _nonzero() -> Any:
    return (lambda x: torch.nonzero(x > 0).float().sum() + x.sum()), [(torch.randn(n, 4),) for n in (3, 5, 9, 16)]


@program("masked_select", "sizes from data", True)
def _masked() -> Any:
    return (lambda x: (x.masked_select(x > 0) * 2).sum()), [(torch.randn(n),) for n in (3, 5, 9, 16)]


@program("item", "a size from a tensor", None)
def _item() -> Any:
    def ones(x: Tensor, n: Tensor) -> Tensor:
        size: Any = n.item()
        torch._check(size >= 0)
        return torch.ones(size, 3) * 2 + x

    return ones, [(torch.randn(3), torch.tensor(n)) for n in (2, 5, 1, 7)]


@program("repeat_interleave", "sizes from data", None)
def _repeat() -> Any:
    return (lambda x, n: x.repeat_interleave(n, 0).sin()), [
        (torch.randn(k, 3), torch.arange(1, k + 1)) for k in (2, 3, 5, 4)
    ]


@program("upsampled", "images of four sizes", True)
def _upsampled() -> Any:
    return (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")), [
        (torch.randn(1, 2, n, n + 1),) for n in (4, 7, 9, 16)
    ]


@program("batch norm", "training, batches of four sizes", None)
def _batch_norm() -> Any:
    norm = nn.BatchNorm1d(6).train()
    return (lambda x: norm(x).relu()), [(torch.randn(n, 6),) for n in (4, 7, 9, 16)]


def chosen(parts: str | None) -> Iterable[tuple[str, Dynamic]]:
    """The programs whose names contain one of the parts, with commas between."""
    return ((n, p) for n, p in PROGRAMS.items() if parts is None or any(w.strip() in n for w in parts.split(",")))
