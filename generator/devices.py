"""On which devices an overload can be native at all, by what its entry says: its condition, the routines that it calls, how it updates."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from .op_entries import Lowering, OpEntry, Section

Way = TypeVar("Way")


@dataclass(frozen=True)
class Device:
    """What is known of lowering for a device.

    facts      the helpers that have one answer there
    routines   the routines that it has, `file.function`; None: all
    modes      the updates of a scatter that it has; None: all
    """

    facts: Mapping[str, bool] = field(default_factory=dict)
    routines: frozenset[str] | None = None
    modes: frozenset[str] | None = None


PROCESSOR = Device({"is_on_gpu": False, "rows_in_registers": False})
GPU = Device({"is_on_gpu": True, "pays_as_loops": False}, routines=frozenset(), modes=frozenset({"set", "sum"}))


def native_on(device: Device, entries: Iterable[OpEntry]) -> frozenset[str]:
    """The overloads whose functions can answer for `device`: not those whose condition never holds there, and whose every way leads to what
    it does not have.
    """
    lowerings = [(e.kind, w) for e in entries for w in e.lowerings]
    lost: set[str] = set()
    before = -1
    while len(lost) != before:  # what calls one of these is lost, too
        before = len(lost)
        lost |= {w.schema.id for kind, w in lowerings if not _answers(device, kind, w, lost)}
    return frozenset(w.schema.id for _, w in lowerings) - lost


def updates_left(device: Device, entry: OpEntry) -> frozenset[str]:
    """The updates that a scatter has on `device`, where it has others elsewhere; none where there is no difference."""
    if entry.kind != "scatter" or device.modes is None:
        return frozenset()
    every = frozenset().union(*(_modes(w.sections.get("mode")) for w in entry.lowerings))
    return every & device.modes if every - device.modes else frozenset()


def _answers(device: Device, kind: str, w: Lowering, lost: set[str]) -> bool:
    ways = _Ways(device, lost)
    condition = w.sections.get("native_if")
    if condition is not None and isinstance(condition.tree, ast.expr) and ways.truth(condition.tree) is False:
        return False
    if kind == "scatter" and device.modes is not None and not device.modes & _modes(w.sections.get("mode")):
        return False
    parts = [section for _, section in (*w.lets, *w.withs)]
    parts += [section for key, section in w.sections.items() if key != "native_if"]
    return all(map(ways.possible, parts))


def _modes(section: Section | None) -> frozenset[str]:
    """The updates that a scatter may have."""
    return frozenset(["set"]) if section is None else frozenset(_results(section.tree))


def _results(node: ast.AST | list[ast.stmt]) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from (*_results(node.body), *_results(node.orelse))
    elif isinstance(node, ast.Constant):
        yield str(node.value)


class _Ways:
    """What certainly happens when expressions are evaluated for a device, which has none of the overloads `lost`."""

    def __init__(self, device: Device, lost: set[str]) -> None:
        self.device, self.lost = device, lost

    def truth(self, node: ast.expr) -> bool | None:
        """Whether a condition holds for every call; None where it depends."""
        match node:
            case ast.Constant(value=value):
                return bool(value)
            case ast.Call(func=ast.Name(id=name)):
                return self.device.facts.get(name)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = self.truth(operand)
                return None if value is None else not value
            case ast.BoolOp(op=op, values=values):
                ends = isinstance(op, ast.Or)  # the value that decides
                found = [self.truth(v) for v in values]
                return ends if ends in found else None if None in found else not ends
            case ast.IfExp(test=test, body=body, orelse=orelse):
                taken = {self.truth(way) for way in self._taken(test, body, orelse)}
                return taken.pop() if len(taken) == 1 else None
        return None

    def possible(self, section: Section) -> bool:
        """Whether there is a way through the section that needs nothing which the device lacks."""
        if not self._may_lack(section):
            return True
        if isinstance(section.tree, list):
            return "returns" in self._ends(section.tree, section)
        return not self._fails(section.tree, section)

    def _may_lack(self, section: Section) -> bool:
        """Whether the section mentions what the device lacks: quicker than going its ways."""
        if self.device.routines is not None and "routine" in section.called:
            return True
        return bool(self.lost) and any(told.overload in self.lost for told in section.resolved.values())

    def _ends(self, statements: list[ast.stmt], section: Section) -> set[str]:
        """How the statements may end: 'fails', 'returns', 'goes on'."""
        found: set[str] = set()
        for node in statements:
            if isinstance(node, ast.If):
                ways = [{"fails"}] if self._fails(node.test, section) else []
                ways = ways or [self._ends(w, section) for w in self._taken(node.test, node.body, node.orelse)]
                after = set().union(*ways)
            elif isinstance(node, (ast.Assign, ast.Return)) and node.value is not None:
                fails = self._fails(node.value, section)
                after = {"fails" if fails else "returns" if isinstance(node, ast.Return) else "goes on"}
            else:
                after = {"goes on"}
            found |= after - {"goes on"}
            if "goes on" not in after:
                return found
        return found | {"goes on"}

    def _fails(self, node: ast.AST, section: Section) -> bool:
        """Whether evaluating `node` certainly asks for what the device does not have."""
        if isinstance(node, ast.IfExp):
            ways = self._taken(node.test, node.body, node.orelse)
            return self._fails(node.test, section) or all(self._fails(way, section) for way in ways)
        if isinstance(node, ast.BoolOp):  # the others may not be reached
            return self._fails(node.values[0], section)
        match node:
            case ast.Call(func=ast.Name(id="routine"), args=[ast.Constant(value=str(name)), *_]):
                return self.device.routines is not None and name not in self.device.routines
        told = section.resolved.get(node)
        if told is not None and told.overload in self.lost:
            return True
        return any(self._fails(child, section) for child in ast.iter_child_nodes(node))

    def _taken(self, test: ast.expr, yes: Way, no: Way) -> list[Way]:
        value = self.truth(test)
        return [yes, no] if value is None else [yes if value else no]
