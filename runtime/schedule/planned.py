"""Peak memory of a training step as its two plans have it: what a partition really costs once it is fused and laid out."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from ..config import Config
from ..fuse.products import Selector
from ..ir.nodes import Program
from ..ir.work import cost
from ..kernels.calls import any_strides, factors, has_out, row_bytes
from ..kernels.plan import Plan
from ..kernels.steps import nbytes, step_reads, step_writes
from ..lower.graph import lower
from ..lower.outputs import separate_outputs
from ..machine import PORTABLE, Machine
from ..observe.counters import uncounted
from .draft import Options
from .pipeline import schedule


def plan_of(
    program: Program,
    cfg: Config,
    *,
    minimize_memory: bool = False,
    machine: Machine = PORTABLE,
    select: Selector | None = None,
) -> Plan:
    """The schedule of a program with separate outputs; `minimize_memory`, `machine` and `select` as in `Options`."""
    options = Options(
        costs=cost,
        fusion=cfg.fusion,
        minimize_memory=minimize_memory,
        machine=machine,
        # Beside a buffer that has memory of its own is memory that nobody may touch.
        arena=cfg.sanitize == "off",
        out_variants=has_out,
        row_bytes=row_bytes,
        any_strides=any_strides,
        factors=factors,
        select=select,
    )
    return schedule(program, options)


def planned_peak(forward: fx.GraphModule, backward: fx.GraphModule, owned: Collection[int], cfg: Config) -> int | None:
    """Greatest number of bytes alive at once in a forward and its backward, beside the arguments; None where a size is symbolic.

    owned  positions of the backward's placeholders that it frees: what was saved only for it.
    """
    with uncounted():
        halves = [lower(g, checks=cfg.index_checks, products=cfg.loop_products) for g in (forward, backward)]
    plans = [plan_of(separate_outputs(h.program), cfg, minimize_memory=True) for h in halves]
    if any(nbytes(b) is None for plan in plans for b in plan.layouts.values()):
        return None
    # Both take turns with one arena, which stays between them.
    arena = max(plan.arena_bytes for plan in plans)
    saved = {str(name): _size(plans[1], str(name)) for k, name in enumerate(halves[1].placeholders) if k in owned}
    peak, kept = _run(plans[0], {}, 0)
    return arena + max(peak, _run(plans[1], saved, kept)[0])


def _size(plan: Plan, name: str) -> int:
    layout = plan.layouts.get(name) or next((b for b in plan.inputs if b.name == name), None)
    return (nbytes(layout) or 0) if layout is not None else 0


def _run(plan: Plan, owned: Mapping[str, int], alive: int) -> tuple[int, int]:
    """Peak and bytes left of one plan that starts with `alive` bytes, of which it frees the `owned` arguments after their last use."""
    last = dict.fromkeys(owned, -1)
    for k, step in enumerate(plan.steps):
        last.update((name, k) for name in step_reads(step) if name in last)
    ending: dict[int, int] = {}
    for name, k in last.items():
        ending[k] = ending.get(k, 0) + owned[name]
    peak = alive
    alive -= ending.get(-1, 0)
    for k, step in enumerate(plan.steps):
        alive += sum(
            _size(plan, name) for name in step_writes(step) if plan.allocations[name].kind in ("dedicated", "extern")
        )
        peak = max(peak, alive)
        alive -= sum(_size(plan, name) for name in plan.frees.get(k, ())) + ending.get(k, 0)
    return peak, alive
