"""Which operators run for what they do: their calls are never dropped, repeated or moved, and keep their order.

The graph needs no tokens for that. It is functional, so an effect reads values and not memory that a later write could change; what remains
is that effects run in the order of the program, each once, in the half that the program ran it in. Dispatch keeps their nodes, the
partition leaves them in their half, lowering marks their calls, the scheduler keeps those in order and its checker proves it.
Programs that come with tokens (`with_effects`, from export) pass them through: the token that goes in comes out.
"""

from __future__ import annotations

from typing import Any

import torch

from ...torch_compat import OpOverload, registered_effect

TORCHS = ("aten", "prims")  # namespaces whose operators are tagged where equal calls may differ
_TAGGED = (*TORCHS, "opforge")


def has_effect(op: Any) -> bool:
    """Whether an operator runs for what it does: it returns nothing, or is registered with an effect
    (`torch.library._register_effectful_op`).
    """
    if not isinstance(op, OpOverload):
        return False
    return not op._schema.returns or registered_effect(op)


def must_run(op: Any) -> bool:
    """Whether a call stays even if nothing uses its result: an effect, or one that takes from the random stream."""
    return has_effect(op) or (isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags)


def gives_the_same(op: Any) -> bool:
    """Whether equal calls give equal results: arithmetic of Python, and operators of torch and our own but for random ones (random numbers of a seed
    that is given are the same). Those of others may do what no tag says.
    """
    if not isinstance(op, OpOverload):
        return getattr(op, "__module__", None) == "_operator"
    return op.namespace in _TAGGED and not must_run(op)


def run_with_token(token: Any, op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What `with_effects(token, op, ...)` returns: the token, then the results of `op`."""
    result = op(*args, **kwargs)
    if isinstance(result, (tuple, list)):
        return (token, *result)
    return (token, result)
