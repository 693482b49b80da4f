"""Operators that write, recorded as functional ones: a write makes a new node, which is put back into all that the written tensor is a view of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import increment_version

from ....errors import UnsupportedError
from ....generated.dispatch_tables import INVERSES, ROLES
from ...torch_compat import TorchDispatchMode
from ..operators.corrections import refusal, run_fake, run_writing
from ..operators.schema import Functional, OpInfo, functional_arguments, op_info, tensors_of
from ..storage.overlap import is_dense, is_row_major, overlaps_itself
from ..storage.regions import Value, same_strides
from .order import check_order, memory_order, write_permuted
from .restart import Restart
from .writer import GraphWriter


class WriteRecorder(GraphWriter, TorchDispatchMode):
    """`overlaps(i)` gives the inputs that share elements with input i (with i), asked when input i is written; `training`: autograd follows the
    program; `handlers` (the module) record writes that have no functional overload.
    """

    def __init__(self, fake_mode: Any, overlaps: Callable[[int], frozenset[int]], handlers: Any) -> None:
        super().__init__(fake_mode)
        self.handlers = handlers
        self.written_storages: set[int] = set()
        self.training = False
        self._overlaps = overlaps

    def check_refusal(self, op: Any, args: Any, kwargs: Any) -> None:
        if why := refusal(op, args, kwargs):
            raise UnsupportedError(f"{why}{self.where()}")

    def write_op(self, info: OpInfo, types: Any, args: Any, kwargs: Any) -> Any:
        written = [t for k in info.written for t in tensors_of(info.argument(k, args, kwargs))]
        for t in written:
            self._may_write(self.value(t))
        check_order(info, args, kwargs, self.value, self.where)
        if (form := info.functional) is None:
            return self.handlers.write(self, info, types, args, kwargs)
        f_args, f_kwargs = functional_arguments(info, form, args, kwargs)
        self.check_refusal(form.op, f_args, f_kwargs)
        node_args, node_kwargs = self.nodes(f_args), self.nodes(f_kwargs)
        result = self.eager_results(form.op, types, self.fakes(node_args), self.fakes(node_kwargs))
        self._check_types(info, form, result, args, kwargs)
        if (order := memory_order(info, args, result)) is not None:
            return write_permuted(self, info, order, args, kwargs)
        out = run_writing(self.fake_mode, info.op, types, args, kwargs, written if form.drops_out else [])
        for k in info.written:
            if isinstance(lists := info.argument(k, args, kwargs), (tuple, list)):
                increment_version(lists)  # autograd does so for single tensors only when it sees fake ones
        node = self.call(form.op, node_args, node_kwargs, result, keep=info.keep and bool(op_info(form.op).keep))
        self._put_results(info, form, node, result, args, kwargs)
        return self._returns(info, form, node, out, args, kwargs)

    def overwrite(
        self, info: OpInfo, types: Any, args: Any, kwargs: Any, targets: list[torch.Tensor], values: list[torch.Tensor]
    ) -> None:
        """A writing operator whose new contents are recorded already: `values`, for the written tensors `targets`."""
        for t in targets:
            self._may_write(self.value(t))
        check_order(info, args, kwargs, self.value, self.where)
        run_fake(self.fake_mode, info.op, types, args, kwargs)
        for t, value in zip(targets, values, strict=True):
            self.write(t, self.current(self.value(value)))

    def _check_types(self, info: OpInfo, form: Functional, result: Any, args: Any, kwargs: Any) -> None:
        """Leaves to eager what it may refuse: results of a type that cannot be cast to that of the tensor written to, which fake tensors do
        not always say. Into an `out=` of another type some operators compute in that, others refuse it.
        """
        for k, position in enumerate(info.written):
            new = result if isinstance(result, torch.Tensor) else result[form.results[k]]
            target = info.argument(position, args, kwargs)
            for t, r in zip(tensors_of(target), tensors_of(new) or tensors_of(result), strict=False):
                if not torch.can_cast(r.dtype, t.dtype) or (form.drops_out and r.dtype != t.dtype):
                    raise UnsupportedError(f"{info.op} puts {r.dtype} into {t.dtype}{self.where()}")

    def _put_results(self, info: OpInfo, form: Functional, node: fx.Node, result: Any, args: Any, kwargs: Any) -> None:
        for k, position in enumerate(info.written):
            target = info.argument(position, args, kwargs)
            if target is None:
                continue
            new = (
                node if isinstance(result, torch.Tensor) else self._item(node, form.results[k], result[form.results[k]])
            )
            if isinstance(target, torch.Tensor):
                self.write(target, new)
                continue
            # A list argument: when it is all that the overload returns, the list itself is the result.
            flat = not isinstance(result[form.results[k]], (tuple, list))
            for j, t in enumerate(target):
                self.write(
                    t, self._item(node, j, result[j]) if flat else self._item(new, j, result[form.results[k]][j])
                )

    def _returns(self, info: OpInfo, form: Functional, node: fx.Node, out: Any, args: Any, kwargs: Any) -> Any:
        if out is None or not info.aliased:
            return out
        alone = isinstance(out, torch.Tensor)
        values, fresh = [], 0
        for position, t in zip(info.aliased, (out,) if alone else out, strict=True):
            if position is not None:
                values.append(info.argument(position, args, kwargs))
                continue
            if isinstance(t, torch.Tensor):
                self.regions.add(t, self._item(node, form.kept[fresh], t))
            fresh += 1
            values.append(t)
        if alone:
            return values[0]
        return type(out)(values) if type(out) in (tuple, list) else tuple(values)

    def _may_write(self, value: Value) -> None:
        region = value.region
        if region.inputs:
            merged = self._overlaps(region.inputs[0]) if len(region.inputs) == 1 else frozenset()
            if len(merged) > 1:
                raise Restart(merge=merged)
            if region.loose:
                raise UnsupportedError(f"a write{self.where()} to an input of which a view reaches outside")
        if overlaps_itself(value.layout):
            raise UnsupportedError(f"a write{self.where()} to a tensor whose elements share memory ({value.layout})")
        if self.training and torch.is_grad_enabled() and value.root.layout.offset != 0 and value.strided:
            # For fake tensors autograd replays the view on a gradient, with the offset that it has in the input's storage.
            raise UnsupportedError(
                f"a write{self.where()} through as_strided of an input that begins inside its storage"
            )

    def write(self, t: torch.Tensor, new: fx.Node) -> None:
        """The contents of `t` are now `new`: convert it to the dtype of `t`, and put it into all that `t` is a view
        of.
        """
        value = self.value(t)
        region = value.region
        self.written_storages.add(region.key)
        if self.training and not region.version and not region.inputs:
            self.refuse_views(value)
        self.current(value)
        if new.meta["val"].dtype != t.dtype:
            new = self.dispatch_node(ROLES["cast"], (new,), {"dtype": t.dtype})
        if t.shape != value.layout.size:
            self._resized_out(t, value, new)
            return
        if new.meta["val"].shape != t.shape:
            raise UnsupportedError(f"the value written to {value.layout}{self.where()} has another shape")
        region.version += 1
        region.bumps += 1
        while True:
            old = value.node
            faithful = same_strides(new.meta["val"], old.meta["val"])
            parent = value.parent
            if parent is None and not faithful:
                new, faithful = self.dispatch_node(ROLES["copy"], (old, new)), True
            value.node, value.version = new, region.version if faithful else -1
            if parent is None:
                return
            region.version -= 1  # the parent's contents before this write
            before = self.current(parent)
            region.version += 1
            new, parent = self._put_back(value, parent, before, new)
            value = parent

    def _put_back(self, value: Value, parent: Value, before: fx.Node, new: fx.Node) -> tuple[fx.Node, Value]:
        step = value.step
        if step is None:
            return new, parent
        if value.written is not None and value.written[1] is before:
            before = value.written[0]  # this view was the last to be written: all that it wrote is written over
        inverse = INVERSES.get(step.op)
        if inverse is None or overlaps_itself(parent.layout):
            return self._put_back_strided(value, new)
        args = list(step.args)
        args[step.position] = before
        after = inverse(self, before, new, step.index, *args, **step.kwargs)
        value.written = (before, after)
        return after, parent

    def _put_back_strided(self, value: Value, new: fx.Node) -> tuple[fx.Node, Value]:
        root = value.root
        layout = value.layout
        # The operator asks for contiguous memory where autograd follows it.
        known = is_row_major(root.layout) or (root.layout.plain and is_dense(root.layout))
        if layout.dtype != root.layout.dtype or not known:
            raise UnsupportedError(f"a write{self.where()} to {layout}, a view of {root.layout}, cannot be put back")
        region = value.region
        region.version -= 1
        before = self.current(root)
        region.version += 1
        offset = layout.offset - root.layout.offset + before.meta["val"].storage_offset()
        after = self.dispatch_node(ROLES["as_strided_scatter"], (before, new, layout.size, layout.stride, offset))
        return after, root

    def _resized_out(self, t: torch.Tensor, value: Value, new: fx.Node) -> None:
        """An `out=` tensor that eager resized: a fresh one, unless somebody else looks at its storage."""
        region = value.region
        others = [v for o, v in self.regions.values.values() if v.region is region and o is not t]
        if region.inputs or any(0 not in v.layout.size for v in others):
            raise UnsupportedError(
                f"out= resizes an input, or a tensor that has views{self.where()}; pass one of the right shape"
            )
        self.regions.by_storage.pop(region.key)
        self.regions.add(t, new)
