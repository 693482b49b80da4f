"""Times attention with functions, masks and biases of a program's own on a CUDA device: eager, Inductor and opforge, interleaved in one process.

    python benchmarks/attention.py                    everything
    python benchmarks/attention.py --only causal      the programs whose name contains "causal"

Errors are judged by a float64 run, of which the device must hold the scores (`--small` for one that cannot). TFLOP/s count two products of all
scores, also where a mask leaves some out.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).parent))

from compared import chosen, loaded, run_all

console = Console(stderr=True)
HERE = Path(__file__).parent
CAP = 30.0
DEVICE = "cuda"


@dataclass(frozen=True)
class Attention:
    """A program over queries, keys and values of (batch, heads, steps, width), or (batch, steps, heads, width) if `steps_first`, and what
    `more` makes.
    """

    name: str
    fn: Callable[..., Tensor]
    batch: int = 4
    heads: int = 16
    steps: int = 2048
    width: int = 64
    dtype: torch.dtype = torch.bfloat16
    more: Callable[["Attention"], list[Tensor]] = lambda _: []
    steps_first: bool = False

    @property
    def shape(self) -> str:
        return f"{self.batch} x {self.heads} x {self.steps} x {self.width} {str(self.dtype).removeprefix('torch.')}"

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.heads * self.steps * self.steps * self.width

    def inputs(self) -> list[Tensor]:
        size = (self.batch, self.heads, self.steps, self.width)
        if self.steps_first:
            size = (self.batch, self.steps, self.heads, self.width)
        made = [torch.randn(size, device=DEVICE).to(self.dtype) for _ in range(3)]
        return [*made, *self.more(self)]


def bias_of(*shape: int | None) -> Callable[[Attention], list[Tensor]]:
    """A random bias; None stands for the steps, and 0 for the heads."""

    def make(p: Attention) -> list[Tensor]:
        size = [p.steps if n is None else p.heads if n == 0 else n for n in shape]
        return [torch.randn(size, device=DEVICE).to(p.dtype)]

    return make


def padding(p: Attention) -> list[Tensor]:
    """Which columns to leave out: the last ones, of each batch another number."""
    ends = torch.linspace(p.steps // 2, p.steps, p.batch, device=DEVICE).long()
    return [torch.arange(p.steps, device=DEVICE)[None, None, None, :] >= ends[:, None, None, None]]


def documents(p: Attention) -> list[Tensor]:
    """The number of the document that a step belongs to: eight of equal length."""
    return [torch.arange(p.steps, device=DEVICE) * 8 // p.steps]


def flex_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v)


def flex_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")))


def flex_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def slopes(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i >= j, s + torch.exp2(-(h + 1) * 0.5) * (j - i), -float("inf"))

    return flex_attention(q, k, v, score_mod=slopes)


def flex_soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: CAP * torch.tanh(s / CAP))


def flex_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, i, j])


def flex_documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, -float("inf")))


def _is_causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


@functools.cache
def causal_blocks(steps: int) -> Any:
    return create_block_mask(_is_causal, None, None, steps, steps, device=DEVICE)


def flex_causal_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=causal_blocks(q.shape[2]))


def composed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def composed_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias, -1) @ v


def composed_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(mask, -float("inf")), -1) @ v


def composed_by_steps(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return composed_bias(q, k, v, bias).transpose(1, 2).flatten(2)


PROGRAMS = [
    Attention("flex plain", flex_plain),
    Attention("flex causal", flex_causal),
    Attention("flex causal, block mask", flex_causal_blocks),
    Attention("flex alibi", flex_alibi),
    Attention("flex soft cap", flex_soft_cap),
    Attention("flex documents", flex_documents, more=documents),
    Attention("flex bias", flex_bias, more=bias_of(0, None, None)),
    Attention("flex causal, width 128", flex_causal, heads=8, width=128),
    Attention("flex soft cap, float16", flex_soft_cap, dtype=torch.float16),
    Attention("flex causal, long", flex_causal, batch=1, heads=8, steps=8192),
    Attention("composed", composed),
    Attention("composed, bias of heads", composed_bias, more=bias_of(0, None, None)),
    Attention("composed, bias of all", composed_bias, steps=1024, more=lambda p: bias_of(p.batch, 0, None, None)(p)),
    Attention("composed, padding mask", composed_mask, more=padding),
    Attention("composed, heads behind the steps", composed_by_steps, more=bias_of(0, None, None), steps_first=True),
    Attention("composed, width 80", composed_bias, heads=12, width=80, more=bias_of(0, None, None)),
    Attention("composed, odd steps", composed_bias, steps=1999, more=bias_of(0, None, None)),
    Attention("composed, short", composed_bias, batch=64, heads=12, steps=128, more=bias_of(0, None, None)),
    Attention("composed, windows", composed_bias, batch=1024, heads=4, steps=49, width=32, more=bias_of(0, None, None)),
]


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 7,
    backend: Annotated[str, typer.Option(help="compared with eager, with commas between")] = "inductor,opforge",
    small: Annotated[bool, typer.Option("--small", help="an eighth of the steps, to try it out")] = False,
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
) -> None:
    """Attention on a GPU."""
    if not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    names = loaded(backend)
    programs = chosen(PROGRAMS, only)
    if small:
        programs = [Attention(**{**vars(p), "steps": max(p.steps // 8, 16)}) for p in programs]
    run_all(programs, names, rounds, out / "attention")


if __name__ == "__main__":
    typer.run(main)
