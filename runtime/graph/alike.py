"""Calls that differ in one number: what rules with `each` replace together."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dispatch.operators.effects import gives_the_same
from .patterns import Rule, match

DEPTH = 4  # of calls that are compared by their arguments: a weight is transposed, cast or sliced anew for each step of a loop
LONG = 8  # lists of more arguments are compared by identity
PASS = ("backward", "region", "must_save")  # calls that differ in one of these are computed at different times


@dataclass
class _Group:
    """Matches, and the values of the rule's wildcard among them. `tried`: with how many."""

    matches: list[dict[str, Any]] = field(default_factory=list)
    values: set[int] = field(default_factory=set)
    tried: int = 0


class Alike:
    """The matches of such rules in one graph, by what they have in common. Each call is looked at once, and when its group is whole."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.groups: dict[tuple[str, Hashable], _Group] = {}
        self.seen: dict[str, dict[torch.fx.Node, _Group]] = {}  # by rule

    def of(self, rule: Rule, first: dict[str, Any]) -> list[dict[str, Any]]:
        """The matches that differ from `first` in the wildcard of `rule.each` alone, in the order of the graph, if there is one or more for each
        of its values; else none. What they have in common is that of the earliest.
        """
        assert rule.each is not None
        name, count = rule.each
        if rule.name not in self.seen:
            self.seen[rule.name] = {}
            for node in self.graph.find_nodes(op="call_function", target=first["out"].target):
                found: dict[str, Any] = {"out": node, "device": first["device"]}
                if match(rule.match, node, found):
                    self._add(rule, found)
        group = self._add(rule, first)
        n = count(first)
        if type(n) is not int or len(group.values) < n or group.tried == len(group.matches):
            return []
        again = [(old, self._again(rule, old, first, n)) for old in group.matches]
        # What does not fit now never will: it is not looked at with each match that is found later.
        group.matches = [old for old, now in again if now is not None]
        group.values = {old[name] for old in group.matches}
        group.tried = len(group.matches)
        matches = [now for _, now in again if now is not None]
        if len({now[name] % n for now in matches}) != n:
            return []
        matches.sort(key=lambda now: now["out"])
        return [{**matches[0], "out": now["out"], name: now[name]} for now in matches]

    def _again(self, rule: Rule, old: dict[str, Any], first: dict[str, Any], n: int) -> dict[str, Any] | None:
        """A match as it is now: other rules may have changed the graph."""
        assert rule.each is not None
        name, node = rule.each[0], old["out"]
        found: dict[str, Any] = {"out": node, "device": old["device"]}
        if getattr(node, "_erased", False) or not match(rule.match, node, found):
            return None
        fits = type(found[name]) is int and -n <= found[name] < n and _common(found, name) == _common(first, name)
        return found if fits and rule.when(found) else None

    def _add(self, rule: Rule, found: dict[str, Any]) -> _Group:
        """The group of a match, which it joins: another one than before where rules have changed its arguments since."""
        assert rule.each is not None
        (name, _), node, seen = rule.each, found["out"], self.seen[rule.name]
        group = self.groups.setdefault((rule.name, _common(found, name)), _Group())
        if seen.get(node) is not group:
            seen[node] = group
            if type(found[name]) is int:
                group.matches.append(found)
                group.values.add(found[name])
        return group


def _common(found: dict[str, Any], name: str) -> Hashable:
    """What a match has in common with others of its group: equal arguments, or calls that give the same."""
    values = tuple((k, _key(v, DEPTH)) for k, v in sorted(found.items()) if k not in ("out", name))
    return values, tuple(repr(found["out"].meta.get(k)) for k in PASS)


def _key(value: Any, depth: int) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_key(v, depth) for v in value)
    if not isinstance(value, torch.fx.Node):
        return type(value).__name__, repr(value)
    arguments = (*value.args, *value.kwargs.values())
    if value.op != "call_function" or not gives_the_same(value.target) or depth == 0 or any(map(_is_long, arguments)):
        return value
    return value.target, *(_key(a, depth - 1) for a in arguments), *value.kwargs


def _is_long(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and len(argument) > LONG


__all__ = ["Alike"]
