"""The program's inputs as fake tensors, and which of them share storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from ....errors import UnsupportedError
from ...torch_compat import (
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    TracingContext,
    frame_source,
    is_zerotensor,
    keep_item,
    number_read_from,
)
from ..subclasses.wrappers import inner_tensors, is_wrapper
from .overlap import may_overlap
from .regions import Layout, beyond_strides


def fake_mode_of(inputs: Sequence[Any]) -> Any:
    """The fake mode of the inputs, else of Dynamo's running compile, else a new one."""
    for value in inputs:
        for t in inner_tensors(value):
            if isinstance(t, FakeTensor):
                return t.fake_mode
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    return FakeTensorMode(shape_env=ShapeEnv())


def sources_of(gm: Any, given: Sequence[Any]) -> list[Any]:
    """For each input, where Dynamo has found it, told by the graph that Dynamo made; None where that is unknown. Its context may name
    another place: that of the base of a view, if Dynamo looked at this later, and sizes there have symbols without a source.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"] if isinstance(gm, fx.GraphModule) else []
    # A number that Dynamo passes as a tensor keeps its source: its symbol is named after it.
    plain = [(n, v) for n, v in zip(placeholders, given, strict=False) if number_read_from(_value_of(n)) is None]
    found = {id(v): s for n, v in plain if (s := frame_source(n, v)) is not None}
    return [found.get(id(v)) for v in given]


def _value_of(placeholder: fx.Node) -> Any:
    return placeholder.meta.get("example_value")


def to_fake(value: Any, fake_mode: Any, source: Any = None) -> Any:
    """The fake tensor of an input; its symbolic sizes and their sources are those that Dynamo chose, for the input at `source` if that is
    known. Numbers stay as they are.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and (value.is_neg() or value.is_conj()):
        raise UnsupportedError("an input is lazily conjugated or negated; call resolve_conj() or resolve_neg() on it")
    if isinstance(value, torch.Tensor) and is_zerotensor(value):
        raise UnsupportedError("an input is zeros without memory, as forward-mode gradients are; clone() it")
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    if is_wrapper(value) and all(isinstance(t, FakeTensor) for t in inner_tensors(value)):
        return value
    if beyond := beyond_strides(value):
        raise UnsupportedError(f"an input {beyond}; only strided tensors are traced")
    tracing = TracingContext.try_get()
    context = tracing.tensor_to_context.get(value) if tracing is not None else None
    if context is None:
        return fake_mode.from_tensor(value, static_shapes=True)
    source = source or getattr(context, "tensor_source", None)
    return fake_mode.from_tensor(value, symbolic_context=context, source=source)


