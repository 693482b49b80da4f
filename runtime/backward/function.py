"""The autograd function of one training graph, and what it asks when it runs."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from ..dispatch.autograd.joint import written_since
from ..dispatch.subclasses.wrappers import Names, coerced, dense_tangent
from ..execute.support import restride
from ..torch_compat import (
    in_transform,
    is_captured,
    is_zerotensor,
    saving_is_hooked,
    skip_frame,
    tangents_may_be,
)
from .asked import left_out
from .batched import backward_by_rows
from .compiled import CompiledBackward, Described, described
from .delivery import in_order, redirected
from .duals import backward_of_duals, kept_arguments
from .over_saved import over_saved
from .second import DifferentiableBackward, refused, unsaved
from .source import emit_function, is_traceable
from .traced import TracedGraphs, as_traced, with_strides
from .validate import as_described, as_given, as_kept
from .variants import Variants

Compiled = Callable[..., Any]
_version = attrgetter("_version")


def bind_function(
    spec: CompiledBackward, forward: Compiled, variants: Variants, followed: DifferentiableBackward | None = None
) -> Compiled:
    """What takes the place of the compiled graph: same arguments, a tuple of the program's results. `forward` is the compiled forward;
    `variants` has the programs of its backward `spec`, and `followed` makes gradients that autograd follows (None: that is refused).
    """
    over = over_saved(variants.over_saved, variants.program, spec.into, spec.scaled) if spec.into else None
    traced_graphs = TracedGraphs(spec)
    names = Names()
    source = emit_function(spec, names)
    namespace: dict[str, Any] = {
        "Function": torch.autograd.Function,
        "forward_graph": forward,
        "as_described": as_described,
        "as_given": as_given,
        "backward_by_rows": backward_by_rows,
        "again": spec.gradients.again,
        "backward_of_duals": backward_of_duals,
        "kept_arguments": kept_arguments,
        "program": variants.program,
        "in_transform": in_transform,
        "is_zerotensor": is_zerotensor,
        "is_grad_enabled": torch.is_grad_enabled,
        "nothing": torch.empty(0),
        "over_saved": over,
        "scaled": over,
        "redirected": redirected,
        "restride": restride,
        "saving_is_hooked": saving_is_hooked,
        "tangents_may_be": tangents_may_be,
        "as_traced": as_traced,
        "with_strides": with_strides,
        "traced_given": _described_inputs(spec),
        "traced_graphs": traced_graphs,
        "traced_name": torch.compiler.assume_constant_result(lambda undefined: traced_graphs.name_of(undefined)),
        "Tensor": torch.Tensor,
        "math": math,
        "coerced": coerced,
        "as_kept": as_kept,
        "counter_of": counter_of,
        "left_out": left_out,
        "weights": tuple(spec.edges[k] for k in spec.weights),
        "others": tuple(spec.edges[k] for k in spec.others),
        "followed": followed or refuse_double_backward,
        "unsaved": unsaved,
        "given": tuple((k, s.expected) for k, s in enumerate(spec.saved) if s.expected is not None),
        "dense_tangent": dense_tangent,
        "by_eager_kernels": variants.by_eager_kernels,
        "described": described,
        "tangents": spec.tangents,
        "ref": weakref.ref,
        "strided": torch.strided,
        "refuse_double_backward": refuse_double_backward,
        "refuse_moved": refuse_moved,
        "refuse_written": refuse_written,
        **names.values,
    }
    exec(compile(source, "<opforge autograd function>", "exec"), namespace)
    function = namespace["Compiled"]
    if "torch._dynamo" in sys.modules:
        function.backward = staticmethod(_for_dynamo(function, is_traceable(spec)))
    apply: Compiled = function.apply
    return in_order(apply, spec.gradients.leaves) if spec.gradients.leaves else apply


def _for_dynamo(function: Any, traceable: bool) -> Callable[..., Any]:
    """The backward of a function, which Dynamo leaves alone when the engine calls it, also inside of a compiled function that calls
    `backward()`. In a graph that compiled autograd has captured, Dynamo follows `_opforge_traced` instead.
    """
    run = torch.compiler.disable(function.backward)
    if not traceable:
        return run

    def backward(ctx: Any, *gradients: Any) -> Any:
        return function._opforge_traced(ctx, *gradients) if is_captured(ctx) else run(ctx, *gradients)

    skip_frame(backward)
    return backward


def _described_inputs(spec: CompiledBackward) -> tuple[tuple[int, Described], ...]:
    """What the backward was compiled for of inputs among the saved tensors, by their position among these."""
    tensors = [s for s in spec.saved if s.is_tensor]
    return tuple((k, s.expected) for k, s in enumerate(tensors) if s.expected is not None)


def counter_of(t: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A tensor with the version counter and the sizes of `t`, and without its memory: nobody else may hold this object, but views of it."""
    counter = t.detach()
    counter.data = t.new_empty(()).expand(t.shape)
    return lambda: counter


def refuse_written(watched: Sequence[tuple[Callable[[], torch.Tensor | None], int, int]], given: int = -1) -> None:
    """Raises RuntimeError, as eager does, when a tensor was written to since the forward and one of the tangents `given` (bits) needs it."""
    for reference, version, needed in watched:
        t = reference()
        if t is not None and needed & given and t._version != version:
            raise written_since(t, version)


def refuse_moved(lasting: Sequence[Any], needed: Sequence[int], given: int = -1) -> None:
    """As `refuse_written`, of tensors that are held themselves: `lasting` has them and their versions, or is empty."""
    if not lasting:
        return
    tensors, versions = lasting
    if list(map(_version, tensors)) != versions:
        each = zip(tensors, versions, needed, strict=True)
        refuse_written([(lambda t=t: t, version, n) for t, version, n in each], given)  # type: ignore[misc]


def refuse_double_backward(*_: Any) -> None:
    """Raises: gradients of gradients were asked for, of a graph without a `DifferentiableBackward` or in a captured backward."""
    raise refused("in a backward that compiled autograd captures, or that other compilers made")
