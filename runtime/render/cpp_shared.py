"""Functions of C++ that differ in the numbers of their addresses alone, compiled once.

With symbolic sizes the layers of a model make kernels that do the same with other numbers of channels. As arguments these cost nothing where the
other sizes are arguments already; the C++ compiler, which takes most of the time of compiling, then sees one function for all layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_WORD = re.compile(r"[A-Za-z_]\w*")
REGISTER = r"\breg_\w+"
_LOCAL = re.compile(REGISTER + r"|\b[a-z]+\d+(?:p\d+)+(?:_\w+)?\b")
"""Names of the kernel that are not arguments: registers, and loops numbered by the piece that they run over."""

FEW = 4  # from this many on, functions or pieces that are alike become one function
SHORT = 8  # lines: a function that is no longer is not worth a call
_NUMBER = re.compile(r"(?<=[*+<] )\d+(?=[ ;,)\]])|\b\d+(?= \* )")
"""An integer that takes part in the arithmetic of an address, or that ends a loop. The length of an array and the argument of a template have to
be constants, and are not matched."""


@dataclass(frozen=True)
class Function:
    """One function of a unit. `params`: C++ types by name. `body`: the lines between the braces. `head`: comments above it."""

    name: str
    params: Mapping[str, str]
    body: str
    result: str = "void"
    exported: bool = False
    head: str = ""

    @property
    def text(self) -> str:
        """The definition."""
        kind = (
            'extern "C" __attribute__((visibility("default")))' if self.exported else "static __attribute__((noinline))"
        )
        arguments = ", ".join(f"{kind} {name}" for name, kind in self.params.items())
        return f"{self.head}{kind} {self.result} {self.name}({arguments}) {{\n{self.body}\n}}\n"


def anonymous_body(body: str, params: Mapping[str, str]) -> tuple[str, list[str]]:
    """A body in which arguments, registers and the loops of pieces are named by their position, and the arguments that it uses, in order."""
    used = [w for w in dict.fromkeys(_WORD.findall(body)) if w in params]
    own = dict.fromkeys(_LOCAL.findall(body))
    table = {w: f"arg{k}_" for k, w in enumerate(used)} | {w: f"own{k}_" for k, w in enumerate(own) if w not in params}
    return _WORD.sub(lambda m: table.get(m.group(), m.group()), body), used


def shared(functions: Sequence[Function]) -> list[Function]:
    """The functions, with those that differ only in numbers of addresses turned into calls of a common one, which takes these numbers and stands
    before the first of them. A unit in which no function takes sizes is left as it is: with all numbers known the compiler makes better code.
    """
    if all("int64_t" not in f.params.values() for f in functions):
        return list(functions)
    kinds: dict[tuple[str, ...], list[tuple[Function, list[str]]]] = {}
    for f in functions:
        if f.result == "void" and f.body.count("\n") >= SHORT:
            text, used = anonymous_body(f.body, f.params)
            kinds.setdefault((_NUMBER.sub("#", text), *(f.params[w] for w in used)), []).append((f, used))
    found = {f.name: [f] for f in functions}
    for members in kinds.values():
        if len(members) >= FEW:
            common, *calls = _as_one(members)
            found |= {f.name: [f] for f in calls}
            found[calls[0].name].insert(0, common)
    return [f for own in found.values() for f in own]


def _as_one(members: Sequence[tuple[Function, Sequence[str]]]) -> list[Function]:
    """A function that does the work of all members, and theirs, which call it. Beside each member are the arguments that it uses, in order."""
    columns = list(zip(*(_NUMBER.findall(f.body) for f, _ in members), strict=True))
    differ = [column for column in dict.fromkeys(columns) if len({*column}) > 1]
    names = {column: f"opf_number{n}" for n, column in enumerate(differ)}
    first, used = members[0]
    places = iter(columns)
    body = _NUMBER.sub(lambda m: names.get(next(places), m.group()), first.body)
    params = {w: first.params[w] for w in used} | dict.fromkeys(names.values(), "int64_t")
    common = Function(f"{first.name}_shared", params, body)
    numbers = [", ".join(["", *(column[k] for column in differ)]) for k in range(len(members))]
    calls = [f"    {common.name}({', '.join(own)}{given});" for (_, own), given in zip(members, numbers, strict=True)]
    return [common, *(replace(f, body=call) for (f, _), call in zip(members, calls, strict=True))]


__all__ = ["FEW", "REGISTER", "Function", "anonymous_body", "shared"]
