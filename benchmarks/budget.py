"""Measures the peak memory of a training step under activation memory budgets 0, 0.1, ..., 1, and that it falls with the budget.

    python benchmarks/budget.py                 three models
    python benchmarks/budget.py --only gpt

Every allocation of torch's allocator is counted (`memory.py`), so the peaks are exact; what was allocated before the step (parameters,
batch) is left out. The script ends with 1 where a smaller budget has a higher peak.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from memory import allocation_peak

import report
from programs.budget import BUDGETED

console = Console(stderr=True)
HERE = Path(__file__).parent
BUDGETS = tuple(k / 10 for k in range(11))


def step_peak(name: str, budget: float | None) -> int:
    """Peak bytes of one training step of the model `name` under a budget, or by eager (None)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = BUDGETED[name]()
    loss: Any = model
    if budget is not None:
        # The optimization level does not change what is allocated.
        options: dict[str, Any] = {"activation_memory_budget": budget, "opt_level": "0", "strict": True}
        loss = torch.compile(model, backend="opforge", dynamic=False, options=options)

    def step() -> None:
        loss(*batch).backward()
        for p in model.parameters():
            p.grad = None

    return allocation_peak(step)


def rises(peaks: list[int]) -> list[float]:
    """Budgets at which the peak is higher than at the next larger budget."""
    return [b for b, lower, higher in zip(BUDGETS, peaks, peaks[1:], strict=False) if lower > higher]


def markdown(result: dict[str, Any]) -> str:
    """The table of peaks in KB, with the machine and the command."""
    head = ["model", "eager", *(f"{b:.1f}" for b in BUDGETS), "falls"]
    lines = [*report.heading(result), f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in result["programs"]:
        cells = [f"{p / 1024:.0f}" for p in (row["eager"], *row["peaks"])]
        lines.append(f"| {' | '.join([row['name'], *cells, 'no' if row['rises'] else 'yes'])} |")
    return "\n".join(lines) + "\n"


def main(
    only: Annotated[str | None, typer.Option(help="parts of model names, with commas between")] = None,
    threads: Annotated[int, typer.Option(help="torch's intra-op threads")] = 2,
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
) -> None:
    """Peak memory (KB, beside parameters and batch) of a training step under eleven budgets."""
    torch.set_num_threads(threads)
    caches = tempfile.TemporaryDirectory(prefix="bench-cache-")
    os.environ["OPFORGE_CACHE_DIR"] = caches.name
    names = [n for n in BUDGETED if only is None or any(w.strip() in n for w in only.split(","))]
    result: dict[str, Any] = {"machine": report.machine(threads), "command": report.command()}
    result |= {"budgets": BUDGETS, "programs": []}
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        eager, peaks = step_peak(name, None), []
        for budget in BUDGETS:
            peaks.append(step_peak(name, budget))
            console.print(f"[dim]{name} {budget:.1f}[/] {peaks[-1] / 1024:.0f} KB  [dim]eager {eager / 1024:.0f} KB")
        result["programs"].append({"name": name, "eager": eager, "peaks": peaks, "rises": rises(peaks)})
        (out / "budget.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "budget.md").write_text(markdown(result))
    print(markdown(result))
    if any(row["rises"] for row in result["programs"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
