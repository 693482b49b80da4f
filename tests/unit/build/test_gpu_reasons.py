"""A graph on a GPU for which there are no kernels runs eagerly at once, for one reason that says what is missing. Needs no GPU."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

import opforge
from opforge.errors import BuildError, OpforgeWarning
from opforge.generated.languages import TRITON_LANGUAGE
from opforge.runtime import fallback
from opforge.runtime.build import triton_job, triton_pool
from opforge.runtime.build.triton_job import Job
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.lower.graph import lower
from opforge.runtime.targets import cuda

NO_GPU = "torch finds no GPU, and tensors are on cuda:0"
NO_TRITON = "Triton is not installed: kernels for a GPU are compiled by it (pip install triton)"
OLD = "cuda:0 (Tesla P100) has compute capability 6.0, and Triton's kernels need 7.0"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was warned of; no kernel is compiled."""

    def compiled(*_: object) -> None:
        raise AssertionError("a kernel is compiled")

    monkeypatch.setattr(fallback, "_warned", set())
    monkeypatch.setattr(triton_pool, "compile_job", compiled)
    cuda.capability.cache_clear()
    opforge.reset_stats()
    yield
    cuda.capability.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """There is a GPU of this capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla P100")


def graph() -> tuple[fx.GraphModule, list[Tensor]]:
    with FakeTensorMode():
        x, w = (torch.empty(4, 8, device="cuda") for _ in range(2))
    return fx.symbolic_trace(lambda x, w: (x * w).relu().sum(-1)), [x, w]


def eager_reason() -> str:
    """Why a graph runs eagerly: the one reason that is counted, and warned of once though two graphs run so."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            opforge.compile_fx(*graph())
    ((reason, count),) = opforge.stats()["fallbacks"].items()
    assert count == 2
    kind, _, text = reason.partition(": ")
    assert kind == "BuildError"
    (warning,) = [w for w in said if issubclass(w.category, OpforgeWarning)]
    assert str(warning.message) == f"opforge: {text}; the graph runs eagerly (strict=True raises instead)"
    assert opforge.stats()["retries"] == {}
    assert opforge.stats()["graphs"] == 0
    return text


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 9, 0)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert eager_reason() == NO_TRITON
    with pytest.raises(BuildError, match="pip install triton"):
        opforge.compile_fx(*graph(), options={"strict": True})


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert eager_reason() == NO_GPU


def test_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its kernels failed in four configurations."""
    pytest.importorskip("triton")
    pretend(monkeypatch, 6, 0)
    assert eager_reason() == OLD
    with pytest.raises(BuildError, match=r"compute capability 6\.0"):
        opforge.compile_fx(*graph(), options={"strict": True})


def test_what_is_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    pretend(monkeypatch, 7, 0)
    assert cuda.unusable(0) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_least_capability_compiles(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sums of a row, exponentials and atomic additions; of bfloat16 too, which such a device has no arithmetic for."""
    pytest.importorskip("triton")
    name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}[dtype]
    source = """\
import triton
import triton.language as tl


@triton.jit
def k(x, y, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    at = tl.arange(0, XBLOCK)
    row = tl.load(x + at[:, None] * RBLOCK + tl.arange(0, RBLOCK)[None, :])
    total = tl.sum(tl.exp(row.to(tl.float32)), 1)
    tl.store(x + at, (total + tl.load(x + at)).to(row.dtype))
    tl.atomic_add(y + at % 3, total)
"""
    job = Job("k", source, (name, "fp32"), 0, 16, 64, 4, TRITON_LANGUAGE.capability)
    assert triton_job.compile_job(job, tmp_path_factory.mktemp("least")).cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e4m3fn, torch.uint16])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_dtype_without_arithmetic(dtype: torch.dtype) -> None:
    """Its operators run by eager kernels, and the reason names the dtype."""
    with torch.no_grad():
        with FakeTensorMode():
            x = torch.empty(4, 8, dtype=dtype, device="cuda")
        program = lower(trace(lambda x: x.to(torch.float64), [x]).graph, device="cuda").program
    assert len(program.items) == 1
    assert opforge.stats()["reasons"] == {f"aten._to_copy.default: dtype {str(dtype).partition('.')[2]}": 1}
