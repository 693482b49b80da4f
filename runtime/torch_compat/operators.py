"""Private names of the dispatcher, of operators and of higher-order operators."""

from collections.abc import Callable
from typing import Any

import torch

# By which kernel the dispatcher runs an operator.
from torch._C import DispatchKey

# The call of an operator that writes to its arguments on copies of them, and which operators it takes.
from torch._higher_order_ops.auto_functionalize import auto_functionalized, can_auto_functionalize

# Calls with effect tokens, in programs that were exported so.
from torch._higher_order_ops.effects import with_effects

# What Dynamo makes of `torch.utils.checkpoint.checkpoint`: called with the region's graph and its arguments.
from torch._higher_order_ops.wrap import tag_activation_checkpoint

# What a call_function node of a graph may name.
from torch._ops import HigherOrderOperator, OpOverload

__all__ = [
    "DispatchKey", "HigherOrderOperator", "OpOverload", "auto_functionalized", "by_operators", "can_auto_functionalize", "kernels_of_zeros",
    "operator_schemas", "registered_effect", "tag_activation_checkpoint", "user_kernel", "with_effects",
]  # fmt: skip


def operator_schemas(namespaces: tuple[str, ...]) -> list[str]:
    """Schemas of the dispatcher's operators in `namespaces`, one text line each, sorted, without TorchScript's builtins."""
    known = set(torch._C._dispatch_get_all_op_names())
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if name in known and schema.name.partition("::")[0] in namespaces:
            found.add(str(schema))
    return sorted(found)


def by_operators(op: Any) -> Callable[..., Any]:
    """What a higher-order operator does, as calls of operators: torch's implementation for tensors of any device."""
    kernel: Callable[..., Any] = op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    return kernel


def user_kernel(kernel: int, constants: int) -> tuple[Any, dict[str, Any]]:
    """The Triton kernel and the arguments that a graph names by numbers."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.get_kernel(kernel), kernel_side_table.get_constant_args(constants)


def kernels_of_zeros() -> list[OpOverload]:
    """Operators that have kernels of their own for zeros without memory."""
    own = torch._C._dispatch_has_kernel_for_dispatch_key
    skips = torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough
    names = (n for n in torch._C._dispatch_get_all_op_names() if own(n, "ZeroTensor") and not skips(n, "ZeroTensor"))
    found = (n.replace("::", ".").split(".") for n in names)
    return [getattr(getattr(getattr(torch.ops, n[0]), n[1]), n[2] if len(n) > 2 else "default") for n in found]


def registered_effect(op: OpOverload) -> bool:
    """Whether an operator is registered with an ordered effect."""
    from torch._library import simple_registry

    effect = getattr(simple_registry.singleton.find(op._name), "effect", None)
    return effect is not None and effect.effect is not None
