"""Kernels for an NVIDIA GPU: Triton compiled to binaries, launched through the driver."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import BuildError
from ..build.manifest import Entry
from ..build.triton_job import Job
from ..build.triton_pool import compile_kernels, compiler_identity, start_workers
from ..codegen.triton_unit import TritonKernel, TritonUnit, render_triton
from ..config import Config, current
from ..execute.cuda import launcher, load_function
from ..graphs.cuda import CudaRecorder
from ..graphs.recording import Recorder
from ..ir.nodes import Nest, Program
from ..lower.partial_sums import partial_reductions
from ..observe.watch import Watch
from ..schedule.plan import Plan
from .base import Built

PROGRAMS_PER_PROCESSOR = 4  # that a reduction should have
Loaded = tuple[Any, int, int]  # the function, bytes of shared memory, threads


@functools.cache
def capability(index: int) -> int:
    """Compute capability of a device, times ten."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@functools.cache
def processors(index: int) -> int:
    """Number of a device's multiprocessors."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@dataclass(frozen=True)
class Cuda:
    """`Target` for the CUDA device `index`."""

    cfg: Config
    index: int
    device = "cuda"
    suffix = "py"
    support = "cuda"

    def parts(self) -> dict[str, str]:
        return {"target": f"sm_{capability(self.index)} x {processors(self.index)}"} | compiler_identity()

    def prepare(self, program: Program) -> Program:
        # Fusion leaves a third of the nests or so.
        start_workers(sum(isinstance(item, Nest) for item in program.items) // 4, self.cfg)
        return partial_reductions(program, PROGRAMS_PER_PROCESSOR * processors(self.index))

    def render(self, plan: Plan) -> TritonUnit:
        return render_triton(plan)

    def compile(self, plan: Plan, rendered: TritonUnit, watch: Watch) -> Built:
        kernels = list(rendered.kernels.values())
        done = iter(range(1, len(kernels) + 1))
        watch.progress.kernels(0, len(kernels))
        with watch.stage("build"):
            made = compile_kernels(
                [job_of(k, capability(self.index)) for k in kernels],
                self.cfg,
                lambda: watch.progress.kernels(next(done), len(kernels)),
            )
        files: dict[str, bytes | Path] = {}
        metas: dict[str, Any] = {}
        for kernel, binary in zip(kernels, made, strict=True):
            if isinstance(binary, BuildError):
                raise binary
            files |= {f"{kernel.name}.cubin": binary.cubin, f"{kernel.name}.py": kernel.source.encode()}
            metas[kernel.name] = binary.meta
        symbols = {}
        for k in plan.kernels():
            kernel = rendered.kernels[rendered.symbols[k.name]]
            how = [list(kernel.pointers), kernel.sizes, kernel.xblock, kernel.rblock, kernel.warps]
            symbols[k.name] = [kernel.name, how, metas[kernel.name]]
        return Built(rendered.source, files, symbols)

    def recorder(self) -> Recorder | None:
        return CudaRecorder(self.index)

    def load(self, entry: Entry) -> Mapping[str, Callable[..., Any]]:
        loaded: dict[str, Callable[..., Any]] = {}
        for name, (symbol, how, meta) in entry.meta["symbols"].items():
            if symbol not in loaded:
                variants = [functools.partial(f, entry.path, symbol, how, meta) for f in (_aligned, _unaligned)]
                loaded[symbol] = launcher(variants, symbol, len(how[0]), how[1], self.index)
            loaded[name] = loaded[symbol]
        return loaded


def _aligned(folder: Path, symbol: str, how: Sequence[Any], meta: Mapping[str, Any]) -> Loaded:
    return _loaded((folder / f"{symbol}.cubin").read_bytes(), meta)


def _unaligned(folder: Path, symbol: str, how: Sequence[Any], meta: Mapping[str, Any]) -> Loaded:
    """Compiled when it is first needed: an input that begins at an odd address."""
    pointers, sizes, xblock, rblock, warps = how
    source = (folder / f"{symbol}.py").read_text()
    kernel = TritonKernel(symbol, source, tuple(pointers), sizes, xblock, rblock, warps)
    (made,) = compile_kernels([job_of(kernel, capability(torch.cuda.current_device()), aligned=False)], current())
    if isinstance(made, BuildError):
        raise made
    return _loaded(made.cubin, made.meta)


def _loaded(binary: bytes, meta: Mapping[str, Any]) -> Loaded:
    return load_function(binary, meta["name"], meta["shared"]), meta["shared"], 32 * meta["warps"]


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
