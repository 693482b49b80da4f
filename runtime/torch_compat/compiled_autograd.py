"""Private names of compiled autograd: how torch's C++ engine lets a backward be captured, and what Dynamo is told of it.

Imported by `capture` only: it loads Dynamo.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# How the engine is told who captures, and how its captured graphs are forgotten.
from torch._C._dynamo import compiled_autograd as engine  # type: ignore[attr-defined]

# What Dynamo knows about captured backwards. The engine names each function of autograd once in a process, so torch's own capture and ours share
# the table `ops`; a flag tells Dynamo that a captured graph runs. Nothing else of this module is used.
from torch._dynamo import compiled_autograd as known_to_dynamo

# Dynamo takes a size of this tensor for one that may change, unless it turns out constant.
from torch._dynamo import maybe_mark_dynamic as may_change

# It stands in captured graphs, and Dynamo follows it: the backward of an autograd function with the tensors that it saved.
from torch._dynamo.external_utils import call_backward

# Where a number comes from.
from torch._dynamo.source import GetItemSource, LocalSource

# The number that logs give a captured graph and what is compiled of it.
from torch._guards import CompileContext, CompileId, compile_context

# The function through which Python calls the engine.
from torch.autograd.graph import _engine_run_backward

# What Dynamo keeps for hooks that a compiled forward registers.
from torch.fx.experimental._backward_state import BackwardState

# Sizes as symbols.
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

__all__ = [
    "UNNAMED",
    "BackwardState",
    "ShapeEnv",
    "backward_function",
    "call_backward",
    "compile_context",
    "cpp_tensor_hooks",
    "dynamo_runs_captured",
    "engine",
    "engine_as_seen",
    "forced_eager",
    "may_change",
    "name_backward_function",
    "numbered",
    "running_backward",
    "symbol_for",
    "zeros_of_result",
]  # fmt: skip

cpp_tensor_hooks: Callable[..., Any] = engine.call_cpp_tensor_pre_hooks


def name_backward_function(name: str, function: Callable[..., Any], custom: bool, traceable: bool) -> str:
    """Keep a function of autograd under a name, as the engine asks once in a process. `custom`: a C++ autograd function of the program. Gives the
    name that the engine will call it by.
    """
    return str(known_to_dynamo.ops.add(name, function, custom, traceable))


def backward_function(name: str) -> Callable[..., Any]:
    """The function that was kept under a name."""
    found: Callable[..., Any] = known_to_dynamo.ops.get(name)
    return found


def zeros_of_result(ctx: Any, k: int) -> torch.Tensor:
    """Zeros as a gradient of the result `k` of an autograd function in Python, of which `ctx` is the context."""
    result = ctx._input_metadata[k]
    return torch.zeros(tuple(result.shape), dtype=result.dtype, device=result.device)


UNNAMED = "[Compiled Autograd Tracing:]"
"""How an error about a gradient that does not fit begins, in the place of the function's name."""


def numbered(number: int) -> Any:
    """The context of a captured backward in logs: `!3` for its `number` 3."""
    return CompileContext(CompileId(compiled_autograd_id=number, frame_id=None, frame_compile_id=None))


def running_backward() -> tuple[Sequence[Any], Sequence[Any]] | None:
    """The tensors that the program's innermost running backward starts from, and those whose gradients it asked for (none: all leaves). None for
    a backward that C++ began.
    """
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    outputs, args = frame.f_locals["t_outputs"], frame.f_locals["args"]
    return outputs, args[3] or ()


@contextmanager
def engine_as_seen(stand_in: Callable[[Any], Any]) -> Iterator[Any]:
    """The program sees what `stand_in` makes of the engine, where it asks for it: `torch.autograd.Variable._execution_engine`."""
    variable: Any = torch.autograd.Variable
    before = variable._execution_engine
    variable._execution_engine = stand_in(before)
    try:
        yield variable._execution_engine
    finally:
        variable._execution_engine = before


def forced_eager() -> bool:
    """Whether `torch.compiler.set_stance("force_eager")` is on."""
    return torch._dynamo.eval_frame._stance.stance == "force_eager"


def symbol_for(env: ShapeEnv, value: Any, name: str, k: int) -> Any:
    """A number of a call as a symbol: the one at position `k` of a list that is called `name`."""
    source = GetItemSource(LocalSource(name), k)
    if isinstance(value, int):
        return env.create_unspecified_symint_and_symbol(value, source, DimDynamic.DYNAMIC)
    symbol = env.create_unspecified_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=value, source=source)


@contextmanager
def dynamo_runs_captured() -> Iterator[None]:
    """What Dynamo compiles is a captured backward."""
    before = known_to_dynamo.in_compiled_autograd_region
    known_to_dynamo.in_compiled_autograd_region = True
    try:
        yield
    finally:
        known_to_dynamo.in_compiled_autograd_region = before
