"""One recording of a module for export: a functional graph in which every flat input is a tensor of its own and every result is returned."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...errors import ExportError
from ...generated.dispatch_tables import ROLES
from ..dispatch import handlers
from ..dispatch.autograd.joint import Saved
from ..dispatch.record.dead import finish
from ..dispatch.record.lifted import LiftedModule
from ..dispatch.storage.inputs import Inputs
from ..dispatch.storage.merge import enter_inputs
from ..dispatch.storage.overlap import may_overlap
from ..dispatch.storage.regions import Layout
from ..dispatch.trace import preserved_state
from ..torch_compat import disable_autocast, enable_python_dispatcher, own_grad, pytree
from .frames import FrameRecorder


@dataclass
class Recorded:
    """`graph` returns new contents of the inputs `updated`, then `results` values of the module, then gradients of the inputs `gradients`."""

    graph: fx.GraphModule
    updated: tuple[int, ...]
    results: int
    gradients: tuple[int, ...]
    out_spec: Any


def record(
    program: LiftedModule, given: Sequence[Any], fakes: Sequence[Any], names: Sequence[str], loss: int | None
) -> Recorded:
    """Record `program` for the flat inputs `given`, of which `fakes` are fakes in storages of their own and `names` what messages call them.
    With `loss`, the flat result at that position, also its gradients. Raises `ExportError`; what the program raises is not caught.
    """
    inputs = Inputs.of(fakes, frozenset(), True)
    recorder = FrameRecorder(inputs.fake_mode, inputs.overlaps, handlers)
    entered = enter_inputs(inputs, recorder)
    symbolic = any(layout is not None and not layout.plain for layout in inputs.layouts)
    dispatcher = enable_python_dispatcher if symbolic else contextlib.nullcontext
    saved = Saved()
    with contextlib.ExitStack() as held:
        with preserved_state(), dispatcher(), saved.hooks(), torch.set_grad_enabled(loss is not None), recorder:
            result = program.record(inputs.fakes, recorder, held)
        flat, out_spec = pytree.tree_flatten(result)
        run = _Run(program, given, inputs, recorder, entered.values, names, flat, loss)
        results = [run.result(k, t) for k, t in enumerate(flat)]
        updated, updates = run.updates()
        gradients: list[Any] = []
        wanted: tuple[int, ...] = ()
        if loss is not None:
            run.check_loss()
            with preserved_state(), dispatcher(), disable_autocast():
                wanted, gradients = run.gradients()
    outputs = [*_apart(recorder, updates), *results, *_apart(recorder, gradients)]
    return Recorded(finish(recorder, tuple(outputs)), updated, len(results), wanted, out_spec)


def _apart(recorder: FrameRecorder, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """`nodes` with a copy for each that is there before, or that is an input: a signature tells them by their names."""
    seen: set[fx.Node] = set()
    out = []
    for node in nodes:
        own = node if node not in seen and node.op != "placeholder" else recorder.dispatch_node(ROLES["clone"], (node,))
        seen.add(own)
        out.append(own)
    return out


@dataclass
class _Run:
    program: LiftedModule
    given: Sequence[Any]
    inputs: Inputs
    recorder: FrameRecorder
    values: Sequence[Any]
    names: Sequence[str]
    flat: list[Any]
    loss: int | None

    def result(self, k: int, t: Any) -> Any:
        """The node of one result, or the number that it is."""
        if isinstance(t, torch.Tensor):
            return self.recorder.current(self.recorder.value(t))
        if isinstance(t, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.recorder.symbols.node(t)
        if t is not None and not isinstance(t, (bool, int, float, complex, str)):
            raise ExportError(f"output {k} is a {type(t).__name__}; return tensors, numbers and containers of them")
        return t

    # --- what happened to the inputs

    def updates(self) -> tuple[tuple[int, ...], list[fx.Node]]:
        """The inputs with new contents, and the nodes of these."""
        found: dict[int, fx.Node] = {}
        for i, before in enumerate(self.values):
            if before is None:
                continue
            self._check_layout(i, before)
            if i in self.program.assigned:
                found[i] = self._assigned(i, self.program.assigned[i])
            elif before.region.version > 0:
                self._check_write(i, self.inputs.fakes[i], self._line(i))
                found[i] = self.recorder.current(before)
            elif self.inputs.fakes[i].requires_grad != self.inputs.requires_grad[i]:
                raise ExportError(
                    f"{self.names[i]} is told to require grad, or to stop to, in the forward; do it outside"
                )
        return tuple(found), list(found.values())

    def _check_layout(self, i: int, before: Any) -> None:
        t, layout = self.inputs.fakes[i], self.inputs.layouts[i]
        moved = self.recorder.value(t).region.key != before.region.key
        if moved or layout is None or Layout.of(t).key() != layout.key():
            raise ExportError(
                f"{self.names[i]} gets another shape, stride or storage{self._line(i)}; an exported graph can only return new elements: "
                "call the operator that does not end in an underscore, and use its result"
            )

    def _check_write(self, i: int, after: torch.Tensor, line: str) -> None:
        name = self.names[i]
        if self.loss is not None:
            if self.given[i].requires_grad:
                raise ExportError(
                    f"{name} requires grad and is written{line}; write to a clone of it, or to detached data"
                )
            if after.requires_grad:
                raise ExportError(
                    f"{name} is given a value that requires grad{line}; only the loss may: detach() the value"
                )
        for j, other in enumerate(self.given):
            if j != i and isinstance(other, torch.Tensor) and _overlap(self.given[i], other):
                raise ExportError(
                    f"{name} is written{line} and shares memory with {self.names[j]}; pass a clone of one"
                )

    def _assigned(self, i: int, t: torch.Tensor) -> fx.Node:
        was = self.inputs.fakes[i]
        if t.dtype != was.dtype or list(t.shape) != list(was.shape):
            raise ExportError(
                f"{self.names[i]} is {was.dtype}{list(was.shape)} and is assigned a tensor of {t.dtype}{list(t.shape)}; it must stay alike"
            )
        node = self.recorder.current(self.recorder.value(t))
        place = node.meta.get("source")
        self._check_write(i, t, f" ({place})" if place else "")
        return node

    def _line(self, i: int) -> str:
        before = self.values[i]
        found = self.recorder.lines.get(before.region.key) if before is not None else None
        return found or self.recorder.lines.get(self.recorder.regions.key(self.inputs.fakes[i]), "")

    # --- the loss

    def check_loss(self) -> None:
        """Raises for a loss that has no gradient, and for other results that have one."""
        if self.loss is None or not -len(self.flat) <= self.loss < len(self.flat):
            raise ExportError(
                f"output_loss_index is {self.loss}, but the module returns {len(self.flat)} values: 0 to {len(self.flat) - 1} are possible"
            )
        self.loss %= len(self.flat)
        loss = self.flat[self.loss]
        what = f"output {self.loss}, the loss,"
        if not isinstance(loss, torch.Tensor):
            raise ExportError(f"{what} is a {type(loss).__name__}; it must be a tensor of one real number")
        line = self._source(loss)
        if not loss.dtype.is_floating_point:
            raise ExportError(f"{what} has the dtype {loss.dtype}{line}; only floating-point losses have gradients")
        if loss.numel() != 1:
            raise ExportError(
                f"{what} has the shape {list(loss.shape)}{line}; reduce it to a scalar with mean() or sum()"
            )
        if not loss.requires_grad:
            raise ExportError(f"{what} does not require grad{line}: it depends on no parameter or input that does")
        for k, t in enumerate(self.flat):
            if k != self.loss and isinstance(t, torch.Tensor) and t.requires_grad:
                raise ExportError(
                    f"output {k} requires grad{self._source(t)} and is not the loss (output {self.loss}); return it detached: .detach()"
                )

    def _source(self, t: torch.Tensor) -> str:
        place = self.recorder.current(self.recorder.value(t)).meta.get("source")
        return f" ({place})" if place else ""

    def gradients(self) -> tuple[tuple[int, ...], list[fx.Node]]:
        """Inputs that require grad, and the nodes of the loss's gradients for them."""
        assert self.loss is not None
        loss, recorder = self.flat[self.loss], self.recorder
        wanted = [i for i, edge in enumerate(self.inputs.edges) if edge is not None]
        recorder.origin, recorder.backward = None, True
        with recorder:
            start = torch.ones_like(loss)
            found = own_grad([loss], [self.inputs.edges[i] for i in wanted], [start], allow_unused=True)
        for i, gradient in zip(wanted, found, strict=True):
            if gradient is None:
                raise ExportError(
                    f"{self.names[i]} requires grad, but the loss does not depend on it; call requires_grad_(False) on it, or use it"
                )
        return tuple(wanted), [recorder.current(recorder.value(g)) for g in found]


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same and may_overlap(Layout.of(a), Layout.of(b))
