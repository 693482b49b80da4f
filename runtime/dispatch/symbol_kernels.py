"""Operators on symbols: what torch runs in the place of kernels that ask for the value of a symbolic number, and what their gradients are told.

What is registered here holds for the process, where torch asks Python kernels first: where sizes may be symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch

from ...generated.decompositions import COMPOSITES, NUMBERED, SPARED
from ..torch_compat import DispatchKey, running_node


def register() -> None:
    """Have torch run what `specs/decompositions.yaml` says."""
    for op, function in COMPOSITES.items():
        op.py_kernels.setdefault(DispatchKey.CompositeImplicitAutograd, function)
    for op, (function, name, position) in NUMBERED.items():
        for key in (DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA):
            op.py_kernels.setdefault(key, _kernel(op, key, function, name, position))
        op._dispatch_cache.clear()


def _kernel(op: Any, key: Any, function: Callable[..., Any], name: str, position: int) -> Callable[..., Any]:
    """`function` where that argument is a symbol, for what it returns no `NotImplemented` for; else the operator as autograd follows it."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        number = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(number, (torch.SymInt, torch.SymFloat)):
            found = function(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return op._op_dk(key, *args, **kwargs)

    return kernel


@contextmanager
def products_taken(shape_env: Any) -> Iterator[None]:
    """While autograd computes gradients: whether a symbolic number is 1 need not be known where a formula asks only to spare a product by it."""
    if shape_env is None:
        yield
        return
    ask = shape_env.evaluate_sym_node

    def answer(node: Any, *args: Any, **kwargs: Any) -> Any:
        return False if _is_one(node.expr) and _is_spared() else ask(node, *args, **kwargs)

    shape_env.evaluate_sym_node = answer
    try:
        yield
    finally:
        del shape_env.evaluate_sym_node


def _is_one(expr: Any) -> bool:
    """Whether an expression asks if a number is 1."""
    return isinstance(expr, sympy.Eq) and bool(expr.free_symbols) and any(a in (1, 1.0) for a in expr.args)


def _is_spared() -> bool:
    node = running_node()
    return node is not None and node.name() in SPARED
