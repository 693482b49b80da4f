"""`max_autotune`: the candidates for a piece of work are compiled side by side and timed on the device. The times are kept in the on-disk cache by
the kernels, so that no process measures them again; whoever asks for them chooses.

Nothing here knows CUDA: a `Timer` loads and times; tests put a stand-in in its place.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...errors import BuildError, first_line
from ...generated.ops import OUT
from ..build.cache import Cache, key
from ..build.triton_job import Binary, Job
from ..build.triton_pool import compile_kernels, job_key
from ..config import Config
from ..kernels.operands import Layouts
from ..kernels.plan import ExternStep
from ..observe import counters
from ..observe.watch import Watch
from ..render.triton_unit import TritonKernel
from ..tile.horizontal import HorizontalGroup
from ..tile.launch import Launch

FIRST = 3  # calls that show which configurations are not worth more
ROUNDS = 5  # interleaved samples of each configuration
CALLS = 10  # of a kernel in a sample at most
SAMPLE = 2000.0  # µs that a sample takes, or one call
SLOWER = 1.3  # times the fastest: not worth more

Run = Callable[[], None]
Made = Sequence[Binary | BuildError]


@dataclass(frozen=True)
class Memory:
    """What is behind a pointer: a buffer of so many elements."""

    dtype: str
    elements: int


@dataclass(frozen=True)
class Trial:
    """A kernel that can be measured.

    configurations  it with each of the blocks that are tried, those of the table first.
    pointers  the names of the memory that it takes, in order, and `memory` what that is.
    shape     how it is launched; of a group its longest member.
    group     its members, if it stands for several.
    """

    configurations: tuple[TritonKernel, ...]
    pointers: tuple[str, ...]
    memory: Mapping[str, Memory]
    shape: Launch
    group: HorizontalGroup | None = None

    @property
    def kernel(self) -> TritonKernel:
        """As the table has it."""
        return self.configurations[0]

    def programs(self, one: TritonKernel) -> int:
        """How many programs a configuration is launched with."""
        if self.group is not None:
            return self.group.programs(one.xblock * one.rblock)
        assert isinstance(self.shape.outer, int)
        return -(-self.shape.outer // one.xblock)

    def numbers(self, one: TritonKernel) -> list[int]:
        """Its arguments after the addresses."""
        return [] if self.group is None else self.group.numbers(one.xblock * one.rblock)


@dataclass(frozen=True)
class Task:
    """A piece of work, and what may do it.

    trials      kernels that do it, over the same memory.
    instead_of  the steps that such a kernel would take the place of, kernels and calls of the library; () where the trials are compared with each
                other alone.
    layouts     of what calls of the library take.
    """

    trials: tuple[Trial, ...]
    instead_of: tuple[Trial | ExternStep, ...] = ()
    layouts: Layouts = field(default_factory=dict)

    @property
    def memory(self) -> Mapping[str, Memory]:
        """What is behind each buffer."""
        return self.trials[0].memory

    @property
    def candidates(self) -> list[tuple[Trial, TritonKernel]]:
        """All configurations of all trials: `Times` counts them in this order."""
        return [(trial, one) for trial in self.trials for one in trial.configurations]

    @property
    def replaced(self) -> list[tuple[Trial, TritonKernel]]:
        """The kernels that a candidate would take the place of."""
        return [(part, part.kernel) for part in self.instead_of if isinstance(part, Trial)]


@dataclass(frozen=True)
class Times:
    """Median times in µs: of the candidates that compile and run, by their number, and of what they would take the place of."""

    us: dict[int, float]
    instead_of: float | None = None

    def meta(self) -> dict[str, Any]:
        """As an entry of the cache has them."""
        return {"us": {str(k): us for k, us in self.us.items()}, "instead_of": self.instead_of}

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Times:
        return cls({int(k): us for k, us in meta["us"].items()}, meta["instead_of"])


class Bench(Protocol):
    """The device with the memory that a task works on."""

    def load(self, trial: Trial, one: TritonKernel, binary: Binary) -> Run:
        """What launches a configuration; it has run once. Raises `BuildError` or RuntimeError for what the device does not take."""
        ...

    def call(self, step: ExternStep, target: str, layouts: Layouts) -> Run:
        """What runs an eager kernel by the overload `target`, which writes its result into given memory; it has run once."""
        ...

    def time(self, run: Run, calls: int) -> float:
        """µs of one launch, of so many after each other."""
        ...


class Timer(Protocol):
    """A device that measures."""

    def why_not(self) -> str:
        """Why nothing can be measured now, or nothing."""
        ...

    def bench(self, task: Task) -> AbstractContextManager[Bench]:
        """Raises RuntimeError where the memory is too small."""
        ...


@dataclass
class Autotuner:
    """Measures tasks.

    job_of  what compiles a configuration.
    device  whose times these are.
    """

    job_of: Callable[[TritonKernel], Job]
    cfg: Config
    device: str
    timer: Timer
    watch: Watch

    def times(self, tasks: Sequence[Task], report: str) -> list[Times | None]:
        """The times of each task: out of the cache, or measured and put there. None for one that cannot be measured, which is counted, as is a
        configuration that does not compile, or that the device does not take. `report`: the file for the times in a folder of the dump.

        Raises `BuildError` where no folder takes what was compiled.
        """
        keys = [self._key(task) for task in tasks]
        known = dict(zip(keys, tasks, strict=True))  # equal ones are one
        store = Cache.current(self.cfg)
        found = {k: times for k in known if (times := _stored(store, k)) is not None}
        for _ in found:
            counters.count_tuned("stored")
        left = [k for k in known if k not in found]
        if left and (reason := self.timer.why_not()):
            for _ in left:
                counters.count_tuned(f"not measured: {reason}")
        elif left:
            found |= self._measured(store, {k: known[k] for k in left}, report)
        return [found.get(k) for k in keys]

    def _measured(self, store: Cache, tasks: Mapping[str, Task], report: str) -> dict[str, Times]:
        """What is measured of tasks, by their keys."""
        with self.watch.stage("candidates"):
            made = self._compiled(list(tasks.values()))
        found: dict[str, Times] = {}
        lines: list[str] = []
        with self.watch.stage("tune"):
            for n, ((k, task), binaries) in enumerate(zip(tasks.items(), made, strict=True)):
                self.watch.progress.kernels(n, len(tasks))
                with store.lock(k):
                    # Another process may have measured it meanwhile.
                    times = _stored(store, k)
                    if times is not None:
                        counters.count_tuned("stored")
                    elif (times := _times(task, *binaries, self.timer)) is not None:
                        store.put(k, {"kernel.py": task.trials[0].kernel.source.encode()}, times.meta())
                        lines.append(_line(task, times))
                if times is not None:
                    found[k] = times
        self.watch.text(report, lambda: "\n".join(lines))
        return found

    def _compiled(self, tasks: Sequence[Task]) -> list[tuple[Made, Made]]:
        """The binaries of each task's candidates, and of the kernels that they would take the place of; all are made side by side."""
        flat = [self.job_of(one) for task in tasks for _, one in (*task.candidates, *task.replaced)]
        count = 0

        def one_more() -> None:
            nonlocal count
            count += 1
            self.watch.progress.kernels(count, len(flat))

        binaries = iter(compile_kernels(flat, self.cfg, one_more))
        return [([next(binaries) for _ in t.candidates], [next(binaries) for _ in t.replaced]) for t in tasks]

    def _key(self, task: Task) -> str:
        """Of all that times depend on: the configurations (which hold the source), the memory, the number of programs, the device."""
        places = {name: k for k, name in enumerate(task.memory)}
        kernels = [*task.candidates, *task.replaced]
        calls = [
            (step.call.target, [_shape(a, places, task.layouts) for a in step.args])
            for step in task.instead_of
            if isinstance(step, ExternStep)
        ]
        return key(
            {
                "kind": "times",
                "jobs": " ".join(job_key(self.job_of(one)) for _, one in kernels),
                "pointers": repr([[places[p] for p in trial.pointers] for trial, _ in kernels]),
                "memory": repr(list(task.memory.values())),
                "programs": repr([trial.programs(one) for trial, one in task.candidates]),
                "calls": repr(calls),
                "device": self.device,
                "torch": torch.__version__ if calls else "",
            }
        )


