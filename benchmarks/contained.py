"""Ordinary programs whose memory traffic matters most, on a CUDA device under eager, Inductor and opforge, interleaved in one process.

    python benchmarks/contained.py                  everything
    python benchmarks/contained.py --only decode    the programs whose name contains "decode"

A step of a decoder with its caches (compiled systems record CUDA graphs), sums of gathered rows, and cross-entropy over a large vocabulary, forward
and backward, with its peak memory beside the arguments. Errors are judged by a float64 run. A ratio above 1 means that opforge is faster.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from compared import chosen, faults, loaded, measure_all, note, told

import report
from backends import BACKENDS, own_entry
from measure import errors, geomean, interleaved_us, within_twice

console = Console(stderr=True)
HERE = Path(__file__).parent
GRAPHS = "reduce-overhead"
Call = Callable[..., Any]


class Layer(nn.Module):
    """Attention over a cache of keys and values, which gets one more position, then a feed-forward network."""

    keys: Tensor
    values: Tensor

    def __init__(self, width: int, heads: int, positions: int, batch: int, put: bool) -> None:
        super().__init__()
        self.heads, self.put = heads, put
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(batch, heads, positions, width // heads) / 4)

    def forward(self, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        """`x`: batch × 1 × width, `at`: the position, one int64; `mask`: 1 × positions, bool."""
        batch, _, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, 1, 3, self.heads, width // self.heads)
        q, k, v = (parts[:, :, n].transpose(1, 2) for n in range(3))
        if self.put:
            self.keys[:, :, at] = k
            self.values[:, :, at] = v
        else:
            self.keys.index_copy_(2, at, k)
            self.values.index_copy_(2, at, v)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(batch, 1, width))
        return x + self.down(F.silu(self.up(self.after(x))))


class Decoder(nn.Module):
    """Layers, half of which update their caches by index_copy_ and half by an assignment."""

    positions: Tensor

    def __init__(self, positions: int, layers: int = 4, width: int = 2048, heads: int = 16, batch: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, positions, batch, put=k % 2 == 1) for k in range(layers))
        self.register_buffer("positions", torch.arange(positions), persistent=False)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """The next hidden state, batch × 1 × width."""
        mask = (self.positions <= at)[None]
        for layer in self.layers:
            x = layer(x, at, mask)
        return x


@dataclass(frozen=True)
class Case:
    """A program: `make(device)` gives its function and arguments; `exact` makes the function of a float64 run out of it."""

    name: str
    shape: str
    make: Callable[[torch.device], tuple[Call, list[Tensor]]]
    mode: str | None = None
    exact: Callable[[Call], Call] = lambda fn: fn
    judged: bool = True


def decode(positions: int) -> Case:
    def make(device: torch.device) -> tuple[Call, list[Tensor]]:
        model = Decoder(positions).to(device, torch.bfloat16).eval()
        x = torch.randn(4, 1, 2048, dtype=torch.bfloat16, device=device)
        return model, [x, torch.tensor([positions - 3], device=device)]

    def exact(model: Any) -> Call:
        return copy.deepcopy(model).double()

    return Case(f"decode at {positions}", "4 layers, 4 x 16 x 128, bf16", make, GRAPHS, exact)


def gathered(name: str, fn: Call, dtype: torch.dtype, bags: int = 65536, rows: int = 32) -> Case:
    def make(device: torch.device) -> tuple[Call, list[Tensor]]:
        table = torch.randn(500_000, 128, dtype=dtype, device=device)
        return fn, [torch.randint(0, 500_000, (bags, rows), device=device), table]

    return Case(name, f"{bags} of {rows} rows of 128, {str(dtype).partition('.')[2]}", make)


def loss_case(name: str, fn: Call, dtype: torch.dtype, tokens: int = 8192, words: int = 128_256) -> Case:
    def both(logits: Tensor, targets: Tensor, call: Call = fn) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            loss = call(logits, targets)
            (grad,) = torch.autograd.grad(loss, logits)
        return loss.detach(), grad

    def make(device: torch.device) -> tuple[Call, list[Tensor]]:
        logits = torch.randn(tokens, words, dtype=dtype, device=device).requires_grad_()
        return both, [logits, torch.randint(0, words, (tokens,), device=device)]

    return Case(name, f"{tokens} x {words}, {str(dtype).partition('.')[2]}", make, judged=tokens * words < 1 << 28)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def cross_entropy_in_float32(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def sum_of_rows(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table).sum(1)


def mean_of_rows(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table).mean(1)


def bag_sum(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding_bag(ids, table, mode="sum")


def bag_mean(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding_bag(ids, table, mode="mean")


CASES = [
    decode(2048),
    decode(8192),
    gathered("sum of gathered rows", sum_of_rows, torch.float32),
    gathered("sum of gathered rows, 16 bits", sum_of_rows, torch.bfloat16),
    gathered("mean of gathered rows", mean_of_rows, torch.float32),
    gathered("embedding_bag, sum", bag_sum, torch.float32),
    gathered("embedding_bag, mean", bag_mean, torch.float32),
    loss_case("cross-entropy", cross_entropy, torch.bfloat16),
    loss_case("cross-entropy in float32", cross_entropy_in_float32, torch.bfloat16),
    loss_case("cross-entropy of float32", cross_entropy, torch.float32),
    loss_case("cross-entropy, judged", cross_entropy_in_float32, torch.bfloat16, tokens=1024),
]


def compiled(name: str, fn: Call, mode: str | None) -> Call:
    """The function, or a module, under a system; the compiled part of a loss is its forward, so that the backward is compiled with it."""
    backend = BACKENDS[name].backend
    assert backend is not None, f"{name} compiles nothing"
    if isinstance(fn, nn.Module):
        return torch.compile(fn, backend=backend, mode=mode, dynamic=False)
    if fn.__defaults__:
        inner = torch.compile(own_entry(fn.__defaults__[0], name), backend=backend, mode=mode, dynamic=False)
        return lambda *args: fn(*args, inner)
    return torch.compile(own_entry(fn, name), backend=backend, mode=mode, dynamic=False)


def run_case(case: Case, names: list[str], rounds: int) -> dict[str, Any]:
    """Times, errors and peak memory beside the arguments, under every system in `names`, of which eager is the first."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    fn, inputs = case.make(torch.device("cuda"))
    row: dict[str, Any] = {
        "name": case.name,
        "shape": case.shape,
        "failed": {},
        "accurate": {},
        "errors": {},
        "peak_mb": {},
    }
    reference = None
    if case.judged:
        wide = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs]
        reference = case.exact(fn)(*wide)
        del wide
    thunks: dict[str, Callable[[], Any]] = {}
    for name in names:
        call = fn if name == "eager" else compiled(name, fn, case.mode)
        try:
            for _ in range(3):  # CUDA graphs are recorded after the first calls
                got = call(*inputs)
            torch.cuda.synchronize()
            if reference is not None:
                row["errors"][name] = errors(got, reference)
                row["accurate"][name] = within_twice(row["errors"][name], row["errors"]["eager"], got)
            del got
        except Exception as error:
            if name == "eager":
                raise
            row["failed"][name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
            continue
        thunks[name] = partial(call, *inputs)
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        thunks[name]()
        torch.cuda.synchronize()
        row["peak_mb"][name] = (torch.cuda.max_memory_allocated() - held) / 1e6
    row["us"] = interleaved_us(thunks, rounds)
    row["ratio"] = {n: us / row["us"]["opforge"] for n, us in row["us"].items() if "opforge" in row["us"]}
    return row


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Geometric means of the ratios, and the programs that are slower than another system."""
    found: dict[str, Any] = {}
    for n in names:
        ratios = {r["name"]: r["ratio"][n] for r in rows if n != "opforge" and n in r["ratio"]}
        if ratios:
            found[f"speed opforge/{n}"] = geomean(list(ratios.values()))
            found[f"slower than {n}"] = [name for name, q in ratios.items() if q < 1]
    return found | faults(rows, names)


def markdown(result: dict[str, Any]) -> str:
    """The table of results, with the machine and the command."""
    names = result["names"]
    others = [n for n in names if n != "opforge"]
    head = [
        "program",
        "size",
        *(f"{n} us" for n in names),
        *(f"opforge / {n}" for n in others),
        *(f"{n} peak MB" for n in names),
        "note",
    ]
    lines = [*report.heading(result), f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in result["programs"]:
        cells = [_cell(r["us"], n, ".1f") for n in names] + [_cell(r["ratio"], n, ".2f") for n in others]
        cells += [_cell(r["peak_mb"], n, ".0f") for n in names]
        lines.append(f"| {' | '.join([r['name'], r['shape'], *cells, note(r)])} |")
    return "\n".join([*lines, *told(result["summary"])]) + "\n"


def _cell(table: Mapping[str, float], name: str, form: str) -> str:
    return format(table[name], form) if name in table else "—"


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 7,
    backend: Annotated[str, typer.Option(help="compared with eager, with commas between")] = "inductor,opforge",
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
) -> None:
    """Decoding, gathered sums and cross-entropy on a GPU."""
    if not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    names = loaded(backend)

    def shown(row: Mapping[str, Any]) -> str:
        return ", ".join(f"{n} {us:.0f} us, {row['peak_mb'][n]:.0f} MB" for n, us in row["us"].items())

    measure_all(
        chosen(CASES, only), lambda c: run_case(c, names, rounds), names, out / "contained", summary, markdown, shown
    )


if __name__ == "__main__":
    typer.run(main)
