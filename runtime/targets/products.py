"""Which products of matrices gain by a kernel that also computes what is beside them: with `max_autotune` each such kernel, with several blocks, is
timed against the library's product and the kernels around it, and what was fastest is kept in the on-disk cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import BuildError, first_line
from ...generated.ops import OUT
from ...generated.tuning import Block, FusedProduct
from ..build.cache import Cache, key
from ..build.triton_job import Binary, Job
from ..build.triton_pool import compile_kernels, job_key
from ..config import Config
from ..ir.nodes import ITEMSIZE
from ..kernels.operands import Layouts, count
from ..kernels.plan import ExternStep, Kernel, KernelStep, Place, Plan, Step, Tile
from ..kernels.steps import nbytes, step_reads, step_writes
from ..machine import tuning_of
from ..observe import counters
from ..observe.watch import Watch
from ..render.triton_unit import TritonKernel, render_triton
from ..tile.fused import described_operands, fused_kernel
from ..tile.launch import launch
from .tune import Bench, Memory, Timer, Work, median_times

MOST = 2  # times the points of a loop that a block may have


@dataclass(frozen=True)
class Race:
    """A kernel with each of its tiles, and the steps that it would take the place of.

    kernels  the tiles' kernels, each with its work.
    parts    the steps: a kernel's work, or a call of the library.
    memory   what is behind each buffer.
    """

    tiles: tuple[Tile, ...]
    kernels: tuple[Work, ...]
    parts: tuple[Work | ExternStep, ...]
    memory: dict[str, Memory]
    layouts: Layouts


def tile_of(block: Block | FusedProduct, descriptors: bool = False) -> Tile:
    """A block of a table, as a plan has it."""
    return Tile(block.rows, block.columns, block.steps, block.warps, block.stages, descriptors=descriptors)


def tiles_of(kernel: Kernel, layouts: Layouts, capability: int) -> list[Tile]:
    """Those of the table of a GPU (by compute capability, times ten) that are not far larger than the product."""
    found, _ = fused_kernel(replace(kernel, tile=Tile(16, 16, 16, 1, 1)), layouts)
    described = any(described_operands(found, layouts, kernel.gpu))
    sizes = [count((v,)) for v in (found.row, found.column, found.depth)]

    def fits(block: Block) -> bool:
        return all(b <= MOST * n for b, n in zip((block.rows, block.columns, block.steps), sizes, strict=True))

    return [
        tile_of(b, b.descriptors) for b in tuning_of(capability).tiles if fits(b) and (described or not b.descriptors)
    ]


def race_of(kernel: Kernel, layouts: Layouts, capability: int) -> Race | None:
    """What is to be timed; None where no tile fits, or a size is a symbol."""
    tiles = tiles_of(kernel, layouts, capability)
    steps: list[Step] = [*kernel.parts]
    names = dict.fromkeys(n for s in steps for n in (*step_reads(s), *step_writes(s)))
    memory: dict[str, Memory] = {}
    for name in names:
        b = layouts[name]
        size = nbytes(b)
        if size is None or not isinstance(b.offset, int):
            return None
        memory[name] = Memory(b.dtype, size // ITEMSIZE[b.dtype] + b.offset)
    works = tuple(_work(replace(kernel, tile=tile), layouts, memory, capability) for tile in tiles)
    parts = tuple(
        part if isinstance(part, ExternStep) else _work(part.kernel, layouts, memory, capability)
        for part in kernel.parts
    )
    return Race(tuple(tiles), works, parts, memory, layouts) if tiles else None


def _work(kernel: Kernel, layouts: Layouts, memory: dict[str, Memory], capability: int) -> Work:
    places = {n: Place("own") for n in (*kernel.reads, *kernel.writes)}
    unit = render_triton(Plan((), [KernelStep(kernel)], (), dict(layouts), places), capability=capability)
    (one,) = unit.kernels.values()
    return Work((one,), (*kernel.reads, *kernel.writes), memory, launch(kernel, layouts))


@dataclass
class Races:
    """`Choose` by measurement.

    job_of  what compiles a kernel; `device` whose times these are; `capability` of it, times ten.
    """

    job_of: Callable[[TritonKernel], Job]
    cfg: Config
    device: str
    capability: int
    timer: Timer
    watch: Watch

    def __call__(self, kernels: Sequence[Kernel], layouts: Layouts) -> list[tuple[float, Tile] | None]:
        """What each kernel gains in µs, and with which tile; None where its parts are as fast."""
        races = [race_of(k, layouts, self.capability) for k in kernels]
        keys = [None if r is None else self._key(r) for r in races]
        work = {k: r for k, r in zip(keys, races, strict=True) if k is not None and r is not None}
        store = Cache.current(self.cfg)
        chosen: dict[str, Mapping[str, Any]] = {k: entry.meta for k in work if (entry := store.get(k)) is not None}
        left = [k for k in work if k not in chosen]
        for _ in chosen:
            counters.count_tuned("stored")
        if left and (reason := self.timer.why_not()):
            for _ in left:
                counters.count_tuned(f"not measured: {reason}")
            left = []
        report: list[str] = []
        for k, binaries in zip(left, self._compiled([work[k] for k in left]), strict=True):
            with store.lock(k):
                entry = store.get(k)  # another process may have measured it meanwhile
                found: Mapping[str, Any] | None = entry.meta if entry is not None else None
                if entry is None:
                    found = self._measured(work[k], binaries, report)
                if found is not None and entry is None:
                    store.put(k, {"kernel.py": work[k].kernels[0].kernel.source.encode()}, found)
            if found is not None:
                chosen[k] = found
        if report:
            self.watch.text("products.txt", lambda: "\n".join(report))
        margin = tuning_of(self.capability).margin
        return [
            None if k is None or r is None else _choice(chosen.get(k), r, margin)
            for k, r in zip(keys, races, strict=True)
        ]

    def _compiled(self, races: Sequence[Race]) -> list[tuple[list[Binary | BuildError], list[Binary | BuildError]]]:
        """The binaries of each race's tiles, and of the kernels among its parts."""
        jobs = [[self.job_of(w.kernel) for w in (*r.kernels, *_kernels(r))] for r in races]
        flat = [job for some in jobs for job in some]
        with self.watch.stage("candidates"):
            made = iter(compile_kernels(flat, self.cfg) if flat else [])
        found = []
        for race in races:
            found.append(([next(made) for _ in race.kernels], [next(made) for _ in _kernels(race)]))
        return found

    def _measured(
        self,
        race: Race,
        binaries: tuple[Sequence[Binary | BuildError], Sequence[Binary | BuildError]],
        report: list[str],
    ) -> dict[str, Any] | None:
        """The times: of the parts, and of each tile that compiles and runs; None where the parts cannot be timed."""
        try:
            with self.watch.stage("tune"), self.timer.bench(race.kernels[0]) as bench:
                parts = _parts(race, binaries[1], bench)
                tried: list[tuple[int, Callable[[], None]]] = []
                for k, (work, binary) in enumerate(zip(race.kernels, binaries[0], strict=True)):
                    try:
                        if isinstance(binary, BuildError):
                            raise binary
                        tried.append((k, bench.of(work).load(work.kernel, binary)))
                    except (BuildError, RuntimeError) as error:
                        counters.count_dropped(first_line(error))
                whole, *times = median_times([parts, *(run for _, run in tried)], bench)
        except (BuildError, RuntimeError) as error:
            counters.count_tuned(f"not measured: {first_line(error)}")
            return None
        counters.count_tuned("measured")
        us = {str(k): round(t, 3) for (k, _), t in zip(tried, times, strict=True)}
        said = ", ".join(f"{_said(race.tiles[int(k)])}: {t}" for k, t in us.items())
        report.append(f"{race.kernels[0].kernel.name}: parts {whole:.2f}; {said}")
        return {"parts": whole, "us": us}

    def _key(self, race: Race) -> str:
        jobs = [self.job_of(w.kernel) for w in (*race.kernels, *_kernels(race))]
        calls = [(p.call.target, _shapes(p, race)) for p in race.parts if isinstance(p, ExternStep)]
        return key(
            {
                "kind": "product",
                "jobs": " ".join(map(job_key, jobs)),
                "calls": repr(calls),
                "memory": repr(list(race.memory.values())),
                "device": self.device,
                "torch": torch.__version__,
            }
        )


