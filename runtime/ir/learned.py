"""Sizes that are known only when a step of the program has run, and the symbols that an item needs before it can run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .index import Expr, Sym, Val, Var
from .nodes import Extern, Nest, Node

FUNCTIONS = frozenset(("abs", "bool", "float", "int", "math", "max", "min", "round"))
"""Names in the source of a size that are no symbols."""


@dataclass(frozen=True)
class Learned:
    """A symbol whose value an extern call brings: size `dim` of its result `buffer`; or what `source` says, Python over symbols that are known
    by then; or, with neither, the number that the call returns.
    """

    symbol: str
    buffer: str = ""
    dim: int = 0
    source: str = ""


def names_in(source: str) -> set[str]:
    """The symbols that Python source of a size or a condition mentions."""
    return {n.id for n in ast.walk(ast.parse(source, mode="eval")) if isinstance(n, ast.Name)} - FUNCTIONS


def learned_by(items: Iterable[Nest | Extern]) -> set[str]:
    """The symbols of a program that no argument tells, but one of its calls."""
    return {s.symbol for item in items if isinstance(item, Extern) for s in item.learns}


def symbols_of(item: Nest | Extern) -> set[str]:
    """The symbols whose values an item needs when it runs."""
    if isinstance(item, Extern):
        found = _symbols(_sizes((item.args, [v for _, v in item.kwargs])))
        for source in (*(s.source for s in item.learns if s.source), *(source for source, _ in item.demands)):
            found |= names_in(source)
        return found - {s.symbol for s in item.learns}
    sizes = [*item.shape, *(item.stride or ()), *(v.extent for v in (*item.loop_vars, *item.rvars))]
    roots = [item.body]
    if (scatter := item.scatter) is not None:
        sizes += [*scatter.index, *(v.extent for v in scatter.domain)]
        roots += [] if scatter.mask is None else [scatter.mask]
        roots += [a.node for e in scatter.index for a in e.atoms() if isinstance(a, Val)]
    seen: set[Node] = set()
    for root in roots:
        for n in root.walk(seen.__contains__):
            seen.add(n)
            sizes += n.attr.index if n.op == "load" else [n.attr] if n.op == "index" else ()
    return _symbols(sizes)


def _symbols(sizes: Iterable[Any]) -> set[str]:
    atoms = {a for e in sizes if isinstance(e, Expr) for a in e.atoms()}
    inner = {a for v in atoms if isinstance(v, Var) and isinstance(v.extent, Expr) for a in v.extent.atoms()}
    return {a.name for a in atoms | inner if isinstance(a, Sym)}


def _sizes(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for leaf in tree:
            yield from _sizes(leaf)
    else:
        yield tree


__all__ = ["FUNCTIONS", "Learned", "learned_by", "names_in", "symbols_of"]
