"""Gradients of a recorded program: autograd runs backward over the traced tensors while the recorder goes on writing.

Autograd itself decided, as the program ran, what depends on what: through views, writes in place, `detach` and blocks without grad. All
that is added here are tangents, one placeholder for each result that autograd follows, and one call for the gradients of the inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ....errors import UnsupportedError
from ....generated.schemas import InputAliasInfo, MutationType
from ...torch_compat import running_node
from ..metadata.outcome import Found
from ..record.recorder import Recorder, Restart
from ..storage.inputs import Inputs
from ..storage.merge import Entered
from ..storage.overlap import is_dense
from ..storage.regions import Layout, Region
from ..subclasses.border import Border, WrappedGradient, WrappedResult, read_symbols
from ..subclasses.wrappers import Wrapped, inner_tensors, is_wrapper, like_tangent
from ..symbols.kernels import of_gradients
from .again import Again
from .hook_order import leaves_in_order


@dataclass(frozen=True)
class Gradients:
    """The backward half of a joint graph, whose output is (results, gradients).

    tangents   results of the graph that autograd follows, in the order of the tangents' placeholders; the others are not differentiable.
    inputs     graph inputs that have a gradient, in the order of the gradients.
    overwritten  graph inputs that the wrapper writes to after the graph has run: their first contents are gone in the backward.
    watched_inputs, watched_results  graph inputs and results that eager's backward reads: it refuses to run once they were written to.
    unkept     graph inputs that eager's backward does not read, so that a caller may write to them after the forward, and those whose
               version counter moves in the wrapper: our backward must not read them either.
    lent       results that a caller may write to although the backward of eager would not notice: ours must not read them either.
    bumped     those of `overwritten` whose version counter tells of the write.
    wrappers   number of further arguments: tensor subclasses, whose insides are graph inputs, for autograd to follow.
    wrapped_results, wrapped_gradients  results and gradients that are put together of those of the graph; tangents of the former follow
               the others.
    symbols    sizes of what is put together: name, the argument that has it, and how it is read.
    watched_wrappers  further arguments that eager's backward reads, with what the program's writes will add to their version.
    bases      graph inputs that are merged bases: tensor objects of the wrapper alone.
    reached    for each of `inputs` the tangents from which autograd finds a way to it, as bits: it has no gradient where none of them is given;
               () where there is one tangent.
    unreached  graph inputs that require grad, and from no result autograd finds a way to them: it must not see them as arguments. Eager may
               lay such a leaf out anew afterwards, and an autograd function that took it has told autograd its first sizes.
    once       whether eager's backward reads what its forward saved: it runs once, unless the graph is retained.
    read_for   for graph inputs and results that eager's backward reads, as ("input" or "output", position), the tangents for which it does,
               as bits: where none of them is given, it does not mind that they were written to. {} where there is one tangent.
    leaves     graph inputs that are leaves, in the order in which eager reaches them (and runs their hooks); () where there are fewer than two.
    again      the program, where inputs have tangents of forward-mode differentiation: how its gradients move with these is found out by
               running it once more.
    """

    tangents: tuple[int, ...]
    inputs: tuple[int, ...]
    overwritten: tuple[int, ...]
    watched_inputs: tuple[int, ...] = ()
    watched_results: tuple[int, ...] = ()
    unkept: tuple[int, ...] = ()
    lent: tuple[int, ...] = ()
    bumped: tuple[int, ...] = ()
    wrappers: int = 0
    wrapped_results: tuple[WrappedResult, ...] = ()
    wrapped_gradients: tuple[WrappedGradient, ...] = ()
    watched_wrappers: tuple[tuple[int, int], ...] = ()
    symbols: tuple[tuple[str, int, str], ...] = ()
    bases: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    unreached: tuple[int, ...] = ()
    once: bool = False
    read_for: dict[tuple[str, int], int] = field(default_factory=dict)
    leaves: tuple[int, ...] = ()
    again: Again | None = None

    def reached_by_some(self) -> tuple[int, ...]:
        """Graph inputs that get no gradient from some of the tangents."""
        whole = (1 << (len(self.tangents) + len(self.wrapped_results))) - 1
        return tuple(k for k, way in zip(self.inputs, self.reached, strict=False) if way & whole != whole)


def differentiate(
    inputs: Inputs, recorder: Recorder, entered: Entered, found: Found, saved: Saved, border: Border
) -> tuple[Gradients, list[Any]] | None:
    """Record the gradients of `found`'s results for every input that requires grad; returns also their nodes. None when no result depends
    on such an input. Raises what autograd raises: a tensor that it needs was written in place, a formula is missing.
    """
    followed = [(k, t) for k, t in enumerate(found.tensors) if t is not None and t.requires_grad]
    wanted = [(k, inputs.edges[i]) for k, i in enumerate(entered.graph_inputs) if inputs.edges[i] is not None]
    first_base = len(entered.graph_inputs)
    wanted += [(first_base + k, edge) for k, edge in enumerate(entered.base_edges) if edge is not None]
    made = [r for r in border.results if r.position is not None]
    wrappers = [border.arguments[i] for i in border.distinct()]
    arguments = first_base + len(entered.bases)
    edges = [(arguments + k, a.edge) for k, a in enumerate(wrappers) if a.edge is not None]
    if not (followed or made) or not (wanted or edges):
        return None
    alike = [found.outputs[k].meta["val"] for k, _ in followed]
    with recorder, torch.no_grad():
        expected = [like_tangent(r.traced) for r in made]
    for wrapper, form in expected:
        alike += form.take(wrapper)
    dense = iter(_tangents(recorder, alike, inputs.fake_mode))
    tangents = [next(dense) for _ in followed] + [form.put(dense) for _, form in expected]
    results = [t for _, t in followed] + [r.traced for r in made]
    several = len(results) > 1
    ways_in = Ways(results) if several else None
    reached = ways_in.to([e for _, e in [*wanted, *edges]]) if ways_in else ()
    once = _runs_once(results, saved)
    leaves = leaves_in_order([get_gradient_edge(t) for t in results], [e for _, e in wanted])
    recorder.origin, recorder.backward = None, True
    saved.tangents_of = ways_in.nodes if ways_in else {}
    kept = _kept(recorder, inputs, entered, found, tangents)
    # Anomaly mode looks at values.
    with recorder, of_gradients(inputs.fake_mode.shape_env), torch.autograd.set_detect_anomaly(False):
        gradients = torch.autograd.grad(results, [e for _, e in [*wanted, *edges]], tangents, allow_unused=True)
    _check_unwritten(kept)
    needed = saved.read
    _check_shared_counters(inputs, recorder, entered, found, needed)
    for i in entered.graph_inputs:
        if _moves(found.meta.input_info[i]) and recorder.regions.key(inputs.fakes[i]) in needed:
            raise UnsupportedError(
                f"input {i} is given another layout or storage, and its elements are needed by the backward"
            )
    ways = reached or (Ways(results).to([e for _, e in wanted]) if any(g is None for g in gradients) else ())
    plain = [None if g is None or is_wrapper(g) else g for g in gradients]
    nodes = [None if g is None else recorder.current(recorder.value(g)) for g in plain]
    wrapped_gradients: list[WrappedGradient] = []
    for (k, _), g in zip([*wanted, *edges], gradients, strict=True):
        if g is not None and is_wrapper(g):
            inside = inner_tensors(g)
            wrapped_gradients.append(
                WrappedGradient(k, tuple(range(len(nodes), len(nodes) + len(inside))), Wrapped.of(g))
            )
            nodes += [recorder.current(recorder.value(t)) for t in inside]
    overwritten = tuple(k for k, i in enumerate(entered.graph_inputs) if found.meta.input_info[i].mutates_data)
    written_bases = [first_base + k for k, base in enumerate(found.meta.bases) if base.updated is not None]
    needed_bases = [
        first_base + k
        for k, t in enumerate(entered.base_tensors)
        if recorder.regions.key(t) in needed
        and not any(_moves(found.meta.input_info[i]) for i in found.meta.bases[k].members)
    ]
    all_bases = range(first_base, first_base + len(entered.bases))
    beside = _beside(inputs, recorder, entered, found)
    wrapped_inside = {i for a in wrappers for i in a.dense}
    watched_inputs = tuple(
        k
        for k, i in enumerate(entered.graph_inputs)
        if isinstance(inputs.fakes[i], torch.Tensor)
        and recorder.regions.key(inputs.fakes[i]) in needed
        and not _moves(found.meta.input_info[i])
        and k not in beside
        and i not in wrapped_inside
    ) + tuple(k for k in needed_bases if found.meta.bases[k - first_base].followed)
    watched_results = tuple(
        k
        for k, t in enumerate(found.tensors)
        if (t is not None and recorder.regions.key(t) in needed and t.requires_grad) or found.shown.get(k) in needed
    )
    positions = tuple(k for k, _ in followed), tuple(k for k, _ in [*wanted, *edges]), (*overwritten, *written_bases)
    unkept = tuple(
        k
        for k, i in enumerate(entered.graph_inputs)
        if isinstance(inputs.fakes[i], torch.Tensor)
        and (recorder.regions.key(inputs.fakes[i]) not in needed or k in beside or _moves(found.meta.input_info[i]))
    ) + tuple(k for k in all_bases if k not in needed_bases)
    bumped = tuple(k for k in overwritten if found.meta.input_info[entered.graph_inputs[k]].seen)
    bumped += tuple(k for k in written_bases if found.meta.bases[k - first_base].seen)
    wrapped_results = []
    for r, (_, form) in zip(made, expected, strict=True):
        assert r.made is not None
        watched = any(recorder.regions.key(t) in needed for t in inner_tensors(r.traced))
        places = tuple(found.meta.output_info[k].value or 0 for k in r.dense)
        wrapped_results.append(WrappedResult(r.made, places, form, watched))
    watched_wrappers = tuple(
        (k, int(a.moved))
        for k, a in enumerate(wrappers)
        if any(recorder.regions.key(inputs.fakes[i]) in needed for i in a.dense)
    )
    # Views made without grad require grad, with no way to anything: where nothing is reached, the inputs make the results require grad.
    unreached = tuple(
        k
        for (k, _), way in zip(wanted, ways, strict=False)
        if any(ways) and not way and k < first_base and k not in watched_inputs
    )
    shapes: set[Any] = set()
    shapes = shapes.union(*(r.made.symbols() for r in wrapped_results), *(g.made.symbols() for g in wrapped_gradients))
    names = {f"arg{i}": k for k, i in enumerate(entered.graph_inputs)}
    symbols = tuple((s, names[node], call) for s, node, call in read_symbols(shapes, recorder.symbols))
    read_for: dict[tuple[str, int], int] = {}
    if several:
        fakes = [*(inputs.fakes[i] for i in entered.graph_inputs), *entered.base_tensors]
        for where, values in (("input", fakes), ("output", found.tensors)):
            keys = ((k, recorder.regions.key(t)) for k, t in enumerate(values) if isinstance(t, torch.Tensor))
            read_for |= {(where, k): needed[key] for k, key in keys if key in needed}
        read_for |= {("output", k): needed[key] for k, key in found.shown.items() if key in needed}
    return Gradients(
        *positions,
        watched_inputs,
        watched_results,
        unkept,
        tuple(k for k, key in found.shown.items() if key not in needed),
        bumped,
        len(wrappers),
        tuple(wrapped_results),
        tuple(wrapped_gradients),
        watched_wrappers,
        symbols,
        tuple(all_bases),
        reached,
        unreached,
        once,
        read_for,
        tuple(wanted[k][0] for k in leaves if wanted[k][0] < first_base) if len(leaves) > 1 else (),
    ), nodes


class Ways:
    """From which of some results autograd finds a way to its nodes and their gradient edges. `nodes`: for each node the results, as bits."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        roots = [get_gradient_edge(t) for t in results]
        order: list[Any] = []
        seen: set[Any] = set()
        stack = [(e.node, False) for e in roots]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(after, False) for after, _ in node.next_functions if after is not None]
        self.nodes: dict[Any, int] = dict.fromkeys(order, 0)
        self._ways: dict[tuple[Any, int], int] = {}
        for k, e in enumerate(roots):
            self.nodes[e.node] |= 1 << k
            self._ways[e.node, e.output_nr] = self._ways.get((e.node, e.output_nr), 0) | 1 << k
        for node in reversed(order):
            for after, n in node.next_functions:
                if after is not None:
                    self.nodes[after] |= self.nodes[node]
                    self._ways[after, n] = self._ways.get((after, n), 0) | self.nodes[node]

    def to(self, edges: Sequence[Any]) -> tuple[int, ...]:
        """For each gradient edge the results from which there is a way to it, as bits."""
        return tuple(self._ways.get((e.node, e.output_nr), 0) for e in edges)


