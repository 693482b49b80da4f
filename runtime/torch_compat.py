"""The only module that imports private torch names: what each is for, and the versions it was tested on (2.11, 2.13)."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# Whether a tensor is zeros without memory, as forward-mode gradients may be. [2.11, 2.13]
from torch import _is_zerotensor as is_zerotensor

# By which kernel the dispatcher runs an operator. [2.11, 2.13]
# How deep the older `vmap` is nested in this thread: each gives the new number. [2.11, 2.13]
from torch._C import DispatchKey, _vmapmode_decrement_nesting, _vmapmode_increment_nesting  # type: ignore[attr-defined]

# How many tensors and Python objects use a storage, which is named by its `_cdata`. [2.11, 2.13]
from torch._C import _storage_Use_Count as storage_uses  # type: ignore[attr-defined]

# Allocation and re-viewing without the dispatcher: a third of the cost of torch.empty_strided / torch.as_strided. [2.11, 2.13]
from torch._C._dynamo.guards import _empty_strided_cpu as empty_strided_cpu  # type: ignore[attr-defined]
from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided_cuda  # type: ignore[attr-defined]
from torch._C._dynamo.guards import _reinterpret_tensor as reinterpret_tensor  # type: ignore[attr-defined]

# The innermost transform of `torch.func` that is running, or None. [2.11, 2.13]
from torch._C._functorch import peek_interpreter_stack

# The dispatcher in which C++ kernels that read sizes as plain integers are replaced by Python ones. [2.11, 2.13]
from torch._dispatch.python import enable_python_dispatcher

# Dynamo's state of the running compile: its fake mode, the symbols that it chose for each input, and its guards. [2.11, 2.13]
from torch._guards import Guard, TracingContext

# The call of an operator that writes to its arguments on copies of them, and which operators it takes. [2.11, 2.13]
from torch._higher_order_ops.auto_functionalize import auto_functionalized, can_auto_functionalize

# Calls with effect tokens, in programs that were exported so. [2.11, 2.13]
from torch._higher_order_ops.effects import with_effects

# What Dynamo makes of `torch.utils.checkpoint.checkpoint`: called with the region's graph and its arguments. [2.11, 2.13]
from torch._higher_order_ops.wrap import tag_activation_checkpoint

# What a call_function node of a graph may name. [2.11, 2.13]
from torch._ops import HigherOrderOperator, OpOverload

# Fake tensors that the traced program runs on, and the shape environment of their sizes. [2.11, 2.13]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import disable_fake_tensor_cache as without_fake_cache
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as in_fake_kernel

# The level of forward-mode differentiation that is on, and whether tensors have their tangents. [2.11, 2.13]
from torch.autograd import forward_ad

# A graph module that writes its Python only when it is called or printed. [2.11, 2.13]
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule

# Raised where Python asks for the value of a number that depends on data. [2.11, 2.13]
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

# Graph modules that take and return containers. [2.11, 2.13]
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen
from torch.fx.graph import _PyTreeInfo as PyTreeInfo

# The mode whose handler sees the functions that the traced program calls. [2.11, 2.13]
from torch.overrides import TorchFunctionMode

# Nested arguments and results as flat lists. [2.11, 2.13]
from torch.utils import _pytree as pytree

# The mode whose handler sees every operator that the traced program calls, and the test for subclasses that wrap tensors. [2.11, 2.13]
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# A context without the dispatch modes that the caller has put in force: while a backward runs, opforge itself compiles. [2.11, 2.13]
from torch.utils._python_dispatch import _disable_current_modes as no_modes

__all__ = [
    "RESTART", "DispatchKey", "FakeTensor", "FakeTensorMode", "GuardOnDataDependentSymNode", "HigherOrderOperator", "LazyGraphModule", "OpOverload",
    "PyTreeCodeGen", "PyTreeInfo", "ShapeEnv", "TorchDispatchMode", "TorchFunctionMode", "TracingContext", "WeakStorage", "abandon_capture",
    "artifact_logger", "auto_functionalized", "below_autograd", "below_vmap", "can_auto_functionalize", "copy_all", "cuda_stream", "current_compile",
    "default_device", "disable_autocast", "drop_library_workspaces", "empty_strided_cpu", "empty_strided_cuda", "enable_python_dispatcher",
    "frame_source", "function_of_numbers", "in_dual_level", "in_fake_kernel", "in_transform", "is_traceable_wrapper_subclass", "is_wrapper_type",
    "is_zerotensor", "keep_item", "kernels_of_zeros", "known", "known_equal", "made_without_grad", "no_modes", "number_read_from", "operator_schemas",
    "python_source", "pytree", "refuses_hooks", "refuses_writes", "registered_effect", "reinterpret_tensor", "runtime_asserts", "same_addresses",
    "saved_objects", "saving_is_hooked", "selective_context", "sequence_number", "shares_version", "size_hint", "start_anew", "storage_at",
    "storage_uses", "structured_entry", "structured_trace", "symbol_hint", "symbol_range", "tag_activation_checkpoint", "tangents_followed",
    "tangents_may_be", "tensor_uses", "transforms_preserved", "user_kernel", "with_effects", "without_fake_cache",
]  # fmt: skip


def operator_schemas(namespaces: tuple[str, ...]) -> list[str]:
    """Schemas of the dispatcher's operators in `namespaces`, one text line each, sorted, without TorchScript's builtins. [2.11, 2.13]"""
    known = set(torch._C._dispatch_get_all_op_names())
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if name in known and schema.name.partition("::")[0] in namespaces:
            found.add(str(schema))
    return sorted(found)


def python_source(expr: object) -> str:
    """A size expression (sympy, with torch's functions) as Python source over its symbols; uses `math` at most. [2.11, 2.13]"""
    from torch.utils._sympy.printers import PythonPrinter

    text: str = PythonPrinter().doprint(expr).replace("torch.sym_float(", "float(")  # the source is of plain numbers
    return text.replace("torch._sym_sqrt(", "math.sqrt(").replace("OpaqueUnaryFn_", "math.")


def function_of_numbers(name: str) -> Any:
    """The function that `math` has as `name`, for symbolic numbers too; None where torch has none. [2.11, 2.13]"""
    return getattr(torch, f"_sym_{name}", None)


def number_read_from(value: object) -> Any:
    """The symbolic float that is read from a fake tensor by which Dynamo passes a Python number, and of no tensor of the program. [2.11, 2.13]"""
    found = getattr(value, "item_memo", None)
    if not isinstance(found, torch.SymFloat) or not (symbol := found.node._expr).is_symbol:
        return None
    sources = {type(s).__name__ for s in found.node.shape_env.var_to_sources.get(symbol, ())}
    # What the program itself reads from a tensor comes from that call, or from no place that Dynamo knows.
    return found if sources and "CallMethodItemSource" not in sources else None


#: The name of what `start_anew` raises: its class is loaded with Dynamo only. [2.11, 2.13]
RESTART = "TensorifyScalarRestartAnalysis"


def start_anew(names: Iterable[str]) -> None:
    """Have Dynamo trace the frame again, these symbolic floats as constants, by what this raises. Returns where it was told before. [2.11, 2.13]"""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis as Restart
    from torch._dynamo.symbolic_convert import TensorifyState as Told

    if new := [name for name in names if not Told.should_specialize(name)]:
        Told.force_specializations.update(new)
        raise Restart


def saved_objects(ctx: object) -> list[Any]:
    """What an autograd function has saved, versions aside; not for what hooks have packed. Raises where autograd has freed it. [2.11, 2.13]"""
    return [kept.data for kept in ctx._raw_saved_tensors]  # type: ignore[attr-defined]


def refuses_hooks(error: BaseException) -> bool:
    """Whether a transform of `torch.func` refused the hooks for saved tensors that tracing sets; its message asks to open an issue. [2.11, 2.13]"""
    return isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error)


