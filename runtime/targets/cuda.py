"""Kernels for an NVIDIA GPU: Triton compiled to binaries, launched through the driver."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import BuildError, ResourceError, first_line
from ...generated.languages import TRITON_LANGUAGE
from ..build.manifest import Entry
from ..build.triton_job import Job
from ..build.triton_pool import compile_fitting, compile_kernels, compiler_identity, has_triton, job_name, start_workers
from ..config import Config, current
from ..execute.aligned import Arguments
from ..execute.launch import Loaded, launcher, load_function
from ..execute.pointer_tables import table_launcher
from ..execute.semaphores import with_semaphore
from ..fuse.padding import copied_outputs
from ..fuse.products import Selector
from ..graphs.cuda import CudaRecorder
from ..graphs.recording import Recorder
from ..host.arguments import arguments, written
from ..ir.index import product
from ..ir.nodes import Nest, Program, Size
from ..kernels.calls import row_bytes
from ..kernels.plan import Kernel, KernelStep, Plan
from ..kernels.routines import Routine, routines_of
from ..kernels.steps import allocation_root
from ..lower.split.partial_sums import costly_reductions, partial_reductions, read_again
from ..lower.split.windows import write_out_windows
from ..machine import Gpu, gpu_target
from ..observe import counters
from ..observe.watch import Watch
from ..render.triton_cooperative import BARRIER_CALL
from ..render.triton_horizontal import FILL_NAME
from ..render.triton_unit import TritonKernel, TritonUnit, programs_of, render_triton
from ..schedule.planned import plan_of
from ..tile.cooperative import splits_of
from ..tile.launch import launch
from ..tile.loop_order import reorder_loops
from ..tile.resident import UNROLLED
from ..tile.routines import rows_of
from .advice import advise
from .autotune import Autotuner, Task, Timer, Trial
from .base import Built
from .block_trials import fastest, trials_of
from .product_rules import by_table
from .products import Measured

TABLE, CHAIN, COOPERATIVE = "table", "chain", "cooperative"  # functions with arguments that the wrapper does not pass
CONFIGURATIONS = 4  # of a kernel that are tried


@functools.cache
def capability(index: int) -> int:
    """Compute capability of a device, times ten."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def unusable(index: int) -> str:
    """Why there are no kernels for the device `index`, and what to do; "" where there are."""
    if not torch.cuda.is_available():
        return f"torch finds no GPU, and tensors are on cuda:{index}"
    if not has_triton():
        return "Triton is not installed: kernels for a GPU are compiled by it (pip install triton)"
    if (found := capability(index)) < (least := TRITON_LANGUAGE.capability):
        device = f"cuda:{index} ({torch.cuda.get_device_name(index)}) has compute capability {found // 10}.{found % 10}"
        return f"{device}, and Triton's kernels need {least // 10}.{least % 10}"
    return ""


@functools.cache
def gpu_of(index: int) -> Gpu:
    """The device that kernels are made for."""
    return Gpu(gpu_target(capability(index)), torch.cuda.get_device_properties(index).multi_processor_count)