def _kept(
    recorder: Recorder, inputs: Inputs, entered: Entered, found: Found, tangents: Sequence[Any]
) -> list[tuple[str, Region, int]]:
    """What others than the backward see: (name, region, how often it was written to), for inputs, bases, results (those that autograd does not
    follow too) and given gradients.
    """
    named = [(f"input {i}", t) for i, t in enumerate(inputs.fakes)]
    named += [(f"base {k}", t) for k, t in enumerate(entered.base_tensors)]
    named += [(f"result {k}", t) for k, t in enumerate(found.tensors)]
    named += [(f"the gradient given for result {k}", t) for k, t in enumerate(tangents)]
    inside = [(name, t) for name, whole in named if isinstance(whole, torch.Tensor) for t in inner_tensors(whole)]
    regions = [(name, recorder.value(t).region) for name, t in inside]
    regions += [(f"result {k}", r) for k, key in found.shown.items() for r in recorder.regions.by_storage.get(key, ())]
    return [(name, region, region.version) for name, region in regions]


def _check_unwritten(kept: list[tuple[str, Region, int]]) -> None:
    """Raises `UnsupportedError` where the backward wrote to one of `kept`: the wrapper copies back what the forward wrote, nothing else."""
    for name, region, version in kept:
        if region.version != version:
            raise UnsupportedError(f"the backward writes to {name}")


