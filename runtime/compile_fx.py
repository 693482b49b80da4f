"""The whole way from a Dynamo graph to something that runs it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..errors import BuildError, CacheError, ConfigError, OpforgeWarning, UnsupportedError
from ..generated.ops import OUT
from ..generated.rewrites import RULES
from ..generated.targets import CPU_TARGETS, CpuTarget
from . import config
from .build.cache import Cache, key
from .build.compiler import compile_cpp, compiler_id
from .build.scratch import warn_once
from .build.toolchain import host_target, runs_here
from .codegen.unit import PRELUDE, render_unit
from .codegen.wrapper import render_wrapper
from .config import Config
from .dispatch.needs_grad import wants_grad
from .dispatch.trace import Traced, trace
from .dispatch.wrapper import bind, emit_wrapper
from .execute.autograd_function import Backward, bind_halves, emit_function
from .execute.load import load_library, load_wrapper
from .graph.rewrite import rewrite
from .ir.index import Expr, Sym
from .ir.text import dump
from .ir.verify import verify
from .lower.graph import Lowered, lower
from .observe import counters
from .observe.watch import Watch
from .schedule.check import check
from .schedule.kernels import kernel_checks
from .schedule.outputs import separate_outputs
from .schedule.plan import ExternStep, Kernel, Plan
from .schedule.planned import cost, has_out, plan_of
from .schedule.schedule import schedule
from .schedule.text import plan_text

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
    function: str = ""
    backward: Artifacts | None = None


HISTORY: list[Artifacts] = []


def compile_fx(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile a graph for the inputs' shapes, dtypes and devices; what cannot be compiled runs by the eager kernels.

    gm              a graph of torch operations (from Dynamo, export or `torch.fx`).
    example_inputs  real or fake tensors and sizes, one for each placeholder.
    options         settings of this compile (`specs/config.yaml` lists them), for example `{"strict": True}`.
    Raises `ConfigError` for a wrong option, and with `strict=True` `BuildError`/`UnsupportedError` instead of running eagerly.
    """
    cfg = config.from_options(dict(options) if options else None, mode)
    _check_inputs(gm, example_inputs)
    return _or_eager(lambda: _compile(gm, example_inputs, cfg), lambda: eager_program(gm), cfg)


def _or_eager(compiled: Callable[[], Compiled], eager: Callable[[], Compiled], cfg: Config) -> Compiled:
    """What `compiled` makes, or `eager` where it cannot be made, counted and said."""
    try:
        return compiled()
    except (UnsupportedError, BuildError) as error:
        if cfg.strict:
            raise
        counters.count_fallback(f"{type(error).__name__}: {_first_line(error)}")
        if isinstance(error, BuildError):
            _warn_once(_first_line(error))
        return eager()
    except ConfigError:
        raise
    except Exception as error:
        # A mistake of opforge's own: the program still runs, and says so; with checks on, or strict, it is raised.
        if cfg.strict or cfg.debug_verify:
            raise
        reason = f"internal error, please report it: {type(error).__name__}: {_first_line(error)}"
        counters.count_fallback(reason)
        _warn_once(reason)
        return eager()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _check_inputs(gm: Any, example_inputs: Sequence[Any]) -> None:
    """Raises TypeError where a flat graph is given another number of inputs than it has placeholders."""
    if not isinstance(gm, torch.fx.GraphModule) or hasattr(gm.graph._codegen, "pytree_info"):
        return
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    if len(names) != len(example_inputs):
        raise TypeError(f"the graph takes {len(names)} inputs ({', '.join(names)}), {len(example_inputs)} were given")


def eager_program(gm: Any) -> Compiled:
    """The program by eager kernels. FX prints a power of a negative number as the negative of a power: such a graph is interpreted."""
    nodes = gm.graph.nodes if isinstance(gm, torch.fx.GraphModule) else ()
    misprinted = any(
        n.target is operator.pow and isinstance(n.args[0], (int, float)) and n.args[0] < 0 for n in nodes if n.args
    )
    if misprinted:
        interpreter = torch.fx.Interpreter(gm)
        return lambda *args: interpreter.run(*args)
    return gm.forward  # type: ignore[no-any-return]


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(
            f"opforge: {text}; the graph runs eagerly (strict=True raises instead)", OpforgeWarning, stacklevel=4
        )


