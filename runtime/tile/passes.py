"""Pass merging: a kernel whose rows do not fit its block gets fewer loops over them, by moving reductions into the first loop that can compute them.

Online reductions move although they need the result of another reduction of that loop: they are updated as that result changes. There are three: sums
of exp(value - max of value), of squares of (value - mean of value), and, beside these, of (value - mean of value): what the mean's rounding leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir.index import Atom, Expr, of, product
from ..ir.nodes import Node, Size
from ..kernels.plan import Kernel, Phase, Reduce, Statement
from .scratch import changed, roots


@dataclass(frozen=True)
class Online(Reduce):
    """The sum over `value` of exp(value - `base`) ("exp") or of (value - `base` / number of points), squared ("squares") or not ("apart"), in the
    loop of the reduction `base` itself (the maximum, or the sum). "apart" uses the means of the sum of squares `beside` it.
    """

    base: str = ""
    of: str = ""
    beside: str = ""


def merge_passes(kernel: Kernel) -> Kernel:
    """The kernel with each reduction in the first loop in which it can be computed."""
    phases = list(kernel.phases)
    for j in range(len(phases)):
        for st in sorted(phases[j].body, key=_is_plain):
            found = _earlier(phases, j, st) if type(st) is Reduce and phases[j].inner else None
            if found is not None:
                i, new = found
                phases[i] = replace(phases[i], body=(*phases[i].body, new))
                phases[j] = replace(phases[j], body=tuple(s for s in phases[j].body if s is not st))
    return replace(kernel, phases=tuple(p for p in phases if p.body))


def _is_plain(st: Statement) -> bool:
    """Whether it is no sum of products: those may bring what others need."""
    return not (isinstance(st, Reduce) and st.value.op == "mul")


def _earlier(phases: Sequence[Phase], j: int, st: Reduce) -> tuple[int, Reduce] | None:
    """The phase before `j` that `st` can move to, and the reduction that it becomes there."""
    made = {s.name: i for i in range(j) for s in phases[i].body if isinstance(s, Reduce)}
    read = {ld.attr.buffer for root in roots(st) for ld in root.loads()}
    last = max((made[name] for name in read if name in made), default=-1)
    stores = [i for i in range(j) for s in phases[i].body if not isinstance(s, Reduce) and s.buffer in read]
    stored = max(stores, default=-1)
    for i in range(max(last, stored + 1, 0), j):
        if [v.extent for v in phases[i].inner] != [v.extent for v in phases[j].inner]:
            continue
        mapping: dict[Atom, int | Expr] = {v: of(w) for v, w in zip(phases[j].inner, phases[i].inner, strict=True)}
        moved = changed(st, mapping, lambda _: None)
        assert isinstance(moved, Reduce)
        if i > last:
            return i, moved
        bases = [s for s in phases[i].body if type(s) is Reduce and s.name in read]
        if len(bases) == 1 and (new := _online(moved, bases[0], phases[i])):
            return i, new
    return None


def _online(st: Reduce, base: Reduce, phase: Phase) -> Online | None:
    """`st` as an online reduction in the `phase` of `base`, if it is one."""
    n, total, count = st.value, base.value, product(v.extent for v in phase.inner)
    if st.kind != "sum" or st.dtype != total.dtype or st.dtype not in ("float32", "float64") or n.dtype != st.dtype:
        return None
    if n.op == "exp" and base.kind == "max" and _is(_difference(n.args[0], total), base):
        return Online(st.name, "sum", total, st.dtype, base.name, "exp")
    squared = n.op == "mul" and n.args[0] is n.args[1]
    mean = _difference(n.args[0] if squared else n, total)
    if base.kind != "sum" or mean is None or mean.op != "div":
        return None
    if not _is(mean.args[0], base) or not _is_number(mean.args[1], count):
        return None
    if squared:
        return Online(st.name, "sum", total, st.dtype, base.name, "squares")
    beside = [s for s in phase.body if isinstance(s, Online) and (s.of, s.base) == ("squares", base.name)]
    return Online(st.name, "sum", total, st.dtype, base.name, "apart", beside[0].name) if beside else None


def _difference(n: Node, value: Node) -> Node | None:
    """What is subtracted from `value`."""
    return n.args[1] if n.op == "sub" and n.args[0] is value else None


def _is(n: Node | None, register: Reduce) -> bool:
    return n is not None and n.op == "load" and n.attr.buffer == register.name


def _is_number(n: Node, value: Size) -> bool:
    return n.op == "const" and n.attr == value


__all__ = ["Online", "merge_passes"]
