"""Which forward values are not computed a second time, and what keeping a value costs.

Keeping a value costs its bytes for as long as the backward has not used it, and a write and a read. Computing it again costs reading its
operands, unless they are kept anyway. The cut weighs bytes against bytes; what it cannot see is banned here:

heavy      an operator that is slower than reading its result back (`specs/recompute.yaml`).
fixed      a second run would give something else (random numbers, sizes from data).
shrinks    a reduction that reads more than `SHRINKS` times the bytes that it gives.
far        a value that is also read by a cheap node `FAR` or more heavy kernels later. Such a value (a residual stream, the state of a
           recurrent cell) cannot share a
           kernel with its readers; computed again it would lie in memory from its first use in the backward to its last.
whole      a value that a heavy node reads in the forward, and one in the backward: it lies in memory both times, so that computing it
           again would be a kernel of its own, where reading it costs nothing more.
long       the end of a chain of `CHAIN` pointwise nodes: a backward kernel cannot hold more in registers.
found      a value made of sums of which the forward took an element (a maximum) that the backward looks for: computed again, in another order of
           its sums, it may hold no such element.
"""

from __future__ import annotations

from dataclasses import dataclass

from .classes import OpClass, compares, picks
from .facts import Facts

# The partition knows no machine: it cuts a graph before a target is chosen. The rules above say what these numbers count.
SHRINKS, FAR, CHAIN = 4, 1, 32

#: Weight per byte: of a value that is in memory anyway, of one that would need a write of its own, of a copy of part of a tensor.
IN_MEMORY, WRITTEN, COPIED = 4, 5, 6


@dataclass
class Rules:
    """For one choice of what to keep. `banned`: not computed again, but by the forward; `unsaveable`: not kept; `weight`: of keeping it."""

    banned: list[bool]
    unsaveable: list[bool]
    weight: list[int]


def default_rules(f: Facts) -> Rules:
    """Everything that the forward computed and that the backward reads is kept, but for views (their base is) and checkpointed regions."""
    rules = Rules([False] * len(f.nodes), [False] * len(f.nodes), _weights(f, plain=False))
    for v, n in enumerate(f.nodes):
        cheap = f.kind[v] in (OpClass.CONSTANT, OpClass.SYMBOL, OpClass.VIEW)
        rules.banned[v] = not cheap and not n.meta.get("backward", False)
    _regions(f, rules)
    return rules


def min_cut_rules(f: Facts, *, plain: bool = False) -> Rules:
    """What pays: fewest bytes, with all bans. `plain`: every byte weighs the same."""
    rules = hard_rules(f, plain=plain)
    _soft(f, rules)
    _found(f, rules)
    _regions(f, rules)
    return rules


def hard_rules(f: Facts, *, plain: bool) -> Rules:
    """Only what is heavy or cannot be computed twice is banned. `plain`: every byte weighs the same."""
    rules = Rules([False] * len(f.nodes), [False] * len(f.nodes), _weights(f, plain=plain))
    for v, kind in enumerate(f.kind):
        if kind is OpClass.PART:
            rules.banned[v] = rules.banned[f.inputs[v][0]]
        else:
            rules.banned[v] = kind >= OpClass.HEAVY or f.raw[v]
    return rules


def finish(f: Facts, rules: Rules) -> Rules:
    """Ban what must be found again, and apply the tags of checkpointed regions, to rules that were changed."""
    _found(f, rules)
    _regions(f, rules)
    return rules


def _weights(f: Facts, *, plain: bool) -> list[int]:
    """What keeping each value costs, in quarter bytes."""
    out = []
    for v, size in enumerate(f.size):
        kind = f.kind[v]
        if plain:
            rate = IN_MEMORY
        elif kind is OpClass.VIEW or f.raw[v] or f.lent[v] or f.gaps[v]:
            rate = COPIED
        elif kind >= OpClass.HEAVY or kind is OpClass.PART or _read_later(f, v):
            rate = IN_MEMORY
        else:
            rate = WRITTEN
        out.append(1 if f.is_symbol(v) else size * rate + 1)
    return out


def _read_later(f: Facts, v: int) -> bool:
    """Whether the forward has the value in memory: a heavy node reads it, or one that runs after another heavy node."""
    for u in f.users[v]:
        if f.required[u] and not f.backward[u]:
            if f.level[u] > f.level[v]:
                return True
            if f.kind[u] is OpClass.VIEW and _read_later(f, u):
                return True
    return False