def _compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], cfg: Config) -> Compiled:
    watch = Watch(cfg.progress, cfg.dump_dir)
    try:
        watch.text("dynamo_graph.py", lambda: str(getattr(gm, "code", gm)))
        with watch.stage("trace"):
            traced = trace(gm, example_inputs, training=wants_grad(gm, example_inputs), random=cfg.random)
        watch.text("functional_graph.py", lambda: str(traced.graph.code))
        call, artifacts = compile_traced(traced, cfg, watch)
        inside = written_inside(traced).values()
        run = bind(traced, call, in_graph=inside)
        watch.text("dispatch.py", lambda: emit_wrapper(traced, "compiled", in_graph=inside))
    finally:
        watch.close()
    artifacts.seconds = watch.seconds
    halves = [artifacts, *([artifacts.backward] if artifacts.backward is not None else [])]
    counters.count_graph(
        sum(h.kernels for h in halves),
        sum((Counter(h.externs) for h in halves), Counter()),
        artifacts.seconds,
        max(h.arena_bytes for h in halves),
        all(h.cached for h in halves),
    )
    HISTORY.append(artifacts)
    del HISTORY[:-64]
    return run


def compile_traced(traced: Traced, cfg: Config, watch: Watch) -> tuple[Compiled, Artifacts]:
    """Compile the functional graph, or the two halves of a joint graph. The result takes the graph's own placeholders (without tangents),
    one argument each, and returns a tuple.
    """
    if cfg.rewrites:
        with watch.stage("rewrite"):
            report = rewrite(traced.graph, RULES)
        watch.text("rewritten_graph.py", lambda: _rewritten(report.applied, traced))
    if traced.gradients is None:
        return compile_graph(traced.graph, cfg, watch, written=written_inside(traced))
    from .training import compiles_later, eager_backward, partial_backward, split  # inference does not need it

    with watch.stage("partition"):
        parts = split(traced, cfg)
    watch.text("forward_graph.py", lambda: str(parts.forward.code))
    watch.text("backward_graph.py", lambda: str(parts.backward.code))
    watch.text("autograd_function.py", lambda: emit_function(parts.halves))
    forward, artifacts = compile_graph(parts.forward, cfg, watch, frugal=True)
    artifacts.function = emit_function(parts.halves)

    def backward(graph: torch.fx.GraphModule, watch: Watch) -> Compiled:
        call, artifacts.backward = compile_graph(graph, cfg, watch, boxed=True, frugal=True)
        return call

    def backward_later(graph: torch.fx.GraphModule) -> Compiled:
        watch = Watch(cfg.progress, cfg.dump_dir)
        try:
            call = _or_eager(lambda: backward(graph, watch), lambda: eager_backward(graph), cfg)
        finally:
            watch.close()
        if (made := artifacts.backward) is not None:
            made.seconds = watch.seconds
            counters.count_graph(made.kernels, made.externs, made.seconds, made.arena_bytes, False, graphs=0)
        return call

    whole = parts.backward
    half = (
        Backward(lambda: backward_later(whole)) if compiles_later(parts, cfg) else Backward(call=backward(whole, watch))
    )
    return bind_halves(parts.halves, forward, half, partial_backward(parts, backward_later)), artifacts


def compile_graph(
    graph: torch.fx.GraphModule,
    cfg: Config,
    watch: Watch,
    *,
    boxed: bool = False,
    frugal: bool = False,
    written: Mapping[int, int] = MappingProxyType({}),
) -> tuple[Compiled, Artifacts]:
    """Compile one functional graph. The result takes the graph's placeholders, one argument each (`boxed`: one list of them, which it
    empties, so that each is freed after its last use), and returns a tuple. `frugal`: as for `schedule`. `written`: positions of placeholders
    → of outputs that it writes into them; None is returned there.
    """
    with watch.stage("lower"):
        lowered = lower(graph, written, checks=cfg.index_checks)
    watch.text("loop_ir.txt", lambda: dump(lowered.program))
    try:
        return _realize(lowered, cfg, watch, boxed, frugal)
    except (OSError, CacheError) as error:
        raise BuildError(f"no folder takes the compiled graph: {error}") from error


