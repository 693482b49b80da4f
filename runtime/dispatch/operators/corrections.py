"""What torch's fake kernels say wrongly of a few operators' results, put right by `specs/decompositions.yaml`.

A wrong stride is visible to the program, a wrong dtype is worse: code that reads the result of an eager kernel as another dtype reads
other memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ....errors import UnsupportedError
from ....generated.decompositions import CORRECTIONS, REFUSALS, Correction, Refusal
from ....generated.dispatch_tables import ROLES
from ...torch_compat import pytree
from ..storage.overlap import can_view, overlaps_itself
from ..storage.regions import Layout, expressions, is_strided
from .elementwise import strides_like
from .schema import op_info
from .support import elementwise, row_major, suggested

HALF = (torch.float16, torch.bfloat16)


def run_fake(fake_mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The fake results of `op`: dtypes, sizes and strides as the eager kernel gives them."""
    if op is ROLES["add"] and not all(map(is_strided, args)):
        return _sum_of_gradients(fake_mode, *args)
    rules = CORRECTIONS.get(op)
    for rule in rules or ():
        if rule.instead and rule.like is not None:
            with fake_mode:
                found: Any = rule.like(*args, **kwargs)
            if found is not None:
                return found
    out = fake_mode.dispatch(op, types, args, kwargs)
    if rules is None:
        return _laid_out(fake_mode, op, out, args, kwargs) if torch.Tag.pointwise in op.tags else out
    results = [out] if isinstance(out, torch.Tensor) else list(out)
    for rule in rules:
        if rule.instead or (rule.given and rule.given not in kwargs):
            continue
        for k in range(len(results)) if rule.result < 0 else (rule.result,):
            if isinstance(results[k], torch.Tensor) and (
                rule.everywhere or rule.positions or results[k].device.type == "cpu"
            ):
                results[k] = _corrected(fake_mode, results[k], rule, args, kwargs)
    return results[0] if isinstance(out, torch.Tensor) else tuple(results)  # its type may be a named tuple


