"""How autograd knows an output that is an alias, from the traced tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from ....errors import UnsupportedError
from ....generated.dispatch_tables import view_history
from ....generated.schemas import ViewHistory
from ...torch_compat import made_without_grad, shares_version
from ..record.recorder import Recorder
from ..storage.inputs import Inputs, is_own
from ..storage.overlap import covers, overlaps_itself
from ..storage.regions import Layout, Region, Value


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
    apart = t._is_view() and not any(_same_base(t, known) for known in family)
    if gradient and apart and source is not None:
        raise UnsupportedError(
            "an output is a view of a detached input that the program has written with a gradient; return a copy of it (`clone()`)"
        )
    other = apart and not gradient
    # What `reshape` copies is another tensor with history in the storage of its source, and no view of it.
    other = other and not (followed and t._base.grad_fn is not None)  # type: ignore[union-attr]
    if other and t.requires_grad and not followed:
        raise UnsupportedError(
            "an output is a view of a leaf that the program itself made (requires_grad_()); make it outside"
        )
    if gradient and not view:
        raise UnsupportedError(
            "an output has another's memory and a history of its own; return a copy of it (`clone()`)"
        )
    return view_history(
        followed, gradient, t.requires_grad, view, other and source is not None, one_of_many(value), shares
    )


def check_inference(t: torch.Tensor) -> None:
    """Raises `UnsupportedError` where an output is, or is an alias of, a tensor that only inference mode can make."""
    if t.is_inference() and not torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "an output is made in, or an alias of a tensor from, inference mode, and is returned outside of it"
        )


def _same_base(t: torch.Tensor, source: torch.Tensor) -> bool:
    return t._base is source or (source._is_view() and t._base is source._base)


def one_of_many(value: Value | None) -> bool:
    """Whether a view with several results is among those that made the value."""
    while value is not None:
        if value.step is not None and value.step.index is not None:
            return True
        value = value.above
    return False


def is_whole(value: Value | None) -> bool:
    """Whether the value is all of its region, in the layout that the region began with."""
    while value is not None and value.parent is not None and value.step is None:
        value = value.parent
    return value is not None and value.parent is None


def relaid_whole(recorder: Recorder, region: Region) -> torch.Tensor | None:
    """The tensor object that a region began as, where it has another layout now (`t_`); None where it has not."""
    inside = [(t, v) for t, v in recorder.regions.values.values() if v.region is region]
    if any(v.parent is None for _, v in inside):
        return None
    return next((t for t, _ in inside if id(t) in recorder.relaid and not t._is_view()), None)


def may_be_base(recorder: Recorder, t: torch.Tensor, value: Value | None) -> bool:
    """Whether the other results in the storage of `t` can be views of it: a view of all that there is (`view_as`) is itself a view of
    another tensor, and gradients of what it was detached from do not come by it.
    """
    if value is None or t._is_view():
        return False
    # What changed its layout takes the graph's result, as the very object: no other tensor can be it.
    if relaid_whole(recorder, value.region) is not None:
        return False
    if not is_whole(value):  # what `reshape` copies: no view of the copy, and with its history
        relaid = id(t) in recorder.relaid
        return t.grad_fn is not None and not relaid and covers(value.layout, value.root.layout)
    followed = any(v is value.root and known.requires_grad for known, v in recorder.regions.values.values())
    return value.parent is None or not followed


def own_base(recorder: Recorder, t: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor | None:
    """What `reshape` copied and the program then wrote, where the output `t` is a view of that: the storage is that of the copy, but autograd
    knows a tensor of its own there, whose history alone has the write. `chosen`: what other outputs in the storage are views of already.
    """
    base = t._base if t._is_view() else None
    value = None if base is None else recorder.regions.get(base)
    if base is None or value is None or is_whole(value) or base.grad_fn is None or value.born == value.region.version:
        return None
    if relaid_whole(recorder, value.region) is base:
        return None
    if base is not chosen and (chosen is not None or not covers(value.layout, value.root.layout)):
        raise UnsupportedError(
            "an output is a view of a tensor that shares memory with others, and was written, unknown to autograd"
        )
    return base


def check_views(
    recorder: Recorder,
    value: Value,
    origin: Layout,
    t: torch.Tensor,
    source: torch.Tensor | None,
    has_history: Callable[[torch.Tensor], bool],
) -> None:
    """Raises `UnsupportedError` where the gradient of the alias `t` is not that of a view of `source`, laid out as `origin`, which is how the
    caller gets it.
    """
    if is_cut(recorder, value, has_history):
        raise UnsupportedError("an output is a view of a view that was made under no_grad, where its gradient ends")
    if drops_gradients(value, origin):
        raise UnsupportedError("an output is as_strided of a view that does not hold all that it reads")
    if overlaps_itself(origin):
        raise UnsupportedError(
            "an output is a view of an input whose elements share memory (an expanded tensor): as_strided would share out their gradients"
        )
    if is_custom(t, source):
        raise UnsupportedError(
            "an output of a custom autograd.Function is an alias of its input; return a copy of it (`clone()`) for its backward to run"
        )
    if is_hooked(recorder, value, t, source):
        raise UnsupportedError("an output is a view with a hook (register_hook)")


def is_custom(t: torch.Tensor, source: torch.Tensor | None) -> bool:
    """Whether a backward written in Python lies between the view `t` and what it is a view of."""
    end = None if source is None or not source.requires_grad else get_gradient_edge(source).node
    node = t.grad_fn
    while node is not None and node is not end:
        if isinstance(node, BackwardCFunction) and not is_own(node):
            return True
        after = [n for n, _ in node.next_functions if n is not None]
        node = after[0] if len(after) == 1 else None
    return False


def is_hooked(recorder: Recorder, value: Value, t: torch.Tensor, source: torch.Tensor | None) -> bool:
    """Whether a tensor from `t` up to what it is a view of has a hook for its gradient."""
    tensors = {id(v): known for known, v in recorder.regions.values.values()}
    above: Value | None = value
    while above is not None:
        known = tensors.get(id(above), t if above is value else None)
        if known is not None and known is not source and known._backward_hooks:
            return True
        above = above.above
    return False


def is_cut(recorder: Recorder, value: Value, has_history: Callable[[torch.Tensor], bool]) -> bool:
    """Whether a tensor that the value is a view of has no history although it requires grad."""
    tensors = {id(v): t for t, v in recorder.regions.values.values()}
    above = value.above
    while above is not None:
        t = tensors.get(id(above))
        if t is not None and t._is_view() and t.requires_grad and not has_history(t):
            return True
        above = above.above
    return False


def drops_gradients(value: Value, origin: Layout) -> bool:
    """Whether `as_strided` reads more than the view that it was called on, of something laid out as `origin`: autograd gives gradients to
    the elements of that view alone.
    """
    above: Value | None = value
    while above is not None:
        if above.near is not None and not covers(above.near.layout, origin):
            return True
        above = above.above
    return False


def check_given_up(inputs: Inputs, value: Value, source: int, t: torch.Tensor) -> None:
    """Raises `UnsupportedError` for a view `t` of input `source` that was made without grad and written to after that, or whose storage another
    input has laid out anew: where that input requires grad, autograd gives it up. (When autograd follows the program, the traced tensor says
    so itself; inputs in one storage have one version counter in eager, and their own here.) Also where `t` was made without grad as a view of
    another tensor in that storage, which autograd follows since a write: eager's result has that one as its base.
    """
    bases = [base for f in inputs.fakes if isinstance(f, torch.Tensor) for base in (f, f._base)]
    if t.requires_grad and t._is_view() and made_without_grad(t) and not any(t._base is base for base in bases):
        raise UnsupportedError(
            f"an output is a view of a tensor that shares memory with input {source}, is followed since a write, and was viewed without grad"
        )
    if inputs.training or not inputs.given[source].requires_grad or not t._is_view():
        return
    own, near = set(value.region.inputs), inputs.sharing(source)
    if value.bumps < value.region.bumps and any(inputs.version_moved(j) for j in near):
        raise UnsupportedError(f"an output is a view of input {source}, was made without grad, and is written")
    if moved := sorted(j for j in near - own if inputs.version_moved(j)):
        raise UnsupportedError(
            f"an output is a view of input {source}, was made without grad, and input {moved[0]} changes in its storage"
        )


def check_siblings(inputs: Inputs, i: int) -> None:
    """Raises `UnsupportedError` where input `i`, which requires grad by a write, is a view, and an input that is not merged with it is its base or
    another view of that: autograd makes that one require grad too, though it may share no element with what is written.
    """
    base = inputs.given[i]._base if isinstance(inputs.given[i], torch.Tensor) else None
    if base is None:
        return
    for j, t in enumerate(inputs.given):
        if j == i or not isinstance(t, torch.Tensor) or inputs.same_as[j] is not None or inputs.same_as[i] is not None:
            continue
        apart = not any({i, j} <= set(group) for group in inputs.merged)
        if apart and not inputs.requires_grad[j] and (t is base or t._base is base):
            raise UnsupportedError(
                f"input {i}, a view, requires grad by a write, and so does input {j}, which shares no element with it"
            )
