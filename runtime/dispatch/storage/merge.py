"""How inputs enter the graph: each as a placeholder of its own, equal objects once, merged groups as views of one
base.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from ....errors import UnsupportedError
from ....generated.dispatch_tables import ROLES
from ....generated.schemas import BaseInfo
from ..record.recorder import Recorder
from .families import Family, family_of
from .inputs import Inputs, own_history
from .overlap import byte_range, inside, is_row_major
from .regions import Layout, Region, Step, Value


@dataclass
class Entered:
    """`values[i]` is what input i was when the program began (None for numbers); `graph_inputs` the flat inputs with
    placeholders of their own; `bases` the merged groups, with their base's value; `base_tensors` the traced tensors that the bases are, and
    `base_edges` where their gradients arrive (None where they have none).
    """

    values: list[Value | None]
    graph_inputs: list[int] = field(default_factory=list)
    bases: list[tuple[BaseInfo, Value]] = field(default_factory=list)
    base_tensors: list[torch.Tensor] = field(default_factory=list)
    base_edges: list[Any] = field(default_factory=list)


def enter_inputs(inputs: Inputs, recorder: Recorder) -> Entered:
    """Make the placeholders, inputs in order and then bases, and record every input tensor as a value."""
    entered = Entered([None] * len(inputs.fakes))
    in_base = frozenset().union(*inputs.merged) if inputs.merged else frozenset()
    for i, value in enumerate(inputs.fakes):
        same = inputs.same_as[i]
        if same is not None:
            continue
        if i in in_base:
            continue
        entered.graph_inputs.append(i)
        node = _placeholder(recorder.graph, f"arg{i}", value)
        recorder.makers[id(value)] = node
        if isinstance(value, torch.Tensor):
            entered.values[i] = recorder.regions.add(value, node, (i,))
            if not inputs.layouts[i].plain:  # type: ignore[union-attr]
                recorder.symbols.bind_sizes(value, node)
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            recorder.symbols.bind(value, node)
    for k, group in enumerate(inputs.merged):
        entered.bases.append(_enter_base(inputs, recorder, entered, k, sorted(group)))
    for i, same in enumerate(inputs.same_as):
        if same is not None:
            entered.values[i] = entered.values[same]
    return entered


def _placeholder(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _enter_base(
    inputs: Inputs, recorder: Recorder, entered: Entered, k: int, members: list[int]
) -> tuple[BaseInfo, Value]:
    layouts = {i: inputs.layouts[i] for i in members}
    known = {i: layout for i, layout in layouts.items() if layout is not None and layout.plain}
    if len(known) != len(members):
        raise UnsupportedError(
            f"inputs {members} share elements, one of them is written, and their sizes are dynamic; mark them static"
        )
    if any(0 in layout.size for layout in known.values()):
        raise UnsupportedError(f"inputs {members} are in one storage, one of them is written, and one has no elements")
    start = min(byte_range(layout)[0] for layout in known.values())
    end = max(byte_range(layout)[1] for layout in known.values())
    # The base has the widest dtype of the group: every offset is a multiple of a narrower one then.
    first = max(members, key=lambda i: (known[i].dtype.itemsize, -i))
    dtype = known[first].dtype
    size = dtype.itemsize
    if start % size or end % size or any(known[i].dtype.is_complex != dtype.is_complex for i in members):
        raise UnsupportedError(
            f"inputs {members} share elements as different dtypes at offsets that no tensor of {dtype} can hold"
        )
    length = (end - start) // size
    family = family_of([inputs.given[i] for i in members]) if inputs.training else None
    span = Layout(dtype, (length,), (1,), start // size)
    if family is not None and not (inside(span, family.layout) and family.layout.dtype is dtype):
        family = None
    if inputs.training and family is None and any(inputs.given[i].requires_grad for i in members):
        raise UnsupportedError(
            f"inputs {members} share elements, one of them is written, one requires grad, and they are not ordinary views of one tensor"
        )
    with inputs.fake_mode, torch.no_grad():
        base = inputs.fakes[first].detach().as_strided((length,), (1,), start // size)
    if family is not None:
        base = own_history(base, family.root, inputs.fake_mode)
    for i in members:
        own = _view(inputs.fake_mode, base, known[i], family)
        inputs.fakes[:] = [
            own if same == i or j == i else t
            for j, (t, same) in enumerate(zip(inputs.fakes, inputs.same_as, strict=True))
        ]
        inputs.versions[i] = None if own.is_inference() else own._version
        inputs.edges[i], inputs.requires_grad[i] = None, own.requires_grad
    entered.base_tensors.append(base)
    entered.base_edges.append(get_gradient_edge(base) if family is not None and base.requires_grad else None)
    node = _placeholder(recorder.graph, f"base{k}", base)
    storage = base.untyped_storage()
    region = Region(storage._cdata, storage, tuple(members))
    recorder.regions.by_storage.setdefault(region.key, []).append(region)
    whole = Value(region, node, Layout.of(base))
    recorder.regions.set(base, whole)
    for i in members:
        value = _member(recorder, region, whole, known[i], inputs.fakes[i])
        recorder.regions.set(inputs.fakes[i], value)
        entered.values[i] = value
    place = byte_range(known[first])[0]
    distances = tuple(byte_range(known[i])[0] - place for i in members)
    root = next((i for i in members if family is not None and inputs.given[i] is family.root), None)
    info = BaseInfo(
        tuple(members), first, (start - place) // size, length, distances, followed=family is not None, root=root
    )
    return info, whole


def _view(fake_mode: Any, base: torch.Tensor, layout: Layout, family: Family | None) -> torch.Tensor:
    """The traced member: a tensor object of its own, which autograd follows as a view of the base when it follows the family."""
    with fake_mode, torch.set_grad_enabled(family is not None):
        own = None
        if family is not None and is_row_major(layout):
            start = layout.offset - base.storage_offset()
            own = base[start : start + math.prod(layout.size)].view(layout.size)
        if own is None or own.stride() != tuple(layout.stride):  # dimensions of size 1 have any stride
            flat = base if base.dtype == layout.dtype else base.view(layout.dtype)
            own = flat.as_strided(layout.size, layout.stride, layout.offset)
    own._opforge_own = True  # type: ignore[attr-defined]
    return own


def _member(recorder: Recorder, region: Region, whole: Value, layout: Layout, fake: torch.Tensor) -> Value:
    """The value of a member: the base in the member's dtype, sliced and shaped where that is enough."""
    if layout.dtype != whole.layout.dtype:
        step = Step(ROLES["view_dtype"], (None, layout.dtype), {})
        ratio = whole.layout.dtype.itemsize // layout.dtype.itemsize
        of_dtype = Layout(layout.dtype, (whole.layout.size[0] * ratio,), (1,), whole.layout.offset * ratio)
        whole = Value(region, None, of_dtype, whole, step, version=-1)
    start = layout.offset - whole.layout.offset
    if fake.is_contiguous():
        part = Layout(layout.dtype, (fake.numel(),), (1,), layout.offset)
        sliced = Value(
            region, None, part, whole, Step(ROLES["slice"], (None, 0, start, start + fake.numel()), {}), version=-1
        )
        return Value(region, None, layout, sliced, Step(ROLES["view"], (None, list(layout.size)), {}), version=-1)
    return Value(region, None, layout, whole, Step(ROLES["as_strided"], (), {}), version=-1, near=whole)
