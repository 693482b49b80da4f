"""The whole way from a Dynamo graph to something that runs it."""

from __future__ import annotations

import json
import operator
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import (
    BuildError,
    CacheError,
    ConfigError,
    MetadataError,
    OpforgeWarning,
    UnsupportedError,
    first_line,
)
from ..generated.dispatch_tables import ROLES
from ..generated.ops import TORCH_VERSIONS
from ..generated.rewrites import RULES
from . import config
from .config import Config
from .dispatch.autograd.needs_grad import wants_grad
from .dispatch.operators.effects import has_effect
from .dispatch.symbols.numbers import constants_where_needed
from .dispatch.trace import Traced, trace
from .dispatch.wrapper.source import bind, emit_wrapper
from .execute.load import load_wrapper
from .garbage import full_collections_deferred
from .graph.rewrite import rewrite
from .ir.text import dump
from .lower.control import Control
from .lower.graph import lower
from .lower.known import truth
from .observe import counters
from .observe.calls import Half, observer
from .observe.torch_logs import note
from .observe.watch import Watch, readable
from .realize import Artifacts, Compiled, EagerProgram, parameters, realize
from .targets.base import Target
from .targets.cpu import Cpu
from .torch_compat import (
    RESTART,
    TracingContext,
    debug_folder,
    in_dual_level,
    pytree,
    tangents_followed,
    tangents_may_be,
    warn_of_unknown_version,
)

if TYPE_CHECKING:
    from .graphs.recording import Recorder

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
    return _or_eager(lambda: _with_constants(gm, example_inputs, cfg), lambda: eager_program(gm), cfg)


def _with_constants(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], cfg: Config) -> Compiled:
    with constants_where_needed(gm) as traced:
        return _compile(gm, example_inputs, cfg, traced)


def _or_eager(compiled: Callable[[], Compiled], eager: Callable[[], Compiled], cfg: Config) -> Compiled:
    """What `compiled` makes, or `eager` where it cannot be made, counted and said."""
    try:
        with full_collections_deferred():
            return compiled()
    except (UnsupportedError, BuildError) as error:
        if cfg.strict:
            raise
        counters.count_fallback(f"{type(error).__name__}: {first_line(error)}")
        if isinstance(error, BuildError):
            _warn_once(first_line(error), error.short)
        return eager()
    except ConfigError:
        raise
    except Exception as error:
        # A mistake of opforge's own: the program still runs, and says so; with checks on, or strict, it is raised.
        if cfg.strict or cfg.debug_verify or type(error).__name__ == RESTART:
            raise
        reason = f"internal error, please report it: {type(error).__name__}: {first_line(error)}"
        counters.count_fallback(reason)
        _warn_once(reason)
        return eager()


def _check_inputs(gm: Any, example_inputs: Sequence[Any]) -> None:
    """Raises TypeError where a flat graph is given another number of inputs than it has placeholders."""
    if not isinstance(gm, torch.fx.GraphModule) or hasattr(gm.graph._codegen, "pytree_info"):
        return
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    if len(names) != len(example_inputs):
        raise TypeError(f"the graph takes {len(names)} inputs ({', '.join(names)}), {len(example_inputs)} were given")


def eager_program(gm: Any) -> EagerProgram:
    """The program by eager kernels. FX prints a power of a negative number as the negative of a power: such a graph is interpreted."""
    nodes = gm.graph.nodes if isinstance(gm, torch.fx.GraphModule) else ()
    misprinted = any(
        n.target is operator.pow and isinstance(n.args[0], (int, float)) and n.args[0] < 0 for n in nodes if n.args
    )
    if misprinted:
        interpreter = torch.fx.Interpreter(gm)
        return EagerProgram(lambda *args: interpreter.run(*args))
    return EagerProgram(gm.forward)


_warned: set[str] = set()


def _warn_once(text: str, below: Sequence[str] = ()) -> None:
    if text not in _warned:  # by its first line: paths below it differ from graph to graph
        _warned.add(text)
        head = f"opforge: {text}; the graph runs eagerly (strict=True raises instead)"
        warnings.warn("\n  ".join([head, *below]), OpforgeWarning, stacklevel=4)


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
            made = _or_eager(lambda: _under_level(gm, args, cfg, lambda: None), lambda: eager_program(gm), cfg)
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
        lambda compiled, eager: _or_eager(compiled, eager, cfg),
        lambda: eager_program(gm),
    )


def _compile_program(
    gm: Any, example_inputs: Sequence[Any], cfg: Config, settle: Callable[[], None], trains: bool
) -> Compiled:
    watch = Watch(cfg.progress, cfg.dump_dir, name=getattr(gm, "meta", {}).get("name", ""))
    try:
        with tangents_followed(False):  # passes run operators on the tensors that were traced, which may have tangents
            watch.graph("dynamo_graph.py", gm, "pre-grad graph")
            if cfg.debug_folders:
                _add_program(watch, gm, example_inputs, cfg)
            with watch.stage("trace"):
                traced = trace(gm, example_inputs, training=trains, random=cfg.random, truth=truth)
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
    return _until_mistraced(run, gm) if checked and not cfg.strict else run


