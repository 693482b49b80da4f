"""Text of a spec → `ast` tree, by a strict whitelist. Every mistake has the place of its characters in the YAML file."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..diagnostics import Diagnostics
from ..load import Entry
from ..yaml_nodes import MAX_DIGITS

MAX_LENGTH = 8000
MAX_DEPTH = 60
_EXPRESSIONS = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Constant, ast.Name, ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp,
    ast.comprehension, ast.Call, ast.keyword, ast.Subscript, ast.Slice, ast.Starred, ast.Load, ast.Store, ast.operator, ast.unaryop, ast.cmpop,
    ast.boolop,
)  # fmt: skip
_OPERATORS = {kind for base in (ast.operator, ast.unaryop, ast.cmpop, ast.boolop) for kind in base.__subclasses__()}
_LEAVES = {ast.Name, ast.Load, ast.Store} | _OPERATORS - {ast.MatMult}  # always allowed, most of all nodes
_PLAIN = {ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp, ast.List, ast.Tuple, ast.Call, ast.Subscript, ast.Starred}
"""Allowed whatever is in them."""
_STATEMENTS = (ast.Module, ast.Assign, ast.If, ast.Return)
_NAMES = {
    ast.Attribute: "an attribute", ast.Lambda: "a lambda", ast.Dict: "a dict", ast.Set: "a set", ast.JoinedStr: "an f-string", ast.NamedExpr: "':='",
    ast.Await: "'await'", ast.DictComp: "a dict comprehension", ast.SetComp: "a set comprehension", ast.Yield: "'yield'", ast.For: "a 'for' loop",
    ast.While: "a 'while' loop", ast.FunctionDef: "a function", ast.Import: "an import", ast.ImportFrom: "an import", ast.Expr: "an expression alone",
    ast.AugAssign: "an update", ast.AnnAssign: "an annotation", ast.Pass: "'pass'", ast.MatMult: "'@'", ast.Delete: "'del'", ast.With: "'with'",
}  # fmt: skip


@dataclass
class Text:
    """One string of a spec entry. `path` finds it in the entry; mistakes go to `diags`, each prefixed once by `note`."""

    entry: Entry
    path: tuple[str | int, ...]
    text: str
    diags: Diagnostics
    note: str = ""
    failed: bool = False
    _starts: list[int] = field(default_factory=list)

    def error(self, at: ast.AST | int, message: str, length: int | None = None) -> None:
        """Record a mistake at a node or a character offset."""
        self.failed = True
        if isinstance(at, ast.AST):
            start, end = self.span(at)
            length = end - start
        else:
            start = at
        value = self.entry.data
        for part in self.path:
            value = value[part]  # type: ignore[index]
        pos = self.entry.pos(*self.path, at=start) if isinstance(value, str) else self.entry.pos(*self.path)
        self.diags.error(replace(pos, length=max(1, length or 1)), message + self.note)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """First and past-the-end character offset of a node (its end is cut to its first line)."""
        start = self.offset(getattr(node, "lineno", 1), getattr(node, "col_offset", 0))
        if getattr(node, "end_lineno", None) != getattr(node, "lineno", None):
            return start, start + 1
        return start, self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def offset(self, line: int, column: int) -> int:
        """Character offset of `ast`'s line and column (a count of UTF-8 bytes)."""
        if not self._starts:
            self._starts = [0]
            for row in self.text.split("\n"):
                self._starts.append(self._starts[-1] + len(row) + 1)
        start = self._starts[min(line, len(self._starts)) - 1]
        return start + len(self.text[start:].encode()[:column].decode("utf-8", "ignore"))

    def of(self, node: ast.AST) -> str:
        """The source text of a node, shortened for messages."""
        start, end = self.span(node)
        text = self.text[start:end]
        return text if len(text) <= 50 else text[:47] + "..."


def parse_expression(source: Text) -> ast.expr | None:
    """The tree of one expression, or None after recording why not."""
    flat = source.text.replace("\n", " ")
    lead = len(flat) - len(flat.lstrip())
    if not flat.strip():
        source.error(0, "expected an expression, found nothing")
        return None
    if (at := _comment(flat)) is not None:
        source.error(at, "an expression holds no comment: put it in a YAML comment above")
        return None
    # Spaces in front would be an indentation for Python; the offsets are repaired below.
    tree = _parse(source, flat.strip(), "eval", lead)
    if tree is None:
        return None
    assert isinstance(tree, ast.Expression)
    if lead or "\n" in source.text.rstrip():
        for node in ast.walk(tree.body):
            if hasattr(node, "col_offset"):
                _shift(source, flat, node, lead)
    return tree.body if _allowed(source, tree.body, _EXPRESSIONS) else None


def parse_body(source: Text) -> list[ast.stmt] | None:
    """The statements of a composite's body, or None after recording why not."""
    tree = _parse(source, source.text, "exec", 0)
    if tree is None:
        return None
    assert isinstance(tree, ast.Module)
    if not tree.body:
        source.error(0, "expected statements, found nothing")
        return None
    return tree.body if _allowed(source, tree, (*_EXPRESSIONS, *_STATEMENTS)) else None


