"""What the operators that made a mask say of its elements: that all let scores through, or those of a lower triangle.

The tensor's part of the graph is lowered, as it would be later, and its nests are substituted into each other. What is left is one expression
over the coordinates, in which a load stands for what only data tells.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ...generated.ops import LOWERINGS
from ..dispatch.operators.schema import op_info
from ..dispatch.record.known import Truth
from ..ir.fold import coordinate, fold
from ..ir.index import Expr, proves_nonnegative
from ..ir.nodes import FLOATS, Nest, Node, const, identity_mapping, rebuild
from ..ir.work import is_pointwise
from ..observe.counters import uncounted
from ..torch_compat import OpOverload
from .graph import elements_of

MOST = 64
"""Nodes that a mask is made by: a tensor of more is not looked at."""
LOWEST = -1e38
"""A number that no score makes good: minus infinity, and the least of bfloat16 and float32."""
LONG = 512
"""Nodes of an expression that is put in the place of a load."""
LARGE = 1 << 25
"""Elements that are computed to look at them."""
EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Dtypes of which each device computes the same."""


def truth(node: fx.Node, constants: Mapping[str, torch.Tensor]) -> Truth:
    """Where the elements of the mask `node` let a score through, as far as its graph tells: where they are true, or 0 if they are floating.
    `constants` are the graph's tensors by name.
    """
    part = _part(node, constants)
    if part is None:
        return Truth()
    found = _by_expression(part, node)
    return found if found != Truth() else _by_value(part)


def _by_expression(part: fx.GraphModule, node: fx.Node) -> Truth:
    """What holds for all sizes, where these are symbolic."""
    try:
        with uncounted():
            name, items = elements_of(part, node.meta["val"].device.type)
    except UnsupportedError:
        return Truth()
    nest = _expanded(items).get(name)
    if nest is None:
        return Truth()
    found = Reader().passes(nest.body) if nest.dtype in FLOATS else Reader().conditions(nest.body)
    if found is None:
        return Truth()
    vars_ = nest.vars
    triangle = vars_[-2] - vars_[-1] if len(vars_) > 1 and nest.shape[-2] == nest.shape[-1] else None
    return Truth(not found, found == {triangle})


def _by_value(part: fx.GraphModule) -> Truth:
    """What the elements say, where they are integers that nothing but the program makes: they are computed."""
    if any(n.op == "get_attr" or (n.op == "placeholder" and n.users) for n in part.graph.nodes):
        return Truth()
    nodes = [n for n in part.graph.nodes if n.op == "call_function"]
    if not all(_is_exact(n.meta["val"]) for n in nodes):
        return Truth()
    if sum(n.meta["val"].numel() for n in nodes if op_info(n.target).kind != "view") > LARGE:
        return Truth()
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for n in nodes:
            args, kwargs = fx.node.map_arg((n.args, n.kwargs), values.__getitem__)
            values[n] = n.target(*args, **{k: "cpu" if k == "device" else v for k, v in kwargs.items()})  # type: ignore[operator]
        mask = values[nodes[-1]]
        mask = mask[tuple(slice(1 if s == 0 else None) for s in mask.stride()[:-2])]  # dimensions that repeat it
        rows, columns = (1, *mask.shape)[-2:]
        triangle = torch.ones(rows, columns, dtype=torch.bool).tril()
        return Truth(bool(mask.all()), rows == columns and bool((mask == triangle).all()))


