"""Times products of matrices with something before and after them on a CUDA device: eager, Inductor and opforge, interleaved in one process.

    python benchmarks/products.py                    everything
    python benchmarks/products.py --only gelu        the programs whose name contains "gelu"

With `-max` blocks, and which products are fused with what is beside them, are chosen by measurement. Errors are judged by a float64 run.
TFLOP/s count the products.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from compared import chosen, loaded, run_all

console = Console(stderr=True)
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Product:
    """A program whose products are of `sizes` (rows, depth, columns), `times` of them; it takes tensors of these shapes, normal
    numbers of `dtype` but where `kinds` says otherwise. `tf32`: products of float32 may round their operands.
    """

    name: str
    fn: Callable[..., Any]
    sizes: tuple[int, int, int]
    shapes: Callable[[int, int, int], list[tuple[int, ...]]]
    dtype: torch.dtype = torch.bfloat16
    times: int = 1
    kinds: dict[int, torch.dtype] = field(default_factory=dict)
    tf32: bool = False

    @property
    def shape(self) -> str:
        how = " (TF32)" if self.tf32 else ""
        return f"{' x '.join(map(str, self.sizes))} {str(self.dtype).removeprefix('torch.')}{how}"

    @property
    def flops(self) -> float:
        rows, depth, columns = self.sizes
        return 2.0 * self.times * rows * depth * columns

    def inputs(self) -> list[Tensor]:
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        return [self._made(shape, self.kinds.get(k, self.dtype)) for k, shape in enumerate(self.shapes(*self.sizes))]

    def _made(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-128, 128, shape, dtype=dtype, device="cuda")
        return torch.randn(shape, device="cuda").to(dtype)


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def linear_gelu_tanh(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def linear_silu(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.linear(x, w))


def linear_residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(x, w, b)


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, v)


def mlp(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return x + F.linear(F.gelu(F.linear(x, w, b)), v, c)


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x, y) * 0.125


def scaled_bias(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(x, y.mT) * 0.125 + b


def dequantized(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, q.to(x.dtype) * s[:, None])


def dequantized_gelu(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return F.gelu(dequantized(x, q, s))


def wide_logits(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).float()


def cast_before(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x.to(w.dtype), w, b))


def _linear(m: int, k: int, n: int) -> list[tuple[int, ...]]:
    return [(m, k), (n, k), (n,)]


def _batches(count: int) -> Callable[[int, int, int], list[tuple[int, ...]]]:
    return lambda m, k, n: [(count, m // count, k), (count, k, n)]


EIGHT = {1: torch.int8}
PROGRAMS = [
    Product("linear, gelu", linear_gelu, (8192, 1024, 4096), _linear),
    Product("linear, gelu, float16", linear_gelu, (8192, 1024, 4096), _linear, torch.float16),
    Product("linear, gelu, float32", linear_gelu, (4096, 1024, 4096), _linear, torch.float32),
    Product("linear, gelu, TF32", linear_gelu, (8192, 1024, 4096), _linear, torch.float32, tf32=True),
    Product("linear, gelu by tanh", linear_gelu_tanh, (4096, 768, 3072), _linear),
    Product("linear, gelu, deep", linear_gelu, (8192, 8192, 8192), _linear),
    Product("linear, gelu, shallow", linear_gelu, (32768, 256, 1024), _linear),
    Product("linear, gelu, small", linear_gelu, (512, 512, 512), _linear),
    Product("linear, gelu, odd", linear_gelu, (4095, 1001, 3003), _linear),
    Product("linear, silu", linear_silu, (4096, 2048, 8192), lambda m, k, n: [(m, k), (n, k)]),
    Product("linear, bias, residual", linear_residual, (8192, 4096, 1024), lambda m, k, n: [(m, k), (n, k), (n,), (m, n)]),
    Product("gate", gated, (4096, 4096, 11008), lambda m, k, n: [(m, k), (n, k), (n, k)], times=2),
    Product("gate, shallow", gated, (16384, 512, 1408), lambda m, k, n: [(m, k), (n, k), (n, k)], times=2),
    Product("block", mlp, (8192, 1024, 4096), lambda m, k, n: [(m, k), (n, k), (n,), (k, n), (k,)], times=2),
    Product("batches, scale", scaled, (65536, 64, 1024), _batches(64)),
    Product("batches, scale, float16", scaled, (8192, 512, 512), _batches(16), torch.float16),
    Product("batches, scale, TF32", scaled, (8192, 512, 512), _batches(16), torch.float32, tf32=True),
    Product(
        "batches, scale, bias", scaled_bias, (32768, 128, 512), lambda m, k, n: [(64, m // 64, k), (64, n, k), (m // 64, n)]
    ),
    Product("8 bits", dequantized, (4096, 4096, 4096), _linear, kinds=EIGHT),
    Product("8 bits, few rows", dequantized, (256, 4096, 4096), _linear, kinds=EIGHT),
    Product("8 bits, gelu", dequantized_gelu, (2048, 1024, 4096), _linear, kinds=EIGHT),
    Product("float32 logits", wide_logits, (4096, 1024, 32000), lambda m, k, n: [(m, k), (n, k)]),
    Product("cast before, relu", cast_before, (8192, 1024, 1024), _linear, kinds={0: torch.float32}),
]  # fmt: skip


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 7,
    backend: Annotated[
        str, typer.Option(help="compared with eager, with commas between")
    ] = "inductor,inductor-max,opforge,opforge-max",
    small: Annotated[bool, typer.Option("--small", help="an eighth of the rows, to try it out")] = False,
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
) -> None:
    """Products of matrices on a GPU, with what is beside them."""
    if not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    names = loaded(backend)
    programs = chosen(PROGRAMS, only)
    if small:
        programs = [replace(p, sizes=(p.sizes[0] // 8, *p.sizes[1:])) for p in programs]
    run_all(programs, names, rounds, out / "products")


if __name__ == "__main__":
    typer.run(main)
