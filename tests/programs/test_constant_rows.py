"""Statistics of elements that are all the same, or nearly: a mean that is a rounding off is made large by a normalization.

Each result is as near to a float64 run as eager's is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge  # noqa: F401

Program = Callable[[Tensor], Tensor | tuple[Tensor, ...]]

PROGRAMS: dict[str, Program] = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": F.instance_norm,
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std((0, 2)),
    "var_mean": lambda x: torch.var_mean(x, -1, correction=0),
}
VALUES = (0.1, 3.3, 1000.3, 33333.3, 1.5e30)
ROWS: dict[str, Callable[[int, torch.dtype], Tensor]] = {
    **{str(v): lambda n, dtype, v=v: torch.full((3, 4, n), v, dtype=dtype) for v in VALUES},
    # One step of float32 apart, around a thousand.
    "near": lambda n, dtype: 1000 + torch.randint(2, (3, 4, n)).mul(2.0**-14).to(dtype),
}


def seen(program: Program, x: Tensor) -> list[Tensor]:
    found = program(x)
    return [t.double() for t in ((found,) if isinstance(found, Tensor) else found)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_near_as_eager(name: str, rows: str) -> None:
    program = PROGRAMS[name]
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="opforge", dynamic=False)
    for n in 77, 768, 5000:
        for dtype in torch.float32, torch.bfloat16:
            x = ROWS[rows](n, dtype)
            triples = zip(seen(compiled, x), seen(program, x), seen(program, x.double()), strict=True)
            for mine, eager, true in triples:
                # Beside eager's own error, which may be nan, a few roundings of the result.
                slack = 4 * torch.finfo(dtype).eps * true.abs() + 1e-6
                own = (eager - true).abs().nan_to_num(torch.inf).max()
                assert bool(((mine - true).abs() <= 2 * own + slack).all()), (n, dtype, own, mine - true)


def test_sizes_that_are_symbols() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(PROGRAMS["layer_norm"], backend="opforge", dynamic=True)
    for n in 768, 769:
        assert bool((compiled(torch.full((3, 4, n), 33333.3)) == 0).all())
