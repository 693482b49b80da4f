"""The plans, kernels and wrappers that programs get, as text, for machines that need not be there. Nothing is built: graphs run by eager kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import opforge
from opforge.generated.targets import CPU_TARGETS
from opforge.runtime import cold
from opforge.runtime import compile_graph as engine
from opforge.runtime.config import Config
from opforge.runtime.ir.nodes import Program
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.kernels.text import plan_text
from opforge.runtime.lower.graph import Lowered
from opforge.runtime.observe.watch import Watch
from opforge.runtime.realize import Artifacts, Compiled, parameters
from opforge.runtime.render.cpp_unit import Unit, render_unit
from opforge.runtime.render.triton_unit import TritonUnit, render_triton
from opforge.runtime.targets.base import Built
from opforge.runtime.targets.cpu import Cpu
from opforge.runtime.targets.cuda import configurations, scheduled
from opforge.runtime.targets.product_rules import by_table
from opforge.tests.support.gpu_lowering import lowered_for_a_gpu
from opforge.tests.support.interpreted import Interpreted
from opforge.tests.support.machines import H200

THREADS = 2
"""How many threads kernels for a processor are written for."""
CAPABILITY = 90
"""Of an H200, times ten."""


@dataclass(frozen=True)
class CpuRecord(Cpu):
    """A processor of the named kind, for which kernels are written and not compiled."""

    name: str = ""

    def render(self, plan: Plan, boxed: bool) -> Unit:
        return render_unit(plan, CPU_TARGETS[self.name], threads=THREADS, threshold=self.cfg.parallel_threshold)

    def compile(self, plan: Plan, rendered: Unit, watch: Watch) -> Built:
        return Built(rendered.source, {}, {})


@dataclass(frozen=True)
class GpuRecord(Interpreted):
    """An H200, for which kernels are written and not compiled. Tensors are on the processor, so that no CUDA device is needed."""

    support = "cuda"

    def schedule(self, program: Program, minimize_memory: bool, watch: Watch) -> Plan:
        return scheduled(program, self.cfg, H200, minimize_memory, by_table(CAPABILITY))

    def render(self, plan: Plan, boxed: bool) -> TritonUnit:
        return render_triton(plan, boxed=boxed, capability=CAPABILITY)

    def compile(self, plan: Plan, rendered: TritonUnit, watch: Watch) -> Built:
        """After the kernels' source come the configurations that are tried, in order."""
        lines = [
            f"# {name}: XBLOCK {c.xblock}, RBLOCK {c.rblock}, {c.warps} warps"
            for name, kernel in rendered.kernels.items()
            for c in configurations(kernel, H200)
        ]
        return Built("\n".join([rendered.source, *lines]), {}, {})


@dataclass
class Record:
    """Of one program on one machine: texts of each graph in the order of compilation, by title."""

    texts: dict[str, str] = field(default_factory=dict)

    def add(self, title: str, text: str) -> None:
        self.texts[f"{len(self.texts)} {title}"] = text


def target_of(machine: str, cfg: Config) -> CpuRecord | GpuRecord:
    return GpuRecord(cfg) if machine == "sm_90" else CpuRecord(cfg, machine)


MACHINES = ("avx2", "avx512", "sm_90")


@contextlib.contextmanager
def recorded(machine: str) -> Iterator[Record]:
    """All graphs that are compiled meanwhile are recorded as for the machine."""
    record = Record()
    kept = engine.lower, engine.realize, engine.target_of
    given: dict[int, tuple[torch.fx.GraphModule, Mapping[int, int]]] = {}

    def lower(graph: torch.fx.GraphModule, written: Mapping[int, int], **others: Any) -> Lowered:
        lowered = kept[0](graph, written, **others)
        given[id(lowered)] = graph, written
        return lowered

    def realize(
        lowered: Lowered,
        target: Any,
        cfg: Config,
        watch: Watch,
        *,
        boxed: bool = False,
        minimize_memory: bool = False,
        **_: Any,
    ) -> tuple[Compiled, Artifacts]:
        made = cold.make(
            lowered.program, parameters(lowered), target, cfg, watch, boxed=boxed, minimize_memory=minimize_memory
        )
        parts = {"plan": plan_text(made.plan), "kernels": made.source, "wrapper": made.wrapper}
        record.add(watch.title, "\n".join(f"--- {name}\n{text.strip()}\n" for name, text in parts.items()))
        graph, written = given.pop(id(lowered))
        return eagerly(graph, boxed, written), Artifacts(made.source, made.wrapper)

    engine.lower, engine.realize = lower, realize  # type: ignore[assignment]
    engine.target_of = lambda graph, cfg: target_of(machine, cfg)  # type: ignore[assignment]
    try:
        with lowered_for_a_gpu() if machine == "sm_90" else contextlib.nullcontext():
            yield record
    finally:
        engine.lower, engine.realize, engine.target_of = kept


def eagerly(graph: torch.fx.GraphModule, boxed: bool, written: Mapping[int, int]) -> Compiled:
    """A function that is called as the compiled graph is."""

    def run(*args: Any) -> tuple[Any, ...]:
        given = list(args[0] if boxed else args)
        if boxed:
            args[0].clear()
        results = list(graph(*given))
        for place, output in written.items():
            given[place].copy_(results[output])
            results[output] = None
        return tuple(results)

    return run


def texts(program: Callable[[Callable[..., Any]], None], machine: str) -> dict[str, str]:
    """What a program gets on a machine; `program` calls what its argument makes of its function. Raises `UnsupportedError` or `BuildError` where a
    graph would run eagerly.
    """
    torch._dynamo.reset()
    opforge.reset_stats()
    with recorded(machine) as record:
        program(
            lambda fn, **options: torch.compile(
                fn, backend="opforge", options={"cache": False, "strict": True}, **options
            )
        )
    if retries := opforge.stats()["retries"]:
        record.add("retries", str(retries))
    return record.texts
