"""How autograd knows an output that is an alias, from the traced tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...errors import UnsupportedError
from ...generated.dispatch_tables import view_history
from ...generated.schemas import ViewHistory
from ..torch_compat import shares_version
from .inputs import Inputs
from .recorder import Recorder
from .regions import Value


def history_of(
    inputs: Inputs, t: torch.Tensor, value: Value, followed: bool, gradient: bool, source: torch.Tensor | None
) -> ViewHistory:
    """The history of the traced output `t`. `followed`: autograd follows its source; `gradient`: it follows `t` itself. Raises
    `UnsupportedError`.
    """
    # Inference tensors are nobody's views; an input that gets another storage takes it from whatever this is.
    if torch.is_inference_mode_enabled() and not t._is_view() and not t.is_inference() and value.step is None:
        raise UnsupportedError("an output is another object for an input, made in inference mode; return the input")
    view = t._is_view() or t.is_inference() or any(t is known for known in inputs.fakes)
    # Merged inputs are one view family in the caller's hands, and each its own here.
    family = [t for t in (source, *(inputs.fakes[i] for i in value.region.inputs)) if t is not None]
    shares = view or source is None or any(shares_version(known, t) for known in family)
    other = t._is_view() and not gradient and not any(_same_base(t, known) for known in family)
    if other and t.requires_grad and not followed:
        raise UnsupportedError(
            "an output is a view of a leaf that the program itself made (requires_grad_()); make it outside"
        )
    return view_history(
        followed, gradient, t.requires_grad, view, other and source is not None, one_of_many(value), shares
    )


def _same_base(t: torch.Tensor, source: torch.Tensor) -> bool:
    return t._base is source or (source._is_view() and t._base is source._base)


def one_of_many(value: Value | None) -> bool:
    """Whether a view with several results is among those that made the value."""
    while value is not None:
        if value.step is not None and value.step.index is not None:
            return True
        value = value.parent
    return False


def is_cut(recorder: Recorder, value: Value, has_history: Callable[[torch.Tensor], bool]) -> bool:
    """Whether a tensor that the value is a view of has no history although it requires grad."""
    tensors = {id(v): t for t, v in recorder.regions.values.values()}
    above = value.parent
    while above is not None:
        t = tensors.get(id(above))
        if t is not None and t._is_view() and t.requires_grad and not has_history(t):
            return True
        above = above.parent
    return False
