"""A product of matrices and what is beside it as one kernel: what its operands are made of, the product, and what is made of each of its elements.

The steps become one where nobody else reads what they pass on. Whether that is worth it is not for the plan to say: `fuse_products` shows
each kernel that could be to `select`, and takes those that gain most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ...generated.targets import Mma
from ..ir.index import Atom, Expr, Var, expr, of
from ..ir.nodes import Buffer, Node, Ref, load, rebuild
from ..ir.work import node_cost
from ..kernels.operands import (
    HALF,
    Factors,
    Layouts,
    as_one,
    buffer_of,
    count,
    has_values,
    is_known,
    is_plain,
    loops_at,
    operand,
    readers_and_writers,
    touched,
    view_of,
)
from ..kernels.plan import CopyStep, ExternStep, Kernel, KernelStep, Step, Store, Tile, ViewOf
from ..machine import Gpu

Selector = Callable[[Sequence[Kernel], Layouts], Sequence[tuple[float, Tile] | None]]
"""Of kernels that could take the place of their parts: what each gains (µs), and how it goes through its product; None for one that does not."""


@dataclass(frozen=True)
class Fused:
    """What a kernel computes: for each batch, row and column the sum over `depth` of `left` times `right`, plus `addend`, in the register `sum`,
    rounded to `dtype`; then `epilogue`, at these very loops.

    views  operands as they lie in memory: a layout under a name of its own, and the buffer.
    """

    batch: tuple[Var, ...]
    row: Var
    column: Var
    depth: Var
    left: Node
    right: Node
    addend: Node | None
    dtype: str
    epilogue: tuple[Store, ...]
    views: tuple[tuple[Buffer, str], ...]


SUM = "sum"  # the register that stands for an element of the product


# -- over a plan -------------------------------------------------------------------------------------------------------
def fuse_products(
    steps: list[Step],
    layouts: Layouts,
    held: Collection[str],
    factors: Factors,
    costs: Callable[[str], float],
    gpu: Gpu,
    select: Selector,
) -> list[Step]:
    """The steps with one kernel for each product that gains by it.

    held  buffers that are read after the last step.
    gpu   what the smallest product is that is worth it, and what a block may compute anew of an operand.
    """
    readers, writers = readers_and_writers(steps)

    def alone(name: str) -> bool:
        return name not in held and len(readers.get(name, ())) == len(writers.get(name, ())) == 1

    found: list[tuple[tuple[int, ...], Kernel]] = []
    for k, step in enumerate(steps):
        if not isinstance(step, ExternStep) or (at := factors(step.call)) is None or not step.out:
            continue
        epilogue = [readers[step.out[0]][0]] if alone(step.out[0]) else []
        epilogue = [i for i in epilogue if isinstance(steps[i], KernelStep)]
        operands = dict.fromkeys(buffer_of(step.args[i]) for i in at[:2])
        prologues = [writers[n][0] for n in operands if alone(n) and _is_cheap(steps[writers[n][0]], costs, gpu)]
        beside = [*epilogue, *prologues]
        for numbers in _subsets(beside):
            parts = [s for i in sorted((k, *numbers)) if not isinstance(s := steps[i], CopyStep)]
            fused = fused_of(parts, layouts, factors)
            if fused is not None and _is_worth(fused, gpu.limits.mma):
                last = parts[-1]
                name = last.kernel.name if isinstance(last, KernelStep) else _name(parts)
                found.append((tuple(sorted((k, *numbers))), as_one(f"{name}_product", parts)))
    chosen = select([kernel for _, kernel in found], layouts) if found else []
    gains = [(gain, tile, *f) for f, one in zip(found, chosen, strict=True) if one is not None for gain, tile in [one]]
    taken: dict[int, Kernel] = {}
    gone: set[int] = set()
    for _, tile, numbers, kernel in sorted(gains, key=lambda g: -g[0]):
        if gone.isdisjoint(numbers):
            gone |= set(numbers)
            taken[numbers[-1]] = replace(kernel, tile=tile)
    return [KernelStep(taken[k]) if k in taken else s for k, s in enumerate(steps) if k in taken or k not in gone]


def _subsets(beside: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All of them first, and never none."""
    for n in range(len(beside), 0, -1):
        yield from combinations(beside, n)


def _name(parts: Sequence[Step]) -> str:
    return next(s.kernel.name for s in parts if isinstance(s, KernelStep))


def _is_cheap(step: Step, costs: Callable[[str], float], gpu: Gpu) -> bool:
    """Whether a step makes one value, element by element, of so few operations that it may be done again."""
    if not isinstance(step, KernelStep) or (body := _pointwise(step.kernel)) is None or len(body) != 1:
        return False
    most = gpu.costs.prologue
    return node_cost(body[0].value, costs, most) <= most


def _is_worth(fused: Fused, mma: Mma) -> bool:
    return all(count((v,)) >= mma.edge for v in (fused.row, fused.column, fused.depth))


