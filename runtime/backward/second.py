"""The backward of a training graph where its gradients are differentiated once more (`create_graph=True`).

Autograd sees the gradients as results of another autograd function, of the tangents and of what the forward has saved. Its formulas come from
a second trace of the program (`dispatch.autograd.second`), made when they are first asked for, in which saved values stand in the place of
what computes them: random values are those of the forward, and little of it runs again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from ...errors import UnsupportedError, first_line
from ..dispatch.autograd.joint import written_since
from ..dispatch.autograd.second import SecondOrder, Twice
from ..dispatch.storage.inputs import version_of
from ..execute.support import is_lazy
from ..partition.second_order import Numbering, Part, part_between
from ..torch_compat import in_transform, no_modes
from .compiled import CompiledBackward

Program = Callable[..., Any]
Unsaved = tuple[torch.Tensor | None, Callable[[], torch.Tensor | None], int | None]
"""Of an argument that the forward has not saved: a tensor that has its history (None where autograd does not follow it), itself as long as somebody
else holds it, and its version in the forward."""


class DifferentiableBackward:
    """Gradients of a training graph that autograd follows. Threads may call it at once."""

    def __init__(
        self,
        backward: CompiledBackward,
        joint: fx.GraphModule,
        twice: Twice | None,
        compile: Callable[[Program, Sequence[Any]], Program],
    ) -> None:
        """`joint` is what `backward` was cut from; `twice` traces it with gradients of its gradients (None: not supported); `compile` makes a
        function of a program and arguments like those that it will get, which autograd can follow as well.
        """
        self._backward, self._joint, self._twice, self._compile = backward, joint, twice, compile
        self._traced: dict[Any, SavedProgram] = {}
        self._compiled: dict[Any, Program] = {}
        self._lock = threading.RLock()

    def __call__(
        self,
        saved: Sequence[Any],
        tangents: Sequence[torch.Tensor],
        unsaved: Sequence[Unsaved],
        undefined: int,
        left: int,
    ) -> list[Any]:
        """The gradients, in the order of `Gradients.inputs`.

        saved      what the forward has saved; inputs with their history.
        tangents   one for each result that autograd follows.
        unsaved    the further arguments (`CompiledBackward.unsaved`).
        undefined  the tangents, as bits, that stand for results without a gradient.
        left       which gradients are not asked for (`CompiledBackward.left_out`).
        Raises RuntimeError where the gradients cannot be differentiated.
        """
        tangents = [_plain(t) for t in tangents]
        traced = self._trace([*saved, *tangents], unsaved, undefined, left)
        arguments = traced.arguments(saved, tangents, unsaved)
        key = undefined, left, *((t.shape, t.stride(), t.dtype, t.requires_grad) for t in arguments)
        run = self._compiled.get(key)
        if run is None:
            with self._lock, no_modes():
                run = self._compiled.get(key) or self._compiled.setdefault(
                    key, self._compile(traced.program, arguments)
                )
        found = iter(run(*arguments))
        return [None if g is None else next(found) for g in traced.order.gradients]

    def _sizes(self, given: Sequence[Any], unsaved: Sequence[Unsaved]) -> dict[Any, Any]:
        """The values of those symbols that are sizes, strides or numbers among what the backward is `given`, or sizes of what is not saved."""
        arguments = _placeholders(self._joint)
        known = [(n.meta["val"], value) for n, value in zip(_placeholders(self._backward.graph), given, strict=True)]
        pairs: list[tuple[Any, Any]] = []
        for like, value in known:
            if isinstance(like, torch.Tensor):
                pairs += zip((*like.shape, *like.stride()), (*value.shape, *value.stride()), strict=True)
            else:
                pairs.append((like, value))
        for k, (history, itself, _) in zip(self._backward.unsaved, unsaved, strict=True):
            if (t := itself() if history is None else history) is not None:
                pairs += zip(arguments[k].meta["val"].shape, t.shape, strict=True)
        symbols = [(n.node.expr, m) for n, m in pairs if isinstance(n, torch.SymInt) and n.node.expr.is_symbol]
        return {symbol: sympy.Integer(int(m)) for symbol, m in symbols}

    def _trace(self, given: Sequence[Any], unsaved: Sequence[Unsaved], undefined: int, left: int) -> SavedProgram:
        if in_transform():
            raise refused("inside of vmap")
        sizes = self._sizes(given, unsaved) if self._backward.symbolic else {}
        key = undefined, left, *sizes.items()
        with self._lock, no_modes():
            if key not in self._traced:
                if self._twice is None:
                    raise refused(
                        "here: it is a gradient of a gradient already, or has tensor subclasses or tangents of forward-mode differentiation"
                    )
                try:
                    backward = self._backward
                    order = self._twice(sizes, backward.left_out(left), backward.absent(undefined))
                    self._traced[key] = SavedProgram(backward, self._joint, order, sizes)
                except UnsupportedError as error:
                    raise refused(f"({first_line(error)})") from error
            return self._traced[key]


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="placeholder")  # type: ignore[return-value]


def _plain(t: torch.Tensor) -> torch.Tensor:
    """A tangent whose memory holds its elements; autograd follows it."""
    if t.layout is not torch.strided:
        return t.to_dense()
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t) if is_lazy(t) else t


def refused(what: str) -> RuntimeError:
    """The error for gradients that cannot be differentiated."""
    return RuntimeError(
        f"a compiled graph has no gradient of its gradient (create_graph=True) {what}; run this part without torch.compile"
    )


class SavedProgram:
    """The gradients of a training graph as a program of what it has saved.

    order    the trace.
    program  takes `arguments`, and returns those gradients that there are; autograd can follow it.
    """

    def __init__(
        self, backward: CompiledBackward, joint: fx.GraphModule, order: SecondOrder, sizes: Mapping[Any, Any]
    ) -> None:
        """`sizes`: those for which `order` was traced, instead of the symbols in `joint`."""
        self.order = order
        nodes = list(order.graph.graph.nodes)
        inputs = _placeholders(order.graph)[: backward.arguments]
        self._saved = _saved_nodes(backward, joint, order, inputs, sizes)
        self._unsaved = {inputs[k]: n for n, k in enumerate(backward.unsaved)}
        self._tangents = {n: k for k, n in enumerate(order.tangents)}
        given = [n for n in order.given if n is not None]
        self._constants = {n: getattr(order.graph, str(n.target)) for n in nodes if n.op == "get_attr"}
        known = [*self._saved, *self._unsaved, *self._constants, *order.tangents]
        results = [g for g in order.gradients if g is not None]
        # What the gradients go through is there when they are differentiated: it is not computed a second time.
        between = {n for n in part_between(order.graph, known, results).made if isinstance(n.meta["val"], torch.Tensor)}
        second = part_between(order.graph, [*known, *between, *given], order.second)
        kept = [n for n in second.taken if n in between]
        first = part_between(order.graph, known, [*results, *kept])
        self._read = {n for part in (first, second) for n in part.taken} - {*given, *kept}
        gradients = dict(
            zip([*(inputs[k] for k in backward.gradients.inputs), *order.tangents], order.second, strict=True)
        )
        self._followed = {n for n, g in gradients.items() if g is not None}
        self._arguments = [n for n in nodes if n in self._read or n in self._followed]
        places = {n: k for k, n in enumerate(gradients)}
        moves = [m is not None for g, m in zip(order.gradients, order.given, strict=True) if g is not None]
        self.program = _function(
            first, second, [*self._arguments, *kept], given, [places.get(n) for n in self._arguments], moves
        )

    def arguments(
        self, saved: Sequence[Any], tangents: Sequence[torch.Tensor], unsaved: Sequence[Unsaved]
    ) -> list[torch.Tensor]:
        """What `program` takes, as for `DifferentiableBackward`."""
        found = []
        for n in self._arguments:
            if n in self._tangents:
                found.append(tangents[self._tangents[n]])
            elif n in self._constants:
                found.append(self._constants[n])
            elif n not in self._saved:
                history, itself, version = unsaved[self._unsaved[n]]
                if n in self._read:
                    history = _unwritten(n.name, itself(), version)
                assert history is not None
                found.append(history)
            elif n not in self._followed:
                found.append(saved[self._saved[n]].detach())
            elif n in self._unsaved:  # saved is a copy
                found.append(_Carried.apply(unsaved[self._unsaved[n]][0], saved[self._saved[n]]))
            else:
                found.append(saved[self._saved[n]])
        return found


def _unwritten(name: str, t: torch.Tensor | None, version: int | None) -> torch.Tensor:
    if t is None:
        raise refused(f"that needs {name}, which the forward has not kept and nobody holds any more")
    if version_of(t) != version:
        raise written_since(t, version or 0)
    return t


def _saved_nodes(
    backward: CompiledBackward,
    joint: fx.GraphModule,
    order: SecondOrder,
    inputs: Sequence[fx.Node],
    sizes: Mapping[Any, Any],
) -> dict[fx.Node, int]:
    """The nodes of the second order whose values are saved, with their positions in `backward.saved`."""
    found = {inputs[s.place[1]]: k for k, s in enumerate(backward.saved) if s.is_tensor and s.place[0] == "input"}
    if backward.scaled:
        return found  # the others are gradients
    numbering = Numbering()
    first, second = numbering.of(joint, sizes), numbering.of(order.graph)
    names = {n.name: number for n, number in first.items()}
    placeholders = _placeholders(backward.graph)
    kept: dict[Any, int] = {}
    for k, (s, n) in enumerate(zip(backward.saved, placeholders, strict=False)):
        number = names.get(n.meta.get("copy_of", n.name))
        if s.is_tensor and s.place[0] != "input" and number is not None:
            kept[number] = k
    return found | {n: kept[number] for n, number in second.items() if number in kept}


def _function(
    first: Part,
    second: Part,
    held: Sequence[fx.Node],
    given: Sequence[fx.Node],
    gradients: Sequence[int | None],
    moves: Sequence[bool],
) -> Program:
    """An autograd function: `first` computes its results, of which some move with its arguments, and what is kept for `second`, which computes its
    gradients: `gradients` has their positions, for each argument. `held`: the arguments, then what is kept.
    """
    place = {n: k for k, n in enumerate(held)}
    count = len(moves)
    own = {n: k for k, n in enumerate(given)}

    class OfSaved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            out = first.graph(*(tensors[place[n]] for n in first.taken))
            ctx.save_for_backward(*tensors, *out[count:])
            results = _distinct(out[:count], tensors)
            ctx.mark_non_differentiable(*(r for r, moving in zip(results, moves, strict=True) if not moving))
            return results

        @staticmethod
        def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            if torch.is_grad_enabled():
                raise refused("twice")
            tensors = ctx.saved_tensors
            moving = [t for t, moves_too in zip(tangents, moves, strict=True) if moves_too]
            found = second.graph(*(moving[own[n]] if n in own else tensors[place[n]] for n in second.taken))
            return tuple(None if k is None else found[k] for k in gradients)

    return OfSaved.apply


def _distinct(results: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results, each in memory of its own, as autograd wants what a function returns: gradients may be views, of tangents for one, and one tensor
    may be several gradients.
    """
    seen = {t.untyped_storage()._cdata for t in arguments}
    found = []
    for t in results:
        own = t.clone() if t._is_view() or t.untyped_storage()._cdata in seen else t
        seen.add(own.untyped_storage()._cdata)
        found.append(own)
    return tuple(found)


class _Edge(torch.autograd.Function):
    """A tensor of the sizes of another one, without memory, whose gradient is that one's: who holds it does not keep the other in memory, and a write
    into the other does not move it.
    """

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return t.new_empty(()).expand(t.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]


class _Carried(torch.autograd.Function):
    """A value with the history of another tensor."""

    @staticmethod
    def forward(ctx: Any, history: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


def unsaved(t: torch.Tensor) -> Unsaved:
    """What is kept of an argument that is not saved."""
    if not t.requires_grad:
        return None, weakref.ref(t), version_of(t)
    if t.is_leaf:  # most are: to enter grad mode for each would show in the time of a call
        return t, weakref.ref(t), version_of(t)
    with torch.enable_grad():
        return _Edge.apply(t), weakref.ref(t), version_of(t)
