"""Going through the trees of expressions and bodies."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_INNER = ast.expr, ast.stmt, ast.comprehension, ast.keyword
_HOLD_NONE = frozenset(["id", "attr", "arg", "ctx", "op", "ops", "is_async", "kind", "type_comment"])
"""Fields of texts, operators and contexts."""
_FIELDS: dict[type, tuple[str, ...]] = {ast.Constant: ()}
"""Kind of node → its fields that may hold inner ones, of the kinds met so far."""


def nodes(*trees: ast.AST) -> Iterator[ast.AST]:
    """All expressions, statements, comprehensions and keywords of the trees, in no order; several times as quick as `ast.walk`, which also meets an
    object for each operator and context.
    """
    left = list(trees)
    while left:
        node = left.pop()
        yield node
        left += children(node)


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below one that `nodes` meets, in their order."""
    found: list[ast.AST] = []
    fields = _FIELDS.get(node.__class__)
    if fields is None:
        fields = _FIELDS[node.__class__] = tuple(name for name in node._fields if name not in _HOLD_NONE)
    for name in fields:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [v for v in value if isinstance(v, _INNER)]
        elif isinstance(value, _INNER):
            found.append(value)
    return found


def stored(*trees: ast.AST) -> set[str]:
    """Every name that is assigned or bound by a comprehension in the trees."""
    return {n.id for n in nodes(*trees) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


__all__ = ["children", "nodes", "stored"]
