"""Times the dispatch stage of a training graph (trace, metadata, joint graph, partition) against torch's own AOT stage on the same graphs.

Both get the graph that Dynamo gives a backend, and compile nothing afterwards.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from functorch.compile import (  # type: ignore[import-untyped]
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch._dynamo.backends.common import aot_autograd

sys.path.insert(0, str(Path(__file__).parent))

import backends
import report
from measure import geomean
from programs.training import TRAINING


def nothing(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
    """A compiler that runs the graph as it is."""
    return make_boxed_func(gm.forward)


def torch_stage(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Torch's AOT stage with its default partitioner for compilers."""
    return aot_autograd(fw_compiler=nothing, bw_compiler=nothing, partition_fn=min_cut_rematerialization_partition)(
        gm, example_inputs
    )


def opforge_stage(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Opforge's dispatch: the same graphs, interpreted."""
    from opforge.runtime.backward.function import bind_function
    from opforge.runtime.backward.variants import Variants, interpreted
    from opforge.runtime.dispatch.trace import trace
    from opforge.runtime.dispatch.wrapper.source import bind
    from opforge.runtime.training import split

    traced = trace(gm, example_inputs, training=True)
    parts = split(traced)
    return bind(traced, bind_function(parts.backward, parts.forward, Variants(parts.backward, interpreted)))


def seconds(program: str, stage: Any) -> float:
    """Time inside the backend while one training program is compiled."""
    torch._dynamo.reset()
    spent = [0.0]

    def timed(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        start = time.perf_counter()
        try:
            return stage(gm, example_inputs)
        finally:
            spent[0] += time.perf_counter() - start

    torch.manual_seed(0)
    model = TRAINING[program].make().train()
    batch = TRAINING[program].batch(torch.Generator().manual_seed(1))
    torch.compile(model, backend=timed, dynamic=False)(*batch).backward()
    return spent[0]


def main(
    rounds: Annotated[int, typer.Option(help="rounds; the first, which imports, is not counted")] = 4,
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result", dir_okay=False)] = None,
) -> None:
    """Print seconds of both stages and their ratio."""
    backends.load("opforge")
    wanted = [w.strip() for w in (only or "").split(",") if w.strip()]
    rows = {}
    for program in (p for p in TRAINING if not wanted or any(w in p for w in wanted)):
        found: dict[str, list[float]] = {"torch": [], "opforge": []}
        for r in range(rounds):
            for name, stage in (("torch", torch_stage), ("opforge", opforge_stage)):
                s = seconds(program, stage)
                if r:
                    found[name].append(s)
        mine, theirs = (statistics.median(found[n]) for n in ("opforge", "torch"))
        rows[program] = {"torch_s": theirs, "opforge_s": mine, "ratio": mine / theirs}
        print(f"{program:12s} torch {theirs:6.3f} s  opforge {mine:6.3f} s  ratio {mine / theirs:.2f}", flush=True)
    total = geomean([r["ratio"] for r in rows.values()])
    print(f"geomean {total:.3f}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": report.machine(2), "command": report.command(), "programs": rows, "geomean": total}
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
