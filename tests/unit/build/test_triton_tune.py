"""`max_autotune`: the fastest of some configurations is taken and remembered; those that fail are dropped. A stand-in measures: needs no GPU."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.machines import H200

pytest.importorskip("triton")

from opforge.errors import BuildError
from opforge.runtime import config
from opforge.runtime.build import triton_pool
from opforge.runtime.build.triton_job import Binary, Job
from opforge.runtime.cold import make
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.lower.graph import lower
from opforge.runtime.observe import counters
from opforge.runtime.observe.watch import Watch
from opforge.runtime.realize import parameters
from opforge.runtime.render.triton_horizontal import FILL_NAME
from opforge.runtime.render.triton_unit import TritonKernel, render_triton
from opforge.runtime.targets import autotune, cuda
from opforge.runtime.targets.autotune import Task, Trial
from opforge.runtime.targets.block_trials import trials_of
from opforge.runtime.targets.cuda import Cuda
from tests.support.gpu_plan import planned

Blocks = tuple[int, int, int]


def blocks_of(one: TritonKernel | Job) -> Blocks:
    return one.xblock, one.rblock, one.warps


class Stopwatch:
    """A `Timer`, and its `Bench`: times by configuration, 100 µs where nothing is said. It says which trials it was asked for."""

    def __init__(self, us: dict[Blocks, float] | None = None, refused: tuple[Blocks, ...] = (), why: str = "") -> None:
        self.us, self.refused, self.why = us or {}, refused, why
        self.trials: list[Trial] = []
        self.ran: list[Blocks] = []

    def why_not(self) -> str:
        return self.why

    @contextmanager
    def bench(self, task: Task) -> Iterator[Stopwatch]:
        self.trials += task.trials
        yield self

    def load(self, trial: Trial, one: TritonKernel, binary: Binary) -> Callable[[], None]:
        if blocks_of(one) in self.refused:
            raise BuildError(f"a block of {one.warps} warps has too many registers")
        return lambda: self.ran.append(blocks_of(one))

    def time(self, run: Callable[[], None], calls: int) -> float:
        run()
        return self.us.get(self.ran[-1], 100.0)


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    counters.reset()
    return Config(cache_dir=str(tmp_path / "cache"), dump_dir=str(tmp_path / "dump"), max_autotune=True)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a GPU while kernels are compiled."""
    monkeypatch.setattr(cuda, "capability", lambda _: 90)
    monkeypatch.setattr(cuda, "gpu_of", lambda _: H200)
    properties = types.SimpleNamespace(shared_memory_per_block_optin=232448, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for the compiler, which refuses the blocks in `refused`; `batches` are the jobs of each time that it is asked."""
    said: dict[str, Any] = {"refused": (), "batches": []}

    def compile_kernels(jobs: list[Job], cfg: Config, on_done: Callable[[], None]) -> list[Binary | BuildError]:
        said["batches"].append(list(jobs))
        for _ in jobs:
            on_done()
        made: list[Binary | BuildError] = []
        for job in jobs:
            bad = blocks_of(job) in said["refused"]
            made.append(BuildError("too large") if bad else Binary(b"", {"name": job.name, "shared": 0, "warps": 1}))
        return made

    monkeypatch.setattr(triton_pool, "compile_kernels", compile_kernels)
    monkeypatch.setattr(autotune, "compile_kernels", compile_kernels)
    return said


def build(
    f: Callable[..., Any], cfg: Config, timer: Stopwatch, *inputs: Tensor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Files and metadata of a program's entry, as for a GPU."""
    lowered = lower(trace(torch.fx.symbolic_trace(f), inputs).graph)
    target = Cuda(cfg, 0, timer)
    made = make(lowered.program, parameters(lowered), target, cfg, Watch("off", ""), boxed=False, minimize_memory=False)
    return dict(made.files), dict(made.meta)


def taken(meta: dict[str, Any]) -> list[Blocks]:
    return [tuple(how[2:]) for _, how, *_ in meta["symbols"].values()]


def pointwise(x: Tensor) -> Tensor:
    return x.exp() + 1


TABLE = (512, 1, 2)  # of a kernel of float32 points


def test_fastest_is_taken_and_launched(cfg: Config, compiler: dict[str, Any]) -> None:
    timer = Stopwatch({(256, 1, 2): 60.0, (1024, 1, 4): 50.0, TABLE: 70.0})
    files, meta = build(pointwise, cfg, timer, torch.empty(10000))
    assert taken(meta) == [(1024, 1, 4)]
    (name,) = meta["symbols"]
    assert f"{name}({-(-10000 // 1024)}, arg" in files["wrapper.py"].decode()
    # All at once, then the one that is taken.
    tried = [blocks_of(job) for job in compiler["batches"][0]]
    assert tried[0] == TABLE
    assert set(tried) == {TABLE, (256, 1, 2), (1024, 1, 2), (512, 1, 1), (512, 1, 4), (256, 1, 1), (1024, 1, 4)}
    assert [list(map(blocks_of, batch)) for batch in compiler["batches"][1:]] == [[(1024, 1, 4)]]
    assert counters.snapshot()["tuned"] == {"measured": 1}
    assert timer.ran.count((1024, 1, 4)) == autotune.ROUNDS + 1
    assert timer.ran.count((512, 1, 1)) == 1  # far slower: not worth more


def test_table_stays_where_others_gain_nothing(cfg: Config, compiler: dict[str, Any]) -> None:
    _, meta = build(pointwise, cfg, Stopwatch({TABLE: 100.0, (1024, 1, 4): 98.0}), torch.empty(10000))
    assert taken(meta) == [TABLE]


def test_default_mode_never_measures(cfg: Config, compiler: dict[str, Any]) -> None:
    timer = Stopwatch({(1024, 1, 4): 1.0})
    plain = Config(cache_dir=cfg.cache_dir)
    _, meta = build(pointwise, plain, timer, torch.empty(10000))
    assert taken(meta) == [TABLE]
    assert len(compiler["batches"]) == 1
    assert timer.trials == []
    assert counters.snapshot()["tuned"] == {}
    assert config.key(plain) != config.key(cfg)  # a graph of the one is not the other's


def test_modes() -> None:
    assert config.from_options(mode="max-autotune").max_autotune
    assert config.from_options(mode="max-autotune-no-cudagraphs").max_autotune
    assert not config.from_options(mode="reduce-overhead").max_autotune
    assert not config.from_options({"max_autotune": False}, "max-autotune").max_autotune


def test_what_fails_is_dropped_and_counted(cfg: Config, compiler: dict[str, Any]) -> None:
    compiler["refused"] = ((1024, 1, 4),)
    timer = Stopwatch({(1024, 1, 4): 1.0, (1024, 1, 2): 2.0, (256, 1, 2): 3.0}, refused=((1024, 1, 2),))
    _, meta = build(pointwise, cfg, timer, torch.empty(10000))
    assert taken(meta) == [(256, 1, 2)]
    dropped = {"too large": 1, "a block of 2 warps has too many registers": 1}
    assert counters.snapshot()["dropped"] == dropped
    assert counters.snapshot()["retries"] == {}


def test_table_stays_where_nothing_runs(cfg: Config, compiler: dict[str, Any]) -> None:
    class Refusing(Stopwatch):
        def load(self, trial: Trial, one: TritonKernel, binary: Binary) -> Callable[[], None]:
            raise RuntimeError("CUDA error 701")

    _, meta = build(pointwise, cfg, Refusing(), torch.empty(10000))
    assert taken(meta) == [TABLE]
    assert counters.snapshot()["tuned"] == {"not measured: no configuration runs": 1}
    assert counters.snapshot()["dropped"] == {"CUDA error 701": 7}


def test_too_little_memory(cfg: Config, compiler: dict[str, Any]) -> None:
    class Small(Stopwatch):
        @contextmanager
        def bench(self, task: Task) -> Iterator[Stopwatch]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
            yield self

    _, meta = build(pointwise, cfg, Small(), torch.empty(10000))
    assert taken(meta) == [TABLE]
    assert counters.snapshot()["tuned"] == {"not measured: CUDA out of memory. Tried": 1}


def test_not_while_a_graph_is_recorded(cfg: Config, compiler: dict[str, Any]) -> None:
    timer = Stopwatch(why="a CUDA graph is being recorded")
    _, meta = build(pointwise, cfg, timer, torch.empty(10000))
    assert (taken(meta), timer.trials) == ([TABLE], [])
    assert counters.snapshot()["tuned"] == {"not measured: a CUDA graph is being recorded": 1}


def test_choice_is_remembered(cfg: Config, compiler: dict[str, Any]) -> None:
    """By the kernel, not by the graph: another one has it too, under another name. Another device has not."""
    build(pointwise, cfg, Stopwatch({(1024, 1, 4): 50.0}), torch.empty(10000))
    later = Stopwatch({(256, 1, 2): 1.0})
    _, meta = build(pointwise, cfg, later, torch.empty(10000))
    assert taken(meta) == [(1024, 1, 4)]
    _, meta = build(lambda y, z: (z.softmax(-1), y.exp() + 1), cfg, later, torch.empty(10000), torch.empty(10, 100))
    assert (1024, 1, 4) in taken(meta)
    assert len(later.trials) == 1  # the softmax
    assert counters.snapshot()["tuned"] == {"measured": 2, "stored": 2}
    torch.cuda.get_device_properties(0).name = "another GPU"
    _, meta = build(pointwise, cfg, later, torch.empty(10000))
    assert taken(meta) == [(256, 1, 2)]


def test_group_is_launched_as_it_was_measured(cfg: Config, compiler: dict[str, Any]) -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return x.exp(), y.exp(), z.exp()

    timer = Stopwatch({(256, 1, 1): 1.0})
    files, meta = build(f, cfg, timer, *(torch.empty(n) for n in (2000, 400, 1600)))
    ((name, (_, how, _, numbers, _)),) = meta["symbols"].items()
    assert how[2:] == [256, 1, 1]
    assert numbers == [125, 25, 100, 0, 8, 10]
    assert f"{name}(17, arg" in files["wrapper.py"].decode()
    (trial,) = timer.trials
    assert [trial.memory[p].elements for p in trial.pointers] == [2000, 2000, 400, 400, 1600, 1600]
    assert trial.numbers(trial.kernel) == [125, 25, 100, 0, 4, 5]
    assert trial.programs(trial.kernel) == 9


def ten(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
    return tuple(t.exp() for t in (a, b, c, d, e, f, g, h, i, j))


def test_table_is_launched_as_it_was_measured(cfg: Config, compiler: dict[str, Any]) -> None:
    """What fills it is not measured."""

    timer = Stopwatch({(512, 1, 2): 1.0})
    files, meta = build(ten, cfg, timer, *(torch.empty(1600 + 16 * n) for n in range(10)))
    (trial,) = timer.trials
    assert trial.group is not None
    assert trial.group.pointer_table
    ((name, (_, how, _, numbers, table)),) = ((k, v) for k, v in meta["symbols"].items() if k != FILL_NAME)
    assert (how, table) == ([["i64"], 1, 512, 1, 2], "table")
    assert numbers == [*(100 + n for n in range(10)), *(4 * n for n in range(10))]
    assert f"{name}(40, [arg" in files["wrapper.py"].decode()


def test_compiled_side_by_side(cfg: Config) -> None:
    """By Triton itself: a configuration that it does not take is dropped, the others are ready when one of them is taken."""
    timer = Stopwatch({(64, 16, 4): 1.0})
    files, meta = build(lambda x, y: x.t() + y, cfg, timer, torch.empty(96, 16), torch.empty(16, 96))
    (trial,) = timer.trials
    assert {one.rblock for one in trial.configurations} == {16}
    assert taken(meta) == [(64, 16, 4)]
    (name,) = meta["symbols"]
    assert files[f"{name}.cubin"][:4] == b"\x7fELF"
    assert counters.snapshot()["dropped"] == {}


def trials(f: Callable[..., Any], *inputs: Tensor) -> list[Trial | str]:
    plan = planned(f, list(inputs))
    return [trial for _, trial in trials_of(plan, render_triton(plan))]


def only(f: Callable[..., Any], *inputs: Tensor) -> Trial:
    (trial,) = trials(f, *inputs)
    assert isinstance(trial, Trial)
    return trial


def test_memory_is_that_of_the_program() -> None:
    """Elements up to the last one that strides reach; what is done in place has the memory of what it reads."""
    trial = only(lambda x: x + 1, torch.empty(10, 40)[:, ::4].as_strided((10, 10), (40, 4)))
    assert trial.memory[trial.pointers[0]].elements == 9 * 40 + 9 * 4 + 1
    x = torch.empty(10, 10, dtype=torch.float64)
    trial = only(lambda x: (x @ x).exp() @ x, x)
    assert len(trial.pointers) == 2
    assert trial.memory == {trial.pointers[0]: autotune.Memory("float64", 100)}


def test_positions_from_data_are_not_measured() -> None:
    rows, x = torch.zeros(7, dtype=torch.int64), torch.randn(9, 5)
    assert trials(lambda x, i: x[i] + 1, x, rows) == ["its positions come from data"]
    assert trials(lambda x, i, y: x.index_add(0, i, y) + 1, x, rows, torch.randn(7, 5))[0] != ""
    assert trials(lambda x: x.exp(), torch.empty(0, 4)) in ([], ["it computes nothing"])
