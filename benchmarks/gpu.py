"""Times memory-bound programs on a CUDA device under eager, Inductor and opforge, interleaved in one process, against the copy bandwidth.

    python benchmarks/gpu.py                    everything
    python benchmarks/gpu.py --only softmax     the programs whose name contains "softmax"

The bandwidth is measured in the same run, by copies of a gigabyte. A program's share of it is the bytes that it must move at least
(inputs read once, results written once) over its time and that bandwidth. Errors are judged by a float64 run.
"""

import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from compared import chosen, faults, first_calls, in_float64, loaded, measure_all, note, told
from torch.utils import _pytree as pytree

from opforge.generated.targets import GPU_TARGETS, GpuTarget

import report
from measure import device_us, geomean, interleaved_us
from programs.memory_bound import BOUND, BoundProgram, size_of

console = Console(stderr=True)
HERE = Path(__file__).parent
PAIRS = (("opforge", "inductor"), ("opforge", "eager"), ("inductor", "eager"), ("opforge-max", "opforge"))
NEARLY = 0.95  # of the bandwidth that was reached: runs differ by 1%
RANDOM = ("dropout_add",)  # results that no other run has


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of copies of a gigabyte."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    us = statistics.median(device_us(lambda: target.copy_(source), 5) for _ in range(7))
    return 2 * (1 << 30) / us * 1e6


def below(bandwidth: float, name: str, targets: Iterable[GpuTarget]) -> str:
    """What to say where copies of the device move far fewer GB/s than they did on such a device (specs/targets); "" where they do not."""
    for reached in (m.copy_bandwidth for t in targets for m in t.measured if m.gpu == name):
        if bandwidth < NEARLY * reached:
            return f"another {name} moved {reached / 1e3:.2f} TB/s: this one is busy, or slowed down"
    return ""


def ready(backend: str) -> tuple[list[str], float]:
    """The systems of a list with commas, eager first, and the copy bandwidth. Ends the process where there is no device."""
    if not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    names, bandwidth = loaded(backend), copy_bandwidth()
    console.print(f"copies move {bandwidth / 1e12:.2f} TB/s")
    if slower := below(bandwidth / 1e9, torch.cuda.get_device_name(), GPU_TARGETS.values()):
        console.print(f"[yellow]{slower}")
    return names, bandwidth


def tensors(result: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def run_program(
    program: BoundProgram, names: list[str], rounds: int, bandwidth: float, judged: bool = True
) -> dict[str, Any]:
    """Times and, if it is `judged`, errors of one program under every backend in `names`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    device = torch.device("cuda")
    inputs = [make(device) for make in program.inputs]
    row: dict[str, Any] = {"name": program.name, "shape": program.shape}
    want = program.fn(*inputs)
    moved = program.moved(inputs, tensors(want)) if program.moved else size_of([*inputs, *tensors(want)])
    del want
    reference = None if program.name in RANDOM or not judged else in_float64(program.fn, inputs)
    thunks = first_calls(program.fn, inputs, names, reference, row)
    del reference
    row["us"] = interleaved_us(thunks, rounds)
    row["share"] = {name: moved / us * 1e6 / bandwidth for name, us in row["us"].items()}
    row["moved_mb"] = moved / 2**20
    return row


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Geometric means over the programs that ran under all."""
    full = [r for r in rows if all(n in r["us"] for n in names)]
    found: dict[str, Any] = {f"share {n}": geomean([r["share"][n] for r in full]) for n in names}
    for mine, other in PAIRS:
        if mine in names and other in names:
            ratios = [r["us"][other] / r["us"][mine] for r in full]
            found[f"speed {mine}/{other}"] = geomean(ratios)
            found[f"slower {mine}/{other}"] = [r["name"] for r, q in zip(full, ratios, strict=True) if q < 1]
    return found | faults(rows, names)


def markdown(result: dict[str, Any]) -> str:
    """The table of results, with the machine, the command and the bandwidth."""
    names = result["names"]
    head = ["program", "size", "MB moved", *(f"{n} us" for n in names), *(f"{n} of copy" for n in names), "note"]
    lines = report.heading(result, f"; copies move {result['bandwidth'] / 1e12:.2f} TB/s")
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in result["programs"]:
        cells = [f"{r['us'][n]:.1f}" if n in r["us"] else "—" for n in names]
        cells += [f"{r['share'][n]:.2f}" if n in r["share"] else "—" for n in names]
        lines.append(f"| {' | '.join([r['name'], r['shape'], format(r['moved_mb'], '.0f'), *cells, note(r)])} |")
    return "\n".join([*lines, *told(result["summary"])]) + "\n"


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 7,
    backend: Annotated[str, typer.Option(help="compared with eager, with commas between")] = "inductor,opforge",
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
) -> None:
    """Memory-bound programs on a GPU."""
    names, bandwidth = ready(backend)
    programs = chosen(list(BOUND.values()), only)

    def shares(row: Mapping[str, Any]) -> str:
        return ", ".join(f"{n} {s:.2f}" for n, s in row["share"].items())

    measure_all(
        programs,
        lambda p: run_program(p, names, rounds, bandwidth),
        names,
        out / "gpu",
        summary,
        markdown,
        shares,
        bandwidth=bandwidth,
    )


if __name__ == "__main__":
    typer.run(main)
