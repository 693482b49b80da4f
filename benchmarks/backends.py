"""The compared systems: how each is switched on, and how its kernels and extern calls are counted."""

import importlib
import re
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

Fn = Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """One system. `module` is what it imports at first use (timed apart); `backend` and `mode` are torch.compile's arguments."""

    name: str
    module: str | None
    backend: Any | None
    mode: str | None = None


def pass_through(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Fn:
    """A Dynamo backend that compiles nothing: what remains is Dynamo's own time."""
    return gm.forward


def tuned(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Fn:
    """opforge with each kernel's blocks chosen by measurement."""
    import opforge

    return opforge.backend(gm, example_inputs, options={"max_autotune": True})


BACKENDS = {
    b.name: b
    for b in (
        Backend("eager", None, None),
        Backend("dynamo", None, pass_through),
        Backend("inductor", "torch._inductor.compile_fx", "inductor"),
        Backend("inductor-max", "torch._inductor.compile_fx", "inductor", "max-autotune-no-cudagraphs"),
        Backend("opforge", "opforge", "opforge"),
        Backend("opforge-max", "opforge", tuned),
    )
}


def own_entry(fn: Fn, label: str) -> Fn:
    """`fn` behind a code object of its own: backends compared on one program never share Dynamo's cache entries."""

    def call(*args: Any) -> Any:
        return fn(*args)

    code = call.__code__.replace(co_name=f"call_{label}")
    return types.FunctionType(code, globals(), code.co_name, None, call.__closure__)


def compile_with(name: str, fn: Fn) -> Fn:
    """`fn` under the backend `name` (static shapes); the eager function itself for "eager"."""
    system = BACKENDS[name]
    if system.backend is None:
        return fn
    entry = own_entry(fn, name.replace("-", "_"))
    return torch.compile(entry, backend=system.backend, mode=system.mode, dynamic=False)


def timed_backend(name: str, inside: list[float]) -> Fn | None:
    """The backend as a function that adds the seconds spent in it to `inside[0]`; None for eager."""
    backend = BACKENDS[name].backend
    if backend is None:
        return None
    call = lookup_backend(backend) if isinstance(backend, str) else backend

    def timed(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Fn:
        start = time.perf_counter()
        try:
            return call(gm, example_inputs)
        finally:
            inside[0] += time.perf_counter() - start

    return timed


def load(name: str) -> None:
    """Import what the backend needs. Raises ImportError where it is not installed."""
    module = BACKENDS[name].module
    if module is not None:
        importlib.import_module(module)
    if name.startswith("inductor"):
        from torch._inductor.graph import GraphLowering

        GraphLowering.save_output_code = staticmethod(_count_inductor_kernels)


# Inductor's own counter also counts kernels that it generates on trial; the output code has the ones that run.
_inductor_kernels = [0]
_KERNEL = re.compile(r"^\w+ = async_compile\.\w+\(", re.MULTILINE)


def _count_inductor_kernels(code: str) -> None:
    _inductor_kernels[0] += len(_KERNEL.findall(code))


def field(stats: Any, name: str, default: Any = None) -> Any:
    """A field of `opforge.stats()`, which may be a mapping or an object."""
    return stats.get(name, default) if isinstance(stats, Mapping) else getattr(stats, name, default)


def counts(name: str) -> dict[str, Any]:
    """Kernels, extern calls and fallbacks that the backend has made so far in this process."""
    if name.startswith("inductor"):
        from torch._dynamo.utils import counters

        return {"kernels": _inductor_kernels[0], "externs": counters["inductor"]["extern_calls"]}
    if name.startswith("opforge"):
        stats = importlib.import_module("opforge").stats()
        return {
            "kernels": field(stats, "kernels", 0),
            "externs": sum(dict(field(stats, "externs", {}) or {}).values()),
            "fallbacks": dict(field(stats, "fallbacks", {}) or {}),
            "arena_bytes": field(stats, "arena_bytes", 0),
        }
    return {}
