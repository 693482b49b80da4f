"""A joint graph as a forward to compile and a backward as data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..errors import UnsupportedError
from ..generated.rewrites import RULES
from .backward.compiled import CompiledBackward, Saved, Tangent, constant_results, saved_values, watched_tensors
from .backward.function import bind_function
from .backward.second import DifferentiableBackward
from .backward.source import emit_function
from .backward.variants import Variants, interpreted
from .compile_graph import compile_graph
from .config import Config, current
from .dispatch.autograd.joint import Gradients
from .dispatch.autograd.second import SecondOrder, Twice
from .dispatch.operators.schema import op_info
from .dispatch.storage.overlap import is_dense
from .dispatch.storage.regions import Layout, is_strided
from .dispatch.trace import Traced
from .fallback import or_eager
from .graph.rewrite import rewrite
from .lower.layouts import repeats
from .observe import counters
from .observe.watch import Watch
from .partition import Partition, partition
from .partition.early import gains_early, kept_as_gradients, with_early_gradients, written_over
from .partition.partial import needed_for, tangents_with
from .partition.split import Halves
from .realize import Artifacts, Compiled
from .torch_compat import OpOverload, tangents_followed


@dataclass(frozen=True)
class Split:
    """The forward returns results, then what is saved; the backward takes what is saved, then tangents. `written`: positions of inputs that
    the forward writes → of the results with their new contents.
    """

    forward: fx.GraphModule
    backward: CompiledBackward
    written: dict[int, int]


def split(traced: Traced, cfg: Config | None = None, written: Mapping[int, int] = MappingProxyType({})) -> Split:
    """Partition the joint graph of a training program as `cfg` says. What the backward needs of the forward's arguments and results is not
    returned a second time. `written`: inputs that the forward may write itself, as for `Split`.
    """
    cfg = cfg or current()
    gradients = traced.gradients
    assert gradients is not None
    placeholders = [n for n in traced.graph.graph.nodes if n.op == "placeholder"]
    tangents = [n.meta["val"] for n in placeholders if n.meta.get("tangent")]
    arguments = len(placeholders) - len(tangents)
    results = traced.meta.num_outputs

    def cut(joint: fx.GraphModule = traced.graph) -> Partition:
        return partition(
            joint,
            arguments,
            results,
            policy=cfg.partition,  # type: ignore[arg-type]  # its choices are the policies
            budget=cfg.activation_memory_budget,
            never_saved_raw={*gradients.overwritten, *gradients.unkept},
            lent=gradients.lent,
            measure=lambda parts: _peak(parts, results, cfg),
        )

    parts = cut()
    early: dict[int, int] = {}
    if gains_early(traced.graph, parts, cfg):
        scaled = cut(with_early_gradients(traced.graph))
        early = kept_as_gradients(scaled.backward)
        parts = scaled if early else parts
    while len(tangents) > 1 and _keep_made_from_inputs(traced.graph, parts, gradients):
        parts = cut()
    symbolic = _is_symbolic(parts.backward)
    if len(tangents) > 1 and symbolic and not all(is_strided(g) for g in _gradients(parts.backward)):
        # There, a result without a gradient counts as one that got zeros, whose rows eager leaves out.
        raise UnsupportedError("a sparse gradient of several results, with sizes that are symbols")
    returned, kept, places = _trim(parts, results)
    partial = len(tangents) > 1 and not gradients.wrapped_results
    saved = saved_values(
        places,
        [n.meta["val"] for n in returned[results:]],
        gradients,
        results,
        needed_for=tangents_with(parts.backward) if partial else (),
        symbolic=symbolic,
    )
    inside = {k for r in gradients.wrapped_results for k in r.dense}
    read = {*gradients.tangents, *gradients.watched_results, *inside, *(k for where, k in places if where == "output")}
    written = {p: k for p, k in written.items() if p not in gradients.inputs and k not in read}
    tensors = [k for k, n in enumerate(placeholders[:arguments]) if isinstance(n.meta["val"], torch.Tensor)]
    of_parameters, others = _kinds(traced, symbolic)
    backward = CompiledBackward(
        graph=parts.backward,
        arguments=arguments,
        results=results,
        constant=constant_results(kept[:results], gradients, written.values()),
        saved=saved,
        tangents=tuple(map(Tangent.of, tangents)),
        watched=watched_tensors(gradients, saved, partial=partial, held=frozenset(traced.static_arguments)),
        gradients=gradients,
        partial=partial,
        symbolic=symbolic,
        into=early or ({} if symbolic or cfg.cudagraphs or len(tangents) > 1 else written_over(parts)),
        scaled=bool(early),
        weights=of_parameters if of_parameters and others else (),
        others=others if of_parameters and others else (),
        edges=tuple(tensors.index(k) if k in tensors else -1 for k in gradients.inputs),
        unsaved=_unsaved(placeholders[:arguments], saved) if traced.twice is not None else (),
    )
    return Split(parts.forward, backward, written)


def _kinds(traced: Traced, symbolic: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the gradients of parameters and buffers, and of the others; () where the backward does not tell them apart."""
    gradients, static = traced.gradients, traced.static_arguments
    assert gradients is not None
    if symbolic or gradients.wrapped_gradients or gradients.wrappers:
        return (), ()
    kinds: tuple[list[int], list[int]] = [], []
    for k, n in enumerate(gradients.inputs):
        kinds[n not in static].append(k)
    return tuple(kinds[0]), tuple(kinds[1])


