"""Calling conventions: what a caller passes and gets, as flat lists. Containers are taken apart once; the wrapper
does it in source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...torch_compat import pytree

_LEAVES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, complex, bool, str, type(None))


@dataclass
class Calling:
    """`paths[k]` reads flat input k from the tuple `args`; `in_spec` and `out_spec` are pytree specs, None for flat
    arguments and for a plain tuple or list of outputs (`out_type` then). `stolen`: positions of arguments that are lists which the caller gives
    up: they are emptied, so that what is in them can be freed.
    """

    paths: tuple[str, ...]
    in_spec: Any = None
    out_spec: Any = None
    out_type: type = tuple
    stolen: tuple[int, ...] = ()

    @classmethod
    def of_inputs(cls, args: Sequence[Any]) -> Calling:
        """The convention of positional arguments `args`."""
        if all(isinstance(a, _LEAVES) for a in args):
            return cls(tuple(f"args[{k}]" for k in range(len(args))))
        leaves, spec = pytree.tree_flatten_with_path(tuple(args))
        return cls(tuple("args" + pytree.keystr(path) for path, _ in leaves), spec)

    def flatten(self, args: Sequence[Any]) -> list[Any]:
        """The flat inputs of a call."""
        return list(args) if self.in_spec is None else pytree.tree_leaves(tuple(args))

    def unflatten_inputs(self, flat: Sequence[Any]) -> Sequence[Any]:
        """The arguments of a call."""
        return flat if self.in_spec is None else pytree.tree_unflatten(list(flat), self.in_spec)

    def flatten_result(self, result: Any) -> list[Any]:
        """The flat outputs, after remembering how the result is made of them."""
        if type(result) in (tuple, list) and all(isinstance(r, _LEAVES) for r in result):
            self.out_spec, self.out_type = None, type(result)
            return list(result)
        flat, self.out_spec = pytree.tree_flatten(result)
        return flat


def result_text(spec: Any, names: list[str]) -> str | None:
    """Source that builds a result of pytree `spec` from leaf expressions, or None for containers that have no literal."""
    return _literal(pytree.tree_unflatten(names, spec))


def _literal(tree: Any) -> str | None:
    if isinstance(tree, str):
        return tree
    items = [
        _literal(t) for t in (tree.values() if type(tree) is dict else tree if type(tree) in (list, tuple) else ())
    ]
    if any(i is None for i in items):
        return None
    texts = [i for i in items if i is not None]
    if type(tree) is list:
        return f"[{', '.join(texts)}]"
    if type(tree) is tuple:
        return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
    if type(tree) is dict and all(type(k) in (str, int) for k in tree):
        return "{" + ", ".join(f"{k!r}: {t}" for k, t in zip(tree, texts, strict=True)) + "}"
    return None
