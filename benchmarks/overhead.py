"""What one call of a compiled 8-element, three-operator graph costs beyond Dynamo's own guards, in inference and in training.

The floor is a backend that returns preallocated results (in training: an autograd function that does): whatever a compiled call costs above
it is the backend's.
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


class Preallocated(torch.autograd.Function):
    """Results and gradients that were made before."""

    result = torch.empty(8)
    gradient = torch.empty(8)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return Preallocated.result.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return Preallocated.gradient, Preallocated.gradient


def preallocated_training(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> backends.Fn:
    """A Dynamo backend whose result and gradients are made at compile time."""
    return lambda *args: (Preallocated.apply(*args),)


def measure(training: bool, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds a call, and above the floor, by backend."""
    x, y = torch.randn(8, requires_grad=training), torch.randn(8, requires_grad=training)
    seed = torch.ones(8)
    floor = preallocated_training if training else preallocated
    calls = {
        "floor": torch.compile(backends.own_entry(three_ops, f"floor_{training}"), backend=floor, dynamic=False),
        "eager": three_ops,
    }
    for name in ("inductor", "opforge"):
        try:
            backends.load(name)
            calls[name] = backends.compile_with(name, three_ops)
            torch.testing.assert_close(calls[name](x, y), three_ops(x, y))
        except (ImportError, RuntimeError) as error:
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            calls.pop(name, None)

    def step(f: backends.Fn) -> None:
        out = f(x, y)
        if training:
            torch.autograd.grad(out, (x, y), seed)

    samples = interleaved({n: partial(step, f) for n, f in calls.items()}, rounds, sample_s=0.005)
    micros = {name: statistics.median(s) * 1e6 for name, s in samples.items()}
    above = {
        name: statistics.median(a - b for a, b in zip(samples[name], samples["floor"], strict=True)) * 1e6
        for name in samples
        if name not in ("floor", "eager")
    }
    return micros, above


def main(
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 51,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result", dir_okay=False)] = None,
) -> None:
    """Print microseconds a call, and above the floor, in inference and in training."""
    torch.set_num_threads(2)
    result: dict[str, Any] = {"machine": report.machine(2), "command": report.command()}
    for what, training in (("inference", False), ("training", True)):
        torch._dynamo.reset()
        with torch.set_grad_enabled(training):
            micros, above = measure(training, rounds)
        print(f"{what}{' (forward and backward)' if training else ''}")
        for name, value in micros.items():
            extra = f", {above[name]:6.2f} us above the floor" if name in above else ""
            print(f"  {name:9s} {value:7.2f} us a call{extra}")
        if "opforge" in above and "inductor" in above:
            print(f"  opforge / inductor above the floor: {above['opforge'] / above['inductor']:.2f}")
        result[what] = {"us": micros, "us_above_floor": above}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
