"""Programs on CPU tensors with the plans and the kernels that a GPU would get, run by Triton's interpreter in this process. Unless another GPU is
named, it is one of 132 processors.

The process needs TRITON_INTERPRET=1 in its environment before Triton is loaded. Operators that have no kernel run by eager's on the processor.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opforge.runtime import compile_graph as engine
from opforge.runtime.build.manifest import Entry
from opforge.runtime.config import Config
from opforge.runtime.graphs.recording import Recorder
from opforge.runtime.ir.nodes import Program
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.machine import Gpu
from opforge.runtime.observe.watch import Watch
from opforge.runtime.render.triton_horizontal import FILL_NAME
from opforge.runtime.render.triton_unit import TritonKernel, TritonUnit, render_triton
from opforge.runtime.targets.base import Built
from opforge.runtime.targets.cuda import prepared, scheduled

from .cooperative_interpreted import launch_once
from .gpu_lowering import lowered_for_a_gpu
from .machines import H200
from .triton_interpreter import mend

_TYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "i8": torch.int8, "i16": torch.int16,
    "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class Interpreted:
    """`Target` for the processor, by the plans of a GPU."""

    cfg: Config
    gpu: Gpu = H200
    device = "cpu"
    suffix = "py"
    support = "support"

    def parts(self) -> dict[str, str]:
        return {
            "target": f"interpreter, with cooperative kernels, {self.gpu}"
        }  # what is loaded is part of what is kept

    def prepare(self, program: Program) -> Program:
        return prepared(program, self.gpu, self.cfg)

    def schedule(self, program: Program, minimize_memory: bool, watch: Watch) -> Plan:
        return scheduled(program, self.cfg, self.gpu, minimize_memory)

    def render(self, plan: Plan, boxed: bool) -> TritonUnit:
        return render_triton(plan, boxed=boxed, capability=self.gpu.target.capability)

    def compile(self, plan: Plan, rendered: TritonUnit, watch: Watch) -> Built:
        files: dict[str, bytes | Path] = {f"{n}.py": k.source.encode() for n, k in rendered.kernels.items()}
        groups = {group.name: group for group in rendered.grouped.values()}
        symbols = {}
        for name, symbol in rendered.symbols.items():
            k = rendered.kernels[symbol]
            numbers = groups[name].numbers(k.xblock * k.rblock) if name in groups else []
            how = "table" if name in rendered.pointer_tables else "chain" if name in rendered.chained else ""
            workspace = rendered.cooperative.get(name, 0)
            symbols[name] = [symbol, list(k.pointers), k.xblock, k.rblock, numbers, how, workspace]
        return Built(rendered.source, files, symbols)

    def recorder(self) -> Recorder | None:
        return None

    def load(self, entry: Entry) -> Mapping[str, Callable[..., Any]]:
        loaded: dict[str, Callable[..., Any]] = {}
        for name, (symbol, pointers, xblock, rblock, numbers, how, workspace) in entry.meta["symbols"].items():
            if name != FILL_NAME:  # a table is filled by `_with_table`
                kernel = TritonKernel(
                    symbol, entry.file(f"{symbol}.py").read_text(), tuple(pointers), 0, xblock, rblock, 1
                )
                run: Callable[..., None] = {"table": _with_table, "chain": _with_semaphore}.get(how, _run)
                if workspace:
                    run = functools.partial(_with_semaphore, workspace=workspace)
                loaded[name] = functools.partial(run, kernel, numbers)
        return loaded


def _run(kernel: TritonKernel, numbers: Sequence[int], programs: int, *arguments: int) -> None:
    count = len(kernel.pointers)
    memory = [_at(a, _TYPES[t]) for a, t in zip(arguments[:count], kernel.pointers, strict=True)]
    _launch(kernel, programs, [*memory, *arguments[count:], *numbers], {})


def _with_semaphore(
    kernel: TritonKernel, numbers: Sequence[int], programs: int, *arguments: int, workspace: int = 0
) -> None:
    """The kernel leaves the semaphore at zero. `workspace`: bytes of memory whose address follows."""
    semaphore, memory = torch.zeros(1, dtype=torch.int32), torch.full((workspace,), 77, dtype=torch.uint8)
    _run(kernel, numbers, programs, *arguments, semaphore.data_ptr(), *([memory.data_ptr()] if workspace else []))
    assert not semaphore.any(), f"{kernel.name} does not reset its semaphore"


def _with_table(
    kernel: TritonKernel,
    numbers: Sequence[int],
    programs: int,
    tensors: list[torch.Tensor],
    others: list[int],
    order: Sequence[int],
) -> None:
    addresses = [*(t.data_ptr() for t in tensors), *others]
    table = torch.tensor([*numbers, *(addresses[k] for k in order)])
    _launch(kernel, programs, [table, len(numbers) // 2], {"ALIGNED": 1})


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor at an address, for the interpreter, which asks for that and for the dtype; nobody reads one of no elements. The interpreter
    takes all at one address for one storage, so these are of one size.
    """
    if not address:
        return torch.zeros(1, dtype=dtype)
    return torch.frombuffer((ctypes.c_byte * 16).from_address(address), dtype=torch.int8)[: dtype.itemsize].view(dtype)


def _launch(kernel: TritonKernel, programs: int, arguments: list[Any], more: Mapping[str, int]) -> None:
    from triton.runtime.errors import InterpreterError

    if programs:
        blocks = {"XBLOCK": kernel.xblock, "RBLOCK": kernel.rblock}
        try:
            launch_once(_module(kernel.source), kernel.name, programs, *arguments, **blocks, **more)
        except InterpreterError as error:
            kind, _, says = str(error.__cause__).partition(": ")  # what a kernel has checked names its exception first
            if not (isinstance(error.__cause__, IndexError) and kind in ("IndexError", "RuntimeError")):
                raise
            raise getattr(builtins, kind)(says) from error


_folder: list[Path] = []


@functools.cache
def _module(source: str) -> Any:
    """A kernel's module. The interpreter reads its file again, so it has one."""
    name = f"kernel_{hashlib.sha256(source.encode()).hexdigest()[:24]}"
    path = _folder[0] / f"{name}_{os.getpid()}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def interpreted(folder: Path, gpu: Gpu = H200) -> Iterator[None]:
    """All graphs that are compiled meanwhile run that way, as on `gpu`. `folder` holds the modules of kernels while the process runs."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET=1 is to be set before Triton is loaded")
    mend()
    _folder[:] = [folder]
    kept = engine.target_of
    engine.target_of = lambda graph, cfg: Interpreted(cfg, gpu)  # type: ignore[assignment]
    try:
        with lowered_for_a_gpu():
            yield
    finally:
        engine.target_of = kept


__all__ = ["Interpreted", "interpreted"]
