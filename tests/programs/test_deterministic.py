"""`torch.use_deterministic_algorithms(True)`: memory that a program does not write is filled as by eager, and a GPU's kernels add no floats in
an order that changes. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge
from opforge.generated.rewrites import RULES
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.ir.nodes import Extern
from opforge.runtime.lower import graph as lowering
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets.cuda import prepared, scheduled
from tests.support.machines import H200

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool]
DTYPES += [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float8_e4m3fn]


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch._dynamo.reset()
    opforge.reset_stats()
    yield
    torch.use_deterministic_algorithms(before)


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(f, backend="opforge", options={"strict": True})


def empties(x: Tensor) -> list[Tensor]:
    d, device = x.dtype, x.device
    return [
        torch.empty(3, 2, dtype=d, device=device),
        torch.empty_like(x),
        x.new_empty(4),
        torch.empty_strided((2, 3), (1, 2), dtype=d, device=device),
        x.new_empty_strided((2, 3), (3, 1)),
        torch.empty_permuted((2, 3), (1, 0), dtype=d),
        torch.empty(0, 2, dtype=d),
    ]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).partition(".")[2])
def test_memory_is_filled(dtype: torch.dtype) -> None:
    """It was zeros."""
    x = torch.zeros(2, 3).to(dtype)
    got, want = compiled(empties)(x), empties(x)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        torch.testing.assert_close(
            *(torch.view_as_real(t) if t.is_complex() else t for t in (a, b)), rtol=0, atol=0, equal_nan=True
        )
    assert bool(want[0].isnan().all()) == (dtype.is_floating_point or dtype.is_complex)


@pytest.mark.usefixtures("deterministic")
def test_what_is_written_stands_beside_what_is_not() -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.empty(4, 3)
        y[1] = x
        return y + 1

    x = torch.randn(3)
    got = compiled(program)(x)
    torch.testing.assert_close(got, program(x), equal_nan=True)
    assert got[0].isnan().all()
    assert torch.equal(got[1], x + 1)


@pytest.mark.usefixtures("deterministic")
def test_another_setting_fills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    assert compiled(lambda x: torch.empty_like(x) * 0)(torch.ones(3)).isnan().logical_not().all()


def test_switching_compiles_again() -> None:
    """One function, with and without: Dynamo looks at the switch."""
    run = compiled(lambda x: torch.empty(3) + 0 * x)
    torch._dynamo.reset()
    x = torch.ones(3)
    assert torch.equal(run(x), torch.zeros(3))
    try:
        torch.use_deterministic_algorithms(True)
        assert run(x).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(run(x), torch.zeros(3))


# --- A GPU's kernels


def index_add(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    return x.index_add(0, i, y)


def scatter_add(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    return x.scatter_add(0, i[:, None].expand(5, 8), y)


def put(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    return x.index_put((i,), y, accumulate=True)


def embedding_backward(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(y, i, 4, -1, False) + x


def gather_backward(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    return torch.ops.aten.gather_backward(y, x, 0, i[:, None].expand(5, 8), False)


def pool_backward(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    image = F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear")
    return torch.ops.aten.upsample_bilinear2d_backward(image, [8, 16], [1, 1, 4, 8], False, 2.0, 2.0)


class OnGpu(lowering._Lowerer):
    """Lowers as for a GPU, for tensors on the processor."""

    def __init__(self, gm: torch.fx.GraphModule, device: str, checks: bool, products: int) -> None:
        super().__init__(gm, "cuda", checks, 0)
        self.device = "cpu"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_Lowerer", OnGpu)


def sources(fn: Callable[..., Any], dtype: torch.dtype) -> tuple[str, list[str]]:
    """The kernels of a function for a GPU, and the operators that run by eager kernels there."""
    x, y = (torch.ones(n, 8, dtype=dtype) for n in (4, 5))
    with torch.no_grad():
        traced = trace(fn, [x, y, torch.zeros(5, dtype=torch.int64)])
    rewrite(traced.graph, RULES, device="cuda")
    program = prepared(separate_outputs(lowering.lower(traced.graph).program), H200)
    externs = [item.target for item in program.items if isinstance(item, Extern)]
    return render_triton(scheduled(program, Config(), H200)).source, externs


UPDATES = [index_add, scatter_add, put, embedding_backward, gather_backward, pool_backward]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).partition(".")[2])
@pytest.mark.parametrize("fn", UPDATES, ids=lambda f: f.__name__)
def test_no_atomic_additions_of_floats(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    """Their order, and so their rounding, is another one in each run. Eager's kernels take their place."""
    free, before = sources(fn, dtype)
    torch.use_deterministic_algorithms(True)
    try:
        source, externs = sources(fn, dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "tl.atomic_" not in source
    if "tl.atomic_" in free:
        assert len(externs) == len(before) + 1
    else:
        assert externs == before


@pytest.mark.usefixtures("gpu")
def test_atomic_additions_without_the_switch() -> None:
    """What the test above looks for is there, and integers, whose sums have no order, keep it."""
    found = [fn.__name__ for fn in UPDATES if "tl.atomic_add" in sources(fn, torch.float32)[0]]
    assert found == ["index_add", "scatter_add", "put", "embedding_backward", "gather_backward"]
    torch.use_deterministic_algorithms(True)
    try:
        assert "tl.atomic_add" in sources(index_add, torch.int64)[0]
    finally:
        torch.use_deterministic_algorithms(False)