def _add_program(watch: Watch, gm: Any, example_inputs: Sequence[Any], cfg: Config) -> None:
    """What `opforge repro` runs, in the folder of the graph. A mistake in it does not end the compilation."""
    from .observe.folder import folder_files  # only where it is wanted

    try:
        watch.dump.add(folder_files(gm, example_inputs, cfg))
    except Exception as error:
        if cfg.strict:
            raise
        watch.dump.add({"graph.json": json.dumps({"unwritten": f"{type(error).__name__}: {first_line(error)}"})})


def _until_mistraced(run: Compiled, gm: Any) -> Compiled:
    """`run`; the program by eager kernels from the call on in which one of them returned other sizes than its fake kernel had said. By
    then the graph has written none of its inputs (`memory.in_place`), and nothing was run for its effect.
    """
    eager: list[Compiled] = []

    def call(*args: Any) -> Any:
        if not eager:
            try:
                return run(*args)
            except MetadataError as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
                counters.count_fallback(reason)
                _warn_once(reason)
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
    static, written = traced.static_arguments, written_inside(traced)
    if traced.gradients is None:
        call, artifacts = compile_graph(traced.graph, cfg, watch, written=written, fixed=static)
        return call, artifacts, written.values()
    from .execute.autograd_function import Backward, bind_halves, emit_function  # inference needs none of these
    from .execute.sparse_gradients import sparse_backward
    from .training import (
        compiles_later,
        eager_backward,
        kept_for_backward,
        partial_backward,
        split,
    )

    with watch.stage("partition"):
        parts = split(traced, cfg, written)
    watch.graph("forward_graph.py", parts.forward, "forward graph")
    watch.graph("backward_graph.py", parts.backward, "backward graph")
    watch.text("autograd_function.py", lambda: emit_function(parts.halves))
    needed = {k for where, k in parts.halves.saved if where == "output"}
    forward, artifacts = compile_graph(
        parts.forward, cfg, watch, frugal=True, written=parts.written, fixed=static, needed=needed
    )
    artifacts.function = emit_function(parts.halves)

    def backward(graph: torch.fx.GraphModule, watch: Watch, into: Mapping[int, int] = MappingProxyType({})) -> Compiled:
        within = watch.inside("backward")
        call, artifacts.backward = compile_graph(graph, cfg, within, boxed=True, frugal=True, fixed=kept, written=into)
        return call

    def backward_later(graph: torch.fx.GraphModule, into: Mapping[int, int] = MappingProxyType({})) -> Compiled:
        later = Watch(cfg.progress, cfg.dump_dir, watch.compile_id, watch.name)
        try:
            with tangents_followed(False):
                call = _or_eager(lambda: backward(graph, later, into), lambda: eager_backward(graph, into), cfg)
        finally:
            later.close()
        if (made := artifacts.backward) is not None:
            made.seconds = later.seconds
            counters.count_graph(made.kernels, made.externs, made.seconds, made.arena_bytes, made.cached, graphs=0)
        return call

    kept = kept_for_backward(parts.halves, static)
    whole = parts.backward

    def half_of(into: Mapping[int, int]) -> Backward:
        if compiles_later(parts, cfg):
            return Backward(lambda: backward_later(whole, into))
        return Backward(call=backward(whole, watch, into))

    in_place = half_of(parts.halves.into) if parts.halves.into else None
    half = half_of({})
    partial = partial_backward(parts, half, backward_later)
    sparse = sparse_backward(whole, parts.halves, cfg.strict)
    both = bind_halves(parts.halves, forward, half, partial, sparse, in_place)
    return both, artifacts, parts.written.values()


