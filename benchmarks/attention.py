"""Times attention with functions, masks and biases of a program's own on a CUDA device: eager, Inductor and opforge, interleaved in one process.

    python benchmarks/attention.py                    everything
    python benchmarks/attention.py --only causal      the programs whose name contains "causal"

Errors are judged by a float64 run, of which the device must hold the scores (`--small` for one that cannot). TFLOP/s count two products of all
scores, also where a mask leaves some out.
"""

import functools
import json
import statistics
import sys
import time
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

from gpu import microseconds

import backends
import report
from measure import errors, geomean, within_twice

console = Console(stderr=True)
HERE = Path(__file__).parent
CAP = 30.0


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
        made = [torch.randn(size, device="cuda").to(self.dtype) for _ in range(3)]
        return [*made, *self.more(self)]


def bias_of(*shape: int | None) -> Callable[[Attention], list[Tensor]]:
    """A random bias; None stands for the steps, and 0 for the heads."""

    def make(p: Attention) -> list[Tensor]:
        size = [p.steps if n is None else p.heads if n == 0 else n for n in shape]
        return [torch.randn(size, device="cuda").to(p.dtype)]

    return make


def padding(p: Attention) -> list[Tensor]:
    """Which columns to leave out: the last ones, of each batch another number."""
    ends = torch.linspace(p.steps // 2, p.steps, p.batch, device="cuda").long()
    return [torch.arange(p.steps, device="cuda")[None, None, None, :] >= ends[:, None, None, None]]


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


def _is_causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


@functools.cache
def causal_blocks(steps: int) -> Any:
    return create_block_mask(_is_causal, None, None, steps, steps, device="cuda")


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


def run_program(program: Attention, names: list[str], rounds: int) -> dict[str, Any]:
    """Times, errors and peak memory of one program under every backend in `names`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = program.inputs()
    row: dict[str, Any] = {"name": program.name, "shape": program.shape}
    row |= {key: {} for key in ("failed", "accurate", "errors", "compile_s", "counts", "peak_mb")}
    reference = program.fn(*(t.double() if t.is_floating_point() else t for t in inputs))
    eager_error = row["errors"]["eager"] = errors(program.fn(*inputs), reference)
    thunks: dict[str, Callable[[], Any]] = {}
    for name in names:
        call = program.fn if name == "eager" else backends.compile_with(name, program.fn)
        before = backends.counts(name)
        try:
            start = time.perf_counter()
            got = call(*inputs)
            torch.cuda.synchronize()
            row["compile_s"][name] = time.perf_counter() - start
            row["errors"][name] = errors(got, reference)
            row["accurate"][name] = within_twice(row["errors"][name], eager_error, got)
        except Exception as error:
            if name == "eager":
                raise
            row["failed"][name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
            continue
        after = backends.counts(name)
        row["counts"][name] = {k: after[k] - before[k] for k in ("kernels", "externs") if k in after}
        thunks[name] = functools.partial(call, *inputs)
    del reference, got
    for name, thunk in thunks.items():
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        thunk()
        torch.cuda.synchronize()
        row["peak_mb"][name] = (torch.cuda.max_memory_allocated() - held) / 2**20
    calls = {n: max(1, min(50, round(2e4 / max(microseconds(t, 2), 1)))) for n, t in thunks.items()}
    samples: dict[str, list[float]] = {name: [] for name in thunks}
    for k in range(rounds):
        order = list(thunks)
        for name in order[k % len(order) :] + order[: k % len(order)]:
            samples[name].append(microseconds(thunks[name], calls[name]))
    row["us"] = {name: statistics.median(s) for name, s in samples.items()}
    row["tflops"] = {name: program.flops / us / 1e6 for name, us in row["us"].items()}
    return row


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Geometric means over the programs that ran under both."""
    found: dict[str, Any] = {}
    for mine, other in (("opforge", "inductor"), ("opforge", "eager"), ("inductor", "eager")):
        both = [r for r in rows if mine in r["us"] and other in r["us"]]
        if both:
            found[f"speed {mine}/{other}"] = geomean([r["us"][other] / r["us"][mine] for r in both])
            found[f"slower {mine}/{other}"] = [r["name"] for r in both if r["us"][other] < r["us"][mine]]
    for n in names[1:]:
        found[f"inaccurate {n}"] = [r["name"] for r in rows if r["accurate"].get(n) is False]
        found[f"failed {n}"] = [r["name"] for r in rows if n in r["failed"]]
    return found


def markdown(result: dict[str, Any]) -> str:
    """The table of results, with the machine and the command."""
    names = result["names"]
    head = ["program", "size", *(f"{n} us" for n in names), *(f"{n} TFLOP/s" for n in names)]
    head += [*(f"{n} MB" for n in names), *(f"{n} error" for n in names), "opforge kernels, externs", "note"]
    lines = report.heading(result)
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in result["programs"]:
        note = [
            *(f"{n}: {e}" for n, e in r["failed"].items()),
            *(f"{n} ✗" for n, ok in r["accurate"].items() if not ok),
        ]
        cells = [_cell(r, table, n, form) for table, form in _COLUMNS for n in names]
        made = r["counts"].get("opforge", {})
        cells += [f"{made.get('kernels', '—')}, {made.get('externs', '—')}", "; ".join(note)]
        lines.append(f"| {' | '.join([r['name'], r['shape'], *cells])} |")
    lines.append("")
    lines += [f"- {k}: {v:.3f}" if isinstance(v, float) else f"- {k}: {v}" for k, v in result["summary"].items()]
    return "\n".join(lines) + "\n"


_COLUMNS = (("us", ".1f"), ("tflops", ".0f"), ("peak_mb", ".0f"), ("errors", ".1e"))


def _cell(row: dict[str, Any], table: str, name: str, form: str) -> str:
    value = row[table].get(name)
    if isinstance(value, dict):
        value = value["rel_norm"]
    return "—" if value is None else format(value, form)


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
    names = ["eager", *(n for n in backend.split(",") if n)]
    for name in names[1:]:
        backends.load(name)
    torch._dynamo.config.recompile_limit = 64
    wanted = [w.strip() for w in (only or "").split(",") if w.strip()]
    programs = [p for p in PROGRAMS if not wanted or any(w in p.name for w in wanted)]
    if small:
        programs = [Attention(**{**vars(p), "steps": max(p.steps // 8, 16)}) for p in programs]
    machine = report.machine(torch.get_num_threads()) | {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
    }
    rows: list[dict[str, Any]] = []
    out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for k, program in enumerate(programs, 1):
            row = run_program(program, names, rounds)
            rows.append(row)
            times = ", ".join(f"{n} {t:.0f}" for n, t in row["us"].items())
            console.print(f"{k}/{len(programs)} {program.name}: {times} us {row['failed'] or ''}")
            result = {
                "machine": machine,
                "command": report.command(),
                "names": names,
                "programs": rows,
                "summary": summary(rows, names),
            }
            (out / "attention.json").write_text(json.dumps(result, indent=1) + "\n")
            (out / "attention.md").write_text(markdown(result))
            torch.cuda.empty_cache()
    print((out / "attention.md").read_text() if rows else "nothing was measured")


if __name__ == "__main__":
    typer.run(main)
