"""Counts what the plans of the memory-bound programs move on a GPU, without one: kernels, bytes read and written, how they are launched.

    python benchmarks/traffic.py                    everything
    python benchmarks/traffic.py --only softmax     the programs whose name contains "softmax"

A program is captured with fake tensors and scheduled as for an H200, and its kernels are looked at: each reads and writes a buffer once, or
once in each of its loops where its rows do not fit a block. What is above the bytes that the program must move at least is lost.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from opforge.generated.targets import GPU_TARGETS
from opforge.runtime.machine import Gpu

sys.path.insert(0, str(Path(__file__).parent))

from opforge.generated.rewrites import RULES
from opforge.runtime.check.plan import check
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.ir.index import Expr, product
from opforge.runtime.ir.nodes import ITEMSIZE, Buffer
from opforge.runtime.kernels.plan import ExternStep, Kernel, KernelStep, Plan, Reduce
from opforge.runtime.kernels.steps import step_reads, step_writes
from opforge.runtime.kernels.text import plan_text
from opforge.runtime.kernels.work import loops_of
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.render.triton_unit import TritonKernel, render_triton
from opforge.runtime.targets.cuda import prepared, scheduled
from opforge.runtime.tile.launch import Launch, launch
from opforge.runtime.tile.passes import merge_passes
from opforge.runtime.tile.scratch import rematerialized, roots

import report
from measure import geomean
from programs.memory_bound import BOUND, BoundProgram, size_of

console = Console(stderr=True)
HERE = Path(__file__).parent
H200 = Gpu(GPU_TARGETS["sm_90"], num_sms=132)
THREADS = 2048  # that one of its multiprocessors holds
SHOWN = 0.01  # of the least bytes: what a buffer costs above that is named
FEW = 12  # kernels of a program of which each is shown


def captured(program: BoundProgram, device: str) -> tuple[Plan, int]:
    """The plan that the CUDA target would make of a program, checked, and the bytes that the program must move at least."""
    graphs: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append((gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    cfg = Config()
    with torch.no_grad():
        with FakeTensorMode():
            inputs = [make(torch.device(device)) for make in program.inputs]
            results = pytree.tree_leaves(torch.compile(program.fn, backend=keep)(*inputs))
        ((gm, examples),) = graphs
        traced = trace(gm, examples, random=cfg.random)
    rewrite(traced.graph, RULES)
    made = prepared(separate_outputs(lower(traced.graph, device=device).program), H200)
    plan = scheduled(made, cfg, H200)
    check(made, plan)
    results = [t for t in results if isinstance(t, torch.Tensor)]
    return plan, program.moved(inputs, results) if program.moved else size_of([*inputs, *results])


def planned(program: BoundProgram) -> tuple[Plan, int]:
    """As `captured`; on the processor where torch without CUDA cannot make the program's fake tensors."""
    try:
        return captured(program, "cuda")
    except RuntimeError as error:
        if "not linked with support for cuda" not in str(error):
            raise
        return captured(program, "cpu")


def nbytes(b: Buffer, elements: int | None = None) -> int:
    """Of a buffer, or of so many of its elements."""
    whole = product(b.shape)
    assert isinstance(whole, int)
    return min(whole, whole if elements is None else elements) * ITEMSIZE[b.dtype]


def met(index: Iterable[Expr]) -> int:
    """Elements that an access meets as its loops run, if it meets none twice."""
    n = product(v.extent for v in loops_of(index))
    assert isinstance(n, int)
    return n


def traffic(kernel: Kernel, layouts: dict[str, Buffer], shape: Launch) -> tuple[Counter[str], Counter[str], int]:
    """Bytes that a kernel reads and writes, by buffer, and those of the reads that a loop repeats right after another."""
    if kernel.parts:  # products: what each needs at least
        sizes = {b: nbytes(layouts[b]) for b in (*kernel.reads, *kernel.writes)}
        return Counter({b: sizes[b] for b in kernel.reads}), Counter({b: sizes[b] for b in kernel.writes}), 0
    if not shape.persistent:
        kernel = merge_passes(rematerialized(kernel, False).kernel)
    reads: Counter[str] = Counter()
    writes: Counter[str] = Counter()
    again = 0
    for phase in kernel.phases:
        here: Counter[str] = Counter()
        for attr in {ld.attr for st in phase.body for root in roots(st) for ld in root.loads()}:
            if attr.buffer in layouts:
                here[attr.buffer] += met(attr.index)
        for name, elements in here.items():
            size = nbytes(layouts[name], elements)
            again += 0 if shape.persistent else min(size, reads[name])
            reads[name] = max(reads[name], size) if shape.persistent else reads[name] + size
        for st in phase.body:
            if not isinstance(st, Reduce) and st.buffer in layouts:
                writes[st.buffer] += nbytes(layouts[st.buffer], met(st.index))
    return reads, writes, again


