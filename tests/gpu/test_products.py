"""Products of matrices with what is beside them, on a CUDA device, judged by a float64 run. `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge
from opforge.generated.tuning import TUNING
from opforge.runtime.kernels.operands import Layouts
from opforge.runtime.kernels.plan import Kernel, Tile
from opforge.runtime.targets.cuda import Cuda
from opforge.runtime.targets.products import tile_of
from tests.support.accuracy import assert_as_accurate

pytestmark = pytest.mark.gpu

BF, HALF = torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")
TILE = Tile(64, 32, 32, 4, 3)
DESCRIBED = replace(TILE, block_m=128, block_n=64, block_k=64, descriptors=True)
Program = Callable[..., Any]


def given(*shapes: tuple[int, ...], dtype: torch.dtype = BF) -> list[Tensor]:
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


def eight_bits(rows: int, columns: int) -> list[Tensor]:
    q = torch.randint(-128, 128, (rows, columns), device="cuda", dtype=torch.int8)
    return [q, (torch.rand(rows, device="cuda") / 64).to(BF)]


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def gelu_tanh(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def silu(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x @ w)


def residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(x, w, b)


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w) * (x @ v)


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y) * 0.125


def added(c: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.addmm(c, x, y).relu()


def dequantized(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, q.to(x.dtype) * s[:, None]).relu()


def before(x: Tensor, w: Tensor) -> Tensor:
    return (x.to(w.dtype) * 2 + 1) @ (w / 3)


def slices(x: Tensor, y: Tensor) -> Tensor:
    return (x[::2, 1:] @ y[:, ::3]).relu()


def to_heads(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (F.linear(x, w, b) * 0.5).unflatten(-1, (4, -1)).transpose(1, 2).contiguous()


def from_heads(x: Tensor, w: Tensor) -> Tensor:
    return (x.transpose(1, 2).flatten(2) @ w).sin()


def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y.cos(), y.float() * 3


def linear_of(m: int, k: int, n: int, dtype: torch.dtype = BF) -> Callable[[], list[Tensor]]:
    return lambda: given((m, k), (n, k), (n,), dtype=dtype)


SIZES = [
    (16, 16, 16),
    (17, 31, 33),
    (64, 64, 64),
    (128, 256, 96),
    (129, 65, 257),
    (1000, 104, 1000),
    (64, 2048, 32),
    (2048, 40, 48),
]
CASES: dict[str, tuple[Program, Callable[[], list[Tensor]]]] = {
    **{f"gelu {m}x{k}x{n}": (gelu, linear_of(m, k, n)) for m, k, n in SIZES},
    **{f"gelu {m}x{k}x{n} float16": (gelu, linear_of(m, k, n, HALF)) for m, k, n in SIZES[::3]},
    "gelu by tanh": (gelu_tanh, linear_of(200, 72, 136)),
    "silu": (silu, lambda: given((200, 72), (72, 136))),
    "residual": (residual, lambda: given((200, 72), (136, 72), (136,), (200, 136))),
    "residual of a row": (residual, lambda: given((200, 72), (136, 72), (136,), (136,))),
    "residual of a column": (residual, lambda: given((200, 72), (136, 72), (136,), (200, 1))),
    "gate": (gated, lambda: given((200, 72), (72, 136), (72, 136))),
    "transposed": (scaled, lambda: [t.t() for t in given((72, 200), (136, 72))]),
    "expanded": (scaled, lambda: [given((1, 72))[0].expand(200, 72), given((72, 136))[0]]),
    "slices": (slices, lambda: given((200, 73), (72, 300))),
    "batches": (scaled, lambda: given((5, 70, 72), (5, 72, 136))),
    "batches of one matrix": (scaled, lambda: [given((5, 70, 72))[0], given((72, 136))[0].expand(5, 72, 136)]),
    "dimensions of batches": (scaled, lambda: given((2, 3, 70, 72), (3, 72, 136))),
    "sum of a row": (added, lambda: given((136,), (200, 72), (72, 136))),
    "sum of a column": (added, lambda: given((200, 1), (200, 72), (72, 136))),
    "sum of one": (added, lambda: given((1,), (200, 72), (72, 136))),
    "8 bits": (dequantized, lambda: [*given((200, 72)), *eight_bits(136, 72)]),
    "8 bits, odd": (dequantized, lambda: [*given((201, 77)), *eight_bits(133, 77)]),
    "before": (before, lambda: [torch.randn(200, 71, device="cuda"), *given((71, 136))]),
    "to heads": (to_heads, lambda: given((3, 50, 72), (128, 72), (128,))),
    "from heads": (from_heads, lambda: given((3, 4, 50, 16), (64, 96))),
    "two results": (two, lambda: given((200, 72), (72, 136))),
    "at an odd address": (silu, lambda: [given((200 * 72 + 1,))[0][1:].view(200, 72), given((72, 136))[0]]),
}  # fmt: skip
ONE_LEFT = ("gate",)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tile], None]:
    """Says that every product is fused with as much as can be, with one tile."""

    def force(tile: Tile) -> None:
        def choose(kernels: Sequence[Kernel], _: Layouts) -> list[tuple[float, Tile] | None]:
            return [(float(len(k.parts)), tile) for k in kernels]

        monkeypatch.setattr(Cuda, "selector", lambda self, watch: choose)

    return force


def compiled(program: Program, inputs: list[Tensor], folder: Path, **options: Any) -> tuple[tuple[Tensor, ...], Any]:
    """What a compiled program gives, and the counters."""
    torch._dynamo.reset()
    opforge.reset_stats()
    options = {"strict": True, "max_autotune": True, "cache_dir": str(folder), **options}
    call = torch.compile(program, backend="opforge", options=options, dynamic=False)
    with torch.no_grad():
        for _ in range(3 if options.get("cudagraphs") else 1):
            found = call(*inputs)
    stats = opforge.stats()
    assert stats["fallbacks"] == {}
    return found if isinstance(found, tuple) else (found,), stats


def judge(program: Program, inputs: list[Tensor], found: tuple[Tensor, ...]) -> None:
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    results = [r if isinstance(r, tuple) else (r,) for r in (program(*inputs), program(*wide))]
    for one, eager, exact in zip(found, *results, strict=True):
        assert_as_accurate(one, eager, exact)


@pytest.mark.parametrize("tile", [TILE, DESCRIBED], ids=["", "descriptors"])
@pytest.mark.parametrize("name", CASES)
def test_as_accurate_as_eager(name: str, tile: Tile, forced: Callable[[Tile], None], tmp_path: Path) -> None:
    forced(tile)
    program, make = CASES[name]
    torch.manual_seed(0)
    inputs = make()
    found, stats = compiled(program, inputs, tmp_path)
    assert sum(stats["externs"].values()) == (name in ONE_LEFT), "a product is not fused"
    judge(program, inputs, found)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("which", ["left", "right", "bias"])
def test_infinities_and_nans_spread_as_in_eager(
    bad: float, which: str, forced: Callable[[Tile], None], tmp_path: Path
) -> None:
    forced(TILE)
    torch.manual_seed(0)
    inputs = given((200, 77), (136, 77), (136,))
    inputs[("left", "right", "bias").index(which)][..., -3:] = bad
    found, stats = compiled(gelu, inputs, tmp_path)
    assert not stats["externs"]
    judge(gelu, inputs, found)


@pytest.mark.parametrize("tile", TUNING[90].tiles, ids=str)
def test_every_tile(tile: Any, forced: Callable[[Tile], None], tmp_path: Path) -> None:
    forced(tile_of(tile, tile.descriptors))
    torch.manual_seed(0)
    inputs = given((1030, 520), (776, 520), (776,))
    found, stats = compiled(gelu, inputs, tmp_path)
    assert not stats["externs"]
    judge(gelu, inputs, found)


@pytest.mark.parametrize(
    "sizes", [(1, 64, 64), (64, 0, 64), (0, 64, 64), (64, 64, 1), (64, 64, 0), (64, 1, 64)], ids=str
)
def test_thin_products_are_right(sizes: tuple[int, int, int], forced: Callable[[Tile], None], tmp_path: Path) -> None:
    forced(TILE)
    inputs = linear_of(*sizes)()
    found, _ = compiled(gelu, inputs, tmp_path)
    judge(gelu, inputs, found)


@pytest.mark.parametrize("tile", [TILE, DESCRIBED], ids=["", "descriptors"])
def test_graphs(tile: Tile, forced: Callable[[Tile], None], tmp_path: Path) -> None:
    forced(tile)
    inputs = linear_of(200, 72, 136)()
    found, stats = compiled(gelu, inputs, tmp_path, cudagraphs=True)
    assert not stats["externs"]
    judge(gelu, inputs, found)


def wide(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).float()


BY_TABLE: dict[str, tuple[Program, Callable[[], list[Tensor]]]] = {
    "small": (gelu, linear_of(512, 512, 512)),
    "smaller": (gelu, linear_of(64, 128, 256, HALF)),
    "odd": (gelu, linear_of(4095, 1001, 3003)),
    "flat batches": (scaled, lambda: given((64, 512, 64), (64, 64, 1024))),
    "batches": (scaled, lambda: given((16, 512, 512), (16, 512, 512), dtype=HALF)),
    "logits": (wide, lambda: given((1024, 1024), (8192, 1024))),
}


@pytest.mark.parametrize("name", BY_TABLE)
def test_what_the_table_says_without_measuring(name: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("C8: the table is of another GPU")
    program, make = BY_TABLE[name]
    torch.manual_seed(0)
    inputs = make()
    found, stats = compiled(program, inputs, tmp_path, max_autotune=False)
    assert not stats["externs"], "a product is not fused"
    assert not stats["tuned"]
    judge(program, inputs, found)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_products_of_float32_are_the_library_s(precision: str, tmp_path: Path) -> None:
    torch.set_float32_matmul_precision(precision)
    try:
        torch.manual_seed(0)
        inputs = linear_of(512, 520, 512, torch.float32)()
        found, stats = compiled(gelu, inputs, tmp_path)
        assert sum(stats["externs"].values()) == 1
        judge(gelu, inputs, found)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_chosen_by_measurement_and_remembered(tmp_path: Path) -> None:
    """Whatever is faster is right; a second graph with the same product takes the answer from the cache."""
    inputs = linear_of(4096, 256, 1024)()
    found, stats = compiled(gelu, inputs, tmp_path)
    judge(gelu, inputs, found)
    assert stats["tuned"].get("measured", 0) >= 1
    found, stats = compiled(lambda x, w, b: (gelu(x, w, b), x.sum(-1)), inputs, tmp_path)
    assert stats["tuned"].get("stored", 0) >= 1, stats
    judge(lambda x, w, b: (gelu(x, w, b), x.sum(-1)), inputs, found)


def test_a_tile_that_does_not_fit_leaves_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from opforge.runtime.targets import products

    large = [Tile(128, 128, 128, 8, n) for n in (6, 8)]
    monkeypatch.setattr(products, "tiles_of", lambda *_: large)
    inputs = linear_of(1024, 1024, 1024)()
    found, stats = compiled(gelu, inputs, tmp_path)
    assert sum(stats["dropped"].values()) == len(large)
    assert sum(stats["externs"].values()) == 1
    judge(gelu, inputs, found)
