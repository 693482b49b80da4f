"""Steps of training in two processes, with and without captured backwards, against eager and Inductor.

    python benchmarks/several_gpus.py                                        two GPUs, NCCL
    python benchmarks/several_gpus.py --device cpu --layers 1 --width 32 --length 8 --batch 2 --rounds 3   to try it (Gloo)

A step is forward, backward, clipping and AdamW, of a transformer by DDP or FSDP2, with and without activation checkpointing. Captured backwards of
DDP need its reducer in Python. Times are medians of interleaved rounds on rank 0; a way whose losses are not eager's, or that raises,
has the reason in place of a time. Writes the part `several GPUs` of benchmarks/results/compiled_autograd.json.
"""

from __future__ import annotations

import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from rich.table import Table
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from compiled_autograd import WAYS, Transformer, console, write

SPREADS = ("ddp", "fsdp2", "ddp checkpoint", "fsdp2 checkpoint")
WARM_STEPS = 4


class Recomputed(Transformer):
    """Each layer is computed again in the backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _spread(spread: str, model: Any, captured: bool) -> Any:
    if spread.startswith("ddp"):
        with torch._dynamo.config.patch(optimize_ddp="python_reducer" if captured else True):
            return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _step_of(spread: str, way: str, sizes: dict[str, int], device: str) -> Callable[[], torch.Tensor]:
    """A step of training in one way, which gives the loss."""
    backend, enable = WAYS[way]
    torch.manual_seed(0)
    made = Recomputed if "checkpoint" in spread else Transformer
    model = _spread(spread, made(sizes["layers"], sizes["width"]).to(device), enable is not None)
    forward = torch.compile(model, backend=backend) if backend else model
    capture: Any = partial(enable, torch.compile(backend=backend)) if enable else nullcontext
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(1 + dist.get_rank())
    tokens = torch.randint(1000, (sizes["batch"], sizes["length"]), generator=draws).to(device)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = forward(tokens)
        with capture():
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def _warm(step: Callable[[], torch.Tensor], mode: str | bool) -> list[float] | str:
    """The losses of the first steps, which compile; or what was raised."""
    try:
        with torch._dynamo.config.patch(optimize_ddp=mode):
            return [float(step()) for _ in range(WARM_STEPS)]
    except Exception as error:  # noqa: BLE001  what a way cannot do stands in the table
        return f"{type(error).__name__}: {str(error).strip()[:300]}"


def _same_everywhere(reason: str) -> str:
    """The first reason of any process, so that all leave out the same ways."""
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((r for r in reasons if r), "")


def _times(steps: dict[str, Callable[[], torch.Tensor]], rounds: int, device: str) -> dict[str, float]:
    """Seconds of a step."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds):
        for way, step in steps.items():
            dist.barrier()
            _wait(device)
            start = time.perf_counter()
            step()
            _wait(device)
            times[way].append(time.perf_counter() - start)
    return {way: statistics.median(some) for way, some in times.items()}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _work(rank: int, spread: str, sizes: dict[str, int], device: str, ways: list[str], folder: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    meeting, patience = f"file://{folder}/meeting", datetime.timedelta(minutes=5)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=meeting, rank=rank, world_size=2, timeout=patience
    )
    steps, wanted = dict[str, Callable[[], torch.Tensor]](), list[float]()
    found: dict[str, float | str] = {}
    for way in ways:
        python_reducer = spread.startswith("ddp") and WAYS[way][1] is not None
        step = _step_of(spread, way, sizes, device)
        losses = _warm(step, "python_reducer" if python_reducer else True)
        reason = losses if isinstance(losses, str) else ""
        if not isinstance(losses, str):
            wanted = wanted or losses
            far = max(abs(have - want) for have, want in zip(losses, wanted, strict=True))
            reason = f"losses differ from eager's by {far:.1e}" if not far < 1e-2 else ""
        found[way] = _same_everywhere(reason)
        if not found[way]:
            steps[way] = step
    found |= _times(steps, sizes["rounds"], device)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(
    device: Annotated[str, typer.Option(help="cuda (NCCL) or cpu (Gloo)")] = "cuda",
    layers: Annotated[int, typer.Option(help="layers of the transformer")] = 12,
    width: Annotated[int, typer.Option(help="its width, a multiple of 4")] = 768,
    batch: Annotated[int, typer.Option(help="rows of each process")] = 8,
    length: Annotated[int, typer.Option(help="tokens of a row")] = 512,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved steps")] = 30,
    spread: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(SPREADS)}; all by default")] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"beside eager, of {', '.join(WAYS)}; all by default")] = None,
) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise typer.BadParameter("there are fewer than two CUDA devices; --device cpu tries it with Gloo")
    sizes = {"layers": layers, "width": width, "batch": batch, "length": length, "rounds": rounds}
    ways = [name for name in WAYS if name == "eager" or way is None or name in way]
    rows: list[dict[str, Any]] = []
    for kind in track(spread or SPREADS, "compile and measure", console=console):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_work, args=(kind, sizes, device, ways, folder), nprocs=2)
            rows.append({"spread": kind} | json.loads(Path(folder, "found.json").read_text()))
        part, name = (
            ("several GPUs", torch.cuda.get_device_name()) if device == "cuda" else ("several processes", "cpu")
        )
        write(
            part, {"device": name, "sizes": sizes, "rows": rows}
        )  # each takes minutes, so it is kept as soon as it is there
    table = Table("spread", *(f"{name} ms" for name in ways))
    for row in rows:
        table.add_row(row["spread"], *(f"{1e3 * t:.1f}" if not isinstance(t := row[w], str) else "-" for w in ways))
    console.print(table)
    for row in rows:
        for name in ways:
            if isinstance(row[name], str):
                console.print(f"{row['spread']}, {name}: {row[name]}", markup=False)


if __name__ == "__main__":
    typer.run(main)