def saving_is_hooked() -> bool:
    """Whether what is saved for a backward goes through `saved_tensors_hooks` now. [2.11, 2.13]"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def transforms_preserved() -> Iterator[None]:
    """Leaves the transforms of `torch.func` and the level of forward-mode differentiation that the block entered, and allows hooks for saved
    tensors again, however it ends: a graph enters and leaves them in calls of its own, so an error between them leaves none. [2.11, 2.13]
    """
    autograd, functorch = torch._C._autograd, torch._C._functorch
    depth, dual = functorch.get_dynamic_layer_stack_depth(), _has_dual_level()  # type: ignore[attr-defined]
    refused = autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        with forward_ad._set_fwd_grad_enabled(forward_ad._is_fwd_grad_enabled()):
            yield
    finally:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)  # type: ignore[attr-defined]
        if not dual and _has_dual_level():
            torch._C._exit_dual_level(level=0)
        if refused is None:
            autograd._saved_tensors_hooks_enable()
        else:
            autograd._saved_tensors_hooks_disable(refused)


def _has_dual_level() -> bool:
    """Whether a dual level is on, also one that a graph entered, of which Python's count of them knows nothing. [2.11, 2.13]"""
    try:
        torch._C._exit_dual_level(level=torch._C._enter_dual_level())
    except RuntimeError:  # there can be one
        return True
    return False