# -- what some steps are -----------------------------------------------------------------------------------------------
def fused_of(parts: Sequence[Step], layouts: Layouts, factors: Factors) -> Fused | None:
    """The steps as such a kernel, or None."""
    calls = [s for s in parts if isinstance(s, ExternStep)]
    kernels = [s.kernel for s in parts if isinstance(s, KernelStep)]
    if (
        len(calls) != 1
        or len(kernels) + 1 != len(parts)
        or not all(is_known(layouts[n]) for s in parts for n in touched(s))
    ):
        return None
    (call,) = calls
    at = factors(call.call)
    if at is None or len(call.call.outs) != 1 or not call.out:
        return None
    (result,) = call.call.outs
    after = [k for k in kernels if result.name in k.reads]
    before = [k for k in kernels if result.name not in k.reads]
    last = parts[-1]
    if len(after) > 1 or (after and not (isinstance(last, KernelStep) and last.kernel is after[0])):
        return None
    # In float32 the library sums in parts, and rounds to TF32 where these units cut digits off: as accurate would be slower.
    if result.dtype not in HALF or len(result.shape) < 2:
        return None
    *lead, rows, columns = result.shape
    batch = tuple(Var(f"batch{k}", n) for k, n in enumerate(lead))
    row, column = Var("row0", rows), Var("column0", columns)
    views_of = [view_of(call.args[i], layouts) if isinstance(call.args[i], (Ref, ViewOf)) else None for i in at]
    if any(v is None or result.name == v.buffer for v in views_of):
        return None
    left, right, *more = (v for v in views_of if v is not None)
    depth = Var("depth0", left.shape[-1])
    prologues = {k.writes[0]: k for k in before if len(k.writes) == 1 and _pointwise(k) is not None}
    if len(prologues) != len(before) or not prologues.keys() <= {left.buffer, right.buffer} - {v.buffer for v in more}:
        return None
    views: list[tuple[Buffer, str]] = []
    index = tuple(map(of, batch))
    one = operand(left, (*index, of(row), of(depth)), prologues, layouts, views)
    other = operand(right, (*index, of(depth), of(column)), prologues, layouts, views)
    if one is None or other is None or (one.dtype, other.dtype) != (result.dtype, result.dtype):
        return None
    whole = (*index, of(row), of(column))
    addend = None
    if more:
        shape = more[0].shape
        at_addend = tuple(
            e if n != 1 else expr(0) for e, n in zip(whole[len(whole) - len(shape) :], shape, strict=True)
        )
        addend = operand(more[0], at_addend, {}, layouts, views)
        if addend is None or addend.dtype != result.dtype:
            return None
    value = load(SUM, (), result.dtype)
    epilogue = _epilogue(after[0], result.name, value, whole) if after else (Store(result.name, whole, value),)
    return (
        None
        if epilogue is None
        else Fused(batch, row, column, depth, one, other, addend, result.dtype, epilogue, tuple(views))
    )


def _pointwise(kernel: Kernel) -> list[Store] | None:
    """The stores of a kernel that has independent points and no inner loops."""
    if not is_plain(kernel) or any(v.extent != 1 for p in kernel.phases for v in p.inner):
        return None
    body = [st for p in kernel.phases for st in p.body]
    if any(type(st) is not Store or st.mode != "set" or st.mask is not None for st in body):
        return None
    stores = [st for st in body if isinstance(st, Store)]
    loads = [ld for st in stores for ld in st.value.loads()]
    if any(ld.attr.buffer in kernel.writes for ld in loads) or any(has_values(e) for st in stores for e in st.index):
        return None
    return None if any(has_values(e) for ld in loads for e in ld.attr.index) else stores


def _epilogue(kernel: Kernel, result: str, value: Node, whole: tuple[Expr, ...]) -> tuple[Store, ...] | None:
    """The stores of a kernel that reads each element of a result once, at the loops of the product."""
    body = _pointwise(kernel)
    found = {ld for st in body or () for ld in st.value.loads() if ld.attr.buffer == result}
    if body is None or len({ld.attr.index for ld in found}) != 1 or any(ld.args for ld in found):
        return None
    (place,) = {ld.attr.index for ld in found}
    loops = [v for v in kernel.outer if v.extent != 1]
    mapping = loops_at(place, whole)
    if mapping is None or not {v for v in mapping if v not in loops} <= {v for v in kernel.outer if v.extent == 1}:
        return None
    points = count(tuple(v for e in whole for v in e.atoms() if isinstance(v, Var)))
    if count(tuple(loops)) != points or not mapping.keys() >= set(loops):
        return None  # other loops would make several values of an element
    every: dict[Atom, int | Expr] = {v: 0 for p in kernel.phases for v in p.inner}
    every |= {v: 0 for v in kernel.outer if v.extent == 1}
    every |= mapping

    def leaf(ld: Node) -> Node | None:
        return value if ld.attr.buffer == result else None

    return tuple(
        Store(st.buffer, tuple(e.subst(every) for e in st.index), rebuild(st.value, leaf, every)) for st in body
    )


__all__ = ["SUM", "Fused", "Selector", "fuse_products", "fused_of"]