def _shape(argument: Any, places: Mapping[str, int], layouts: Layouts) -> object:
    """What the library is given: which buffer it is, its dtype, sizes and strides; a number as it is."""
    buffer = getattr(argument, "buffer", None)
    if buffer is None:
        return repr(argument)
    view = getattr(argument, "shape", ()), getattr(argument, "stride", ())
    return places[buffer], *view, layouts[buffer].dtype


def _stored(store: Cache, digest: str) -> Times | None:
    entry = store.get(digest)
    return None if entry is None else Times.of(entry.meta)


def _line(task: Task, times: Times) -> str:
    """What the report says of a task."""
    before = "" if times.instead_of is None else f"{times.instead_of} instead of "
    each = [(task.candidates[k][1], us) for k, us in times.us.items()]
    said = ", ".join(f"{one.xblock}x{one.rblock}x{one.warps}: {us}" for one, us in each)
    return f"{task.trials[0].kernel.name}: {before}{said}"


def _times(task: Task, candidates: Made, replaced: Made, timer: Timer) -> Times | None:
    """None, which is counted, where nothing can be measured."""
    try:
        with timer.bench(task) as bench:
            before = [_in_turn(task, replaced, bench)] if task.instead_of else []
            runs = _loaded(task.candidates, candidates, bench)
            us = [round(t, 3) for t in median_times([*before, *(run for _, run in runs)], bench)]
    except (BuildError, RuntimeError) as error:
        counters.count_tuned(f"not measured: {first_line(error)}")
        return None
    if not runs:
        counters.count_tuned("not measured: no configuration runs")
        return None
    counters.count_tuned("measured")
    first = us.pop(0) if before else None
    return Times({k: t for (k, _), t in zip(runs, us, strict=True)}, first)


