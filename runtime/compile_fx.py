"""The whole way from a Dynamo graph to something that runs it."""

from __future__ import annotations

import ctypes
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import BuildError, IRError, OpforgeWarning, PlanError, UnsupportedError
from . import config
from .build.cache import Cache, key
from .build.compiler import compile_cpp, compiler_id
from .codegen.unit import PRELUDE, render_unit
from .codegen.wrapper import render_wrapper
from .dispatch.needs_grad import wants_grad
from .dispatch.trace import Traced, trace
from .dispatch.wrapper import bind
from .execute.load import load_library, load_wrapper
from .lower.graph import Lowered, lower
from .observe import counters
from .schedule.schedule import schedule

Compiled = Callable[..., Any]


@dataclass
class Artifacts:
    """What was made for one graph, for readers: texts of every stage and counts."""

    cpp: str = ""
    wrapper: str = ""
    epilogue: str = ""
    kernels: int = 0
    externs: dict[str, int] = field(default_factory=dict)
    arena_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    cached: bool = False
    program: Any = None
    plan: Any = None


HISTORY: list[Artifacts] = []


def compile_fx(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Compiled:
    """Compile a graph for the inputs' shapes, dtypes and devices; what cannot be compiled runs by the eager kernels.

    gm              a graph of torch operations (from Dynamo, export or `torch.fx`).
    example_inputs  real or fake tensors and sizes, one for each placeholder.
    options         settings of this compile (`specs/config.yaml` lists them), for example `{"strict": True}`.
    Raises `ConfigError` for a wrong option, and with `strict=True` `BuildError`/`UnsupportedError` instead of running eagerly.
    """
    cfg = config.from_options(dict(options) if options else None, mode)
    if wants_grad(gm, example_inputs):
        counters.count_fallback("the graph needs gradients (training is not compiled yet)")
        return gm.forward
    try:
        return _compile(gm, example_inputs, cfg)
    except (UnsupportedError, BuildError) as error:
        if cfg.strict:
            raise
        counters.count_fallback(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        if isinstance(error, BuildError):
            _warn_once(str(error).splitlines()[0])
        return gm.forward
    except (IRError, PlanError):
        raise  # a defect of opforge: never hidden


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"opforge: {text}; the graph runs eagerly (strict=True raises instead)", OpforgeWarning, stacklevel=4)


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str):  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def _compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], cfg: Any) -> Compiled:
    clock = Clock()
    with config.patch(**{f: getattr(cfg, f) for f in ()}):
        with clock.stage("trace"):
            traced = trace(gm, example_inputs)
        call, artifacts = compile_traced(traced, cfg, clock)
        run = bind(traced, call)
    artifacts.seconds = clock.seconds
    counters.count_graph(artifacts.kernels, artifacts.externs, artifacts.seconds, artifacts.arena_bytes, artifacts.cached)
    HISTORY.append(artifacts)
    del HISTORY[:-64]
    return run


