"""Higher-order operators that run functions of the program (branches of a condition, a loop's body): each function is recorded as a functional
graph of its own, which takes its operands one by one and returns a flat tuple. What the operator's node says stays a call that eager takes.

A function sees operands as tensors of their own: it may not write to them (torch allows that only in places, and eager does it), and what it
returns shares no memory with them. So nothing has to be known of one graph while another is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ....errors import UnsupportedError
from ....generated.decompositions import CONTROL, LAUNCHES, Control
from ....generated.dispatch_tables import ROLES
from ...torch_compat import is_traceable_wrapper_subclass, pytree
from ..record.dead import finish
from ..record.interpret import run_graph
from ..record.recorder import Recorder
from ..record.restart import Restart
from ..storage.overlap import is_dense, is_row_major
from ..storage.regions import Layout, same_strides

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def record_control(recorder: Recorder, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call of a higher-order operator gives, recorded as one node whose functions are graphs. Raises `UnsupportedError` for one that
    the spec does not know, and for functions that write to what they are given.
    """
    if op.name() in LAUNCHES:
        return recorder.handlers.launch(recorder, LAUNCHES[op.name()], kwargs)
    form = CONTROL.get(op.name())
    if form is None or any(kwargs.values()):
        raise UnsupportedError(f"the higher-order operator {op} cannot be traced yet{recorder.where()}")
    if form.predicate is not None and not isinstance(args[form.predicate], torch.Tensor):
        # A comparison of sizes is decided now, and becomes a guard.
        chosen = args[form.functions[0 if args[form.predicate] else 1]]
        with recorder:
            return run(chosen, args[form.given], recorder)
    return _Call(recorder, op, form, args).record()


@dataclass(frozen=True)
class Derived:
    """A function made of functions of the program, which the recorder is told as well."""

    call: Callable[[Sequence[Any], Recorder], Any]

    def __call__(self, *operands: Any) -> Any:
        raise UnsupportedError("a function of opforge's own is called as one of the program")


def run(function: Any, operands: Sequence[Any], recorder: Recorder) -> Any:
    """What a function of a higher-order operator returns, recorded."""
    if isinstance(function, Derived):
        return function.call(operands, recorder)
    if isinstance(function, fx.GraphModule):
        origin = recorder.running
        try:
            return run_graph(function, operands, {}, recorder)
        finally:
            recorder.origin = origin
    return function(*operands)


@dataclass
class _Function:
    """A function while it is recorded: its recorder, and the nodes and fake values of its operands."""

    recorder: Recorder
    nodes: list[fx.Node]
    fakes: list[Any]
    results: list[Any] = field(default_factory=list)
    spec: Any = None


