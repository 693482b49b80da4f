"""What one call of a compiled 8-element, three-operator graph costs beyond Dynamo's own guards.

The floor is a backend that returns a preallocated output: whatever a compiled call costs above it is the backend's.
"""

import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import backends
import report
from measure import interleaved


def three_ops(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + y) * 2.0


def preallocated(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> backends.Fn:
    """A Dynamo backend whose code returns an output made at compile time."""
    outputs = (torch.empty(8),)
    return lambda *args: outputs


def main(
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 51,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result")] = None,
) -> None:
    """Print microseconds a call, and above the floor."""
    torch.set_num_threads(2)
    x, y = torch.randn(8), torch.randn(8)
    calls = {
        "floor": torch.compile(backends.own_entry(three_ops, "floor"), backend=preallocated, dynamic=False),
        "eager": three_ops,
    }
    for name in ("inductor", "opforge"):
        try:
            backends.load(name)
            calls[name] = backends.compile_with(name, three_ops)
            with torch.no_grad():
                torch.testing.assert_close(calls[name](x, y), three_ops(x, y))
        except (ImportError, RuntimeError) as error:
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            calls.pop(name, None)
    with torch.no_grad():
        samples = interleaved({n: partial(f, x, y) for n, f in calls.items()}, rounds, sample_s=0.005)
    micros = {name: statistics.median(s) * 1e6 for name, s in samples.items()}
    above = {
        name: statistics.median(a - b for a, b in zip(samples[name], samples["floor"], strict=True)) * 1e6
        for name in samples
        if name not in ("floor", "eager")
    }
    for name, value in micros.items():
        print(
            f"{name:9s} {value:7.2f} us a call" + (f", {above[name]:6.2f} us above the floor" if name in above else "")
        )
    if "opforge" in above and "inductor" in above:
        print(f"opforge / inductor above the floor: {above['opforge'] / above['inductor']:.2f}")
    if out is not None:
        result = {"machine": report.machine(2), "us": micros, "us_above_floor": above}
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
