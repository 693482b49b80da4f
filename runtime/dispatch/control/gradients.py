"""Gradients of higher-order operators that run functions of the program: the operator once more, with functions that compute gradients.

They run the program's function again, from its operands, and autograd backward over it (the backward of a scan: from the values that each step
was handed, which its forward returns as well). So a graph is made for each, as for the functions themselves; a float operand that a function
does not use has a gradient of zeros, as torch gives it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....errors import UnsupportedError
from ....generated.decompositions import CONTROL, Control
from ...torch_compat import in_transform, no_modes, own_grad, pytree
from ..record.recorder import Recorder
from .functions import Derived, record_control, run


def call_control(recorder: Recorder, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The call of an operator that the spec names under `control`, where autograd may follow it."""
    form = CONTROL[op.name()]
    tensors = [t for t in pytree.tree_leaves([args[k] for k in _operand_lists(form)]) if isinstance(t, torch.Tensor)]
    if kwargs or in_transform():  # `vmap` has a rule of its own, which calls the operator again
        return op(*args, **kwargs)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors) or not _runs_by_data(form, args):
        with no_modes():
            return record_control(recorder, op, args, {})
    if form.runs == "loop":
        raise UnsupportedError(f"the gradient of {op}{recorder.where()} needs values of as many runs as data decides")
    lists = [list(args[k]) for k in _operand_lists(form)]
    call = _GRADIENTS[form.runs](recorder, op, form, tuple(args), tuple(len(v) for v in lists))
    out = _Function.apply(call, *(o for values in lists for o in values))
    return pytree.tree_unflatten(list(out), call.spec)


def _operand_lists(form: Control) -> list[int]:
    return [k for k in (form.carried, form.sliced, form.given) if k is not None]


def _runs_by_data(form: Control, args: Sequence[Any]) -> bool:
    """Not where the branch is known while tracing: that one is recorded as a part of the program."""
    return form.predicate is None or isinstance(args[form.predicate], torch.Tensor)


class _Function(torch.autograd.Function):
    """A call as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *operands: Any) -> Any:  # type: ignore[override]
        ctx.call, ctx.wanted = call, ctx.needs_input_grad[1:]
        out, kept = call.forward(operands)
        tensors = [t for t in (*operands, *kept) if isinstance(t, torch.Tensor)]
        ctx.rest = [None if isinstance(t, torch.Tensor) else t for t in (*operands, *kept)]
        ctx.is_tensor = [isinstance(t, torch.Tensor) for t in (*operands, *kept)]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        values = [next(saved) if held else rest for held, rest in zip(ctx.is_tensor, ctx.rest, strict=True)]
        count = len(ctx.wanted)
        return None, *ctx.call.backward(values[:count], values[count:], ctx.wanted, grads)


@dataclass
class _Call(ABC):
    """`counts`: lengths of the operator's lists of operands; `spec`: how its results nest; `autocast`: as it was when the operator was called, by
    device: a gradient runs the functions again.
    """

    recorder: Recorder
    op: Any
    form: Control
    args: tuple[Any, ...]
    counts: tuple[int, ...]
    spec: Any = field(default=None)
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = field(default_factory=lambda: tuple(_autocast()))

    def forward(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Flat results, and what the backward needs besides the operands."""
        out, self.spec = pytree.tree_flatten(self._record(self._with(self.args, operands)))
        return out, []

    @abstractmethod
    def backward(
        self, operands: Sequence[Any], kept: Sequence[Any], wanted: Sequence[bool], grads: Sequence[Any]
    ) -> list[Any]:
        """Gradients of the operands, None where none is wanted."""

    def _with(self, args: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        found, rest = list(args), list(operands)
        for k, count in zip(_operand_lists(self.form), self.counts, strict=True):
            found[k], rest = tuple(rest[:count]), rest[count:]
        return found

    def _call(self, functions: Sequence[Any], lists: Sequence[Sequence[Any]]) -> list[Any]:
        """Flat results of the operator with other functions and operands."""
        args = list(self.args)
        for k, function in zip(self.form.functions, functions, strict=True):
            args[k] = function
        for k, values in zip(_operand_lists(self.form), lists, strict=True):
            args[k] = list(values)
        return list(self._record(args))

    def _record(self, args: Sequence[Any]) -> Any:
        """The results of the operator, without the dispatcher, which would go on without autograd inside of the functions."""
        with no_modes():
            return record_control(self.recorder, self.op, args, {})

    def _vjp(
        self,
        function: Any,
        operands: Sequence[Any],
        wanted: Sequence[bool],
        tangents: dict[int, Any],
        recorder: Recorder,
    ) -> list[Any]:
        """Gradients of the `wanted` operands of a function, for `tangents` by the position of the result."""
        leaves = [t.detach().requires_grad_() if w else t for t, w in zip(operands, wanted, strict=True)]
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(torch.enable_grad())
            out = pytree.tree_leaves(run(function, leaves, recorder), is_leaf=lambda x: x is None)
        ends = [(out[k], g) for k, g in tangents.items() if out[k].requires_grad]
        inputs = [t for t, w in zip(leaves, wanted, strict=True) if w]
        found: Sequence[Any] = [None] * len(inputs)
        if ends and inputs:
            found = own_grad([t for t, _ in ends], inputs, [g for _, g in ends], allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=True)]