def by_operators(op: Any) -> Callable[..., Any]:
    """What a higher-order operator does, as calls of operators: torch's implementation for tensors of any device. [2.11, 2.13]"""
    kernel: Callable[..., Any] = op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    return kernel


def user_kernel(kernel: int, constants: int) -> tuple[Any, dict[str, Any]]:
    """The Triton kernel and the arguments that a graph names by numbers. [2.11, 2.13]"""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.get_kernel(kernel), kernel_side_table.get_constant_args(constants)


def running_node() -> Any:
    """The node whose formula autograd runs in this thread; None outside of a backward. [2.11, 2.13]"""
    return torch._C._current_autograd_node()


def sequence_number(node: Any = None) -> int:
    """When autograd's node was made: a count of this thread; without one, the number that its next node will have. [2.11, 2.13]"""
    return torch.autograd._get_sequence_nr() if node is None else node._sequence_nr()  # type: ignore[no-any-return, attr-defined]


def drop_library_workspaces() -> None:
    """Let go of the memory that torch keeps for cuBLAS, one piece for each handle and stream: the next product gets its own. [2.11, 2.13]"""
    torch._C._cuda_clearCublasWorkspaces()


def abandon_capture(device: int, pool: tuple[int, int]) -> None:
    """After a capture that failed: the allocator ends it for the pool, as at the end of one that did not fail. [2.11, 2.13]"""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)  # type: ignore[attr-defined]
    except RuntimeError:  # torch came as far itself
        return
    torch._C._cuda_releasePool(device, pool)  # type: ignore[attr-defined]


def below_autograd() -> AbstractContextManager[Any]:
    """A block whose operators are dispatched as autograd would: they reach a mode whole, without gradients. [2.11, 2.13]"""
    return torch._C._AutoDispatchBelowAutograd()


def in_transform() -> bool:
    """Whether this thread is in `vmap` or another transform of `torch.func`, or in the older `vmap` of `is_grads_batched=True`. [2.11, 2.13]"""
    _vmapmode_increment_nesting()
    return bool(_vmapmode_decrement_nesting() > 0 or peek_interpreter_stack() is not None)


def below_vmap(call: Callable[[list[Any], list[bool], int], list[Any]], tensors: list[Any]) -> list[Any]:
    """What `call` makes of the tensors that the innermost `vmap` maps over, told whole: tensors (the mapped dimension first), which of them are
    mapped, the number of rows. Its results, None or with rows first, are mapped again. Outside of that `vmap` for `call`. Raises RuntimeError
    for another transform. [2.11, 2.13]
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
    of this graph, and compile anew where the answer is another one. [2.11, 2.13]
    """
    if (context := TracingContext.try_get()) is not None:
        from torch._dynamo.guards import GuardBuilder
        from torch._dynamo.source import GlobalStateSource

        context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), GuardBuilder.DUAL_LEVEL))  # type: ignore[arg-type]
    return bool(forward_ad._current_level >= 0)


def tangents_may_be() -> bool:
    """As `in_dual_level`, asked before each call: whether tensors may have tangents here. [2.11, 2.13]"""
    return forward_ad._current_level >= 0 and forward_ad._is_fwd_grad_enabled()


def tangents_followed(mode: bool) -> AbstractContextManager[Any]:
    """A context in which tensors have the tangents of the level that is on, or (False) in which they are as if they had none. [2.11, 2.13]"""
    return forward_ad._set_fwd_grad_enabled(mode)


def kernels_of_zeros() -> list[OpOverload]:
    """Operators that have kernels of their own for zeros without memory. [2.11, 2.13]"""
    own = torch._C._dispatch_has_kernel_for_dispatch_key
    skips = torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough
    names = (n for n in torch._C._dispatch_get_all_op_names() if own(n, "ZeroTensor") and not skips(n, "ZeroTensor"))
    found = (n.replace("::", ".").split(".") for n in names)
    return [getattr(getattr(getattr(torch.ops, n[0]), n[1]), n[2] if len(n) > 2 else "default") for n in found]