def _runs_once(results: Sequence[torch.Tensor], saved: Saved) -> bool:
    """Whether autograd has saved a tensor for the backward of these (a number too, as in `x * 2`, of which its hooks are not told)."""
    seen: set[Any] = set()
    stack = [t.grad_fn for t in results]
    with saved.unread():
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            names = [n.replace("_raw", "", 1) for n in dir(type(node)) if n.startswith("_raw_saved_")]
            if getattr(node, "saved_tensors", ()) or any(getattr(node, n, None) is not None for n in names):
                return True
            stack += [after for after, _ in node.next_functions]
    return False


def _beside(inputs: Inputs, recorder: Recorder, entered: Entered, found: Found) -> set[int]:
    """Graph inputs in a storage of which another input is mutated: they may share its version counter."""
    mutated = {
        i: recorder.regions.key(inputs.fakes[i])
        for i, info in enumerate(found.meta.input_info)
        if info.mutation_type is not MutationType.NOT_MUTATED
    }
    return {
        k
        for k, i in enumerate(entered.graph_inputs)
        if isinstance(inputs.fakes[i], torch.Tensor)
        and any(j != i and key == recorder.regions.key(inputs.fakes[i]) for j, key in mutated.items())
    }


def _check_shared_counters(
    inputs: Inputs, recorder: Recorder, entered: Entered, found: Found, needed: Container[int]
) -> None:
    """Inputs that lie apart in one storage of which one is written, and that the backward reads, share a version counter: how often the
    wrapper moves it is known when they are one base. Raises `Restart` for that.
    """
    beside = sorted(_beside(inputs, recorder, entered, found))
    for i in (entered.graph_inputs[k] for k in beside):
        key = recorder.regions.key(inputs.fakes[i])
        if key in needed:
            raise Restart(
                merge=frozenset(
                    j
                    for j, t in enumerate(inputs.fakes)
                    if isinstance(t, torch.Tensor) and inputs.same_as[j] is None and recorder.regions.key(t) == key
                )
            )


