"""Kernels for an NVIDIA GPU: Triton compiled to binaries, launched through the driver."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import BuildError
from ..build.manifest import Entry
from ..build.scratch import scratch_dir
from ..codegen.triton_unit import TritonKernel, TritonUnit, render_triton
from ..config import Config
from ..execute.cuda import launcher, load_function
from ..graphs.cuda import CudaRecorder
from ..graphs.recording import Recorder
from ..ir.nodes import Program
from ..lower.partial_sums import partial_reductions
from ..lower.windows import write_out_windows
from ..observe.watch import Watch
from ..schedule.plan import Plan
from ..schedule.planned import plan_of
from .base import Built

PROGRAMS_PER_PROCESSOR = 4  # that a reduction should have
RECOMPUTE = 64  # additions that are cheaper than the memory's work for one value
ALIGNED = 16  # bytes: what one thread loads at once at most
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
        return {
            "target": f"sm_{capability(self.index)} x {processors(self.index)}",
            "compiler": f"triton {_triton().__version__}",
        }

    def prepare(self, program: Program) -> Program:
        return prepared(program, processors(self.index))

    def schedule(self, program: Program, frugal: bool) -> Plan:
        return scheduled(program, self.cfg, processors(self.index), frugal)

    def render(self, plan: Plan) -> TritonUnit:
        return render_triton(plan)

    def compile(self, plan: Plan, rendered: TritonUnit, watch: Watch) -> Built:
        files: dict[str, bytes | Path] = {}
        made: dict[str, Any] = {}
        watch.progress.kernels(0, len(rendered.kernels))
        with watch.stage("build"):
            for number, kernel in enumerate(rendered.kernels.values(), 1):
                files[f"{kernel.name}.cubin"], made[kernel.name] = compile_kernel(kernel, capability(self.index))
                files[f"{kernel.name}.py"] = kernel.source.encode()
                watch.progress.kernels(number, len(rendered.kernels))
        symbols = {}
        for k in plan.kernels():
            kernel = rendered.kernels[rendered.symbols[k.name]]
            how = [list(kernel.pointers), kernel.sizes, kernel.xblock, kernel.rblock, kernel.warps]
            symbols[k.name] = [kernel.name, how, made[kernel.name]]
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


def prepared(program: Program, processors: int) -> Program:
    """The program in the form that suits a GPU of so many multiprocessors."""
    return write_out_windows(partial_reductions(program, PROGRAMS_PER_PROCESSOR * processors))


def scheduled(program: Program, cfg: Config, processors: int, frugal: bool = False) -> Plan:
    """The plan of a prepared program for a GPU of so many multiprocessors."""
    return plan_of(program, cfg, frugal=frugal, recompute=RECOMPUTE, programs=processors)


def _aligned(folder: Path, symbol: str, how: Sequence[Any], meta: Mapping[str, Any]) -> Loaded:
    return _loaded((folder / f"{symbol}.cubin").read_bytes(), meta)


def _unaligned(folder: Path, symbol: str, how: Sequence[Any], meta: Mapping[str, Any]) -> Loaded:
    """Compiled when it is first needed: an input that begins at an odd address."""
    pointers, sizes, xblock, rblock, warps = how
    source = (folder / f"{symbol}.py").read_text()
    kernel = TritonKernel(symbol, source, tuple(pointers), sizes, xblock, rblock, warps)
    return _loaded(*compile_kernel(kernel, capability(torch.cuda.current_device()), aligned=False))


def _loaded(binary: bytes, meta: Mapping[str, Any]) -> Loaded:
    return load_function(binary, meta["name"], meta["shared"]), meta["shared"], 32 * meta["warps"]


def compile_kernel(kernel: TritonKernel, capability: int, *, aligned: bool = True) -> tuple[bytes, dict[str, Any]]:
    """The binary of one kernel, and what its launch needs: name, bytes of shared memory, warps. Needs no GPU.

    aligned  all addresses are multiples of 16. Raises `BuildError` with the source's place where Triton refuses it.
    """
    triton = _triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(_module(kernel), kernel.name)
    names = function.arg_names
    types = [f"*{p}" for p in kernel.pointers] + ["i64"] * kernel.sizes + ["constexpr"] * 2
    attributes = {(k,): [["tt.divisibility", ALIGNED]] for k in range(len(kernel.pointers))} if aligned else {}
    source = ASTSource(
        fn=function,
        signature=dict(zip(names, types, strict=True)),
        constexprs={"XBLOCK": kernel.xblock, "RBLOCK": kernel.rblock},
        attrs=attributes,
    )
    try:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": kernel.warps})
    except Exception as error:  # Triton's errors have no common base
        raise BuildError(
            f"Triton does not compile {kernel.name}: {type(error).__name__}: {error}\n{kernel.source}"
        ) from error
    m = made.metadata
    if m.global_scratch_size or m.profile_scratch_size:
        raise BuildError(f"{kernel.name} needs scratch memory, which is not supported")
    return made.asm["cubin"], {"name": m.name, "shared": m.shared, "warps": m.num_warps}


def _module(kernel: TritonKernel) -> Any:
    """Triton reads a function's source from its file."""
    from ..build.cache import key

    folder = scratch_dir() / "triton"
    folder.mkdir(exist_ok=True)
    path = folder / f"{kernel.name[:80]}_{key({'source': kernel.source})[:16]}.py"
    if not path.exists():
        path.write_text(kernel.source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _triton() -> Any:
    try:
        import triton
    except ImportError as error:
        raise BuildError(f"kernels for a GPU need the package triton: {error}") from error
    return triton