def compile_traced(traced: Traced, cfg: Any, clock: Clock) -> tuple[Compiled, Artifacts]:
    """Compile the functional graph. The result is called with the flat list of the graph's own placeholders."""
    with clock.stage("lower"):
        lowered = lower(traced.graph)
    target = cpu_target(cfg)
    with clock.stage("cache"):
        digest = key(cache_parts(lowered, cfg, target))
        cache = Cache.current(cfg) if cfg.cache else None
        entry = cache.get(digest) if cache is not None else None
    if entry is None:
        entry_files, meta, artifacts = build(lowered, cfg, target, clock)
        if cache is not None:
            with clock.stage("cache"):
                cache.put(digest, entry_files, meta)
        folder = Path(entry_files["kernels.so"]).parent if "kernels.so" in entry_files else None
        wrapper_source = artifacts.wrapper
        library = entry_files.get("kernels.so")
        del folder
    else:
        meta = entry.meta
        artifacts = Artifacts(
            (entry.path / "kernels.cpp").read_text(),
            (entry.path / "wrapper.py").read_text(),
            "",
            meta["kernels"],
            meta["externs"],
            meta["arena_bytes"],
            cached=True,
        )
        wrapper_source = entry.path / "wrapper.py"
        library = entry.path / "kernels.so" if (entry.path / "kernels.so").exists() else None
    artifacts.program = lowered.program
    with clock.stage("load"):
        module = load_wrapper(wrapper_source, f"opforge_{digest[:16]}")
        if library is not None:
            lib = load_library(library)
            for name, (symbol, arguments) in meta["symbols"].items():
                function = lib[symbol]
                function.argtypes = [ctypes.c_void_p] * arguments[0] + [ctypes.c_int64] * arguments[1]
                function.restype = None
                setattr(module, name, function)
    call = module.call
    if lowered.constants:
        constants = tuple(lowered.constants)

        def with_constants(args: Any) -> Any:
            return call([*args, *constants])

        return with_constants, artifacts
    return call, artifacts


def build(lowered: Lowered, cfg: Any, target: Any, clock: Clock) -> tuple[dict[str, Any], dict[str, Any], Artifacts]:
    """Schedule, generate and compile; returns the cache entry's files and metadata."""
    from ..generated.scalars import SCALARS

    if cfg.debug_verify:
        from .ir.verify import verify

        with clock.stage("verify"):
            verify(lowered.program)
    with clock.stage("schedule"):
        plan = schedule(lowered.program, costs=lambda op: SCALARS[op].cost if op in SCALARS else 1, fusion=cfg.fusion, out_variants=lowered.out_variant)
    if cfg.debug_verify:
        from .schedule.check import check

        with clock.stage("verify"):
            check(lowered.program, plan)
    with clock.stage("codegen"):
        unit = render_unit(plan, lanes=target.lanes, threads=torch.get_num_threads(), threshold=cfg.parallel_threshold)
        wrapper = render_wrapper(plan, lowered.parameters, lowered.out_targets)
    files: dict[str, Any] = {"wrapper.py": wrapper.encode(), "kernels.cpp": unit.source.encode()}
    if unit.symbols:
        with clock.stage("build"):
            source = unit.source.replace('#include "prelude.h"\n', PRELUDE.read_text(), 1)
            files["kernels.so"] = compile_cpp(source, name="kernels", cfg=cfg)
    externs = {}
    for step in plan.steps:
        call = getattr(step, "call", None)
        if call is not None:
            externs[call.target] = externs.get(call.target, 0) + 1
    symbols = {}
    for kernel in plan.kernels():
        symbols[kernel.name] = (unit.symbols[kernel.name], (unit.arity[kernel.name], len(kernel.symbols)))
    meta = {"kernels": len(symbols), "externs": externs, "arena_bytes": plan.arena_bytes, "symbols": symbols}
    artifacts = Artifacts(unit.source, wrapper, "", len(symbols), externs, plan.arena_bytes, program=lowered.program, plan=plan)
    return files, json.loads(json.dumps(meta)), artifacts


def cpu_target(cfg: Any) -> Any:
    from ..generated.targets import CPU_TARGETS

    name = cfg.target
    if name == "auto":
        name = {"AVX2": "avx2", "AVX512": "avx512"}.get(torch.backends.cpu.get_cpu_capability(), "scalar")
    return CPU_TARGETS[name]


def cache_parts(lowered: Lowered, cfg: Any, target: Any) -> dict[str, str]:
    from ..generated.scalars import DIGEST
    from .ir.text import dump

    return {
        "program": dump(lowered.program) + repr(lowered.parameters),
        "config": config.key(cfg),
        "specs": DIGEST,
        "prelude": PRELUDE.read_text(),
        "torch": torch.__version__,
        "compiler": compiler_id(cfg),
        "target": str(target.name),
        "threads": str(torch.get_num_threads()),
    }