def _sum_of_gradients(fake_mode: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The fake sum of two gradients of one shape, of which one or both are sparse (kernels for fake tensors want sizes that are numbers)."""
    dense = next((t for t in (a, b) if is_strided(t)), None)
    if dense is not None:
        with fake_mode:
            return torch.empty_like(dense)
    detached: torch.Tensor = fake_mode.dispatch(ROLES["detach"], (type(a),), (a,), {})
    return detached


def run_writing(fake_mode: Any, op: Any, types: Any, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> Any:
    """As `run_fake`. Raises `UnsupportedError` where an `out=` of the right sizes gets other strides: some fake kernels do that, and no real one."""
    before = [(t, t.shape, t.stride()) for t in outs]
    found = run_fake(fake_mode, op, types, args, kwargs)
    changed = [(t, shape, stride) for t, shape, stride in before if t.shape == shape and t.stride() != stride]
    for t, shape, stride in changed:
        t.as_strided_(shape, stride)  # it may be the caller's own
    if changed:
        raise UnsupportedError(f"{op} has a fake kernel that lays out its `out` anew, and a kernel that does not")
    return found


def refusal(op: Any, args: Any, kwargs: Any) -> str:
    """What the eager kernel of `op` does instead with such arguments, which its fake kernel accepts; "" where both agree."""
    rule = REFUSALS.get(op)
    if rule is None:
        return ""
    if rule.always:
        return f"{op}: {_clause(rule.doc)}"
    if dims := rule.most_dims:
        first, most = (args[k].ndim for k in dims)
        if first > most:
            return f"{op} of {first} dimensions and {most}: the eager kernel takes no more"
    if any(type(n) is int and n == 0 for k in rule.not_empty for n in args[k].shape):
        return f"{op} of no elements: {_clause(rule.doc)}"
    if any(type(n) is int and n < 0 for k in rule.not_negative for n in args[k]):
        return f"{op} of negative numbers: {_clause(rule.doc)}"
    if rule.viewed:
        viewed, shape = (args[k] for k in rule.viewed)
        if not can_view(Layout.of(viewed), shape):
            return f"{op} of strides {list(viewed.stride())} to sizes {list(shape)}: {_clause(rule.doc)}"
    if rule.fills is not None:
        place = rule.fills(args[0], *args[2:])
        if place.shape != args[1].shape:
            return f"{op} of sizes {list(args[1].shape)} into {list(place.shape)}: {_clause(rule.doc)}"
        # Torch 2.11 copies it with its strides, and writes all that shares the memory.
        if overlaps_itself(Layout.of(args[0])):
            return f"{op} of a tensor whose elements share memory"
    named = {*rule.same_dtype, *rule.not_floating, *rule.not_bool}
    dtypes = {k: args[k].dtype for k in sorted(named) if k < len(args) and isinstance(args[k], torch.Tensor)}
    if _wrong_dtypes(rule, dtypes):
        return f"{op} of {', '.join(map(str, dtypes.values()))}: {_clause(rule.doc)}"
    if rule.bool_with_bools and _is_bool_among_others(op, rule.bool_with_bools, args, kwargs):
        return f"{op} of a boolean number: {_clause(rule.doc)}"
    return ""


def _is_bool_among_others(op: Any, numbers: tuple[int, ...], args: Any, kwargs: Any) -> bool:
    """Whether one of these arguments is a boolean number, and a tensor or a number among the others is none."""
    info = op_info(op)
    given = {k: info.argument(k, args, kwargs) for k in range(len(info.arg_names))}
    return any(isinstance(given[k], (bool, torch.SymBool)) for k in numbers) and not all(
        t.dtype == torch.bool if isinstance(t, torch.Tensor) else isinstance(t, (bool, torch.SymBool))
        for k, a in given.items()
        if k not in numbers and a is not None
        for t in pytree.tree_leaves(a)
    )


def _wrong_dtypes(rule: Refusal, dtypes: dict[int, torch.dtype]) -> bool:
    same = [dtypes[k] for k in rule.same_dtype if k in dtypes]
    apart = any(d != same[0] for d in same)
    if rule.wide and apart and same[0] in HALF:
        apart = any(d != torch.float32 for d in same[1:])
    return (
        apart
        or any(dtypes[k].is_floating_point for k in rule.not_floating if k in dtypes)
        or any(dtypes[k] == torch.bool for k in rule.not_bool if k in dtypes)
    )


def _clause(doc: str) -> str:
    """A spec's line in the middle of a sentence."""
    return doc[:1].lower() + doc[1:].rstrip(".")


def _corrected(fake_mode: Any, t: torch.Tensor, rule: Correction, args: Any, kwargs: Any) -> torch.Tensor:
    """`t`, or a tensor of the dtype and the layout that `rule` says."""
    models = (args[k] for k in rule.dtype_of if k < len(args) and isinstance(args[k], torch.Tensor))
    dtype = torch.int64 if rule.positions else next((m.dtype for m in models), t.dtype)
    if rule.wide and dtype in HALF:
        dtype = torch.float32
    with fake_mode:
        strides = tuple(_corrected_strides(t, rule, args, kwargs))
        if len(strides) != t.ndim:
            strides = t.stride()  # a loss may be reduced
        if dtype == t.dtype and expressions(strides) == expressions(t.stride()):
            return t
        return torch.empty_strided(t.shape, strides, dtype=dtype, device=t.device)


def _corrected_strides(t: torch.Tensor, rule: Correction, args: Any, kwargs: Any) -> Sequence[Any]:
    laid = [args[k] for k in rule.laid]
    if rule.like is not None:
        like: torch.Tensor = rule.like(*args, **kwargs)
        return like.stride()
    match rule.layout:
        case "elementwise":
            if not any(isinstance(a, torch.Tensor) for a in laid):
                return t.stride()
            return elementwise(*laid).stride()
        case "preserved":
            asked = kwargs.get("memory_format") not in (None, torch.preserve_format)
            return t.stride() if asked else ROLES["clone"](laid[0]).stride()
        case "suggested":
            return suggested(laid[0], t.shape).stride()
        case "contiguous":
            return row_major(t).stride()
    return t.stride()


def _laid_out(fake_mode: Any, op: Any, out: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator that torch calls elementwise, with the strides of its kernel."""
    known = _operand_names(op)
    if known is None or not isinstance(out, torch.Tensor):
        return out
    given = [args[k] if k < len(args) else kwargs.get(name) for k, name in known]
    # A number is a tensor without dimensions to the kernel, also where it has an overload of its own.
    found = strides_like(tuple(out.shape), [*given, 0] if "scalar" in op._overloadname.lower() else given)
    if found is None or found == out.stride():
        return out
    storage = out.untyped_storage()._cdata
    if any(isinstance(a, torch.Tensor) and a.untyped_storage()._cdata == storage for a in given):
        return out
    with fake_mode:
        return torch.empty_strided(out.shape, found, dtype=out.dtype, device=out.device)


@functools.cache
def _operand_names(op: Any) -> tuple[tuple[int, str], ...] | None:
    """Positions and names of the tensors among an operator's arguments; None where it takes lists of them, or is told the
    layout.
    """
    types = [str(a.type) for a in op._schema.arguments]
    if any("List" in t and "Tensor" in t for t in types) or any(
        a.name == "memory_format" for a in op._schema.arguments
    ):
        return None
    found = tuple((k, a.name) for k, a in enumerate(op._schema.arguments) if "Tensor" in types[k])
    return found or None