def dotted(node: ast.expr) -> str | None:
    """`sum.dim_IntList` for an attribute chain of names, else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return None


def _shift(source: Text, flat: str, node: ast.AST, lead: int) -> None:
    """Turn the position in the flattened text into line and column of the text itself."""
    body = flat.strip().encode()
    for line, column in (("lineno", "col_offset"), ("end_lineno", "end_col_offset")):
        at = lead + len(body[: getattr(node, column)].decode("utf-8", "ignore"))
        before = source.text[:at]
        setattr(node, line, before.count("\n") + 1)
        setattr(node, column, len(before[before.rfind("\n") + 1 :].encode()))


def _comment(text: str) -> int | None:
    if "#" not in text:
        return None
    try:
        for token in tokenize.generate_tokens(io.StringIO(text.strip()).readline):
            if token.type == tokenize.COMMENT:
                return len(text) - len(text.lstrip()) + token.start[1]
    except (tokenize.TokenError, SyntaxError):
        return None  # the parser will say what is wrong
    return None


def _parse(source: Text, text: str, mode: str, lead: int) -> ast.AST | None:
    if len(text) > MAX_LENGTH:
        source.error(0, f"longer than {MAX_LENGTH} characters: split it with 'let'")
        return None
    if (number := re.search(rf"\d{{{MAX_DIGITS + 1},}}", text)) is not None:
        source.error(lead + number.start(), f"a number has at most {MAX_DIGITS} digits, found one of {len(number[0])}")
        return None
    try:
        return ast.parse(text, mode=mode)
    except SyntaxError as error:
        line = error.lineno or 1
        start = sum(len(row) + 1 for row in text.split("\n")[: line - 1])
        # Python gives no place when the text ends too early.
        at = start + error.offset - 1 if error.offset else len(text.rstrip())
        what = "an expression" if mode == "eval" else "statements"
        source.error(min(lead + at, len(source.text)), f"expected {what}: {error.msg}")
    except (ValueError, RecursionError, MemoryError):
        source.error(0, f"nested deeper than {MAX_DEPTH} levels, or holds a NUL character")
    return None


def _walk(root: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None, int]]:
    """Every node below the root but leaves (names, contexts) in source order with its parent and depth, without recursion."""
    stack: list[tuple[ast.AST, ast.AST | None, int]] = [(root, None, 0)]
    while stack:
        node, parent, depth = stack.pop()
        yield node, parent, depth
        for name in reversed(node._fields):
            value = getattr(node, name, None)
            for child in reversed(value) if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and type(child) not in _LEAVES:
                    stack.append((child, node, depth + 1))


def _allowed(source: Text, root: ast.AST, whitelist: tuple[type, ...]) -> bool:
    skip: set[ast.AST] = set()
    for node, parent, depth in _walk(root):
        place = node if hasattr(node, "lineno") else parent
        if depth > MAX_DEPTH:
            source.error(
                place if place is not None else 0, f"nested deeper than {MAX_DEPTH} levels: split it with 'let'"
            )
            return False
        if parent in skip:
            skip.add(node)
            continue
        if isinstance(node, ast.Attribute) and isinstance(parent, ast.Call) and parent.func is node and dotted(node):
            skip.add(node)  # the name of an overload
            continue
        why = _fault(node, whitelist)
        if why:
            source.error(place if place is not None else 0, why)
            skip.add(node)
    return not source.failed


def _fault(node: ast.AST, whitelist: tuple[type, ...]) -> str | None:
    if type(node) in _PLAIN:
        return None
    if not isinstance(node, whitelist) or type(node) in _NAMES:
        return f"{_NAMES.get(type(node), type(node).__name__)} is not part of the expression language"
    if isinstance(node, ast.Constant) and not isinstance(node.value, (bool, int, float, str, type(None))):
        return f"a literal of type '{type(node.value).__name__}' is not part of the expression language"
    if isinstance(node, ast.Constant) and node.kind:
        return "a prefixed string is not part of the expression language"
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and len(node.generators) != 1:
        return "a comprehension has one 'for'"
    if isinstance(node, ast.comprehension) and node.is_async:
        return "'async' is not part of the expression language"
    if isinstance(node, ast.comprehension) and not _target(node.target, nested=True):
        return "a comprehension binds names, as in 'for a, b in zip(l, m)'"
    if isinstance(node, ast.Slice) and node.step is not None:
        return "a slice has no step here: use reversed(l)"
    if isinstance(node, ast.keyword) and node.arg is None:
        return "'**' in a call is not part of the expression language"
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        return "write a chained comparison as two, joined by 'and' ('&' for elems)"
    if isinstance(node, ast.Assign) and (len(node.targets) != 1 or not _target(node.targets[0])):
        return "expected 'name = expression' or 'a, b = expression'"
    return None


def _target(node: ast.expr, nested: bool = False) -> bool:
    if isinstance(node, ast.Tuple):
        return all(_target(e, nested) if nested else isinstance(e, ast.Name) for e in node.elts)
    return isinstance(node, ast.Name)
