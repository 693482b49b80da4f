"""Steps of training whose backwards are captured, in several processes, beside eager's. `python -m tests.support.captured_steps KIND...` runs some.

A KIND is words with `-` between them: how the training is spread (`ddp`, `ddp_in_python`, `fsdp2` or `alone`), then any of
- `compiled`: the forward is compiled by opforge, else it is eager.
- `checkpoint` or `reentrant`: the block is computed again in the backward.
- `breaks`: a graph break in the block.
- `micro`: two micro batches for a step, whose gradients are gathered after the second.
- `zeros`: gradients are set to zero after a step, not to None.

Each process trains the same float64 model twice from the same weights: eagerly, and with each backward captured by
`opforge.compiled_autograd.enable()`. Both clip gradients and step by AdamW. With `--device cuda` the processes use NCCL and a GPU each, else Gloo.
For each kind rank 0 prints a line of JSON: `kind`, `losses` and `eager` (a float for each step), `parameters` (the largest difference in the end, of
all processes), `captures` (how many there were after each step), `graphs` (that Dynamo compiled, likewise) and `fallbacks`. The kind `refused` is
another trial, of DDP's usual reducer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.distributed import join, start

WIDTH, ROWS = 8, 6


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(F.gelu(y))


class Model(nn.Module):
    """`again`: "checkpoint" or "reentrant", where the block is computed again in the backward."""

    def __init__(self, again: str, breaks: bool) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(WIDTH, WIDTH), Block(breaks), nn.Linear(WIDTH, 10)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.block, x, use_reentrant=self.again == "reentrant") if self.again else self.block(x)
        return self.head(x)


def fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.block)
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

    losses      of each step, averaged over the processes.
    captures    how many backwards were captured up to the end of each step.
    graphs      how many graphs Dynamo compiled, likewise.
    parameters  in the end, whole.
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
            self.graphs: list[int] = []
            self._train(model, run, steps, device, capture or nullcontext, words)
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in base.parameters())
        self.parameters = [p.detach().clone() for p in whole]

    @staticmethod
    def _gather(model: Any, gather: bool) -> None:
        """Whether gradients are to be gathered from all processes in the next backward."""
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(gather)
        else:
            model.require_backward_grad_sync = gather  # as `no_sync()` sets it

    def _train(self, model: Any, run: Any, steps: int, device: str, capture: Any, words: list[str]) -> None:
        counters = torch._dynamo.utils.counters
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        draws = torch.Generator().manual_seed(1 + dist.get_rank())
        for _ in range(steps):
            x = torch.randn(ROWS, WIDTH, generator=draws, dtype=torch.float64).to(device)
            target = torch.randint(10, (ROWS,), generator=draws).to(device)
            total = 0.0
            for last in (False, True) if "micro" in words else (True,):
                self._gather(model, last)
                loss = F.cross_entropy(run(x), target)
                x, total = -x, total + loss.detach()
                with capture():
                    loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none="zeros" not in words)
            mean = total
            dist.all_reduce(mean)
            self.losses.append(float(mean) / dist.get_world_size())
            self.captures.append(counters["compiled_autograd"]["captures"])
            self.graphs.append(counters["stats"]["unique_graphs"])


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
        "graphs": ours.graphs,
        "fallbacks": opforge.stats()["fallbacks"],
    }


def refused(device: str) -> dict[str, Any]:
    """What the usual reducer of DDP, which is not captured, raises; and whether the backward that was refused runs when nothing captures."""
    from opforge import compiled_autograd

    torch.manual_seed(0)
    models = [nn.parallel.DistributedDataParallel(Model("", False).to(device, torch.float64)) for _ in range(2)]
    models[0].load_state_dict(models[1].state_dict())
    torch.manual_seed(dist.get_rank())
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64).to(device)
    models[1](x).sin().sum().backward()
    loss, message = models[0](x).sin().sum(), ""
    try:
        with compiled_autograd.enable():
            loss.backward()
    except RuntimeError as error:
        message = str(error)
    none_yet = all(p.grad is None for p in models[0].parameters())
    with compiled_autograd.enable(), compiled_autograd.disable():
        loss.backward()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    return {"message": message, "none_yet": none_yet}


def worker(rank: int, kinds: list[str], steps: int, device: str, processes: int, meeting: str) -> None:
    join(rank, device, processes, meeting)
    for kind in kinds:
        found = refused(device) if kind == "refused" else compared(kind, steps, device)
        if rank == 0:
            print(json.dumps({"kind": kind} | found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    start(worker, __doc__, "kinds", nargs="+", help="how the training is spread, and what is in it")
