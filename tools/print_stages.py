"""Write the stages of one small program as markdown: `python tools/print_stages.py` writes docs/stages.md (`--out -` prints)."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from opforge.generated.ops import OUT
from opforge.generated.rewrites import RULES
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.host.as_json import to_json
from opforge.runtime.host.from_plan import host_program
from opforge.runtime.host.python import python_source
from opforge.runtime.ir.text import dump
from opforge.runtime.kernels.calls import has_out
from opforge.runtime.kernels.text import plan_text
from opforge.runtime.lower.graph import lower
from opforge.runtime.realize import parameters
from opforge.runtime.render.cpp_unit import render_unit
from opforge.runtime.render.triton import render_kernel
from opforge.runtime.schedule.draft import Draft, Options
from opforge.runtime.schedule.pipeline import schedule
from opforge.runtime.schedule.planned import cost
from opforge.tests.support.machines import AVX2, H200, launched_on

PAGE = Path(__file__).parent.parent / "docs" / "stages.md"

PARAGRAPH = "\n\n"
INTRODUCTION = """\
# The stages of one small program

What each stage of inference on a processor makes of a program, from Dynamo's graph to the code that runs: `python tools/print_stages.py` writes this
page. It leaves out the graph after its rewrites, the wrapper around the host program (aliases, writes into inputs, checks of each call), the plan
checker, the compilation of kernels, and training.
"""
TRITON = (
    "Launched as on an H200. The plan is the one above, made with plain options; a compilation for a GPU makes its own."
)
RANGES = "The function `in_ranges` names each step for a profiler. It is made when a profiler first runs, and is left out here."


def program(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A residual layer norm, with something for a rewrite to remove."""
    y = torch.relu(x * 1.0) + x
    return torch.nn.functional.layer_norm(y, (64,), w, b)


def formatted(text: str) -> str:
    """The Python text in house format, as far as ruff is there. Raises CalledProcessError where it is no Python."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "120", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def stages() -> str:
    """The page."""
    parts = [INTRODUCTION]

    def section(title: str, text: str, language: str = "", note: str = "") -> None:
        body = formatted(text) if language == "python" else text
        parts.append(f"## {title}\n\n{note and note + PARAGRAPH}```{language}\n{body.strip()}\n```\n")

    source = "y = torch.relu(x * 1.0) + x\nreturn torch.nn.functional.layer_norm(y, (64,), w, b)"
    parts.append(f"## 0. The program\n\n```python\n{source}\n```\n")

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., object]:
        show(gm, example_inputs, section)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(program, backend=backend)(torch.randn(32, 64), torch.randn(64), torch.randn(64))
    return "\n".join(parts)


def show(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor], section: Callable[..., None]) -> None:
    """Every stage of the graph, each given to `section`."""
    section("1. What Dynamo captured", str(gm.code), "python")
    traced = trace(gm, example_inputs)
    section("2. The functional graph (dispatch)", str(traced.graph.code), "python")
    report = rewrite(traced.graph, RULES)
    applied = "\n".join(f"{rule} at {node}" for rule, node in report.applied) or "(nothing)"
    section(f"3. Rewrites: {len(report.applied)} applied", applied)
    lowered = lower(traced.graph)
    section("4. The loop IR (lower)", dump(lowered.program))
    passes: list[str] = []
    shown = {dump(lowered.program)}

    def on_pass(name: str, draft: Draft) -> None:
        text = draft.text()
        passes.append(f"-- {name}\n{'' if text in shown or draft.plan is not None else text}")
        shown.add(text)

    plan = schedule(lowered.program, Options(costs=cost, out_variants=has_out), on_pass)
    section(
        "5. The scheduling passes, with the draft after each one that changes it",
        "".join(passes),
        note="The last one, `place`, decides where each buffer lives: the next section.",
    )
    section("6. The plan: kernels, loops, places", plan_text(plan))
    section("7. C++ for AVX2 (render)", render_unit(plan, AVX2, threads=2, threshold=16384).source, "cpp")
    for kernel in launched_on(plan, H200).kernels():
        section("8. The same kernel in Triton", render_kernel(kernel, plan.layouts), "python", note=TRITON)
    host = host_program(plan, parameters(lowered), OUT)
    section("9. The host program", to_json(host), "json")
    section("10. The same as Python", python_source(host), "python", note=RANGES)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--out", default=str(PAGE), help="the file to write (default: docs/stages.md), or - for stdout"
    )
    out = options.parse_args().out
    if out == "-":
        print(stages(), end="")
    else:
        Path(out).write_text(stages(), encoding="utf-8")
