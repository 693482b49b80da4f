"""Fake results of operators, remembered by the layouts of what they were given.

Programs repeat themselves: the steps of a recurrent network, the layers of a model, their gradients. Torch's own cache of fake results takes
most of the time of tracing. Here an operator runs on fake tensors once for each kind of arguments; from then on its results are made from their
layouts. With symbolic sizes torch's cache costs more than it saves: it makes every result twice, and computes whether an entry fits by
arithmetic on expressions. It is off then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...torch_compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    below_autograd,
    in_fake_kernel,
    is_zerotensor,
    pytree,
    without_fake_cache,
)
from ..storage.regions import Layout, expressions
from .effects import TORCHS
from .schema import op_info

_VALUES = frozenset(
    (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_DATA_DECIDES = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))


def symbolic_uncached(fake_mode: Any, arguments: Any) -> AbstractContextManager[None]:
    """Switches torch's cache of a mode's fake results off for arguments with symbolic sizes."""
    symbolic = isinstance(fake_mode, FakeTensorMode) and any(map(_is_symbolic, pytree.tree_leaves(arguments)))
    return without_fake_cache(fake_mode) if symbolic else nullcontext()


class _Unknown(Exception):
    """An argument that is not compared."""


@dataclass(frozen=True)
class _Result:
    """A tensor result: its layout and device, and the size of its storage; a view lies in the storage of the argument that the operator views."""

    layout: Layout
    device: torch.device
    bytes: Any
    view: bool


@dataclass(frozen=True)
class _Results:
    results: tuple[_Result, ...]
    container: type | None
    """tuple or list, None for a single tensor."""


class FakeMemo:
    """The results so far of one trace."""

    def __init__(self, fake_mode: Any) -> None:
        self.fake_mode = fake_mode
        self._known: dict[tuple[Any, ...], _Results | None] = {}

    def results(self, op: Any, args: Any, kwargs: Any, run: Callable[[], Any], corrected: bool) -> Any:
        """What `run` returns: the operator on fake tensors, `corrected` as `run_fake` does it."""
        if not _is_remembered(op):
            return self._ran(run, args, kwargs)
        try:
            view = op_info(op).kind == "view"
            key = (op, corrected, torch.get_default_dtype(), self._key(args, view), self._key(kwargs, view))
        except _Unknown:
            return self._ran(run, args, kwargs)
        if key not in self._known:
            out = self._ran(run, args, kwargs)
            self._known[key] = self._described(op, out, args, kwargs)
            return out
        known = self._known[key]
        if known is None:
            return self._ran(run, args, kwargs)
        viewed = _viewed(op, args, kwargs)
        made = [self._made(result, viewed) for result in known.results]
        return made[0] if known.container is None else known.container(made)

    def _ran(self, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        with symbolic_uncached(self.fake_mode, (args, kwargs)):
            return run()

    def _key(self, a: Any, placed: bool) -> Any:
        """What is compared of arguments; of tensors also their place in their storage, where results lie there too (`placed`)."""
        kind = type(a)
        if kind is FakeTensor:
            if a.fake_mode is not self.fake_mode or not _is_ordinary(a):
                raise _Unknown
            place = expressions((a.storage_offset(), a.untyped_storage().nbytes())) if placed else ()
            sizes, strides = expressions(tuple(a.shape)), expressions(a.stride())
            return (a.dtype, sizes, strides, place, a.is_conj(), a.is_neg(), a.fake_device, a.requires_grad)
        if kind in _VALUES:
            return (kind, a)
        if kind is torch.SymInt:
            return (kind, *expressions((a,)))
        if isinstance(a, (tuple, list)):
            return (kind, *[self._key(x, placed) for x in a])
        if isinstance(a, dict):
            return (kind, *[(k, self._key(v, placed)) for k, v in a.items()])
        raise _Unknown

    def _described(self, op: Any, out: Any, args: Any, kwargs: Any) -> _Results | None:
        """What is remembered of results, None where they cannot be made again from that."""
        container = None if isinstance(out, torch.Tensor) else type(out)
        if container not in (None, tuple, list):
            return None
        results = (out,) if container is None else tuple(out)
        viewed = _viewed(op, args, kwargs)
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        symbols = _symbols_of((args, kwargs))
        objects, given = {id(a) for a in tensors}, {a.untyped_storage()._cdata for a in tensors}
        found = []
        for t in results:
            if type(t) is not FakeTensor or not _is_ordinary(t) or t.requires_grad:
                return None
            storage = t.untyped_storage()
            view = viewed is not None and storage._cdata == viewed.untyped_storage()._cdata
            if (not view and storage._cdata in given) or id(t) in objects:
                return None
            if not view:
                given.add(storage._cdata)
            result = _Result(Layout.of(t), t.fake_device, storage.nbytes(), view)
            if result.layout.conj or result.layout.neg or not _symbols(result) <= symbols:
                return None
            again = self._made(result, viewed)
            same = Layout.of(again).key() == result.layout.key()
            if not same or expressions((again.untyped_storage().nbytes(),)) != expressions((result.bytes,)):
                return None
            found.append(result)
        return _Results(tuple(found), container)

    def _made(self, result: _Result, viewed: Any) -> Any:
        layout = result.layout
        with below_autograd(), in_fake_kernel(self.fake_mode):
            if layout.plain and not result.view:
                elements = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
            else:
                elements = self._in_storage(result, viewed)
        return FakeTensor(self.fake_mode, elements, result.device)

    def _in_storage(self, result: _Result, viewed: Any) -> torch.Tensor:
        """A tensor of symbolic sizes takes the size of its storage as it is known: torch would compute it again from all sizes and strides."""
        layout, shape_env = result.layout, self.fake_mode.shape_env
        with shape_env.suppress_guards() if shape_env is not None else nullcontext():
            if not result.view:
                count = result.bytes // layout.dtype.itemsize
                viewed = torch.empty((count,), dtype=layout.dtype, device="meta")
            return torch.as_strided(viewed, layout.size, layout.stride, layout.offset)


def _is_ordinary(t: Any) -> bool:
    """Whether a fake tensor is nothing but its layout: its elements are not known, and it has memory (unlike zeros without)."""
    return t.layout is torch.strided and t.constant is None and not is_zerotensor(t)


def _is_symbolic(a: Any) -> bool:
    sizes = a.shape if isinstance(a, torch.Tensor) else (a,)
    return any(isinstance(n, torch.SymInt) for n in sizes)


def _is_remembered(op: Any) -> bool:
    """Whether the layouts of an operator's arguments decide those of its results, none of which is an argument itself."""
    return (
        isinstance(op, OpOverload)
        and op.namespace in TORCHS
        and op_info(op).kind in ("plain", "view", "decompose", "composite")
        and not op_info(op).keep
        and _DATA_DECIDES.isdisjoint(op.tags)
    )


def _viewed(op: Any, args: Any, kwargs: Any) -> Any:
    """The argument that the operator's results are views of, None where it makes no views."""
    info = op_info(op)
    found = info.argument(info.view_arg, args, kwargs) if info.kind == "view" else None
    return found if isinstance(found, torch.Tensor) else None


def _symbols(result: _Result) -> set[Any]:
    return _symbols_of((*result.layout.size, *result.layout.stride, result.layout.offset, result.bytes))


def _symbols_of(values: Any) -> set[Any]:
    """The symbols of sizes and of the layouts of tensors."""
    found: set[Any] = set()
    for a in pytree.tree_leaves(values):
        if isinstance(a, torch.Tensor):
            found |= _symbols_of((*a.shape, *a.stride(), a.storage_offset(), a.untyped_storage().nbytes()))
        elif isinstance(a, torch.SymInt):
            found |= a.node.expr.free_symbols
    return found


__all__ = ["FakeMemo", "symbolic_uncached"]
