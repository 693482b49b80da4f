"""Patterns over the functional graph: plain data made by the generator from `specs/rewrites.yaml`, and the one matcher for them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_compat import OpOverload


@dataclass(frozen=True)
class Wild:
    """Matches anything; the same name must match the same thing everywhere. `_` matches without a name."""

    name: str


@dataclass(frozen=True)
class Lit:
    """Matches a number, string, None or list of numbers by value; `True` is not `1`."""

    value: Any


@dataclass(frozen=True)
class Items:
    """Matches a list item by item."""

    items: tuple[Pattern, ...]


@dataclass(frozen=True)
class Call:
    """Matches a call of the overload `op`; arguments not named have their default value."""

    op: str
    args: tuple[tuple[str, Pattern], ...]


@dataclass(frozen=True)
class Part:
    """Matches the `index`-th result of a call that has several; a wildcard matches any of them."""

    call: Call
    index: int | Wild

    @property
    def op(self) -> str:
        """What `head` gives for a node that this matches; for any result without its number."""
        return f"{self.call.op}[{'' if isinstance(self.index, Wild) else self.index}]"


Pattern = Wild | Lit | Items | Call | Part


@dataclass(frozen=True)
class Rule:
    """One rewrite: where `match` holds and `when` is true, `replace` builds the value that takes the place. `device`: only for values there.

    `each`: a wildcard, and how many calls there must be that differ in it alone, by its values 0, 1, …: they are replaced together.
    """

    name: str
    doc: str
    match: Call | Part
    when: Callable[[dict[str, Any]], bool]
    replace: Callable[[dict[str, Any], Any], Any]
    device: str = ""
    each: tuple[str, Callable[[dict[str, Any]], Any]] | None = None


def arguments(node: torch.fx.Node) -> dict[str, Any]:
    """All arguments of a call of an overload by name, with the schema's defaults for those that were not given."""
    schema = node.target._schema  # type: ignore[union-attr]
    given: dict[str, Any] = {}
    for k, arg in enumerate(schema.arguments):
        if k < len(node.args):
            given[arg.name] = node.args[k]
        elif arg.name in node.kwargs:
            given[arg.name] = node.kwargs[arg.name]
        else:
            given[arg.name] = arg.default_value if arg.has_default_value() else None
    return given


def overload_name(node: torch.fx.Node) -> str | None:
    """`namespace.name.overload` of a call of a torch operator, else None."""
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        return str(node.target)
    return None


def head(node: torch.fx.Node) -> str | None:
    """`overload_name`, or that of the call whose k-th result the node takes, followed by `[k]`."""
    if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
        inner = overload_name(node.args[0])
        return None if inner is None else f"{inner}[{node.args[1]}]"
    return overload_name(node)


def match(pattern: Pattern, value: Any, found: dict[str, Any]) -> bool:
    """Whether `value` (an FX argument) has the form of `pattern`; fills `found` with what the wildcards stand for."""
    if isinstance(pattern, Wild):
        if pattern.name == "_":
            return True
        if pattern.name in found:
            return found[pattern.name] is value or (
                not isinstance(value, torch.fx.Node) and same(found[pattern.name], value)
            )
        found[pattern.name] = value
        return True
    if isinstance(pattern, Lit):
        return same(pattern.value, value)
    if isinstance(pattern, Items):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(pattern.items)
            and all(match(p, v, found) for p, v in zip(pattern.items, value, strict=True))
        )
    if not isinstance(value, torch.fx.Node):
        return False
    if isinstance(pattern, Part) and isinstance(pattern.index, Wild):
        return (
            value.op == "call_function"
            and value.target is operator.getitem
            and match(pattern.index, value.args[1], found)
            and match(pattern.call, value.args[0], found)
        )
    if head(value) != pattern.op:
        return False
    if isinstance(pattern, Part):
        return match(pattern.call, value.args[0], found)
    given = arguments(value)
    named = dict(pattern.args)
    for arg in value.target._schema.arguments:  # type: ignore[union-attr]
        if arg.name in named:
            if not match(named[arg.name], given[arg.name], found):
                return False
        elif not same(arg.default_value if arg.has_default_value() else None, given[arg.name]):
            return False
    return True


def same(a: Any, b: Any) -> bool:
    """Equal plain values; a bool never equals a number, nor a zero one of the other sign."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.fx.Node) or isinstance(b, torch.fx.Node):
        return a is b
    if isinstance(a, bool) is not isinstance(b, bool):
        return False
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b and (a != 0 or math.copysign(1, a) == math.copysign(1, b))
    return type(a) is type(b) and bool(a == b)
