"""Times training steps under eager, Inductor and opforge, interleaved in one process, and compares their loss curves.

    python benchmarks/train.py                 everything
    python benchmarks/train.py --only gpt2     the programs whose name contains "gpt2"

A step is forward, backward, clipping and the optimizer (compiled too). Curves are compared with eager's in float64 where that makes sense.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from compared import chosen
from memory import allocation_peak

import backends
import report
from measure import geomean, interleaved, median_ratio, peak_rss_mb, reset_peak
from programs.training import TRAINING, TrainProgram

console = Console(stderr=True)
HERE = Path(__file__).parent


class Trainer:
    """One program under one backend: `step()` trains one step and returns the loss."""

    def __init__(self, program: TrainProgram, backend: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.program, self.dtype = program, dtype
        self.model = program.make().train().to(dtype)
        self.loss: Callable[..., Tensor] = backends.compile_with(backend, self.model)
        self.generator = torch.Generator().manual_seed(1)
        self.update: Callable[[], Any] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if program.optimizer is not None:
            self.optimizer = program.optimizer(self.model.parameters())
            self.update = backends.compile_with(backend, self.optimizer.step)

    def step(self) -> float:
        """Forward and backward of `accumulate` batches, then the optimizer."""
        total = 0.0
        for _ in range(self.program.accumulate):
            batch = [t.to(self.dtype) if t.is_floating_point() else t for t in self.program.batch(self.generator)]
            loss = self.loss(*batch) / self.program.accumulate
            loss.backward()
            total += float(loss.detach())
        if self.program.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.program.clip)
        if self.update is not None:
            self.update()
        for p in self.model.parameters():
            p.grad = None
        return total

    def state(self) -> Iterator[Tensor]:
        """The optimizer's tensors, as far as there are any yet."""
        for values in self.optimizer.state.values() if self.optimizer is not None else ():
            yield from (v for v in values.values() if isinstance(v, Tensor))


def curve_error(curve: list[float], reference: list[float]) -> float:
    """The largest relative difference of two loss curves."""
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(curve, reference, strict=True))


