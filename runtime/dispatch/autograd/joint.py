"""Gradients of a recorded program: autograd runs backward over the traced tensors while the recorder goes on writing.

Autograd itself decided, as the program ran, what depends on what: through views, writes in place, `detach` and blocks without grad. All
that is added here are tangents, one placeholder for each result that autograd follows, and one call for the gradients of the inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ....errors import UnsupportedError
from ...torch_compat import own_grad, running_node
from ..metadata.outcome import Found
from ..record.recorder import Recorder
from ..storage.inputs import Inputs
from ..storage.merge import Entered
from ..storage.overlap import is_dense
from ..storage.regions import Layout, Region
from ..subclasses.border import Border, WrappedGradient, WrappedResult, read_symbols
from ..subclasses.wrappers import Wrapped, inner_tensors, is_wrapper, like_tangent
from ..symbols.kernels import of_gradients
from .again import Again
from .backward_reads import BackwardReads
from .hook_order import leaves_in_order
from .ways import Ways


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


def differentiate(program: Differentiated) -> tuple[Gradients, list[Any]] | None:
    """Record the gradients of a program's results for every input that requires grad; returns also their nodes. None when no result depends
    on such an input. Raises what autograd raises: a tensor that it needs was written in place, a formula is missing.
    """
    return program.record() if program.is_needed() else None


class Differentiated:
    """A recorded program whose gradients are to be recorded.

    followed  results that autograd follows; made  tensor subclasses among the results.
    wanted    graph inputs and merged bases with a gradient, by position, with their edges; edges  those of tensor subclasses among the inputs,
              which follow them as further arguments.
    """

    def __init__(
        self, inputs: Inputs, recorder: Recorder, entered: Entered, found: Found, saved: Saved, border: Border
    ) -> None:
        self.inputs, self.recorder, self.entered, self.found = inputs, recorder, entered, found
        self.saved, self.border = saved, border
        self.followed = [(k, t) for k, t in enumerate(found.tensors) if t is not None and t.requires_grad]
        self.made = [r for r in border.results if r.position is not None]
        self.results = [t for _, t in self.followed] + [r.traced for r in self.made]
        self.first_base = len(entered.graph_inputs)
        given = [inputs.edges[i] for i in entered.graph_inputs]
        self.wanted = [(k, e) for k, e in enumerate([*given, *entered.base_edges]) if e is not None]
        arguments = self.first_base + len(entered.bases)
        self.wrappers = [border.arguments[i] for i in border.distinct()]
        self.edges = [(arguments + k, a.edge) for k, a in enumerate(self.wrappers) if a.edge is not None]

    def is_needed(self) -> bool:
        return bool(self.results) and bool(self.wanted or self.edges)

    def record(self) -> tuple[Gradients, list[Any]]:
        recorder, saved = self.recorder, self.saved
        forms, tangents = self.tangents()
        ways = Ways(self.results) if len(self.results) > 1 else None
        reached = ways.to([e for _, e in [*self.wanted, *self.edges]]) if ways else ()
        once = _runs_once(self.results, saved)
        leaves = leaves_in_order([get_gradient_edge(t) for t in self.results], [e for _, e in self.wanted])
        recorder.origin, recorder.backward = None, True
        saved.tangents_of = ways.nodes if ways else {}
        gradients = self.gradients(tangents)
        reads = BackwardReads(self.inputs, recorder, self.entered, self.found, self.border, saved.read)
        reads.check()
        watched_inputs = reads.watched_inputs()
        unreached = self._unreached(reached, gradients, watched_inputs)
        nodes, wrapped_gradients = self._nodes(gradients)
        wrapped_results = self._wrapped_results(forms, reads)
        return Gradients(
            tangents=tuple(k for k, _ in self.followed),
            inputs=tuple(k for k, _ in [*self.wanted, *self.edges]),
            overwritten=reads.overwritten(),
            watched_inputs=watched_inputs,
            watched_results=reads.watched_results(),
            unkept=reads.unkept(),
            lent=reads.lent(),
            bumped=reads.bumped(),
            wrappers=len(self.wrappers),
            wrapped_results=wrapped_results,
            wrapped_gradients=wrapped_gradients,
            watched_wrappers=reads.watched_wrappers(),
            symbols=self._symbols([*wrapped_results, *wrapped_gradients]),
            bases=reads.bases,
            reached=reached,
            unreached=unreached,
            once=once,
            read_for=reads.read_for() if len(self.results) > 1 else {},
            leaves=self._leaves(leaves),
        ), nodes

    def tangents(self) -> tuple[list[Any], list[Any]]:
        """The forms of the tangents of tensor subclasses, and the tangents of all results."""
        alike = [self.found.outputs[k].meta["val"] for k, _ in self.followed]
        with self.recorder, torch.no_grad():
            expected = [like_tangent(r.traced) for r in self.made]
        for wrapper, form in expected:
            alike += form.take(wrapper)
        dense = iter(tangent_placeholders(self.recorder, alike, self.inputs.fake_mode))
        forms = [form for _, form in expected]
        return forms, [next(dense) for _ in self.followed] + [form.put(dense) for form in forms]

    def gradients(
        self, tangents: list[Any], create_graph: bool = False, left: Collection[int] = (), absent: Collection[int] = ()
    ) -> Sequence[torch.Tensor | None]:
        """What autograd gives for `wanted` and `edges`, None at positions `left`, from the tangents but for those at positions `absent`; recorded as
        it runs. Raises `UnsupportedError` where it writes to what others see.
        """
        given_for = [(r, t) for k, (r, t) in enumerate(zip(self.results, tangents, strict=True)) if k not in absent]
        edges = [e for k, (_, e) in enumerate([*self.wanted, *self.edges]) if k not in left]
        kept = _kept(self.recorder, self.inputs, self.entered, self.found, tangents)
        # Anomaly mode looks at values.
        with (
            self.recorder,
            of_gradients(self.inputs.fake_mode.shape_env),
            torch.autograd.set_detect_anomaly(False),
        ):
            results, given_tangents = zip(*given_for, strict=True)
            gradients = own_grad(results, edges, given_tangents, allow_unused=True, create_graph=create_graph)
        _check_unwritten(kept)
        given = iter(gradients)
        return [None if k in left else next(given) for k in range(len(self.wanted) + len(self.edges))]

    def _unreached(
        self, reached: tuple[int, ...], gradients: Sequence[torch.Tensor | None], watched: Container[int]
    ) -> tuple[int, ...]:
        ways = reached
        if not ways and any(g is None for g in gradients):
            ways = Ways(self.results).to([e for _, e in self.wanted])
        # Views made without grad require grad, with no way to anything: where nothing is reached, the inputs make the results require grad.
        return tuple(
            k
            for (k, _), way in zip(self.wanted, ways, strict=False)
            if any(ways) and not way and k < self.first_base and k not in watched
        )

    def _nodes(self, gradients: Sequence[torch.Tensor | None]) -> tuple[list[Any], tuple[WrappedGradient, ...]]:
        """The nodes of the gradients, followed by those that tensor subclasses among them are put together of."""
        recorder = self.recorder
        plain = [None if g is None or is_wrapper(g) else g for g in gradients]
        nodes = [None if g is None else recorder.current(recorder.value(g)) for g in plain]
        wrapped: list[WrappedGradient] = []
        for (k, _), g in zip([*self.wanted, *self.edges], gradients, strict=True):
            if g is not None and is_wrapper(g):
                inside = inner_tensors(g)
                places = tuple(range(len(nodes), len(nodes) + len(inside)))
                wrapped.append(WrappedGradient(k, places, Wrapped.of(g)))
                nodes += [recorder.current(recorder.value(t)) for t in inside]
        return nodes, tuple(wrapped)

    def _wrapped_results(self, forms: Sequence[Any], reads: BackwardReads) -> tuple[WrappedResult, ...]:
        found: list[WrappedResult] = []
        for r, form in zip(self.made, forms, strict=True):
            assert r.made is not None
            watched = any(t in reads for t in inner_tensors(r.traced))
            places = tuple(self.found.meta.output_info[k].value or 0 for k in r.dense)
            found.append(WrappedResult(r.made, places, form, watched))
        return tuple(found)

    def _symbols(self, wrapped: Sequence[WrappedResult | WrappedGradient]) -> tuple[tuple[str, int, str], ...]:
        shapes: set[Any] = set()
        shapes = shapes.union(*(w.made.symbols() for w in wrapped))
        names = {f"arg{i}": k for k, i in enumerate(self.entered.graph_inputs)}
        return tuple((s, names[node], call) for s, node, call in read_symbols(shapes, self.recorder.symbols))

    def _leaves(self, order: Sequence[int]) -> tuple[int, ...]:
        if len(order) < 2:
            return ()
        return tuple(self.wanted[k][0] for k in order if self.wanted[k][0] < self.first_base)


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


def tangent_placeholders(
    recorder: Recorder, results: Sequence[torch.Tensor], fake_mode: Any, name: str = "tangent"
) -> list[torch.Tensor]:
    """Placeholders after those that there are, laid out as `results` are, where those are dense (row-major for sizes known only later)."""
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
            last = graph.placeholder(f"{name}{k}")
        last.meta |= {"val": tangent, "tangent": True, "backward": True}
        recorder.regions.add(tangent, last)
        tangents.append(tangent)
    return tangents
