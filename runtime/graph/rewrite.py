"""The driver of graph rewrites: one pass in order, each node tried until no rule of its head operator fits.

A replacement stands only if its traced value has the dtype, shape and strides of what it replaces: a wrong rule cannot change a program's
metadata. The rules are data; this file knows no operator.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import OpforgeError
from ..dispatch.operators.effects import must_run
from ..dispatch.operators.fake_memo import symbolic_uncached
from ..dispatch.operators.schema import makes_new, reads_storage
from ..dispatch.storage.regions import is_strided
from . import predicates
from .alike import Alike
from .patterns import Rule, head, match

KEPT_META = ("stack_trace", "nn_module_stack", "source", "backward", "region", "must_save")
LIMIT = 16  # rewrites per node of the graph before the rules are taken to loop


@dataclass
class Report:
    """What a run did: (rule, node) in order, and attempts refused because the result's metadata differed."""

    applied: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


class Builder:
    """Inserts calls before a node, with their fake values."""

    def __init__(self, graph: torch.fx.Graph, before: torch.fx.Node) -> None:
        self.graph, self.before = graph, before
        self.made: list[torch.fx.Node] = []

    def call(self, op: str, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A call of overload `op` (`namespace.name.overload`), or an equal one that comes before."""
        namespace, name, which = op.split(".")
        target = getattr(getattr(getattr(torch.ops, namespace), name), which)
        kept = {k: v for k, v in self.before.meta.items() if k in KEPT_META}
        if (equal := self._equal(target, args, kwargs, kept)) is not None:
            return equal
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        real_args, real_kwargs = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta = kept
        # With grad mode on, autograd refuses some traced values: views whose base was written since.
        mode = predicates.fake_mode_of(self.before)
        with mode, symbolic_uncached(mode, (real_args, real_kwargs)), torch.no_grad():
            node.meta["val"] = target(*real_args, **real_kwargs)
        self.made.append(node)
        return node

    def _equal(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: dict[str, Any]
    ) -> torch.fx.Node | None:
        """A call without effects that gives the same, of the forward or the same pass, that is kept or computed again as this one would be."""
        first = next((a for a in args if isinstance(a, torch.fx.Node)), None)
        if first is None or must_run(target):
            return None
        for node in first.users:
            if node.target is not target or node.args != args or node.kwargs != kwargs or not node < self.before:
                continue
            of_this_pass = kept.get("backward") or not node.meta.get("backward")
            if of_this_pass and all(node.meta.get(k) == kept.get(k) for k in ("region", "must_save")):
                return node
        return None

    def result(self, one: torch.fx.Node, k: int) -> torch.fx.Node:
        """The k-th result of the call that `one` is a result of."""
        call = one.args[0]
        assert isinstance(call, torch.fx.Node)
        node = next((user for user in call.users if user.target is operator.getitem and user.args[1] == k), None)
        if node is not None:
            self.before.prepend(node)
            return node
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(operator.getitem, (call, k))
        node.meta = {name: v for name, v in self.before.meta.items() if name in KEPT_META}
        node.meta["val"] = call.meta["val"][k]
        self.made.append(node)
        return node


def _has_strides(value: Any) -> bool:
    """Whether what a rule has found is no sparse tensor: rules know elements at strides."""
    return not isinstance(value, torch.fx.Node) or is_strided(value.meta.get("val"))


def rewrite(gm: torch.fx.GraphModule, rules: Mapping[str, Sequence[Rule]], *, device: str | None = None) -> Report:
    """Apply `rules` (by what `head` gives for their first node) to the graph in place. `device`: what its values are taken to be on (default:
    where they are).
    """
    graph, report = gm.graph, Report()
    budget = LIMIT * (len(graph.nodes) + 16)
    recent: list[str] = []
    alike = Alike(graph)
    for node in list(graph.nodes):
        work = [node]
        while work:
            current = work.pop()
            if getattr(current, "_erased", False):
                continue
            on = device or _device(current)
            for rule in _for(rules, head(current)):
                if rule.device and rule.device != on:
                    continue
                found: dict[str, Any] = {"out": current, "device": on}
                if not match(rule.match, current, found) or not all(map(_has_strides, found.values())):
                    continue
                if not rule.when(found):
                    continue
                matches = [found] if rule.each is None else alike.of(rule, found)
                if not (done := _replace(graph, rule, matches, report)):
                    continue
                recent = [*recent[-7:], rule.name]
                budget -= len(matches)
                if budget < 0:
                    raise OpforgeError(f"rewrite rules loop without end: {', '.join(dict.fromkeys(recent))}")
                work.extend(reversed(done))
                break
    _eliminate_dead(graph)
    return report


def _for(rules: Mapping[str, Sequence[Rule]], name: str | None) -> Sequence[Rule]:
    """The rules for what `head` gives, those for any result of a call included."""
    if name is None:
        return ()
    found = rules.get(name, ())
    call, bracket, _ = name.partition("[")
    return (*found, *rules.get(f"{call}[]", ())) if bracket else found


def _replace(
    graph: torch.fx.Graph, rule: Rule, matches: Sequence[dict[str, Any]], report: Report
) -> list[torch.fx.Node]:
    """Replace what was matched, all of it or, where one result would have other metadata, nothing. What rules may now fit: the nodes made, and
    calls that have a result less to compute.
    """
    made: list[torch.fx.Node] = []
    pairs: list[tuple[torch.fx.Node, Any]] = []
    for found in matches:
        builder = Builder(graph, found["out"])
        pairs.append((found["out"], rule.replace(found, builder)))
        made += builder.made
        if not _agrees(*pairs[-1]):
            for node in reversed(made):
                graph.erase_node(node)
            report.refused.append((rule.name, found["out"].name))
            return []
    fewer = []
    for old, new in pairs:
        call = old.args[0] if old.target is operator.getitem else None
        _put(graph, old, new)
        report.applied.append((rule.name, old.name))
        if isinstance(call, torch.fx.Node):
            fewer.append(call)
        if isinstance(new, torch.fx.Node) and new not in made:
            made.append(new)
    return [*fewer, *made]


def _device(node: torch.fx.Node) -> str:
    val = node.meta.get("val")
    first = next((v for v in (val if isinstance(val, (list, tuple)) else [val]) if isinstance(v, torch.Tensor)), None)
    return "" if first is None else first.device.type


def _put(graph: torch.fx.Graph, old: torch.fx.Node, new: torch.fx.Node) -> None:
    """`new` in the place of `old`; of a call with several results, in that of each result."""
    if not isinstance(old.meta.get("val"), torch.Tensor):
        for user in list(old.users):
            if not user.users:
                graph.erase_node(user)
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _agrees(old: torch.fx.Node, new: Any) -> bool:
    """Whether `new` has the dtype, device, shape and strides of `old`; of several results, those that are read. An input is no copy of itself
    for who finds elements by their place in the storage: it may begin in the middle of its own.
    """
    if not isinstance(new, torch.fx.Node):
        return False
    if new.op == "placeholder" and makes_new(old.target) and any(reads_storage(user.target) for user in old.users):
        return False
    a, b = old.meta.get("val"), new.meta.get("val")
    if not isinstance(a, (list, tuple)):
        return _same(a, b)
    return (
        isinstance(b, (list, tuple))
        and all(user.target is operator.getitem for user in old.users)
        and all(_same(a[k], b[k]) for user in old.users if user.users and isinstance(k := user.args[1], int))
    )


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return predicates.same_type(a, b)


def _eliminate_dead(graph: torch.fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and head(node) is not None and not node.is_impure() and not must_run(node.target):
            graph.erase_node(node)