def written_inside(traced: Traced) -> dict[int, int]:
    """Inputs of a graph without gradients that the graph itself writes, in place where nobody can tell: positions of placeholders → of the
    outputs with their new contents.
    """
    if traced.gradients is not None:
        return {}
    values = [n.meta.get("val") for n in traced.graph.graph.nodes if n.op == "placeholder"]
    return {p: k for k, p in traced.in_place_candidates if _is_plain(values[p])}


def _is_plain(value: Any) -> bool:
    return value.layout == torch.strided and value.device.type == "cpu" and not value.dtype.is_complex


def _rewritten(applied: Sequence[tuple[str, str]], traced: Traced) -> str:
    return "".join(f"# {rule} at {node}\n" for rule, node in applied) + str(traced.graph.code)


def _realize(lowered: Lowered, cfg: Config, watch: Watch, boxed: bool, frugal: bool) -> tuple[Compiled, Artifacts]:
    """The compiled graph out of the cache, or made and put there."""
    target = cpu_target(cfg)
    with watch.stage("cache"):
        digest = key(cache_parts(lowered, cfg, target) | {"boxed": str(boxed), "frugal": str(frugal)})
        cache = Cache.current(cfg)
        entry = cache.get(digest)
    if entry is None:
        files, built, artifacts = build(lowered, cfg, target, watch, boxed=boxed, frugal=frugal)
        with watch.stage("cache"):
            entry = cache.put(digest, files, built)
    else:
        artifacts = Artifacts(
            cpp=entry.file("kernels.cpp").read_text(),
            wrapper=entry.file("wrapper.py").read_text(),
            kernels=entry.meta["kernels"],
            externs=entry.meta["externs"],
            arena_bytes=entry.meta["arena_bytes"],
            cached=True,
        )
        if watch.dump:
            _dump_code(plan_of(lowered, cfg, frugal=frugal), artifacts.cpp, artifacts.wrapper, watch)
    meta = entry.meta
    artifacts.program = lowered.program
    with watch.stage("load"):
        module = load_wrapper(entry.path / "wrapper.py", name=f"opforge_{digest[:16]}")
        for name, tensor in lowered.constants:
            setattr(module, name, tensor)
        if meta["symbols"]:
            try:
                library = load_library(entry.path / "kernels.so")
            except BuildError as error:
                # A folder mounted noexec, or a library that this one was linked with is gone.
                if not cfg.cache:
                    raise
                warn_once("load", entry.path, f"{error}; it is compiled again, for this process only")
                return _realize(lowered, replace(cfg, cache=False), watch, boxed, frugal)
            for name, (symbol, pointers, sizes, checked) in meta["symbols"].items():
                function = library[symbol]
                function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes
                function.restype = ctypes.c_int if checked else None
                setattr(module, name, function)
    return module.call, artifacts


def _dump_code(plan: Plan, cpp: str, wrapper: str, watch: Watch) -> None:
    watch.text("plan.txt", lambda: plan_text(plan))
    watch.text("kernels.cpp", lambda: cpp)
    watch.text("kernels_triton.py", lambda: "\n\n".join(_triton(k, plan) for k in plan.kernels()))
    watch.text("graph.py", lambda: wrapper)


def _triton(kernel: Kernel, plan: Plan) -> str:
    from .codegen.triton import render_kernel  # only readers of a dump want it here

    try:
        return render_kernel(kernel, plan.layouts)
    except UnsupportedError as error:
        return f"# {kernel.name} cannot be said in Triton: {error}\n"


