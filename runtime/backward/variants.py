"""The programs of one backward, each compiled when a call first needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ...generated.dispatch_tables import ROLES
from ..observe import counters
from ..torch_compat import no_modes
from .compiled import CompiledBackward

Boxed = Callable[[list[Any]], Any]
"""It takes its arguments as one list, which it empties so that each is freed after its last use."""
Compile = Callable[[fx.GraphModule, Mapping[int, int]], Boxed]
"""Compiles a graph. The mapping: positions of placeholders → of the results that are written there, for which it returns None."""


class Variants:
    """The programs of a backward, by the tangents that are undefined, and the gradients that are left out. Threads may call it at once.

    Where compiling raises, so does the backward of the user's program, before anything saved for it is given up: it can be asked for again.
    """

    def __init__(self, backward: CompiledBackward, compile: Compile, *, strict: bool = False) -> None:
        """`compile`: how they are compiled in a call; `strict`: what eager kernels would have to run raises."""
        self._backward, self._compile, self._strict = backward, compile, strict
        self._compiled: dict[tuple[int, int], Boxed] = {}
        self._by_eager_kernels: dict[tuple[int, int], Boxed] = {}
        self._over_saved: Boxed | None = None
        self._lock = threading.RLock()

    def prepare(self, compile: Compile) -> None:
        """Compile before the first call what an ordinary one needs, with `compile`."""
        if self._backward.into:
            self._over_saved = compile(self._backward.graph, self._backward.into)
        self._compiled[0, 0] = compile(self._backward.graph, MappingProxyType({}))

    def program(self, undefined: int = 0, left: int = 0) -> Boxed:
        """The one for calls in which the tangents at the bits of `undefined` are undefined, and the gradients `CompiledBackward.left_out` are not
        asked for.
        """
        found = self._compiled.get((undefined, left))
        return self._made(self._compiled, (undefined, left), self._compile_variant) if found is None else found

    def over_saved(self) -> Boxed:
        """The whole backward, which writes gradients over saved tensors (`CompiledBackward.into`) and returns None for them."""
        if self._over_saved is None:
            with self._lock, no_modes():
                if self._over_saved is None:
                    self._over_saved = self._compile(self._backward.graph, self._backward.into)
        return self._over_saved

    def by_eager_kernels(self, undefined: int) -> Boxed:
        """As `program`, for calls in which tangents arrive that are no strided tensors (of a table that is looked up with `sparse=True`), so that
        gradients of inputs are sparse where eager's are. Raises `UnsupportedError` where it is `strict`.
        """
        return self._made(self._by_eager_kernels, (undefined, 0), self._interpret_variant)

    def _made(
        self, programs: dict[tuple[int, int], Boxed], which: tuple[int, int], make: Callable[[int, int], Boxed]
    ) -> Boxed:
        with self._lock, no_modes():
            if which not in programs:
                programs[which] = make(*which)
            return programs[which]

    def _compile_variant(self, undefined: int, left: int) -> Boxed:
        if not (undefined and self._backward.symbolic):
            return self._compile(self._backward.variant(undefined, left), MappingProxyType({}))
        # Compiling another graph may add guards, which are settled by now: zeros stand in for undefined tangents.
        unreached, whole = self._backward.unreached(undefined), self.program()
        return lambda arguments: [None if k in unreached else g for k, g in enumerate(whole(arguments))]

    def _interpret_variant(self, undefined: int, left: int) -> Boxed:
        reason = "a gradient arrives that is no strided tensor (sparse): its backward runs by eager kernels"
        if self._strict:
            raise UnsupportedError(reason)
        counters.count_fallback(f"UnsupportedError: {reason}")
        return _by_interpreter(_SparseGradients, self._backward.variant(undefined, left))


class _SparseGradients(fx.Interpreter):
    """Runs a backward on gradients that may be sparse. Autograd puts the dense one first where it adds two."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ROLES["add"] and len(args) == 2 and all(isinstance(a, torch.Tensor) for a in args):
            args = sorted(args, key=lambda t: t.layout is not torch.strided)
        return super().call_function(target, tuple(args), kwargs)


def _by_interpreter(kind: type[fx.Interpreter], graph: fx.GraphModule) -> Boxed:
    """Runs a graph by an interpreter of that kind: a new one for each call, because it holds the values of the call that runs."""
    return lambda arguments: kind(graph).boxed_run(arguments)


def interpreted(graph: fx.GraphModule, into: Mapping[int, int] = MappingProxyType({})) -> Boxed:
    """A backward by eager kernels, where it cannot be compiled; `into` as for `Compile`."""
    run = _by_interpreter(fx.Interpreter, graph)
    if not into:
        return run

    def in_place(arguments: list[Any]) -> list[Any]:
        targets = {gradient: arguments[k] for k, gradient in into.items()}
        gradients = list(run(arguments))
        for k, target in targets.items():
            target.copy_(gradients[k])
            gradients[k] = None
        return gradients

    return in_place
