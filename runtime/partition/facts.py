"""What the partitioner knows of a joint graph, as arrays over node numbers (graph order): operands, users, sizes, classes, sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..dispatch.storage.overlap import is_dense, is_row_major
from ..dispatch.storage.regions import Layout
from ..torch_compat import size_hint
from .classes import OpClass, class_of

#: Elements assumed along a size that comes from data.
UNKNOWN_SIZE = 4096


def bytes_of(value: Any) -> int:
    """Bytes of a tensor's elements (sizes by their hints), 8 of a number; of a list or tuple the sum, 0 of anything else."""
    if isinstance(value, torch.Tensor):
        count = 1
        for n in value.shape:
            count *= n if type(n) is int else size_hint(n, UNKNOWN_SIZE)
        return count * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(bytes_of(v) for v in value)
    return 8 if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)) else 0


def has_gaps(node: fx.Node) -> bool:
    """Whether the elements of a result lie apart, or several at one place: an operator wrote into a copy of a column."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    layout = Layout.of(value)
    return not (is_row_major(layout) or is_dense(layout))


@dataclass
class Facts:
    """One joint graph. All lists are indexed by node number; the output node has none.

    same        the first node that computes the same; only that one has operands and users.
    backward    must run in the backward: needs a tangent, or is random, heavy or an effect and was recorded there.
    wanted      forward values that the live nodes of the backward read, or that are gradients themselves; sorted.
    required    needed by a forward output (or an effect of the forward).
    root        what a view views in the end; itself for anything else.
    level       heavy nodes on the longest path to it: consumers of a higher level run after some heavy kernel, so never in one with it.
    tag         the checkpointed region, or None.
    pinned      whether a region's policy wants it kept (of a view: what it views), or what it is made of may be written to.
    output      whether it is an output of the forward that may be kept as it is.
    lent        whether it is an output of the forward that its caller may write to before the backward.
    raw         whether it is an input that is overwritten after the forward.
    gaps        whether it is a result, no view, with gaps between its elements: a copy without them is kept.
    """

    nodes: list[fx.Node]
    index: dict[fx.Node, int]
    same: list[int]
    inputs: list[list[int]]
    users: list[list[int]]
    kind: list[OpClass]
    size: list[int]
    tensor: list[bool]
    backward: list[bool]
    live: list[bool]
    required: list[bool]
    root: list[int]
    level: list[int]
    tag: list[Any]
    pinned: list[bool]
    output: list[bool]
    lent: list[bool]
    raw: list[bool]
    gaps: list[bool]
    outputs: list[int | None]
    gradients: list[int | None]
    output_args: list[Any]
    gradient_args: list[Any]
    lent_outputs: frozenset[int]
    primals: list[int] = field(default_factory=list)
    tangents: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)

    def saveable(self, v: int) -> bool:
        """Whether a value can be handed from one graph to the other: a tensor or a number."""
        return (
            self.tensor[v]
            or self.kind[v] is OpClass.SYMBOL
            or (
                isinstance(
                    self.nodes[v].meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
                )
            )
        )

    def is_symbol(self, v: int) -> bool:
        """Whether the value is a number, not a tensor."""
        return not self.tensor[v]


def gather(
    joint: fx.GraphModule,
    num_primals: int,
    num_forward_outputs: int,
    never_saved_raw: frozenset[int],
    lent_outputs: frozenset[int] = frozenset(),
) -> Facts:
    """Collect the facts of a joint graph, in time linear in its nodes and edges."""
    nodes = [n for n in joint.graph.nodes if n.op != "output"]
    end = next(n for n in reversed(joint.graph.nodes) if n.op == "output")
    outs, grads = end.args[0]  # type: ignore[misc]
    if len(outs) != num_forward_outputs:  # type: ignore[arg-type]
        raise ValueError(f"the joint graph has {len(outs)} forward outputs, not {num_forward_outputs}")  # type: ignore[arg-type]
    index = {n: k for k, n in enumerate(nodes)}
    kind = [class_of(n) for n in nodes]
    given = {n for n in (*outs, *grads) if isinstance(n, fx.Node)}  # type: ignore[misc]
    same = _equal_nodes(nodes, index, kind, given)
    # A node that repeats an earlier one has no operands and no users: nothing needs it.
    inputs = [
        list(dict.fromkeys(same[index[a]] for a in n.all_input_nodes)) if same[v] == v else []
        for v, n in enumerate(nodes)
    ]
    users: list[list[int]] = [[] for _ in nodes]
    for v, operands in enumerate(inputs):
        for u in operands:
            users[u].append(v)
    for v in range(len(nodes)):
        if same[v] != v:
            kind[v] = OpClass.VIEW  # costs nothing
        elif kind[v] is OpClass.PART and (whole := kind[inputs[v][0]]) in (OpClass.VIEW, OpClass.SYMBOL):
            kind[v] = whole
    placeholders = [v for v, n in enumerate(nodes) if n.op == "placeholder"]
    primals, tangents = placeholders[:num_primals], placeholders[num_primals:]
    tensor = [isinstance(n.meta.get("val"), torch.Tensor) for n in nodes]
    facts = Facts(
        nodes,
        index,
        same,
        inputs,
        users,
        kind,
        [bytes_of(n.meta.get("val")) for n in nodes],
        tensor,
        backward=[False] * len(nodes),
        live=[False] * len(nodes),
        required=[False] * len(nodes),
        root=list(range(len(nodes))),
        level=[0] * len(nodes),
        tag=[n.meta.get("region") for n in nodes],
        pinned=[bool(n.meta.get("must_save")) for n in nodes],
        output=[False] * len(nodes),
        lent=[False] * len(nodes),
        raw=[False] * len(nodes),
        gaps=[k is not OpClass.VIEW and has_gaps(n) for k, n in zip(kind, nodes, strict=True)],
        outputs=[index[o] if isinstance(o, fx.Node) else None for o in outs],  # type: ignore[union-attr]
        gradients=[index[g] if isinstance(g, fx.Node) else None for g in grads],  # type: ignore[union-attr]
        output_args=list(outs),  # type: ignore[arg-type]
        gradient_args=list(grads),  # type: ignore[arg-type]
        lent_outputs=lent_outputs,
        primals=primals,
        tangents=tangents,
    )
    for k in never_saved_raw:
        facts.raw[primals[k]] = True
    _sides(facts)
    _layout(facts)
    return facts


def _equal_nodes(
    nodes: list[fx.Node], index: dict[fx.Node, int], kind: list[OpClass], given: set[fx.Node]
) -> list[int]:
    """For each node the first one that computes the same from the same: recorded twice, it would be kept twice. Outputs stay apart, and
    what is more than a view is not shared by the two sides: a checkpointed region that ran again in the backward is meant to.
    """
    same = list(range(len(nodes)))
    first: dict[Any, int] = {}
    for v, node in enumerate(nodes):
        if kind[v] in (OpClass.INPUT, OpClass.FIXED, OpClass.EFFECT) or node in given:
            continue
        side = node.meta.get("backward", False) and kind[v] > OpClass.VIEW
        key = (node.op, node.target, node.meta.get("region"), side, _key((node.args, node.kwargs), index, same))
        try:
            same[v] = first.setdefault(key, v)
        except TypeError:  # an argument that cannot be hashed
            continue
    return same


def _key(value: Any, index: dict[fx.Node, int], same: list[int]) -> Any:
    """A value of a node's arguments such that equal keys mean the same value: 1, 1.0 and True differ."""
    if isinstance(value, fx.Node):
        return ("node", same[index[value]])
    if isinstance(value, (list, tuple)):
        return (list, *(_key(v, index, same) for v in value))
    if isinstance(value, dict):
        return (dict, *((k, _key(v, index, same)) for k, v in sorted(value.items())))
    if isinstance(value, slice):
        return (slice, *(_key(v, index, same) for v in (value.start, value.stop, value.step)))
    # -0.0 equals 0.0 but is another argument.
    return (type(value), repr(value)) if isinstance(value, (float, complex)) else (type(value), value)