def _soft(f: Facts, rules: Rules) -> None:
    """Bans of what may be computed twice but would not pay. What was recorded in the backward is computed once, there or in the forward."""
    depth = [0] * len(f.nodes)
    for v, kind in enumerate(f.kind):
        if rules.banned[v] or kind in (OpClass.INPUT, OpClass.CONSTANT, OpClass.SYMBOL):
            continue
        if f.nodes[v].meta.get("backward", False):
            continue
        if kind is OpClass.PART:
            whole = f.inputs[v][0]
            rules.banned[v] = rules.banned[whole] or _shrinks(f, whole, f.size[v])
        operands = [u for u in f.inputs[v] if not f.is_symbol(u) or f.kind[u] > OpClass.SYMBOL]
        depth[v] = max((0 if rules.banned[u] else depth[u] for u in operands), default=0)
        if kind not in (OpClass.POINTWISE, OpClass.REDUCTION):
            continue
        depth[v] += 1
        if _shrinks(f, v, f.size[v]) or depth[v] > CHAIN or (f.required[v] and (_read_far(f, v) or _read_whole(f, v))):
            rules.banned[v] = True
            depth[v] = 0


def _shrinks(f: Facts, v: int, size: int) -> bool:
    """Whether a reduction reads much more than the `size` bytes of its result, or of the one result in question."""
    return f.kind[v] is OpClass.REDUCTION and sum(f.size[u] for u in f.inputs[v]) > SHRINKS * size


def _read_far(f: Facts, v: int) -> bool:
    """Whether a cheap node several levels later reads it, or a view of it."""
    stack = [v]
    while stack:
        for u in f.users[stack.pop()]:
            if f.backward[u] or f.kind[u] >= OpClass.HEAVY:
                continue
            if f.kind[u] is OpClass.VIEW:
                stack.append(u)
            elif f.level[u] >= f.level[v] + FAR:
                return True
    return False


def _read_whole(f: Facts, v: int) -> bool:
    """Whether heavy nodes on both sides read it, or a view of it."""
    forward = backward = False
    stack = [v]
    while stack:
        for u in f.users[stack.pop()]:
            if f.kind[u] is OpClass.VIEW:
                stack.append(u)
            elif f.kind[u] >= OpClass.HEAVY:
                forward = forward or f.required[u]
                backward = backward or f.live[u]
    return forward and backward


def _found(f: Facts, rules: Rules) -> None:
    for v, n in enumerate(f.nodes):
        if not compares(n):
            continue
        for u in f.inputs[v]:
            taker = f.root[u] if f.kind[u] is OpClass.VIEW else u
            if f.kind[taker] is OpClass.PART:
                taker = f.inputs[taker][0]
            if picks(f.nodes[taker]):
                for x in f.inputs[taker]:
                    rules.banned[x] = rules.banned[x] or _is_made_of_sums(f, rules, x)


def _is_made_of_sums(f: Facts, rules: Rules, v: int) -> bool:
    """Whether a value that is computed again takes sums that are, too."""
    work, met = [v], {v}
    while work:
        u = work.pop()
        if rules.banned[u] or f.kind[u] <= OpClass.SYMBOL:
            continue
        if f.kind[u] is OpClass.REDUCTION and not picks(f.nodes[u]):
            return True
        new = set(f.inputs[u]) - met
        met |= new
        work += new
    return False


def _regions(f: Facts, rules: Rules) -> None:
    """Checkpointed regions: their nodes are computed again and not kept, but for what leaves the region and what cannot run twice. What is
    pinned outside of them is not computed again.
    """
    leaving = set()
    for v, tag in enumerate(f.tag):
        if tag is None or f.backward[v] or not f.tensor[v]:
            continue
        readers = (u for u in f.users[v] if f.required[u] and not f.backward[u] and f.kind[u] is not OpClass.SYMBOL)
        if any(f.tag[u] != tag for u in readers):
            root = f.root[v]
            leaving.add(root if f.tag[root] == tag and f.tensor[root] else v)
    for v, tag in enumerate(f.tag):
        if f.backward[v] or f.kind[v] <= OpClass.SYMBOL:
            continue
        if tag is None:
            rules.banned[v] = rules.banned[v] or (f.pinned[v] and f.kind[v] is not OpClass.VIEW)
            continue
        whole = f.inputs[v][0] if f.kind[v] is OpClass.PART else v
        once = f.kind[whole] >= OpClass.FIXED or (f.pinned[v] and f.kind[v] is not OpClass.VIEW)
        rules.banned[v] = once or v in leaving
        rules.unsaveable[v] = not rules.banned[v] and not f.output[v]
