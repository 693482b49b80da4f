"""What each step of a plan has to do, at the sizes of one call: bytes that it reads and writes, and operations. Estimates of a model: every buffer
is read once and written once, whatever caches do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..ir.index import Atom, Expr, Sym, Val, Var, of
from ..ir.nodes import FLOATS, ITEMSIZE, Buffer, Ref
from ..ir.work import cost
from .plan import CopyStep, ExternStep, Kernel, KernelStep, Plan, Reduce, Scan, Step, Store, ViewOf
from .statements import statement_nodes
from .steps import step_reads, step_writes

__all__ = ["Sizes", "Work", "nbytes", "product_flops", "step_name", "total", "work_of"]

Number = TypeVar("Number", int, float)

FREE = ("load", "const", "index", "bounded")  # scalar nodes that are no arithmetic


class Sizes:
    """Values of the size symbols of one call."""

    def __init__(self, plan: Plan, names: Iterable[str], given: Iterable[Any] | None) -> None:
        self.known: dict[str, int] = {}
        buffers = {b.name: b for b in plan.inputs}
        for name, value in zip(names, given or (), strict=False):
            if isinstance(value, torch.Tensor) and name in buffers:
                pairs = [*zip(buffers[name].shape, value.shape, strict=False)]
                pairs += zip(buffers[name].stride or (), value.stride(), strict=False)
                for wanted, found in pairs:
                    atom = wanted.atom if isinstance(wanted, Expr) else None
                    if isinstance(atom, Sym):
                        self.known[atom.name] = int(found)
            elif isinstance(value, int):
                self.known[name] = value

    def __call__(self, n: object) -> int | None:
        """A size as a number; None where it is not known before the graph runs."""
        if isinstance(n, int):
            return n
        if not isinstance(n, Expr):
            return None
        if n.is_const:
            return int(n)
        table: dict[Atom, int | Expr] = {
            a: self.known[a.name] for a in n.atoms() if isinstance(a, Sym) and a.name in self.known
        }
        found = n.subst(table)
        return int(found) if isinstance(found, int) or found.is_const else None

    def product(self, sizes: Iterable[object]) -> int | None:
        total = 1
        for n in sizes:
            if (known := self(n)) is None:
                return None
            total *= known
        return total


@dataclass(frozen=True)
class Work:
    """reads and writes: bytes by buffer, None where unknown. operations: weighted by their cost, an addition counts 1; None where unknown.
    product: the dtype of the matrices where they are those of a product, "" for scalar arithmetic.
    """

    reads: Mapping[str, int | None]
    writes: Mapping[str, int | None]
    operations: float | None
    product: str = ""

    @property
    def moved(self) -> int | None:
        return total([*self.reads.values(), *self.writes.values()])


def total(numbers: Iterable[Number | None]) -> Number | None:
    """Their sum; None where one of them is not known."""
    found = list(numbers)
    known = [n for n in found if n is not None]
    return sum(known) if len(known) == len(found) else None


def step_name(step: Step) -> str:
    """What readers call it."""
    if isinstance(step, KernelStep):
        return step.kernel.name
    if isinstance(step, CopyStep):
        return f"copy to {step.target}"
    return step.call.target or f"sizes {', '.join(s.symbol for s in step.call.learns)}"


def work_of(step: Step, plan: Plan, sizes: Sizes) -> Work:
    if isinstance(step, KernelStep):
        return _kernel(step.kernel, plan, sizes)
    if isinstance(step, CopyStep):
        n = nbytes(plan.layouts.get(step.source), sizes)
        return Work({step.source: n}, {step.target: n}, 0)
    return _call(step, plan, sizes)


def nbytes(b: Buffer | None, sizes: Sizes, elements: int | None = None) -> int | None:
    """Of all elements of a buffer, or of so many of them."""
    whole = sizes.product(b.shape) if b is not None else None
    if b is None or whole is None or b.dtype not in ITEMSIZE:
        return None
    return (whole if elements is None else min(whole, elements)) * ITEMSIZE[b.dtype]


def _kernel(kernel: Kernel, plan: Plan, sizes: Sizes) -> Work:
    if kernel.parts:  # as one: what they pass on is not in memory
        parts = [work_of(part, plan, sizes) for part in kernel.parts]
        known = [p.operations for p in parts if p.operations is not None]
        total = sum(known) if len(known) == len(parts) else None
        whole = {n: nbytes(plan.layouts.get(n), sizes) for n in (*kernel.reads, *kernel.writes)}
        product = next((p.product for p in parts if p.product), "")
        return Work({n: whole[n] for n in kernel.reads}, {n: whole[n] for n in kernel.writes}, total, product)
    reads: dict[str, int | None] = {}
    writes: dict[str, int | None] = {}
    operations: float | None = 0
    outer = sizes.product(v.extent for v in kernel.outer)
    for phase in kernel.phases:
        inner = sizes.product(v.extent for v in phase.inner)
        seen: set[Any] = set()
        for st in phase.body:
            for root in statement_nodes(st):
                for node in root.walk(seen.__contains__):
                    seen.add(node)
                    if node.op in FREE:
                        continue
                    own = sizes.product(v.extent for v in phase.inner if v in node.vars())
                    operations = None if None in (own, outer, operations) else operations + cost(node.op) * own * outer  # type: ignore[operator]
            if isinstance(st, Reduce | Scan) or (isinstance(st, Store) and st.mode != "set"):
                operations = None if None in (inner, outer, operations) else operations + inner * outer  # type: ignore[operator]
            if not isinstance(st, Reduce) and st.buffer in kernel.writes:
                met = _met(st.index, sizes)
                size = nbytes(plan.layouts.get(st.buffer), sizes, met)
                again = writes.get(st.buffer, 0)
                writes[st.buffer] = None if None in (size, again) else max(size, again)  # type: ignore[type-var]
    for name in kernel.reads:
        loads = [ld for p in kernel.phases for st in p.body for r in statement_nodes(st) for ld in r.loads()]
        # Phases that read the same elements have loops of their own.
        places = {_form(ld.attr.index): ld.attr.index for ld in loads if ld.attr.buffer == name}
        counts = [_met(index, sizes) for index in places.values()]
        elements = None if None in counts else sum(int(n) for n in counts if n is not None)
        reads[name] = nbytes(plan.layouts.get(name), sizes, elements)
    return Work(reads, {n: writes.get(n) for n in kernel.writes}, operations)


def _form(index: Iterable[Expr]) -> str:
    """An access with its loop variables numbered as they come: equal for loops that go the same way."""
    index = tuple(index)
    variables = dict.fromkeys(a for e in index for a in sorted(e.atoms(), key=lambda a: a.text) if isinstance(a, Var))
    table: dict[Atom, int | Expr] = {v: of(Var(f"v{k}", v.extent)) for k, v in enumerate(variables)}
    return str([(e.subst(table).text, [str(v.extent) for v in variables]) for e in index])


def _met(index: Iterable[Expr], sizes: Sizes) -> int | None:
    """Elements that an access meets as its loops run, if it meets none twice."""
    return sizes.product(v.extent for v in loops_of(index))


def loops_of(index: Iterable[Expr]) -> set[Var]:
    """The loop variables that an access depends on, also by positions that are loaded."""
    variables: set[Var] = set()
    left = [a for e in index for a in e.atoms()]
    while left:
        a = left.pop()
        if isinstance(a, Var):
            variables.add(a)
        elif isinstance(a, Val):
            variables |= a.node.vars()
        else:
            left += [b for e in (getattr(a, "num", None), getattr(a, "den", None)) if e is not None for b in e.atoms()]
    return variables


def _call(step: ExternStep, plan: Plan, sizes: Sizes) -> Work:
    reads: dict[str, int | None] = {}
    for name in step_reads(step):
        reads[name] = nbytes(plan.layouts.get(name), sizes)
    for view in _views((step.args, tuple(v for _, v in step.kwargs))):
        elements = sizes.product(n for n, s in zip(view.shape, view.stride, strict=True) if s != 0)
        reads[view.buffer] = nbytes(plan.layouts.get(view.buffer), sizes, elements)
    outs = {b.name: b for b in step.call.outs}
    writes = {n: nbytes(plan.layouts.get(n, outs.get(n)), sizes) for n in step_writes(step)}
    operations = product_flops(step, plan, sizes) if step.call.target else 0
    given = (a.buffer for a in step.args if isinstance(a, Ref | ViewOf))
    first = next((plan.layouts[n].dtype for n in given if n in plan.layouts), "")
    return Work(reads, writes, operations, first if operations and first in FLOATS else "")


def _views(tree: object) -> Iterable[ViewOf]:
    if isinstance(tree, ViewOf):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for leaf in tree:
            yield from _views(leaf)


def product_flops(step: ExternStep, plan: Plan, sizes: Sizes) -> float | None:
    """Additions and multiplications of a library call, by torch's own formulas, which know products and convolutions; None of others."""
    if step.call.compiled or (formula := _formula(step.call.target)) is None:
        return None
    try:
        args = [_meta(a, plan, sizes) for a in step.args]
        outs = tuple(_tensor(b.shape, b.dtype, sizes) for b in step.call.outs)
        return float(
            formula(
                *args,
                out_val=outs[0] if step.call.single else outs,
                **{k: _meta(v, plan, sizes) for k, v in step.kwargs},
            )
        )
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None  # a formula that wants to know more than sizes


@functools.cache
def _formula(target: str) -> Any:
    from torch.utils.flop_counter import flop_registry

    namespace, name = target.split(".")[:2]
    return flop_registry.get(getattr(getattr(torch.ops, namespace), name, None))


def _meta(x: object, plan: Plan, sizes: Sizes) -> Any:
    if isinstance(x, ViewOf):
        return _tensor(x.shape, plan.layouts[x.buffer].dtype, sizes)
    if isinstance(x, Ref):
        return _tensor(plan.layouts[x.buffer].shape, plan.layouts[x.buffer].dtype, sizes)
    if isinstance(x, (list, tuple)):
        return [_meta(y, plan, sizes) for y in x]
    return sizes(x) if isinstance(x, Expr) else x


def _tensor(shape: Iterable[object], dtype: str, sizes: Sizes) -> torch.Tensor:
    known = [sizes(n) for n in shape]
    if any(n is None for n in known):
        raise ValueError("a size is not known")
    return torch.empty(known, dtype=getattr(torch, dtype), device="meta")  # type: ignore[arg-type]