def compile_graph(
    graph: torch.fx.GraphModule,
    cfg: Config,
    watch: Watch,
    *,
    boxed: bool = False,
    frugal: bool = False,
    written: Mapping[int, int] = MappingProxyType({}),
    fixed: Collection[int] = (),
    needed: Collection[int] = (),
) -> tuple[Compiled, Artifacts]:
    """Compile one functional graph. The result takes the graph's placeholders, one argument each (`boxed`: one list of them, which it
    empties, so that each is freed after its last use), and returns a tuple. `frugal`: as for `schedule`. `written`: positions of placeholders
    → of outputs that it writes into them; None is returned there. `fixed`: positions of placeholders that seldom move in memory;
    `needed`: of outputs that a backward reads.
    """
    target = target_of(graph, cfg)
    with watch.stage("lower"):
        if target.device != "cpu":
            from .graph.scalars import give_numbers

            give_numbers(graph, target.device)
        lowered = lower(graph, written, device=target.device, checks=cfg.index_checks, products=cfg.loop_products)
    watch.text("loop_ir.txt", lambda: dump(lowered.program), "loops")
    try:
        functions, inside, controls = _compile_controls(lowered.controls, cfg, watch)
        functions |= {call.name: call.function for call in lowered.calls}
        call, artifacts = realize(lowered, target, cfg, watch, boxed=boxed, frugal=frugal, functions=functions)
    except (OSError, CacheError) as error:
        raise BuildError(f"no folder takes the compiled graph: {error}") from error
    artifacts.inside, artifacts.controls = inside, controls
    artifacts.kernels += sum(a.kernels for a in inside.values())
    called = Counter([*Counter(artifacts.externs).elements(), *(call.kernel for call in lowered.calls if call.kernel)])
    artifacts.externs = dict(sum((Counter(a.externs) for a in inside.values()), called))
    run = call
    if cfg.cudagraphs and (recorder := target.recorder()) is not None:
        run = _recorded(call, graph, recorder, target.device, {*fixed, *written}, cfg, boxed, needed, watch.title)
    elif cfg.cudagraphs:
        note("cudagraphs", f"{watch.title} is not recorded: it runs on the device {target.device}")
    if (seen := observer()) is not None:
        run = seen.compiled(Half(artifacts, graph, parameters(lowered), call, boxed, run is not call), run)
    return run, artifacts


def _compile_controls(
    controls: Sequence[Control], cfg: Config, watch: Watch
) -> tuple[dict[str, Compiled], dict[str, Artifacts], dict[str, str]]:
    """The functions that a graph calls besides operators, by name, what was made for each graph that they run, and their source."""
    if not controls:
        return {}, {}, {}
    from .host.from_control import control_program, roles
    from .host.python import function_source

    functions: dict[str, Compiled] = {}
    sources: dict[str, str] = {}
    inside: dict[str, Artifacts] = {}
    cfg = replace(cfg, cudagraphs=False)  # what runs when is decided while the graph runs
    for control in controls:
        namespace: dict[str, Any] = {}
        for role, graph in zip(roles(control), control.graphs, strict=True):
            if control.test and role == "test":
                continue
            within = watch.inside(f"{control.name}_{role}")
            if cfg.rewrites:
                with within.stage("rewrite"):
                    rewrite(graph, RULES)
            within.graph("functional_graph.py", graph, "inference graph")
            namespace[role], inside[f"{control.name}_{role}"] = compile_graph(graph, cfg, within)
        source = sources[control.name] = function_source(control_program(control))
        watch.text(f"{control.name}.py", lambda source=source: source)  # type: ignore[misc]
        module = load_wrapper(source, f"opforge_{control.name}", namespace)
        functions[control.name] = getattr(module, control.name)
    return functions, inside, sources


def _recorded(
    call: Compiled,
    graph: torch.fx.GraphModule,
    recorder: Recorder,
    device: str,
    fixed: Collection[int],
    cfg: Config,
    boxed: bool,
    needed: Collection[int],
    title: str,
) -> Compiled:
    """The compiled graph, whose calls are recorded and replayed. Raises `UnsupportedError` with `strict` where that cannot be."""
    from .graphs.eligible import lines_of, slots_of, unrecorded, why_not
    from .graphs.region import Region

    if reason := why_not(graph, device):
        unrecorded(reason, cfg.strict)
        return call
    region = Region(
        call,
        slots_of(graph, fixed),
        recorder,
        boxed=boxed,
        strict=cfg.strict,
        share=cfg.cudagraphs_share_memory,
        needed=needed,
        lines=lines_of(graph),
        small=cfg.cudagraphs_clone_bytes,
        title=title,
    )
    return region.run if boxed else region


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


def target_of(graph: torch.fx.GraphModule, cfg: Config) -> Target:
    """The GPU that all of the graph's tensors on GPUs are on, or else the processor: what is elsewhere runs by eager kernels. Raises
    `UnsupportedError` where tensors have no elements (`meta`), `BuildError` where there are no kernels for that GPU.
    """
    values = (leaf for n in graph.graph.nodes for leaf in pytree.tree_leaves(n.meta.get("val")))
    devices = {leaf.device for leaf in values if isinstance(leaf, torch.Tensor)}
    if any(d.type == "meta" for d in devices):
        raise UnsupportedError("a tensor is on the device meta, which holds no elements")
    found = {d.index for d in devices if d.type == "cuda"}
    if len(found) != 1:
        return Cpu(cfg)
    from .targets.cuda import Cuda, unusable  # where there is something to do for it

    (index,) = found
    if reason := unusable(index):
        raise BuildError(reason)
    return Cuda(cfg, index)
