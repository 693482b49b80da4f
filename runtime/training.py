"""A joint graph as two graphs to compile, and what their autograd function has to know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..errors import UnsupportedError
from .config import Config, current
from .dispatch.autograd.joint import Gradients
from .dispatch.operators.schema import op_info
from .dispatch.storage.overlap import is_dense
from .dispatch.storage.regions import Layout, is_strided
from .dispatch.trace import Traced
from .execute.autograd_function import Backward, Halves, Partial, tangent_strides
from .execute.given import saved_inputs
from .execute.sparse_gradients import unreached_from
from .lower.layouts import repeats
from .partition import Partition, partition
from .partition.early import gains_early, kept_as_gradients, with_early_gradients, written_over
from .partition.partial import needed_for, tangents_with, without_tangents
from .partition.split import Halves as Cut
from .torch_compat import OpOverload


@dataclass(frozen=True)
class Split:
    """The forward returns results, then what is saved; the backward takes what is saved, then tangents. `written`: positions of inputs that
    the forward writes → of the results with their new contents.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    halves: Halves
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
    returned, kept, saved = _trim(parts, results)
    inside = {k for r in gradients.wrapped_results for k in r.dense}
    read = {*gradients.tangents, *gradients.watched_results, *inside, *(k for where, k in saved if where == "output")}
    written = {p: k for p, k in written.items() if p not in gradients.inputs and k not in read}
    constant = tuple(
        k
        for k, n in enumerate(kept[:results])
        if k not in gradients.tangents
        and k not in written.values()
        and k not in inside
        and isinstance(n, fx.Node)
        and isinstance(n.meta["val"], torch.Tensor)
    )
    halves = Halves(
        arguments,
        results,
        constant,
        tuple(saved),
        tuple(isinstance(n.meta["val"], torch.Tensor) for n in returned[results:]),
        tuple(tangent_strides(t) for t in tangents),
        gradients,
        len(tangents) > 1 and not gradients.wrapped_results,
        symbolic,
        tangents_with(parts.backward) if len(tangents) > 1 else (),
        saved_inputs(saved, [n.meta["val"] for n in returned[results:]]),
        frozenset(traced.static_arguments),
        early or ({} if symbolic or cfg.cudagraphs or len(tangents) > 1 else written_over(parts)),
        bool(early),
    )
    return Split(parts.forward, parts.backward, halves, written)


def _keep_made_from_inputs(joint: fx.GraphModule, parts: Partition | Cut, gradients: Gradients) -> bool:
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


def _trim(parts: Partition | Cut, results: int) -> tuple[list[Any], list[Any], list[tuple[str, int]]]:
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


def _peak(parts: Cut, results: int, cfg: Config) -> int | None:
    from .schedule.planned import planned_peak  # only a budget below 1 asks

    _trim(parts, results)
    owned = {k for k, (what, _) in enumerate(parts.origins) if what == "saved"}
    return planned_peak(parts.forward, parts.backward, owned, cfg)


def compiles_later(parts: Split, cfg: Config) -> bool:
    """Whether the backward may be compiled when it first runs. Not with symbolic sizes: what compiling assumes of them becomes guards, which
    are settled by then; and not when all texts of the graph are wanted.
    """
    return cfg.lazy_backward and not cfg.dump_dir and not _is_symbolic(parts.backward)


def _is_symbolic(graph: fx.GraphModule) -> bool:
    numbers = torch.SymInt, torch.SymFloat, torch.SymBool
    return any(isinstance(n.meta.get("val"), numbers) or _is_dynamic(n) for n in graph.graph.nodes)


def _is_dynamic(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(
        type(n) is not int for n in (*value.shape, *(value.stride() if is_strided(value) else ()))
    )


def kept_for_backward(halves: Halves, static: Collection[int]) -> set[int]:
    """Positions of the backward's placeholders that stay where they are as long as the forward's results do: what the forward made or was
    given as one of its `static` arguments.
    """
    tensors = [s for s, is_tensor in zip(halves.saved, halves.saved_is_tensor, strict=True) if is_tensor]
    return {k for k, (where, n) in enumerate(tensors) if where == "output" or n in static}


def eager_backward(
    backward: fx.GraphModule, into: Mapping[int, int] = MappingProxyType({})
) -> Callable[[list[Any]], Any]:
    """The backward by eager kernels, for a forward that was compiled. It takes a list of arguments, which it empties. `into`: positions of
    arguments → of the gradients that are written there, for which None is returned.
    """
    run = fx.Interpreter(backward).boxed_run
    if not into:
        return run

    def in_place(arguments: list[Any]) -> list[Any]:
        targets = {gradient: arguments[k] for k, gradient in into.items()}
        gradients = list(run(arguments))
        for k, target in targets.items():
            target.copy_(gradients[k])
            gradients[k] = None
        return gradients

    return in_place


def partial_backward(
    parts: Split, whole: Backward, compiled: Callable[[fx.GraphModule], Callable[..., Any]]
) -> Partial:
    """Backwards for calls in which not all results got a gradient, each made by `compiled` when such a call first comes. With symbolic sizes
    it is `whole`, for which what is missing counts as zeros, without the gradients that nothing reaches: compiling another graph may add
    guards, which are settled by then.
    """
    tangents = [n.meta["val"] for n in parts.backward.graph.nodes if n.op == "placeholder" and n.meta.get("tangent")]
    made: dict[int, Backward] = {}

    def make(missing: int) -> Callable[..., Any]:
        unreached = unreached_from(parts.halves, missing)
        if parts.halves.symbolic:
            call = whole.ready()
            return lambda arguments: [None if k in unreached else g for k, g in enumerate(call(arguments))]
        absent = {k for k in range(len(tangents)) if missing >> k & 1}
        return compiled(without_tangents(parts.backward, absent, unreached))

    def ready(missing: int) -> Callable[..., Any]:
        half = made.get(missing) or made.setdefault(missing, Backward(lambda: make(missing)))
        return half.ready()

    def zeros(k: int, shape: Sequence[int] | None = None) -> torch.Tensor:
        like = tangents[k]
        return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape if shape is None else shape)

    return Partial(ready, zeros)
