"""From one functional graph to a function that runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BuildError, CacheError, UnsupportedError
from ..generated.rewrites import RULES
from .config import Config
from .execute.load import load_wrapper
from .graph.rewrite import rewrite
from .ir.text import dump
from .lower.control import Control
from .lower.graph import lower
from .observe.calls import Half, observer
from .observe.torch_logs import note
from .observe.watch import Watch
from .realize import Artifacts, Compiled, parameters, realize
from .targets.base import Target
from .targets.cpu import Cpu
from .torch_compat import pytree

if TYPE_CHECKING:
    from .graphs.recording import Recorder


def compile_graph(
    graph: torch.fx.GraphModule,
    cfg: Config,
    watch: Watch,
    *,
    boxed: bool = False,
    minimize_memory: bool = False,
    written: Mapping[int, int] = MappingProxyType({}),
    fixed: Collection[int] = (),
    needed: Collection[int] = (),
) -> tuple[Compiled, Artifacts]:
    """Compile one functional graph. The result takes the graph's placeholders, one argument each (`boxed`: one list of them, which it
    empties, so that each is freed after its last use), and returns a tuple. `minimize_memory`: as for `schedule`. `written`: positions of
    placeholders → of outputs that it writes into them; None is returned there. `fixed`: positions of placeholders that seldom move in memory;
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
        call, artifacts = realize(
            lowered, target, cfg, watch, boxed=boxed, minimize_memory=minimize_memory, functions=functions
        )
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
