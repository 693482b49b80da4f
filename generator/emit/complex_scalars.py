"""Reads specs/scalars.yaml, writes generated/complex_scalars.py: what scalar operations are on complex numbers, by their parts."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ..diagnostics import Diagnostics, did_you_mean
from ..load import Entry
from ..render import header

SPEC = "specs/scalars.yaml"
PATH = "generated/complex_scalars.py"
NAMES = ("a", "b", "c", "d", "e", "f")
"""Real and imaginary part of the first argument, of the second, of the third."""
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def check_parts(entry: Entry, arity: int, scalars: Iterable[str], diags: Diagnostics) -> tuple[str, ...]:
    """The expressions under `complex`: of the result's two parts, or of a result that is real. Mistakes go to `diags`."""
    given = entry.get("complex") or ()
    texts = (given,) if isinstance(given, str) else tuple(given)
    names = [*NAMES[: 2 * arity], "inf"]
    for k, text in enumerate(texts):
        path = ("complex",) if isinstance(given, str) else ("complex", k)
        try:
            tree = ast.parse(text).body[0]
        except (SyntaxError, IndexError):
            diags.error(entry.pos(*path), f"expected an expression, found {text!r}")
            continue
        value = tree.value if isinstance(tree, (ast.Expr, ast.Assign)) else None
        shared = k < len(texts) - 2 and len(texts) > 2
        if value is None or isinstance(tree, ast.Assign) is not shared:
            wanted = "'name = expression'" if shared else "an expression"
            diags.error(entry.pos(*path), f"expected {wanted}, found {text!r}")
            continue
        called = {id(n.func) for n in ast.walk(value) if isinstance(n, ast.Call)}
        for n in ast.walk(value):
            if isinstance(n, ast.Name):
                known = list(scalars) if id(n) in called else names
                if n.id not in known:
                    diags.error(entry.pos(*path, at=n.col_offset), f"unknown name '{n.id}'{did_you_mean(n.id, known)}")
            elif not _allowed(n):
                at = getattr(n, "col_offset", 0)
                diags.error(
                    entry.pos(*path, at=at), f"'{ast.unparse(n)}' may not stand in the parts of a complex number"
                )
        if isinstance(tree, ast.Assign):
            names.append(ast.unparse(tree.targets[0]))
    return texts


def _allowed(n: ast.AST) -> bool:
    if isinstance(n, ast.Call):
        return isinstance(n.func, ast.Name) and not n.keywords
    if isinstance(n, ast.Constant):
        return type(n.value) in (int, float)
    if isinstance(n, ast.Compare):
        return len(n.ops) == 1
    return isinstance(n, (ast.BinOp, ast.UnaryOp, ast.expr_context, *_OPERATORS))


def text_of(scalars: Iterable[tuple[str, int, tuple[str, ...]]]) -> str:
    """The module, of scalars by name with their number of arguments and their expressions."""
    functions, table = [], []
    for name, arity, texts in scalars:
        if not texts:
            continue
        *shared, last = [ast.unparse(_Printer().visit(ast.parse(t))) for t in texts]
        result = last if not shared else f"({shared.pop()}, {last})"
        lines = "\n    ".join([*shared, f"return {result}"])
        functions.append(
            f"# spec: {name}\ndef {name}_(s: Any, {', '.join(f'{n}: Any' for n in NAMES[: 2 * arity])}) -> Any:\n    {lines}\n"
        )
        table.append(f'    "{name}": {name}_,')
    return (
        header(PATH, SPEC)
        + '"""Scalar operations on complex numbers: functions of the parts of their arguments (`s`: the scalar operations on reals)."""\n\n'
        + "from __future__ import annotations\n\nfrom collections.abc import Callable\nfrom math import inf\nfrom typing import Any\n\n\n"
        + "\n\n".join(functions)
        + "\n\nCOMPLEX: dict[str, Callable[..., Any]] = {\n"
        + "\n".join(table)
        + '\n}\n"""Scalar → function of the parts of its arguments, a pair of parts, or one elem where the result is real."""\n'
    )


class _Printer(ast.NodeTransformer):
    """Calls are of scalars."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        assert isinstance(node.func, ast.Name)
        func = ast.Attribute(ast.Name("s", ast.Load()), node.func.id, ast.Load())
        return ast.Call(func, node.args, [])


__all__ = ["NAMES", "PATH", "check_parts", "text_of"]
