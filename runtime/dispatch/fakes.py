"""What torch's fake kernels say wrongly of a few operators' results, put right by `specs/decompositions.yaml`.

A wrong stride is visible to the program, a wrong dtype is worse: code that reads the result of an eager kernel as another dtype reads
other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ...generated.decompositions import CORRECTIONS, REFUSALS, Refusal
from ...generated.dispatch_tables import ROLES
from .overlap import can_view, overlaps_itself
from .regions import Layout, expressions, is_strided

HALF = (torch.float16, torch.bfloat16)


def run_fake(fake_mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The fake results of `op`: dtypes, sizes and strides as the eager kernel gives them."""
    if op is ROLES["add"] and not all(map(is_strided, args)):
        return _sum_of_gradients(fake_mode, *args)
    out = fake_mode.dispatch(op, types, args, kwargs)
    rules = CORRECTIONS.get(op)
    if rules is None:
        return out
    results = [out] if isinstance(out, torch.Tensor) else list(out)
    for position, typed, wide, layout, laid, given, positions in rules:
        t = results[position]
        if positions and isinstance(t, torch.Tensor):
            if t.dtype != torch.int64:
                with fake_mode:
                    results[position] = t.to(torch.int64)
        elif isinstance(t, torch.Tensor) and t.device.type == "cpu" and (not given or given in kwargs):
            results[position] = _corrected(fake_mode, t, args, typed, wide, layout, [args[k] for k in laid])
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


def refusal(op: Any, args: Any) -> str:
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
    return ""


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


def _corrected(
    fake_mode: Any, t: torch.Tensor, args: Any, typed: tuple[int, ...], wide: bool, layout: str, laid: list[Any]
) -> torch.Tensor:
    """`t`, or one with the dtype of the first argument at `typed` that is a tensor (float32 for half precision if `wide`), laid out as
    `layout` says of the arguments `laid`.
    """
    models = (args[k] for k in typed if k < len(args) and isinstance(args[k], torch.Tensor))
    dtype = next((m.dtype for m in models), t.dtype)
    if wide and dtype in HALF:
        dtype = torch.float32
    with fake_mode:
        strides = t.stride()
        if layout == "elementwise":
            like = _elementwise(laid)
            strides = (
                like.stride() if isinstance(like, torch.Tensor) and like.ndim == t.ndim else strides
            )  # a loss may be reduced
        elif layout:
            wanted = _suggested(laid[0]) if layout == "suggested" else torch.contiguous_format
            strides = torch.empty(t.shape, device=t.device, memory_format=wanted).stride()
        if dtype == t.dtype and expressions(strides) == expressions(t.stride()):
            return t
        return torch.empty_strided(t.shape, strides, dtype=dtype, device=t.device)


def _elementwise(operands: list[Any]) -> Any:
    """A tensor laid out as the result of an elementwise operator on them: torch's own kernels agree about a sum. A number where all are."""
    return torch.empty_like(operands[0]) if len(operands) == 1 else operands[0] + operands[1]


def _suggested(t: torch.Tensor) -> torch.memory_format:
    """Channels-last if the strides order the dimensions so (sizes of 1 included), else contiguous."""
    for rank, order, answer in (
        (4, (1, 3, 2, 0), torch.channels_last),
        (5, (1, 4, 3, 2, 0), torch.channels_last_3d),
    ):
        if t.ndim == rank and t.stride(1) != 0 and _ascending(t, order):
            return answer
    return torch.contiguous_format


def _ascending(t: torch.Tensor, order: tuple[int, ...]) -> bool:
    least: Any = 0
    for d in order:
        if t.shape[d] == 0 or t.stride(d) < least or (d == 0 and least == t.stride(1)):
            return False
        least = t.stride(d) * t.shape[d] if t.shape[d] > 1 else t.stride(d)
    return True
