"""Programs with conditions, loops and scans, of two matrices of one size; predicates are sums of numbers of one sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

Program = Callable[..., Any]


def rand(*size: int, sign: int = 1, device: str = "cpu") -> Tensor:
    """Numbers of one sign, so that predicates do not depend on rounding."""
    return sign * (torch.rand(size, device=device) + 0.1)


# --- autograd follows them


def branches(x: Tensor, y: Tensor) -> Any:
    def positive(x: Tensor, y: Tensor) -> Any:
        return (x @ y.t()).relu(), (x * y).sum(0)

    def negative(x: Tensor, y: Tensor) -> Any:
        return (x * 2) @ y.t(), x.sin().sum(0)

    a, b = torch.cond(x.sum() > 0, positive, negative, (x, y))
    return a * 2, b + 1


def transposed(x: Tensor, y: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.t() + 1, lambda x: x.t().cos(), (x,))


def strided_operand(x: Tensor, y: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a.softmax(-1), lambda a: a.cos(), (x[:, ::2],))


def expanded_operand(x: Tensor, y: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a.cos(), (x[0].expand(4, x.shape[1]),))


def computed_operand(x: Tensor, y: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a.sum(-1), lambda a: a.cos().sum(-1), (x.t() * 2,))


def closure(x: Tensor, y: Tensor) -> Any:
    h = x @ y.t()
    return torch.cond(h.sum() > 0, lambda a: (a * h).sum(), lambda a: a.sum() * y.sum(), (x.sum(1),))


def nested(x: Tensor, y: Tensor) -> Any:
    def large(x: Tensor) -> Tensor:
        return torch.cond(x.abs().sum() > 1, lambda x: x.sin() * 2, lambda x: x * x, (x,))

    return torch.cond(x.sum() > 0, large, lambda x: large(x - 1), (x,))


def rows(x: Tensor, y: Tensor) -> Any:
    return scan(lambda c, row: (c * 0.9 + row, c.sin()), y[0].clone(), x)


def columns_reversed(x: Tensor, y: Tensor) -> Any:
    return scan(lambda c, row: (c * 0.9 + row, c.sin()), y[:, 0].clone(), x, dim=1, reverse=True)


def containers(x: Tensor, y: Tensor) -> Any:
    weight = y.t() @ y * 0.01

    def step(c: Any, rows: Any) -> Any:
        return {"a": (c["a"] + rows[0] @ weight).tanh(), "n": c["n"] + 1}, (c["a"].sin(), rows[1] + c["n"])

    return scan(step, {"a": y[0].clone(), "n": y.new_tensor(2.0)}, (x, y))


def branch_in_scan(x: Tensor, y: Tensor) -> Any:
    def step(c: Tensor, row: Tensor) -> Any:
        n = torch.cond(row.sum() > 0, lambda c, r: c.sin() + r, lambda c, r: c * r, (c, row))
        return n, n * 2

    return scan(step, y[0], x)


DIFFERENTIABLE: dict[str, Program] = {
    "branches": branches,
    "transposed": transposed,
    "strided operand": strided_operand,
    "expanded operand": expanded_operand,
    "computed operand": computed_operand,
    "closure": closure,
    "nested": nested,
    "branch in scan": branch_in_scan,
    "scan of rows": rows,
    "scan of columns, reversed": columns_reversed,
    "scan of containers": containers,
}

# --- it does not: loops


def _counter(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=x.device)


def counted(x: Tensor, y: Tensor) -> Any:
    return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, (x * 1.5).sin()), (_counter(x), x))


def counted_on_the_processor(x: Tensor, y: Tensor) -> Any:
    return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, (x * 1.5).sin()), (torch.tensor(0), x))


def never(x: Tensor, y: Tensor) -> Any:
    return while_loop(lambda i, x: i < 0, lambda i, x: (i + 1, (x * 1.5).sin()), (_counter(x), x))


def counted_in_python(x: Tensor, y: Tensor) -> Any:
    # Few runs of many rows too: each makes what rounding does half as large again.
    return while_loop(lambda i, x: i < x.shape[0], lambda i, x: (i * 3 + 1, (x * 1.5).sin() + i), (0, x))[1]


def until(x: Tensor, y: Tensor) -> Any:
    return while_loop(lambda x: x.abs().sum() > 0.1, lambda x: (x * y[0, 0] * 0.5,), (x,))


def branch_in_loop(x: Tensor, y: Tensor) -> Any:
    def body(i: Tensor, x: Tensor) -> Any:
        return i + 1, torch.cond(i % 2 == 0, lambda x: x - 0.5, lambda x: x * y, (x,))

    return while_loop(lambda i, x: i < 6, body, (_counter(x), x))


def loop_in_branch(x: Tensor, y: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: counted(x, y)[1], lambda x: x.cos(), (x,))


LOOPS: dict[str, Program] = {
    "loop": counted,
    "loop counted on the processor": counted_on_the_processor,
    "loop without a run": never,
    "loop counted in Python": counted_in_python,
    "loop until small": until,
    "branch in loop": branch_in_loop,
    "loop in branch": loop_in_branch,
}
