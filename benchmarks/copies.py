"""Counts what the plans of the benchmark's models and small programs move on a CPU: bytes that kernels read and write, and library calls.

    python benchmarks/copies.py                     this checkout
    python benchmarks/copies.py --before FOLDER     beside another checkout of opforge: FOLDER holds the package folder `opforge`

A library call gets its arguments with the strides that the program gave them. Where a plan has to make a copy for that, it moves more bytes.
Nothing is compiled or timed: inference and, with gradients, the joint graph of forward and backward are traced and scheduled.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import report
from programs import PROGRAMS, build

HERE = Path(__file__).parent


def plan_numbers(gm: torch.fx.GraphModule, examples: list[Any], training: bool) -> tuple[int, int, int]:
    """Bytes that the kernels of a graph read and write, the number of kernels, and that of library calls."""
    from opforge.generated.rewrites import RULES
    from opforge.runtime.config import Config
    from opforge.runtime.dispatch.trace import trace
    from opforge.runtime.graph.rewrite import rewrite
    from opforge.runtime.kernels.plan import ExternStep, KernelStep
    from opforge.runtime.kernels.steps import nbytes
    from opforge.runtime.lower.graph import lower
    from opforge.runtime.lower.outputs import separate_outputs
    from opforge.runtime.schedule.planned import plan_of

    cfg = Config()
    traced = trace(gm, examples, training=training, random=cfg.random)
    rewrite(traced.graph, RULES)
    plan = plan_of(separate_outputs(lower(traced.graph).program), cfg)
    kernels = [step.kernel for step in plan.steps if isinstance(step, KernelStep)]
    moved = sum(nbytes(plan.layouts[b]) or 0 for k in kernels for b in (*k.reads, *k.writes))
    return moved, len(kernels), sum(isinstance(step, ExternStep) for step in plan.steps)


def measured(name: str, training: bool) -> list[int]:
    """`plan_numbers` of all graphs of a program, added up."""
    function, inputs = build(PROGRAMS[name])
    total = [0, 0, 0]

    def keep(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
        total[:] = [a + b for a, b in zip(total, plan_numbers(gm, examples, training), strict=True)]
        return gm.forward

    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        torch.compile(function, backend=keep)(*inputs)
    return total


def rows(names: list[str]) -> dict[str, list[int]]:
    """For each program, in inference and training, what its plans move."""
    found = {}
    for name in names:
        for training in (False, True):
            try:
                found[f"{name}{', training' if training else ''}"] = measured(name, training)
            except Exception as error:  # noqa: BLE001 - a package that is absent, or what cannot be differentiated
                print(f"{name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
    return found


def in_other_checkout(folder: Path, names: list[str]) -> dict[str, list[int]]:
    """`rows` of another checkout, by this very script."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, __file__, "--as-json", "--only", ",".join(names)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return result


def markdown(now: dict[str, list[int]], before: dict[str, list[int]] | None, head: list[str]) -> str:
    """The table, with what has become more."""
    lines = ["# What the plans of models move on a CPU", "", *head]
    lines += [
        "| program | MB moved by kernels | kernels | library calls | MB before | kernels before | library calls before | ratio |"
    ]
    lines += ["|" + "---|" * 8]
    for name, (moved, kernels, calls) in now.items():
        cells = [name, f"{moved / 2**20:.2f}", str(kernels), str(calls)]
        if before is not None and name in before:
            was = before[name]
            cells += [f"{was[0] / 2**20:.2f}", str(was[1]), str(was[2]), f"{moved / was[0]:.3f}" if was[0] else "1.000"]
        else:
            cells += [""] * 4
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(
    before: Annotated[Path | None, typer.Option(help="folder with another checkout, as `opforge`")] = None,
    only: Annotated[str | None, typer.Option(help="names of programs, with commas between")] = None,
    as_json: Annotated[bool, typer.Option(help="print numbers alone")] = False,
    out: Annotated[Path, typer.Option(help="folder for the results of a whole run")] = HERE / "results",
) -> None:
    """Bytes that plans for a CPU move."""
    names = only.split(",") if only else list(PROGRAMS)
    now = rows(names)
    if as_json:
        print(json.dumps(now))
        return
    then = None if before is None else in_other_checkout(before, names)
    result = {
        "machine": report.machine(torch.get_num_threads()),
        "command": report.command().replace(str(before), "FOLDER"),
        "now": now,
        "before": then,
    }
    if before is not None:
        commit = ["git", "-C", str(before / "opforge"), "rev-parse", "--short=12", "HEAD"]
        result["before_commit"] = subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip()
    head = [*report.heading(result), *([f"Before: {result['before_commit']}", ""] if before else [])]
    text = markdown(now, then, head)
    if only is None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "copies.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "copies.md").write_text(text)
    print(text)


if __name__ == "__main__":
    typer.run(main)
