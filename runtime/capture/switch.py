"""Compiled autograd on and off."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from ..observe.torch_logs import logger_of
from ..torch_compat.compiled_autograd import engine, forced_eager
from .engine import capturing, state
from .recorder import Recorder

Compile = Callable[[fx.GraphModule], Callable[..., Any]]


@contextmanager
def enable(
    compiler_fn: Compile | None = None, dynamic: bool = True, ignore_active_disable_ctx: bool = True
) -> Iterator[None]:
    """Within the block each backward is captured as one graph and compiled.

    compiler_fn                compiles it; None for `torch.compile(backend="opforge")`. A graph that was captured before stays as it was compiled.
    dynamic                    sizes of tensors are symbols in the captured graph.
    ignore_active_disable_ctx  also within `disable()`.
    Blocks may be nested; the innermost decides. Backwards run in the calling thread. With `torch.compiler.set_stance("force_eager")` nothing is
    captured.
    """
    if not isinstance(dynamic, bool):
        raise TypeError(f"dynamic should be a bool, got {type(dynamic).__name__}")
    if forced_eager() or (state.off and not ignore_active_disable_ctx):
        yield
        return
    engine.set_verbose_logger(logger_of("compiled_autograd_verbose"))  # type: ignore[arg-type]  # whose `debug` it calls
    compile = compiler_fn or functools.partial(torch.compile, backend="opforge")
    with capturing(functools.partial(Recorder, compile), dynamic), torch.autograd.set_multithreading_enabled(False):
        yield


@contextmanager
def disable() -> Iterator[None]:
    """Within the block no backward is captured."""
    state.off += 1
    try:
        with capturing(None):
            yield
    finally:
        state.off -= 1


def reset() -> None:
    """Turn compiled autograd off, as in a new process, and forget all captured graphs. Raises RuntimeError within a captured backward."""
    if state.running:
        raise RuntimeError("compiled autograd cannot be reset while a captured backward runs")
    engine.set_autograd_compiler(None, False)
    engine.set_verbose_logger(None)
    engine.clear_cache()


def in_region() -> bool:
    """Whether a captured backward runs now."""
    return state.running
