"""`max_autotune`: each kernel of a unit with the blocks of the table and some next to them, compiled side by side, timed on the device, and the
fastest kept. What was chosen is kept in the on-disk cache by the kernel, so that no process measures it again.

Nothing here knows CUDA: a `Timer` loads and times; tests put a stand-in in its place.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from ...errors import BuildError, first_line
from ..build.cache import Cache, key
from ..build.triton_job import Binary, Job
from ..build.triton_pool import compile_kernels, job_key
from ..config import Config
from ..ir.index import Expr, Val
from ..ir.nodes import ITEMSIZE, Buffer
from ..kernels.plan import ExternStep, Kernel, Plan, Reduce
from ..kernels.steps import home, nbytes
from ..observe import counters
from ..observe.watch import Watch
from ..render.triton_unit import TritonKernel, TritonUnit
from ..tile.blocks import UNKNOWN, neighbours
from ..tile.horizontal import Group
from ..tile.launch import Launch, launch
from ..tile.scratch import roots

FIRST = 3  # calls that show which configurations are not worth more
ROUNDS = 5  # interleaved samples of each configuration
CALLS = 10  # of a kernel in a sample at most
SAMPLE = 2000.0  # µs that a sample takes, or one call
SLOWER = 1.3  # times the fastest: not worth more
BETTER = 0.97  # of the time that the table's blocks take: less is no difference
_BRANCHED = "tl.static_assert("  # a kernel whose blocks must not lie across its branches


@dataclass(frozen=True)
class Memory:
    """What is behind a pointer: a buffer of so many elements."""

    dtype: str
    elements: int


@dataclass(frozen=True)
class Work:
    """A kernel that can be measured.

    tried    the configurations, that of the table first.
    pointers the names of the memory that it takes, in order, and `memory` what that is.
    shape    how it is launched; of a group its longest member.
    group    its members, if it stands for several.
    """

    tried: tuple[TritonKernel, ...]
    pointers: tuple[str, ...]
    memory: Mapping[str, Memory]
    shape: Launch
    group: Group | None = None

    @property
    def kernel(self) -> TritonKernel:
        """As the table has it."""
        return self.tried[0]

    def programs(self, one: TritonKernel) -> int:
        """How many programs a configuration is launched with."""
        if self.group is not None:
            return self.group.programs(one.xblock * one.rblock)
        assert isinstance(self.shape.outer, int)
        return -(-self.shape.outer // one.xblock)

    def numbers(self, one: TritonKernel) -> list[int]:
        """Its arguments after the addresses."""
        return [] if self.group is None else self.group.numbers(one.xblock * one.rblock)


class Bench(Protocol):
    """The device with the memory that one kernel works on."""

    def load(self, one: TritonKernel, binary: Binary) -> Callable[[], None]:
        """What launches a configuration; it has run once. Raises `BuildError` or RuntimeError for what the device does not take."""
        ...

    def time(self, run: Callable[[], None], calls: int) -> float:
        """µs of one launch, of so many after each other."""
        ...

    def of(self, work: Work) -> Bench:
        """Another kernel's, over the same memory."""
        ...

    def call(self, step: ExternStep, target: str, layouts: Mapping[str, Buffer]) -> Callable[[], None]:
        """What runs an eager kernel by the overload `target`, which writes its result into given memory; it has run once."""
        ...


class Timer(Protocol):
    """A device that measures."""

    def why_not(self) -> str:
        """Why nothing can be measured now, or nothing."""
        ...

    def bench(self, work: Work) -> AbstractContextManager[Bench]:
        """Raises RuntimeError where the memory is too small."""
        ...


