"""Operators that write to their arguments and have no functional overload (a user's own): recorded as a call that runs them on copies."""

from __future__ import annotations

from typing import Any

import torch

from ....errors import UnsupportedError
from ...torch_compat import auto_functionalized, can_auto_functionalize, pytree
from ..operators.corrections import run_fake
from ..operators.schema import OpInfo, tensors_of
from .recorder import Recorder


def record_write(recorder: Recorder, info: OpInfo, types: Any, args: Any, kwargs: Any) -> Any:
    """What the operator returns; the tensors that it writes, also in lists, have the contents of their copies from then on. Raises
    `UnsupportedError` where it returns what it was given, and for a list with None in it. Copies have the strides of what they are copies
    of, so those of a column or a diagonal have gaps.
    """
    op = info.op
    given = {name: info.argument(k, args, kwargs) for k, name in enumerate(info.arg_names)}
    names = [info.arg_names[k] for k in info.written]
    passed = {*info.arg_names[: len(args)], *kwargs, *names}
    written = [given[name] for name in names]
    tensors = [t for a in written for t in tensors_of(a)]
    if not can_auto_functionalize(op) or any(t is None for a in written if isinstance(a, (list, tuple)) for t in a):
        raise UnsupportedError(f"{op} writes to its arguments and has no functional overload{recorder.where()}")
    if not all(t.layout == torch.strided and not (t.is_conj() or t.is_neg()) for t in tensors):
        raise UnsupportedError(
            f"{op} writes to a tensor that is sparse, or lazily conjugated{recorder.where()}, and has no functional overload"
        )
    nodes = {name: recorder.nodes(v) for name, v in given.items() if name in passed}
    out = run_fake(recorder.fake_mode, op, types, args, kwargs)
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    if not all(t is None or isinstance(t, torch.Tensor) for t in results):
        raise UnsupportedError(f"{op} writes to its arguments and returns a number{recorder.where()}")
    with recorder.fake_mode:
        new = pytree.tree_map_only(torch.Tensor, _like, written)
    node = recorder.call(auto_functionalized, (op,), nodes, [*results, *new], keep=True)
    for k, t in enumerate(results):
        if isinstance(t, torch.Tensor):
            recorder._fresh(t, recorder._item(node, k, t))
    for k, (before, after) in enumerate(zip(written, new, strict=True), len(results)):
        if isinstance(before, torch.Tensor):
            recorder.write(before, recorder._item(node, k, after))
        elif before is not None:
            several = recorder._item(node, k, after)
            for j, (t, contents) in enumerate(zip(before, after, strict=True)):
                recorder.write(t, recorder._item(several, j, contents))
    return out


def _like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
