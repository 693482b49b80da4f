"""Kernels for this machine's processor: C++ compiled to a shared library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ConfigError
from ...generated.targets import CPU_TARGETS, CpuTarget
from ..build.compiler import compile_library, compiler_id
from ..build.manifest import Entry
from ..build.toolchain import chosen_target, runs_here, why_not_here
from ..config import Config
from ..execute.load import load_file
from ..ir.nodes import Program
from ..observe.watch import Watch
from .base import Built

if TYPE_CHECKING:  # a warm start loads neither the scheduler nor the generator
    from ..graphs.recording import Recorder
    from ..kernels.plan import Plan
    from ..render.cpp_unit import Unit


def cpu_target(cfg: Config) -> CpuTarget:
    """The target that the configuration names, or the one of this machine and its compiler.

    Raises `ConfigError` when this machine cannot run it, and `BuildError` as `chosen_target` does.
    """
    if cfg.target != "auto" and (reason := why_not_here(cfg.target)):
        runnable = ", ".join(repr(name) for name in ("auto", *filter(runs_here, CPU_TARGETS)))
        raise ConfigError(
            f"the setting target is {cfg.target!r}, but this machine cannot run such code: {reason}; "
            f"targets that run here: {runnable}"
        )
    return CPU_TARGETS[chosen_target(cfg)]


@dataclass(frozen=True)
class Cpu:
    """`Target` for the processor that `cfg` names."""

    cfg: Config
    device = "cpu"
    suffix = "cpp"
    support = "support"

    def parts(self) -> dict[str, str]:
        return {
            "compiler": compiler_id(self.cfg),
            "target": cpu_target(self.cfg).name,
            "threads": str(torch.get_num_threads()),
        }

    def prepare(self, program: Program) -> Program:
        return program

    def schedule(self, program: Program, minimize_memory: bool, watch: Watch) -> Plan:
        from ..schedule.planned import plan_of

        return plan_of(program, self.cfg, minimize_memory=minimize_memory, machine=cpu_target(self.cfg))

    def render(self, plan: Plan, boxed: bool) -> Unit:
        from ..render.cpp_unit import render_unit

        return render_unit(
            plan, cpu_target(self.cfg), threads=torch.get_num_threads(), threshold=self.cfg.parallel_threshold
        )

    def compile(self, plan: Plan, rendered: Unit, watch: Watch) -> Built:
        from ..kernels.statements import kernel_checks
        from ..render.cpp_unit import PRELUDE, WIDTH_CHECK, with_includes

        files: dict[str, bytes | Path] = {}
        if rendered.symbols:
            count = len(set(rendered.symbols.values()))
            watch.progress.kernels(0, count)
            with watch.stage("build"):
                source = with_includes(rendered.source, PRELUDE) + WIDTH_CHECK.format(lanes=cpu_target(self.cfg).lanes)
                files["kernels.so"] = compile_library(source, name="kernels", cfg=self.cfg)
            watch.progress.kernels(count, count)
        symbols = {
            k.name: [rendered.symbols[k.name], rendered.arity[k.name], len(k.symbols), bool(kernel_checks(k))]
            for k in plan.kernels()
        }
        symbols |= {n: [n, rendered.arity[n], sizes, False] for n, sizes in rendered.routines.items()}
        return Built(rendered.source, files, symbols)

    def recorder(self) -> Recorder | None:
        return None

    def load(self, entry: Entry) -> Mapping[str, Callable[..., Any]]:
        if not entry.meta["symbols"]:
            return {}
        library = load_file(entry, "kernels.so")
        functions: dict[str, Any] = {}
        for name, (symbol, pointers, sizes, checked) in entry.meta["symbols"].items():
            function = functions[name] = library[symbol]
            function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes
            function.restype = ctypes.c_int if checked else None
        return functions
