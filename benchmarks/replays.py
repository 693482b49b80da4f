"""What the host does in a training step whose graphs are replayed (`mode="reduce-overhead"`), without a GPU: the recordings do nothing.

The floor is a backend whose autograd function returns a loss and gradients that were made before: Dynamo's guards and autograd's own work.

    python benchmarks/replays.py --out benchmarks/results/replays.json
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from opforge.runtime.targets.cpu import Cpu

import backends
import report
from programs.gpu_models import PROGRAMS, ClassLoss, ResNet

Step = Callable[[], None]


class Idle:
    """A recorder whose replays do nothing: results keep what the recorded call gave them."""

    def place(self) -> Hashable:
        return "nowhere"

    def shares(self) -> bool:
        return True

    def memory(self) -> object:
        return object()

    def record(
        self, call: Callable[[list[Any]], Sequence[Any]], inputs: list[Any], memory: object, shared: bool
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        return (lambda: None), call(inputs)


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ResNet-50 of an eighth of the channels, on small images: as many parameters, statistics and kept values as the real one."""
    model = ClassLoss(ResNet(first=8)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, (torch.randn(2, 3, 32, 32), torch.randint(0, 1000, (2,)))


def transformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The blocks of the benchmark's small GPT-2."""
    model, inputs = PROGRAMS["gpt2_train"].make(torch.device("cpu"), True)
    assert isinstance(model, nn.Module)
    return model, inputs


def floor(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> backends.Fn:
    """A Dynamo backend whose loss and gradients are made at compile time."""
    wanted = [isinstance(x, Tensor) and x.requires_grad for x in example_inputs]
    grads = [torch.zeros(x.shape) if w else None for x, w in zip(example_inputs, wanted, strict=True)]
    loss = torch.zeros(())

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            return loss.detach()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            return tuple(None if t is None else t.detach() for t in grads)

    return lambda *args: (Made.apply(*args),)


def step_of(make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], backend: Any, **more: Any) -> tuple[Step, int]:
    """A compiled training step that was warmed up, and its number of parameters."""
    torch.manual_seed(0)
    model, inputs = make()
    parameters = list(model.train().parameters())
    compiled = torch.compile(backends.own_entry(model, f"{make.__name__}_{len(more)}"), backend=backend, **more)

    def step() -> None:
        compiled(*inputs).backward()
        for q in parameters:
            q.grad = None

    for _ in range(6):
        step()
    return step, len(parameters)


def cpu_us(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Microseconds of this thread's own time a step, as medians of interleaved runs: others on the machine count little."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.thread_time()
            step()
            found[name].append((time.thread_time() - start) * 1e6)
    return {name: statistics.median(some) for name, some in found.items()}


def main(
    out: Annotated[Path | None, typer.Option(help="file for the result")] = None,
    rounds: Annotated[int, typer.Option(help="steps of each")] = 300,
) -> None:
    """The host's time in steps of recorded graphs."""
    torch.set_num_threads(1)  # what is measured is this thread's time
    backends.load("opforge")
    Cpu.recorder = lambda self: Idle()  # type: ignore[method-assign,assignment,return-value]
    rows = []
    for make in (resnet, transformer):
        replayed, parameters = step_of(make, "opforge", options={"cudagraphs": True, "strict": True})
        bare, _ = step_of(make, floor)
        us = cpu_us({"opforge": replayed, "floor": bare}, rounds)
        rows.append({"program": make.__name__, "parameters": parameters, "us": us})
        print(f"{make.__name__}: {parameters} parameters, {us['opforge']:.0f} µs a step, floor {us['floor']:.0f} µs")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": report.machine(1), "command": report.command(), "programs": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
