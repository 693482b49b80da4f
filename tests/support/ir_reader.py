"""Tokens and expressions of the IR's text form (the statements are in `text.py`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from opforge.errors import IRError
from opforge.runtime.ir.index import Expr, Var, expr, of, size
from opforge.runtime.ir.index import Val as IndexVal
from opforge.runtime.ir.nodes import DTYPES, Buffer, LoadAt, Node, Ref, Size

_TOKEN = re.compile(
    r"""\s+ | \#.* |
    (?P<token> "(?:[^"\\]|\\.)*" | (?:\d+\.\d*|\d+)(?:[eE][+-]?\d+)? | [A-Za-z_][\w.]* | // | [-+*%()\[\]{}<>=:,;&] )""",
    re.VERBOSE,
)


def tokens(line: str, number: int) -> list[str]:
    """Split one line; comments go."""
    found: list[str] = []
    at = 0
    while at < len(line):
        m = _TOKEN.match(line, at)
        if m is None:
            raise IRError(f"line {number}: unexpected character {line[at]!r}")
        if m["token"] is not None:
            found.append(m["token"])
        at = m.end()
    return found


class Reader:
    """Recursive descent over the tokens of one line.

    scope    names that may stand in an index (loop variables and symbols).
    buffers  dtype of each buffer defined so far.
    named    the `t0 = …` expressions of this nest.
    """

    def __init__(
        self,
        words: list[str],
        number: int,
        scope: Mapping[str, Expr],
        buffers: Mapping[str, str],
        named: Mapping[str, Node],
    ) -> None:
        self.words, self.number, self.position = words, number, 0
        self.scope, self.buffers, self.named = scope, buffers, named

    # -- tokens ----------------------------------------------------------------------------------------------------
    def peek(self, ahead: int = 0) -> str:
        at = self.position + ahead
        return self.words[at] if at < len(self.words) else ""

    def take(self, word: str) -> bool:
        if self.peek() != word:
            return False
        self.position += 1
        return True

    def expect(self, word: str) -> None:
        if not self.take(word):
            raise self.error(repr(word))

    def error(self, expected: str, found: str | None = None) -> IRError:
        got = self.peek() if found is None else found
        return IRError(
            f"line {self.number}: expected {expected}, found {got!r}"
            if got
            else f"line {self.number}: expected {expected} at the end"
        )

    def end(self) -> None:
        if self.peek():
            raise self.error("the end of the line")

    def _next(self, what: str, pattern: str) -> str:
        word = self.peek()
        if not re.fullmatch(pattern, word):
            raise self.error(what)
        self.position += 1
        return word

    def name(self) -> str:
        return self._next("a name", r"[A-Za-z_][\w.]*")

    def integer(self) -> int:
        sign = -1 if self.take("-") else 1
        return sign * int(self._next("an integer", r"\d+"))

    def string(self) -> str:
        return json.loads(self._next("a string", r'".*"'))

    # -- sizes, buffers, loops -------------------------------------------------------------------------------------
    def sizes(self) -> tuple[Size, ...]:
        return tuple(size(e) for e in self.indices())

    def indices(self) -> tuple[Expr, ...]:
        self.expect("[")
        found: list[Expr] = []
        while not self.take("]"):
            found.append(self.expr())
            if self.peek() != "]":
                self.expect(",")
        return tuple(found)

    def skip_brackets(self) -> None:
        depth = 0
        while True:
            word = self.peek()
            if not word:
                raise self.error("']'")
            depth += (word == "[") - (word == "]")
            self.position += 1
            if depth == 0:
                return

    def buffer(self) -> Buffer:
        name = self.name()
        self.expect(":")
        dtype = self.dtype()
        shape = self.sizes()
        stride = self.sizes() if self.take("stride") else None
        offset = size(self.expr()) if self.take("offset") else 0
        return Buffer(name, shape, dtype, stride, offset, self.take("paired"))

    def dtype(self) -> str:
        if self.peek() not in DTYPES:
            raise self.error("a dtype")
        return self.name()

    def loops(self) -> list[Var | int]:
        """`(i0<4, 0, i1<s0)`: variables, and 0 for a dimension of extent 1."""
        self.expect("(")
        found: list[Var | int] = []
        while not self.take(")"):
            if self.peek(1) == "<":
                name = self.name()
                self.expect("<")
                found.append(Var(name, size(self.expr())))
            else:
                found.append(self.integer())
            if self.peek() != ")":
                self.expect(",")
        return found

    # -- index expressions -----------------------------------------------------------------------------------------
    def expr(self) -> Expr:
        total = self._term()
        while self.peek() in ("+", "-"):
            total = total + self._term() if self.take("+") else total - self._after("-", self._term)
        return total

    def _after(self, word: str, read: Any) -> Expr:
        self.expect(word)
        return read()

    def _term(self) -> Expr:
        if self.take("-"):
            return -self._term()
        value = self._factor()
        while self.peek() in ("*", "//", "%"):
            operator = self.peek()
            right = self._after(operator, self._factor)
            value = value * right if operator == "*" else value // right if operator == "//" else value % right
        return value

    def _factor(self) -> Expr:
        if self.take("("):
            inner = self.expr()
            self.expect(")")
            return inner
        word = self.peek()
        if word.isdigit():
            return expr(self.integer())
        if word == "at" and self.peek(1) == "(":
            self.position += 2
            node = self.node()
            self.expect(",")
            lo = self._bound()
            self.expect(",")
            hi = self._bound()
            self.expect(")")
            return of(IndexVal(node, lo, hi))
        name = self.name()
        if name not in self.scope:
            raise IRError(f"line {self.number}: {name!r} is neither a loop variable here nor a symbol")
        return self.scope[name]

    def _bound(self) -> int | None:
        return None if self.take("None") else self.integer()

    # -- scalar expressions ----------------------------------------------------------------------------------------
    def node(self) -> Node:
        word = self.peek()
        if self.take("["):
            inner = self.expr()
            self.expect("]")
            return Node("index", (), "int64", inner)
        if word == "-" or word[:1].isdigit() or word in ("inf", "nan", "True", "False"):
            value = self._literal()
            self.expect(":")
            return Node("const", (), self.dtype(), value)
        name = self.name()
        if self.peek() == "[":
            return self._load(name)
        attr = None
        if self.take("{"):
            attr = self.data()
            self.expect("}")
        if attr is None and self.peek() != "(":
            if name not in self.named:
                raise IRError(f"line {self.number}: {name!r} is not defined above")
            return self.named[name]
        self.expect("(")
        args: list[Node] = []
        while not self.take(")"):
            args.append(self.node())
            if self.peek() != ")":
                self.expect(",")
        if self.take(":"):
            dtype = self.dtype()
        elif args:
            dtype = args[-1].dtype
        else:
            raise self.error("':' and the dtype")
        return Node(name, tuple(args), dtype, attr)

    def _load(self, name: str) -> Node:
        index = self.indices()
        if self.take(":"):
            dtype = self.dtype()
        elif name in self.buffers:
            dtype = self.buffers[name]
        else:
            raise IRError(f"line {self.number}: buffer {name!r} is not defined above")
        mask = (self.node(),) if self.take("if") else ()
        return Node("load", mask, dtype, LoadAt(name, index))

    def _literal(self) -> int | float | bool:
        if self.peek() in ("True", "False"):
            return self.name() == "True"
        sign = -1 if self.take("-") else 1
        word = self._next("a number", r"\d.*|inf|nan")
        return sign * (int(word) if word.isdigit() else float(word))

    # -- data of extern calls --------------------------------------------------------------------------------------
    def data(self) -> Any:
        word = self.peek()
        if self.take("&"):
            return Ref(self.name(), self.sizes() if self.take("stride") else None, self.take("paired"))
        if self.take("None"):
            return None
        if word == "-" or word[:1].isdigit() or word in ("inf", "nan", "True", "False"):
            return self._literal()
        if self.take("complex"):
            self.expect("(")
            real = self._literal()
            self.expect(",")
            imag = self._literal()
            self.expect(")")
            return complex(real, imag)
        if word.startswith('"'):
            return self.string()
        if self.take("{"):
            inner = self.expr()
            self.expect("}")
            return inner
        if word in ("[", "("):
            self.position += 1
            close = "]" if word == "[" else ")"
            found: list[Any] = []
            while not self.take(close):
                found.append(self.data())
                if self.peek() != close:
                    self.expect(",")
            return found if word == "[" else tuple(found)
        if word.startswith("torch."):
            return self._torch(self.name())
        raise self.error("a value")

    def _torch(self, name: str) -> Any:
        import torch

        attribute = getattr(torch, name.removeprefix("torch."), None)
        if attribute is None:
            raise self.error("a name of torch", name)
        if self.take("("):
            value = attribute(self.string())
            self.expect(")")
            return value
        return attribute