def _sides(f: Facts) -> None:
    """Which nodes run in the backward, which values it wants, and what the forward needs."""
    for v in f.tangents:
        f.backward[v] = True
    for v, n in enumerate(f.nodes):
        recorded = n.meta.get("backward", False)
        if any(f.backward[u] for u in f.inputs[v]) or (recorded and f.kind[v] >= OpClass.HEAVY):
            f.backward[v] = True
    for k, o in enumerate(f.outputs):
        if o is not None:
            if f.backward[o]:
                raise ValueError(f"the forward output '{f.nodes[o].name}' needs the backward")
            f.required[o] = True
            f.output[o] = f.output[o] or k not in f.lent_outputs
    for o in f.outputs:
        if o is not None:
            f.lent[o] = not f.output[o] and f.kind[o] is not OpClass.INPUT
    wanted = set()
    for g in f.gradients:
        if g is not None:
            if f.backward[g]:
                f.live[g] = True
            else:
                wanted.add(g)
    for v in range(len(f.nodes) - 1, -1, -1):
        kept = f.kind[v] in (OpClass.FIXED, OpClass.EFFECT)
        if f.backward[v]:
            f.live[v] = f.live[v] or kept
            if f.live[v]:
                for u in f.inputs[v]:
                    if f.backward[u]:
                        f.live[u] = True
                    else:
                        wanted.add(u)
        else:
            f.required[v] = f.required[v] or kept
            if f.required[v]:
                for u in f.inputs[v]:
                    f.required[u] = True
    f.wanted = sorted(wanted)


def _layout(f: Facts) -> None:
    """Roots of views, what policies pin, and levels."""
    for v, operands in enumerate(f.inputs):
        kind = f.kind[v]
        if kind is OpClass.VIEW:
            base = next(
                (u for u in operands if f.tensor[u] or isinstance(f.nodes[u].meta.get("val"), (list, tuple))), v
            )
            f.root[v] = f.root[base]
            f.pinned[f.root[v]] = f.pinned[f.root[v]] or f.pinned[v]
        if operands:
            f.level[v] = max(f.level[u] for u in operands) + (kind >= OpClass.HEAVY)
