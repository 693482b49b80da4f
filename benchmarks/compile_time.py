"""Times how compilation grows with the length of a program: each program at n and 2n, split into Dynamo's own time and opforge's stages.

    python benchmarks/compile_time.py                 all programs, three rounds
    python benchmarks/compile_time.py --quick         half the sizes, one round
    python benchmarks/compile_time.py --only gru,lstm

Every measurement is a fresh process with an empty cache. Dynamo's own time is that of the backend "eager" on the same program. Times are seconds
of processor time, of the process and of the compilers that it starts, so that other work on the machine does not count. The median over the rounds
stands in the table. Ends with 1 where a program takes more than `LIMIT` times Dynamo's time, or twice the length more than `GROWTH` times as long.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import report

HERE = Path(__file__).parent
LIMIT = 4.0
GROWTH = 2.3

Fn = Callable[..., Any]


@dataclass(frozen=True)
class Long:
    """A program of any length. `make` takes the length and returns a function and its arguments; `train` asks for the gradient of the result."""

    what: str
    length: int
    train: bool
    dynamic: bool | None
    make: Callable[[int], tuple[Fn, tuple[Any, ...]]]


PROGRAMS: dict[str, Long] = {}


def program(name: str, what: str, length: int, *, train: bool = False, dynamic: bool | None = None) -> Fn:
    """Put the function below it into `PROGRAMS`."""

    def put(make: Any) -> Any:
        PROGRAMS[name] = Long(what, length, train, dynamic, make)
        return make

    return put


@program("gru", "a GRUCell that is unrolled, forward and backward; steps", 75, train=True)
def _gru(steps: int) -> tuple[Fn, tuple[Any, ...]]:
    cell = nn.GRUCell(16, 16)

    def unrolled(x: Tensor, h: Tensor) -> Tensor:
        for k in range(steps):
            h = cell(x[k], h)
        return h.sum()

    return unrolled, (torch.randn(steps, 4, 16), torch.zeros(4, 16))


@program("lstm", "an LSTMCell that is unrolled, forward and backward; steps", 75, train=True)
def _lstm(steps: int) -> tuple[Fn, tuple[Any, ...]]:
    cell = nn.LSTMCell(16, 16)

    def unrolled(x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        for k in range(steps):
            h, c = cell(x[k], (h, c))
        return h.sum()

    return unrolled, (torch.randn(steps, 4, 16), torch.zeros(4, 16), torch.zeros(4, 16))


@program("foreach", "tensors of symbolic sizes through `_foreach` operators, concatenated; tensors", 40, dynamic=True)
def _foreach(count: int) -> tuple[Fn, tuple[Any, ...]]:
    def joined(a: list[Tensor], b: list[Tensor]) -> Tensor:
        return torch.cat([x.reshape(-1) for x in torch._foreach_mul(torch._foreach_add(a, b, alpha=0.5), 3.0)])

    first, second = ([torch.ones(3 + k, 200 + 2 * k) for k in range(count)] for _ in range(2))
    return joined, (first, second)


class _DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        width = 4 * growth
        self.layers = nn.Sequential(
            *(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, width, 1, bias=False)),
            *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1, bias=False)),
        )

    def forward(self, maps: list[Tensor]) -> Tensor:
        return self.layers(torch.cat(maps, 1))  # type: ignore[no-any-return]


class _DenseBlock(nn.Module):
    def __init__(self, channels: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DenseLayer(channels + k * growth, growth) for k in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for layer in self.layers:
            maps.append(layer(maps))
        return torch.cat(maps, 1)


def _dense_net(layers: int) -> nn.Module:
    """DenseNet (Huang et al. 2017) with `layers` dense layers in four blocks, as DenseNet-121 divides its 58; narrow, as only compiling counts."""
    growth, channels = 8, 16
    parts: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    for k, share in enumerate((6, 12, 24, 16)):
        count = round(share * layers / 58)
        parts.append(_DenseBlock(channels, count, growth))
        channels += count * growth
        if k < 3:
            parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
            parts.append(nn.AvgPool2d(2, 2))
            channels //= 2
    parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*parts)


@program("densenet", "DenseNet-121's blocks with symbolic sizes, inference; dense layers", 29, dynamic=True)
def _densenet(layers: int) -> tuple[Fn, tuple[Any, ...]]:
    return _dense_net(layers).eval().forward, (torch.randn(2, 3, 64, 72),)


@program("densenet training", "the same, forward and backward; dense layers", 29, train=True, dynamic=True)
def _densenet_training(layers: int) -> tuple[Fn, tuple[Any, ...]]:
    return _dense_net(layers).train().forward, (torch.randn(2, 3, 64, 72),)


def processor_seconds() -> float:
    """Processor time of this process and of the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Stages:
    """Processor seconds of each stage of opforge, without those of stages inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    def install(self) -> None:
        """Time the stages of all graphs that are compiled from now on."""
        from opforge.runtime.observe.watch import Watch

        stages = self

        @contextmanager
        def stage(watch: Watch, name: str) -> Iterator[None]:
            start = processor_seconds()
            stages._inside.append(0.0)
            try:
                yield
            finally:
                spent = processor_seconds() - start
                stages.seconds[name] = stages.seconds.get(name, 0.0) + spent - stages._inside.pop()
                if stages._inside:
                    stages._inside[-1] += spent

        Watch.stage = stage  # type: ignore[method-assign, assignment]


def measure(name: str, length: int, backend: str) -> dict[str, Any]:
    """Compile and run one program in this process; seconds in all and by stage."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = PROGRAMS[name]
    stages = Stages()
    if backend == "opforge":
        stages.install()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))  # what is loaded once does not count
    stages.seconds.clear()
    fn, args = chosen.make(length)
    start = processor_seconds()
    with torch.set_grad_enabled(chosen.train):
        out = torch.compile(fn, backend=backend, dynamic=chosen.dynamic)(*args)
    if chosen.train:
        out.sum().backward()
    row: dict[str, Any] = {"seconds": processor_seconds() - start, "stages": stages.seconds}
    if backend == "opforge":
        import opforge

        row["fallbacks"] = sum(opforge.stats()["fallbacks"].values())
    return row