def _moves(info: InputAliasInfo) -> bool:
    """Whether the wrapper changes more of an input than its elements: how often its version moves then is not known here."""
    return info.mutation_type not in (MutationType.NOT_MUTATED, MutationType.DATA)


def written_since(t: torch.Tensor, version: int) -> RuntimeError:
    """What autograd raises when a tensor that it saved at `version` was written to."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{t.dtype}{list(t.shape)} is at version {t._version}; expected version {version} instead"
    )


class Saved:
    """What autograd saves while the program runs, and which of that its backward reads (in the inner functions of writes through views too).

    Hooks replace autograd's own check of versions; this makes it.

    read         what was read, by the key of its storage, with the tangents for which it was, as bits.
    tangents_of  the tangents of nodes of autograd, as bits; a node that is not known reads for all of them.
    """

    def __init__(self) -> None:
        self.read: dict[int, int] = {}
        self.tangents_of: Mapping[Any, int] = {}
        self._looking = False

    def hooks(self) -> Any:
        """The context that the program runs in."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """What is looked at in this context is not read by a backward."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    def _pack(self, t: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        return t, None if t.is_inference() else t._version

    def _unpack(self, packed: tuple[torch.Tensor, int | None]) -> torch.Tensor:
        t, version = packed
        if self._looking:
            return t
        if version is not None and t._version != version:
            raise written_since(t, version)
        tangents = self.tangents_of.get(running_node(), -1)
        for inside in inner_tensors(t):
            key = inside.untyped_storage()._cdata
            self.read[key] = self.read.get(key, 0) | tangents
        return t


def _tangents(recorder: Recorder, results: Sequence[torch.Tensor], fake_mode: Any) -> list[torch.Tensor]:
    """Placeholders after the inputs, laid out as `results` are, where those are dense (row-major for sizes known only later)."""
    graph = recorder.graph
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    tangents = []
    for k, like in enumerate(results):
        layout = Layout.of(like)
        with fake_mode:
            if layout.plain and is_dense(layout):
                tangent = torch.empty_strided(layout.size, layout.stride, dtype=like.dtype, device=like.device)
            else:
                tangent = torch.empty(layout.size, dtype=like.dtype, device=like.device)
        with graph.inserting_after(last):
            last = graph.placeholder(f"tangent{k}")
        last.meta |= {"val": tangent, "tangent": True, "backward": True}
        recorder.regions.add(tangent, last)
        tangents.append(tangent)
    return tangents