def _in_turn(task: Task, binaries: Made, bench: Bench) -> Run:
    """What runs the steps that a candidate would take the place of, one after another."""
    left = iter(binaries)
    runs: list[Run] = []
    for part in task.instead_of:
        if isinstance(part, ExternStep):
            runs.append(bench.call(part, OUT[part.call.target], task.layouts))
            continue
        binary = next(left)
        if isinstance(binary, BuildError):
            raise binary
        runs.append(bench.load(part, part.kernel, binary))

    def run() -> None:
        for one in runs:
            one()

    return run


def _loaded(candidates: Sequence[tuple[Trial, TritonKernel]], binaries: Made, bench: Bench) -> list[tuple[int, Run]]:
    """What runs each candidate that compiles and that the device takes, with its number. The others are counted."""
    runs: list[tuple[int, Run]] = []
    for k, ((trial, one), binary) in enumerate(zip(candidates, binaries, strict=True)):
        try:
            if isinstance(binary, BuildError):
                raise binary
            runs.append((k, bench.load(trial, one, binary)))
        except (BuildError, RuntimeError) as error:
            counters.count_dropped(first_line(error))
    return runs


def measured(trial: Trial, binaries: Made, bench: Bench, rounds: int = ROUNDS) -> list[tuple[TritonKernel, float]]:
    """The median time in µs of each configuration that compiles and runs, in their order; samples are interleaved."""
    runs = _loaded(Task((trial,)).candidates, binaries, bench)
    times = median_times([run for _, run in runs], bench, rounds) if runs else []
    return [(trial.configurations[k], us) for (k, _), us in zip(runs, times, strict=True)]


def median_times(runs: Sequence[Run], bench: Bench, rounds: int = ROUNDS) -> list[float]:
    """The median time in µs of each of some launches; samples are interleaved. The first is always measured well, of the others those that are
    not far slower than the fastest.
    """
    first = [bench.time(run, FIRST) for run in runs]
    kept = [k for k, us in enumerate(first) if k == 0 or us <= SLOWER * min(first)]
    samples: dict[int, list[float]] = {k: [] for k in kept}
    for _ in range(rounds):
        for k in kept:
            samples[k].append(bench.time(runs[k], max(1, min(CALLS, int(SAMPLE / max(first[k], 1))))))
    return [statistics.median(samples[k]) if k in samples else us for k, us in enumerate(first)]


__all__ = ["Autotuner", "Bench", "Memory", "Task", "Timer", "Times", "Trial", "measured", "median_times"]
