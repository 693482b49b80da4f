"""Python numbers of the program that change from call to call: Dynamo passes each as a tensor and reads it in the graph, a symbolic float.

Lowerings take such a number where its value decides nothing (`lower/language/number.py`). Where it does, or no code takes it, Dynamo is asked to look
at the program again with the number as a constant, and guards on it: each value is compiled, as it is with the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import fx

from ....errors import UnsupportedError
from ....generated.schemas import NumberInfo
from ...torch_compat import OpOverload, number_read_from, python_source, pytree, start_anew
from .sizes import Symbols


def changing_numbers(gm: Any) -> dict[str, torch.SymFloat]:
    """Such numbers of a graph of Dynamo's, by the names of their symbols."""
    found: dict[str, torch.SymFloat] = {}
    for node in gm.graph.nodes if isinstance(gm, torch.fx.GraphModule) else ():
        if node.op == "placeholder" and (number := number_read_from(node.meta.get("example_value"))) is not None:
            found[number.node._expr.name] = number
    return found


@contextmanager
def constants_where_needed(gm: Any) -> Iterator[Callable[[], None]]:
    """Compile in the block; raise what makes Dynamo start anew where that cannot be done, or where tracing has found out the value of a number that
    changes: the block calls what it is given once it has traced. Where Dynamo's own run of the program has found one out, the block is not entered.
    """
    numbers = changing_numbers(gm)
    symbols = {name: number.node.expr.free_symbols for name, number in numbers.items()}
    start_anew(name for name, of in symbols.items() if not of)
    before = {id(guard) for number in numbers.values() for guard in number.node.shape_env.guards}

    def settle() -> None:
        guards = [g for number in numbers.values() for g in number.node.shape_env.guards if id(g) not in before]
        start_anew(name for name, of in symbols.items() if any(of & g.expr.free_symbols for g in guards))

    try:
        yield settle
    except UnsupportedError:
        start_anew(numbers)
        raise
    finally:
        settle()


def limited_numbers(nodes: Iterable[fx.Node], symbols: Symbols) -> tuple[NumberInfo, ...]:
    """Numbers that operators take and the dtype of a result has no place for beyond some bound: some kernels compute in a wider dtype, others convert
    the number and raise ("value cannot be converted … without overflow"). And integers that 64 bits may have no place for. Raises
    `UnsupportedError` for a float that inputs alone do not tell.
    """
    read: dict[sympy.Symbol, str] = {}
    found: dict[tuple[str, torch.dtype], NumberInfo] = {}
    for node in nodes:
        if node.op == "placeholder" and (number := number_read_from(node.meta.get("val"))) is not None:
            read[number.node.expr] = f"{{{node.name}}}.item()"
        if read and isinstance(node.target, OpOverload):
            dtypes = {t.dtype for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)}
            for number in _numbers(node, torch.SymFloat, ("number",)):
                source = _source(number, read, symbols) if not dtypes <= _WHOLE else ""
                found.update({(source, dtype): _limits(source, dtype) for dtype in dtypes - _WHOLE})
        if isinstance(node.target, OpOverload):
            for number in _numbers(node, torch.SymInt, ("number", "Tensor")):
                e = number.node.expr
                if _may_be_large(e) and all(s in read or symbols.is_of_input(s) for s in e.free_symbols):
                    source = _source(number, read, symbols)
                    found[source, torch.int64] = _limits(source, torch.int64)
    return tuple(found.values())


def _may_be_large(e: sympy.Expr) -> bool:
    """Whether an integer may have no place in 64 bits although the sizes that it is made of have one: it is no sum of them."""
    return not all(
        len(t.free_symbols) <= 1 and t.as_coeff_Mul()[1].is_Symbol for t in sympy.Add.make_args(e) if t.free_symbols
    )


_WHOLE = frozenset((torch.bool, torch.float64, torch.complex128))
"""Dtypes that have a place for every number."""


def _numbers(node: fx.Node, kind: type, taken: tuple[str, ...]) -> Iterator[Any]:
    """The symbolic numbers of a kind, SymFloat or SymInt, that an operator takes as arguments of these types."""
    for k, a in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        value = node.args[k] if k < len(node.args) else node.kwargs.get(a.name)
        number = value.meta.get("val") if isinstance(value, fx.Node) else None
        if isinstance(number, kind) and any(name in str(a.type) for name in taken):
            yield number


def _limits(source: str, dtype: torch.dtype) -> NumberInfo:
    wide = dtype.is_floating_point or dtype.is_complex
    limits = torch.finfo(dtype) if wide else torch.iinfo(dtype)
    return NumberInfo(source, -limits.max if wide else limits.min, limits.max, infinite=wide)


def _source(number: torch.SymFloat, read: dict[sympy.Symbol, str], symbols: Symbols) -> str:
    parts = {}
    for symbol in number.node.expr.free_symbols:
        source = read.get(symbol) or symbols.read_from_input(symbol)
        if source is None:
            raise UnsupportedError(f"the number {number.node.expr} is made of {symbol}, which no input tells")
        parts[symbol] = sympy.Symbol(source, real=True)
    return python_source(number.node.expr.xreplace(parts))


def literal(value: Any) -> str:
    """A number, text or None as Python source."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    return repr(value)


__all__ = ["changing_numbers", "constants_where_needed", "limited_numbers", "literal"]
