"""torch: the whole step of an optimizer in one compiled graph."""

import torch
from client import run
from torch import Tensor, nn

OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01},
    "Adagrad": {"lr": 0.05},
}


def train(name: str, dtype: torch.dtype, backend: str | None) -> dict[str, Tensor]:
    """The weights after five steps, in which the learning rate falls."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(dtype)
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])  # a tensor, so that a new rate is no new program
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=5)

    def step() -> None:
        optimizer.step()
        schedule.step()

    if backend is not None:
        step = torch.compile(step, backend=backend)
    for _ in range(5):
        loss = model(torch.randn(8, 16).to(dtype)).square().mean()
        loss.backward()
        step()
        optimizer.zero_grad()
    return {f"{name}: {key}": value.detach() for key, value in model.named_parameters()}


def program(dtype: torch.dtype, backend: str | None) -> dict[str, Tensor]:
    """All optimizers, one after the other."""
    results = {}
    for name in OPTIMIZERS:
        torch._dynamo.reset()
        results |= train(name, dtype, backend)
    return results


if __name__ == "__main__":
    run("torch", "torch.compile of optimizer.step: " + ", ".join(OPTIMIZERS), program, eager="eager")
