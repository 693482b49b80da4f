"""What the results of a recorded program are: fresh tensors, inputs, or aliases of either."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ....errors import UnsupportedError
from ....generated.dispatch_tables import output_type
from ....generated.schemas import OutputAliasInfo, OutputType, ViewHistory
from ...torch_compat import made_without_grad
from ..record.recorder import Recorder
from ..storage.inputs import Inputs
from ..storage.merge import Entered
from ..storage.overlap import begins_inside, is_dense
from ..storage.regions import Layout, Value
from ..symbols.numbers import literal
from .graph_outputs import GraphOutputs
from .history import (
    check_given_up,
    check_inference,
    check_views,
    history_of,
    is_whole,
    may_be_base,
    one_of_many,
    own_base,
    relaid_whole,
)

_ALIASES = (
    OutputType.ALIAS_OF_INTERMEDIATE,
    OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT,
    OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT,
)


@dataclass
class Results:
    """`count`: how many results the program has; what is asked about after these are inputs that got another storage."""

    inputs: Inputs
    recorder: Recorder
    entered: Entered
    graph: GraphOutputs
    count: int
    bases: dict[int, int] = field(default_factory=dict)
    """Region of an intermediate → graph output that is its base."""
    shown: dict[int, int] = field(default_factory=dict)
    """Graph output that a caller gets hold of → the key of its storage."""
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    """Region of an intermediate → the result that is its base, though a part of the program saw the region before in another shape."""

    def run(self, results: list[Any]) -> list[OutputAliasInfo]:
        values = [self.recorder.value(t) if isinstance(t, torch.Tensor) else None for t in results]
        first_with: dict[int, int] = {}
        input_of = self._input_objects()
        members: dict[int, list[int]] = {}
        for k, (t, value) in enumerate(zip(results, values, strict=True)):
            # An input that is returned is no alias of anything; one that gets another storage is looked at for that storage.
            if value is not None and id(t) not in first_with and (k >= self.count or id(t) not in input_of):
                first_with[id(t)] = k
                if not self._input_region(value):
                    members.setdefault(value.region.key, []).append(k)
        whole = {
            key: next((k for k in ks if may_be_base(self.recorder, results[k], values[k])), None)
            for key, ks in members.items()
        }
        self.copies = {key: results[k] for key, k in whole.items() if k is not None and not is_whole(values[k])}
        out: list[OutputAliasInfo] = []
        for k, (t, value) in enumerate(zip(results, values, strict=True)):
            if value is None:
                out.append(self._number_output(t))
                continue
            region = value.region
            in_input = self._input_region(value)
            # Only a view of its base has strides with gaps or repetition, or an offset, as eager's result has.
            alone = is_dense(value.layout) and not begins_inside(value.layout, value.root.layout)
            shared = not in_input and (len(members.get(region.key, ())) > 1 or self._made_without_grad(t) or not alone)
            base = whole.get(region.key) if shared else None
            replaced = k >= self.count
            kind = output_type(
                tensor=True,
                seen=first_with.get(id(t), k) != k,
                input_object=id(t) in input_of and not replaced,
                input_storage=in_input,
                shared=shared,
                whole=base == k,
                base_is_output=base is not None and base != k,
                base_saved=shared and base is None and region.key in self.bases,
            )
            source = (
                first_with[id(t)]
                if kind is OutputType.SAME_AS_OUTPUT
                else input_of.get(id(t))
                if kind is OutputType.IS_INPUT
                else None
            )
            out.append(self._tensor_output(kind, value, source, t))
        return out

    def _made_without_grad(self, t: torch.Tensor) -> bool:
        """Whether `t` is a view, made under `no_grad`, of a tensor that autograd follows: it needs that one as its base."""
        return t._is_view() and t.requires_grad and not self.graph.is_followed(t)

    def _tensor_output(self, kind: OutputType, value: Value, source: int | None, t: torch.Tensor) -> OutputAliasInfo:
        region = value.region
        if kind is not OutputType.IS_INPUT:
            check_inference(t)
        if kind is OutputType.NON_ALIAS:
            lazy = value.layout.conj and not value.layout.neg
            if lazy:  # the graph gives the elements that memory holds
                with self.recorder, torch.enable_grad():
                    t = t.conj()
                value = self.recorder.value(t)
            # An alias that came before it among the outputs may have asked for it already.
            position = (
                self.bases[region.key] if region.key in self.bases else self.graph.add(self.graph.owned(value), t)
            )
            if is_whole(value) or t is self.copies.get(region.key):
                self.bases[region.key] = position
            self.shown[position] = region.key
            many = self.graph.is_followed(t) and one_of_many(value)
            if self.graph.is_followed(t) and not many and t._is_view() and made_without_grad(t):
                raise UnsupportedError(
                    "an output is a view of a view that was made under no_grad, which ends with its base"
                )
            return OutputAliasInfo(
                kind,
                value=position,
                conjugated=lazy,
                history=ViewHistory.ONE_OF_MANY if many else ViewHistory.FOLLOWED,
            )
        if kind is OutputType.ALIAS_OF_INPUT:
            source = self._source(value)
            check_inference(self.inputs.given[source])
            origin = self.inputs.layouts[source]
            assert origin is not None
            if self.inputs.given[source].requires_grad and id(self.inputs.fakes[source]) in self.recorder.relaid:
                raise UnsupportedError(
                    f"an output is a view of input {source}, which requires grad and changes its layout"
                )
            check_given_up(self.inputs, value, source, t)
            return self._alias(kind, value, source, origin, t, self.inputs.fakes[source])
        if kind in _ALIASES:
            root, whole = self._root_tensor(value, t), value.root
            chosen = self.copies.get(region.key, root if region.key in self.bases else None)
            if (own := own_base(self.recorder, t, chosen)) is not None:
                self.copies[region.key] = own
            if region.key in self.copies:
                root, whole = self.copies[region.key], self.recorder.value(self.copies[region.key])
            if region.key not in self.bases:
                self.bases[region.key] = self.graph.add(self.graph.owned(whole), root)
                self.shown[self.bases[region.key]] = region.key
            return self._alias(kind, value, self.bases[region.key], whole.layout, t, root)
        return OutputAliasInfo(kind, source=source)

    def _source(self, value: Value) -> int:
        """The input that an alias is regenerated from: of merged ones that which it was made of, for gradients reach no others by it."""
        region = value.region
        sources = region.inputs or self.recorder.regions.by_storage[region.key][0].inputs
        above: Value | None = value
        while above is not None:
            for i in sources:
                if self.entered.values[i] is above and self._on_element(i, value.layout):
                    return i
            above = above.above
        return min(sources, key=lambda i: self.inputs.fakes[i].dtype != value.layout.dtype)

    def _on_element(self, i: int, layout: Layout) -> bool:
        """Whether input `i` begins where an element of `layout` could."""
        origin = self.inputs.layouts[i]
        assert origin is not None
        return not origin.plain or origin.offset * origin.dtype.itemsize % layout.dtype.itemsize == 0

    def _root_tensor(self, value: Value, t: torch.Tensor) -> torch.Tensor | None:
        """The traced tensor that is the whole of the region that `t` lies in."""
        root = value.root
        for known, v in self.recorder.regions.values.values():
            if v is root:
                return known
        relaid = relaid_whole(self.recorder, value.region) if self.inputs.training else None
        if relaid is not None:
            return self._relaid_back(relaid, root.layout)
        return t._base if t._is_view() else None

    def _relaid_back(self, t: torch.Tensor, layout: Layout) -> torch.Tensor:
        with self.recorder, torch.enable_grad():
            return t.as_strided(layout.size, layout.stride, layout.offset)

    def _alias(
        self,
        kind: OutputType,
        value: Value,
        source: int,
        origin: Layout,
        t: torch.Tensor,
        source_tensor: torch.Tensor | None,
    ) -> OutputAliasInfo:
        followed = source_tensor is not None and self.graph.is_followed(source_tensor)
        gradient = self.graph.is_followed(t)
        if gradient and not (followed and value.layout.dtype.to_real() is origin.dtype.to_real()):
            raise UnsupportedError(
                "an output requires grad, but its gradient does not flow by way of what it is an alias of"
            )
        if gradient:
            check_views(self.recorder, value, origin, t, source_tensor, self.graph.is_followed)
        relaid = kind in _ALIASES and value.layout.dtype == origin.dtype
        relaid = relaid and relaid_whole(self.recorder, value.region) is t
        history = ViewHistory.FOLLOWED
        if not relaid:
            history = history_of(self.inputs, t, value, followed, gradient, source_tensor)
        lazy = value.layout.conj
        if value.layout.neg or origin.conj or origin.neg or (lazy and (relaid or history is not ViewHistory.FOLLOWED)):
            raise UnsupportedError(
                "an output is a lazily conjugated or negated view of another tensor; call resolve_conj() on it"
            )
        return OutputAliasInfo(
            kind,
            source=source,
            place=self.graph.place(value.layout, origin),
            requires_dtype_view=value.layout.dtype != origin.dtype,
            relaid=relaid,
            conjugated=lazy,
            history=history,
        )

    def _number_output(self, value: Any) -> OutputAliasInfo:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            node = self.recorder.symbols.node(value)
            if isinstance(node, fx.Node):
                return OutputAliasInfo(OutputType.NOT_TENSOR, value=self.graph.add(node))
            value = node
        if value is not None and not isinstance(value, (bool, int, float, complex, str)):
            raise UnsupportedError(
                f"an output is a {type(value).__name__}; only tensors, numbers, text and None can be returned"
            )
        return OutputAliasInfo(OutputType.NOT_TENSOR, constant=literal(value))

    def _input_region(self, value: Value) -> bool:
        return any(r.inputs for r in self.recorder.regions.by_storage.get(value.region.key, ()))

    def _input_objects(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for i, t in enumerate(self.inputs.fakes):
            if isinstance(t, torch.Tensor):
                found.setdefault(id(t), i)
        return found