def _is_exact(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.dtype in EXACT and all(type(n) is int for n in t.shape)


def _part(node: fx.Node, constants: Mapping[str, torch.Tensor]) -> fx.GraphModule | None:
    """The graph of what makes `node`, where operators without a lowering are placeholders; None where it is long."""
    needed, left = set(), [node]
    while left:
        n = left.pop()
        if n in needed:
            continue
        needed.add(n)
        if len(needed) > MOST:
            return None
        if _is_readable(n):
            left += n.all_input_nodes
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for n in node.graph.nodes:
        if n.op == "placeholder" or n in needed:
            if n.op == "get_attr" or _is_readable(n):
                env[n] = graph.node_copy(n, env.__getitem__)
            else:
                env[n] = graph.placeholder(n.name)
                env[n].meta["val"] = n.meta.get("val")
    graph.output(env[node])
    graph.output_node().args[0].meta["val"] = node.meta["val"]  # type: ignore[union-attr]
    return fx.GraphModule(dict(constants), graph)


def _is_readable(n: fx.Node) -> bool:
    """Whether lowering finds an expression for the elements of `n`, or its number."""
    if n.op != "call_function":
        return False
    if not isinstance(n.target, OpOverload):
        return not isinstance(n.meta.get("val"), (torch.Tensor, tuple, list))  # arithmetic of sizes
    return str(n.target) in LOWERINGS or op_info(n.target).kind == "view"


def _expanded(items: list[Any]) -> dict[str, Nest]:
    """The pointwise nests by name, each with the bodies of those that it loads from in their place."""
    done: dict[str, Nest] = {}

    def leaf(load: Node) -> Node | None:
        nest = done.get(load.attr.buffer)
        if nest is None or load.args:
            return None
        return rebuild(nest.body, lambda _: None, identity_mapping(nest.vars, load.attr.index))

    for item in items:
        if is_pointwise(item):
            body = fold(rebuild(item.body, leaf, {}))
            if sum(1 for _ in body.walk()) > LONG:  # each read of itself at other places may double it
                continue
            done[item.name] = Nest(item.name, item.shape, item.dtype, item.vars, body)
    return done


Conditions = frozenset[Expr] | None
ALWAYS: frozenset[Expr] = frozenset()


class Reader:
    """Reads expressions, each node once: `conditions` of a node are expressions of coordinates that are all at least 0 exactly where it is true
    (not zero); None where no such are found, as where data decides. Those that always hold are left out, so that what is true everywhere has
    none.
    """

    def __init__(self) -> None:
        self.memo: dict[Node, Conditions] = {}
        self.positions: dict[Node, Expr | None] = {}

    def conditions(self, node: Node) -> Conditions:
        if node not in self.memo:
            self.memo[node] = self._read(node)
        return self.memo[node]

    def _read(self, node: Node) -> Conditions:
        if node.op == "const":
            return ALWAYS if node.attr else None
        if node.op == "to_dtype" and "bool" in (node.dtype, node.args[0].dtype):
            return self.conditions(node.args[0])
        if node.op == "where":
            return self._of_choice(*node.args)
        if node.op in _PYTHON:
            return self._of_comparison(node.op, *node.args)
        if node.dtype != "bool":
            return None
        if node.op in ("logical_and", "bitwise_and"):
            return _both(*map(self.conditions, node.args))
        if node.op in ("logical_or", "bitwise_or"):
            return _either(*map(self.conditions, node.args))
        return self._negated(node.args[0]) if node.op in ("logical_not", "bitwise_not") else None

    def _negated(self, node: Node) -> Conditions:
        if _is_zero(node):
            return ALWAYS
        found = self.conditions(node)
        if found is None or len(found) != 1:  # that one of several does not hold is no conjunction
            return None
        (e,) = found
        return _kept(-e - 1)

    def _of_choice(self, choice: Node, yes: Node, no: Node) -> Conditions:
        if _is_zero(no):
            return _both(self.conditions(choice), self.conditions(yes))
        if _is_zero(yes):
            return _both(self._negated(choice), self.conditions(no))
        found = self.conditions(yes)
        if found is not None and found == self.conditions(no):
            return found
        return _either(self.conditions(choice), self.conditions(no)) if found == ALWAYS else None

    def _of_comparison(self, op: str, left: Node, right: Node) -> Conditions:
        if left.op == "where" and right.op == "const" and all(x.op == "const" for x in left.args[1:]):
            yes, no = (const(_PYTHON[op](x.attr, right.attr), "bool") for x in left.args[1:])
            return self._of_choice(left.args[0], yes, no)
        if op in ("ne", "eq"):
            if left.dtype != "bool" or right.op != "const":
                return None
            return self.conditions(left) if (op == "ne") != bool(right.attr) else self._negated(left)
        a, b = self.position(left), self.position(right)
        return None if a is None or b is None else _kept(_COMPARED[op](a, b))

    def position(self, node: Node) -> Expr | None:
        """The index expression that an int64 node is."""
        if node not in self.positions:
            found = coordinate(node) if node.dtype == "int64" else None
            if node.op in _ARITHMETIC and node.dtype == "int64":
                a, b = map(self.position, node.args)
                found = None if a is None or b is None else _ARITHMETIC[node.op](a, b)
            self.positions[node] = found
        return self.positions[node]

    def passes(self, node: Node) -> Conditions:
        """The same of where a number that is added to a score lets it through: it is 0 there, and elsewhere so low that nothing is left."""
        if node.op == "const":
            return ALWAYS if node.attr == 0 else None
        if node.op == "to_dtype" and node.args[0].dtype in FLOATS:
            return self.passes(node.args[0])
        if node.op != "where":
            return None
        choice, yes, no = node.args
        if _hides(no):
            return _both(self.conditions(choice), self.passes(yes))
        return _both(self._negated(choice), self.passes(no)) if _hides(yes) else None


def _both(a: Conditions, b: Conditions) -> Conditions:
    return None if a is None or b is None else a | b


def _either(a: Conditions, b: Conditions) -> Conditions:
    return ALWAYS if ALWAYS in (a, b) else a if a == b else None


def _kept(e: Expr) -> frozenset[Expr]:
    return ALWAYS if proves_nonnegative(e) else frozenset([e])


def _is_zero(node: Node) -> bool:
    return node.op == "const" and not node.attr


def _hides(node: Node) -> bool:
    return node.op == "const" and node.attr <= LOWEST


_COMPARED: dict[str, Callable[[Expr, Expr], Expr]] = {
    "lt": lambda a, b: b - a - 1,
    "le": lambda a, b: b - a,
    "gt": lambda a, b: a - b - 1,
    "ge": lambda a, b: a - b,
}
_PYTHON: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
_ARITHMETIC: dict[str, Callable[[Expr, Expr], Expr]] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}

__all__ = ["truth"]
