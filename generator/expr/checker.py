"""What all checks of one text share: where mistakes go, what is known of its nodes, and the question of a node's type."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Mapping

from ..diagnostics import Mistake, did_you_mean
from .function import Function, Scope
from .parse import Text
from .printer import As
from .types import ANY, DTYPE, DTYPE_NAMES, Type, accepts, describe


class ExpressionChecker(ABC):
    """Checks the expressions of one text. `elems`: scalars take precedence (in `expr`, `at`, …). `fixed`: how special names print."""

    def __init__(
        self,
        source: Text,
        function: Function,
        resolved: dict[ast.AST, As],
        *,
        elems: bool = False,
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        self.source, self.function, self.resolved, self.elems = source, function, resolved, elems
        self.fixed = fixed or {}
        self.iterated: set[ast.AST] = set()
        self.seen: dict[ast.AST, tuple[Type, list[Mistake]]] = {}

    @abstractmethod
    def infer(self, node: ast.expr, scope: Scope) -> Type:
        """The type of `node`; `any` after a mistake, so that it is reported once."""

    @abstractmethod
    def starred(self, node: ast.expr, scope: Scope) -> Type:
        """The item type of what is unpacked by `*`."""

    def peek(self, node: ast.expr, scope: Scope) -> Type:
        """The type of something checked already."""
        before, failed = len(self.source.diags.mistakes), self.source.failed
        t = self.infer(node, scope)
        del self.source.diags.mistakes[before:]
        self.source.failed = failed
        return t

    def require(self, node: ast.expr, have: Type, want: Type, what: str = "") -> bool:
        """Record a mistake unless `have` may stand for `want`."""
        if want.kind == "dtype" and have.kind == "str" and isinstance(node, ast.Constant):
            name = str(node.value)
            if name in DTYPE_NAMES:
                return True
            self.error(node, f"{what}expected a dtype, found '{name}'{did_you_mean(name, DTYPE_NAMES)}")
            return False
        if (
            want.kind in ("optional", "union")
            and have.kind == "str"
            and isinstance(node, ast.Constant)
            and node.value in DTYPE_NAMES
        ):
            have = DTYPE
        if accepts(want, have):
            return True
        self.error(
            node, f"{what}expected {describe(want)}, found {describe(have)} '{self.source.of(node)}'{_hint(want, have)}"
        )
        return False

    def error(self, node: ast.AST, message: str) -> Type:
        self.source.error(node, message)
        return ANY


def _hint(want: Type, have: Type) -> str:
    if have.kind == "optional" and accepts(want, have.item):
        return ": it may be None, test it with 'is None' first"
    if want.kind == "int" and have.kind == "index":
        return ": use known(...)"
    if want.kind == "index" and have.kind == "elem":
        return ": use index_of(elem, n)"
    if want.kind == "elem" and have.kind == "tensor":
        return ": read it at coordinates, as in x[*i]"
    return ""
