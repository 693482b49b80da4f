"""The helper names of the expression language with their types: the table that `docs/spec-language.md` explains.

A helper is a Python builtin, a function of `runtime/lower/language/names.py`, or a method of the builder (printed `b.<name>`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .types import NUMBER, Type, parse_type


@dataclass(frozen=True)
class Parameter:
    """One parameter of a helper."""

    name: str
    type: Type
    required: bool = True
    many: bool = False


@dataclass(frozen=True)
class Helper:
    """A helper's signature and where it comes from: `builtin`, `names` or `builder`."""

    name: str
    parameters: tuple[Parameter, ...]
    result: Type
    origin: str

    @property
    def text(self) -> str:
        """`drop(l: list[T], d: int)`."""
        return f"{self.name}({', '.join(('*' if p.many else '') + f'{p.name}: {p.type}' for p in self.parameters)})"


_TABLE = {
    "builtin": """
        len(l: list[T] | tuple | str) -> int
        range(start: int, stop: int = none, step: int = none) -> list[int]
        zip(*l: list[T]) -> list[any]
        enumerate(l: list[T]) -> list[any]
        sorted(l: list[T]) -> list[T]
        all(l: list[any]) -> bool
        any(l: list[any]) -> bool
        sum(l: list[T]) -> T
        list(l: list[T]) -> list[T]
        int(x: number | bool) -> int
        float(x: number) -> number
    """,
    "names": """
        shape(t: tensor | number) -> list[index]
        size(t: tensor, d: int) -> index
        rank(t: tensor | number) -> int
        numel(t: tensor) -> index
        dtype(x: tensor | elem | number) -> dtype
        is_number(x: tensor | elem | number) -> bool
        is_known(x: number) -> bool
        is_nonzero(x: number) -> bool
        known(x: index) -> int
        number(x: index | number) -> number
        prod(l: list[index]) -> index
        reversed(l: list[T]) -> list[T]
        wrap(d: int, rank: int) -> int
        wraps(dims: int | list[int], rank: int) -> list[int]
        dims_of(dims: optional[int | list[int]], rank: int) -> list[int]
        drop(l: list[T], d: int) -> list[T]
        insert(l: list[T], d: int, x: T) -> list[T]
        replace(l: list[T], d: int, x: T) -> list[T]
        permuted(l: list[T], dims: list[int]) -> list[T]
        inverse(dims: list[int]) -> list[int]
        swapped(l: list[T], a: int, b: int) -> list[T]
        kept(l: list[T], dims: list[int]) -> list[T]
        dropped(l: list[T], dims: list[int]) -> list[T]
        reduced(l: list[index], dims: list[int], keepdim: bool) -> list[index]
        unreduced(i: list[index], r: list[index], dims: list[int], keepdim: bool) -> list[index]
        broadcast(*shape: list[index]) -> list[index]
        broadcasted(i: list[index], shape: list[index]) -> list[index]
        inferred(l: list[index], n: index) -> list[index]
        reshaped(i: list[index], to: list[index], shape: list[index]) -> list[index]
        linear(i: list[index], shape: list[index]) -> index
        unlinear(at: index, shape: list[index]) -> list[index]
        clamped(x: index, lo: index, hi: index) -> index
        ceildiv(a: index, b: index) -> index
        least(*x: index | list[index]) -> index
        greatest(*x: index | list[index]) -> index
        is_on_gpu(t: tensor) -> bool
        pays_as_loops(t: tensor, n: index) -> bool
        rows_in_registers(t: tensor, dim: index, n: index, across: index) -> bool
        was_row_major(t: tensor) -> bool
        opmath(d: dtype) -> dtype
        float_of(d: dtype) -> dtype
        sum_dtype(d: dtype) -> dtype
        part_dtype(d: dtype) -> dtype
        complex_of(d: dtype) -> dtype
        promote_types(a: dtype, b: dtype) -> dtype
        promoted_dtype(*x: optional[tensor | elem | number]) -> dtype
        is_float(d: dtype) -> bool
        is_complex(d: dtype) -> bool
        is_int(d: dtype) -> bool
        is_bool(d: dtype) -> bool
        is_signed(d: dtype) -> bool
        lowest(d: dtype) -> number
        highest(d: dtype) -> number
        unspecified(d: dtype) -> number
        to(x: T, d: dtype) -> T
        value_of(x: index) -> elem
        real(n: index) -> number
        re(x: elem) -> elem
        im(x: elem) -> elem
        paired(re: elem, im: elem) -> elem
        part(x: elem, k: index) -> elem
        within(x: index, lo: index, hi: index) -> elem
        inside(coords: list[index], shape: list[index]) -> elem
        steps(start: number, end: number, step: number) -> index
        sliced(start: optional[index], end: optional[index], n: index) -> list[index]
    """,
    "builder": """
        index_of(x: elem, n: index) -> index
        place_of(x: elem, n: index) -> index
        guarded(cond: elem, value: elem, other: elem) -> elem
        first_of(conds: list[elem], values: list[elem]) -> elem
        demanded(t: tensor, holds: tensor, error: str, says: str) -> tensor
        routine(name: str, inputs: list[tensor], outs: list[any], numbers: list[any]) -> list[tensor]
    """,
}


def _parse(line: str, origin: str) -> Helper:
    head, _, result = line.rpartition(" -> ")
    name, _, rest = head.strip().partition("(")
    parameters = []
    depth, current = 0, ""
    for c in rest[:-1] + ",":
        depth += (c == "[") - (c == "]")
        if c == "," and not depth:
            label, _, kind = current.strip().partition(":")
            kind, default, _ = kind.partition("=")
            parameters.append(Parameter(label.strip("* "), parse_type(kind), not default, label.startswith("*")))
            current = ""
        else:
            current += c
    return Helper(name, tuple(parameters), parse_type(result), origin)


HELPERS: dict[str, Helper] = {
    h.name: h
    for origin, table in _TABLE.items()
    for line in table.strip().splitlines()
    for h in (_parse(line.strip(), origin),)
}
CONSTANTS: dict[str, Type] = {"inf": NUMBER, "nan": NUMBER, "pi": NUMBER, "e": NUMBER}
"""Constants of `runtime/lower/language/names.py`."""
LAZY = frozenset(["range", "zip", "enumerate"])
"""Builtins that give an iterator: wrapped in `list` unless they are iterated over at once."""
COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
"""Comparisons of indices: decided while lowering, by functions of `runtime/lower/language/names.py`."""
IMPORTED = (
    frozenset([n for n, h in HELPERS.items() if h.origin == "names"])
    | frozenset(CONSTANTS)
    | frozenset(COMPARISONS.values())
)
"""Every name that a lowering may import from `runtime/lower/language/names.py`."""