def in_flight(one: TritonKernel, shape: Launch, programs: int, read: float) -> float:
    """KB that each processor has asked for at once: a tile of what is read, by all programs that fit."""
    points = product((shape.outer, shape.inner))
    assert isinstance(points, int)
    resident = min(THREADS // (32 * one.warps), 32, -(-programs // H200.num_sms))
    return one.xblock * one.rblock * read / max(points, 1) * resident / 1024


def measured(program: BoundProgram, show: bool) -> dict[str, Any]:
    """The row of one program."""
    plan, least = planned(program)
    unit = render_triton(plan)
    if show:
        print(plan_text(plan) + "\n" + unit.source)
    # A kernel that runs in a function with others is launched under the name of that.
    functions = {name: function for function, names in unit.groups.items() for name in names}
    buffers: Counter[str] = Counter()
    kernels: list[dict[str, Any]] = []
    repeated = 0
    for step in plan.steps:
        if isinstance(step, ExternStep):
            names = {*step_reads(step), *step_writes(step)}
            buffers.update({n: nbytes(plan.layouts[n]) for n in names})
            kernels.append({"name": step.call.target})
        if not isinstance(step, KernelStep):
            continue
        k = step.kernel
        shape, called = launch(k, plan.layouts), functions.get(k.name, k.name)
        one, programs = unit.kernels[unit.symbols[called]], unit.programs[called]
        if called in unit.chained and k.name != unit.chained[called][0]:
            programs = 1  # the last program of the first kernel runs it
        assert isinstance(programs, int)
        reads, writes, again = traffic(k, plan.layouts, shape)
        buffers.update(reads)
        buffers.update(writes)
        repeated += again
        iterations = product(v.extent for v in k.grid_loop)
        assert isinstance(iterations, int)
        kind = (
            "square"
            if shape.transpose
            else "points"
            if shape.inner == 1
            else "rows"
            if not shape.outer_reduction
            else "columns"
        )
        kernels.append(
            {
                "name": k.name,
                "kind": f"{kind}, walked" if k.grid_loop else kind if shape.persistent else f"{kind}, looped",
                "read": reads.total(),
                "written": writes.total(),
                "programs": programs,
                "blocks": [one.xblock, one.rblock, one.warps],
                "in_flight_kb": round(in_flight(one, shape, programs, reads.total() / iterations), 1),
            }
        )
    outside = {b.name for b in plan.inputs} | {o.buffer for o in plan.outputs}
    extra = {
        n: total - (nbytes(plan.layouts[n]) if n in outside else 0)
        for n, total in buffers.items()
        if total - (nbytes(plan.layouts[n]) if n in outside else 0) > SHOWN * least
    }
    moved = buffers.total()
    return {
        "name": program.name,
        "shape": program.shape,
        "kernels": kernels,
        "moved": moved,
        "again": repeated,
        "least": least,
        "ratio": moved / least,
        "extra": extra,
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table of programs."""
    extra = ", ".join(f"{n} {size / row['least']:.2f}" for n, size in list(row["extra"].items())[:4])
    numbers = (f"{row[key] / 2**20:.0f}" for key in ("moved", "least", "again"))
    return [row["name"], row["shape"], str(len(row["kernels"])), *numbers, f"{row['ratio']:.2f}", extra]


def launches(row: dict[str, Any]) -> list[list[str]]:
    """Lines of the table of kernels."""
    found = []
    for k in row["kernels"] if len(row["kernels"]) <= FEW else row["kernels"][:1]:
        if "blocks" in k:
            sizes = (f"{k[key] / 2**20:.1f}" for key in ("read", "written"))
            blocks = " x ".join(map(str, k["blocks"]))
            found.append(
                [row["name"], k["name"], k["kind"], *sizes, str(k["programs"]), blocks, str(k["in_flight_kb"])]
            )
        else:
            found.append([row["name"], k["name"], "eager", "", "", "", "", ""])
    return found


HEADS = [
    "program",
    "size",
    "kernels",
    "MB moved",
    "MB at least",
    "MB read again",
    "ratio",
    "above the least, by buffer",
]
KERNELS = ["program", "kernel", "kind", "MB read", "MB written", "programs", "XBLOCK x RBLOCK x warps", "KB in flight"]


def markdown(result: dict[str, Any]) -> str:
    """Both tables, with the machine and the command."""
    rows = result["programs"]
    lines = ["# What the plans of the memory-bound programs move", "", *report.heading(result)]
    lines += [f"Geometric mean of the ratios: {geomean([r['ratio'] for r in rows]):.3f}", ""]
    for heads, body in ((HEADS, [cells(r) for r in rows]), (KERNELS, [line for r in rows for line in launches(r)])):
        lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(b)} |" for b in body), ""]
    return "\n".join(lines)


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    show: Annotated[bool, typer.Option(help="print plans and kernels")] = False,
    out: Annotated[Path, typer.Option(help="folder for the results of a whole run")] = HERE / "results",
) -> None:
    """Bytes that plans for a GPU move."""
    wanted = [w.strip() for w in (only or "").split(",") if w.strip()]
    rows: list[dict[str, Any]] = []
    for program in BOUND.values():
        if not wanted or any(w in program.name for w in wanted):
            console.print(program.name)
            rows.append(measured(program, show))
    result = {"machine": report.machine(torch.get_num_threads()), "command": report.command(), "programs": rows}
    if not wanted:
        out.mkdir(parents=True, exist_ok=True)
        (out / "traffic.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "traffic.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    typer.run(main)
