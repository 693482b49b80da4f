"""Compiled autograd: how long a capture takes, and steps of training with and without it.

    python benchmarks/compiled_autograd.py capture   a transformer of 12 layers: until the graph goes to its compiler, beside torch's own capture
    python benchmarks/compiled_autograd.py steps     forward and backward with 0, 3 and 10 graph breaks: opforge without and with its capture,
                                                     Inductor with torch's

Both write benchmarks/results/compiled_autograd.json; times are medians of interleaved rounds, and gradients are compared with eager's.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch._dynamo import compiled_autograd as torch_capture

from opforge import compiled_autograd

RESULTS = Path(__file__).resolve().parent / "results" / "compiled_autograd.json"
app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True, rich_markup_mode=None)
console = Console()
Enable = Callable[..., AbstractContextManager[None]]


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(torch.nn.Module):
    """`breaks` of its layers end a graph."""

    def __init__(self, layers: int, width: int, breaks: int = 0) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 1000)
        self.breaks = breaks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for k, block in enumerate(self.blocks):
            x = block(x)
            if k < self.breaks:
                torch._dynamo.graph_break()
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def write(part: str, found: object) -> None:
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[part] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "found": found}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


@app.command()
def capture(rounds: Annotated[int, typer.Option(help="rounds, beside the first")] = 5) -> None:
    """Time from the call of `backward()` until the captured graph goes to its compiler."""
    torch.manual_seed(0)
    model, tokens = Transformer(12, 64), torch.randint(0, 1000, (2, 16))
    engines: dict[str, Enable] = {"opforge": compiled_autograd.enable, "torch": torch_capture._enable}

    def seconds(enable: Enable, dynamic: bool) -> float:
        compiled_autograd.reset()
        model.zero_grad()
        loss, ended = model(tokens), list[float]()

        def keep(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
            ended.append(time.perf_counter())
            return graph

        start = time.perf_counter()
        with enable(keep, dynamic):
            loss.backward()
        return ended[0] - start

    times: dict[str, list[float]] = {}
    for _ in track(range(rounds + 1), "capture", console=console):
        for dynamic in (True, False):
            for name, enable in engines.items():
                times.setdefault(f"{name} {'dynamic' if dynamic else 'static'}", []).append(seconds(enable, dynamic))
    found = {name: statistics.median(some[1:]) for name, some in times.items()}
    ratios = {kind: found[f"opforge {kind}"] / found[f"torch {kind}"] for kind in ("dynamic", "static")}
    table = Table("sizes", "opforge ms", "torch ms", "opforge / torch")
    for kind, ratio in ratios.items():
        table.add_row(kind, *(f"{1e3 * found[f'{name} {kind}']:.0f}" for name in engines), f"{ratio:.2f}")
    console.print(table)
    write("capture", {"seconds": found, "ratios": ratios})


@app.command()
def steps(
    rounds: Annotated[int, typer.Option(help="rounds of interleaved steps")] = 30,
    layers: Annotated[int, typer.Option(help="layers of the model, at least as many as breaks")] = 10,
) -> None:
    """Time of a forward and a backward."""
    rows: list[dict[str, Any]] = []
    for breaks in (0, 3, 10):
        rows.append({"breaks": breaks} | _steps(breaks, rounds, layers))
    table = Table(
        "graph breaks", *(f"{name} ms" for name in WAYS), "captured / opforge", "captured / Inductor's captured"
    )
    for row in rows:
        row["faster than opforge"] = row["opforge"] / row["captured"]
        row["faster than inductor captured"] = row["inductor captured"] / row["captured"]
        ratios = (f"{row[name]:.2f}" for name in ("faster than opforge", "faster than inductor captured"))
        table.add_row(str(row["breaks"]), *(f"{1e3 * row[name]:.1f}" for name in WAYS), *ratios)
    console.print(table, "Ratios of speeds; above 1 the captured backward of opforge is faster.")
    write("steps", rows)


WAYS: dict[str, tuple[str, Enable | None]] = {
    "eager": ("", None),
    "opforge": ("opforge", None),
    "captured": ("opforge", compiled_autograd.enable),
    "inductor": ("inductor", None),
    "inductor captured": ("inductor", torch_capture._enable),
}


def _step(model: torch.nn.Module, forward: Any, tokens: torch.Tensor, block: Any) -> None:
    model.zero_grad(set_to_none=True)
    loss = forward(tokens)
    with block():
        loss.backward()


def _steps(breaks: int, rounds: int, layers: int) -> dict[str, float]:
    """Seconds of a step in each way."""
    torch._dynamo.reset()
    compiled_autograd.reset()
    torch.manual_seed(0)
    model, tokens = Transformer(layers, 64, breaks), torch.randint(0, 1000, (4, 32))
    runs: dict[str, Callable[[], None]] = {}
    for name, (backend, enable) in WAYS.items():
        forward = torch.compile(model, backend=backend) if backend else model
        compile = torch.compile(backend=backend)
        runs[name] = partial(_step, model, forward, tokens, partial(enable, compile) if enable else nullcontext)
    wanted: list[torch.Tensor] = []
    for name in track(runs, f"compile, {breaks} breaks", console=console):
        for _ in range(3):
            runs[name]()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        wanted = wanted or gradients
        for have, want in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in runs:
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(some) for name, some in times.items()}


if __name__ == "__main__":
    app()
