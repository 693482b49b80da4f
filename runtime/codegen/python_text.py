"""Sizes and constants as Python source, for the wrapper of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..ir.index import Quotient, Sym
from ..ir.nodes import Size


@dataclass
class Names:
    """Python names of the buffers while the wrapper runs, and constants made once when the module is loaded."""

    constants: dict[str, str] = field(default_factory=dict)
    workspace: dict[str, str] = field(default_factory=dict)

    def constant(self, stem: str, text: str) -> str:
        for name, known in self.constants.items():
            if known == text:
                return name
        name = f"{stem}_{len(self.constants)}"
        self.constants[name] = text
        return name


def number(e: Size) -> str:
    """A size as Python source; size symbols are local variables."""
    if isinstance(e, int):
        return str(e)
    out = []
    for monomial, c in e.terms:
        factors = [_factor(a) for a in monomial]
        if c != 1 or not factors:
            factors.insert(0, str(c))
        out.append("*".join(factors))
    return " + ".join(out) or "0"


def _factor(a: object) -> str:
    if isinstance(a, Sym):
        return a.name
    assert isinstance(a, Quotient), a
    return f"(({number(a.num)}) {a.kind} ({number(a.den)}))"


def shape_text(shape: tuple[Size, ...]) -> str:
    return "(" + ", ".join(number(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"


MOST_LINES = 3


def source_lines(origins: Iterable[str]) -> str:
    """The program's lines of some origins (`op: line`), each once, the first of them."""
    lines = list(dict.fromkeys(line for o in origins if (line := o.partition(": ")[2])))
    more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return "; ".join(lines[:MOST_LINES] + more)
