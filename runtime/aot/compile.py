"""One traced program through a user's compilers: decompositions, partition, forward and backward, and the wrapper around them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...errors import OpforgeWarning, UnsupportedError, first_line
from ...generated.dispatch_tables import ROLES
from ..backward.function import bind_function
from ..backward.variants import Variants
from ..config import current
from ..dispatch.autograd.needs_grad import wants_grad
from ..dispatch.trace import Traced, trace
from ..dispatch.wrapper.source import bind
from ..observe import counters
from .compilers import Compiled, Compilers, call_compiler, unboxed
from .decompose import decompose
from .frames import FrameRecorder
from .partitioners import joint_inputs, joint_module, read_backward, root_of


def compile_program(program: Callable[..., Any], inputs: Sequence[Any], compilers: Compilers) -> Compiled:
    """`program` compiled for flat or nested positional `inputs`; the result takes such inputs. A program that cannot be traced runs
    eagerly and is counted, with the setting `strict` it raises `UnsupportedError`. What the user's functions raise is not caught.
    """
    training = wants_grad(getattr(program, "module", program), inputs)
    try:
        traced = trace(program, inputs, training=training, recorder_type=FrameRecorder)
        _check_constants(traced.graph)
        if compilers.decompositions:
            traced.graph = decompose(traced.graph, compilers.decompositions)
    except UnsupportedError as error:
        if current().strict:
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        counters.count_fallback(reason)
        warnings.warn(f"opforge: {reason}; it runs eagerly (strict=True raises instead)", OpforgeWarning, stacklevel=3)
        return program
    if traced.gradients is not None:
        return bind(traced, _compile_joint(traced, compilers))
    kept = _keep_mutations(traced) if compilers.keep_mutations else ()
    compiled = unboxed(call_compiler(compilers.inference, traced.graph, "inference_compiler or fw_compiler"))
    return bind(traced, _with_gaps(compiled, kept, traced.meta.num_outputs) if kept else compiled, in_graph=kept)


def _check_constants(graph: fx.GraphModule) -> None:
    """Raises `UnsupportedError` for what stands in a graph and has no source text, which user compilers are given."""
    for node in graph.graph.nodes:
        if any(isinstance(v, torch.Generator) for v in (*node.args, *node.kwargs.values())):
            raise UnsupportedError(f"{node.target} draws from a torch.Generator of the program's")


def _compile_joint(traced: Traced, compilers: Compilers) -> Compiled:
    gradients = traced.gradients
    assert gradients is not None
    placeholders = [n for n in traced.graph.graph.nodes if n.op == "placeholder"]
    tangents = [n.meta["val"] for n in placeholders if n.meta.get("tangent")]
    arguments, results = len(placeholders) - len(tangents), traced.meta.num_outputs
    joint = joint_module(traced.graph, gradients.inputs, unsaved=(*gradients.overwritten, *gradients.unkept))
    static = sorted(traced.static_arguments)
    parts = compilers.partition(
        joint, joint_inputs(joint), num_fwd_outputs=results, static_lifetime_input_indices=static
    )
    if not isinstance(parts, tuple) or len(parts) != 2:
        raise TypeError(f"partition_fn returned a {type(parts).__name__}; a forward and a backward graph are expected")
    spec = read_backward(*parts, gradients, tangents, arguments, results)
    forward = _without_views(unboxed(call_compiler(compilers.forward, parts[0], "fw_compiler")))

    def compile_backward(graph: fx.GraphModule, _into: Mapping[int, int]) -> Compiled:
        return compilers.wrap_backward(call_compiler(compilers.backward, graph, "bw_compiler"))

    variants = Variants(spec, compile_backward, strict=current().strict)
    variants.prepare(compile_backward)
    return bind_function(spec, forward, variants)


def _without_views(forward: Compiled) -> Compiled:
    """Results that are views of what the user's code computed, as tensors of their own: to autograd, views that are made inside of a function
    cannot be written to.
    """

    def run(*args: Any) -> list[Any]:
        results = forward(*args)
        return [t.data if isinstance(t, torch.Tensor) and t._is_view() and not _among(t, args) else t for t in results]

    return run


def _among(t: torch.Tensor, args: Sequence[Any]) -> bool:
    return any(t is a for a in args)


def _keep_mutations(traced: Traced) -> tuple[int, ...]:
    """Write new contents of inputs inside of the graph, at its end. Returns the positions of the results that the graph no longer gives."""
    graph = traced.graph.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in graph.nodes if n.op == "output")
    outputs = list(output.args[0])
    written = dict(traced.in_place_candidates)
    copied = {}
    with graph.inserting_before(output):
        # All that is written is computed before anything is written: it may be an old input, or a view of one.
        for k in written:
            copied[k] = graph.call_function(ROLES["clone"], (outputs[k],)) if _reads_input(outputs[k]) else outputs[k]
            copied[k].meta.setdefault("val", outputs[k].meta["val"])
        for k, i in written.items():
            put = graph.call_function(ROLES["copy_in_place"], (placeholders[i], copied[k]))
            put.meta["val"] = placeholders[i].meta["val"]
    output.args = (tuple(o for k, o in enumerate(outputs) if k not in written),)
    traced.graph.recompile()
    return tuple(sorted(written))


def _reads_input(node: fx.Node) -> bool:
    return root_of(node).op == "placeholder"


def _with_gaps(compiled: Compiled, gaps: Sequence[int], count: int) -> Compiled:
    """Results in the places that the wrapper looks at, None in `gaps`."""
    places = [k for k in range(count) if k not in gaps]

    def run(*args: Any) -> list[Any]:
        results: list[Any] = [None] * count
        for k, value in zip(places, compiled(*args), strict=True):
            results[k] = value
        return results

    return run
