"""Counts how often programs of changing sizes are compiled: opforge beside Inductor, and beside a backend that asks nothing of sizes.

    python benchmarks/recompiles.py               all programs
    python benchmarks/recompiles.py --only cache

A compilation is a graph that Dynamo gives to the backend: a later call that no compiled one's guards let in is another. The floor is a backend
that runs what it is given. Results are compared with eager. Ends with 1 where opforge compiles more often than Inductor, or a result differs.
"""

import copy
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch._dynamo.backends.registry import lookup_backend
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parent))

import backends
import report
from programs.dynamic import Dynamic, chosen

HERE = Path(__file__).parent
SYSTEMS = ("dynamo", "inductor", "opforge")
# Sizes and numbers from data stay in the graph; no program is given up because it was compiled too often.
SETTINGS = {
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "recompile_limit": 64,
}


def compilations(name: str, program: Dynamic) -> tuple[int, str]:
    """How many graphs the backend `name` is given in all calls of a program, and what is wrong with its results, or ""."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    fn, calls = program.make()
    expected = [_run(fn, copy.deepcopy(args)) for args in calls]
    torch.manual_seed(0)
    fn, calls = program.make()
    count, backend = [0], backends.BACKENDS[name].backend
    system = lookup_backend(backend) if isinstance(backend, str) else backend
    assert system is not None

    def counted(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> backends.Fn:
        count[0] += 1
        return system(gm, example_inputs)  # type: ignore[no-any-return]

    with torch._dynamo.config.patch(SETTINGS):
        compiled = torch.compile(backends.own_entry(fn, name), backend=counted, dynamic=program.dynamic)
        for k, (args, want) in enumerate(zip(calls, expected, strict=True)):
            for got, right in zip(_run(compiled, args), want, strict=True):
                if not torch.allclose(got, right, rtol=1e-3, atol=1e-4, equal_nan=True):
                    return count[0], f"call {k} differs from eager by {float((got - right).abs().max()):.2g}"
    return count[0], ""


def _run(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Results, and the gradients of the arguments that require them."""
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    with torch.set_grad_enabled(bool(wanted)):
        out = [t for t in pytree.tree_leaves(fn(*args)) if isinstance(t, torch.Tensor)]
    found = torch.autograd.grad(out[0].sum(), wanted) if wanted else ()
    return [*(t.detach() for t in out), *found]


def markdown(result: Mapping[str, Any]) -> str:
    """The table, with the machine and the command."""
    head = ["program", "what changes", "`dynamic`", "calls", "Dynamo alone", "Inductor", "opforge"]
    lines = [*report.heading(result), f"| {' | '.join(head)} |", "|---|---|---|" + "---:|" * (len(head) - 3)]
    for row in result["programs"]:
        counts = [row["compilations"][name] for name in SYSTEMS]
        cells = [row["name"], row["what"], str(row["dynamic"]), row["calls"], *counts]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    total = [sum(row["compilations"][name] for row in result["programs"]) for name in SYSTEMS]
    lines.append(f"| in all | | | {sum(row['calls'] for row in result['programs'])} | {' | '.join(map(str, total))} |")
    return "\n".join(lines) + "\n"


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    threads: Annotated[int, typer.Option(help="torch's intra-op threads")] = 2,
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
) -> None:
    """Compilations of each program by each system, as a table."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    caches = tempfile.TemporaryDirectory(prefix="bench-cache-", ignore_cleanup_errors=True)
    os.environ |= {"OPFORGE_CACHE_DIR": caches.name, "TORCHINDUCTOR_CACHE_DIR": f"{caches.name}/inductor"}
    os.environ["OPFORGE_OPT_LEVEL"] = "0"  # it changes no guard
    result: dict[str, Any] = {"machine": report.machine(threads), "command": report.command(), "programs": []}
    worse = []
    for name, program in chosen(only):
        found = {system: compilations(system, program) for system in SYSTEMS}
        counts = {system: n for system, (n, _) in found.items()}
        wrong = {system: text for system, (_, text) in found.items() if text}
        row = {"name": name, "what": program.what, "dynamic": program.dynamic, "calls": len(program.make()[1])}
        result["programs"].append({**row, "compilations": counts, "wrong": wrong})
        print(f"{name:32s} {counts} {wrong or ''}", flush=True)
        if counts["opforge"] > counts["inductor"] or "opforge" in wrong:
            worse.append(name)
    if only is None:
        report.write(result, markdown(result), out, "recompiles")
    print(markdown(result))
    if worse:
        print(f"compiled more often than by Inductor, or wrong: {', '.join(worse)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
