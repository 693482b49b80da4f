"""Times sorts, selections and running extremes of short rows on a CUDA device under eager, Inductor and opforge, as benchmarks/gpu.py does.

    python benchmarks/sorts.py                  everything
    python benchmarks/sorts.py --only topk      the programs whose name contains "topk"

Of equal elements each may choose its own: values are judged, and whether they are where the places say. What a row longer than these takes is the
eager kernel's time under opforge too (`native_if` of specs/ops/sort.yaml).
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

from compared import chosen, measure_all
from gpu import HERE, markdown, ready, run_program, summary

import backends
from programs.memory_bound import BoundProgram, Maker, half, ints, randn


def program(name: str, fn: Any, *size: int, made: Any = randn) -> BoundProgram:
    x: Maker = made(*size)
    return BoundProgram(name, " x ".join(map(str, size)), fn, (x,))


def bytes_(*size: int) -> Maker:
    return ints(120, *size, dtype=torch.int8)


PROGRAMS = [
    program("sort_16", torch.sort, 1 << 18, 16),
    program("sort_64", torch.sort, 1 << 17, 64),
    program("sort_256", torch.sort, 1 << 15, 256),
    program("sort_1024", torch.sort, 1 << 13, 1024),
    program("sort_256_bf16", torch.sort, 1 << 15, 256, made=half),
    program("sort_1024_bf16", torch.sort, 1 << 13, 1024, made=half),
    program("sort_256_int8", torch.sort, 1 << 15, 256, made=bytes_),
    program("sort_columns", lambda x: torch.sort(x, 0), 256, 1 << 15),
    program("sort_columns_64", lambda x: torch.sort(x, 0), 64, 1 << 17),
    program("sort_columns_16", lambda x: torch.sort(x, 0), 16, 1 << 18),
    program("topk_2_of_8", lambda x: torch.topk(x, 2), 1 << 15, 8),
    program("topk_8_of_128", lambda x: torch.topk(x, 8), 1 << 15, 128),
    program("topk_8_of_256_bf16", lambda x: torch.topk(x, 8), 1 << 15, 256, made=half),
    program("topk_50_of_1024", lambda x: torch.topk(x, 50), 1 << 13, 1024),
    program("topk_of_few_rows", lambda x: torch.topk(x, 8), 64, 256),
    program("cummax_1024", lambda x: torch.cummax(x, 1), 1 << 13, 1024),
    program("cummin_4096", lambda x: torch.cummin(x, 1), 1 << 11, 4096),
    program("cummax_columns", lambda x: torch.cummax(x, 0), 512, 1 << 14),
]


def run(p: BoundProgram, names: list[str], rounds: int, bandwidth: float) -> dict[str, Any]:
    row = run_program(p, names, rounds, bandwidth, judged=False)
    x = p.inputs[0](torch.device("cuda"))
    dim = 0 if "columns" in p.name else 1
    want, _ = p.fn(x)
    for name in names[1:]:
        if name not in row["failed"]:
            values, places = backends.compile_with(name, p.fn)(x)
            row["accurate"][name] = torch.equal(values, want) and torch.equal(x.gather(dim, places), want)
    return row


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 5,
    backend: Annotated[str, typer.Option(help="compared with eager, with commas between")] = "inductor,opforge",
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
) -> None:
    """Sorts of short rows on a GPU."""
    names, bandwidth = ready(backend)
    measure_all(
        chosen(PROGRAMS, only),
        lambda p: run(p, names, rounds, bandwidth),
        names,
        out / "sorts",
        summary,
        markdown,
        lambda row: ", ".join(f"{n} {us:.0f} us" for n, us in row["us"].items()),
        bandwidth=bandwidth,
    )


if __name__ == "__main__":
    typer.run(main)
