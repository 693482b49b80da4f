"""What of an expression is known without an operand: divisions by zero, positions outside a list, numbers and lists that would explode.

Folding is bounded: an operation is refused by the size that its result would have, before it is computed.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .parse import Text
from .walk import children, stored

MAX_BITS = 2048
"""Integers of more bits than this are refused; a float holds 1024."""
MAX_ITEMS = 10_000
"""Lists of more items than this are refused, and comprehensions with more steps."""


@dataclass(frozen=True)
class Items:
    """A list of which only the length is known."""

    length: int


Known = int | float | Items | None
"""A number, a list's length, or None: not known here."""
Env = Mapping[str, Known]


def check_constants(source: Text, tree: ast.expr | Sequence[ast.stmt], env: Env) -> Known:
    """What `tree` is as far as it is known, with the names of `env`; mistakes are recorded in `source`."""
    folder = _Folder(source)
    if isinstance(tree, ast.expr):
        return folder.fold(tree, env, 1)
    stores = stored(*tree)
    inner = {name: value for name, value in env.items() if name not in stores}
    for statement in tree:
        folder.statement(statement, inner)
    return None


class _Folder:
    def __init__(self, source: Text) -> None:
        self.source = source

    def error(self, node: ast.AST, message: str) -> None:
        self.source.error(node, message)

    def statement(self, node: ast.stmt, env: Env) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.fold(child, env, 1)
            elif isinstance(child, ast.stmt):
                self.statement(child, env)

    def fold(self, node: ast.expr, env: Env, steps: int) -> Known:
        """The value of `node`, which is computed `steps` times."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, (int, float)) else None
        if isinstance(node, ast.Name):
            return env.get(node.id)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return self.comprehension(node, env, steps)
        if isinstance(node, ast.BinOp):
            return self.binary(node, self.fold(node.left, env, steps), self.fold(node.right, env, steps))
        if isinstance(node, ast.Subscript):
            return self.subscript(node, env, steps)
        values = [self.fold(c, env, steps) for c in children(node) if isinstance(c, ast.expr)]
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            self.fold(keyword.value, env, steps)
        if isinstance(node, ast.UnaryOp) and isinstance(values[0], (int, float)):
            if isinstance(node.op, ast.USub):
                return -values[0]
            return values[0] if isinstance(node.op, ast.UAdd) else None
        if isinstance(node, (ast.List, ast.Tuple)):
            return None if any(isinstance(e, ast.Starred) for e in node.elts) else Items(len(node.elts))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
            return self.range(node, values[1:])
        return None

    def comprehension(self, node: ast.ListComp | ast.GeneratorExp, env: Env, steps: int) -> Known:
        g = node.generators[0]
        source = self.fold(g.iter, env, steps)
        bound = {n.id for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        inner = {name: value for name, value in env.items() if name not in bound}
        if isinstance(source, Items):
            steps *= max(source.length, 1)
            if steps > MAX_ITEMS:
                self.error(node, f"goes through more than {MAX_ITEMS} items")
                return None
        for e in (*g.ifs, node.elt):
            self.fold(e, inner, steps)
        return None if g.ifs else source if isinstance(source, Items) else None

    def range(self, node: ast.Call, values: list[Known]) -> Known:
        if not values or not all(isinstance(v, int) for v in values) or len(values) > 3:
            return None
        numbers = [v for v in values if isinstance(v, int)]
        if len(numbers) == 3 and numbers[2] == 0:
            self.error(node.args[2], "a step of 0")
            return None
        found = range(*numbers)
        # `len` fails for what no index can count.
        count = max(0, -((found.stop - found.start) // -found.step))
        return self.items(node, count)

    def items(self, node: ast.AST, count: int) -> Known:
        if count > MAX_ITEMS:
            self.error(node, f"a list of more than {MAX_ITEMS} items")
            return None
        return Items(count)

    def subscript(self, node: ast.Subscript, env: Env, steps: int) -> Known:
        value = self.fold(node.value, env, steps)
        at = self.fold(node.slice, env, steps)
        if isinstance(value, Items) and isinstance(at, int) and not -value.length <= at < value.length:
            self.error(node.slice, f"'{self.source.of(node.value)}' has {value.length} items")
        return None

    def binary(self, node: ast.BinOp, a: Known, b: Known) -> Known:
        if isinstance(a, Items) or isinstance(b, Items):
            return self.of_lists(node, a, b)
        if a is None or b is None:
            return None
        if isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)) and b == 0:
            self.error(node, "division by zero (infinity is 'inf')")
            return None
        if isinstance(node.op, ast.Pow) and a == 0 and b < 0:
            self.error(node, "division by zero: a negative power of 0")
            return None
        if isinstance(a, int) and isinstance(b, int) and _bits(node.op, a, b) > MAX_BITS:
            self.error(node, f"a number of more than {MAX_BITS} bits")
            return None
        if isinstance(node.op, (ast.LShift, ast.RShift)) and (b < 0 or isinstance(a, float) or isinstance(b, float)):
            self.error(node, "a shift is by a whole number that is not negative")
            return None
        try:
            result = _OPERATIONS[type(node.op)](a, b)
        except OverflowError:
            self.error(node, "a number that no float holds")
            return None
        except TypeError:
            return None  # `&` of a float: the types say what is wrong
        return result if isinstance(result, (int, float)) else None

    def of_lists(self, node: ast.BinOp, a: Known, b: Known) -> Known:
        if isinstance(node.op, ast.Add) and isinstance(a, Items) and isinstance(b, Items):
            return self.items(node, a.length + b.length)
        if isinstance(node.op, ast.Mult):
            for items, times in ((a, b), (b, a)):
                if isinstance(items, Items) and isinstance(times, int):
                    return self.items(node, items.length * max(0, times))
        return None


_OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
    ast.LShift: lambda a, b: a << b,
    ast.RShift: lambda a, b: a >> b,
    ast.BitAnd: lambda a, b: a & b,
    ast.BitOr: lambda a, b: a | b,
    ast.BitXor: lambda a, b: a ^ b,
}


def _bits(op: ast.operator, a: int, b: int) -> int:
    """At least the bits that the result has."""
    if isinstance(op, ast.Pow):
        return 1 if abs(a) < 2 or b < 0 else a.bit_length() * b
    if isinstance(op, ast.LShift):
        return a.bit_length() + max(b, 0)
    if isinstance(op, ast.Mult):
        return a.bit_length() + b.bit_length()
    return max(a.bit_length(), b.bit_length())