def _kernels(race: Race) -> list[Work]:
    return [p for p in race.parts if isinstance(p, Work)]


def _shapes(step: ExternStep, race: Race) -> list[object]:
    """What the library is given: of each tensor which one it is, its dtype, sizes and strides."""
    places = list(race.memory)
    return [
        (places.index(a.buffer), getattr(a, "shape", ()), getattr(a, "stride", ()), race.layouts[a.buffer].dtype)
        for a in step.args
    ]


def _choice(found: Mapping[str, Any] | None, race: Race, margin: int) -> tuple[float, Tile] | None:
    """What is gained by the fastest tile, and that, where it takes so many percent less than the parts."""
    if found is None or not found["us"]:
        return None
    number, best = min(found["us"].items(), key=lambda one: one[1])
    parts = found["parts"]
    return (parts - best, race.tiles[int(number)]) if best * 100 <= parts * (100 - margin) else None


def _parts(race: Race, binaries: Sequence[Binary | BuildError], bench: Bench) -> Callable[[], None]:
    """What runs the parts one after another."""
    left = iter(binaries)
    runs: list[Callable[[], None]] = []
    for part in race.parts:
        if isinstance(part, ExternStep):
            runs.append(bench.call(part, OUT[part.call.target], race.layouts))
            continue
        binary = next(left)
        if isinstance(binary, BuildError):
            raise binary
        runs.append(bench.of(part).load(part.kernel, binary))

    def run() -> None:
        for one in runs:
            one()

    return run


def _said(tile: Tile) -> str:
    return f"{tile.rows}x{tile.columns}x{tile.steps} {tile.warps} warps {tile.stages} stages{' tma' if tile.descriptors else ''}"


__all__ = ["Race", "Races", "race_of", "tile_of", "tiles_of"]
