"""Private names of tracing: Dynamo's state, fake tensors, modes and graph modules."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# A context in which operators reach no dispatch mode: quicker than to take the modes away.
from torch._C import _DisableTorchDispatch as disable_torch_dispatch  # type: ignore[attr-defined]

# The dispatcher in which C++ kernels that read sizes as plain integers are replaced by Python ones.
from torch._dispatch.python import enable_python_dispatcher

# Dynamo's state of the running compile: its fake mode, the symbols that it chose for each input, and its guards.
from torch._guards import TracingContext

# Fake tensors that the traced program runs on.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import disable_fake_tensor_cache as without_fake_cache
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as in_fake_kernel

# A graph module that writes its Python only when it is called or printed.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule

# Graph modules that take and return containers.
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen
from torch.fx.graph import _PyTreeInfo as PyTreeInfo

# The mode whose handler sees the functions that the traced program calls.
from torch.overrides import TorchFunctionMode

# Nested arguments and results as flat lists.
from torch.utils import _pytree as pytree

# The mode whose handler sees every operator that the traced program calls, and the test for subclasses that wrap tensors.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# A context without the dispatch modes that the caller has put in force: while a backward runs, opforge itself compiles.
from torch.utils._python_dispatch import _disable_current_modes as no_modes

__all__ = [
    "RESTART", "FakeTensor", "FakeTensorMode", "LazyGraphModule", "PyTreeCodeGen", "PyTreeInfo", "TorchDispatchMode", "TorchFunctionMode",
    "TracingContext", "compiles_allowed", "default_device", "disable_autocast", "disable_torch_dispatch", "enable_python_dispatcher",
    "frame_source", "given_up", "in_fake_kernel", "is_traceable_wrapper_subclass", "is_wrapper_type", "keep_item", "no_modes", "number_read_from",
    "numbers_of_data_followed", "pytree", "start_anew", "without_fake_cache",
]  # fmt: skip


def given_up(program: Any) -> tuple[int, ...]:
    """Positions of a program's arguments that are lists which Dynamo's caller gives up, as the inputs of a captured backward are."""
    graph = getattr(program, "graph", None)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"] if isinstance(graph, torch.fx.Graph) else []
    return tuple(k for k, n in enumerate(placeholders) if n.meta.get("steal_arg"))


def number_read_from(value: object) -> Any:
    """The symbolic float that is read from a fake tensor by which Dynamo passes a Python number, and of no tensor of the program."""
    found = getattr(value, "item_memo", None)
    if not isinstance(found, torch.SymFloat) or not (symbol := found.node._expr).is_symbol:
        return None
    sources = {type(s).__name__ for s in found.node.shape_env.var_to_sources.get(symbol, ())}
    # What the program itself reads from a tensor comes from that call, or from no place that Dynamo knows.
    return found if sources and "CallMethodItemSource" not in sources else None


#: The name of what `start_anew` raises: its class is loaded with Dynamo only.
RESTART = "TensorifyScalarRestartAnalysis"


def start_anew(names: Iterable[str]) -> None:
    """Have Dynamo trace the frame again, these symbolic floats as constants, by what this raises. Returns where it was told before."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis as Restart
    from torch._dynamo.symbolic_convert import TensorifyState as Told

    if new := [name for name in names if not Told.should_specialize(name)]:
        Told.force_specializations.update(new)
        raise Restart


def default_device() -> AbstractContextManager[Any]:
    """The caller's default device, in force again: Dynamo puts it aside while it compiles, and until 2.12 its graphs do not say it either."""
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr as aside
    from torch.utils._device import DeviceContext

    device = next((mode.device for mode in aside.stack if isinstance(mode, DeviceContext)), None)
    return nullcontext() if device is None else torch.device(device)


def disable_autocast() -> AbstractContextManager[Any]:
    """A context manager without autocast on any device."""
    return torch._C._DisableAutocast()


def is_wrapper_type(cls: type) -> bool:
    """Whether tensors of this type wrap other tensors (a traceable wrapper subclass)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

    return cls is not FakeTensor and is_traceable_wrapper_subclass_type(cls)


def frame_source(placeholder: Any, value: Any) -> Any:
    """Where Dynamo found the tensor `value` in the frame, by the placeholder of its graph; None where it is not for that value. Not run in 2.11."""
    argument = placeholder.meta.get("grapharg")
    held = getattr(argument, "_example", None)  # a tensor is held weakly
    return argument.source if held is not None and callable(held) and held() is value else None


def keep_item(own: object, fake: object) -> None:
    """Let `own`, a fake tensor in the storage of `fake`, know the number that `fake` holds (a float of Dynamo's)."""
    item = getattr(fake, "item_memo", None)
    if item is not None:
        own.item_memo = item  # type: ignore[attr-defined]


def numbers_of_data_followed() -> AbstractContextManager[Any]:
    """Dynamo puts numbers and sizes that data brings into its graphs, instead of ending a graph there."""
    import torch._dynamo

    patched: AbstractContextManager[Any] = torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    )
    return patched


def compiles_allowed(times: int) -> Any:
    """For the length of a block Dynamo compiles each function that many times as often as it is set to, before it leaves the function to eager."""
    import torch._dynamo.config as config

    names = ("recompile_limit", "accumulated_recompile_limit")
    return config.patch(**{name: getattr(config, name) * times for name in names})  # type: ignore[attr-defined]
