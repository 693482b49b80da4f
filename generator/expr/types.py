"""Types of the expression language, and what may stand for what.

`int` (a Python int) is an `index` (int or index expression) is a `number`; a number may stand for an `elem` (it becomes a constant).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIMPLE = ("tensor", "elem", "int", "index", "number", "bool", "str", "dtype", "none", "any")
_OPEN = ("tuple",)
DTYPE_NAMES = (
    "float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool", "complex64", "complex128",
)  # fmt: skip
# torch's numbers of dtypes, which stand in schemas as defaults
DTYPE_NUMBERS = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    11: "bool",
    15: "bfloat16",
}


@dataclass(frozen=True)
class Type:
    """`kind` is a simple name, `list` (items: one), `tuple` (items: all), `optional` (items: one), `union` (items) or `var` (name)."""

    kind: str
    items: tuple[Type, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        if self.kind == "var":
            return self.name
        if self.kind == "union":
            return " or ".join(map(str, self.items))
        return f"{self.kind}[{', '.join(map(str, self.items))}]" if self.items else self.kind

    @property
    def item(self) -> Type:
        """The element type of a list, or the type under an optional."""
        return self.items[0]

    @property
    def numeric(self) -> bool:
        """Whether Python arithmetic applies: numbers, indices, bools (and what is not known)."""
        return self.kind in ("int", "index", "number", "bool", "any")

    @property
    def has_tensor(self) -> bool:
        """Whether it is, or is made of, tensors."""
        return self.kind == "tensor" or any(t.has_tensor for t in self.items)


TENSOR, ELEM, INT, INDEX, NUMBER, BOOL, STR, DTYPE, NONE, ANY = (Type(k) for k in _SIMPLE)


def list_of(item: Type) -> Type:
    """`list[item]`."""
    return Type("list", (item,))


def optional(item: Type) -> Type:
    """`optional[item]`; of an optional, itself."""
    return item if item.kind in ("optional", "none", "any") else Type("optional", (item,))


def strip(t: Type) -> Type:
    """The type once None is ruled out."""
    return t.item if t.kind == "optional" else t


def accepts(want: Type, have: Type, bound: dict[str, Type] | None = None) -> bool:
    """Whether a value of type `have` may be passed where `want` is expected; type variables are bound (widening) in `bound`."""
    if want.kind == "var":
        if bound is None:
            return True
        bound[want.name] = have if want.name not in bound else join(bound[want.name], have)
        return True
    if "any" in (want.kind, have.kind) or want == have:
        return True
    if want.kind == "union":
        return any(accepts(w, have, bound) for w in want.items)
    if want.kind == "optional":
        return have.kind == "none" or accepts(want.item, strip(have), bound)
    if want.kind == "list":
        if have.kind == "list":
            return accepts(want.item, have.item, bound)
        return have.kind == "tuple" and all(accepts(want.item, h, bound) for h in have.items)
    if want.kind == "tuple":
        return have.kind == "tuple" and len(want.items) == len(have.items) and all(map(accepts, want.items, have.items))
    return have.kind in {
        "index": ("int",),
        "number": ("int", "index", "bool"),
        "elem": ("int", "index", "number", "bool"),
    }.get(want.kind, ())


def join(a: Type, b: Type) -> Type:
    """The narrowest type for a value that is either; `any` when there is none."""
    if a == b or "any" in (a.kind, b.kind):
        return a if a == b else ANY
    if a.kind == "none" or b.kind == "none":
        return optional(b if a.kind == "none" else a)
    if "optional" in (a.kind, b.kind):
        return optional(join(strip(a), strip(b)))
    if a.kind == b.kind == "list":
        return list_of(join(a.item, b.item))
    if a.kind == b.kind == "tuple" and len(a.items) == len(b.items):
        return Type("tuple", tuple(map(join, a.items, b.items)))
    for wide, narrow in ((a, b), (b, a)):
        if wide.kind in ("elem", "number", "index", "list") and accepts(wide, narrow):
            return wide
    return NUMBER if a.numeric and b.numeric else ANY


def item_of(t: Type) -> Type | None:
    """What iterating over `t` gives, or None when it cannot be iterated."""
    if t.kind == "list":
        return t.item
    if t.kind == "tuple":
        result = t.items[0] if t.items else ANY
        for other in t.items[1:]:
            result = join(result, other)
        return result
    return ANY if t.kind == "any" else None


def parse_type(text: str) -> Type:
    """A type from its text: `list[index]`, `optional[T]`, `int | list[int]`; one capital letter is a type variable."""
    parts = _split(text, "|")
    if len(parts) > 1:
        return Type("union", tuple(map(parse_type, parts)))
    text = text.strip()
    match = re.fullmatch(r"(\w+)\[(.*)\]", text)
    if match:
        return Type(match[1], tuple(parse_type(p) for p in _split(match[2], ",")))
    if re.fullmatch("[A-Z]", text):
        return Type("var", name=text)
    if text not in _SIMPLE + _OPEN:
        raise ValueError(f"unknown type {text!r}")
    return Type(text)


def substitute(t: Type, bound: dict[str, Type]) -> Type:
    """`t` with its type variables replaced; `any` for those without a binding."""
    if t.kind == "var":
        return bound.get(t.name, ANY)
    return Type(t.kind, tuple(substitute(x, bound) for x in t.items)) if t.items else t


def of_schema(text: str) -> Type:
    """The type of a torch schema type: `Tensor`, `SymInt[]?`, `Tensor?[]`, …"""
    if text.endswith("?"):
        return optional(of_schema(text[:-1]))
    match = re.fullmatch(r"(.*)\[\d*\]", text)
    if match:
        return list_of(of_schema(match[1]))
    simple = {
        "Tensor": TENSOR,
        "int": INT,
        "SymInt": INDEX,
        "Scalar": NUMBER,
        "float": NUMBER,
        "SymFloat": NUMBER,
        "bool": BOOL,
        "str": STR,
    }
    return DTYPE if text == "ScalarType" else simple.get(text, ANY)


def _split(text: str, separator: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for c in text:
        depth += (c == "[") - (c == "]")
        if c == separator and not depth:
            parts.append(current)
            current = ""
        else:
            current += c
    return [*parts, current]


def describe(t: Type) -> str:
    """A type in a sentence, with its article."""
    text = str(t)
    if t.kind == "none":
        return "None"
    return f"{'an' if text[0] in 'aeio' else 'a'} {text}"
