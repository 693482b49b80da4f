"""Times the compilation of Triton kernels with nothing in any cache: in worker processes, and one after the other in one process. Needs no GPU.

    python benchmarks/triton_compile.py               16 kernels of the memory-bound programs, for sm_90
    python benchmarks/triton_compile.py --kernels 2   as many as that

Each way runs in a fresh process; the time of the workers includes their start. (Torch has loaded Triton in the other.)
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

from opforge.errors import BuildError, UnsupportedError
from opforge.runtime.build.triton_pool import compile_kernels
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.work import cost
from opforge.runtime.kernels.calls import has_out
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.render.triton_unit import TritonKernel, render_triton
from opforge.runtime.schedule.draft import Options
from opforge.runtime.schedule.pipeline import schedule
from opforge.runtime.targets.cuda import job_of

from programs.memory_bound import BOUND, BoundProgram

CAPABILITY = 90
WAYS = ("workers", "serial")


def kernels_of(program: BoundProgram) -> list[TritonKernel]:
    """The program's kernels as for a GPU. Its inputs have sizes and no contents."""
    shapes = [make(torch.device("meta")) for make in program.inputs]
    inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in shapes]
    with torch.no_grad():
        lowered = lower(trace(torch.fx.symbolic_trace(program.fn), inputs).graph)
    return list(
        render_triton(
            schedule(separate_outputs(lowered.program), Options(costs=cost, out_variants=has_out))
        ).kernels.values()
    )


def some_kernels(count: int) -> list[TritonKernel]:
    """The first `count` kernels of all programs, those left out that cannot be traced without Dynamo or said in Triton."""
    found: list[TritonKernel] = []
    for program in BOUND.values():
        try:
            found += kernels_of(program)
        except (UnsupportedError, RuntimeError, TypeError) as error:
            print(f"{program.name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        if len(found) >= count:
            break
    return found[:count]


def one_way(way: str, count: int) -> dict[str, Any]:
    """Seconds in this process."""
    kernels = some_kernels(count)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cfg = Config(cache_dir=folder)
        if way == "serial":
            sys.executable = ""  # no process can be started
        made = compile_kernels([job_of(k, CAPABILITY) for k in kernels], cfg)
        seconds = time.perf_counter() - start
    if failed := [str(m).splitlines()[0] for m in made if isinstance(m, BuildError)]:
        raise SystemExit("\n".join(failed))
    return {"way": way, "kernels": len(kernels), "seconds": round(seconds, 3)}


def main(
    kernels: Annotated[int, typer.Option(help="How many.")] = 16,
    way: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print one JSON line for each way."""
    if way:
        print(json.dumps(one_way(way, kernels)))
        return
    for name in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            command = ["env", f"TRITON_CACHE_DIR={folder}", sys.executable, __file__, "--kernels", str(kernels)]
            subprocess.run([*command, "--way", name], check=True)


if __name__ == "__main__":
    typer.run(main)
