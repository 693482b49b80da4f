"""Two products around a softmax as one kernel: scores, what a kernel makes of them row by row, and the product of that with the values.

The three steps become one where nobody else reads what they pass on. Its kernel goes through blocks of columns and keeps up with the maximum
and the sum of each row, so neither scores nor probabilities are ever in memory. The plan says so by the steps themselves (`Kernel.parts`),
which is what the checker reads; `attention` finds in them what a kernel is written from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..ir.facts import covers, equal, flat
from ..ir.index import Atom, Expr, Val, Var, of
from ..ir.nodes import Buffer, Extern, Node, load, rebuild
from ..kernels.operands import (
    HALF,
    Factors,
    Layouts,
    as_one,
    buffer_of,
    count,
    element_at,
    has_values,
    is_known,
    is_plain,
    operand,
    readers_and_writers,
    strides_of,
    touched,
    view_of,
)
from ..kernels.plan import CopyStep, ExternStep, Kernel, KernelStep, Phase, Reduce, Step, Store, ViewOf
from ..kernels.steps import flat_index
from ..machine import Gpu


@dataclass(frozen=True)
class Attention:
    """What a kernel computes. A matrix is a 16-bit value by its loops: `left` by batch, rows and depth, `right` by batch, columns and depth,
    `values` by batch, columns and width.

    score    the register that stands for a score in `logits`, and the dtype that it is rounded to.
    top      the register with a row's greatest logit; `total` that with the sum of exp(logit - top).
    empty    where it holds (a function of `top`), probabilities are 0 whatever the sum is.
    place    where in the memory of `result` an element is, by batch, rows and width.
    views    operands as they lie in memory: a layout under a name of its own, and the buffer.
    """

    batch: tuple[Var, ...]
    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    depth: Var
    width: Var
    left: Node
    right: Node
    values: Node
    score: tuple[str, str]
    logits: Node
    top: str
    total: str
    empty: Node | None
    result: Buffer
    place: Expr
    views: tuple[tuple[Buffer, str], ...]


# -- over a plan -------------------------------------------------------------------------------------------------------
def join_products(steps: list[Step], layouts: Layouts, held: Collection[str], factors: Factors, gpu: Gpu) -> list[Step]:
    """The steps with one kernel for each such three; what only makes an operand wider, or lays it out, goes with them.

    held  buffers that are read after the last step.
    """
    readers, writers = readers_and_writers(steps)

    def maker(name: str, reader: int) -> int | None:
        """The only step that writes a buffer, if only one step reads it."""
        alone = readers.get(name) == [reader] and name not in held and len(writers.get(name, ())) == 1
        return writers[name][0] if alone else None

    taken: dict[int, list[int]] = {}  # by the last of them
    for k, step in enumerate(steps):
        for parts in _candidates(steps, k, step, factors, maker):
            found = attention([steps[i] for i in parts], layouts, factors)
            if found is None or not _is_worth(found, gpu):
                continue
            taken[k] = parts
            break
    gone = {i for parts in taken.values() for i in parts}
    result: list[Step] = []
    for k, step in enumerate(steps):
        if k in taken:
            result.append(KernelStep(_joined([s for i in taken[k] if not isinstance(s := steps[i], CopyStep)])))
        elif k not in gone:
            result.append(step)
    return result


def _candidates(
    steps: Sequence[Step], k: int, step: Step, factors: Factors, maker: Callable[[str, int], int | None]
) -> list[list[int]]:
    """Steps that may be joined with `step`, the last product: with all that makes operands, or without."""
    if not isinstance(step, ExternStep) or (at := _pair(factors, step.call)) is None:
        return []
    left, right = (buffer_of(step.args[i]) for i in at)
    middle = maker(left, k)
    if middle is None or not isinstance(inner := steps[middle], KernelStep):
        return []
    found: list[list[int]] = []
    for name in inner.kernel.reads:
        first = maker(name, middle)
        if first is None or not isinstance(product := steps[first], ExternStep):
            continue
        if (operands := _pair(factors, product.call)) is None:
            continue
        makers = [maker(buffer_of(product.args[i]), first) for i in operands] + [maker(right, k)]
        makes = {i for i in makers if i is not None and _only_moves(steps[i])}
        found.append(sorted({first, middle, k} | makes))
        if makes:
            found.append([first, middle, k])
    return found


def _pair(factors: Factors, call: Extern) -> tuple[int, ...] | None:
    """The factors of a product to which nothing is added."""
    at = factors(call)
    return at if at is not None and len(at) == 2 else None


def _is_worth(found: Attention, gpu: Gpu) -> bool:
    """Whether rows of queries, keys and values stay in registers, and there are enough for the device's multiprocessors."""
    mma, rows = gpu.limits.mma, count(found.rows)
    blocks = count(found.batch) * -(-rows // mma.edge)
    if any(count((v,)) > gpu.budgets.head for v in (found.depth, found.width)):
        return False
    return rows >= mma.edge and count(found.columns) >= mma.steps and blocks * gpu.costs.share >= gpu.num_sms


def _joined(parts: list[KernelStep | ExternStep]) -> Kernel:
    (middle,) = (s.kernel for s in parts if isinstance(s, KernelStep) and len(s.kernel.phases) > 1)
    return as_one(f"{middle.name}_products", parts)


# -- what three steps are ----------------------------------------------------------------------------------------------
def attention(parts: Sequence[Step], layouts: Layouts, factors: Factors) -> Attention | None:
    """The steps as such a kernel, or None."""
    found = _products(parts, layouts, factors)
    if found is None:
        return None
    middle = found.kernels.pop(found.probabilities.buffer, None)
    softmax = None if middle is None else _softmax(middle, found.scores.name)
    if middle is None or softmax is None:
        return None
    loops = _loops(middle, softmax, found)
    if loops is None:
        return None
    depth, width = Var("depth0", found.left.shape[-1]), Var("width0", found.values.shape[-1])
    if not all(count((v,)) > 1 for v in (depth, width)):
        return None
    views: list[tuple[Buffer, str]] = []
    matrices = _matrices(found, softmax, depth, width, layouts, views)
    if matrices is None:
        return None
    place = flat((*softmax.index[:-1], of(width)), *strides_of(layouts[found.result.name]))
    top, total = softmax.registers
    return Attention(
        *loops,
        depth,
        width,
        *matrices,
        (_SCORE, found.scores.dtype),
        softmax.logits,
        top,
        total,
        softmax.empty,
        found.result,
        place,
        tuple(views),
    )


@dataclass(frozen=True)
class _Products:
    """The two products: the buffers that they write, their operands as they lie in memory, and by its result each kernel beside them."""

    scores: Buffer
    result: Buffer
    left: ViewOf
    right: ViewOf
    probabilities: ViewOf
    values: ViewOf
    kernels: dict[str, Kernel]


def _products(parts: Sequence[Step], layouts: Layouts, factors: Factors) -> _Products | None:
    calls = [s for s in parts if isinstance(s, ExternStep)]
    kernels = {s.kernel.writes[0]: s.kernel for s in parts if isinstance(s, KernelStep) and len(s.kernel.writes) == 1}
    if len(calls) != 2 or len(calls) + len(kernels) != len(parts) or not all(map(is_plain, kernels.values())):
        return None
    first, last = calls
    if any(not c.out or len(c.call.outs) != 1 for c in calls):
        return None
    (scores,), (result,) = (c.call.outs for c in calls)
    at_first, at_last = _pair(factors, first.call), _pair(factors, last.call)
    if at_first is None or at_last is None or not all(is_known(layouts[n]) for s in parts for n in touched(s)):
        return None
    left, right = (view_of(first.args[i], layouts) for i in at_first)
    probabilities, values = (view_of(last.args[i], layouts) for i in at_last)
    return _Products(scores, result, left, right, probabilities, values, kernels)


def _loops(
    middle: Kernel, softmax: _Softmax, found: _Products
) -> tuple[tuple[Var, ...], tuple[Var, ...], tuple[Var, ...]] | None:
    """The loops of batch, rows and columns, if the softmax goes through each score once."""
    *lead, row, column = softmax.index
    live = [v for v in middle.outer if v.extent != 1]
    columns = tuple(v for v in middle.phases[0].inner if v.extent != 1)
    batch, rows = (tuple(v for v in live if any(v in e.atoms() for e in some)) for some in (lead, [row]))
    if len(set(batch) | set(rows)) != len(batch) + len(rows) or len(batch) + len(rows) != len(live):
        return None
    if any(isinstance(a, Val) for e in softmax.index for a in e.atoms()):
        return None
    shape = found.scores.shape
    shapes = (
        (tuple(lead), shape[:-2], batch),
        ((row,), shape[-2:-1], rows),
        ((column,), shape[-1:], columns),
    )
    return (batch, rows, columns) if all(covers(*each) for each in shapes) else None


def _matrices(
    found: _Products, softmax: _Softmax, depth: Var, width: Var, layouts: Layouts, views: list[tuple[Buffer, str]]
) -> tuple[Node, Node, Node] | None:
    """Queries, keys and values by the loops, if matrix units take them and nothing is in the way of reading them there. Adds to `views`."""
    *lead, row, column = softmax.index
    scores, result, probabilities = found.scores, found.result, found.probabilities
    stored = flat_index(softmax.store.index, layouts[probabilities.buffer])
    if probabilities.shape != scores.shape or not equal(element_at(probabilities, (*lead, row, column)), stored):
        return None
    if {scores.name, result.name, probabilities.buffer} & {v.buffer for v in (found.left, found.right, found.values)}:
        return None
    queries, keys, given = (
        operand(v, (*lead, *index), found.kernels, layouts, views)
        for v, index in (
            (found.left, (row, of(depth))),
            (found.right, (of(depth), column)),
            (found.values, (column, of(width))),
        )
    )
    if queries is None or keys is None or given is None:
        return None
    left, right, half = _narrow(queries), _narrow(keys), softmax.store.value.dtype
    if left is None or right is None or left.dtype != right.dtype or half not in HALF:
        return None
    if given.dtype != half or result.dtype != half or scores.dtype not in (left.dtype, "float32"):
        return None
    return left, right, given


_SCORE = "score"


@dataclass(frozen=True)
class _Softmax:
    """The three phases of a kernel: the index at which it reads a score, the value of a logit, and the registers of its rows."""

    index: tuple[Expr, ...]
    logits: Node
    registers: tuple[str, str]
    empty: Node | None
    store: Store


def _softmax(kernel: Kernel, scores: str) -> _Softmax | None:
    if len(kernel.phases) != 3 or any(len(p.body) != 1 for p in kernel.phases):
        return None
    top, total, store = (_over(kernel.phases[0].inner, p) for p in kernel.phases)
    if not isinstance(top, Reduce) or not isinstance(total, Reduce) or type(store) is not Store:
        return None
    if (top.kind, total.kind, top.dtype, total.dtype) != ("max", "sum", "float32", "float32"):
        return None
    if store.mode != "set" or store.mask is not None or any(has_values(e) for e in store.index):
        return None
    logits, value = top.value, store.value
    raised = Node("exp", (Node("sub", (logits, load(top.name, (), "float32")), "float32"),), "float32")
    if total.value is not raised or logits.dtype != "float32" or value.op != "to_dtype":
        return None
    (share,) = value.args
    empty = None
    if share.op == "where" and share.args[1].op == "const" and share.args[1].attr == 0:
        empty, share = share.args[0], share.args[2]
        if empty.vars() or any(ld.attr.buffer != top.name for ld in empty.loads()):
            return None
    if share.op != "div" or share.args != (raised, load(total.name, (), "float32")):
        return None
    found = [ld for ld in logits.loads() if ld.attr.buffer == scores]
    if len(found) != 1 or found[0].args:
        return None
    score = load(_SCORE, (), found[0].dtype)
    logits = rebuild(logits, lambda ld: score if ld is found[0] else None, {})
    return _Softmax(found[0].attr.index, logits, (top.name, total.name), empty, store)


def _over(loops: tuple[Var, ...], phase: Phase) -> Reduce | Store | None:
    """The only statement of a phase over the loops of another one."""
    if [v.extent for v in loops] != [v.extent for v in phase.inner]:
        return None
    (st,) = phase.body
    mapping: dict[Atom, int | Expr] = {v: of(w) for v, w in zip(phase.inner, loops, strict=True)}
    value = rebuild(st.value, lambda _: None, mapping)
    if type(st) is Reduce:
        return Reduce(st.name, st.kind, value, st.dtype)
    if type(st) is Store and st.mask is None and not any(has_values(e) for e in st.index):
        return Store(st.buffer, tuple(e.subst(mapping) for e in st.index), value, st.mode)
    return None


def _only_moves(step: Step) -> bool:
    """Whether a step is a kernel that only reads its elements from elsewhere, and may change their dtype."""
    if not isinstance(step, KernelStep) or not is_plain(step.kernel) or len(step.kernel.phases) != 1:
        return False
    (phase,) = step.kernel.phases
    if any(v.extent != 1 for v in phase.inner) or len(phase.body) != 1:
        return False
    (store,) = phase.body
    if type(store) is not Store or store.mode != "set" or store.mask is not None:
        return False
    value = store.value
    while value.op == "to_dtype":
        value = value.args[0]
    return value.op == "load" and not value.args and not any(has_values(e) for e in value.attr.index)


def _narrow(n: Node) -> Node | None:
    """The 16-bit value that an operand is, maybe made wider: products of such values are exact in float32 all the same."""
    inner = n.args[0] if n.op == "to_dtype" and n.dtype == "float32" else n
    return inner if inner.dtype in HALF else None


__all__ = ["Attention", "attention", "join_products"]
