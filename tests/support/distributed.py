"""Training steps that are spread over processes, compiled beside eager. `python -m tests.support.distributed KIND` runs one.

KIND is `tensor_parallel`, `sequence_parallel`, `fsdp2` or `ddp`; with `--device cuda` the processes use NCCL and a GPU each, else Gloo.
Every process trains the same model twice from the same weights, eagerly and compiled by opforge, and compares losses and gradients.
The last line that rank 0 prints is JSON: `losses` and `eager` (floats, one for each step), `fallbacks` (reason to count) and `graphs`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

WIDTH, ROWS = 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sequence_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """Between the blocks each process has a part of the rows, which are gathered before a product and scattered after it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for block in model.blocks:
        parts = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh, parts)
    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),), use_local_output=True)
    parallelize_module(model.blocks[0], mesh, whole)
    parallelize_module(model, mesh, {"head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())})
    return model


def fsdp2(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def ddp(model: nn.Module, mesh: Any) -> nn.Module:
    del mesh  # the whole world
    return nn.parallel.DistributedDataParallel(model)


KINDS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    f.__name__: f for f in (tensor_parallel, sequence_parallel, fsdp2, ddp)
}
# Where the batch is spread over the processes, each has rows of its own.
DATA_PARALLEL = {"fsdp2", "ddp"}


def train(kind: str, steps: int, device: str, compiled: bool) -> tuple[list[float], list[Tensor]]:
    """The losses of `steps` steps, averaged over the processes, and the last gradients, whole."""
    torch.manual_seed(0)
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    model = KINDS[kind](Model().to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    run = torch.compile(model, backend="opforge") if compiled else model
    draws = torch.Generator().manual_seed(1 + (dist.get_rank() if kind in DATA_PARALLEL else 0))
    losses = []
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=draws).to(device)
        target = torch.randint(10, (ROWS,), generator=draws).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(run(x), target)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return losses, gradients


def join(rank: int, device: str, processes: int, meeting: str) -> None:
    """Make this process one of the group."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    patience = datetime.timedelta(seconds=120)  # a process that waits for the other in vain raises
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=processes, timeout=patience)


def start(worker: Callable[..., None], description: str | None, name: str, **about: Any) -> None:
    """Run `worker` in processes as the command line says: with what the argument `name` gives, steps, device, processes, where they meet."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(name, **about)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="Gloo on the CPU, or NCCL with a GPU for each process"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (20)")
    parser.add_argument("--processes", type=int, default=2, help="processes (2)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (getattr(args, name), args.steps, args.device, args.processes, os.path.join(folder, "meeting"))
        torch.multiprocessing.spawn(worker, args=given, nprocs=args.processes)


def worker(rank: int, kind: str, steps: int, device: str, processes: int, meeting: str) -> None:
    import opforge

    join(rank, device, processes, meeting)
    eager, wanted = train(kind, steps, device, compiled=False)
    losses, gradients = train(kind, steps, device, compiled=True)
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    if rank == 0:
        stats = opforge.stats()
        found = {"losses": losses, "eager": eager, "fallbacks": stats["fallbacks"], "graphs": stats["graphs"]}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    start(worker, __doc__, "kind", choices=sorted(KINDS), help="how the training is spread")
