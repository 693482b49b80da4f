"""Times the Python side of a kernel's launch on a GPU, with a C function that does nothing in the driver's place. Needs no GPU.

    python benchmarks/launch.py

The least time of many short runs, in µs: the call of the launcher with its numbers, and of the addresses of as many tensors.
"""

import ctypes
import json
import timeit
from types import SimpleNamespace
from typing import Any

import torch
import typer

from opforge.runtime.build.compiler import compile_cpp
from opforge.runtime.config import Config
from opforge.runtime.execute import launch

NOTHING = 'extern "C" __attribute__((visibility("default"))) int nothing(void*, void*, void*, void*) { return 0; }\n'
CALLS, RUNS = 1000, 100


def microseconds(statement: str, names: dict[str, Any]) -> float:
    """Of one execution."""
    return round(min(timeit.repeat(statement, globals=names, number=CALLS, repeat=RUNS)) / CALLS * 1e6, 3)


def main() -> None:
    """Print one JSON line for each number of pointers."""
    nothing = ctypes.CDLL(str(compile_cpp(NOTHING, name="nothing", cfg=Config()))).nothing
    nothing.argtypes = [ctypes.c_void_p] * 4
    launch.driver = lambda: SimpleNamespace(cuLaunchKernelEx=nothing)  # type: ignore[assignment]
    if not torch.cuda.is_available():
        launch.cuda_stream = lambda device: 0  # type: ignore[assignment]
    for count in (2, 4, 8, 16):
        run = launch.launcher((1, 0, 128), lambda: (1, 0, 128), "k", count, 0, 0)
        tensors = {f"t{k}": torch.empty(4) for k in range(count)}
        addresses = {f"a{k}": (1 << 40) + 4096 * k for k in range(count)}
        calls = ", ".join(f"{t}.data_ptr()" for t in tensors)
        line = {
            "pointers": count,
            "launch": microseconds(f"run(7, {', '.join(addresses)})", {"run": run, **addresses}),
            "addresses": microseconds(calls, dict(tensors)),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    typer.run(main)
