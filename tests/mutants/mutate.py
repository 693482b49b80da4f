"""Wrong variants of an expression of the specs: an operator, an argument, a constant or a condition is changed, one at a time."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """What is wrong in a variant, its text, and the functions in whose arguments the change is."""

    what: str
    text: str
    inside: tuple[str, ...] = ()


_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}


def changes(text: str, commutative: Collection[str] = (), body: bool = False) -> Iterator[Change]:
    """All variants of an expression (`body`: of statements), each different from it; nothing where the text is none.

    commutative  functions whose first two arguments may be exchanged.
    """
    try:
        tree = ast.parse(text if body else f"({text})", mode="exec" if body else "eval")
    except SyntaxError:
        return
    seen = {ast.unparse(tree), _canonical(tree)}
    count = sum(1 for _ in ast.walk(tree))
    callers = _callers(tree)
    for k in range(count):
        inside = callers[_node(tree, k)]
        for what, edit in _edits(_node(tree, k), commutative):
            changed = copy.deepcopy(tree)
            replacement = edit(_node(changed, k))
            if replacement is not None:
                changed = _Replace(_node(changed, k), replacement).visit(changed)
            new = ast.unparse(ast.fix_missing_locations(changed))
            if new not in seen and _canonical(changed) not in seen:
                seen.add(new)
                yield Change(what, new, inside)


def normal(text: str) -> str:
    """An expression or statements as variants of it are printed; other text as it is."""
    for source in (f"({text})", text):
        with contextlib.suppress(SyntaxError):
            return ast.unparse(ast.parse(source))
    return text


def _callers(tree: ast.AST) -> dict[ast.AST, tuple[str, ...]]:
    """For each node the functions in whose arguments it is, the outermost first."""
    found: dict[ast.AST, tuple[str, ...]] = {}

    def visit(node: ast.AST, inside: tuple[str, ...]) -> None:
        found[node] = inside
        for child in ast.iter_child_nodes(node):
            is_argument = isinstance(node, ast.Call) and child is not node.func
            visit(child, (*inside, ast.unparse(node.func)) if is_argument else inside)

    visit(tree, ())
    return found


def _canonical(tree: ast.AST) -> str:
    """The text of an expression in which variants that mean the same look the same: loop variables over `zip` have the names of what they are
    taken from, the terms of a sum or product of such variables are sorted, and so are the sides of a difference inside `abs`.
    """
    return ast.unparse(ast.fix_missing_locations(_Canonical().visit(copy.deepcopy(tree))))


class _Canonical(ast.NodeTransformer):
    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        loop = node.generators[0]
        if len(node.generators) == 1 and isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "zip":
            sources = [ast.unparse(a) for a in loop.iter.args]
            if isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == len(sources):
                names = {ast.unparse(x): f"<{source}>" for x, source in zip(loop.target.elts, sources, strict=True)}
                node.elt = _SortedSums(names).visit(node.elt)
                loop.iter.args.sort(key=ast.unparse)
                loop.target = ast.Name("each")
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        inner: ast.AST = node
        while isinstance(inner, ast.Call) and len(inner.args) == 1 and ast.unparse(inner.func) in ("abs", "value_of"):
            inner = inner.args[0]
        if ast.unparse(node.func) == "abs" and isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub):
            inner.left, inner.right = sorted((inner.left, inner.right), key=ast.unparse)
        return node


class _SortedSums(ast.NodeTransformer):
    """Gives variables other names, and sorts sums and products that are made of them alone: these are indices, which do not round."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.get(node.id, node.id))

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Mult) and self._is_index(node.left) and self._is_index(node.right):
            node.left, node.right = sorted((node.left, node.right), key=ast.unparse)
        terms = _terms(node)
        if len(terms) < 2 or not all(map(self._is_index, terms)):
            return node
        first, *rest = sorted(terms, key=ast.unparse)
        return functools.reduce(lambda a, b: ast.BinOp(a, ast.Add(), b), rest, first)

    def _is_index(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.names.values()


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _terms(node.left) + _terms(node.right)
    return [node]


def _node(tree: ast.AST, k: int) -> ast.AST:
    return next(n for i, n in enumerate(ast.walk(tree)) if i == k)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


Edit = Callable[[ast.AST], ast.AST | None]
"""Changes a node in place, or returns what stands in its place."""


def _edits(node: ast.AST, commutative: Collection[str]) -> Iterator[tuple[str, Edit]]:
    if isinstance(node, ast.BinOp):
        yield from _binary(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in _COMPARISONS[type(node.ops[0])]:
            yield "comparison", _setting(ops=[other()])
    elif isinstance(node, ast.BoolOp):
        yield "and/or", _setting(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for k in range(len(node.values)):
            yield "condition dropped", lambda n, k=k: _without(n, k)
    elif isinstance(node, ast.UnaryOp):
        yield "sign or not dropped", lambda n: n.operand  # type: ignore[attr-defined]
    elif isinstance(node, ast.IfExp):
        yield "branches exchanged", lambda n: ast.IfExp(n.test, n.orelse, n.body)  # type: ignore[attr-defined]
        yield "first branch", lambda n: n.body  # type: ignore[attr-defined]
        yield "second branch", lambda n: n.orelse  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant):
        yield from _constant(node.value)
    elif isinstance(node, ast.Call):
        yield from _call(node, commutative)
    elif isinstance(node, ast.If):
        yield "condition", lambda n: ast.If(ast.UnaryOp(ast.Not(), n.test), n.body, n.orelse)  # type: ignore[attr-defined]


def _binary(node: ast.BinOp) -> Iterator[tuple[str, Edit]]:
    other = _OPERATORS.get(type(node.op))
    if other is not None:
        yield "operator", _setting(op=other())
    if isinstance(node.op, ast.Mult):
        yield "operator", _setting(op=ast.Div())
    if isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)):
        yield "operands exchanged", lambda n: ast.BinOp(n.right, n.op, n.left)  # type: ignore[attr-defined]
    yield "left operand alone", lambda n: n.left  # type: ignore[attr-defined]
    yield "right operand alone", lambda n: n.right  # type: ignore[attr-defined]


