"""`max_autotune` and products: a kernel with what is beside a product is raced against the library, and the answer remembered. A stand-in
measures: needs no GPU.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.machines import H200

pytest.importorskip("triton")

from opforge.errors import BuildError
from opforge.generated.tuning import TUNING
from opforge.runtime.build import triton_pool
from opforge.runtime.build.triton_job import Binary, Job
from opforge.runtime.cold import make
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.nodes import Buffer
from opforge.runtime.kernels.plan import ExternStep
from opforge.runtime.lower.graph import lower
from opforge.runtime.observe import counters
from opforge.runtime.observe.watch import Watch
from opforge.runtime.realize import parameters
from opforge.runtime.render.triton_unit import TritonKernel
from opforge.runtime.targets import autotune, cuda
from opforge.runtime.targets.autotune import Task, Trial
from opforge.runtime.targets.cuda import Cuda

Blocks = tuple[int, int, int]
MARGIN = 1 - TUNING[90].margin / 100
LIBRARY = "aten.addmm.out"


def blocks_of(one: TritonKernel | Job) -> Blocks:
    return one.xblock, one.rblock, one.warps


class Stopwatch:
    """A `Timer`, and its `Bench`: times of products by blocks and of calls by their overloads; 10 µs of any other kernel."""

    def __init__(self, us: dict[Any, float] | None = None, refused: tuple[Blocks, ...] = (), why: str = "") -> None:
        self.us, self.refused, self.why = us or {}, refused, why
        self.products = 0
        self.spent = 0.0

    def why_not(self) -> str:
        return self.why

    @contextmanager
    def bench(self, task: Task) -> Iterator[Stopwatch]:
        self.products += bool(task.instead_of)
        yield self

    def load(self, trial: Trial, one: TritonKernel, binary: Binary) -> Callable[[], None]:
        if blocks_of(one) in self.refused:
            raise BuildError("too many registers")
        return self._spend(self.us.get(blocks_of(one), 100.0) if "product" in one.name else 10.0)

    def call(self, step: ExternStep, target: str, layouts: Mapping[str, Buffer]) -> Callable[[], None]:
        return self._spend(self.us[target])

    def _spend(self, us: float) -> Callable[[], None]:
        def run() -> None:
            self.spent += us

        return run

    def time(self, run: Callable[[], None], calls: int) -> float:
        before = self.spent
        run()
        return self.spent - before


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    counters.reset()
    return Config(cache_dir=str(tmp_path / "cache"), max_autotune=True)


@pytest.fixture(autouse=True)
def refused(monkeypatch: pytest.MonkeyPatch) -> set[Blocks]:
    """A GPU, and a compiler that refuses these blocks."""
    monkeypatch.setattr(cuda, "capability", lambda _: 90)
    monkeypatch.setattr(cuda, "gpu_of", lambda _: H200)
    properties = types.SimpleNamespace(shared_memory_per_block_optin=232448, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    bad: set[Blocks] = set()

    def compile_kernels(
        jobs: list[Job], cfg: Config, on_done: Callable[[], None] = lambda: None
    ) -> list[Binary | BuildError]:
        good = Binary(b"", {"name": "", "shared": 0, "warps": 1})
        return [BuildError("does not compile") if blocks_of(job) in bad else good for job in jobs]

    for module in (triton_pool, autotune):
        monkeypatch.setattr(module, "compile_kernels", compile_kernels)
    return bad


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def inputs() -> list[Tensor]:
    return [torch.randn(256, 128).bfloat16(), torch.randn(384, 128).bfloat16(), torch.randn(384).bfloat16()]


def build(cfg: Config, timer: Stopwatch, f: Callable[..., Any] = gelu) -> dict[str, Any]:
    """Metadata of a program's entry, as for a GPU."""
    lowered = lower(trace(torch.fx.symbolic_trace(f), inputs()).graph)
    made = make(
        lowered.program,
        parameters(lowered),
        Cuda(cfg, 0, timer),
        cfg,
        Watch("off", ""),
        boxed=False,
        minimize_memory=False,
    )
    return dict(made.meta)


def taken(meta: dict[str, Any]) -> list[Blocks]:
    return [tuple(how[2:]) for _, how, *_ in meta["symbols"].values()]


