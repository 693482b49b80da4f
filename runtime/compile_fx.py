"""The whole way from a Dynamo graph to something that runs it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import (
    MetadataError,
    first_line,
)
from ..generated.dispatch_tables import ROLES
from ..generated.ops import TORCH_VERSIONS
from ..generated.rewrites import RULES
from . import config
from .compile_graph import compile_graph
from .config import Config
from .dispatch.autograd.needs_grad import wants_grad
from .dispatch.operators.effects import has_effect
from .dispatch.symbols.numbers import constants_where_needed
from .dispatch.trace import Traced, trace
from .dispatch.wrapper.source import bind, emit_wrapper
from .fallback import eager_program, or_eager, warn_once
from .graph.rewrite import rewrite
from .lower.known import truth
from .observe import counters
from .observe.calls import observer
from .observe.watch import Watch, readable
from .realize import Artifacts, Compiled
from .torch_compat import (
    TracingContext,
    debug_folder,
    in_dual_level,
    tangents_followed,
    tangents_may_be,
    warn_of_unknown_version,
)

if TYPE_CHECKING:
    pass

HISTORY: list[Artifacts] = []

warn_of_unknown_version(TORCH_VERSIONS)


def compile_fx(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    name: str | None = None,
) -> Compiled:
    """Compile a graph for the inputs' shapes, dtypes and devices; what cannot be compiled runs by the eager kernels.

    gm              a graph of torch operations (from Dynamo, export or `torch.fx`).
    example_inputs  real or fake tensors and sizes, one for each placeholder.
    options         settings of this compile (`specs/config.yaml` lists them), for example `{"strict": True}`.
    name            what logs and profiles call it (`torch.compile(name=…)` since torch 2.15).
    Raises `ConfigError` for a wrong option, and with `strict=True` `BuildError`/`UnsupportedError` instead of running eagerly.
    """
    cfg = config.from_options(options, mode)
    if cfg.debug_folders and not cfg.dump_dir:
        cfg = replace(cfg, dump_dir=os.path.join(debug_folder(), "opforge"))
    _check_inputs(gm, example_inputs)
    if name:
        gm.meta["name"] = name
    return or_eager(lambda: _with_constants(gm, example_inputs, cfg), lambda: eager_program(gm), cfg)


def _with_constants(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], cfg: Config) -> Compiled:
    with constants_where_needed(gm) as traced:
        return _compile(gm, example_inputs, cfg, traced)


def _check_inputs(gm: Any, example_inputs: Sequence[Any]) -> None:
    """Raises TypeError where a flat graph is given another number of inputs than it has placeholders."""
    if not isinstance(gm, torch.fx.GraphModule) or hasattr(gm.graph._codegen, "pytree_info"):
        return
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    if len(names) != len(example_inputs):
        raise TypeError(f"the graph takes {len(names)} inputs ({', '.join(names)}), {len(example_inputs)} were given")


def _compile(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], cfg: Config, settle: Callable[[], None]
) -> Compiled:
    if in_dual_level():
        return _under_level(gm, example_inputs, cfg, settle)
    run = _compile_program(gm, example_inputs, cfg, settle, wants_grad(gm, example_inputs))
    # Dynamo guards on the level.
    return run if TracingContext.try_get() is not None else _unless_under_level(run, gm, cfg)


def _unless_under_level(run: Compiled, gm: torch.fx.GraphModule, cfg: Config) -> Compiled:
    """`run`, which nothing guards: other code where the caller has put a level of forward-mode differentiation in force."""
    under: list[Compiled] = []

    def call(*args: Any) -> Any:
        if not tangents_may_be():
            return run(*args)
        if not under:
            made = or_eager(lambda: _under_level(gm, args, cfg, lambda: None), lambda: eager_program(gm), cfg)
            under.append(made)
        return under[0](*args)

    return call


def _under_level(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], cfg: Config, settle: Callable[[], None]
) -> Compiled:
    from .forward_mode import UnderLevel  # ordinary programs do not need it

    return UnderLevel(
        gm,
        example_inputs,
        lambda program, inputs, trains: _compile_program(program, inputs, cfg, settle, trains),
        lambda compiled, eager: or_eager(compiled, eager, cfg),
        lambda: eager_program(gm),
    )


def _compile_followed(program: Callable[..., Any], example_inputs: Sequence[Any], cfg: Config) -> Compiled:
    """Compile a function of tensors that autograd follows once, while a backward runs; what cannot be compiled runs by eager kernels."""
    return or_eager(
        lambda: _compile_program(program, example_inputs, cfg, lambda: None, True, twice=False), lambda: program, cfg
    )


def _compile_program(
    gm: Any,
    example_inputs: Sequence[Any],
    cfg: Config,
    settle: Callable[[], None],
    trains: bool,
    twice: bool = True,
) -> Compiled:
    watch = Watch(cfg.progress, cfg.dump_dir, name=getattr(gm, "meta", {}).get("name", ""))
    try:
        with tangents_followed(False):  # passes run operators on the tensors that were traced, which may have tangents
            watch.graph("dynamo_graph.py", gm, "pre-grad graph")
            if cfg.debug_folders:
                _add_program(watch, gm, example_inputs, cfg)
            with watch.stage("trace"):
                traced = trace(gm, example_inputs, training=trains, random=cfg.random, truth=truth)
                if not twice:
                    traced.twice = None
            settle()
            what = "inference graph" if traced.gradients is None else "joint graph"
            watch.graph("functional_graph.py", traced.graph, what)
            call, artifacts, inside = compile_traced(traced, cfg, watch)
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
    if (seen := observer()) is not None:
        seen.finished(artifacts)
    # Only a graph that looks at what eager kernels return can find it unlike its trace.
    effects = {n.target for n in traced.graph.graph.nodes if has_effect(n.target)} - {ROLES["demand"]}
    checked = artifacts.checks_results and not effects
    return _until_mistraced(run, gm, keeps=traced.boxed) if checked and not cfg.strict else run


def _add_program(watch: Watch, gm: Any, example_inputs: Sequence[Any], cfg: Config) -> None:
    """What `opforge repro` runs, in the folder of the graph. A mistake in it does not end the compilation."""
    from .observe.folder import folder_files  # only where it is wanted

    try:
        watch.dump.add(folder_files(gm, example_inputs, cfg))
    except Exception as error:
        if cfg.strict:
            raise
        watch.dump.add({"graph.json": json.dumps({"unwritten": f"{type(error).__name__}: {first_line(error)}"})})


def _until_mistraced(run: Compiled, gm: Any, keeps: bool) -> Compiled:
    """`run`; the program by eager kernels from the call on in which one of them returned other sizes than its fake kernel had said. By
    then the graph has written none of its inputs (`memory.in_place`), and nothing was run for its effect. `keeps`: `run` empties lists among its
    arguments, and gets copies.
    """
    eager: list[Compiled] = []

    def call(*args: Any) -> Any:
        if not eager:
            try:
                return run(*([*a] if type(a) is list else a for a in args)) if keeps else run(*args)
            except MetadataError as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
                counters.count_fallback(reason)
                warn_once(reason)
                eager.append(eager_program(gm))
        return eager[0](*args)

    return call


def compile_traced(traced: Traced, cfg: Config, watch: Watch) -> tuple[Compiled, Artifacts, Collection[int]]:
    """Compile the functional graph, or the two halves of a joint graph. The result takes the graph's own placeholders (without tangents),
    one argument each, and returns a tuple, with None at the positions that are returned last: those it has written into inputs.
    """
    if cfg.rewrites:
        with watch.stage("rewrite"):
            report = rewrite(traced.graph, RULES)
        watch.text("rewritten_graph.py", lambda: _rewritten(report.applied, traced), "post-grad graph")
    written = written_inside(traced)
    if traced.gradients is not None:
        from .training import compile_training  # inference needs none of it

        return compile_training(traced, cfg, watch, written, partial(_compile_followed, cfg=cfg))
    boxed = traced.boxed  # what the caller gives up is freed early: a captured backward
    call, artifacts = compile_graph(
        traced.graph, cfg, watch, boxed=boxed, minimize_memory=boxed, written=written, fixed=traced.static_arguments
    )
    return call, artifacts, written.values()


def written_inside(traced: Traced) -> dict[int, int]:
    """Inputs that the graph itself may write, in place where nobody can tell: positions of placeholders → of the outputs with their new
    contents.
    """
    values = [n.meta.get("val") for n in traced.graph.graph.nodes if n.op == "placeholder"]
    return {p: k for k, p in traced.in_place_candidates if _is_plain(values[p])}


def _is_plain(value: Any) -> bool:
    return value.layout == torch.strided and value.device.type in ("cpu", "cuda") and not value.dtype.is_complex


def _rewritten(applied: Sequence[tuple[str, str]], traced: Traced) -> str:
    return "".join(f"# {rule} at {node}\n" for rule, node in applied) + readable(traced.graph)
