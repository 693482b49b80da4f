"""A kernel that does not compile or does not fit is tried with smaller tiles; each failure is counted. Needs no GPU."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.machines import H200

pytest.importorskip("triton")

import opforge
from opforge.errors import BuildError, ResourceError
from opforge.runtime.build import triton_pool
from opforge.runtime.build.cache import Cache
from opforge.runtime.build.triton_job import Binary, Job
from opforge.runtime.build.triton_pool import compile_fitting
from opforge.runtime.cold import make
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.lower.graph import lower
from opforge.runtime.observe import counters
from opforge.runtime.observe.watch import Watch
from opforge.runtime.realize import parameters, realize
from opforge.runtime.render.triton_horizontal import FILL, FILL_NAME
from opforge.runtime.render.triton_unit import TritonKernel
from opforge.runtime.targets import cuda
from opforge.runtime.targets.cuda import Cuda, configurations, job_of

LOOP = "for roffset in range(0, 5000, RBLOCK):\n"


def kernel(x: int, r: int, warps: int, source: str = "") -> TritonKernel:
    return TritonKernel("k", source, ("fp32",), 0, x, r, warps)


def tiles(k: TritonKernel) -> list[tuple[int, int, int]]:
    return [(c.xblock, c.rblock, c.warps) for c in configurations(k, H200)]


def test_tiles_get_smaller() -> None:
    assert tiles(kernel(1024, 1, 4)) == [(1024, 1, 4), (256, 1, 4), (64, 1, 2), (16, 1, 1)]
    assert tiles(kernel(4, 1024, 16)) == [(4, 1024, 16), (1, 1024, 16)]  # whole rows
    assert tiles(kernel(1, 4096, 16)) == [(1, 4096, 16)]
    assert tiles(kernel(1, 2048, 8, LOOP)) == [(1, 2048, 8), (1, 512, 8), (1, 128, 4), (1, 32, 1)]
    assert tiles(kernel(64, 64, 8, LOOP)) == [(64, 64, 8), (32, 32, 8), (8, 32, 8), (2, 32, 2)]


SUM = """\
import triton
import triton.language as tl


