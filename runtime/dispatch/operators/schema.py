"""What tracing must know of an operator, all of it derived from the schema that torch registers: what it writes, what
it aliases, and the functional overload that stands for an in-place or `out=` one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ....generated.decompositions import DECOMPOSITIONS
from ....generated.dispatch_tables import ROLES
from ....generated.ops import LOWERINGS
from ...torch_compat import HigherOrderOperator, OpOverload
from .effects import must_run


@dataclass(frozen=True)
class Functional:
    """The functional overload of a writing one. `results[k]` is the position, among its returns, of the new value of
    the k-th written argument; `kept[k]` that of the k-th return that is not a written argument. `order[k]` is the
    position, among the writing one's arguments, of its k-th argument; () where both have the same order.
    """

    op: OpOverload
    results: tuple[int, ...]
    kept: tuple[int, ...]
    drops_out: bool
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class OpInfo:
    """One operator as the recorder sees it.

    kind        device: asks a tensor for its device · layout: asks for sizes or strides as numbers · decompose:
                `specs/decompositions.yaml` has a body · composite: made of other operators by its own kernel ·
                lift: a constant enters the program · view: a return aliases argument `view_arg` · metadata: changes
                sizes or strides of an argument · write: writes to arguments · plain: the rest · higher_order
    written     schema positions of the written arguments.
    aliased     for each return, the schema position of the written argument that it is, or None.
    keep        never removed as dead code: it has an effect, or takes from the random stream.
    """

    op: Any
    kind: str
    arg_names: tuple[str, ...] = ()
    written: tuple[int, ...] = ()
    aliased: tuple[int | None, ...] = ()
    view_arg: int = 0
    keep: bool = False

    def argument(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value passed for the argument at a schema position, None when it was left out."""
        return args[position] if position < len(args) else kwargs.get(self.arg_names[position])

    @property
    def functional(self) -> Functional | None:
        """The functional overload, or None when torch has none."""
        return functional_of(self.op)


@functools.cache
def op_info(op: Any) -> OpInfo:
    """Classify `op` (an `OpOverload`, or a higher-order operator)."""
    if isinstance(op, HigherOrderOperator) or not isinstance(op, OpOverload):
        return OpInfo(op, "higher_order")
    schema = op._schema
    names = tuple(a.name for a in schema.arguments)
    written = tuple(k for k, a in enumerate(schema.arguments) if a.is_write)
    marked = [k for k, a in enumerate(schema.arguments) if a.alias_info is not None]
    view_arg = next((k for k in marked if k not in written), None)
    aliased: list[int | None] = []
    for r in schema.returns:
        shares = [
            k for k in written if r.alias_info is not None and _same_set(r.alias_info, schema.arguments[k].alias_info)
        ]
        aliased.append(shares[0] if shares else None)
    keep = must_run(op)
    kind = _kind(op, bool(written), view_arg is not None)
    return OpInfo(op, kind, names, written, tuple(aliased), view_arg or 0, keep)


def _same_set(a: Any, b: Any) -> bool:
    return bool((a.before_set | a.after_set) & (b.before_set | b.after_set))


def _kind(op: OpOverload, writes: bool, views: bool) -> str:
    if op is ROLES["device"]:
        return "device"
    if op is ROLES["lift"]:
        return "lift"
    if op in DECOMPOSITIONS and (writes or not views):  # a view stays one where its body says nothing
        return "decompose"
    try:
        composite = op._can_decompose()
    except RuntimeError:  # the dispatcher does not know it: a kernel in C++ asks a tensor for its sizes or strides
        return "layout"
    if composite and str(op) not in LOWERINGS:
        return "composite"
    if torch.Tag.inplace_view in op.tags:
        return "metadata"
    if writes:
        return "write"
    return "view" if views else "plain"


