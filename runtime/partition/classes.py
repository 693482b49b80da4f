"""The class of a node: what computing it once more in the backward would cost. From the specs and torch's schemas; no operator is named here."""

from __future__ import annotations

import functools
import operator
from enum import IntEnum
from typing import Any

import torch
from torch import fx

from ...generated import recompute
from ..dispatch.operators.effects import has_effect
from ..dispatch.user_kernels.launches import Launch
from ..torch_compat import OpOverload


class OpClass(IntEnum):
    """INPUT: a placeholder · CONSTANT: an attribute of the module · SYMBOL: arithmetic on sizes · PART: one result of a node that has
    several · VIEW: aliases its operand · POINTWISE, REDUCTION, HEAVY: as `specs/recompute.yaml` says · FIXED: drawn from a random stream,
    or a size that depends on data: a second run would give something else · EFFECT: runs for what it does.
    """

    INPUT = 0
    CONSTANT = 1
    SYMBOL = 2
    PART = 3
    VIEW = 4
    POINTWISE = 5
    REDUCTION = 6
    HEAVY = 7
    FIXED = 8
    EFFECT = 9


#: Tags of operators whose second run gives another result, or another symbol for a size.
_FIXED = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@functools.cache
def class_of_op(op: OpOverload) -> OpClass:
    """The class of an overload."""
    if has_effect(op):
        return OpClass.EFFECT
    if any(tag in op.tags for tag in _FIXED):
        return OpClass.FIXED
    name = str(op)
    if name in recompute.HEAVY:
        return OpClass.HEAVY
    schema = op._schema
    if schema.is_mutable:
        return OpClass.EFFECT
    if name in recompute.VIEW or any(r.alias_info is not None for r in schema.returns):
        return OpClass.VIEW
    if name in recompute.POINTWISE:
        return OpClass.POINTWISE
    return OpClass.REDUCTION if name in recompute.REDUCTION else OpClass.HEAVY


def picks(node: fx.Node) -> bool:
    """Whether the result of a node is an element of its operand."""
    return isinstance(node.target, OpOverload) and str(node.target) in recompute.PICKS


def compares(node: fx.Node) -> bool:
    """Whether a node compares elements with one another."""
    return isinstance(node.target, OpOverload) and str(node.target) in recompute.COMPARES


def class_of(node: fx.Node) -> OpClass:
    """The class of a node of a joint graph."""
    if node.op == "placeholder":
        return OpClass.INPUT
    if node.op == "get_attr":
        return OpClass.CONSTANT
    target: Any = node.target
    value = node.meta.get("val")
    if isinstance(target, OpOverload):
        found = class_of_op(target)
        plain = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
        return OpClass.SYMBOL if plain and found not in (OpClass.FIXED, OpClass.EFFECT) else found
    if target is operator.getitem:
        return OpClass.PART
    if isinstance(target, Launch):
        return OpClass.EFFECT if target.effect else OpClass.HEAVY
    if getattr(target, "__module__", "").split(".")[0] in ("_operator", "math", "builtins", "torch") and not hasattr(
        target, "dispatch"
    ):
        return OpClass.SYMBOL
    called = next((a for a in node.args if isinstance(a, OpOverload)), None)
    if called is not None:  # it runs an operator on copies
        return class_of_op(called)
    return OpClass.FIXED if _draws(node) else OpClass.HEAVY


def _draws(node: fx.Node) -> bool:
    """Whether a subgraph of a higher-order operator draws random numbers or has an effect."""
    owner = node.graph.owning_module
    for arg in node.all_input_nodes:
        inner = getattr(owner, str(arg.target), None) if arg.op == "get_attr" and owner is not None else None
        if isinstance(inner, fx.GraphModule):
            for module in (m for m in inner.modules() if isinstance(m, fx.GraphModule)):
                for n in module.graph.nodes:
                    if isinstance(n.target, OpOverload) and class_of_op(n.target) >= OpClass.FIXED:
                        return True
    return False