def build(
    lowered: Lowered, cfg: Config, target: CpuTarget, watch: Watch, *, boxed: bool = False, frugal: bool = False
) -> tuple[dict[str, Any], dict[str, Any], Artifacts]:
    """Schedule, generate and compile; returns the cache entry's files and metadata."""
    program = separate_outputs(lowered.program)
    if cfg.debug_verify:
        with watch.stage("verify"):
            verify(program)
    with watch.stage("schedule"):
        plan = schedule(program, costs=cost, fusion=cfg.fusion, frugal=frugal, out_variants=has_out)
    if cfg.debug_verify:
        with watch.stage("verify"):
            check(program, plan)
    with watch.stage("codegen"):
        unit = render_unit(plan, lanes=target.lanes, threads=torch.get_num_threads(), threshold=cfg.parallel_threshold)
        wrapper = render_wrapper(plan, parameters(lowered), OUT, boxed=boxed)
    if watch.dump:
        _dump_code(plan, unit.source, wrapper, watch)
    files: dict[str, Any] = {"wrapper.py": wrapper.encode(), "kernels.cpp": unit.source.encode()}
    if unit.symbols:
        count = len(set(unit.symbols.values()))
        watch.progress.kernels(0, count)
        with watch.stage("build"):
            source = unit.source.replace('#include "prelude.h"\n', PRELUDE.read_text(), 1)
            files["kernels.so"] = compile_cpp(source, name="kernels", cfg=cfg)
        watch.progress.kernels(count, count)
    externs: dict[str, int] = {}
    for step in plan.steps:
        if isinstance(step, ExternStep):
            externs[step.call.target] = externs.get(step.call.target, 0) + 1
    symbols = {
        k.name: [unit.symbols[k.name], unit.arity[k.name], len(k.symbols), bool(kernel_checks(k))]
        for k in plan.kernels()
    }
    meta = {"kernels": len(symbols), "externs": externs, "arena_bytes": plan.arena_bytes, "symbols": symbols}
    return files, meta, Artifacts(unit.source, wrapper, "", len(symbols), externs, plan.arena_bytes, plan=plan)


def parameters(lowered: Lowered) -> list[str]:
    """Names of the wrapper's arguments: a buffer, a size symbol, or a name nobody reads."""
    names: list[str] = []
    for k, p in enumerate(lowered.placeholders):
        symbol = p.atom if isinstance(p, Expr) else None
        name = p if isinstance(p, str) else symbol.name if isinstance(symbol, Sym) else ""
        # Two placeholders are one symbol where Dynamo passes a size that two inputs have in common twice.
        names.append(name if name and name not in names else f"_{k}")
    return names


def cpu_target(cfg: Config) -> CpuTarget:
    """The target that the configuration names, or the one of this machine. Raises `ConfigError` when this machine cannot run it."""
    if cfg.target != "auto" and not runs_here(cfg.target):
        raise ConfigError(
            f"the setting target is {cfg.target!r}, but this machine ({host_target()}) cannot run such code; "
            f"use 'auto', {host_target()!r} or 'scalar'"
        )
    return CPU_TARGETS[host_target() if cfg.target == "auto" else cfg.target]


@functools.cache
def code_digest() -> str:
    """Digest of opforge's own code and tables that shape what is generated: a changed compiler never meets old artifacts."""
    root = Path(__file__).resolve().parent
    parts = sorted(p for folder in ("ir", "schedule", "codegen", "execute") for p in (root / folder).glob("*.py"))
    parts += [*sorted((root.parent / "generated").glob("*.py")), PRELUDE]
    digest = hashlib.sha256()
    for p in parts:
        digest.update(p.name.encode() + p.read_bytes())
    return digest.hexdigest()


def cache_parts(lowered: Lowered, cfg: Config, target: CpuTarget) -> dict[str, str]:
    return {
        "program": dump(lowered.program) + repr(parameters(lowered)),
        "config": config.key(cfg),
        "opforge": code_digest(),
        "torch": torch.__version__,
        "compiler": compiler_id(cfg),
        "target": target.name,
        "threads": str(torch.get_num_threads()),
    }
