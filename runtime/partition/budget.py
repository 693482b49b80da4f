"""How a memory budget is met: a ladder of choices, each keeping fewer bytes and reaching no higher peak than the one before.

The first rung is the minimum cut. On the next all that is cheap is computed again, whatever the bans of `bans.py` say. Then heavy values
go too: the forward is cut into segments at places where little is alive; what is alive there stays, and the segments, from the first on,
are computed again as wholes. (The first segments first: when the backward reaches them, what the later ones kept is free again.) Several
lengths of segments are tried, and none at all, which keeps only inputs and random values.

Computing everything again in one piece would need as much memory in the backward as keeping everything; such rungs are left out, so that
the predicted peak falls with the budget. Fewer bans never give a dearer cut, so the saved bytes fall as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from .bans import Rules, finish, hard_rules, min_cut_rules
from .classes import OpClass
from .cut import Choice, choose
from .facts import Facts
from .peak import peak_bytes

#: Rungs between which a budget may choose at most.
PARTS = 10
#: Numbers of segments that are tried.
SEGMENTS = (12, 6, 3, 2)


@dataclass(frozen=True)
class Rung:
    """A choice, the bytes that it keeps and its predicted peaks: node by node, and with pointwise values in registers."""

    choice: Choice
    bytes: int
    peak: int
    fused: int


def choose_within(f: Facts, budget: float, measured: Callable[[Choice], int | None]) -> Choice:
    """The first rung that keeps at most `budget` times the bytes of the minimum cut; the last one where none does. Rungs whose `measured`
    peak is higher than that of one before are left out.
    """
    first = choose(f, min_cut_rules(f))
    if budget >= 1.0:
        return first
    steps = _thinned(ladder(f, first))
    limit = budget * steps[0].bytes
    chosen, lowest = steps[0], measured(steps[0].choice)
    for rung in steps[1:]:
        if chosen.bytes <= limit:
            break
        peak = measured(rung.choice)
        if lowest is None or peak is None or peak <= lowest:
            chosen, lowest = rung, peak
    return chosen.choice


def _thinned(steps: list[Rung]) -> list[Rung]:
    """The first rung, and of those in the same tenth of its bytes the one that keeps least."""
    parts = {rung.bytes * PARTS // max(1, steps[0].bytes): rung for rung in steps[1:]}
    return [steps[0], *parts.values()]


def ladder(f: Facts, first: Choice) -> list[Rung]:
    """All rungs, from the minimum cut `first` on: bytes fall strictly, the peak never rises."""
    tried = [_rung(f, first)]
    cheap = choose(f, finish(f, hard_rules(f, plain=True)))
    tried.append(_rung(f, cheap))
    forward = [v for v in range(len(f.nodes)) if f.required[v] and f.kind[v] > OpClass.SYMBOL]
    kept = [v for v in cheap.saved if f.tensor[v] and f.kind[v] is not OpClass.INPUT]
    if forward:
        ends = _ends(f, forward)
        crossing = _crossing(f, forward, ends)
        # Where a segment is not computed again, the rules are those of one of the first two rungs.
        for relaxed in (True,) if tried[1].peak <= tried[0].peak else (True, False):
            for count in SEGMENTS:
                cuts = _places(f, forward, crossing, kept if relaxed else list(first.saved), count)
                alive = [[v for v, end in zip(forward[: c + 1], ends, strict=False) if end > c] for c in cuts]
                for done in range(1, len(cuts) + 2):
                    limit = cuts[done - 1] + 1 if done <= len(cuts) else len(forward)
                    tried.append(_rung(f, choose(f, _segments(f, forward[:limit], alive[:done], relaxed=relaxed))))
        tried.append(_rung(f, choose(f, _segments(f, forward, [], relaxed=True))))
    steps = [tried[0]]
    for rung in sorted(tried[1:], key=lambda r: (-r.bytes, r.peak)):
        if rung.bytes < steps[-1].bytes and rung.peak <= steps[-1].peak and rung.fused <= steps[-1].fused:
            steps.append(rung)
    return steps


def _rung(f: Facts, choice: Choice) -> Rung:
    return Rung(choice, choice.bytes(f), peak_bytes(f, choice), peak_bytes(f, choice, fused=True))


def _ends(f: Facts, forward: list[int]) -> list[int]:
    """For each place in the forward where the value that is made there (or a view of it) is last read; 0 for a view."""
    place = {v: k for k, v in enumerate(forward)}
    ends = [0] * len(forward)
    for k, v in enumerate(forward):
        for u in f.inputs[v]:
            r = place.get(f.root[u])
            if r is not None:
                ends[r] = k
    return ends


def _crossing(f: Facts, forward: list[int], ends: list[int]) -> list[int]:
    """For each place the bytes that are alive across it, inputs left out: made before or at it, read after it."""
    change = [0] * (len(forward) + 1)
    for k, v in enumerate(forward):
        if ends[k] > k and f.tensor[v]:
            change[k] += f.size[v]
            change[ends[k]] -= f.size[v]
    return list(accumulate(change[:-1]))


def _places(f: Facts, forward: list[int], crossing: list[int], kept: list[int], count: int) -> list[int]:
    """Places that cut the forward into about `count` segments that keep equal bytes, each where the least is alive nearby."""
    place = {v: k for k, v in enumerate(forward)}
    total = sum(f.size[v] for v in kept)
    reached, marks = 0, [0]
    for v in kept:
        if v in place:
            reached += f.size[v]
            while len(marks) < count and reached * count >= total * len(marks):
                marks.append(place[v])
    marks.append(len(forward) - 1)
    out: list[int] = []
    for before, here, after in zip(marks, marks[1:], marks[2:], strict=False):
        low, high = (before + here) // 2, (here + after) // 2
        best = min(range(low, high + 1), key=lambda k: (crossing[k], abs(k - here)))
        if (not out or best > out[-1]) and 0 < best < len(forward) - 1:
            out.append(best)
    return out


def _segments(f: Facts, again: list[int], stay: list[list[int]], *, relaxed: bool) -> Rules:
    """Rules under which the values `again` are computed again, but for those that `stay`."""
    rules = hard_rules(f, plain=True) if relaxed else min_cut_rules(f, plain=True)
    for v in again:
        if f.kind[v] is OpClass.PART:
            rules.banned[v] = rules.banned[f.inputs[v][0]]
        else:
            rules.banned[v] = f.kind[v] >= OpClass.FIXED
    for alive in stay:
        for v in alive:
            rules.banned[v] = True
    return finish(f, rules)
