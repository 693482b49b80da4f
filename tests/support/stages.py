"""Every stage of one small program as text, for a fixed machine: AVX2, two threads, the default settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opforge.errors import UnsupportedError
from opforge.generated.ops import OUT
from opforge.generated.rewrites import RULES
from opforge.runtime.check.plan import check
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.dispatch.wrapper.source import emit_wrapper
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.host.from_plan import host_program
from opforge.runtime.host.python import python_source
from opforge.runtime.ir.verify import verify
from opforge.runtime.ir.work import cost
from opforge.runtime.kernels.calls import any_strides, has_out
from opforge.runtime.kernels.text import plan_text
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.realize import parameters
from opforge.runtime.render.cpp_unit import render_unit
from opforge.runtime.render.triton import render_kernel
from opforge.runtime.schedule.draft import Options
from opforge.runtime.schedule.pipeline import schedule

from .machines import AVX2, H200, launched_on


@dataclass(frozen=True)
class Stages:
    """Texts of one compiled graph. `run` is what the dispatch layer puts around `call`, the generated graph wrapper."""

    run: str
    call: str
    plan: str
    cpp: str
    triton: tuple[str, ...]


def stages(program: Callable[..., Any], inputs: list[Any], *, dynamic: bool = False) -> Stages:
    """The stages of the one graph that Dynamo captures. Both checkers must accept it. Nothing is built or run by it."""
    found: list[Stages] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        traced = trace(gm, example_inputs)
        rewrite(traced.graph, RULES)
        lowered = lower(traced.graph)
        loops = separate_outputs(lowered.program)
        verify(loops)
        plan = schedule(loops, Options(costs=cost, out_variants=has_out, any_strides=any_strides))
        check(loops, plan)
        unit = render_unit(plan, AVX2, threads=2, threshold=Config().parallel_threshold)
        triton = tuple(_triton(k, plan.layouts) for k in launched_on(plan, H200).kernels())
        call = python_source(host_program(plan, parameters(lowered), OUT))
        found.append(Stages(emit_wrapper(traced, "call"), call, plan_text(plan), unit.source, triton))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    (only,) = found
    return only


def _triton(kernel: Any, layouts: Any) -> str:
    try:
        return render_kernel(kernel, layouts)
    except UnsupportedError as error:
        return f"# not in Triton: {error}\n"