@triton.jit
def k(x, y, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    r = tl.arange(0, RBLOCK)[None, :]
    a = tl.arange(0, XBLOCK)[:, None]
    tl.store(y + tl.arange(0, XBLOCK), tl.sum(tl.load(x + a * RBLOCK + r), 1))
"""


def jobs(*xblocks: int) -> list[Job]:
    return [Job("k", SUM, ("fp32", "fp32"), 0, x, 128, 4, 90) for x in xblocks]


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    counters.reset()
    return Config(cache_dir=str(tmp_path / "cache"), dump_dir=str(tmp_path / "dump"))


def test_first_that_compiles_and_fits(cfg: Config) -> None:
    # 2**14 * 128 elements are more than Triton takes.
    ((number, binary), (other, _)) = compile_fitting([jobs(2**14, 64, 4), jobs(4)], 1 << 20, cfg)
    assert (number, other) == (1, 0)
    ((reason, count),) = counters.snapshot()["retries"].items()
    assert reason.startswith("Triton does not compile k: ")
    assert count == 1
    needs = binary.meta["shared"]
    ((number, binary),) = compile_fitting([jobs(64, 1)], needs - 1, cfg)
    assert number == 1
    assert binary.meta["shared"] < needs
    assert f"k needs {needs} bytes of shared memory, of {needs - 1}" in counters.snapshot()["retries"]


def test_none_that_compiles(cfg: Config) -> None:
    with pytest.raises(BuildError, match="Triton does not compile k: ") as raised:
        compile_fitting([jobs(4), jobs(2**15, 2**14), jobs(2**14)], 1 << 20, cfg)
    assert "XBLOCK=16384 RBLOCK=128 warps=4 sm_90" in str(raised.value)
    assert sum(counters.snapshot()["retries"].values()) == 3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a GPU while kernels are compiled."""
    monkeypatch.setattr(cuda, "capability", lambda _: 90)
    monkeypatch.setattr(cuda, "gpu_of", lambda _: H200)
    properties = types.SimpleNamespace(shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def build(f: Callable[..., Any], cfg: Config, *inputs: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Files and metadata of a program's entry, as for a GPU."""
    lowered = lower(trace(torch.fx.symbolic_trace(f), inputs).graph)
    made = make(
        lowered.program, parameters(lowered), Cuda(cfg, 0), cfg, Watch("off", ""), boxed=False, minimize_memory=False
    )
    return dict(made.files), dict(made.meta)


def first_refused(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """A stand-in for the compiler, which takes no kernel of several points at first and all from then on; the list gets those of the first time."""
    refused: list[Job] = []
    taken = Binary(b"", {"name": "k", "shared": 0, "warps": 1})

    def compile_kernels(wanted: list[Job], cfg: Config, on_done: Any) -> list[Binary | BuildError]:
        if not refused:
            refused.extend(wanted)
            return [BuildError("too large") if job.xblock > 1 else taken for job in wanted]
        return [taken for _ in wanted]

    monkeypatch.setattr(triton_pool, "compile_kernels", compile_kernels)
    return refused


@pytest.mark.usefixtures("device")
def test_wrapper_launches_what_was_taken(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1

    refused = first_refused(monkeypatch)
    files, meta = build(f, cfg, torch.empty(10000))
    (name,) = meta["symbols"]
    (job,) = refused
    assert job == job_of(kernel_of(meta, files, name, job.xblock), 90)
    assert f"{name}({-(-10000 // (job.xblock // 4))}, arg" in files["wrapper.py"].decode()
    assert meta["symbols"][name][1][2] == job.xblock // 4


def kernel_of(meta: dict[str, Any], files: dict[str, Any], name: str, xblock: int) -> TritonKernel:
    pointers, sizes, _, rblock, _ = meta["symbols"][name][1]
    return TritonKernel(name, files[f"{name}.py"].decode(), tuple(pointers), sizes, xblock, rblock, 2)


@pytest.mark.usefixtures("device")
def test_preferred_configuration(cfg: Config) -> None:
    files, meta = build(lambda x: x.softmax(-1), cfg, torch.empty(10, 100))
    (name,) = meta["symbols"]
    assert files[f"{name}.cubin"][:4] == b"\x7fELF"
    assert counters.snapshot()["retries"] == {}


@pytest.mark.usefixtures("device")
def test_group_is_launched_as_it_was_taken(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of programs, and each member's first one, are those of the smaller tiles."""

    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.exp(), y.exp(), z.exp()

    refused = first_refused(monkeypatch)
    files, meta = build(f, cfg, *(torch.empty(n) for n in (2000, 400, 1600)))
    ((name, (symbol, how, _, numbers, table)),) = meta["symbols"].items()
    (job,) = refused
    assert name == symbol
    assert (len(how[0]), how[1], how[2], job.xblock) == (6, 6, 128, 512)
    assert numbers == [125, 25, 100, 0, 16, 20]
    assert not table
    assert f"{name}(33, arg" in files["wrapper.py"].decode()
    assert meta["kernels"] == 1


def ten(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
    return tuple(t.exp() for t in (a, b, c, d, e, f, g, h, i, j))


@pytest.mark.usefixtures("device")
def test_table_is_launched_as_it_was_taken(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the numbers of the smaller tiles; what fills it has no others."""

    refused = first_refused(monkeypatch)
    files, meta = build(ten, cfg, *(torch.empty(1600 + 16 * n) for n in range(10)))
    job, filling = sorted(refused, key=lambda one: one.name == FILL_NAME)
    assert (filling.name, filling.sizes) == (FILL_NAME, FILL)
    name, (symbol, how, _, numbers, table) = next(item for item in meta["symbols"].items() if item[0] != FILL_NAME)
    assert (name, table, job.xblock) == (symbol, "table", 1024)
    assert how == [["i64"], 1, 256, 1, how[-1]]
    assert numbers == [*(100 + n for n in range(10)), *(7 * n for n in range(10))]
    assert f"{name}(70, [arg" in files["wrapper.py"].decode()
    assert meta["symbols"][FILL_NAME][1] == [["i64"], FILL, 1, 1, 1]


# --- What the device refuses when it is loaded


class Loads:
    """Stands in for a device that takes no kernel of more than so many threads, or none of some names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        self.threads, self.tried = threads, 0
        monkeypatch.setattr(cuda, "load_function", self.load)
        monkeypatch.setattr(cuda, "_refused", {})
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(cuda, "launcher", lambda *given: given)

    def load(self, binary: bytes, name: str, shared: int, threads: int) -> int:
        assert binary[:4] == b"\x7fELF"
        self.tried += 1
        if threads > self.threads:
            raise ResourceError(
                f"a block of {name} has {threads} threads, and its registers are enough for {self.threads}"
            )
        return 0xF00


def realized(f: Callable[..., Any], cfg: Config, *inputs: torch.Tensor) -> tuple[Any, str]:
    """The loaded functions of a program for a GPU, and its wrapper."""
    lowered = lower(trace(torch.fx.symbolic_trace(f), inputs).graph)
    call, artifacts = realize(lowered, Cuda(cfg, 0), cfg, Watch("off", ""))
    return call, artifacts.wrapper


@pytest.mark.usefixtures("device")
def test_next_configuration_where_the_device_refuses_one(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph ran eagerly. It is launched as the configuration that was taken, which the cache has from then on."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1

    x = torch.empty(1 << 20)
    _, meta = build(f, cfg, x)
    ((name, (_, how, *_)),) = meta["symbols"].items()
    _, _, xblock, _, warps = how
    loads = Loads(monkeypatch, 32 * warps - 1)
    call, wrapper = realized(f, cfg, x)
    function = call.__globals__[name]
    assert function[0] == (0xF00, 0, function[0][2])
    assert function[0][2] < 32 * warps
    reasons = opforge.stats()["retries"]
    refused = loads.tried - 1
    assert sum(reasons.values()) == refused >= 1
    assert set(reasons) == {
        f"a block of {name} has {32 * warps} threads, and its registers are enough for {32 * warps - 1}"
    }
    assert f"{name}({(1 << 20) // (xblock >> 2 * refused)}, arg" in wrapper
    # Another process: the cache has what was taken.
    monkeypatch.setattr(cuda, "_refused", {})
    counters.reset()
    assert realized(f, cfg, x)[1] == wrapper
    assert loads.tried == refused + 2
    assert opforge.stats()["retries"] == {}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("cached", [True, False])
def test_no_configuration_that_the_device_takes(cfg: Config, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """All are tried, and each is counted; then it is the graph's `BuildError`."""
    loads = Loads(monkeypatch, 0)
    with pytest.raises(BuildError, match=r"threads, and its registers are enough for 0") as raised:
        realized(lambda x: x.exp(), replace(cfg, cache=cached), torch.empty(1 << 20))
    assert not isinstance(raised.value, ResourceError)
    assert loads.tried == sum(opforge.stats()["retries"].values()) == cuda.CONFIGURATIONS


@pytest.mark.usefixtures("device")
def test_folder_that_keeps_its_entries(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an entry cannot be removed, the next configuration is for this process only."""
    loads = Loads(monkeypatch, 32)
    cache = Cache.current(cfg)
    monkeypatch.setattr(cache, "drop", lambda _: False)
    call, _ = realized(lambda x: x.exp() - 1, cfg, torch.empty(1 << 20))
    assert any(f[0][2] == 32 for f in call.__globals__.values() if isinstance(f, tuple) and len(f) > 5)
    assert loads.tried > 1