def default_device() -> AbstractContextManager[Any]:
    """The caller's default device, in force again: Dynamo puts it aside while it compiles, and until 2.12 its graphs do not say it either.
    [2.11, 2.13]
    """
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr as aside
    from torch.utils._device import DeviceContext

    device = next((mode.device for mode in aside.stack if isinstance(mode, DeviceContext)), None)
    return nullcontext() if device is None else torch.device(device)


def disable_autocast() -> AbstractContextManager[Any]:
    """A context manager without autocast on any device. [2.11, 2.13]"""
    return torch._C._DisableAutocast()


def registered_effect(op: OpOverload) -> bool:
    """Whether an operator is registered with an ordered effect. [2.11, 2.13]"""
    from torch._library import simple_registry

    effect = getattr(simple_registry.singleton.find(op._name), "effect", None)
    return effect is not None and effect.effect is not None


def is_wrapper_type(cls: type) -> bool:
    """Whether tensors of this type wrap other tensors (a traceable wrapper subclass). [2.11, 2.13]"""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

    return cls is not FakeTensor and is_traceable_wrapper_subclass_type(cls)


def frame_source(placeholder: Any, value: Any) -> Any:
    """Where Dynamo has found the tensor `value` in the frame, as the placeholder of its graph says; None where it is not for that value.
    [2.13; not run in 2.11]
    """
    argument = placeholder.meta.get("grapharg")
    held = getattr(argument, "_example", None)  # a tensor is held weakly
    return argument.source if held is not None and callable(held) and held() is value else None


def refuses_writes(view: Any) -> bool:
    """Whether autograd refuses writes to a view, or to views of it, for how it was made (without grad, as one of many). [2.11, 2.13]"""
    autograd = torch._C._autograd
    return autograd._get_creation_meta(view) != autograd.CreationMeta.DEFAULT


def made_without_grad(view: Any) -> bool:
    """Whether a view, or one that it is a view of, was made while grad mode was off: its gradient ends when its base is written. [2.11, 2.13]"""
    autograd = torch._C._autograd
    return autograd._get_creation_meta(view) == autograd.CreationMeta.NO_GRAD_MODE


def shares_version(a: Any, b: Any) -> bool:
    """Whether a write to one of two tensors moves the version counter of both, as it does for views and `detach()` but not for `.data`.
    [2.11, 2.13]
    """
    if a.is_inference() or b.is_inference():
        return True
    before = a._version
    torch._C._autograd._unsafe_set_version_counter((a,), (before + b._version + 1,))
    shared = a._version == b._version
    torch._C._autograd._unsafe_set_version_counter((a,), (before,))
    return shared


def symbol_hint(size: object, symbol: object) -> int | None:
    """The value that a size symbol had in the example inputs; None for one that came from data. `size` is a SymInt that mentions it. [2.11, 2.13]"""
    env = size.node.shape_env  # type: ignore[attr-defined]
    values = getattr(env, "backed_var_to_val", None)  # `var_to_val` before 2.12
    value = (env.var_to_val if values is None else values).get(symbol)
    return None if value is None else int(value)


def symbol_range(size: object, symbol: object) -> tuple[Any, Any]:
    """The least and the greatest value of a symbol, sympy numbers, as guards and conditions of the program say. [2.11, 2.13]"""
    values = size.node.shape_env.var_to_range[symbol]  # type: ignore[attr-defined]
    return values.lower, values.upper


def runtime_asserts(env: object) -> list[tuple[Any, str]]:
    """Conditions on sizes from data that tracing has relied on, sympy expressions, each with a message; none without a ShapeEnv. [2.11, 2.13]"""
    found: dict[Any, Any] = getattr(env, "deferred_runtime_asserts", {})
    return [(a.expr, str(a.msg)) for asserts in found.values() for a in asserts]


def keep_item(own: object, fake: object) -> None:
    """Let `own`, a fake tensor in the storage of `fake`, know the number that `fake` holds (a float of Dynamo's). [2.11, 2.13]"""
    item = getattr(fake, "item_memo", None)
    if item is not None:
        own.item_memo = item  # type: ignore[attr-defined]


def known(condition: object) -> bool:
    """Whether a condition on sizes (bool or SymBool) is known to hold for all sizes of the graph; adds no guard. [2.11, 2.13]"""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)  # type: ignore[arg-type]


