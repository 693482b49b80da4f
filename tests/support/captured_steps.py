"""Steps of training whose backwards are captured, in several processes, beside eager's. `python -m tests.support.captured_steps KIND...` runs some.

A KIND is words with `-` between them: how the training is spread (`ddp`, `ddp_in_python`, `fsdp2` or `alone`), then any of `compiled` (the forward is
compiled by opforge, else it is eager), `checkpoint` or `reentrant` (each block is computed again in the backward), `breaks` (a graph break in each
block). With `--device cuda` the processes use NCCL and a GPU each, else Gloo.
Each process trains the same float64 model twice from the same weights: eagerly, and with each backward captured by
`opforge.compiled_autograd.enable()`. Both clip gradients and step by AdamW. For each kind rank 0 prints a line of JSON: `kind`, `losses` and `eager`
(a float for each step), `parameters` (the largest difference at the end, over all processes), `captures` (how many there were after each step),
`recompiles` (Dynamo's, likewise) and `fallbacks`; or `raised`, with the first error.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, ROWS, HEADS = 16, 6, 4, 2


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """`again`: "checkpoint" or "reentrant", where the blocks are computed again in the backward."""

    def __init__(self, again: str, breaks: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks) for _ in range(2))
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.again == "reentrant") if self.again else block(x)
        return self.head(x)


def fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


SPREAD: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda model: model,
    "ddp": nn.parallel.DistributedDataParallel,
    "ddp_in_python": nn.parallel.DistributedDataParallel,
    "fsdp2": fsdp2,
}


class Trained:
    """A model trained for some steps.

    losses                 of each step, averaged over the processes.
    captures, recompiles   how many there were after each step.
    parameters             in the end, whole.
    """

    def __init__(self, kind: str, steps: int, device: str, capture: Callable[[], AbstractContextManager[None]] | None):
        spread, *words = kind.split("-")
        torch.manual_seed(0)
        again = next((word for word in words if word in ("checkpoint", "reentrant")), "")
        base = Model(again, "breaks" in words).to(device, torch.float64)
        # Eager's gradients are averaged by the usual reducer.
        in_python = spread == "ddp_in_python" and capture is not None
        with torch._dynamo.config.patch(optimize_ddp="python_reducer" if in_python else True):
            model = SPREAD[spread](base)
            run = torch.compile(model, backend="opforge") if capture is not None and "compiled" in words else model
            self.losses: list[float] = []
            self.captures: list[int] = []
            self.recompiles: list[int] = []
            self._train(model, run, steps, device, capture or nullcontext)
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in base.parameters())
        self.parameters = [p.detach().clone() for p in whole]

    def _train(self, model: Any, run: Any, steps: int, device: str, capture: Any) -> None:
        counters = torch._dynamo.utils.counters
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        draws = torch.Generator().manual_seed(1 + dist.get_rank())
        for _ in range(steps):
            x = torch.randn(ROWS, LENGTH, WIDTH, generator=draws, dtype=torch.float64).to(device)
            target = torch.randint(10, (ROWS * LENGTH,), generator=draws).to(device)
            loss = F.cross_entropy(run(x).flatten(0, 1), target)
            with capture():
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            self.losses.append(float(mean) / dist.get_world_size())
            self.captures.append(counters["compiled_autograd"]["captures"])
            self.recompiles.append(counters["stats"]["unique_graphs"])


def compared(kind: str, steps: int, device: str) -> dict[str, Any]:
    import opforge
    from opforge import compiled_autograd

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled_autograd.reset()
    opforge.reset_stats()
    eager = Trained(kind, steps, device, None)
    ours = Trained(kind, steps, device, compiled_autograd.enable)
    far = torch.stack([(p - q).abs().max() for p, q in zip(ours.parameters, eager.parameters, strict=True)]).max()
    dist.all_reduce(far, dist.ReduceOp.MAX)
    return {
        "losses": ours.losses,
        "eager": eager.losses,
        "parameters": float(far),
        "captures": ours.captures,
        "recompiles": ours.recompiles,
        "fallbacks": opforge.stats()["fallbacks"],
    }


def worker(rank: int, kinds: list[str], steps: int, device: str, processes: int, meeting: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    patience = datetime.timedelta(seconds=60)  # a process that waits for the other in vain raises
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=processes, timeout=patience)
    for kind in kinds:
        try:
            found = compared(kind, steps, device)
        except Exception as error:
            if os.environ.get("TRACE"): import traceback; traceback.print_exc()
            found = {"raised": f"{type(error).__name__}: {error}"}
        if rank == 0:
            print(json.dumps({"kind": kind} | found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", help="how the training is spread, and what is in it")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="Gloo on the CPU, or NCCL with a GPU for each process"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (20)")
    parser.add_argument("--processes", type=int, default=2, help="processes (2)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (args.kinds, args.steps, args.device, args.processes, os.path.join(folder, "meeting"))
        torch.multiprocessing.spawn(worker, args=given, nprocs=args.processes)


if __name__ == "__main__":
    main()