def _unsaved(arguments: Sequence[fx.Node], saved: Sequence[Saved]) -> tuple[int, ...]:
    places = {s.place for s in saved}
    tensors = [k for k, n in enumerate(arguments) if isinstance(n.meta["val"], torch.Tensor)]
    return tuple(k for k in tensors if ("input", k) not in places)


def _keep_made_from_inputs(joint: fx.GraphModule, parts: Partition | Halves, gradients: Gradients) -> bool:
    """Mark what is computed again, from an input that is saved, for a tangent for which eager's backward does not read that input: the caller
    may have written to it by then. Whether something was marked that was not.
    """
    placeholders = [n for n in parts.backward.graph.nodes if n.op == "placeholder"]
    known = {n.name: n for n in joint.graph.nodes if n.op == "call_function"}
    needed = needed_for(parts.backward)
    marked = False
    for (what, k), source in zip(parts.origins, placeholders, strict=False):
        beyond = needed[source] & ~gradients.read_for.get(("input", k), -1) if what == "primal" else 0
        work = list(source.users) if beyond else []
        while work:
            node = work.pop()
            if not needed.get(node, 0) & beyond:
                continue
            if isinstance(node.target, OpOverload) and op_info(node.target).kind == "view":
                work += node.users
            elif node.name in known and not known[node.name].meta.keys() & {"must_save", "region"}:
                marked = known[node.name].meta["must_save"] = True
    return marked


def _gradients(backward: fx.GraphModule) -> list[Any]:
    """The fake values of what a backward returns."""
    (output,) = (n for n in backward.graph.nodes if n.op == "output")
    return [n.meta["val"] if isinstance(n, fx.Node) else n for n in output.args[0]]


def _trim(parts: Partition | Halves, results: int) -> tuple[list[Any], list[Any], list[tuple[str, int]]]:
    """Make the forward return no argument or result a second time. What it returned, what it returns now, and where each saved value is."""
    (output,) = (n for n in parts.forward.graph.nodes if n.op == "output")
    returned = list(output.args[0])
    kept, saved = returned[:results], list[tuple[str, int]]()
    for node, (what, k) in zip(returned[results:], parts.origins, strict=True):
        if what == "saved":
            value = node.meta["val"]
            # A view of the backward's that is kept all the same; of others the forward itself says that it leaves no gaps.
            if isinstance(value, torch.Tensor) and (
                repeats(value) or ("backward" in node.meta and not is_dense(Layout.of(value)))
            ):
                raise UnsupportedError(f"{node.name}, which is kept for the backward, has gaps or repeats elements")
            k = len(kept)
            kept.append(node)
        saved.append(("input" if what == "primal" else "output", k))
    output.args = (tuple(kept),)
    parts.forward.recompile()
    return returned, kept, saved


def _peak(parts: Halves, results: int, cfg: Config) -> int | None:
    from .schedule.planned import planned_peak  # only a budget below 1 asks

    _trim(parts, results)
    owned = {k for k, (what, _) in enumerate(parts.origins) if what == "saved"}
    return planned_peak(parts.forward, parts.backward, owned, cfg)