def _constant(value: object) -> Iterator[tuple[str, Edit]]:
    if isinstance(value, bool):
        yield "constant", _setting(value=not value)
    elif isinstance(value, int):
        yield "constant", _setting(value=value + 1)
        if value:
            yield "constant", _setting(value=value - 1)
    elif isinstance(value, float):
        yield "constant", _setting(value=value * 1.5 if value else 1.0)


def _call(node: ast.Call, commutative: Collection[str]) -> Iterator[tuple[str, Edit]]:
    name = ast.unparse(node.func)
    for k in range(len(node.args) - 1):
        pair = ast.dump(node.args[k]), ast.dump(node.args[k + 1])
        if pair[0] != pair[1] and not (k == 0 and name in commutative):
            yield "arguments exchanged", lambda n, k=k: _exchange(n, k)
    if node.args and not isinstance(node.args[0], ast.Starred):
        yield f"{name} dropped", lambda n: n.args[0]  # type: ignore[attr-defined]
    if len(node.args) > 1:
        yield "argument dropped", lambda n: n.args.pop() and None  # type: ignore[attr-defined, func-returns-value]
    for k in range(len(node.keywords)):
        yield "argument dropped", lambda n, k=k: n.keywords.pop(k) and None  # type: ignore[attr-defined, func-returns-value]


def _setting(**fields: object) -> Edit:
    def edit(node: ast.AST) -> None:
        for name, value in fields.items():
            setattr(node, name, value)

    return edit


def _without(node: ast.AST, k: int) -> ast.AST:
    assert isinstance(node, ast.BoolOp)
    kept = [v for i, v in enumerate(node.values) if i != k]
    return kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)


def _exchange(node: ast.AST, k: int) -> None:
    assert isinstance(node, ast.Call)
    node.args[k], node.args[k + 1] = node.args[k + 1], node.args[k]
