"""Random numbers in compiled kernels against eager's: eager's time divided by opforge's, medians of interleaved rounds.

The peer is eager with its own stream; with the setting random="eager" compiled code runs those very kernels.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from measure import interleaved, median_ratio

ROWS, COLUMNS = 2048, 768
x, residual, weight, bias = (
    torch.randn(ROWS, COLUMNS),
    torch.randn(ROWS, COLUMNS),
    torch.ones(COLUMNS),
    torch.zeros(COLUMNS),
)
tangent = torch.randn(ROWS, COLUMNS)


def block(x: Tensor) -> Tensor:
    return F.layer_norm(F.dropout(x, 0.1) + residual, (COLUMNS,), weight, bias)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "dropout + add + layer_norm": (block, (x,)),
    "dropout + add + layer_norm, training": (block, (x.clone().requires_grad_(),)),
    "dropout": (lambda x: F.dropout(x, 0.1), (x,)),
    "rand": (lambda: torch.rand(ROWS, COLUMNS), ()),
    "rand, float64": (lambda: torch.rand(ROWS, COLUMNS, dtype=torch.float64), ()),
    "rand, bfloat16": (lambda: torch.rand(ROWS, COLUMNS, dtype=torch.bfloat16), ()),
    "randn": (lambda: torch.randn(ROWS, COLUMNS), ()),
    "randint": (lambda: torch.randint(1000, (ROWS, COLUMNS)), ()),
    "bernoulli_, rows of 767": (lambda: torch.empty(ROWS, COLUMNS - 1).bernoulli_(0.5), ()),
    "exponential_": (lambda: torch.empty(ROWS, COLUMNS).exponential_(), ()),
}


def call(f: Callable[..., Any], args: tuple[Any, ...]) -> None:
    result = f(*args)
    if result.requires_grad:
        result.backward(tangent)


def main(
    rounds: Annotated[int, typer.Option(help="rounds")] = 21, threads: Annotated[int, typer.Option(help="threads")] = 1
) -> None:
    """Print one line for each program."""
    torch.set_num_threads(threads)
    for name, (f, args) in PROGRAMS.items():
        torch._dynamo.reset()
        compiled = torch.compile(f, backend="opforge", options={"strict": True})
        samples = interleaved({"eager": partial(call, f, args), "opforge": partial(call, compiled, args)}, rounds)
        ratio = median_ratio(samples["eager"], samples["opforge"])
        print(
            f"{name:38} {ratio:6.2f}x  (opforge {1e3 * min(samples['opforge']):.2f} ms, eager {1e3 * min(samples['eager']):.2f} ms)"
        )


if __name__ == "__main__":
    typer.run(main)