class BackwardCompiler:
    """Compiles the variants of one backward, and adds what is told of them to the `artifacts` of its forward."""

    def __init__(self, cfg: Config, watch: Watch, artifacts: Artifacts, fixed: Collection[int]) -> None:
        """`fixed`: positions of the backward's placeholders that stay where they are as long as the forward's results do."""
        self._cfg, self._watch, self._artifacts, self._fixed = cfg, watch, artifacts, fixed

    def now(self, graph: fx.GraphModule, into: Mapping[int, int]) -> Compiled:
        """Compile with the forward. Raises as `compile_graph`; `into` as for `variants.Compile`."""
        return self._compile(graph, into, self._watch)

    def later(self, graph: fx.GraphModule, into: Mapping[int, int]) -> Compiled:
        """Compile while a backward runs: what cannot be compiled runs by eager kernels."""
        watch = Watch(self._cfg.progress, self._cfg.dump_dir, self._watch.compile_id, self._watch.name)
        try:
            with tangents_followed(False):
                call = or_eager(lambda: self._compile(graph, into, watch), lambda: interpreted(graph, into), self._cfg)
        finally:
            watch.close()
        if (made := self._artifacts.backward) is not None:
            made.seconds = watch.seconds
            counters.count_graph(made.kernels, made.externs, made.seconds, made.arena_bytes, made.cached, graphs=0)
        return call

    def _compile(self, graph: fx.GraphModule, into: Mapping[int, int], watch: Watch) -> Compiled:
        within = watch.inside("backward")
        call, self._artifacts.backward = compile_graph(
            graph, self._cfg, within, boxed=True, minimize_memory=True, fixed=self._fixed, written=into
        )
        return call


def compile_training(
    traced: Traced,
    cfg: Config,
    watch: Watch,
    written: Mapping[int, int],
    followed: Callable[[Compiled, Sequence[Any]], Compiled],
) -> tuple[Compiled, Artifacts, Collection[int]]:
    """As `compile_fx.compile_traced`, of a joint graph. `written`: positions of placeholders that the forward may write → of its results;
    `followed` compiles, while a backward runs, a program of tensors that autograd follows.
    """
    with watch.stage("partition"):
        parts = split(traced, cfg, written)
    backward, static = parts.backward, traced.static_arguments
    function = emit_function(backward)
    watch.graph("forward_graph.py", parts.forward, "forward graph")
    watch.graph("backward_graph.py", backward.graph, "backward graph")
    watch.text("autograd_function.py", lambda: function)
    needed = {k for where, k in (s.place for s in backward.saved) if where == "output"}
    forward, artifacts = compile_graph(
        parts.forward, cfg, watch, minimize_memory=True, written=parts.written, fixed=static, needed=needed
    )
    artifacts.function = function
    compiler = BackwardCompiler(cfg, watch, artifacts, kept_for_backward(backward, static))
    variants = Variants(backward, compiler.later, strict=cfg.strict)
    if not compiles_later(backward, cfg):
        variants.prepare(compiler.now)
    twice = None if traced.twice is None else partial(_rewritten_twice, traced.twice, cfg)
    differentiable = DifferentiableBackward(backward, traced.graph, twice, followed)
    return bind_function(backward, forward, variants, differentiable), artifacts, parts.written.values()


def _rewritten_twice(
    twice: Twice, cfg: Config, sizes: Mapping[Any, Any], left: Collection[int], absent: Collection[int]
) -> SecondOrder:
    order = twice(sizes, left, absent)
    if cfg.rewrites:
        rewrite(order.graph, RULES)
    return order


def compiles_later(backward: CompiledBackward, cfg: Config) -> bool:
    """Whether the backward may be compiled when it first runs. Not with symbolic sizes: what compiling assumes of them becomes guards, which
    are settled by then; and not when all texts of the graph are wanted.
    """
    return cfg.lazy_backward and not cfg.dump_dir and not backward.symbolic


def _is_symbolic(graph: fx.GraphModule) -> bool:
    numbers = torch.SymInt, torch.SymFloat, torch.SymBool
    return any(isinstance(n.meta.get("val"), numbers) or _is_dynamic(n) for n in graph.graph.nodes)


def _is_dynamic(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(
        type(n) is not int for n in (*value.shape, *(value.stride() if is_strided(value) else ()))
    )


def kept_for_backward(backward: CompiledBackward, static: Collection[int]) -> set[int]:
    """Positions of the backward's placeholders that stay where they are as long as the forward's results do: what the forward made or was
    given as one of its `static` arguments.
    """
    tensors = [s.place for s in backward.saved if s.is_tensor]
    return {k for k, (where, n) in enumerate(tensors) if where == "output" or n in static}
