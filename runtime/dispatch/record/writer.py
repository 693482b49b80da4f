"""Writes the functional graph while a program runs: nodes, their metadata, and which node holds a tensor now."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ....errors import UnsupportedError
from ....generated.dispatch_tables import ROLES
from ...ir.routines import OWN_MEMORY
from ...torch_compat import OpOverload, is_zerotensor, running_node, sequence_number
from ..operators.corrections import run_fake
from ..operators.effects import has_effect
from ..operators.fake_memo import FakeMemo
from ..operators.schema import op_info
from ..storage.regions import Regions, Value, beyond_strides, is_strided
from ..subclasses.wrappers import is_wrapper
from ..symbols.sizes import Symbols
from .known import Truth
from .source import source_of

KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack")


class GraphWriter:
    """The graph that is being written.

    origin   the node of the traced program that runs now, in its backward the one that is differentiated: its metadata goes to the nodes
             made meanwhile.
    running  the node that `origin` was last set to, also while a backward runs.
    kept     nodes that dead-code elimination leaves alone.
    makers   the node that made a tensor object, by the object's id.
    backward whether the program's gradients are being computed: nodes say so in their metadata.
    truth    says where a mask, of a node of a graph with these constants, lets scores through; None: nothing is known. `truths` are its answers.
    twice    whether the program's gradients are to be differentiated once more: they are computed with grad mode.
    region   the checkpointed region that runs now (`checkpoint.py`), of `region_count` so far; nodes say so in their metadata.
    """

    backward = False
    twice = False
    region: int | None = None
    region_count = 0
    truth: Callable[[fx.Node, Mapping[str, torch.Tensor]], Truth] | None = None

    def __init__(self, fake_mode: Any) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.memo = FakeMemo(fake_mode)
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.regions = Regions()
        self.symbols = Symbols(self.graph, fake_mode.shape_env)
        self.running: fx.Node | None = None
        self._origins: list[fx.Node | None] = [None]
        self._first_numbers = [0]  # of autograd's nodes that are made while each of `_origins` runs
        self.kept: set[fx.Node] = set()
        self.makers: dict[int, fx.Node] = {}
        self.truths: dict[fx.Node, Truth] = {}

    @property
    def origin(self) -> fx.Node | None:
        """The node of the program whose operators are recorded now; in its backward the one that made autograd's node."""
        if not self.backward:
            return self.running
        if (node := running_node()) is None:
            return self.running
        made_by = self._origins[bisect.bisect_right(self._first_numbers, sequence_number(node)) - 1]
        return made_by or self.running  # a function that runs within the backward was given one

    @origin.setter
    def origin(self, node: fx.Node | None) -> None:
        self.running = node
        if not self.backward:  # which may run in another thread, with numbers of its own
            self._origins.append(node)
            self._first_numbers.append(sequence_number())

    def call(self, op: Any, args: Any, kwargs: Any, val: Any, *, keep: bool = False) -> fx.Node:
        """A call node with the fake value `val` and the origin's metadata; `keep` saves it from dead-code
        elimination.
        """
        node = self.graph.create_node("call_function", op, args, kwargs)
        if op is not ROLES["add"] and any(not is_strided(n.meta.get("val")) for n in node.all_input_nodes):
            raise UnsupportedError(f"{op} takes a sparse gradient{self.where()}")
        meta = node.meta
        meta["val"] = val
        self.makers[id(val)] = node
        if self.backward:
            meta["backward"] = True
            if keep and torch.is_grad_enabled() and not (self.twice and has_effect(op)):
                # Autograd's own formulas run without grad mode: this is a checkpointed function that torch runs a second time.
                raise UnsupportedError(
                    f"{op} would run a second time with other random numbers or effects{self.where()}"
                )
        if self.region is not None:
            meta["region"] = self.region
        origin = self.origin
        if origin is not None:
            for key in KEPT_META:
                if key in origin.meta:
                    meta[key] = origin.meta[key]
            meta["source"] = source_of(origin)
        if keep:
            self.kept.add(node)
        return node

    def dispatch_node(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A call node whose arguments are nodes; its fake value is computed."""
        args, kwargs = self.nodes(args), self.nodes(kwargs or {})
        fakes = self.fakes(args)
        types = tuple({type(f) for f in fakes if isinstance(f, torch.Tensor)})
        return self.call(op, args, kwargs, self.fake_results(op, types, fakes, self.fakes(kwargs)))

    def fake_results(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What torch's fake kernel of an operator returns."""
        return self.memo.results(op, args, kwargs, lambda: self.fake_mode.dispatch(op, types, args, kwargs), False)

    def eager_results(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The fake results of an operator, as its eager kernel gives them (`run_fake`)."""
        return self.memo.results(op, args, kwargs, lambda: run_fake(self.fake_mode, op, types, args, kwargs), True)

    def plain_layout(self, op: Any, t: torch.Tensor) -> list[int]:
        """The sizes or strides that a kernel in C++ asks for as plain integers. Raises `UnsupportedError` where one of them is a symbol still."""
        asked = getattr(
            t, op.overloadpacket.__name__, lambda: None
        )()  # such an operator has the name of the tensor's own method
        if not isinstance(asked, tuple) or any(type(n) is not int for n in asked):
            raise UnsupportedError(
                f"a kernel of torch reads symbolic sizes as plain numbers{self.where()}; mark the dimension static"
            )
        return list(asked)

    def zeros(self, out: Any) -> fx.Node | None:
        """What stands in the graph for a result that is zeros without memory (no kernel reads those); None for any other."""
        if not isinstance(out, torch.Tensor) or not is_zerotensor(out):
            return None
        return self.dispatch_node(ROLES["zeros"], (list(out.shape), 0), {"dtype": out.dtype, "device": out.device})

    def reshape(self, node: fx.Node, size: Any) -> fx.Node:
        """`node` with another shape: a view where its strides allow it, a view of a copy otherwise."""
        try:
            return self.dispatch_node(ROLES["view"], (node, list(size)))
        except RuntimeError:
            copy = self.dispatch_node(ROLES["clone"], (node,), {"memory_format": torch.contiguous_format})
            return self.dispatch_node(ROLES["view"], (copy, list(size)))

    def _item(self, node: fx.Node, k: int, val: Any) -> fx.Node:
        return self.call(operator.getitem, (node, k), {}, val)

    def _track(self, out: Any, node: fx.Node) -> None:
        if isinstance(out, torch.Tensor):
            self._fresh(out, node)
            return
        for k, t in enumerate(out):
            if isinstance(t, torch.Tensor):
                self._fresh(t, self._item(node, k, t))
            elif isinstance(t, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                self.symbols.bind(t, self._item(node, k, t))
            elif isinstance(t, (tuple, list)):
                self._track(t, self._item(node, k, t))

    def _fresh(self, t: torch.Tensor, node: fx.Node) -> None:
        if t.requires_grad:
            # That is for autograd to say, above; a few of torch's fake kernels copy it from an operand.
            t.requires_grad = False
        if not is_strided(t):
            # Autograd makes them of tables that are looked up with `sparse=True`, and adds them up: nothing else is known of them.
            if t.layout is not torch.sparse_coo or not self.backward:
                raise UnsupportedError(f"a tensor {beyond_strides(t)}{self.where()}")
            self.regions.add(t, node)
            return
        self.regions.add(t, node)
        self._bind_unbacked(t, node)

    def _bind_unbacked(self, t: torch.Tensor, node: fx.Node) -> None:
        if self.fake_mode.shape_env is not None and any(type(n) is not int for n in t.shape):
            self.symbols.bind_sizes(t, node)
            self._forget_unbacked()

    def _forget_unbacked(self) -> None:
        """Fresh symbols are bound by the node that made them; the shape environment need not wait for anybody to do
        it.
        """
        shape_env = self.fake_mode.shape_env
        if shape_env is not None and shape_env.pending_fresh_unbacked_symbols:
            shape_env.pending_fresh_unbacked_symbols.clear()

    def value(self, t: torch.Tensor) -> Value:
        """The value of `t`; a real tensor that the program holds becomes a constant. Raises `UnsupportedError` for a
        stranger.
        """
        found = self.regions.get(t)
        if found is not None:
            if found.region.key != self.regions.key(t):
                raise UnsupportedError(f"the `.data` of a tensor is replaced{self.where()}")
            return found
        if is_wrapper(t):
            raise UnsupportedError(
                f"a {type(t).__name__} of the program itself is used as a plain tensor{self.where()}"
            )
        if hasattr(t, "fake_mode"):
            raise UnsupportedError(f"a tensor is used{self.where()} that was made outside of the traced program")
        value = self.regions.add(t, self._constant(t, self.fake_mode.from_tensor(t, static_shapes=True)))
        value.region.constant = True
        return value

    def refuse_views(self, value: Value) -> None:
        """Mark a call of a user's operator: the program is about to write to its result, which autograd tracks. Eager refuses the write where
        the result is a view; a fake kernel does not say whether it is, so the wrapper looks at the real one.
        """
        node = value.root.node
        while node.target is operator.getitem:
            node = node.args[0]
        if not isinstance(node.target, OpOverload) or node.target.namespace in OWN_MEMORY:
            return
        if any(t.requires_grad for t, v in self.regions.values.values() if v.region is value.region):
            node.meta["whole"] = True
            self.kept.add(node)

    def current(self, value: Value) -> fx.Node:
        """The node of the value's present contents."""
        return self.regions.current(value, self._replay)

    def _replay(self, value: Value) -> fx.Node:
        step = value.step
        assert step is not None
        assert value.parent is not None
        if step.op is ROLES["as_strided"]:
            root = value.parent  # the region's whole, or that in the dtype of the view
            whole = self.current(root)
            offset = value.layout.offset - root.layout.offset + whole.meta["val"].storage_offset()
            return self.dispatch_node(step.op, (whole, value.layout.size, value.layout.stride, offset))
        parent = self.current(value.parent)
        args, kwargs = list(step.args), step.kwargs
        if step.position < len(args):
            args[step.position] = parent
        else:
            kwargs = {**kwargs, op_info(step.op).arg_names[step.position]: parent}
        node = self.dispatch_node(step.op, tuple(args), kwargs)
        return node if step.index is None else self._item(node, step.index, node.meta["val"][step.index])

    def tensor_of(self, number: complex) -> torch.Tensor:
        """A recorded tensor without dimensions for a number that stands in the place of one, in the dtype that torch gives such numbers."""
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}[type(number)]
        return ROLES["zeros"]((), number, dtype=dtype)

    def nodes(self, a: Any) -> Any:
        """`a` with every tensor and symbolic number replaced by its node; containers become tuples, lists and dicts
        that fx keeps.
        """
        if isinstance(a, torch.Tensor):
            return self.current(self.value(a))
        if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.symbols.node(a)
        if isinstance(a, tuple):
            return tuple([self.nodes(x) for x in a])
        if isinstance(a, list):
            return [self.nodes(x) for x in a]
        if isinstance(a, dict):
            return {k: self.nodes(v) for k, v in a.items()}
        return a

    def fakes(self, a: Any) -> Any:
        """`a` with every node replaced by its fake value."""
        return fx.node.map_arg(a, _fake)

    def where(self) -> str:
        """` (line …)` of the traced program, or autograd's name of what runs in its backward, for messages; empty when unknown."""
        source = source_of(self.origin) if self.origin is not None else ""
        if not source and self.backward and (node := running_node()) is not None:
            source = f"backward, {node.name()}"
        return f" ({source})" if source else ""

    def _constant(self, real: torch.Tensor, fake: Any) -> fx.Node:
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = real
        node = self.graph.create_node("get_attr", name, (), {})
        node.meta["val"] = fake
        return node


def _fake(node: fx.Node) -> Any:
    return node.meta["val"]