@dataclass(frozen=True)
class Cuda:
    """`Target` for the CUDA device `index`, whose kernels `timer` times (the device itself, unless a test says otherwise)."""

    cfg: Config
    index: int
    timer: Timer | None = None
    device = "cuda"
    suffix = "py"
    support = "cuda"

    def parts(self) -> dict[str, str]:
        found = {"target": f"sm_{capability(self.index)} x {gpu_of(self.index).num_sms}"} | compiler_identity()
        if self.cfg.cudagraphs:
            found["replayed"] = "yes"  # other kernels
        # What was measured holds for this very device.
        return found | {"device": self.name()} if self.cfg.max_autotune else found

    def prepare(self, program: Program) -> Program:
        advise(program, capability(self.index))
        # Fusion leaves a third of the nests or so.
        start_workers(sum(isinstance(item, Nest) for item in program.items) // 4, self.cfg)
        return prepared(program, gpu_of(self.index), self.cfg)

    def schedule(self, program: Program, minimize_memory: bool, watch: Watch) -> Plan:
        return scheduled(program, self.cfg, gpu_of(self.index), minimize_memory, self.selector(watch))

    def render(self, plan: Plan, boxed: bool) -> TritonUnit:
        return render_triton(plan, boxed=boxed, capability=capability(self.index), replayed=self.cfg.cudagraphs)

    def compile(self, plan: Plan, rendered: TritonUnit, watch: Watch) -> Built:
        preferred = rendered.kernels | (self.tuned(plan, rendered, watch) if self.cfg.max_autotune else {})
        choices = {name: configurations(kernel, gpu_of(self.index)) for name, kernel in preferred.items()}
        jobs = [[job_of(c, capability(self.index)) for c in some] for some in choices.values()]
        properties = torch.cuda.get_device_properties(self.index)
        shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub lacks it
        done = itertools.count(1)
        watch.progress.kernels(0, len(jobs))
        with watch.stage("build"):
            made = compile_fitting(
                jobs, shared, self.cfg, lambda: watch.progress.kernels(next(done), len(jobs)), refused=_refused
            )
        taken = {
            name: (some[number], binary) for (name, some), (number, binary) in zip(choices.items(), made, strict=True)
        }
        files: dict[str, bytes | Path] = {}
        for name, (kernel, binary) in taken.items():
            files |= {f"{name}.cubin": binary.cubin, f"{name}.py": (kernel.plain or kernel.source).encode()}
        symbols = {}
        programs: dict[str, Size] = {}
        groups = {group.name: group for group in rendered.grouped.values()}
        kernels = {k.name: k for k in plan.kernels()}
        routines = {r.name: r for r in routines_of(plan)}
        takers: dict[str, Kernel | Routine] = {**kernels, **routines}
        for name, symbol in rendered.symbols.items():
            kernel, binary = taken[symbol]
            group = groups.get(name)
            how = [list(kernel.pointers), kernel.sizes, kernel.xblock, kernel.rblock, kernel.warps]
            numbers = [] if group is None else group.numbers(kernel.xblock * kernel.rblock)
            kind, members = (
                _kind(name, rendered),
                [takers[n] for n in rendered.groups.get(name, (name,)) if n in takers],
            )
            meta = binary.meta | {"job": job_name(job_of(kernel, capability(self.index)))}
            meta |= {"written": written(members[0])} if kind == TABLE else {"arguments": arguments(members, plan)}
            meta |= {"workspace": rendered.cooperative[name]} if kind == COOPERATIVE else {}
            symbols[name] = [kernel.name, how, meta, numbers, kind]
            if name in rendered.programs and kernel is not rendered.kernels[kernel.name]:
                if group is not None:
                    programs[name] = group.programs(kernel.xblock * kernel.rblock)
                elif name in routines:
                    programs[name] = programs_of(product(rows_of(routines[name])), kernel.xblock)
                else:
                    first = rendered.chained.get(name, (name,))[0]
                    points = launch(kernels[first], plan.layouts).outer
                    programs[name] = rendered.programs_of(name, points, kernel.xblock)
        return Built(rendered.source, files, symbols, programs)

    def tuned(self, plan: Plan, rendered: TritonUnit, watch: Watch) -> dict[str, TritonKernel]:
        """Those kernels that can be measured, with the blocks that are fastest."""
        trials: dict[str, Trial] = {}
        for name, trial in trials_of(plan, rendered):
            if isinstance(trial, Trial):
                trials[name] = trial
            else:
                counters.count_tuned(f"not measured: {trial}")
        times = self.autotuner(watch).times([Task((trial,)) for trial in trials.values()], "tuning.txt")
        found = zip(trials.items(), times, strict=True)
        return {name: fastest(trial, measured) for (name, trial), measured in found if measured is not None}

    def selector(self, watch: Watch) -> Selector | None:
        """What says which products of matrices gain by a kernel with what is beside them."""
        sm = capability(self.index)
        return Measured(self.autotuner(watch), sm) if self.cfg.max_autotune else by_table(sm)

    def autotuner(self, watch: Watch) -> Autotuner:
        """What measures kernels of this device."""
        sm = capability(self.index)
        return Autotuner(lambda one: job_of(one, sm), self.cfg, self.name(), self._timer(), watch)

    def _timer(self) -> Timer:
        from .cuda_timer import CudaTimer  # only here

        return self.timer or CudaTimer(self.index)

    def name(self) -> str:
        """What the device calls itself."""
        return str(torch.cuda.get_device_properties(self.index).name)

    def recorder(self) -> Recorder | None:
        return CudaRecorder(self.index)

    def load(self, entry: Entry) -> Mapping[str, Callable[..., Any]]:
        loaded: dict[str, Callable[..., Any]] = {}
        known: dict[object, Callable[..., Any]] = {}
        binaries: dict[str, Loaded] = {}
        with torch.cuda.device(self.index):
            for name, (symbol, how, meta, numbers, kind) in sorted(
                entry.meta["symbols"].items(), key=lambda one: one[1][4] == TABLE
            ):
                # Loaded at once: what does not fit this device is known before the graph runs.
                if (first := binaries.get(symbol)) is None:
                    first = binaries[symbol] = _first(entry.read(f"{symbol}.cubin"), meta, self.index)
                other = functools.partial(_unaligned, entry, symbol, how, self.index)
                if kind == TABLE:
                    fill = loaded[FILL_NAME]
                    loaded[name] = table_launcher(first, other, symbol, fill, numbers, self.index, meta["written"])
                    continue
                taken = Arguments(*meta["arguments"])
                same = repr((symbol, numbers, taken))
                if same not in known:
                    passed = how[1] - len(numbers)
                    scratch = meta.get("scratch", 0)
                    cooperative = kind == COOPERATIVE
                    run = launcher(
                        first, other, symbol, len(how[0]), passed, self.index, numbers, scratch, taken, cooperative
                    )
                    counts = kind in (CHAIN, COOPERATIVE)
                    known[same] = with_semaphore(run, self.index, meta.get("workspace", 0)) if counts else run
                loaded[name] = known[same]
        return loaded


def prepared(program: Program, gpu: Gpu, cfg: Config | None = None) -> Program:
    """The program in the form that suits a GPU."""
    program = copied_outputs(write_out_windows(program), row_bytes, gpu)
    costly = costly_reductions(program, gpu.costs.split) if cfg is None or cfg.fusion else frozenset()
    cooperative = read_again(program, gpu)
    while cooperative:
        # Which kernels there will be is known when there is a plan.
        whole = partial_reductions(program, gpu, cooperative, costly)
        kernels = [k for k in scheduled(whole, cfg or Config(), gpu).kernels() if k.splits > 1]
        found = cooperative & {name for k in kernels for name in k.defines}
        if found == cooperative:
            return whole
        cooperative = found
    return partial_reductions(program, gpu, costly=costly)


def scheduled(
    program: Program, cfg: Config, gpu: Gpu, minimize_memory: bool = False, select: Selector | None = None
) -> Plan:
    """The plan of a prepared program for a GPU; `select` as for `schedule`."""
    plan = plan_of(program, cfg, minimize_memory=minimize_memory, machine=gpu, select=select)

    def ordered(kernel: Kernel) -> Kernel:
        kernel = reorder_loops(kernel, plan.layouts)
        allocation_roots = {b: allocation_root(plan, b) for b in (*kernel.reads, *kernel.writes)}
        return replace(kernel, splits=splits_of(kernel, plan.layouts, allocation_roots))

    plan.steps = [replace(s, kernel=ordered(s.kernel)) if isinstance(s, KernelStep) else s for s in plan.steps]
    return plan


def _kind(name: str, rendered: TritonUnit) -> str:
    if name in rendered.cooperative:
        return COOPERATIVE
    return TABLE if name in rendered.pointer_tables else CHAIN if name in rendered.chained else ""


_refused: dict[str, str] = {}
"""Configurations of kernels that ask for more than the device has, as it turned out when they were loaded: `job_name`, and what the device says."""


def _first(binary: bytes, meta: Mapping[str, Any], index: int) -> Loaded:
    """The function of a binary. Raises `ResourceError` after it has noted that another configuration is to be taken from now on."""
    try:
        return _loaded(binary, meta, index)
    except ResourceError as error:
        _refused[meta["job"]] = str(error)
        counters.count_retry(first_line(error))
        raise


def _unaligned(entry: Entry, symbol: str, how: Sequence[Any], index: int) -> Loaded:
    """Compiled when it is first needed: an input that begins at an odd address. Raises `BuildError`."""
    pointers, sizes, xblock, rblock, warps = how
    try:
        source = entry.read(f"{symbol}.py").decode()
    except OSError as error:  # somebody has emptied the cache
        raise BuildError(f"the source of {symbol} is gone: {error}") from error
    kernel = TritonKernel(symbol, source, tuple(pointers), sizes, xblock, rblock, warps)
    (made,) = compile_kernels([job_of(kernel, capability(index), aligned=False)], current())
    if isinstance(made, BuildError):
        raise made
    return _loaded(made.cubin, made.meta, index)


def _loaded(binary: bytes, meta: Mapping[str, Any], index: int) -> Loaded:
    shared, threads = meta["shared"], gpu_of(index).limits.warp * meta["warps"]
    return load_function(binary, meta["name"], shared, threads), shared, threads


def configurations(kernel: TritonKernel, gpu: Gpu) -> list[TritonKernel]:
    """The preferred configuration of a kernel, then ever smaller tiles, in case it does not compile or does not fit. The tile of a
    cooperative kernel holds a split of a row, which is not cut any further.
    """
    found = [kernel]
    if BARRIER_CALL in kernel.source:
        return found
    x, r = kernel.xblock, kernel.rblock
    looped = "for roffset in " in kernel.source  # else a tile holds whole rows
    # An unrolled loop has more code with smaller tiles, and takes minutes to compile.
    least = r // 4 if UNROLLED in kernel.source else gpu.limits.warp
    while len(found) < CONFIGURATIONS:
        for _ in range(2):
            if looped and r > max(x, least):
                r //= 2
            elif x > 1:
                x //= 2
        if (x, r) == (found[-1].xblock, found[-1].rblock):
            break
        found.append(replace(kernel, xblock=x, rblock=r, warps=max(1, min(kernel.warps, x * r // gpu.limits.warp))))
    return found


def job_of(kernel: TritonKernel, capability: int, *, aligned: bool = True) -> Job:
    """What compiles a kernel for a capability; `aligned`: all addresses are multiples of 16."""
    return Job(
        kernel.name,
        kernel.source,
        kernel.pointers,
        kernel.sizes,
        kernel.xblock,
        kernel.rblock,
        kernel.warps,
        capability,
        aligned,
    )
