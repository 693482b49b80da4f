"""Checkpointed regions (`torch.utils.checkpoint`) of a traced program: their nodes are recorded once, and say to which region they belong.

The partitioner computes them again in the backward (`runtime/partition`). What eager does instead, running the region's code a second time,
would draw other random numbers and could not be planned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy

from ....errors import UnsupportedError
from ...torch_compat import TorchDispatchMode, selective_context
from .recorder import Recorder

_SAVE = (
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.PREFER_SAVE,
    *(p for p in CheckpointPolicy if "OFFLOAD" in p.name),  # kept where it is
)


@contextlib.contextmanager
def region(recorder: Recorder, body: fx.GraphModule) -> Iterator[None]:
    """While `body` runs: nodes belong to a region. An inner region is part of the outermost one, whose policy holds."""
    if recorder.region is not None:
        yield
        return
    recorder.region = recorder.region_count
    recorder.region_count += 1
    policy = _policy(recorder, body) if torch.is_grad_enabled() else None
    try:
        with contextlib.nullcontext() if policy is None else _Selective(recorder, policy):
            yield
    finally:
        recorder.region = None


def _policy(recorder: Recorder, body: fx.GraphModule) -> Callable[..., Any] | None:
    """The policy function of selective checkpointing, which Dynamo leaves at the region's graph. Raises `UnsupportedError` for other contexts."""
    make = body.meta.get("_checkpoint_context_fn")
    if make is None:
        return None
    forward, again = make()
    if isinstance(forward, contextlib.nullcontext) and isinstance(again, contextlib.nullcontext):
        return None
    policy = getattr(forward, "policy_fn", None)
    if policy is None:
        raise UnsupportedError(
            f"context_fn of a checkpoint gives {type(forward).__name__}{recorder.where()}; only contexts of "
            "torch.utils.checkpoint.create_selective_checkpoint_contexts can be compiled"
        )
    found: Callable[..., Any] = policy
    return found


class _Selective(TorchDispatchMode):
    """Asks the policy about every operator, as eager's caching mode does, and marks the nodes that it wants kept."""

    def __init__(self, recorder: Recorder, policy: Callable[..., Any]) -> None:
        super().__init__()
        self.recorder, self.policy = recorder, policy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        nodes = self.recorder.graph.nodes
        last = next(iter(reversed(nodes)), None)
        out = func(*args, **kwargs)
        wanted = self.policy(selective_context(out), func, *args, **kwargs)
        if wanted is True or wanted in _SAVE:
            for node in reversed(nodes):
                if node is last:
                    break
                node.meta["must_save"] = True
        return out