def known_equal(a: object, b: object) -> bool:
    """Whether two sizes (int or SymInt) are equal for all sizes that the graph is made for, as far as is known; adds no guard. [2.11, 2.13]"""
    if type(a) is int and type(b) is int:
        return a == b
    return size_hint(a, -1) == size_hint(b, -1) and known(a == b)


def size_hint(size: object, unknown: int) -> int:
    """The value that a size (int or SymInt) had in the example inputs; `unknown` for one that comes from data. [2.11, 2.13]"""
    node = getattr(size, "node", None)
    if node is None:
        return int(size)  # type: ignore[call-overload,no-any-return]
    return int(node.hint) if node.has_hint() else unknown


def selective_context(result: Any) -> Any:
    """What a policy of selective checkpointing is asked with, about an operator that gave `result`. [2.11, which does not tell it, 2.13]"""
    from inspect import signature

    from torch.utils.checkpoint import SelectiveCheckpointContext

    told = "op_output" in signature(SelectiveCheckpointContext).parameters
    return SelectiveCheckpointContext(is_recompute=False, **({"op_output": result} if told else {}))


def cuda_stream(index: int) -> int:
    """The current CUDA stream of device `index` as the driver's handle, without a Python object for it. [2.11, 2.13]"""
    return torch._C._cuda_getCurrentRawStream(index)  # type: ignore[attr-defined]


def tensor_uses(t: Any) -> int:
    """How many there are that use a tensor, its Python object counted as one: other tensors of its memory do not count. [2.11, 2.13]"""
    return t._use_count()  # type: ignore[no-any-return]


def storage_at(address: int, size: int, device: Any) -> Any:
    """A storage of `size` bytes at an address, which does not own its memory. [2.11, 2.13]"""
    return torch._C._construct_storage_from_data_pointer(address, device, size)


class WeakStorage:
    """A reference to a storage that does not keep its memory. [2.11, 2.13]"""

    __slots__ = ("_free", "key")

    def __init__(self, storage: Any) -> None:
        self._free = type(storage)._free_weak_ref
        self.key: int = storage._weak_ref()  # the storage's `_cdata`

    def get(self) -> Any:
        """The storage; None where nobody uses it any more."""
        return torch.UntypedStorage._new_with_weak_ptr(self.key)  # type: ignore[attr-defined]

    def uses(self) -> int:
        """How many tensors and Python objects use the storage."""
        return storage_uses(self.key)  # type: ignore[no-any-return]

    def __del__(self) -> None:
        self._free(self.key)


@functools.cache
def _numbers(count: int) -> list[int]:
    return list(range(count))


def same_addresses(tensors: list[Any], addresses: list[int]) -> bool:
    """Whether the tensors' elements begin at these addresses; in one call where torch is built for CUDA. [2.11, 2.13]"""
    if (equal := getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)) is not None:
        return bool(equal(tensors, addresses, _numbers(len(addresses))))
    return [t.data_ptr() for t in tensors] == addresses


def copy_all(targets: list[Any], sources: list[Any]) -> None:
    """Copy each source into its target, in few kernels. [2.11, 2.13]"""
    torch._foreach_copy_(targets, sources)


def artifact_logger(module: str, switch: str) -> Any:
    """The logger that the name `switch` in TORCH_LOGS turns on, or None where torch has no such name. [2.11, 2.13]"""
    known = torch._logging._internal.log_registry.artifact_names
    return torch._logging.getArtifactLogger(module, switch) if switch in known else None


def current_compile() -> Any:
    """Dynamo's number of the compile that is running, or None. [2.11, 2.13]"""
    return torch._guards.CompileContext.current_compile_id()


def structured_trace() -> bool:
    """Whether anything takes it: without TORCH_TRACE its handler has no folder, until the first entry of all removes it. [2.11, 2.13]"""
    handlers = torch._logging._internal.trace_log.handlers  # pytest has some of its own there
    return any(getattr(h, "root_dir", h) is not None and "Torch" in type(h.formatter).__name__ for h in handlers)


def structured_entry(entry: str, name: str, text: Callable[[], str], compile_id: Any) -> None:
    """A text in the structured trace: as the entry of that name, or with "" as an artifact. [2.11, 2.13]"""
    about = {"filename": f"{name}.py"} if "code" in entry else {} if entry else {"name": name, "encoding": "string"}
    told: dict[str, Any] = {"payload_fn": text, "expect_trace_id": False, "compile_id": compile_id}
    torch._logging.trace_structured(entry or "artifact", lambda: about, **told)
