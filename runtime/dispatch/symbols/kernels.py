"""Operators on symbols: what torch runs in the place of kernels that ask for the value of a symbolic number, and what their gradients are told.

What is registered here holds for the process, where torch asks Python kernels first: where sizes may be symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import sympy
import torch

from ....generated.decompositions import COMPOSITES, NUMBERED, SPARED
from ...torch_compat import DispatchKey, running_node


def register() -> None:
    """Have torch run what `specs/decompositions.yaml` says."""
    for op, function in COMPOSITES.items():
        op.py_kernels.setdefault(DispatchKey.CompositeImplicitAutograd, function)
    for op, (function, name, position) in NUMBERED.items():
        if DispatchKey.Autograd not in op.py_kernels:
            op.py_impl(DispatchKey.Autograd)(_kernel(op, function, name, position))


def _kernel(op: Any, function: Callable[..., Any], name: str, position: int) -> Callable[..., Any]:
    """`function` where that argument is a symbol, for what it returns no `NotImplemented` for; else the operator as autograd follows it."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        number = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(number, (torch.SymInt, torch.SymBool)) and any(map(_may_require_grad, (*args, *kwargs.values()))):
            number = _as_float(number)
            args = tuple(number if k == position else a for k, a in enumerate(args))
            kwargs = {key: number if key == name else a for key, a in kwargs.items()}
        if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            found = function(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return op._op_dk(DispatchKey.Autograd, *args, **kwargs)

    return kernel


def _may_require_grad(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and (argument.is_floating_point() or argument.is_complex())


def _as_float(number: torch.SymInt | torch.SymBool) -> Any:
    """The same number to a floating operand. Autograd's formulas compare floats, but neither symbolic integers nor truths."""
    return torch.sym_ite(number, 1.0, 0.0) if isinstance(number, torch.SymBool) else torch.sym_float(number)


@contextmanager
def of_gradients(shape_env: Any) -> Iterator[None]:
    """While autograd computes gradients: whether a symbolic number is 1 need not be known where a formula asks only to spare a product, and
    sizes from data are symbols (of a sparse gradient that leaves rows out), whatever Dynamo was told of those of the program.
    """
    if shape_env is None:
        yield
        return
    ask, settings = shape_env.evaluate_sym_node, shape_env.settings

    def answer(node: Any, *args: Any, **kwargs: Any) -> Any:
        return False if _is_spared(node.expr) else ask(node, *args, **kwargs)

    shape_env.evaluate_sym_node = answer
    shape_env.settings = replace(settings, allow_dynamic_output_shape_ops=True)
    try:
        yield
    finally:
        shape_env.settings = settings
        del shape_env.evaluate_sym_node


def _is_spared(expr: Any) -> bool:
    """Whether a formula asks if a symbolic number is the one for which it spares work."""
    if not isinstance(expr, sympy.Eq) or not expr.free_symbols or (node := running_node()) is None:
        return False
    number = SPARED.get(node.name())
    return number is not None and any(a.is_number and float(a) == number for a in expr.args)
