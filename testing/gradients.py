"""Gradients of a compiled operator against those of eager (or of a reference), and of a float64 run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .op_check import _REJECTED, Case, _difference, _leaves, _reference_error

Gradients = list[torch.Tensor | None]


def check_gradients(case: Case) -> list[str] | None:
    """A line for each wrong gradient of one call. None where nothing is differentiable: the operator has no formula, or no floating argument."""
    right = _gradients(case.call, case, None)
    if right is None:
        return None
    exact = _gradients(case.call, case, torch.float64)
    torch._dynamo.reset()

    def program(args: list[Any], kwargs: dict[str, Any]) -> Any:
        return case.operator(args, kwargs)

    try:
        ours = _gradients(torch.compile(program, backend="opforge", fullgraph=True, dynamic=False), case, None)
    except Exception as error:  # noqa: BLE001 - whatever is raised is what the user has to see
        return [f"{case.overload}({case.label}): the gradient is not computed: {type(error).__name__}: {error}"]
    if ours is None:
        return [f"{case.overload}({case.label}): no gradient, the reference has one"]
    return list(_compared(case, ours, right, exact))


def _compared(case: Case, ours: Gradients, right: Gradients, exact: Gradients | None) -> Iterator[str]:
    for k, (a, b) in enumerate(zip(ours, right, strict=True)):
        where = f"{case.overload}({case.label}): gradient {k}"
        if a is None or b is None:
            if (a is None) != (b is None) and bool((a if b is None else b).any()):  # type: ignore[union-attr]
                yield f"{where} is {'not there' if a is None else 'there'}, of the reference {'not there' if b is None else 'there'}"
        elif a.shape != b.shape or a.dtype != b.dtype:
            yield f"{where} is {a.dtype}{list(a.shape)}, right is {b.dtype}{list(b.shape)}"
        else:
            true = exact[k] if exact is not None else None
            fault = _difference(a, b, true, _reference_error(b))
            if fault is not None:
                yield f"{where} {fault}"


def _gradients(run: Callable[..., Any], case: Case, dtype: torch.dtype | None) -> Gradients | None:
    """Of all floating results with cotangents that are always the same, by every floating argument; with `dtype`, of arguments of that dtype."""
    leaves: list[torch.Tensor] = []

    def fresh(v: Any) -> Any:
        if isinstance(v, list):
            return [fresh(x) for x in v]
        if not isinstance(v, torch.Tensor):
            return v
        if not v.dtype.is_floating_point:
            return v.clone()
        leaves.append((v.detach().to(dtype) if dtype else v.detach().clone()).requires_grad_())
        return leaves[-1]

    args, kwargs = [fresh(a) for a in case.args], {k: fresh(v) for k, v in case.kwargs.items()}
    try:
        with torch.enable_grad():
            results = [
                r for r in _leaves(run(args, kwargs)) if isinstance(r, torch.Tensor) and r.requires_grad and r.numel()
            ]
            if not results or not leaves:
                return None
            generator = torch.Generator().manual_seed(0)
            cotangents = [torch.randint(-8, 9, r.shape, generator=generator).to(r.dtype) / 4 for r in results]
            return list(torch.autograd.grad(results, leaves, cotangents, allow_unused=True))
    except _REJECTED:
        return None