def works_of(
    plan: Plan, unit: TritonUnit, *, wide: bool = False, positions: bool = False
) -> Iterator[tuple[str, Work | str]]:
    """Each kernel of a unit by its name, ready to be measured, or why it is not.

    wide       with many configurations, for measuring a table.
    positions  also where they come from data, which whoever measures has then.
    """
    kernels = {k.name: k for k in plan.kernels()}
    groups = {group.name: group for group in unit.grouped.values()}
    done: set[str] = set()
    for name in unit.programs:
        if (symbol := unit.symbols[name]) not in done:
            done.add(symbol)
            if name in unit.chained:
                yield symbol, "its last program runs other kernels"
                continue
            if name in unit.teams:
                yield symbol, "its programs wait for each other"
                continue
            group = groups.get(name)
            if group is None and name not in kernels:
                yield symbol, "a routine has blocks of its own"
                continue
            members = [kernels[m] for m in (group.kernels if group else (name,))]
            if any(k.tile is not None for k in members):
                continue  # its blocks were measured when it was chosen
            yield symbol, _why_not(members, plan, positions) or _work(unit.kernels[symbol], members, group, plan, wide)


def _why_not(members: Sequence[Kernel], plan: Plan, positions: bool) -> str:
    names = [n for k in members for n in (*k.reads, *k.writes)]
    if any(k.symbols for k in members) or any(
        nbytes(plan.layouts[n]) is None or isinstance(plan.layouts[n].offset, Expr) for n in names
    ):
        return "its sizes are symbols"
    if not positions and any(map(_takes_positions, members)):
        return "its positions come from data"  # random ones would be out of range, or all the same
    return "it computes nothing" if launch(members[0], plan.layouts).outer == 0 else ""


def _takes_positions(kernel: Kernel) -> bool:
    statements = [st for phase in kernel.phases for st in phase.body]
    indices = [st.index for st in statements if not isinstance(st, Reduce)]
    indices += [ld.attr.index for st in statements for root in roots(st) for ld in root.loads()]
    return any(isinstance(a, Val) for index in indices for e in index for a in e.atoms())