def run_program(program: TrainProgram, names: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Loss curves over `steps`, then times, under every backend in `names`."""
    torch._dynamo.reset()
    reference = Trainer(program, "eager", torch.float64)
    exact = [reference.step() for _ in range(steps)]
    state = {k: v for k, v in reference.model.state_dict().items() if "running" in k}
    del reference
    row: dict[str, Any] = {
        "name": program.name,
        "shape": program.shape,
        "failed": {},
        "curve_error": {},
        "buffer_error": {},
    }
    trainers: dict[str, Trainer] = {}
    for name in names:
        try:
            trainer = Trainer(program, name)
            curve = [trainer.step() for _ in range(steps)]
        except Exception as error:
            if name == "eager":
                raise
            row["failed"][name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
            continue
        row["curve_error"][name] = curve_error(curve, exact)
        mine = trainer.model.state_dict()
        row["buffer_error"][name] = max(
            (float((mine[k].double() - v.double()).abs().max()) for k, v in state.items()), default=0.0
        )
        row.setdefault("last_loss", {})[name] = curve[-1]
        trainers[name] = trainer
    row["counts"] = {name: backends.counts(name) for name in trainers}
    gc.collect()
    samples = interleaved({name: t.step for name, t in trainers.items()}, rounds)
    row["ms"] = {name: median_ratio(s, [1e-3] * len(s)) for name, s in samples.items()}
    row["speed"] = {
        f"{mine}/{other}": median_ratio(samples[other], samples[mine])
        for mine in samples
        for other in samples
        if mine != other and mine != "eager"
    }
    return row


def memory(program: str, backend: str) -> dict[str, Any]:
    """Peak resident memory (MB) of ten steps after compilation, in a fresh process; and what torch's allocator hands out at most in one."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory-of", program, "--backend", backend],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_memory(program: str, backend: str) -> None:
    """Print what `memory` reads."""
    if backend != "eager":
        backends.load(backend)
    trainer = Trainer(TRAINING[program], backend)
    for _ in range(2):
        trainer.step()
    gc.collect()
    start = peak_rss_mb()
    reset_peak()
    for _ in range(10):
        trainer.step()
    resident = peak_rss_mb()
    del trainer
    gc.collect()
    torch._dynamo.reset()
    trainer = Trainer(TRAINING[program], backend)
    allocated = allocation_peak(trainer.step, kept=trainer.state())
    print(json.dumps({"run_peak_mb": resident, "peak_mb": start, "allocated_peak_mb": allocated / 2**20}))


def markdown(result: dict[str, Any]) -> str:
    """The table of results."""
    names = ("eager", "inductor", "opforge")
    lines = [
        *report.heading(result, f"; {result['rounds']} rounds"),
        "| step of | size | eager ms | Inductor : eager | opforge : eager | opforge : Inductor | curve error eager | … Inductor | … opforge "
        "| peak MB eager | … Inductor | … opforge |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]

    def cell(d: dict[str, float], key: str, form: str) -> str:
        return format(d[key], form) if key in d else "—"

    for row in result["programs"]:
        speed, error = row["speed"], row["curve_error"]
        lines.append(
            f"| {row['name']} | {row['shape']} | {row['ms']['eager']:.2f} | {cell(speed, 'inductor/eager', '.2f')} | "
            f"{cell(speed, 'opforge/eager', '.2f')} | {cell(speed, 'opforge/inductor', '.2f')} | {cell(error, 'eager', '.1e')} | "
            f"{cell(error, 'inductor', '.1e')} | {cell(error, 'opforge', '.1e')} | "
            + " | ".join(cell(row.get("memory", {}).get(n, {}), "allocated_peak_mb", ".2f") for n in names)
            + " |"
        )
    lines.append("")
    for key, value in result["summary"].items():
        lines.append(f"- geomean {key}: {value:.3f}")
    return "\n".join(lines) + "\n"


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 11,
    steps: Annotated[int, typer.Option(help="steps of the loss curves")] = 30,
    backend: Annotated[str, typer.Option(help="compared with eager, with commas between")] = "inductor,opforge",
    peak: Annotated[bool, typer.Option(help="peak memory in fresh processes")] = True,
    threads: Annotated[int, typer.Option(help="torch's intra-op threads")] = 2,
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
    memory_of: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare training steps of eager, Inductor and opforge."""
    torch.set_num_threads(threads)
    if memory_of is not None:
        measure_memory(memory_of, backend)
        return
    caches = tempfile.TemporaryDirectory(prefix="bench-cache-")  # kernels of an earlier run must not be found
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches.name}/inductor"
    os.environ["OPFORGE_CACHE_DIR"] = f"{caches.name}/opforge"
    torch._dynamo.config.recompile_limit = 64
    names = ["eager", *backend.split(",")]
    for name in names[1:]:
        backends.load(name)
    programs = chosen(list(TRAINING.values()), only)
    rows: list[dict[str, Any]] = []
    started = report.machine(threads)
    out.mkdir(parents=True, exist_ok=True)
    for k, program in enumerate(programs, 1):
        console.print(f"[dim]{k}/{len(programs)}[/] {program.name}  [dim]{program.shape}")
        try:
            row = run_program(program, names, rounds, steps)
        except ImportError as error:
            console.print(f"  [yellow]skipped: {error}")
            continue
        if peak:
            row["memory"] = {name: memory(program.name, name) for name in names}
        rows.append(row)
        console.print("  " + ", ".join(f"{k} {v:.2f}x" for k, v in row["speed"].items()) + f" {row['failed'] or ''}")
        result = {"machine": started, "command": report.command(), "rounds": rounds, "steps": steps, "programs": rows}
        write(out, result | {"summary": summary(rows)})
    print((out / "training.md").read_text() if rows else "nothing was measured")
    console.print(f"wrote {out / 'training.json'}")


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means over the programs so far."""
    keys = sorted({k for row in rows for k in row["speed"]})
    means = {k: geomean([row["speed"][k] for row in rows if k in row["speed"]]) for k in keys}
    for what, key in (("resident", "run_peak_mb"), ("allocated", "allocated_peak_mb")):
        both = [[row.get("memory", {}).get(n, {}).get(key) for n in ("opforge", "inductor")] for row in rows]
        ratios = [mine / theirs for mine, theirs in both if mine and theirs]
        if ratios:
            means[f"peak {what} memory opforge/inductor"] = geomean(ratios)
    return means


def write(out: Path, result: dict[str, Any]) -> None:
    """The results so far: a run that is cut off leaves those of the programs that it finished."""
    for name, text in (("training.json", json.dumps(result, indent=1) + "\n"), ("training.md", markdown(result))):
        part = out / f"{name}.part"
        part.write_text(text)
        part.replace(out / name)


if __name__ == "__main__":
    typer.run(main)
