"""From rules to the values that are kept."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UnsupportedError
from .bans import Rules
from .classes import OpClass
from .facts import Facts
from .flow import INFINITE, min_vertex_cut


@dataclass(frozen=True)
class Choice:
    """Node numbers, sorted: forward values handed to the backward, and nodes that it computes again."""

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]

    def bytes(self, f: Facts) -> int:
        """Bytes that are kept only for the backward: neither inputs nor outputs of the forward."""
        return sum(f.size[v] for v in self.saved if f.tensor[v] and not _free(f, v))


def _free(f: Facts, v: int) -> bool:
    """Whether keeping the value costs nothing: the caller has it."""
    return f.output[v] or (f.kind[v] is OpClass.INPUT and not f.raw[v])


def choose(f: Facts, rules: Rules) -> Choice:
    """The values to keep under `rules`. Raises `UnsupportedError` for a value that can be neither kept nor computed again."""
    kept = [_free(f, v) or f.kind[v] is OpClass.CONSTANT for v in range(len(f.nodes))]
    for v in f.wanted:
        if rules.banned[v] and not kept[v] and f.saveable(v):
            kept[v] = True
    inside = _reached(f, f.wanted, kept, rules.banned)
    # Only what depends on a value that must come from the forward has a price; the rest follows from what is kept anyway.
    dear = {v for v in inside if rules.banned[v]}
    order: list[int] = []
    for v in inside:
        if v in dear or any(u in dear for u in f.inputs[v]):
            dear.add(v)
            order.append(v)
    number = {v: k for k, v in enumerate(order)}
    wanted = set(f.wanted)
    capacity = [INFINITE if rules.unsaveable[v] or not f.saveable(v) else rules.weight[v] for v in order]
    cut = min_vertex_cut(
        [[] if rules.banned[v] else [number[u] for u in f.inputs[v] if u in number] for v in order],
        capacity,
        [rules.banned[v] for v in order],
        [v in wanted for v in order],
    )
    for k in cut:
        if capacity[k] >= INFINITE:
            name = f.nodes[order[k]].name
            raise UnsupportedError(f"the backward needs '{name}', which can be neither kept nor computed again")
        kept[order[k]] = True
    return _trace(f, kept)


def _reached(f: Facts, wanted: list[int], kept: list[bool], banned: list[bool]) -> list[int]:
    """Values on the way from what is kept to what the backward wants, in graph order."""
    seen = set()
    stack = [v for v in wanted if not kept[v]]
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        if not banned[v]:
            stack += [u for u in f.inputs[v] if not kept[u] and u not in seen]
    return sorted(seen)


def _trace(f: Facts, kept: list[bool]) -> Choice:
    """Walk up from what the backward wants to the values that are kept. A view of something kept is viewed again, so that no two of
    the saved tensors share memory.
    """
    saved, again = set(), set()
    stack = list(f.wanted)
    while stack:
        v = stack.pop()
        if v in saved or v in again:
            continue
        view = f.kind[v] is OpClass.VIEW and f.root[v] != v and kept[f.root[v]]
        if kept[v] and not view and f.kind[v] is not OpClass.CONSTANT:
            saved.add(v)
        else:
            again.add(v)
            stack += f.inputs[v]
    return Choice(tuple(sorted(saved)), tuple(sorted(again)))
