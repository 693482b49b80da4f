"""Products that are one kernel with what is after them by the table of a GPU, without being measured. Plans only: needs no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from opforge.generated.tuning import TUNING
from opforge.runtime.targets.product_rules import by_table
from opforge.runtime.targets.products import tile_of
from tests.support.gpu_plan import planned

SMALL, ODD, FLAT, DEEPER, DEEPEST = (tile_of(rule) for rule in TUNING[90].fused)
Shapes = tuple[tuple[int, ...], ...]


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b))


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y) * 0.125


def logits(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).float()


def transposed(x: Tensor, y: Tensor) -> Tensor:
    return (x.t() @ y) * 0.125


def stored_apart(x: Tensor, y: Tensor) -> Tensor:
    return ((x @ y) * 0.125).mT.contiguous()


def made_before(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x * 2, w, b)


def linear(m: int, k: int, n: int) -> Shapes:
    return (m, k), (n, k), (n,)


def batches(count: int, m: int, k: int, n: int) -> Shapes:
    return (count, m, k), (count, k, n)


CASES: dict[str, tuple[Callable[..., Tensor], Shapes, object]] = {
    "small": (gelu, linear(512, 512, 512), SMALL),
    "smaller": (gelu, linear(64, 128, 256), SMALL),
    "few rows": (gelu, linear(16, 512, 512), None),
    "small and odd": (gelu, linear(511, 511, 511), None),
    "small and deep": (gelu, linear(512, 1024, 512), None),
    "gelu": (gelu, linear(8192, 1024, 4096), None),
    "gelu of few steps": (gelu, linear(32768, 256, 1024), None),
    "odd": (gelu, linear(4095, 1001, 3003), ODD),
    "odd and deep": (gelu, linear(4095, 2001, 3003), None),
    "odd result": (gelu, linear(4096, 1024, 3003), None),
    "batches": (scaled, batches(64, 1024, 64, 1024), FLAT),
    "batches of 512": (scaled, batches(16, 512, 512, 512), DEEPER),
    "batches of few columns": (scaled, batches(64, 1024, 512, 128), None),
    "batches of odd columns": (scaled, batches(64, 1024, 64, 1023), None),
    "few batches": (scaled, batches(2, 512, 64, 512), None),
    "relu": (relu, linear(8192, 1024, 1024), DEEPEST),
    "deep relu": (relu, linear(8192, 4096, 1024), None),
    "float32 logits": (logits, ((4096, 1024), (32000, 1024)), DEEPEST),
    "transposed": (transposed, ((64, 8192), (64, 1024)), None),
    "stored apart": (stored_apart, batches(64, 1024, 64, 1024), None),
    "made before": (made_before, linear(512, 512, 512), None),
}


def tiles(fn: Callable[..., Tensor], shapes: Shapes, dtype: torch.dtype, capability: int = 90) -> list[object]:
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
        plan = planned(fn, inputs, select=by_table(capability))
    return [k.tile for k in plan.kernels() if k.tile is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_what_the_table_says(name: str, dtype: torch.dtype) -> None:
    fn, shapes, tile = CASES[name]
    assert tiles(fn, shapes, dtype) == ([] if tile is None else [tile])


@pytest.mark.parametrize("capability", [80, 89, 100])
def test_nothing_on_a_gpu_that_was_not_measured(capability: int) -> None:
    assert by_table(capability) is None


def test_float32_is_the_library_s() -> None:
    assert tiles(gelu, linear(512, 512, 512), torch.float32) == []


def test_a_result_that_somebody_else_reads_stays() -> None:
    def two(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w, b)
        return y, F.gelu(y)

    assert tiles(two, linear(512, 512, 512), torch.bfloat16) == []  # type: ignore[arg-type]
