"""Times programs over few long rows, which several programs of a GPU go through together, beside the same with a kernel for parts of their sums and
one for what is made of them, on a CUDA device, in one process.

    python benchmarks/teams.py                  all programs
    python benchmarks/teams.py --only softmax   those whose name contains "softmax"

"Differs" and the times are those of benchmarks/two_ways.py; the exit status is 1 where a result is wrong, or not the same in every launch.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

sys.path.insert(0, str(Path(__file__).parent))

from two_ways import Program, compare

from opforge.runtime.targets import cuda

F32, BF16 = torch.float32, torch.bfloat16


def program(f: Program, *shape: int, dtype: torch.dtype = F32, more: tuple[tuple[int, ...], ...] = ()) -> Any:
    return f, tuple((one, dtype) for one in (shape, *more))


PROGRAMS: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "softmax 8 x 131072": program(lambda x: torch.softmax(x, -1), 8, 131072),
    "softmax 8 x 131072 bf16": program(lambda x: torch.softmax(x, -1), 8, 131072, dtype=BF16),
    "softmax 32 x 65536": program(lambda x: torch.softmax(x, -1), 32, 65536),
    "softmax 1 x 1048576": program(lambda x: torch.softmax(x, -1), 1, 1 << 20),
    "softmax 64 x 32768": program(lambda x: torch.softmax(x, -1), 64, 32768),
    "log_softmax 16 x 50257 bf16": program(lambda x: torch.log_softmax(x.float(), -1), 16, 50257, dtype=BF16),
    "log_softmax 4 x 32000": program(lambda x: torch.log_softmax(x, -1), 4, 32000),
    "softmax backward 8 x 131072": program(
        lambda g, y: torch.ops.aten._softmax_backward_data(g, y, -1, g.dtype), 8, 131072, more=((8, 131072),)
    ),
    "layer_norm 8 x 131072": program(lambda x: F.layer_norm(x, (131072,)), 8, 131072),
    "rms_norm 16 x 131072 bf16": program(lambda x: F.rms_norm(x, (131072,)), 16, 131072, dtype=BF16),
    "group_norm 2 x 320 x 64 x 64": program(lambda x: F.group_norm(x, 32), 2, 320, 64, 64),
    "group_norm 4 x 64 x 64 x 64, 4 groups": program(lambda x: F.group_norm(x, 4), 4, 64, 64, 64),
    "batch_norm 32 x 64 x 32 x 32": program(lambda x: F.batch_norm(x, None, None, None, None, True), 32, 64, 32, 32),
    "normalized 1024 x 1024": program(lambda x: x / x.norm(), 1024, 1024),
    "normalized 2048 x 2048": program(lambda x: x / x.norm(), 2048, 2048),
    "standardized 1024 x 1024": program(lambda x: (x - x.mean()) / x.std(), 1024, 1024),
    "quantized 1024 x 4096 bf16": program(lambda x: (x / (x.abs().amax() / 127)).round(), 1024, 4096, dtype=BF16),
    "normalized rows 16 x 262144": program(lambda x: x / x.abs().sum(-1, keepdim=True), 16, 1 << 18),
}


@contextmanager
def apart() -> Iterator[None]:
    """No programs go through a row together."""
    kept, cuda.splits_of = cuda.splits_of, lambda *_: 1
    try:
        yield
    finally:
        cuda.splits_of = kept


def main(
    only: Annotated[str | None, typer.Option(help="part of the names of programs")] = None,
    backend: Annotated[str, typer.Option(help="compared with, too; commas between")] = "inductor",
    out: Annotated[Path | None, typer.Option(help="a file for the table, too")] = None,
) -> None:
    """Few long rows, each gone through by several programs together, and not."""
    compare(
        PROGRAMS,
        {"apart": apart, "together": nullcontext},
        tuple(name for name in backend.split(",") if name),
        lambda told: torch.randn(told[0], device="cuda").to(told[1]),
        only,
        out,
    )


if __name__ == "__main__":
    typer.run(main)
