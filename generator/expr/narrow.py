"""What a test tells about the types of variables: which are None, and which are numbers."""

from __future__ import annotations

import ast

from .function import Scope
from .types import NONE, NUMBER, strip


def narrowed(test: ast.expr, scope: Scope, truth: bool) -> Scope:
    """The types once `test` is known to be `truth`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return narrowed(test.operand, scope, not truth)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == truth:
        for v in test.values:
            scope = narrowed(v, scope, truth)
        return scope
    if (
        isinstance(test, ast.Call)
        and isinstance(test.func, ast.Name)
        and test.func.id == "is_number"
        and truth
        and len(test.args) == 1
    ):
        name = test.args[0].id if isinstance(test.args[0], ast.Name) else ""
        return {**scope, name: NUMBER} if name in scope and scope[name].kind in ("tensor", "optional") else scope
    if isinstance(test, ast.Name) and truth and test.id in scope:
        return {**scope, test.id: strip(scope[test.id])}
    if (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id in scope
        and isinstance(test.ops[0], (ast.Is, ast.IsNot))
    ):
        name, is_none = test.left.id, isinstance(test.ops[0], ast.Is) == truth
        return {**scope, name: NONE if is_none else strip(scope[name])}
    return scope
