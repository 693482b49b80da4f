"""Private names of autograd, of `torch.func`'s transforms and of forward-mode differentiation."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

# Whether a tensor is zeros without memory, as forward-mode gradients may be.
from torch import _is_zerotensor as is_zerotensor

# What a graph calls to switch grad mode.
from torch._C import _set_grad_enabled as switch_grad_mode

# How deep the older `vmap` is nested in this thread: each gives the new number.
from torch._C import _vmapmode_decrement_nesting, _vmapmode_increment_nesting  # type: ignore[attr-defined]

# The innermost transform of `torch.func` that is running, or None.
from torch._C._functorch import peek_interpreter_stack

# What Dynamo asks again before each call of a graph.
from torch._guards import Guard, TracingContext

# The level of forward-mode differentiation that is on, and whether tensors have their tangents.
from torch.autograd import forward_ad

__all__ = [
    "below_autograd", "below_vmap", "in_dual_level", "in_transform", "is_asked_for", "is_captured", "is_zerotensor", "keeps_graph",
    "made_without_grad", "own_grad", "refuses_hooks", "refuses_writes", "running_node", "saved_objects", "saving_is_hooked", "selective_context",
    "sequence_number", "shares_version", "skip_frame", "switch_grad_mode", "tangents_followed", "tangents_may_be", "transforms_preserved",
    "unseen_by_dynamo",
]  # fmt: skip


def saved_objects(ctx: object) -> list[Any]:
    """What an autograd function has saved, versions aside; not for what hooks have packed. Raises where autograd has freed it."""
    return [kept.data for kept in ctx._raw_saved_tensors]  # type: ignore[attr-defined]


def is_captured(ctx: object) -> bool:
    """Whether the context of an autograd function stands for one in a backward that compiled autograd has captured."""
    return type(ctx).__name__ == "FakeBackwardCFunction"


def own_grad(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad` for the compiler itself: compiled autograd, which may be on for the program, does not capture it."""
    engine = torch._C._dynamo.compiled_autograd
    before = engine.set_autograd_compiler(None, False)
    try:
        return torch.autograd.grad(*args, **kwargs)
    finally:
        engine.set_autograd_compiler(*before)


@contextmanager
def unseen_by_dynamo() -> Iterator[None]:
    """Dynamo compiles no frames, whatever function the block was reached from."""
    from torch._dynamo.eval_frame import set_eval_frame

    before = set_eval_frame(None)
    try:
        yield
    finally:
        set_eval_frame(before)