class _Branch(_Call):
    def backward(
        self, operands: Sequence[Any], kept: Sequence[Any], wanted: Sequence[bool], grads: Sequence[Any]
    ) -> list[Any]:
        given = [k for k, g in enumerate(grads) if g is not None]

        def gradient(function: Any) -> Derived:
            def of(values: Sequence[Any], recorder: Recorder) -> list[Any]:
                primals, tangents = values[: len(operands)], dict(zip(given, values[len(operands) :], strict=True))
                return self._vjp(function, primals, wanted, tangents, recorder)

            return Derived(of)

        functions = [gradient(self.args[k]) for k in self.form.functions]
        found = iter(self._call(functions, [[*operands, *(grads[k] for k in given)]]))
        return [next(found) if w else None for w in wanted]


class _Scan(_Call):
    def forward(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        carried, function = self.counts[0], self.args[self.form.functions[0]]

        def step(values: Sequence[Any], recorder: Recorder) -> list[Any]:
            out, self.spec = pytree.tree_flatten(run(function, values, recorder))
            return [*out, *values[:carried]]

        args = list(self.args)
        args[self.form.functions[0]] = Derived(step)
        out = list(self._record(self._with(args, operands)))
        return out[: len(out) - carried], out[len(out) - carried :]

    def backward(
        self, operands: Sequence[Any], kept: Sequence[Any], wanted: Sequence[bool], grads: Sequence[Any]
    ) -> list[Any]:
        carried, sliced, _ = self.counts
        first = carried + sliced  # of what all steps take
        floats = [isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()) for t in operands[:carried]]
        follow = (*floats, *wanted[carried:])
        summed = [t for t, w in zip(operands[first:], wanted[first:], strict=True) if w]
        stacked = [k for k, g in enumerate(grads) if k >= carried and g is not None]
        function = self.args[self.form.functions[0]]
        handed = [k for k, f in enumerate(floats) if f]

        def step(values: Sequence[Any], recorder: Recorder) -> list[Any]:
            rest = list(values)

            def take(count: int) -> list[Any]:
                taken, rest[:] = rest[:count], rest[count:]
                return taken

            tangents = dict(zip(handed, take(len(handed)), strict=True))
            sums = take(len(summed))
            tangents |= dict(zip(stacked, take(len(stacked)), strict=True))
            slices, before, given = take(sliced), take(carried), rest
            found = self._vjp(function, [*before, *slices, *given], follow, tangents, recorder)
            of_carried, found = found[: len(handed)], found[len(handed) :]
            of_slices = found[: len(found) - len(sums)]
            totals = [a + b for a, b in zip(sums, found[len(of_slices) :], strict=True)]
            return [*of_carried, *totals, *of_slices]

        start = [torch.zeros_like(operands[k]) if grads[k] is None else grads[k] for k in handed]
        back = [t.flip(0) for t in (*(grads[k] for k in stacked), *operands[carried:first], *kept)]
        found = self._call([Derived(step)], [[*start, *(torch.zeros_like(t) for t in summed)], back, operands[first:]])
        of_carried = dict(zip(handed, found, strict=False))
        found = found[len(handed) :]
        totals, of_slices = iter(found[: len(summed)]), (t.flip(0) for t in found[len(summed) :])
        return [
            (of_carried[k] if k < carried else next(of_slices) if k < first else next(totals)) if w else None
            for k, w in enumerate(wanted)
        ]


class _Map(_Call):
    """Slices know nothing of each other: each gives a gradient of what all take, and these are added up."""

    def backward(
        self, operands: Sequence[Any], kept: Sequence[Any], wanted: Sequence[bool], grads: Sequence[Any]
    ) -> list[Any]:
        sliced = self.counts[0]
        told = [k for k, g in enumerate(grads) if g is not None]
        function = self.args[self.form.functions[0]]

        def step(values: Sequence[Any], recorder: Recorder) -> list[Any]:
            tangents = dict(zip(told, values[: len(told)], strict=True))
            return self._vjp(function, values[len(told) :], wanted, tangents, recorder)

        slices = [*(grads[k] for k in told), *operands[:sliced]]
        found = iter(self._call([Derived(step)], [slices, operands[sliced:]]))
        return [(next(found) if k < sliced else next(found).sum(0)) if w else None for k, w in enumerate(wanted)]


_GRADIENTS: dict[str, type[_Call]] = {"branch": _Branch, "scan": _Scan, "map": _Map}


def _autocast() -> Iterator[tuple[str, bool, torch.dtype]]:
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        yield device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
