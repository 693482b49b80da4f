"""Small products and convolutions as loops beside the same programs with a library's calls (setting `loop_products`), in one process.

python benchmarks/small_products.py                      prints a table
python benchmarks/small_products.py --out FOLDER         and writes small_products.json there

Both programs are called in turns; each figure is the median of the ratios of neighbouring rounds, so other work on the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import opforge

Program = tuple[str, int, Callable[..., Any], list[torch.Tensor]]


def programs() -> list[Program]:
    """Name, multiply-adds, function and arguments."""
    torch.manual_seed(0)
    found: list[Program] = []

    def add(name: str, steps: int, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        found.append((name, steps, function, [torch.randn(s) for s in shapes]))

    for n in (2, 4, 8, 12, 16, 20, 24, 25, 32):
        add(f"mm {n}", n**3, torch.mm, (n, n), (n, n))
        add(f"mm {n}, first transposed", n**3, lambda a, b: torch.mm(a.t(), b), (n, n), (n, n))
        add(f"mm {n}, second transposed", n**3, lambda a, b: torch.mm(a, b.t()), (n, n), (n, n))
        add(f"linear {n}, relu", n**3, lambda x, w, b: F.linear(x, w, b).relu(), (n, n), (n, n), (n,))
    for m, k, n in ((1, 128, 128), (128, 128, 1), (4, 64, 64), (64, 4, 64), (64, 64, 4), (2, 4096, 2), (1, 16384, 1)):
        add(f"mm {m} x {k} x {n}", m * k * n, torch.mm, (m, k), (k, n))
    add("bmm 8 of 8", 8 * 8**3, torch.bmm, (8, 8, 8), (8, 8, 8))
    add("bmm 4 of 16", 4 * 16**3, torch.bmm, (4, 16, 16), (4, 16, 16))
    add("bmm 64 of 4", 64 * 4**3, torch.bmm, (64, 4, 4), (64, 4, 4))
    add("mv 64", 64**2, torch.mv, (64, 64), (64,))
    add("mv 128", 128**2, torch.mv, (128, 128), (128,))
    add("mv 128, transposed", 128**2, lambda a, x: torch.mv(a.t(), x), (128, 128), (128,))
    add("dot 1024", 1024, torch.dot, (1024,), (1024,))
    add("dot 16384", 16384, torch.dot, (16384,), (16384,))
    add("conv1d 4 x 16", 4 * 4 * 3 * 16, lambda x, w: F.conv1d(x, w, padding=1), (1, 4, 16), (4, 4, 3))
    add("conv2d 3 x 4 x 4", 4 * 27 * 16, lambda x, w: F.conv2d(x, w, padding=1), (1, 3, 4, 4), (4, 3, 3, 3))
    add("conv2d 4 x 10 x 10", 4 * 36 * 100, lambda x, w: F.conv2d(x, w, padding=1), (1, 4, 10, 10), (4, 4, 3, 3))
    add("conv2d 4 x 12 x 12, valid", 4 * 36 * 100, F.conv2d, (1, 4, 12, 12), (4, 4, 3, 3))
    add("conv2d depthwise", 16 * 9 * 100, lambda x, w: F.conv2d(x, w, groups=16), (1, 16, 12, 12), (16, 1, 3, 3))
    add("conv2d 1 x 1", 16 * 16 * 64, F.conv2d, (1, 16, 8, 8), (16, 16, 1, 1))
    add("conv2d 4 x 6 x 6", 3 * 36 * 36, lambda x, w: F.conv2d(x, w, padding=1), (1, 4, 6, 6), (3, 4, 3, 3))
    add("conv_transpose2d, step 1", 4 * 4 * 9 * 49, F.conv_transpose2d, (1, 4, 5, 5), (4, 4, 3, 3))
    add("conv_transpose2d, step 1, larger", 4 * 4 * 9 * 100, F.conv_transpose2d, (1, 4, 8, 8), (4, 4, 3, 3))
    add(
        "conv_transpose1d, step 2",
        4 * 4 * 4 * 11,
        lambda x, w: F.conv_transpose1d(x, w, stride=2),
        (1, 4, 4),
        (4, 4, 4),
    )
    add(
        "conv_transpose2d, step 2",
        4 * 4 * 4 * 196,
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        (1, 4, 7, 7),
        (4, 4, 2, 2),
    )
    add("conv3d 2 x 5 x 5 x 5", 2 * 54 * 125, lambda x, w: F.conv3d(x, w, padding=1), (1, 2, 5, 5, 5), (2, 2, 3, 3, 3))
    return found


def seconds(call: Callable[..., Any], arguments: list[torch.Tensor], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call(*arguments)
    return time.perf_counter() - start


def measure(
    function: Callable[..., Any], arguments: list[torch.Tensor], rounds: int = 41, calls: int = 100
) -> dict[str, float]:
    """Microseconds of a call in loops and by the library (medians), how many times as fast loops are, and both errors against float64."""

    class Direct(torch.nn.Module):
        def forward(self, *given: torch.Tensor) -> Any:
            return function(*given)

    made = {}
    for name, most in (("loops", 1 << 40), ("library", 0)):
        made[name] = opforge.compile_fx(Direct(), arguments, options={"loop_products": most})  # type: ignore[arg-type]
        seconds(made[name], arguments, calls)
    taken: dict[str, list[float]] = {name: [] for name in made}
    for k in range(rounds):
        for name in ("loops", "library") if k % 2 else ("library", "loops"):
            taken[name].append(seconds(made[name], arguments, calls) / calls * 1e6)
    exact = function(*(a.double() for a in arguments))
    found = {name: statistics.median(t) for name, t in taken.items()}
    found["ratio"] = statistics.median(b / a for a, b in zip(taken["loops"], taken["library"], strict=True))
    for name, call in made.items():
        result = call(*arguments)
        result = result[0] if isinstance(result, (tuple, list)) else result
        found[f"{name}_error"] = float((result.double() - exact).abs().max())
    return found


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for small_products.json")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    options = parser.parse_args()
    table = Table("program", "multiply-adds", "loops (µs)", "library (µs)", "times as fast", "errors")
    rows = []
    torch.set_num_threads(1)
    with torch.no_grad():
        for name, steps, function, arguments in programs():
            if options.only in name:
                found = measure(function, arguments)
                rows.append({"program": name, "multiply_adds": steps, **found})
                errors = f"{found['loops_error']:.1e} {found['library_error']:.1e}"
                table.add_row(
                    name,
                    str(steps),
                    f"{found['loops']:.2f}",
                    f"{found['library']:.2f}",
                    f"{found['ratio']:.2f}",
                    errors,
                )
    Console(width=120).print(table)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "programs": rows}, indent=1)
        (options.out / "small_products.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
