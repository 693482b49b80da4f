"""What the recorded program did to its inputs and what its outputs are, told storage by storage, decided by the generated tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ....errors import UnsupportedError
from ....generated.dispatch_tables import ROLES, mutation_type
from ....generated.schemas import (
    BaseInfo,
    InputAliasInfo,
    ViewAndMutationMeta,
)
from ...torch_compat import refuses_writes, shares_version
from ..record.recorder import Recorder
from ..storage.disjoint import disjoint_inputs, static_storages
from ..storage.inputs import Inputs, is_static
from ..storage.merge import Entered
from ..storage.overlap import is_dense
from ..storage.regions import Layout, Value
from ..symbols.numbers import limited_numbers
from .graph_outputs import GraphOutputs
from .history import (
    check_siblings,
)
from .results import Results


@dataclass
class Found:
    """The metadata; the nodes (or numbers) that the graph returns, and with each the traced tensor whose gradient is
    its own (None where autograd does not follow it). `shown`: the outputs that a caller gets hold of, each with the key of its storage.
    """

    meta: ViewAndMutationMeta
    outputs: list[Any]
    tensors: list[torch.Tensor | None]
    shown: dict[int, int]


def analyze(inputs: Inputs, recorder: Recorder, entered: Entered, result: list[Any], autocast: bool) -> Found:
    """Classify every input and output after the run. `result` is the program's flat result. Raises
    `UnsupportedError`.
    """
    return _Analysis(inputs, recorder, entered, result, GraphOutputs(inputs, recorder)).run(autocast)


@dataclass
class _Analysis:
    inputs: Inputs
    recorder: Recorder
    entered: Entered
    result: list[Any]
    graph: GraphOutputs

    def run(self, autocast: bool) -> Found:
        inputs = self.inputs
        self._check_storages()
        updated = {
            i: self._updated(i, value) for i, value in enumerate(self.entered.values) if self._written_alone(i, value)
        }
        bases = [self._base(k, info, value) for k, (info, value) in enumerate(self.entered.bases)]
        given_storage = [i for i, t in enumerate(inputs.fakes) if self._storage_replaced(i, t)]
        for i in given_storage:
            if inputs.training or any(self._views_new_storage(t, i) for t in self.result):
                raise UnsupportedError(f"input {i} gets another storage (set_), and autograd or an output looks at it")
        everything = [*self.result, *(inputs.fakes[i] for i in given_storage)]
        results = Results(inputs, self.recorder, self.entered, self.graph, len(self.result))
        output_info = results.run(everything)
        storage_from = {i: len(self.result) + k for k, i in enumerate(given_storage)}
        input_info = tuple(self._input(i, updated, bases, storage_from) for i in range(len(inputs.fakes)))
        meta = ViewAndMutationMeta(
            input_info=input_info,
            output_info=tuple(output_info),
            num_user_outputs=len(self.result),
            bases=tuple(bases),
            graph_inputs=tuple(self.entered.graph_inputs),
            disjoint=disjoint_inputs(inputs, input_info, self.graph.number),  # reads sizes: outputs, not counted yet
            numbers=limited_numbers(self.recorder.graph.nodes, self.recorder.symbols),
            static_storages=static_storages(inputs, input_info),
            num_outputs=len(self.graph.nodes),
            symbols=tuple(self.graph.symbols.items()),
            autocast=autocast,
        )
        return Found(meta, self.graph.nodes, self.graph.tensors, results.shown)

    def _check_storages(self) -> None:
        tensors = [(f"input {i}", v) for i, v in enumerate(self.entered.values) if v is not None]
        tensors += [
            (f"output {k}", self.recorder.value(t)) for k, t in enumerate(self.result) if isinstance(t, torch.Tensor)
        ]
        for name, value in tensors:
            if value.region.resized:
                raise UnsupportedError(
                    f"the storage of {name} is resized (untyped_storage().resize_); resize the tensor"
                )

    def _views_new_storage(self, t: Any, i: int) -> bool:
        own = self.inputs.fakes[i]
        if not isinstance(t, torch.Tensor) or t is own:
            return False
        if not torch.is_inference_mode_enabled() and not shares_version(own, t):  # there, views are told by nothing
            return False
        before = self.entered.values[i]
        return before is not None and self.recorder.value(t).region.key != before.region.key

    def _written_alone(self, i: int, value: Value | None) -> bool:
        if value is None or self.inputs.same_as[i] is not None or value.parent is not None:
            return False
        return value.region.version > 0

    def _updated(self, i: int, value: Value | None) -> int:
        assert value is not None
        node = self.recorder.current(value)
        if not is_dense(value.layout):  # a graph returns tensors without gaps; these elements are copied anyway
            node = self.recorder.dispatch_node(ROLES["clone"], (node,), {"memory_format": torch.contiguous_format})
        return self.graph.add(node, self._first_layout(i) if self._tracked(i) else None)

    def _first_layout(self, i: int) -> torch.Tensor:
        """Input `i` laid out as it was when the program began, which is how the graph returns its elements."""
        t, layout = self.inputs.fakes[i], self.inputs.layouts[i]
        assert layout is not None
        if not t.requires_grad or Layout.of(t).key() == layout.key():
            return t
        with self.recorder, torch.enable_grad():
            return t.as_strided(layout.size, layout.stride, layout.offset)

    def _tracked(self, i: int) -> bool:
        """Whether autograd follows what the program wrote to input `i`."""
        t, edge = self.inputs.fakes[i], self.inputs.edges[i] if self.inputs.edges else None
        return edge is None or (t.grad_fn is not edge.node and t.grad_fn is not None)

    def _base(self, k: int, info: BaseInfo, value: Value) -> BaseInfo:
        if not info.followed and any(
            self.inputs.fakes[i].requires_grad != self.inputs.requires_grad[i] for i in info.members
        ):
            raise UnsupportedError(
                f"inputs {list(info.members)} share elements, one of them is written and requires grad then, and they are not ordinary "
                "views of one tensor"
            )
        base, edge = self.entered.base_tensors[k], self.entered.base_edges[k]
        seen = not info.followed or any(self.inputs.version_moved(i) for i in info.members)
        tracked = edge is None or (base.grad_fn is not edge.node and base.grad_fn is not None)
        written = bool(value.region.version)
        if info.followed and not written and any(self.inputs.version_moved(i) for i in info.members):
            raise UnsupportedError(
                f"inputs {list(info.members)} share memory, the backward needs it, and an operator changed only the layout of one"
            )
        updated = self.graph.add(self.recorder.current(value), base if tracked else None) if written else None
        return replace(info, updated=updated, seen=seen, tracked=tracked or not seen or not written)

    def _storage_replaced(self, i: int, t: Any) -> bool:
        before = self.entered.values[i]
        if before is None or self.inputs.same_as[i] is not None:
            return False
        return self.recorder.value(t).region.key != before.region.key

    def _input(
        self, i: int, updated: dict[int, int], bases: list[BaseInfo], storage_from: dict[int, int]
    ) -> InputAliasInfo:
        t, before, layout = self.inputs.fakes[i], self.entered.values[i], self.inputs.layouts[i]
        same = self.inputs.same_as[i]
        static = is_static(self.inputs.given[i])
        self._check_history(
            i, i in updated or any(b.followed and b.updated is not None and i in b.members for b in bases)
        )
        if before is None or layout is None or same is not None:
            base = self._base_of(same if same is not None else i)
            return InputAliasInfo(mutation_type(False, False, False, False), same_as=same, static=static, base=base)
        base = self._base_of(i)
        moved = self.inputs.version_moved(i)
        data = i in updated or (base is not None and bases[base].updated is not None)
        if (data or moved) and self.inputs.given[i].is_inference() and not torch.is_inference_mode_enabled():
            raise UnsupportedError(f"input {i} is an inference tensor and is written outside of inference mode")
        given = self.inputs.given[i]
        replaced = i in storage_from
        after = Layout.of(t)
        metadata = not replaced and after.key() != layout.key()
        if (i in updated or moved or replaced or metadata) and self._guarded_view(given, replaced or metadata):
            raise UnsupportedError(f"input {i} is a view in a storage that autograd follows, and is changed")
        if replaced and i in self.inputs.same_as and any(e is not None for e in self.inputs.edges):
            raise UnsupportedError(f"input {i}, passed twice, gets another storage while autograd follows the program")
        return InputAliasInfo(
            mutation_type=mutation_type(data, metadata, replaced, version=base is None and moved),
            updated=updated.get(i),
            place_after=self.graph.place(after, layout) if metadata else None,
            storage_from=storage_from.get(i),
            base=base,
            static=static,
            tracked=not (i in updated or metadata) or (data and not moved) or self._tracked(i),
            seen=not data or moved,
        )

    @staticmethod
    def _guarded_view(given: torch.Tensor, moved: bool) -> bool:
        """Whether `given` is a view that autograd refuses writes to, or (`moved`) another layout of; eager knows which."""
        base = given._base
        if base is None or not (given.requires_grad or base.requires_grad):
            return False
        return moved or given.is_leaf or base.is_leaf or refuses_writes(given)

    def _check_history(self, i: int, written: bool) -> None:
        """Raises when the program told autograd to follow an input, or to stop to."""
        t, before = self.inputs.fakes[i], self.inputs.requires_grad[i]
        if isinstance(t, torch.Tensor) and t.requires_grad != before:
            if not t.requires_grad or t.is_leaf or not written:
                raise UnsupportedError(f"input {i} is told to {'stop to ' if before else ''}require grad")
            check_siblings(self.inputs, i)

    def _base_of(self, i: int) -> int | None:
        return next((k for k, (info, _) in enumerate(self.entered.bases) if i in info.members), None)
