"""The recorder: a dispatch mode that runs a program on fake tensors as eager would, and writes down its functional graph meanwhile.

Every operator below autograd comes by here once. The fake tensors live through the program's real in-place operations and views, so sizes,
strides, storage sharing and errors are eager's own; the graph is made functional while it is written: each tensor object has a node that holds
its present contents (`regions.py`), a write makes a new node and puts it back into the region that the tensor is a view of, and other views of
that region are made again from it when they are next used.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

from ....errors import UnsupportedError
from ....generated.decompositions import DECOMPOSITIONS
from ....generated.dispatch_tables import ROLES
from ...torch_compat import is_wrapper_type
from ..operators.schema import OpInfo, op_info, view_of
from ..storage.overlap import covers, inside, is_dense
from ..storage.regions import Layout, Step, Value
from .restart import Restart
from .writes import WriteRecorder


class Recorder(WriteRecorder):
    """Records into `graph`. `origin` is the node of the traced program that runs now; `frozen` are inputs that eager refuses to change at all;
    `expects_no_grad` while a program runs that must not turn grad mode on; `relaid` are ids of tensor objects that an operator which changes
    metadata ran on; `handlers` (the module) record calls that run functions of the program, too.
    """

    supports_higher_order_operators = True
    draws: Any = None
    """Makes random operators of seeded ones (`Draws`); None records them as they are."""

    def __init__(self, fake_mode: Any, overlaps: Callable[[int], frozenset[int]], handlers: Any) -> None:
        super().__init__(fake_mode, overlaps, handlers)
        self.frozen: frozenset[int] = frozenset()
        self.expects_no_grad = False
        self.relaid: set[int] = set()
        self.unseen: set[int] = set()  # of those, inputs of which autograd still has the old shape
        self.wrapper_views: dict[int, tuple[Any, Any, tuple[Any, ...], dict[str, Any], int | None]] = {}
        self._wrappers: list[Any] = []
        self._handing_over = False

    # --- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info = op_info(func)
        if self.expects_no_grad and torch.is_grad_enabled() and info.kind != "device":
            raise Restart(training=True)  # not where autograd asks for a device: an exception there ends the process
        if any(is_wrapper_type(t) for t in types):
            return self._wrapper_call(func, args, kwargs)
        if self.draws is not None and info.keep:
            drawn = self.draws.replace(info, types, args, kwargs)
            if drawn is not NotImplemented:
                return drawn
        match info.kind:
            case "layout":
                return self.plain_layout(info.op, args[0])
            case "plain":
                return self._plain(info, types, args, kwargs)
            case "device":
                return args[0].fake_device if hasattr(args[0], "fake_device") else args[0].device
            case "write":
                return self.write_op(info, types, args, kwargs)
            case "metadata":
                return self._metadata_op(info, types, args, kwargs)
            case "view" | "decompose":
                if func in DECOMPOSITIONS:
                    with self:
                        result = DECOMPOSITIONS[func](*args, **kwargs)
                    if result is not NotImplemented:
                        return result
                return (self._view if info.kind == "view" else self._plain)(info, types, args, kwargs)
            case "composite":
                # In inference mode they come here whole: views and versions are those of ordinary tensors inside all the same.
                within = enable_reentrant_dispatch if torch.is_inference_mode_enabled() else contextlib.nullcontext
                with within(), self:
                    return func.decompose(*args, **kwargs)
            case "lift":
                return self._lift(info, types, args, kwargs)
        return self.handlers.control(self, func, args, kwargs)

    def _wrapper_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call with tensor subclasses among its arguments: they take it apart, and what they call comes by here. Their own views are
        noted in `wrapper_views`: by the result's id what it is a view of, the operator, its other arguments, and which result it is.
        """
        if self._handing_over:
            self._handing_over = False
            return NotImplemented
        self._handing_over = True
        with self:
            out = func(*args, **kwargs)
        info = op_info(func)
        if info.kind == "view" and info.view_arg == 0 and args and is_wrapper_type(type(args[0])):
            for k, t in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
                self._wrappers.append(t)  # ids of living objects are unique
                self.wrapper_views[id(t)] = (args[0], func, args[1:], kwargs, None if t is out else k)
        return out

    @staticmethod
    def is_detach(op: Any) -> bool:
        """Whether a view is just another tensor object."""
        return op is ROLES["detach"] or op is ROLES["alias"]

    def _plain(self, info: OpInfo, types: Any, args: Any, kwargs: Any) -> Any:
        self.check_refusal(info.op, args, kwargs)
        out = self.eager_results(info.op, types, args, kwargs)
        if isinstance(out, torch.Tensor):
            values: Any = (out,)
        elif isinstance(out, (tuple, list)):
            values = out
        else:
            return self._number(info, out, args, kwargs)
        for t in values:
            if isinstance(t, torch.Tensor) and self.regions.shares(t):
                return self._undeclared_alias(info, out, t, args, kwargs)
        node = self.zeros(out) or self.call(info.op, self.nodes(args), self.nodes(kwargs), out, keep=info.keep)
        self._track(out, node)
        return out

    def _number(self, info: OpInfo, out: Any, args: Any, kwargs: Any) -> Any:
        """An operator without tensor results: a number that the graph must compute (`item`), or an effect (an
        assertion).
        """
        if isinstance(out, (torch.SymInt, torch.SymFloat, torch.SymBool)) or (out is None and info.keep):
            if isinstance(out, torch.SymInt) and out.node.expr in self.symbols.nodes:
                return out
            node = self.call(info.op, self.nodes(args), self.nodes(kwargs), out, keep=info.keep)
            if out is not None:
                self.symbols.bind(out, node)
                self._forget_unbacked()
        return out

    def _view(self, info: OpInfo, types: Any, args: Any, kwargs: Any) -> Any:
        self.check_refusal(info.op, args, kwargs)
        if not isinstance(base := info.argument(info.view_arg, args, kwargs), torch.Tensor):
            with self:  # autograd conjugates numbers
                return info.op(self.tensor_of(base), *args[1:], **kwargs)
        out = self.fake_results(info.op, types, args, kwargs)
        self._record_view(info, out, self.value(base), args, kwargs)
        return out

    def _record_view(self, info: OpInfo, out: Any, parent: Value, args: Any, kwargs: Any) -> None:
        if info.op is ROLES["as_strided"]:
            # It reads the storage, not the tensor that it is called on: only the region's whole stands for that.
            layout, whole = Layout.of(out), parent.root.layout
            if args[0].requires_grad and torch.is_grad_enabled() and not covers(parent.layout, layout):
                raise UnsupportedError(
                    f"as_strided reaches outside of a tensor{self.where()} whose gradient does not know of it"
                )
            if not parent.region.inputs and layout.plain and whole.plain and not inside(layout, whole):
                # Its storage may be larger (a loss was reduced in it); else eager refuses.
                raise UnsupportedError(f"as_strided reaches outside of a result{self.where()}")
            value = self._strided(parent, layout)
            value.near = parent
            if parent.region.version == 0 and parent.parent is None:
                value.node, value.version = self.call(info.op, self.nodes(args), self.nodes(kwargs), out), 0
            self.regions.set(out, value)
            return
        single = isinstance(out, torch.Tensor)
        layouts = [Layout.of(t) for t in ((out,) if single else out)]
        if single and layouts[0].key() == parent.layout.key():
            self.regions.set(
                out, Value(parent.region, self.current(parent), parent.layout, parent, None, parent.region.version)
            )
            return
        self.current(parent)
        node = self.call(info.op, self.nodes(args), self.nodes(kwargs), out)
        for k, t in enumerate((out,) if single else out):
            index = None if single else k
            item = node if single else self._item(node, k, t)
            step = Step(info.op, args, kwargs, info.view_arg, index)
            self.regions.set(t, Value(parent.region, item, layouts[k], parent, step, parent.region.version))
            self._bind_unbacked(t, item)  # a slice may have a size that only data tells

    def _undeclared_alias(self, info: OpInfo, out: Any, t: torch.Tensor, args: Any, kwargs: Any) -> Any:
        """A result that shares an argument's storage although the schema does not say so is a view all the same."""
        for position, a in enumerate(args):
            if (
                isinstance(a, torch.Tensor)
                and isinstance(out, torch.Tensor)
                and a is not t
                and self.regions.key(a) == self.regions.key(t)
            ):
                view = OpInfo(info.op, "view", info.arg_names, view_arg=position)
                self._record_view(view, out, self.value(a), args, kwargs)
                return out
        raise UnsupportedError(
            f"{info.op} returns an argument, or a view of one, that its schema does not declare{self.where()}"
        )

    def _strided(self, near: Value, layout: Layout) -> Value:
        """A value of any layout in the region of `near`, made by `as_strided` from the region's whole when it is needed."""
        root, region = near.root, near.region
        if layout.dtype != root.layout.dtype or layout.conj or layout.neg:
            raise UnsupportedError(
                f"a view of {layout} in a storage of {root.layout.dtype}{self.where()} cannot be expressed in a graph"
            )
        if not is_dense(root.layout) or not layout.plain or (region.inputs and not inside(layout, root.layout)):
            region.loose = True
        if region.loose and region.key in self.written_storages:
            raise UnsupportedError(
                f"as_strided on a tensor that is also written{self.where()} cannot be expressed in a graph"
            )
        return Value(region, None, layout, root, Step(ROLES["as_strided"], (), {}), version=-1)

    def _lift(self, info: OpInfo, types: Any, args: Any, kwargs: Any) -> Any:
        source = args[0]
        out = self.fake_mode.dispatch(info.op, types, args, kwargs)
        if self.regions.get(source) is not None:
            self.regions.set(out, self.value(source))
            return out
        value = self.regions.add(out, self._constant(source, out))
        value.region.constant = True
        return out

    def _check_metadata_op(self, info: OpInfo, t: torch.Tensor, value: Value, args: Any) -> None:
        """Leaves to eager what it may refuse."""
        if self.frozen.intersection(value.region.inputs):
            raise UnsupportedError(f"{info.op} on an inference tensor outside of inference mode{self.where()}")
        if t.requires_grad and value.region.inputs and any(isinstance(a, torch.Tensor) for a in args[1:]):
            raise UnsupportedError(f"{info.op} on an input that requires grad{self.where()}")
        if t.requires_grad and any(o._base is t for o, v in self.regions.values.values() if v.region is value.region):
            raise UnsupportedError(
                f"{info.op} on a tensor with views that autograd follows{self.where()}: it would make them anew, "
                "by strides where it runs the program, by their operators where it is traced"
            )
        if t.requires_grad and value.region.inputs and not torch.is_grad_enabled():
            if self.training and t.is_leaf:
                raise UnsupportedError(
                    f"{info.op} without grad on a leaf{self.where()}: autograd would know it by its sizes before"
                )
            self.unseen.add(id(t))
        elif id(t) in self.unseen:
            raise UnsupportedError(f"{info.op} on an input that was laid out anew without grad{self.where()}")

    def _metadata_op(self, info: OpInfo, types: Any, args: Any, kwargs: Any) -> Any:
        t = args[0]
        value = self.value(t)
        self._check_metadata_op(info, t, value, args)
        self.relaid.add(id(t))
        if value.region.inputs and value.parent is None and len(value.region.inputs) == 1:
            self._own_object(t, value)
        self._snapshot(t)
        bytes_before = t.untyped_storage().nbytes()
        out = self.fake_mode.dispatch(info.op, types, args, kwargs)
        key = self.regions.key(t)
        if key == value.region.key:
            if t.untyped_storage().nbytes() is not bytes_before and t.untyped_storage().nbytes() != bytes_before:
                raise UnsupportedError(f"{info.op} changes the size of a storage{self.where()}")
            view = view_of(info.op)
            if view is not None:
                self._record_view(op_info(view), t, value, args, kwargs)
            else:
                self.regions.set(t, self._strided(value, Layout.of(t)))
        elif key in self.regions.by_storage:
            self._record_strided(t, self._owner(key))
        else:
            raise UnsupportedError(f"{info.op} gives a tensor a storage that the graph does not know{self.where()}")
        value.region.bumps += 1
        return t if out is not None else out

    def _record_strided(self, t: torch.Tensor, source: Value) -> None:
        """`t` now lies in the storage of `source` in some way: share the value of a tensor that lies there alike, or
        view the region.
        """
        layout = Layout.of(t)
        for _, known in list(self.regions.values.values()):
            if known.region is source.region and known.layout.key() == layout.key():
                self.regions.set(t, Value(known.region, self.current(known), layout, known, None, known.region.version))
                return
        self.regions.set(t, self._strided(source, layout))

    def _owner(self, key: int) -> Value:
        regions = self.regions.by_storage[key]
        for _, value in self.regions.values.values():
            if value.region is regions[0]:
                return value.root
        raise AssertionError("a region without values")

    def _own_object(self, t: torch.Tensor, value: Value) -> None:
        if not getattr(t, "_opforge_own", False):
            raise Restart(copy=frozenset(value.region.inputs))

    def _snapshot(self, t: torch.Tensor) -> None:
        """Give the node that has `t` as its fake value another one: `t` is about to change."""
        maker = self.makers.pop(id(t), None)
        if maker is None:
            return
        before: Any = self.fake_mode.dispatch(ROLES["alias"], (type(t),), (t,), {})
        maker.meta["val"] = before
        args: Any = maker.args
        while maker.target is operator.getitem:  # one of several results: their list says so too
            (maker, k), results = args, args[0].meta["val"]
            before = maker.meta["val"] = [*results[:k], before, *results[k + 1 :]]
            args = maker.args
