"""Makes a lowered graph that is not in the cache: schedules it, writes its kernels and its wrapper, and compiles them. A warm start does not load
this module, nor, on a processor, what it imports: a quarter of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..generated.ops import OUT
from .check.plan import check
from .config import Config
from .host.from_plan import host_program
from .host.python import python_source
from .host.verify import follows
from .host.verify import verify as verify_host
from .ir.nodes import Program
from .ir.verify import verify
from .kernels.plan import ExternStep, Kernel, Plan
from .kernels.steps import allocation_root
from .kernels.text import fusion_text, plan_text, work_text
from .lower.one_hot import one_hot_sums
from .lower.outputs import separate_outputs
from .machine import SOME_GPU, Gpu
from .observe.watch import Watch
from .targets.base import Target

__all__ = ["Made", "make", "plan_again", "tell_code"]


@dataclass(frozen=True)
class Made:
    """files  contents, or paths to copy, by name: what an entry of the cache has. meta: what it says of itself (JSON values)."""

    files: Mapping[str, Any]
    meta: Mapping[str, Any]
    source: str
    wrapper: str
    plan: Plan


def make(
    lowered: Program, names: list[str], target: Target, cfg: Config, watch: Watch, *, boxed: bool, minimize_memory: bool
) -> Made:
    """Schedule, generate and compile; `names`: of the wrapper's arguments. Raises `UnsupportedError` for what the target cannot say, and
    `BuildError` where the compiler fails.
    """
    program = _prepared(lowered, target)
    if cfg.debug_verify:
        with watch.stage("verify"):
            verify(program)
    with watch.stage("schedule"):
        plan = target.schedule(program, minimize_memory, watch)
    if cfg.debug_verify:
        with watch.stage("verify"):
            check(program, plan)
    with watch.stage("codegen"):
        rendered = target.render(plan, boxed)
        host = host_program(
            plan,
            names,
            OUT,
            boxed=boxed,
            programs=rendered.programs,
            groups=rendered.groups,
            pointer_tables=rendered.pointer_tables,
        )
        wrapper = python_source(host, target.support)
    if cfg.debug_verify:
        with watch.stage("verify"):
            verify_host(host)
            follows(host, plan, OUT, rendered.groups)
    if watch.wanted:
        tell_code(plan, rendered.source, wrapper, watch)
    built = target.compile(plan, rendered, watch)
    if built.programs:
        wrapper = python_source(host.with_grids(built.programs), target.support)
    files = {**built.files, "wrapper.py": wrapper.encode(), f"kernels.{target.suffix}": built.source.encode()}
    externs: dict[str, int] = {}
    for step in plan.steps:
        if isinstance(step, ExternStep) and step.call.target and not step.call.compiled:
            externs[step.call.target] = externs.get(step.call.target, 0) + 1
    symbols = dict(built.symbols)
    groups = {name: list(members) for name, members in rendered.groups.items()}
    meta = {"kernels": len(symbols), "externs": externs, "arena_bytes": plan.arena_bytes, "symbols": symbols}
    meta |= {"groups": groups, "checks_results": host.checks_results}
    return Made(files, meta, built.source, wrapper, plan)


def plan_again(program: Program, target: Target, minimize_memory: bool) -> Plan:
    """The plan of an entry of the cache."""
    return target.schedule(_prepared(program, target), minimize_memory, Watch("off", ""))


def _prepared(program: Program, target: Target) -> Program:
    return target.prepare(one_hot_sums(separate_outputs(program)))


def tell_code(plan: Plan, cpp: str, wrapper: str, watch: Watch) -> None:
    watch.text("plan.txt", lambda: plan_text(plan), "schedule")
    watch.tell("fusion", lambda: fusion_text(plan))
    watch.tell("work", lambda: work_text(plan))
    watch.text("kernels.cpp", lambda: cpp, "kernels")
    watch.text("kernels_triton.py", lambda: "\n\n".join(_triton(k, plan) for k in plan.kernels()))
    watch.text("graph.py", lambda: wrapper)
    watch.tell("code", lambda: f"{wrapper}\n{cpp}")


def _triton(kernel: Kernel, plan: Plan) -> str:
    from .render.triton import render_kernel  # only readers of a dump want it here
    from .tile.legal import in_registers, refusal

    if not isinstance(kernel.machine, Gpu):
        kernel = replace(kernel, machine=SOME_GPU)
    spilled = in_registers(kernel, plan.layouts).spilled
    if why := refusal(kernel, plan.layouts) or next((f"{tile}: {spilled[tile]}" for tile in spilled), ""):
        return f"# a GPU does not run {kernel.name} so: {why}\n"
    return render_kernel(
        kernel, plan.layouts, allocation_roots={b: allocation_root(plan, b) for b in (*kernel.reads, *kernel.writes)}
    )
