"""What the recorded program did to its inputs and what its outputs are, told storage by storage, decided by the generated tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ....errors import UnsupportedError
from ....generated.dispatch_tables import ROLES, mutation_type, output_type
from ....generated.schemas import (
    BaseInfo,
    InputAliasInfo,
    OutputAliasInfo,
    OutputType,
    Place,
    ViewAndMutationMeta,
    ViewHistory,
)
from ...torch_compat import made_without_grad, python_source, refuses_writes, shares_version
from ..record.recorder import Recorder
from ..storage.disjoint import disjoint_inputs, static_storages
from ..storage.inputs import Inputs, is_static
from ..storage.merge import Entered
from ..storage.overlap import begins_inside, is_dense
from ..storage.regions import Layout, Value
from ..symbols.numbers import limited_numbers, literal
from .history import (
    check_given_up,
    check_inference,
    check_siblings,
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
    return _Analysis(inputs, recorder, entered, result).run(autocast)


@dataclass
class _Analysis:
    inputs: Inputs
    recorder: Recorder
    entered: Entered
    result: list[Any]
    outputs: list[Any] = field(default_factory=list)
    tensors: list[torch.Tensor | None] = field(default_factory=list)
    symbols: dict[str, str] = field(default_factory=dict)
    bases: dict[int, int] = field(default_factory=dict)
    """Region of an intermediate → graph output that is its base."""
    shown: dict[int, int] = field(default_factory=dict)
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    """Region of an intermediate → the result that is its base, though a part of the program saw the region before in another shape."""

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
        output_info = self._outputs(everything)
        storage_from = {i: len(self.result) + k for k, i in enumerate(given_storage)}
        input_info = tuple(self._input(i, updated, bases, storage_from) for i in range(len(inputs.fakes)))
        meta = ViewAndMutationMeta(
            input_info=input_info,
            output_info=tuple(output_info),
            num_user_outputs=len(self.result),
            bases=tuple(bases),
            graph_inputs=tuple(self.entered.graph_inputs),
            disjoint=disjoint_inputs(inputs, input_info, self._number),  # reads sizes: outputs, not counted yet
            numbers=limited_numbers(self.recorder.graph.nodes, self.recorder.symbols),
            static_storages=static_storages(inputs, input_info),
            num_outputs=len(self.outputs),
            symbols=tuple(self.symbols.items()),
            autocast=autocast,
        )
        return Found(meta, self.outputs, self.tensors, self.shown)

    # --- inputs

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
        return self._return(node, self._first_layout(i) if self._tracked(i) else None)

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
        updated = self._return(self.recorder.current(value), base if tracked else None) if written else None
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
            place_after=self._place(after, layout) if metadata else None,
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

    # --- outputs

    def _outputs(self, results: list[Any]) -> list[OutputAliasInfo]:
        values = [self.recorder.value(t) if isinstance(t, torch.Tensor) else None for t in results]
        first_with: dict[int, int] = {}
        input_of = self._input_objects()
        members: dict[int, list[int]] = {}
        for k, (t, value) in enumerate(zip(results, values, strict=True)):
            # An input that is returned is no alias of anything; one that gets another storage is looked at for that storage.
            if value is not None and id(t) not in first_with and (k >= len(self.result) or id(t) not in input_of):
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
            replaced = k >= len(self.result)
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
        return t._is_view() and t.requires_grad and not self._followed(t)

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
            position = self.bases[region.key] if region.key in self.bases else self._return(self._owned(value), t)
            if is_whole(value) or t is self.copies.get(region.key):
                self.bases[region.key] = position
            self.shown[position] = region.key
            many = self._followed(t) and one_of_many(value)
            if self._followed(t) and not many and t._is_view() and made_without_grad(t):
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
                self.bases[region.key] = self._return(self._owned(whole), root)
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
        followed = source_tensor is not None and self._followed(source_tensor)
        gradient = self._followed(t)
        if gradient and not (followed and value.layout.dtype.to_real() is origin.dtype.to_real()):
            raise UnsupportedError(
                "an output requires grad, but its gradient does not flow by way of what it is an alias of"
            )
        if gradient:
            check_views(self.recorder, value, origin, t, source_tensor, self._followed)
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
            place=self._place(value.layout, origin),
            requires_dtype_view=value.layout.dtype != origin.dtype,
            relaid=relaid,
            conjugated=lazy,
            history=history,
        )

    def _number_output(self, value: Any) -> OutputAliasInfo:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            node = self.recorder.symbols.node(value)
            if isinstance(node, fx.Node):
                return OutputAliasInfo(OutputType.NOT_TENSOR, value=self._return(node))
            value = node
        if value is not None and not isinstance(value, (bool, int, float, complex, str)):
            raise UnsupportedError(
                f"an output is a {type(value).__name__}; only tensors, numbers, text and None can be returned"
            )
        return OutputAliasInfo(OutputType.NOT_TENSOR, constant=literal(value))

    def _owned(self, value: Value) -> fx.Node:
        """The node of a fresh output. Constants of the program are copied, so that a caller cannot write to them; strides of
        dimensions of size one, about which writes do not care, become eager's.
        """
        recorder = self.recorder
        node = recorder.current(value)
        if value.region.constant and value.region.version == 0:
            node = recorder.dispatch_node(ROLES["clone"], (node,))
        if Layout.of(node.meta["val"]).strides_key() != value.layout.strides_key():
            node = recorder.dispatch_node(ROLES["as_strided"], (node, value.layout.size, value.layout.stride))
        return node

    def _input_region(self, value: Value) -> bool:
        return any(r.inputs for r in self.recorder.regions.by_storage.get(value.region.key, ()))

    def _input_objects(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for i, t in enumerate(self.inputs.fakes):
            if isinstance(t, torch.Tensor):
                found.setdefault(id(t), i)
        return found

    def _followed(self, t: torch.Tensor) -> bool:
        """Whether autograd knows how `t` was computed, or that it is an input's leaf: not so for a view that was made under `no_grad`,
        although it says that it requires grad because its base does.
        """
        if not t.requires_grad:
            return False
        if t.grad_fn is not None or any(t is known for known in self.inputs.fakes):
            return True
        if t._is_view():
            return False
        raise UnsupportedError("an output is a leaf that the program itself made (requires_grad_()); make it outside")

    # --- graph outputs and sizes

    def _return(self, node: Any, tensor: torch.Tensor | None = None) -> int:
        self.outputs.append(node)
        self.tensors.append(tensor if tensor is not None and self._followed(tensor) else None)
        return len(self.outputs) - 1

    def _place(self, layout: Layout, origin: Layout) -> Place:
        """`layout` counted from the first element of `origin`, which may have another dtype."""
        offset = layout.offset - origin.offset
        if layout.dtype.itemsize != origin.dtype.itemsize:
            first = origin.offset * origin.dtype.itemsize
            if layout.plain and origin.plain and first % layout.dtype.itemsize:
                raise UnsupportedError(
                    f"an output views {origin.dtype} elements as {layout.dtype} at an offset between elements"
                )
            offset = layout.offset - first // layout.dtype.itemsize
        size = tuple(self._number(n) for n in layout.size)
        stride = tuple(self._number(n) for n in layout.stride)
        return Place(str(layout.dtype), size, stride, self._number(offset))

    def _number(self, n: Any) -> int | str:
        """A size as it is written in the wrapper; its symbols are read from inputs, or returned by the graph."""
        if not isinstance(n, torch.SymInt):
            return int(n)
        expr = n.node.expr
        if expr.is_Integer:
            return int(expr)
        for symbol in sorted(expr.free_symbols, key=str):
            self._read_symbol(symbol)
        return python_source(expr)

    def _read_symbol(self, symbol: Any) -> None:
        if str(symbol) in self.symbols:
            return
        source = self.recorder.symbols.read_from_input(symbol)
        self.symbols[str(symbol)] = source or f"{{out{self._return(self.recorder.symbols.of_symbol(symbol))}}}"