def is_static(value: Any) -> bool:
    """Whether the input is a parameter or buffer, which stays where it is between calls."""
    return isinstance(value, torch.nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None


@dataclass
class Inputs:
    """The flat inputs of one trace.

    given     what the caller passed (real or fake tensors, numbers); `alike` fake tensors of the same kinds, and `fakes` those that the
              program runs on.
    merged    groups of inputs that enter as one base.
    """

    given: list[Any]
    fakes: list[Any]
    fake_mode: Any
    merged: list[frozenset[int]] = field(default_factory=list)
    layouts: list[Layout | None] = field(default_factory=list)
    same_as: list[int | None] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    edges: list[Any] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    training: bool = False
    alike: list[Any] = field(default_factory=list)

    @classmethod
    def of(
        cls, given: Sequence[Any], copies: frozenset[int], training: bool = False, sources: Sequence[Any] = ()
    ) -> Inputs:
        """Make fakes of `given`, found at `sources` (`sources_of`); inputs in `copies` (their metadata will change) get tensor objects of
        their own. For `training` all get their own, leaves of autograd where the given ones are; `edges[i]` is where gradients of input i
        arrive, None where it has none.
        """
        for t in given:
            _check_history(t)
        fake_mode = fake_mode_of(given)
        fakes = [to_fake(v, fake_mode, s) for v, s in zip(given, sources or [None] * len(given), strict=True)]
        alike = list(fakes)
        same: list[int | None] = [None] * len(fakes)
        first: dict[int, int] = {}
        for k, t in enumerate(fakes):
            if isinstance(t, torch.Tensor):
                earlier = first.setdefault(id(t), k)
                same[k] = earlier if earlier != k else None
        for k in sorted(copies):
            with fake_mode, torch.no_grad():
                own = fakes[k].detach()
            own._opforge_own = True
            fakes = [own if t is fakes[k] else t for t in fakes]
        edges: list[Any] = [None] * len(fakes)
        if training:
            for k, t in enumerate(fakes):
                if isinstance(t, torch.Tensor) and same[k] is None:
                    own = own_history(t, given[k], fake_mode)
                    fakes = [own if other is t else other for other in fakes]
                    edges[k] = get_gradient_edge(own) if own.requires_grad else None
        layouts = [Layout.of(t) if isinstance(t, torch.Tensor) else None for t in fakes]
        versions = [version_of(t) for t in fakes]
        grads = [isinstance(t, torch.Tensor) and t.requires_grad for t in fakes]
        return cls(list(given), fakes, fake_mode, [], layouts, same, versions, edges, grads, training, alike)

    def version_moved(self, i: int) -> bool:
        """Whether the program bumped the version counter of input `i`."""
        return version_of(self.fakes[i]) != self.versions[i]

    def sharing(self, i: int) -> frozenset[int]:
        """Input `i` and all inputs in its storage (equal objects counted once)."""
        key = self.fakes[i].untyped_storage()._cdata
        return frozenset(
            j
            for j, t in enumerate(self.fakes)
            if isinstance(t, torch.Tensor) and self.same_as[j] is None and t.untyped_storage()._cdata == key
        )

    def overlaps(self, i: int) -> frozenset[int]:
        """Input `i` and all inputs that share elements with it, directly or by way of another (equal objects counted
        once).
        """
        group, todo = {i}, [i]
        near = self.sharing(i)
        while todo:
            a = self.layouts[todo.pop()]
            for j in near:
                b = self.layouts[j]
                if j not in group and a is not None and b is not None and may_overlap(a, b):
                    group.add(j)
                    todo.append(j)
        return frozenset(group)


def _check_history(t: Any) -> None:
    """Raises `UnsupportedError` for a view whose base was written where autograd could not follow: it refuses to say where it comes from."""
    if isinstance(t, torch.Tensor) and t.requires_grad:
        try:
            _ = t.is_leaf
        except RuntimeError as error:
            raise UnsupportedError(f"autograd cannot tell where an input comes from: {error}") from error


def symbols_of(values: Sequence[Any]) -> set[Any]:
    """The symbols in numbers, and in the sizes and strides of tensors."""
    parts: list[Any] = []
    for v in values:
        parts += [*v.shape, *v.stride(), v.storage_offset()] if isinstance(v, torch.Tensor) else [v]
    return set().union(*(p.node.expr.free_symbols for p in parts if isinstance(p, torch.SymInt)))


def of_sizes(values: Sequence[Any], sizes: Mapping[Any, Any]) -> list[Any]:
    """Fake tensors and numbers like these, with numbers for their symbols. Raises `UnsupportedError` where some are not known, or tensors share
    memory.
    """
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    made: dict[int, Any] = {}
    seen: set[int] = set()

    def number(n: Any) -> Any:
        if not isinstance(n, torch.SymInt):
            return n
        found = n.node.expr.xreplace(sizes)
        if found.free_symbols:
            raise UnsupportedError(f"nothing tells the size {n}")
        return int(found)

    for v in values:
        if not isinstance(v, torch.Tensor):
            if isinstance(v, (torch.SymFloat, torch.SymBool)):
                raise UnsupportedError("an input is a number that changes")
            made[id(v)] = number(v)
        elif id(v) not in made:
            key = v.untyped_storage()._cdata
            if key in seen:
                raise UnsupportedError("inputs share memory")
            seen.add(key)
            with fake_mode:
                t = torch.empty_strided(
                    [number(n) for n in v.shape], [number(n) for n in v.stride()], dtype=v.dtype, device=v.device
                )
                t.requires_grad_(v.requires_grad)
                made[id(v)] = t if v.is_leaf else computed(t)
    return [made[id(v)] for v in values]


class _NotALeaf(torch.autograd.Function):
    """A tensor in the same storage that autograd has computed: a program may write to it in place."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return t.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("gradients of a traced input stop at its edge")


def own_history(fake: torch.Tensor, given: torch.Tensor, fake_mode: Any) -> torch.Tensor:
    """Another tensor object in the storage of `fake`, without history, that requires grad and is a leaf as `given`
    does and is.
    """
    with fake_mode, torch.no_grad():
        own = fake.detach()
    keep_item(own, fake)
    own._opforge_own = True  # type: ignore[attr-defined]
    if not given.requires_grad:
        return own
    own.requires_grad_()
    if given.is_leaf:
        return own
    with fake_mode:
        own = computed(own)
    own._opforge_own = True  # type: ignore[attr-defined]
    return own


def computed(t: torch.Tensor) -> torch.Tensor:
    """Another tensor object for `t`, a leaf, that is none."""
    with torch.enable_grad():
        result: torch.Tensor = _NotALeaf.apply(t)
    return result


def is_own(node: Any) -> bool:
    """Whether a node of autograd's is that of `computed`, not one of the program's functions."""
    return getattr(node, "_forward_cls", None) is _NotALeaf


def version_of(t: Any) -> int | None:
    """The version counter of a tensor; None for numbers and inference tensors."""
    return t._version if isinstance(t, torch.Tensor) and not t.is_inference() else None


Lift = tuple[str, torch.Tensor]


def lifted_attributes(gm: fx.GraphModule) -> list[Lift]:
    """Parameters, buffers and tensor constants that a graph reads by name (`get_attr`, `call_module`), as (name,
    tensor), each once.
    """
    found: dict[str, torch.Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = attribute(gm, str(node.target))
            if isinstance(value, torch.Tensor):
                found[str(node.target)] = value
        elif node.op == "call_module":
            module = gm.get_submodule(str(node.target))
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                found[f"{node.target}.{name}"] = tensor
    return list(found.items())


def attribute(owner: Any, path: str) -> Any:
    """The attribute at a dotted path."""
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


Program = Callable[..., Any]
