"""What the nodes of a graph hold: their tensors, at any depth, and who reads them."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import fx

from ..ir.nodes import Ref, Size
from ..torch_compat import pytree
from .language.tensor import Tensor

DTYPE_NAMES: dict[torch.dtype, str] = {
    v: k for k, v in vars(torch).items() if isinstance(v, torch.dtype) and k == str(v).split(".")[1]
}


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake values of a node's tensor arguments."""
    return [t for a in node.all_input_nodes for t in leaves(a.meta.get("val")) if isinstance(t, torch.Tensor)]


def read_of(node: fx.Node) -> Container[int]:
    """Which of an operator's results something reads."""
    val = node.meta.get("val")
    if not isinstance(val, (list, tuple)) or any(isinstance(v, (list, tuple)) for v in val):
        return range(sys.maxsize)
    if any(user.target is not operator.getitem for user in node.users):
        return range(len(val))
    return {int(user.args[1]) for user in node.users if user.users}  # type: ignore[arg-type]


def contradict(a: tuple[Size, ...], b: tuple[Size, ...]) -> bool:
    """Whether two shapes differ, whatever the values of size symbols are."""
    return len(a) != len(b) or any(
        isinstance(m, int) and isinstance(n, int) and m != n for m, n in zip(a, b, strict=True)
    )


def refs_to(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Ref(value.name, paired=value.is_paired)
    if isinstance(value, (list, tuple)):
        return [refs_to(v) for v in value]
    return value


def leaves(tree: Any) -> Sequence[Any]:
    """The items of nested lists and tuples, in order."""
    if not isinstance(tree, (list, tuple)):
        return (tree,)
    return [leaf for item in tree for leaf in leaves(item)]


def mapped(tree: Any, f: Callable[[Any], Any]) -> Any:
    """Nested lists and tuples with `f` of each item."""
    return type(tree)([mapped(item, f) for item in tree]) if isinstance(tree, (list, tuple)) else f(tree)


def complex_part(tree: Any) -> str | None:
    """Why an operator that knows no complex numbers has no lowering here: the first one among its arguments and results, if any."""
    for leaf in pytree.tree_leaves(tree):
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
        for t in leaves(value):
            if isinstance(t, complex):
                return "a complex number"
            if isinstance(t, torch.Tensor) and t.is_complex():
                return f"dtype {DTYPE_NAMES[t.dtype]}"
    return None


__all__ = ["DTYPE_NAMES", "complex_part", "contradict", "leaves", "mapped", "read_of", "refs_to", "tensors_of"]