def skip_frame(function: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling the frame of a function that C++ calls; it may still follow the function where another frame calls it."""
    from torch._dynamo.eval_frame import skip_code  # only where Dynamo is loaded

    skip_code(function.__code__)


def refuses_hooks(error: BaseException) -> bool:
    """Whether a transform of `torch.func` refused the hooks for saved tensors that tracing sets; its message asks to open an issue."""
    return isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error)


def is_asked_for(node: Any) -> bool:
    """Whether the backward that runs now hands something to autograd's node, because of `inputs=` or by default. Of a leaf whose gradient is
    returned torch does not say it: there it raises.
    """
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True


def keeps_graph() -> bool:
    """Whether the backward that runs now keeps what was saved, for another one (`retain_graph=True`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined, no-any-return]


def saving_is_hooked() -> bool:
    """Whether what is saved for a backward goes through `saved_tensors_hooks` now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def transforms_preserved() -> Iterator[None]:
    """Leaves the transforms of `torch.func` and the level of forward-mode differentiation that the block entered, and allows hooks for saved
    tensors again, however it ends: a graph enters and leaves them in calls of its own, so an error between them leaves none.
    """
    autograd, functorch = torch._C._autograd, torch._C._functorch
    depth, dual = functorch.get_dynamic_layer_stack_depth(), _has_dual_level()  # type: ignore[attr-defined]
    refused = autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        with forward_ad._set_fwd_grad_enabled(forward_ad._is_fwd_grad_enabled()):
            yield
    finally:
        # Torch's own function that leaves all of them asserts what does not hold in 2.11.
        while functorch.get_dynamic_layer_stack_depth() > depth:  # type: ignore[attr-defined]
            kind = peek_interpreter_stack().key().name.lower()
            getattr(functorch, f"_{'func' if kind == 'functionalize' else kind}_decrement_nesting")()
        if not dual and _has_dual_level():
            torch._C._exit_dual_level(level=0)
        if refused is None:
            autograd._saved_tensors_hooks_enable()
        else:
            autograd._saved_tensors_hooks_disable(refused)


def _has_dual_level() -> bool:
    """Whether a dual level is on, also one that a graph entered, of which Python's count of them knows nothing."""
    try:
        torch._C._exit_dual_level(level=torch._C._enter_dual_level())
    except RuntimeError:  # there can be one
        return True
    return False


def running_node() -> Any:
    """The node whose formula autograd runs in this thread; None outside of a backward."""
    return torch._C._current_autograd_node()


def sequence_number(node: Any = None) -> int:
    """When autograd's node was made: a count of this thread; without one, the number that its next node will have."""
    return torch.autograd._get_sequence_nr() if node is None else node._sequence_nr()  # type: ignore[no-any-return, attr-defined]


def in_transform() -> bool:
    """Whether this thread is in `vmap` or another transform of `torch.func`, or in the older `vmap` of `is_grads_batched=True`."""
    _vmapmode_increment_nesting()
    return bool(_vmapmode_decrement_nesting() > 0 or peek_interpreter_stack() is not None)


def below_vmap(call: Callable[[list[Any], list[bool], int], list[Any]], tensors: list[Any]) -> list[Any]:
    """What `call` makes of the tensors that the innermost `vmap` maps over, told whole: tensors (the mapped dimension first), which of them are
    mapped, the number of rows. Its results, None or with rows first, are mapped again. Outside of that `vmap` for `call`. Raises RuntimeError
    for another transform.
    """
    from torch._C import _functorch as functorch
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    interpreter = peek_interpreter_stack()
    if interpreter is None:
        return _below_older_vmap(call, tensors)
    if interpreter.key() != functorch.TransformType.Vmap:
        raise RuntimeError(f"a compiled backward cannot run inside of torch.func's {interpreter.key().name.lower()}")
    level, size = interpreter.level(), functorch.CVmapInterpreterPtr(interpreter).batchSize()
    mapped = [
        t is not None and functorch.is_batchedtensor(t) and functorch.maybe_get_level(t) == level for t in tensors
    ]
    whole = [functorch._remove_batch_dim(t, level, size, 0) if m else t for t, m in zip(tensors, mapped, strict=True)]
    with temporarily_pop_interpreter_stack():
        out = call(whole, mapped, size)
    return [None if t is None else functorch._add_batch_dim(t, 0, level) for t in out]


def _below_older_vmap(call: Callable[[list[Any], list[bool], int], list[Any]], tensors: list[Any]) -> list[Any]:
    _vmapmode_increment_nesting()
    level = _vmapmode_decrement_nesting()
    # It does not tell which tensors are mapped: others become one row.
    whole = [None if t is None else torch._remove_batch_dim(t, level, 1, 0) for t in tensors]
    size = max(t.shape[0] for t in whole if t is not None)
    mapped = [t is not None and t.shape[0] == size for t in whole]
    _vmapmode_decrement_nesting()
    try:
        out = call([t if m or t is None else t[0] for t, m in zip(whole, mapped, strict=True)], mapped, size)
    finally:
        _vmapmode_increment_nesting()
    return [None if t is None else torch._add_batch_dim(t, 0, level) for t in out]


def in_dual_level() -> bool:
    """Whether tensors may have tangents of forward-mode automatic differentiation. Where Dynamo compiles, it will ask again before each call
    of this graph, and compile anew where the answer is another one.
    """
    if (context := TracingContext.try_get()) is not None:
        from torch._dynamo.guards import GuardBuilder
        from torch._dynamo.source import GlobalStateSource

        context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), GuardBuilder.DUAL_LEVEL))  # type: ignore[arg-type]
    return bool(forward_ad._current_level >= 0)


def tangents_may_be() -> bool:
    """As `in_dual_level`, asked before each call: whether tensors may have tangents here."""
    return forward_ad._current_level >= 0 and forward_ad._is_fwd_grad_enabled()


def tangents_followed(mode: bool) -> AbstractContextManager[Any]:
    """A context in which tensors have the tangents of the level that is on, or (False) in which they are as if they had none."""
    return forward_ad._set_fwd_grad_enabled(mode)


def refuses_writes(view: Any) -> bool:
    """Whether autograd refuses writes to a view, or to views of it, for how it was made (without grad, as one of many)."""
    autograd = torch._C._autograd
    return autograd._get_creation_meta(view) != autograd.CreationMeta.DEFAULT


def made_without_grad(view: Any) -> bool:
    """Whether a view, or one that it is a view of, was made while grad mode was off: its gradient ends when its base is written."""
    autograd = torch._C._autograd
    return autograd._get_creation_meta(view) == autograd.CreationMeta.NO_GRAD_MODE


def shares_version(a: Any, b: Any) -> bool:
    """Whether a write to one of two tensors moves the version counter of both, as it does for views and `detach()` but not for `.data`."""
    if a.is_inference() or b.is_inference():
        return True
    before = a._version
    torch._C._autograd._unsafe_set_version_counter((a,), (before + b._version + 1,))
    shared = a._version == b._version
    torch._C._autograd._unsafe_set_version_counter((a,), (before,))
    return shared


def selective_context(result: Any) -> Any:
    """What a policy of selective checkpointing is asked with, about an operator that gave `result`; torch 2.11 does not tell it."""
    from inspect import signature

    from torch.utils.checkpoint import SelectiveCheckpointContext

    told = "op_output" in signature(SelectiveCheckpointContext).parameters
    return SelectiveCheckpointContext(is_recompute=False, **({"op_output": result} if told else {}))


def below_autograd() -> AbstractContextManager[Any]:
    """A block whose operators are dispatched as autograd would: they reach a mode whole, without gradients."""
    return torch._C._AutoDispatchBelowAutograd()
