"""Steps that differentiate a gradient, beside eager: other compilers refuse `create_graph=True` through a compiled graph.

    python benchmarks/second_order.py                  on the processor
    python benchmarks/second_order.py --device cuda    on a GPU, with larger sizes

`forces`   energies of atoms: their gradient is a prediction, and the loss of it trains the weights
`dynamics` the same gradient alone, as a simulation asks for it: no weight needs one
`equation` a network whose first and second derivative by its input stand in the loss
`penalty`  a critic of images whose gradient is kept near a length of one

Writes benchmarks/results/second_order.json (second_order_cuda.json); times are medians of interleaved rounds, values are compared with eager's.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
console = Console()
Step = Callable[[], list[torch.Tensor]]


class Energy(torch.nn.Module):
    """Energies of atoms by their distances: radial functions, a network for each pair, a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.centres = torch.nn.Buffer(torch.linspace(0.5, 5, 16))
        layers: list[torch.nn.Module] = []
        for k in range(3):
            layers += [torch.nn.Linear(16 if k == 0 else width, width), torch.nn.SiLU()]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        between = places[:, :, None] - places[:, None]
        near = torch.eye(places.shape[1], dtype=torch.bool, device=places.device)
        length = between.square().sum(-1).masked_fill(near, 1.0).sqrt()
        radial = (-4 * (length[..., None] - self.centres).square()).exp() * (
            1 + (length.clamp(max=5) / 5 * 3.14159).cos()
        )[..., None]
        return self.net(radial).squeeze(-1).masked_fill(near, 0.0).sum((1, 2))


def _forces(size: int, device: str, compiled: Callable[..., Any]) -> Step:
    torch.manual_seed(0)
    model = Energy(8 * size).to(device)
    energy = compiled(model)
    places, wanted = torch.randn(4, size, 3, device=device).mul_(3), torch.randn(4, size, 3, device=device)

    def step() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        x = places.detach().requires_grad_()
        e = energy(x)
        (g,) = torch.autograd.grad(e.sum(), x, create_graph=True)
        ((g + wanted).square().mean() + e.square().mean()).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    return step


def _dynamics(size: int, device: str, compiled: Callable[..., Any]) -> Step:
    torch.manual_seed(0)
    energy = compiled(Energy(8 * size).to(device))
    places = torch.randn(4, size, 3, device=device).mul_(3)

    def step() -> list[torch.Tensor]:
        x = places.detach().requires_grad_()
        return [*torch.autograd.grad(energy(x).sum(), x)]

    return step


def _equation(size: int, device: str, compiled: Callable[..., Any]) -> Step:
    torch.manual_seed(0)
    width = 4 * size
    layers: list[torch.nn.Module] = [torch.nn.Linear(1, width), torch.nn.Tanh()]
    for _ in range(3):
        layers += [torch.nn.Linear(width, width), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1)).to(device)
    network, x = compiled(model), torch.linspace(0, 1, 64 * size, device=device)[:, None].requires_grad_()

    def step() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        u = network(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (first - u.sin()).square().mean().backward(inputs=list(model.parameters()))
        return [p.grad for p in model.parameters() if p.grad is not None]

    return step


def _penalty(size: int, device: str, compiled: Callable[..., Any]) -> Step:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, size, 3, 2, 1),
        torch.nn.LeakyReLU(0.2),
        torch.nn.Conv2d(size, 2 * size, 3, 2, 1),
        torch.nn.LeakyReLU(0.2),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * size * 64, 1),
    ).to(device)
    critic, images = compiled(model), torch.randn(16, 3, 32, 32, device=device)

    def step() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        x = images.detach().requires_grad_()
        (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        (g.flatten(1).norm(dim=1) - 1).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    return step


STEPS = {"forces": _forces, "dynamics": _dynamics, "equation": _equation, "penalty": _penalty}


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    size: Annotated[int, typer.Option(help="0: 16 on a processor, 64 on a GPU")] = 0,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved steps")] = 30,
    out: Annotated[Path, typer.Option(help="folder of the results")] = RESULTS,
) -> None:
    """Time of a step, eager and compiled by opforge."""
    size = size or (64 if device == "cuda" else 16)
    found: dict[str, dict[str, float]] = {}
    for name, make in STEPS.items():
        torch._dynamo.reset()
        ways = {
            "eager": make(size, device, lambda f: f),
            "opforge": make(size, device, lambda f: torch.compile(f, backend="opforge")),
        }
        wanted = ways["eager"]()
        for _ in range(3):
            for have, want in zip(ways["opforge"](), wanted, strict=True):
                torch.testing.assert_close(have, want, rtol=2e-3, atol=2e-4 * float(want.abs().max()) + 1e-6)
        found[name] = _medians(ways, device, rounds, name)
    table = Table("step", "eager ms", "opforge ms", "opforge's speed over eager's")
    for name, row in found.items():
        row["speed"] = row["eager"] / row["opforge"]
        table.add_row(name, f"{1e3 * row['eager']:.2f}", f"{1e3 * row['opforge']:.2f}", f"{row['speed']:.2f}")
    console.print(table)
    about = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "size": size,
    }
    file = out / ("second_order.json" if device == "cpu" else f"second_order_{device}.json")
    file.write_text(json.dumps(about | {"found": found}, indent=1) + "\n")


def _medians(ways: dict[str, Step], device: str, rounds: int, name: str) -> dict[str, float]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in track(range(rounds), name, console=console):
        for way, step in ways.items():
            start = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            times[way].append(time.perf_counter() - start)
    return {way: statistics.median(some) for way, some in times.items()}


if __name__ == "__main__":
    typer.run(main)
