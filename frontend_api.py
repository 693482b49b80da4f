"""What users call. Everything here is re-exported by `opforge`."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .report.explanation import Explanation, explained, until_then
from .runtime import checked_inputs as _checked
from .runtime import compile_fx as _engine
from .runtime.compile_fx import Artifacts
from .runtime.config import from_options as _from_options
from .runtime.inductor_options import warn_once
from .runtime.observe import counters
from .runtime.torch_compat import compiles_allowed, minifier_after

_explanations = itertools.count(1)


def compile_fx(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile an FX graph of torch operations for the given example inputs. See `opforge.runtime.compile_fx.compile_fx`.

    The result checks what `torch.compile` has guards for: it raises `InputError` where an input has another number of dimensions, size, stride,
    dtype or device than its example (sizes of an example that are symbols may be any), or where a number is another one, and
    where sizes that are symbols contradict each other or what tracing has asked of them.
    """
    checked = _checked.only_for(example_inputs)
    return checked(_engine.compile_fx(gm, example_inputs, options=options, mode=mode))


def backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """The entry point of `torch.compile(…, backend="opforge", options={…})`. Raises `ConfigError` for unknown options and modes."""
    if minifier_after() == "aot":
        text = "opforge: TORCHDYNAMO_REPRO_AFTER=aot is for Inductor alone; TORCHDYNAMO_REPRO_AFTER=dynamo and opforge minify work with opforge"
        warn_once("minifier", text)
    run = _engine.compile_fx(gm, example_inputs, options=options, mode=mode, name=name)
    _answer_minifiers(run, gm)
    return run


def _answer_minifiers(run: Callable[..., Any], gm: torch.fx.GraphModule) -> None:
    """Torch's minifiers ask what a backend returns for the parameters and buffers of the graph, as of a module. It does not keep the graph."""
    graph = weakref.ref(gm)

    def of(name: str) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            alive = graph()
            return iter(()) if alive is None else getattr(alive, name)(*args, **kwargs)

        return answer

    for name in ("named_parameters", "named_buffers", "zero_grad"):
        with contextlib.suppress(AttributeError):  # a method takes no attributes
            setattr(run, name, of(name))


def stats() -> dict[str, Any]:
    """Counts since the process started or `reset_stats()`: graphs, kernels, externs (op → calls in the graphs), fallbacks (reason → count), reasons
    (why operators run by eager kernels → calls), recordings (CUDA graphs), unrecorded (calls without the CUDA graph that was asked for: reason →
    count), retries (configurations of kernels that failed: reason → count), tuned (what `max_autotune` did → kernels), dropped (configurations
    that it could not measure: reason → count), seconds by stage, arena_bytes (largest), cache_hits."""
    return counters.snapshot()


def reset_stats() -> None:
    """Start counting anew."""
    counters.reset()
    _engine.HISTORY.clear()


def last_artifacts(n: int = 1) -> Artifacts:
    """Texts and counts of the n-th last compiled graph. Raises `LookupError` if nothing was compiled."""
    if len(_engine.HISTORY) < n:
        raise LookupError(
            f"last_artifacts({n}), but graphs compiled since reset_stats() or the start: {len(_engine.HISTORY)}"
        )
    return _engine.HISTORY[-n]


def explain(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Explanation]:
    """`explain(model)(*args)` compiles and runs once, and returns what was made: `.graphs` (of each its loop IR, kernels and wrapper, and its
    backward), `.fallbacks` (what ran eagerly, and why) and `.result`. `print` shows a summary with times, for which each compiled graph is called
    again on copies of its arguments; `.details()` are the texts, `.html("explain.html")` writes a page.

    fn       a function or module; no call of one (`explain(model)(x)`, not `explain(model(x))`).
    args     none: they belong to what is returned.
    options  settings of this compile, by their names in Python (`debug_verify=True`).
    Raises TypeError where `fn` cannot be called, or `args` or `options=` are given, `ConfigError` for a wrong option. What `fn` raises has a note
    that says what was compiled until then.
    """
    if not callable(fn):
        raise TypeError(
            f"explain takes a function or module, and what it returns takes the arguments: explain(model)(x); got a {type(fn).__name__}"
        )
    if args:
        raise TypeError("what explain returns takes the arguments: explain(model)(x), not explain(model, x)")
    if isinstance(options.get("options"), Mapping):
        raise TypeError(
            "explain takes settings as keyword arguments: explain(model, debug_verify=True), without options="
        )
    _from_options(options)  # now, not inside of Dynamo

    def run(*args: Any, **kwargs: Any) -> Explanation:
        # A backend of its own: what Dynamo has compiled of `fn` before, under any backend, is not used.
        def fresh(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return _engine.compile_fx(gm, inputs, options={"lazy_backward": False, **options})

        said = None
        # Dynamo keeps what earlier explanations had it compile of the same functions, and counts that against its limit.
        allowed = compiles_allowed(next(_explanations))
        try:
            with allowed, explained(getattr(fn, "__name__", type(fn).__name__)) as said:
                said.result = torch.compile(fn, backend=fresh)(*args, **kwargs)
        except Exception as error:
            if said is not None:
                error.add_note(until_then(said))
            raise
        return said

    return run


def load_cache_artifacts(data: bytes) -> Any:
    """`torch.compiler.load_cache_artifacts`, which knows opforge's entries once opforge has compiled something, in a process in which it has not yet:
    what `torch.compiler.save_cache_artifacts()` gave elsewhere is put into opforge's cache (and those of others). A broken entry gives an
    `OpforgeWarning` with the reason.
    """
    return torch.compiler.load_cache_artifacts(data)


def load_specs(path: str | Path) -> list[str]:
    """Add the operators of a user's spec file to the running process; returns the overloads that it made native.

    Raises `SpecError` with every mistake of the file and its place, TypeError for what is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"load_specs takes the path of one file, found {path!r}; call it for each file")
    from .generator.user import load_user_specs

    return load_user_specs(Path(path))