class _Call:
    """One call of the operator `op`. `operands` are nodes of the graph around it, for each list of operands one list."""

    def __init__(self, recorder: Recorder, op: Any, form: Control, args: Sequence[Any]) -> None:
        self.recorder, self.op, self.form, self.args = recorder, op, form, args
        self.fake_mode = recorder.fake_mode
        lists = {key: args[k] for key in ("carried", "sliced", "given") if (k := getattr(form, key)) is not None}
        self.operands = {key: [self._operand(o) for o in values] for key, values in lists.items()}
        self.operands["given"] += self._sizes()

    def _fail(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{what} of {self.op}{self.recorder.where()}")

    # -- operands ------------------------------------------------------------------------------------------------------
    def _operand(self, value: Any) -> Any:
        """The node of an operand, dense; numbers that are known stay numbers."""
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, (int, torch.SymInt)):
                raise self._fail(f"an operand that is a {type(value).__name__}")
            return self.recorder.nodes(value)
        if is_traceable_wrapper_subclass(value) or value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise self._fail("an operand that is no plain tensor")
        node = self.recorder.nodes(value)
        return node if is_simple(node.meta["val"]) else _row_major(self.recorder, node)

    def _sizes(self) -> list[fx.Node]:
        """Nodes of the size symbols that sizes of operands are made of, where no operand tells them."""
        used, told = set[Any](), set[Any]()
        for node in (n for nodes in self.operands.values() for n in nodes if isinstance(n, fx.Node)):
            value = node.meta["val"]
            parts = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
            for expr in (p.node.expr for p in parts if isinstance(p, SYMBOLIC)):
                used |= expr.free_symbols
                told |= {expr} if expr.is_symbol else set()
        return [self.recorder.symbols.of_symbol(s) for s in sorted(used - told, key=str)]

    # -- functions -----------------------------------------------------------------------------------------------------
    def _function(self, function: Any) -> _Function:
        body = type(self.recorder)(self.fake_mode, self._refuse_write, self.recorder.handlers)
        body.origin, body.backward = self.recorder.origin, self.recorder.backward
        made = _Function(body, [], [])
        for key, nodes in self.operands.items():
            for n in nodes:
                self._placeholder(made, n, key)
        count = len(made.nodes) - self._extra()
        try:
            with body:
                out = run(function, made.fakes[:count], body)
        except Restart as again:
            raise self._fail("a function that changes more of an operand than its elements") from again
        made.results, made.spec = pytree.tree_flatten(out)
        return made

    def _extra(self) -> int:
        return len(self.operands["given"]) - len(self.args[self.form.given])

    def _refuse_write(self, k: int) -> frozenset[int]:
        raise self._fail("a write to an operand inside of a function")

    def _placeholder(self, made: _Function, operand: Any, key: str) -> None:
        body = made.recorder
        node = body.graph.placeholder(f"arg{len(made.nodes)}")
        value = operand.meta["val"] if isinstance(operand, fx.Node) else operand
        if isinstance(value, torch.Tensor):
            size, stride = tuple(value.shape), value.stride()
            if key == "sliced":
                size, stride = size[1:], stride[1:]
            with self.fake_mode:
                fake: Any = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
            body.regions.add(fake, node, (len(made.nodes),))
            body.symbols.bind_sizes(fake, node)
        else:
            # A number that is carried is another one in each run.
            fake = self._fresh_number() if key == "carried" else value
            if isinstance(fake, SYMBOLIC):
                body.symbols.nodes.setdefault(fake.node.expr, node)
        node.meta["val"] = fake
        made.nodes.append(node)
        made.fakes.append(fake)

    def _fresh_number(self) -> Any:
        if self.fake_mode.shape_env is None:
            raise self._fail("a carried number")
        number = self.fake_mode.shape_env.create_unbacked_symint()
        self.recorder._forget_unbacked()
        return number

    def _graph(self, made: _Function, like: int = 0, bare: bool = False) -> fx.GraphModule:
        """The graph of a function; its first `like` results are laid out as its first operands."""
        body = made.recorder
        seen = set[int]()
        nodes: list[Any] = []
        with body:  # conversions of results are recorded as well
            for k, t in enumerate(made.results):
                if not isinstance(t, torch.Tensor):
                    if t is not None and not isinstance(t, (int, *SYMBOLIC)):
                        raise self._fail(f"a result that is a {type(t).__name__}")
                    nodes.append(body.nodes(t))
                    continue
                value = body.value(t)
                region, node = value.region, body.current(value)
                if t.layout != torch.strided or t.is_conj() or t.is_neg():
                    raise self._fail("a result that is no plain tensor")
                shares = bool(region.inputs) or region.constant or id(region) in seen
                seen.add(id(region))
                if not is_simple(node.meta["val"]):
                    node = _row_major(body, node)
                elif shares:
                    node = body.dispatch_node(ROLES["clone"], (node,))
                if k < like and not same_strides(node.meta["val"], made.nodes[k].meta["val"]):
                    node = body.dispatch_node(ROLES["copy"], (made.nodes[k], node))
                nodes.append(node)
        return finish(body, nodes[0] if bare else tuple(nodes))

    # -- the call ------------------------------------------------------------------------------------------------------
    def record(self) -> Any:
        functions = [self._function(self.args[k]) for k in self.form.functions]
        results = getattr(self, f"_{self.form.runs}")(*functions)
        like = len(self.operands.get("carried", ()))
        test = functions[0] if self.form.runs == "loop" else None
        graphs = [self._graph(f, 0 if f is test else like, bare=f is test) for f in functions]
        keep = any(f.recorder.kept for f in functions)
        if keep and self.recorder.backward:
            raise self._fail("random numbers or effects, which would come a second time, in a gradient")
        args = list(self.args)
        for k, graph in zip(self.form.functions, graphs, strict=True):
            name = f"{self.op.name()}_{len(self.recorder.constants)}"
            self.recorder.constants[name] = graph  # type: ignore[assignment]
            args[k] = self.recorder.graph.create_node("get_attr", name, (), {})
        for key, nodes in self.operands.items():
            args[getattr(self.form, key)] = nodes
        if self.form.predicate is not None:
            args[self.form.predicate] = self.recorder.nodes(args[self.form.predicate])
        node = self.recorder.call(self.op, tuple(args), {}, results, keep=keep)
        for k, t in enumerate(results):
            if isinstance(t, torch.Tensor):
                self.recorder._fresh(t, self.recorder._item(node, k, t))
            elif isinstance(t, SYMBOLIC):
                self.recorder.symbols.bind(t, self.recorder._item(node, k, t))
        return pytree.tree_unflatten(results, functions[-1].spec)

    def _like(self, t: Any, rows: Any = None) -> Any:
        """A fake result as a function's result `t` is; of `rows` of them, stacked."""
        if not isinstance(t, torch.Tensor):
            return None if t is None else self._fresh_number()
        known = self.recorder.symbols
        sizes: list[Any] = list(t.shape)
        new = {s for n in sizes if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}
        if any(s not in known.nodes and s not in known.sources for s in new):
            raise self._fail("a result whose sizes come from data")
        simple = is_simple(t)
        with self.fake_mode:
            if rows is not None or not simple:
                return torch.empty((*(() if rows is None else (rows,)), *t.shape), dtype=t.dtype, device=t.device)
            return torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device)

    def _branch(self, first: _Function, second: _Function) -> list[Any]:
        same = first.spec == second.spec and all(map(_alike, first.results, second.results))
        if not same:
            # Torch refuses it, or the result has sizes that come from data.
            with self.fake_mode:
                self.op(*self.args)
            raise self._fail("branches with results of different sizes")
        return [self._like(t) for t in first.results]

    def _loop(self, test: _Function, body: _Function) -> list[Any]:
        self._check_carried(body, len(body.results))
        if len(test.results) != 1 or not isinstance(test.results[0], (torch.Tensor, torch.SymBool)):
            raise self._fail("a condition that is no tensor")
        return [self._like(t) for t in body.fakes[: len(body.results)]]

    def _scan(self, body: _Function) -> list[Any]:
        count = len(self.operands["carried"])
        self._check_carried(body, count)
        return [*(self._like(t) for t in body.fakes[:count]), *self._stacked(body.results[count:])]

    def _map(self, body: _Function) -> list[Any]:
        return self._stacked(body.results)

    def _stacked(self, results: Sequence[Any]) -> list[Any]:
        rows = self.args[self.form.sliced][0].shape[0]  # type: ignore[index]
        if not all(t is None or isinstance(t, torch.Tensor) for t in results):
            raise self._fail("a number for each slice")
        return [self._like(t, rows) for t in results]

    def _check_carried(self, body: _Function, count: int) -> None:
        """Raises what torch raises, or `UnsupportedError`, where one run does not return what the next one takes."""
        carried = len(self.operands["carried"])
        if count != carried or not all(map(_alike, body.fakes[:carried], body.results)):
            with self.fake_mode:
                self.op(*self.args)
            raise self._fail("results that differ from what is carried")


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are tensors of one dtype, device and shape, or both numbers, or both None."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        sizes = [[n.node.expr if isinstance(n, torch.SymInt) else n for n in t.shape] for t in (a, b)]
        return a.dtype == b.dtype and a.device == b.device and sizes[0] == sizes[1]
    numbers = (int, torch.SymInt)
    return (a is None and b is None) or (isinstance(a, numbers) and isinstance(b, numbers))


def is_simple(t: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each once: sizes that are symbols only in row-major order."""
    layout = Layout.of(t)
    return is_row_major(layout) or (layout.plain and is_dense(layout) and 0 not in layout.stride)


def _row_major(recorder: Recorder, node: fx.Node) -> fx.Node:
    return recorder.dispatch_node(ROLES["clone"], (node,), {"memory_format": torch.contiguous_format})