FAST = (64, 64, 4)  # columns, steps, warps


def test_fastest_takes_the_place_of_the_library(cfg: Config) -> None:
    meta = build(cfg, Stopwatch({LIBRARY: 50.0, FAST: 55.0}))
    assert meta["externs"] == {}
    assert taken(meta) == [FAST]
    assert counters.snapshot()["tuned"] == {"measured": 1}


def test_library_stays_where_it_is_as_fast(cfg: Config) -> None:
    meta = build(cfg, Stopwatch({LIBRARY: 50.0, FAST: 60.0 * MARGIN + 0.1}))  # the kernel after it takes 10
    assert meta["externs"] == {"aten.addmm.default": 1}
    assert len(meta["symbols"]) == 1


def test_a_gain_by_the_table_s_margin_is_one(cfg: Config) -> None:
    meta = build(cfg, Stopwatch({LIBRARY: 50.0, FAST: 60.0 * MARGIN - 0.1}))
    assert meta["externs"] == {}


@pytest.mark.parametrize("library", [50.0, 30.0])
def test_an_answer_is_remembered(cfg: Config, library: float) -> None:
    times: dict[Any, float] = {LIBRARY: library, FAST: 55.0}
    first = build(cfg, Stopwatch(times))
    again = Stopwatch({LIBRARY: 1.0})
    assert build(cfg, again)["externs"] == first["externs"]
    assert again.products == 0
    with_more = build(cfg, again, lambda x, w, b: (gelu(x, w, b), x.sin()))  # another graph
    assert with_more["externs"] == first["externs"]
    assert again.products == 0


def test_what_fails_is_dropped_and_counted(cfg: Config, refused: set[Blocks]) -> None:
    refused.add((256, 64, 8))
    times: dict[Any, float] = {LIBRARY: 50.0, FAST: 1.0, (128, 64, 4): 40.0, (256, 64, 8): 1.0}
    meta = build(cfg, Stopwatch(times, refused=(FAST,)))
    assert taken(meta) == [(128, 64, 4)]
    dropped = counters.snapshot()["dropped"]
    assert set(dropped) == {"does not compile", "too many registers"}


def test_library_where_nothing_runs(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Stopwatch):
        def load(self, trial: Trial, one: TritonKernel, binary: Binary) -> Callable[[], None]:
            if "product" in one.name:
                raise RuntimeError("CUDA error 701")
            return super().load(trial, one, binary)

    meta = build(cfg, Refusing({LIBRARY: 50.0}))
    assert meta["externs"] == {"aten.addmm.default": 1}
    assert set(counters.snapshot()["dropped"]) == {"CUDA error 701"}


def test_too_little_memory(cfg: Config) -> None:
    class Small(Stopwatch):
        @contextmanager
        def bench(self, task: Task) -> Iterator[Stopwatch]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
            yield self

    meta = build(cfg, Small())
    assert meta["externs"] == {"aten.addmm.default": 1}
    assert counters.snapshot()["tuned"] == {"not measured: CUDA out of memory. Tried": 2}


def test_not_while_a_graph_is_recorded(cfg: Config) -> None:
    timer = Stopwatch(why="a CUDA graph is being recorded")
    assert build(cfg, timer)["externs"] == {"aten.addmm.default": 1}
    assert timer.products == 0


def test_default_mode_never_measures(cfg: Config) -> None:
    timer = Stopwatch({LIBRARY: 50.0, FAST: 1.0})
    meta = build(Config(cache_dir=cfg.cache_dir), timer, lambda x, w, b: F.gelu(F.linear(x[:, 1:], w[:, 1:], b)))
    assert meta["externs"] == {"aten.addmm.default": 1}
    assert timer.products == 0


def test_the_kernel_that_gains_most_is_taken(cfg: Config) -> None:
    """Of the whole and its parts: of weights made of smaller elements, the product, and what is made of it."""

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w * 2, b))

    meta = build(cfg, Stopwatch({LIBRARY: 50.0, FAST: 55.0}), f)
    assert meta["externs"] == {}
    assert len(meta["symbols"]) == 1
    assert counters.snapshot()["tuned"] == {"measured": 3}