def _work(one: TritonKernel, members: Sequence[Kernel], group: Group | None, plan: Plan, wide: bool) -> Work:
    shape = launch(members[0], plan.layouts)
    start = one.xblock, one.rblock, one.warps
    limit = one.xblock if _BRANCHED in one.source else UNKNOWN
    if group is None:
        found = neighbours(start, shape, limit, wide=wide)
    else:
        # RBLOCK counts blocks that a program does one after another: no part of a tile.
        shape = replace(shape, outer=max(group.points))
        alone = neighbours((one.xblock, 1, one.warps), shape, limit, wide=wide)
        found = [(x, one.rblock, w) for x, _, w in alone]
        found += [(one.xblock, r, one.warps) for r in (one.rblock // 2, 2 * one.rblock) if r > 1 and one.rblock > 1]
    tried = tuple(replace(one, xblock=x, rblock=r, warps=w) for x, r, w in found)
    memory: dict[str, Memory] = {}
    names = [n for k in members for n in (*k.reads, *k.writes)]
    for name in names:
        layout, where = plan.layouts[name], home(plan, name)
        size = nbytes(layout)
        assert size is not None
        assert isinstance(layout.offset, int)
        dtype = plan.layouts[where].dtype
        elements = -(-(size + layout.offset * ITEMSIZE[layout.dtype]) // ITEMSIZE[dtype])
        elements = max(elements, memory[where].elements if where in memory else 1)
        memory[where] = Memory(dtype, elements)
    return Work(tried, tuple(home(plan, n) for n in names), memory, shape, group)


def tuned(
    works: Mapping[str, Work],
    job_of: Callable[[TritonKernel], Job],
    cfg: Config,
    device: str,
    timer: Timer,
    watch: Watch,
) -> dict[str, TritonKernel]:
    """The fastest configuration of each kernel by its name: out of the cache, or measured and put there. One that cannot be measured is left out;
    a configuration that does not compile, or that the device does not take, is counted.

    job_of  what compiles a configuration.
    device  whose times these are.
    Raises `BuildError` where no folder takes what was compiled.
    """
    store = Cache.current(cfg)
    jobs = {name: [job_of(one) for one in work.tried] for name, work in works.items()}
    keys = {name: _key(work, jobs[name], device) for name, work in works.items()}
    chosen = {name: one for name in works if (one := _stored(store, keys[name], works[name])) is not None}
    for _ in chosen:
        counters.count_tuned("stored")
    left = [name for name in works if name not in chosen]
    if not left:
        return chosen
    if reason := timer.why_not():
        for _ in left:
            counters.count_tuned(f"not measured: {reason}")
        return chosen
    with watch.stage("candidates"):
        made = _compiled([jobs[name] for name in left], cfg, watch)
    report: list[str] = []
    with watch.stage("tune"):
        for k, (name, binaries) in enumerate(zip(left, made, strict=True)):
            watch.progress.kernels(k, len(left))
            with store.lock(keys[name]):
                # Another process may have measured it meanwhile.
                one = _stored(store, keys[name], works[name])
                if one is None:
                    one = _measured(store, keys[name], works[name], binaries, timer, report)
                else:
                    counters.count_tuned("stored")
            if one is not None:
                chosen[name] = one
    watch.text("tuning.txt", lambda: "\n".join(report))
    return chosen


def _compiled(jobs: Sequence[Sequence[Job]], cfg: Config, watch: Watch) -> list[list[Binary | BuildError]]:
    """The binaries of each kernel's configurations, all of them made side by side."""
    flat = [job for some in jobs for job in some]
    count = 0

    def one_more() -> None:
        nonlocal count
        count += 1
        watch.progress.kernels(count, len(flat))

    binaries = iter(compile_kernels(flat, cfg, one_more))
    return [[next(binaries) for _ in some] for some in jobs]


def _key(work: Work, jobs: Sequence[Job], device: str) -> str:
    """Of all that a choice depends on: the configurations (which hold the source), the memory, the number of programs, the device."""
    places = list(dict.fromkeys(work.pointers))
    memory = [(places.index(p), work.memory[p]) for p in work.pointers]
    return key(
        {
            "kind": "tuned",
            "jobs": " ".join(map(job_key, jobs)),
            "memory": repr(memory),
            "programs": repr([work.programs(one) for one in work.tried]),
            "device": device,
        }
    )


def _stored(store: Cache, digest: str, work: Work) -> TritonKernel | None:
    entry = store.get(digest)
    if entry is None:
        return None
    blocks = entry.meta.get("blocks")
    return next((one for one in work.tried if _blocks(one) == blocks), None)


def _blocks(one: TritonKernel) -> list[int]:
    return [one.xblock, one.rblock, one.warps]


def _measured(
    store: Cache,
    digest: str,
    work: Work,
    binaries: Sequence[Binary | BuildError],
    timer: Timer,
    report: list[str],
) -> TritonKernel | None:
    """The fastest configuration, which is stored, or None. `report` gets a line with all times."""
    try:
        with timer.bench(work) as bench:
            found = measured(work, binaries, bench)
    except RuntimeError as error:
        counters.count_tuned(f"not measured: {first_line(error)}")
        return None
    if not found:
        counters.count_tuned("not measured: no configuration runs")
        return None
    one, least = min(found, key=lambda f: f[1])
    if found[0][0] is work.kernel and least > BETTER * found[0][1]:
        one = work.kernel
    times = {"x".join(map(str, _blocks(c))): round(us, 2) for c, us in found}
    store.put(digest, {"kernel.py": one.source.encode()}, {"blocks": _blocks(one), "us": times})
    counters.count_tuned("measured")
    report.append(f"{one.name}: {'x'.join(map(str, _blocks(one)))} of {times}")
    return one


def measured(
    work: Work, binaries: Sequence[Binary | BuildError], bench: Bench, rounds: int = ROUNDS
) -> list[tuple[TritonKernel, float]]:
    """The median time in µs of each configuration that compiles and runs, in their order; samples are interleaved. The others are counted."""
    runs: list[tuple[TritonKernel, Callable[[], None]]] = []
    for one, binary in zip(work.tried, binaries, strict=True):
        try:
            if isinstance(binary, BuildError):
                raise binary
            runs.append((one, bench.load(one, binary)))
        except (BuildError, RuntimeError) as error:
            counters.count_dropped(first_line(error))
    times = median_times([run for _, run in runs], bench, rounds)
    return [(one, us) for (one, _), us in zip(runs, times, strict=True)]


def median_times(runs: Sequence[Callable[[], None]], bench: Bench, rounds: int = ROUNDS) -> list[float]:
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


__all__ = ["Bench", "Memory", "Timer", "Work", "measured", "median_times", "tuned", "works_of"]