@functools.cache
def functional_of(op: OpOverload) -> Functional | None:
    """The overload that computes what `op` writes and returns it instead, found by torch's naming rules and compared
    by schema.
    """
    schema = op._schema
    out = [a for a in schema.arguments if a.is_write and a.kwarg_only]
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not (a.is_write and a.kwarg_only)]
    written = [a for a in schema.arguments if a.is_write]
    if not written or (out and len(out) != len(written)):
        return None
    fresh = sum(1 for r in schema.returns if r.alias_info is None)
    namespace, name = schema.name.split("::")
    for candidate, appended in _names(name, bool(out)):
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        if packet is None:
            continue
        for overload in sorted(packet.overloads(), key=lambda o: (o != op._overloadname, o)):
            found = getattr(packet, overload)
            s = found._schema
            if s.is_mutable or len(s.returns) != fresh + len(written):
                continue
            order = _order(wanted, [(a.name, str(a.type)) for a in s.arguments])
            if order is None:
                continue
            first = fresh if appended else 0
            return Functional(found, tuple(range(first, first + len(written))), tuple(range(fresh)), bool(out), order)
    return None


def _order(wanted: list[tuple[str, str]], found: list[tuple[str, str]]) -> tuple[int, ...] | None:
    """Where each argument of the functional overload stands in the writing one; () for the same types in the same
    order, None where they are other arguments.
    """
    if [t for _, t in wanted] == [t for _, t in found]:
        return ()
    return tuple(wanted.index(a) for a in found) if sorted(wanted) == sorted(found) else None


def _names(name: str, out: bool) -> list[tuple[str, bool]]:
    """Packet names to try, each with whether its new values come after the writing overload's own returns."""
    if out:
        return [(name, False)]
    if name.startswith("__i") and name.endswith("__"):
        return [("__" + name[3:], False)]
    if name.endswith("_"):
        return [(name[:-1], False), (name[:-1] + "_functional", False)]
    return [(name + "_functional", True)]


@functools.cache
def reads_storage(target: Any) -> bool:
    """Whether an operator finds its elements by an offset into the storage."""
    return isinstance(target, OpOverload) and any(a.name == "storage_offset" for a in target._schema.arguments)


def makes_new(target: Any) -> bool:
    """Whether an operator makes new tensors, no views."""
    return isinstance(target, OpOverload) and all(r.alias_info is None for r in target._schema.returns)


def is_elementwise(info: OpInfo) -> bool:
    """Whether a writing operator makes each element of what it writes of the elements at the same place of its arguments."""
    form = info.functional
    ops = (info.op,) if form is None else (info.op, form.op)
    return ROLES["copy"] in ops or any(torch.Tag.pointwise in op.tags for op in ops)


@functools.cache
def view_of(op: OpOverload) -> OpOverload | None:
    """The view that an operator which changes metadata in place stands for (`transpose_` → `transpose`), or None."""
    namespace, name = op._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None:
        return None
    wanted = [str(a.type) for a in op._schema.arguments]
    for overload in packet.overloads():
        found = getattr(packet, overload)
        if not found._schema.is_mutable and [str(a.type) for a in found._schema.arguments] == wanted:
            return found if op_info(found).kind == "view" else None
    return None


def functional_arguments(
    info: OpInfo, form: Functional, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for the functional overload: without those that `out=` writes to, with defaults that only the
    writing one has.
    """
    if form.drops_out:
        names = {info.arg_names[k] for k in info.written}
        args = args[: min((len(args), *info.written))]
        kwargs = {k: v for k, v in kwargs.items() if k not in names}
    for a, own in zip(form.op._schema.arguments[len(args) :], info.op._schema.arguments[len(args) :], strict=False):
        if a.kwarg_only or a.name in kwargs or a.has_default_value() or not own.has_default_value():
            break
        args = (*args, own.default_value)
    return tuple(args[k] for k in form.order) or args, kwargs


def tensors_of(argument: Any) -> list[torch.Tensor]:
    """The tensors that an argument is, or that a list has."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [t for t in argument if isinstance(t, torch.Tensor)] if isinstance(argument, (list, tuple)) else []
