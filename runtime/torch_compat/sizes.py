"""Private names of symbolic sizes: their expressions, ranges, hints, and what is known of them."""

from typing import Any

import torch

# The environment in which sizes of one graph are symbols; what is raised where Python asks for a number that depends on data.
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

__all__ = [
    "GuardOnDataDependentSymNode", "ShapeEnv", "function_of_numbers", "known", "known_equal", "python_source", "runtime_asserts", "size_hint",
    "symbol_hint", "symbol_range",
]  # fmt: skip


def python_source(expr: object) -> str:
    """A size expression (sympy, with torch's functions) as Python source over its symbols; uses `math` at most."""
    from torch.utils._sympy.printers import PythonPrinter

    text: str = PythonPrinter().doprint(expr).replace("torch.sym_float(", "float(")  # the source is of plain numbers
    return text.replace("torch._sym_sqrt(", "math.sqrt(").replace("OpaqueUnaryFn_", "math.")


def function_of_numbers(name: str) -> Any:
    """The function that `math` has as `name`, for symbolic numbers too; None where torch has none."""
    return getattr(torch, f"_sym_{name}", None)


def symbol_hint(size: object, symbol: object) -> int | None:
    """The value that a size symbol had in the example inputs; None for one that came from data. `size` is a SymInt that mentions it."""
    env = size.node.shape_env  # type: ignore[attr-defined]
    values = getattr(env, "backed_var_to_val", None)  # `var_to_val` before 2.12
    value = (env.var_to_val if values is None else values).get(symbol)
    return None if value is None else int(value)


def symbol_range(size: object, symbol: object) -> tuple[Any, Any]:
    """The least and the greatest value of a symbol, sympy numbers, as guards and conditions of the program say."""
    values = size.node.shape_env.var_to_range[symbol]  # type: ignore[attr-defined]
    return values.lower, values.upper


def runtime_asserts(env: object) -> list[tuple[Any, str]]:
    """Conditions on sizes from data that tracing has relied on, sympy expressions, each with a message; none without a ShapeEnv."""
    found: dict[Any, Any] = getattr(env, "deferred_runtime_asserts", {})
    return [(a.expr, str(a.msg)) for asserts in found.values() for a in asserts]


def known(condition: object) -> bool:
    """Whether a condition on sizes (bool or SymBool) is known to hold for all sizes of the graph; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)  # type: ignore[arg-type]


def known_equal(a: object, b: object) -> bool:
    """Whether two sizes (int or SymInt) are equal for all sizes that the graph is made for, as far as is known; adds no guard."""
    if type(a) is int and type(b) is int:
        return a == b
    return size_hint(a, -1) == size_hint(b, -1) and known(a == b)


def size_hint(size: object, unknown: int) -> int:
    """The value that a size (int or SymInt) had in the example inputs; `unknown` for one that comes from data."""
    node = getattr(size, "node", None)
    if node is None:
        return int(size)  # type: ignore[call-overload,no-any-return]
    return int(node.hint) if node.has_hint() else unknown
