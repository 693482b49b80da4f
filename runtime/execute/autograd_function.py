"""The autograd function of one training graph: straight-line Python source that calls the compiled forward and backward.

Autograd sees one node. Its forward keeps what the backward asks for with `save_for_backward`, so that writes to saved inputs and results
are noticed as eager notices them; its backward gets gradients of any layout and gives the compiled graph those that it was made for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..dispatch.joint import Gradients, written_since
from ..dispatch.regions import Layout
from ..torch_compat import no_modes
from .support import restride

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Halves:
    """What the source is made for.

    arguments   the forward's placeholders.
    results     graph results that the program returns; the forward's further results are what is saved.
    constant    those of them that are tensors which autograd does not follow.
    saved       for each of the backward's first placeholders where the forward has it: ("input", k), ("output", k) among all of the
                forward's results.
    saved_is_tensor  whether each is a tensor (else a size).
    tangents    strides that the backward expects of each tangent, None for row-major.
    gradients   what `Gradients` says.
    """

    arguments: int
    results: int
    constant: tuple[int, ...]
    saved: tuple[tuple[str, int], ...]
    saved_is_tensor: tuple[bool, ...]
    tangents: tuple[tuple[int, ...] | None, ...]
    gradients: Gradients


class Backward:
    """A compiled backward that takes one list of arguments, which it empties: `call`, or what `make` gives when it is first needed.

    Where `make` raises, so does the backward of the program, before anything saved for it is given up.
    """

    __slots__ = ("_lock", "_make", "call")

    def __init__(self, make: Callable[[], Compiled] | None = None, call: Compiled | None = None) -> None:
        self._make, self.call, self._lock = make, call, threading.Lock()

    def ready(self) -> Compiled:
        """The compiled backward."""
        call = self.call
        return self._made() if call is None else call

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _made(self) -> Compiled:
        with self._lock, no_modes():
            if self.call is None:
                assert self._make is not None
                self.call, self._make = self._make(), None
            return self.call


def bind_halves(halves: Halves, forward: Compiled, backward: Compiled | Backward) -> Compiled:
    """What takes the place of the compiled graph: same arguments, a tuple of the program's results. `backward` takes its arguments one by
    one if it is no `Backward`.
    """
    if not isinstance(backward, Backward):
        plain = backward
        backward = Backward(call=lambda arguments: plain(*arguments))
    namespace: dict[str, Any] = {
        "Function": torch.autograd.Function,
        "forward_graph": forward,
        "backward_ready": backward.ready,
        "is_grad_enabled": torch.is_grad_enabled,
        "restride": restride,
        "ref": weakref.ref,
        "refuse_double_backward": refuse_double_backward,
        "refuse_written": refuse_written,
    }
    exec(compile(emit_function(halves), "<opforge autograd function>", "exec"), namespace)
    apply: Compiled = namespace["Compiled"].apply
    return apply


def emit_function(halves: Halves) -> str:
    """Source of the class `Compiled`, a `torch.autograd.Function`."""
    return "\n".join(["class Compiled(Function):", *_forward(halves), "", *_backward(halves)]) + "\n"


def _forward(halves: Halves) -> list[str]:
    names = [f"x{k}" for k in range(halves.arguments)]
    lines = [f"out = forward_graph({', '.join(names)})"]
    tensors: list[str] = []
    sizes: list[str] = []
    for (where, k), tensor in zip(halves.saved, halves.saved_is_tensor, strict=True):
        (tensors if tensor else sizes).append(f"x{k}" if where == "input" else f"out[{k}]")
    if tensors:
        lines.append(f"ctx.save_for_backward({', '.join(tensors)})")
    if sizes:
        lines.append(f"ctx.sizes = ({', '.join(sizes)},)")
    if watched := _watched(halves):
        lines.append(f"ctx.watched = ({', '.join(f'(ref({t}), {t}._version{after})' for t, after in watched)},)")
    if halves.constant:
        lines.append(f"ctx.mark_non_differentiable({', '.join(f'out[{k}]' for k in halves.constant)})")
    lines.append(f"return {_tuple([f'out[{k}]' for k in range(halves.results)])}")
    return [
        "    @staticmethod",
        f"    def forward({', '.join(['ctx', *names])}):",
        *(f"        {line}" for line in lines),
    ]


def _watched(halves: Halves) -> list[tuple[str, str]]:
    """Tensors that eager's backward needs and ours does not: their variables in the forward, and what is added to their version because the
    wrapper is about to write them.
    """
    saved = set(halves.saved)
    inputs = [k for k in halves.gradients.watched_inputs if ("input", k) not in saved]
    results = [k for k in halves.gradients.watched_results if ("output", k) not in saved]
    bumped = halves.gradients.bumped
    return [(f"x{k}", " + 1" if k in bumped else "") for k in inputs] + [(f"out[{k}]", "") for k in results]


def _backward(halves: Halves) -> list[str]:
    gradients = [f"g{k}" for k in range(halves.results)]
    lines = ["if is_grad_enabled():", "    refuse_double_backward()"]
    if _watched(halves):
        lines.append("refuse_written(ctx.watched)")
    lines.append("backward_graph = backward_ready()")
    # Nothing but the list holds what was saved (tensors, then sizes), so that the graph can free it while it runs; what it frees is gone
    # for autograd too, unless the caller retains the graph.
    saved = ["*ctx.saved_tensors"] if any(halves.saved_is_tensor) else []
    saved += ["*ctx.sizes"] if not all(halves.saved_is_tensor) else []
    lines.append(f"arguments = [{', '.join(saved)}]")
    if any(halves.saved_is_tensor):
        lines.append("ctx.maybe_clear_saved_tensors()")
    tangents: list[str] = []
    for k, stride in zip(halves.gradients.tangents, halves.tangents, strict=True):
        if stride is None:
            lines.append(f"g{k} = g{k}.contiguous()")
        else:
            lines += [f"if g{k}.stride() != {stride}:", f"    g{k} = restride(g{k}, {stride})"]
        tangents.append(f"g{k}")
    lines += [f"arguments += [{', '.join(tangents)}]", "out = backward_graph(arguments)"]
    position = {k: n for n, k in enumerate(halves.gradients.inputs)}
    lines.append(
        f"return {_tuple([f'out[{position[k]}]' if k in position else 'None' for k in range(halves.arguments)])}"
    )
    return [
        "    @staticmethod",
        f"    def backward({', '.join(['ctx', *gradients])}):",
        *(f"        {line}" for line in lines),
    ]


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def tangent_strides(tangent: torch.Tensor) -> tuple[int, ...] | None:
    """Strides that the backward was compiled for; None where it was compiled for row-major sizes known only later."""
    return tuple(tangent.stride()) if Layout.of(tangent).plain else None


def refuse_written(watched: Sequence[tuple[Callable[[], torch.Tensor | None], int]]) -> None:
    """Raises RuntimeError, as eager does, when a tensor that the gradients depend on was written to since the forward."""
    for reference, version in watched:
        t = reference()
        if t is not None and t._version != version:
            raise written_since(t, version)


def refuse_double_backward() -> None:
    """Raises: gradients of gradients were asked for."""
    raise RuntimeError(
        "a compiled graph has no gradient of its gradient (create_graph=True); run this part without torch.compile"
    )