def fresh(name: str, length: int, backend: str) -> dict[str, Any]:
    """`measure` in a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as folder:
        command = [sys.executable, __file__, "--measure", name, str(length), backend]
        ran = subprocess.run(
            command, env={**os.environ, "OPFORGE_CACHE_DIR": folder}, capture_output=True, text=True, check=False
        )
    if ran.returncode:
        raise RuntimeError(f"{name} of length {length} by {backend}: {ran.stderr[-400:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The round with the median time, with its stages."""
    return sorted(rows, key=lambda row: float(row["seconds"]))[len(rows) // 2]


def row_of(name: str, lengths: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Both lengths by both backends, in turns."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for r in range(rounds):
        for length in lengths:
            for backend in ("eager", "opforge"):
                print(f"\r{name}: round {r + 1} of {rounds}, length {length}, {backend}      ", end="", file=sys.stderr)
                found.setdefault((length, backend), []).append(fresh(name, length, backend))
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    short, long = lengths
    ours = {n: median(found[n, "opforge"]) for n in lengths}
    dynamo = {n: statistics.median(r["seconds"] for r in found[n, "eager"]) for n in lengths}
    return {
        "name": name,
        "what": PROGRAMS[name].what,
        "lengths": list(lengths),
        "dynamo_s": [dynamo[short], dynamo[long]],
        "opforge_s": [ours[short]["seconds"], ours[long]["seconds"]],
        "stages_s": [ours[short]["stages"], ours[long]["stages"]],
        "of_dynamo": ours[long]["seconds"] / dynamo[long],
        "growth": ours[long]["seconds"] / ours[short]["seconds"],
        "fallbacks": ours[long]["fallbacks"],
    }


def markdown(result: Mapping[str, Any]) -> str:
    """The table of programs, and one of stages."""
    head = ["program", "length", "Dynamo's own s", "opforge s (with Dynamo's)", "of Dynamo's", "twice the length"]
    lines = [*report.heading(result), f"| {' | '.join(head)} |", "|---|---|---:|---:|---:|---:|"]
    for row in result["programs"]:
        pairs = (" → ".join(f"{s:.2f}" for s in row[key]) for key in ("dynamo_s", "opforge_s"))
        lengths = " → ".join(map(str, row["lengths"]))
        cells = [row["name"], lengths, *pairs, f"{row['of_dynamo']:.2f}", f"{row['growth']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Processor seconds by stage, at the shorter and the longer length:", ""]
    stages = sorted({stage for row in result["programs"] for stage in row["stages_s"][1]})
    lines += [f"| program | {' | '.join(stages)} |", "|---|" + "---:|" * len(stages)]
    for row in result["programs"]:
        cells = [" → ".join(f"{part.get(stage, 0.0):.2f}" for part in row["stages_s"]) for stage in stages]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    what = [f"- {row['name']}: {row['what']}" for row in result["programs"]]
    return "\n".join([*lines, "", *what, ""])


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    quick: Annotated[bool, typer.Option(help="half the lengths, one round; writes no results")] = False,
    rounds: Annotated[int, typer.Option(help="measurements of each, of which the median counts")] = 3,
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
    measured: Annotated[tuple[str, int, str] | None, typer.Option("--measure", hidden=True)] = None,
) -> None:
    """Compile time of long programs, as a table."""
    if measured is not None:
        print(json.dumps(measure(*measured)))
        return
    result: dict[str, Any] = {"machine": report.machine(1), "command": report.command(), "programs": []}
    for name, chosen in PROGRAMS.items():
        if only is not None and not any(part.strip() in name for part in only.split(",")):
            continue
        length = chosen.length // 2 if quick else chosen.length
        row = row_of(name, (length, 2 * length), 1 if quick else rounds)
        result["programs"].append(row)
        print(f"{name:18s} {row['of_dynamo']:5.2f} of Dynamo's, twice the length {row['growth']:.2f}", flush=True)
    text = markdown(result)
    if only is None and not quick:
        report.write(result, text, out, "compile_time")
    print(text)
    bad = [r["name"] for r in result["programs"] if r["of_dynamo"] > LIMIT or r["growth"] > GROWTH or r["fallbacks"]]
    if bad:
        print(
            f"over {LIMIT:g} times Dynamo's time, over {GROWTH:g} for twice the length, or not compiled: {', '.join(bad)}"
        )
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
