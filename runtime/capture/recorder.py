"""Records a backward as a graph. Torch's C++ engine makes one recorder for a backward that it has no graph for, walks through the autograd graph,
and calls the recorder's methods by their names: what it would compute becomes nodes.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ..observe import counters
from ..observe.torch_logs import note, tell, wanted
from ..torch_compat import TorchDispatchMode, disable_torch_dispatch, skip_frame, unseen_by_dynamo
from ..torch_compat.compiled_autograd import (
    BackwardState,
    ShapeEnv,
    backward_function,
    call_backward,
    compile_context,
    name_backward_function,
    numbered,
    symbol_for,
)
from .calls import (
    accumulate_grad,
    added,
    after_copied_slice,
    before_copied_slice,
    call_cpp_hooks,
    call_function,
    call_node_hook,
    call_post_accumulate_hook,
    call_tensor_hook,
    call_unpack_hook,
    call_unpack_hook_of_slice,
    fitting_gradients,
    size_of,
)
from .orders import Orders
from .run import Captured

Tensors = list[torch.Tensor | None]
INPUT = -1  # in the place of the number of a node of autograd: what the graph begins with
_numbers = itertools.count()


class Recorder:
    """What the engine calls while it captures. Tensors are stand-ins without elements; each stands for the node that makes it.

    The graph takes lists: `inputs` (tensors), `sizes` and `scalars` (numbers that may change), `hooks` (objects of the program: hooks, and contexts
    of autograd functions) and `packed` (what hooks for saved tensors have packed).
    """

    def __init__(self, compile: Callable[[fx.GraphModule], Callable[..., Any]]) -> None:
        self._compile = compile
        self._graph = fx.Graph()
        self._node_of: dict[int, fx.Node] = {}
        self._alive: list[object] = []  # what `_node_of` knows by address
        self._origin = ("", INPUT)
        self._names: dict[int, str] = {}  # of autograd's nodes, in the order in which they are captured
        self._group: dict[fx.Node, int] = {}  # the node of autograd that each node belongs to
        self._sums: dict[fx.Node, None] = {}
        self._ours: set[fx.Node] = set()  # calls of backwards of opforge's graphs
        self._functions: set[fx.Node] = set()  # calls of backwards of the program's autograd functions
        self._ran: set[int] = set()  # the nodes of autograd that have been run, not only their hooks
        self._unhooked: dict[int, Any] = {}  # by address of what a hook of a tensor gives: what it was given
        # The gradient for the function that is recorded, where it wrote through a view.
        self._part: torch.Tensor | None = None
        self._is_seen = False  # whether code of the program runs in it, which sees the order
        self._entered = ExitStack()
        self._sizes: list[int] = []  # those that the graph uses
        self._leaves: list[int] = []  # inputs that get gradients

    # What begins and ends it.

    def begin_capture(
        self,
        inputs: list[torch.Tensor],
        sizes: list[int],
        scalars: list[Any],
        origins: Sequence[Sequence[tuple[int, str]]],
        accumulate_grad: bool,
        check_nans: bool,
    ) -> tuple[str, list[torch.Tensor], list[Any], list[Any]]:
        """Takes what the backward will be called with, and where each comes from; gives what stands for it."""
        # The engine may have been called from a function that Dynamo compiles, and would compile this too.
        self._entered.enter_context(unseen_by_dynamo())
        counters.count_capture()
        self.number = next(_numbers)
        self._entered.enter_context(compile_context(numbered(self.number)))
        self._checks = "gradients" if check_nans and accumulate_grad else "results" if check_nans else ""
        self._of_input, self._of_size, self._of_scalar, self._hooks, self._packed = (
            self._graph.placeholder(name) for name in ("inputs", "sizes", "scalars", "hooks", "packed")
        )
        given, here = [], self._origin
        for k in range(len(inputs)):
            if origins[0]:
                self._origin = origins[0][k][1], INPUT
            given.append(self._stand_in(self._item(self._of_input, k)))
        self._origin = here
        env = ShapeEnv()
        symbols = [symbol_for(env, n, "sizes", k) for k, n in enumerate(sizes)]
        self._size_at = {id(s.node): k for k, s in enumerate(symbols)}  # nodes are made for those that are used
        numbers = [symbol_for(env, n, "scalars", k) for k, n in enumerate(scalars)]
        for k, n in enumerate(numbers):
            self._node_of[id(n.node)] = self._item(self._of_scalar, k)
        self._alive += [env, symbols, numbers]
        *_, self._after_inputs = self._graph.nodes
        self._entered.enter_context(_Operators(self))
        return f"!{self.number}", given, symbols, numbers

    def end_capture(self, outputs: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Gives what runs a call, and the compiled graph."""
        self._graph.output(self._argument([self._wanted(t) for t in outputs]))
        compile = functools.partial(_compile, self._compile, self.number)
        orders = Orders(self._graph, self._group, self._sums, self._names, compile)
        self.close()
        seen = orders if self._is_seen else None
        run = Captured(self.number, tuple(self._sizes), self._checks, tuple(self._leaves), seen)
        return run, orders.first()

    def close(self) -> None:
        """The engine is done with the recorder, also where it raised."""
        self._entered.close()

    def log_compile_reasons(self, compile_reasons: list[str]) -> None:
        """Why the engine has no graph for this backward."""
        for reason in compile_reasons:
            note("compiled_autograd_verbose", f"captured because of {reason}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnsupportedError(
            f"torch {torch.__version__} calls {name!r} of what captures a backward, and opforge does not know it: "
            f"leave compiled autograd off, or use a version of docs/versions.md"
        )

    # Nodes.

    def set_node_origin(self, name: str, number: int, function: Any) -> None:
        """What is recorded next belongs to the autograd node `name`, which runs as `number`."""
        self._origin = (name, number)
        self._names[number] = name

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        taken, name = tuple(self._argument(a) for a in args), _node_name(self._origin[0])
        return self._placed(self._graph.create_node("call_function", target, taken, kwargs, name=name))

    def _placed(self, node: fx.Node) -> fx.Node:
        """A node that belongs to the node of autograd that is recorded."""
        name, number = self._origin
        self._group[node] = number
        if number != INPUT:
            node.meta["stack_trace"] = f'File "<backward>", line {number + 1}, in {name}\n    {name} (node {number})'
        return node

    def _item(self, node: fx.Node, k: int) -> fx.Node:
        return self._call(operator.getitem, (node, k))

    def record_operator(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that the engine itself calls, such as the zeros that stand for a gradient that is missing."""
        node = self._call(operator, args, {name: self._argument(value) for name, value in kwargs.items()})
        count = len(operator._schema.returns)
        return self._stand_in(node) if count == 1 else tuple(self._stand_ins(node, count))

    def _stand_in(self, node: fx.Node) -> torch.Tensor:
        with disable_torch_dispatch():
            made = torch.empty(0)
        self._node_of[id(made)] = node
        self._alive.append(made)
        return made

    def _stand_ins(self, node: fx.Node, count: int) -> list[torch.Tensor]:
        return [self._stand_in(self._item(node, k)) for k in range(count)]

    def _argument(self, value: Any) -> Any:
        """What a node takes for a value of the engine: the node that a tensor or a size stands for, else the value itself."""
        if isinstance(value, fx.Node):
            return value
        if isinstance(value, (list, tuple)):
            made = [self._argument(v) for v in value]
            return made if isinstance(value, list) else tuple(made)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._number(value)
        if not isinstance(value, (torch.Tensor, BackwardState)):
            return value
        found = self._node_of.get(id(value))
        if found is None:
            raise UnsupportedError(f"{self._origin[0]} reads a tensor that compiled autograd was not told of")
        return found

    def _number(self, value: Any) -> fx.Node:
        key = id(value.node)
        if key not in self._node_of:
            if key not in self._size_at:
                raise UnsupportedError(
                    f"{self._origin[0]} computes with a size while its backward is captured: {value}"
                )
            here, self._origin = self._origin, ("size", INPUT)
            with self._graph.inserting_after(self._after_inputs):
                item = self._item(self._of_size, len(self._sizes))
            with self._graph.inserting_after(item):
                self._node_of[key] = self._after_inputs = self._call(size_of, (item,))
            self._origin = here
            self._sizes.append(self._size_at[key])
        return self._node_of[key]

    # Functions of autograd.

    def bind_function(self, name: str, function: Callable[..., Any], custom: bool, traceable: bool) -> str:
        return name_backward_function(name, function, custom, traceable)

    def apply_functional(self, name: str, grads: Sequence[Any], args: Any, metadata: Sequence[Any]) -> Tensors:
        """A function that torch's autograd has: its gradients from those of its results and what it has saved."""
        return [*self._stand_ins(self._call(backward_function(name), (grads, *args)), len(metadata))]

    def validate_outputs(self, _: Any, outputs: Sequence[Any], args: Any, metadata: Sequence[Any]) -> Tensors:
        """Gradients with the sizes and dtypes that the engine checks and converts them to. Ours have them: nothing is checked, so that no sizes are
        passed for it.
        """
        self._ran.add(self._origin[1])
        nodes = [self._node_of[id(t)] for t in outputs if t is not None]
        if nodes and all(node.args[0] in self._ours for node in nodes):
            return list(outputs)
        if any(node.args[0] in self._functions for node in nodes):
            node = self._call(fitting_gradients, (self._origin[0], outputs, *args))
        else:
            node = self._call(backward_function("validate_outputs"), (outputs, *args))
        return [None if t is None else self._stand_in(self._item(node, k)) for k, t in enumerate(outputs)]

    def accumulate(self, first: Any, second: Any) -> torch.Tensor:
        """The sum of two gradients of one result."""
        node = self._call(added, (first, second))
        self._sums[node] = None
        return self._stand_in(node)

    def accumulate_grad(self, leaf: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        """A leaf gets its gradient. Torch passes the gradient that it has since 2.13."""
        explicit = len(rest) == 3
        if explicit:
            before, grad, has_post_hooks = rest
        else:
            grad, has_post_hooks = rest
            before = self._graph.call_function(getattr, (self._argument(leaf), "grad"))
            self._placed(before)
        self._leaves.append(self._argument(leaf).args[1])
        made = self._stand_in(self._call(accumulate_grad, (leaf, before, grad, has_post_hooks)))
        return made if explicit else None

    def proxy_call_backward(
        self,
        inputs: Sequence[Any],
        metadata: Sequence[Any],
        saved: Sequence[Any],
        place: int,
        ctx: Any,
        state: int | None,
        *_: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """The backward of an autograd function in Python: Dynamo follows it."""
        # Functions of torch's ahead-of-time compiler take gradients as one list, which they empty.
        boxed = getattr(ctx._forward_cls, "boxed_grads_call", False)
        given = self._item(self._hooks, place), tuple(saved)
        if hasattr(ctx._forward_cls, "_opforge_traced"):
            node = self._call(call_backward, (*given, *([list(inputs)] if boxed else inputs)))
            self._ours.add(node)
        elif boxed:
            node = self._call(call_backward, (*given, list(inputs)))
        else:
            self._is_seen = True
            tensors = tuple(m is not None for m in metadata)
            node = self._call(call_function, (self._origin[0], tensors, *given, *inputs))
            self._functions.add(node)
        return tuple(None if m is None else self._stand_in(self._item(node, k)) for k, m in enumerate(metadata))

    def call_copy_slices_prologue(self, inputs: Any, *described: Any) -> list[torch.Tensor]:
        whole, part, copy = self._stand_ins(self._call(before_copied_slice, (inputs, described[:3], described[3:])), 3)
        self._part = copy
        return [whole, part, copy]

    def call_copy_slices_epilogue(self, needed: Sequence[bool], whole: Any, made: Sequence[Any], part: Any) -> Tensors:
        self._part = None
        return [*self._stand_ins(self._call(after_copied_slice, (needed, whole, made, part)), len(needed))]

    # Hooks.

    def _hook(self, place: int) -> fx.Node:
        self._is_seen = True
        return self._item(self._hooks, place)

    def tensor_pre_hook(self, inputs: Tensors, hook: int, k: int) -> Tensors:
        """A hook of a tensor, which may replace the gradient at position `k`; where there is none, there is none afterwards."""
        given, node = inputs[k], self._call(call_tensor_hook, (self._hook(hook), inputs[k]))
        inputs[k] = None if given is None else self._hooked(given, node)
        return inputs

    def _hooked(self, given: torch.Tensor, node: fx.Node) -> torch.Tensor:
        made = self._stand_in(node)
        self._unhooked[id(made)] = given
        return made

    def _wanted(self, gradient: Any) -> Any:
        """What the program gets of a gradient that it has asked for. Of a tensor whose node runs too, the engine takes it before its hooks."""
        while id(gradient) in self._unhooked and self._group[self._node_of[id(gradient)]] in self._ran:
            gradient = self._unhooked[id(gradient)]
        return gradient

    def cpp_tensor_pre_hook(self, inputs: Tensors, hook: int, k: int) -> Tensors:
        if (given := inputs[k]) is not None:
            inputs[k] = self._hooked(given, self._call(call_cpp_hooks, (hook, given)))
        return inputs

    def pre_hook(self, inputs: Sequence[Any], hook: int) -> Tensors:
        """A hook of a node, before it runs."""
        node = self._call(call_node_hook, (self._hook(hook), tuple(inputs)))
        return [None if t is None else self._stand_in(self._item(node, k)) for k, t in enumerate(inputs)]

    def post_hook(self, outputs: Sequence[Any], inputs: Sequence[Any], hook: int) -> Tensors:
        """A hook of a node that has run."""
        node = self._call(call_node_hook, (self._hook(hook), tuple(outputs), tuple(inputs)))
        return [None if t is None else self._stand_in(self._item(node, k)) for k, t in enumerate(outputs)]

    def post_acc_grad_hook(self, leaf: torch.Tensor, hook: int) -> Tensors:
        return [self._stand_in(self._call(call_post_accumulate_hook, (self._hook(hook), leaf)))]

    def unpack_hook(self, hook: int, data: int) -> torch.Tensor:
        """What `saved_tensors_hooks` packed, unpacked."""
        given = self._hook(hook), self._item(self._packed, data)
        if self._part is not None:
            return self._stand_in(self._call(call_unpack_hook_of_slice, (self._part, *given)))
        return self._stand_in(self._call(call_unpack_hook, given))

    # Smaller things that it asks for.

    def bind_backward_state(self, place: int) -> BackwardState:
        """What Dynamo keeps for the hooks of a compiled forward."""
        made = BackwardState()
        self._node_of[id(made)] = self._item(self._hooks, place)
        self._alive.append(made)
        return made

    def allocate_dummy(self) -> torch.Tensor:
        with disable_torch_dispatch():
            return torch.empty(0)


class _Operators(TorchDispatchMode):
    """Records the operators that the engine itself calls."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.record_operator(func, args, kwargs or {})


for _method in (Recorder.__init__, Recorder.begin_capture, Recorder.close):
    skip_frame(_method)  # Dynamo sees what runs before `begin_capture` and after `end_capture`


def _compile(
    compile: Callable[[fx.GraphModule], Callable[..., Any]], number: int, graph: fx.Graph
) -> Callable[..., Any]:
    """Compile the graph of the capture `number`."""
    module = fx.GraphModule({}, graph, f"Backward{number}")
    module.meta["locals_to_steal"] = ["inputs"]
    if wanted("captured backward"):
        tell("captured backward", f"!{number} ", module.print_readable(print_output=False), None)
    return compile(module)


def _node_name(origin: str) -> str:
    """`MulBackward0` as a name of a graph's node: `mul_backward0`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", origin.rpartition("::")[2]).lower()
    return re.sub(r"\W", "_", words) or "node"
