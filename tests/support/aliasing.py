"""Compares a program run through dispatch with eager: values, layouts, which tensors are the same objects and which share storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opforge.runtime.dispatch.trace import Traced, trace
from opforge.runtime.dispatch.wrapper.source import bind

Make = Callable[[], list[Any]]


def iota(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1, 2, … in the given shape."""
    return torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)


def through_dispatch(program: Callable[..., Any], make: Make, calls: int = 2) -> Traced:
    """Trace `program` under no_grad, interpret its functional graph in its wrapper, and compare with eager on `calls` inputs."""
    with torch.no_grad():
        traced = trace(program, make())
        run = bind(traced, traced.graph)
        check_graph(traced)
        for _ in range(calls):
            same_effect(program, run, make)
    return traced


def same_effect(program: Callable[..., Any], run: Callable[..., Any], make: Make) -> None:
    """Call both from one random state on equal inputs and compare everything that a caller can see."""
    expected_in, actual_in = make(), make()
    versions = [t._version for t in _tensors(actual_in) if not t.is_inference()]
    torch.manual_seed(7)
    expected = program(*expected_in)
    torch.manual_seed(7)
    actual = run(*actual_in)
    assert pytree.tree_structure(expected) == pytree.tree_structure(actual)
    same([expected_in, expected], [actual_in, actual])
    for old, e, t in zip(versions, _tensors(expected_in), _tensors(actual_in), strict=False):
        assert t._version > old or e._version == old, "a write that autograd sees in eager is seen here"


def same(expected: Any, actual: Any) -> None:
    """Equal leaves (values, dtype, sizes, strides, offsets), the same objects in the same places, the same sharing of storage."""
    a, b = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
            assert x.is_conj() == y.is_conj()
            assert torch.equal(x, y) or (
                torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
            )
        else:
            assert x == y
            assert type(x) is type(y)
    x, y = _tensors(expected), _tensors(actual)
    assert _relation(x, lambda s, t: s is t) == _relation(y, lambda s, t: s is t), "the same tensor objects"
    assert _relation(x, _shares) == _relation(y, _shares), "storage sharing"
    # Offsets count only relative to another tensor in the storage.
    assert _relation(x, _distance) == _relation(y, _distance), "distances in shared storages"


def check_graph(traced: Traced) -> None:
    """The graph is functional, every node has its fake value, nothing is dead."""
    graph = traced.graph.graph
    graph.lint()
    for node in graph.nodes:
        if node.op == "output":
            continue
        assert "val" in node.meta, node
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable, node.format_node()
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    assert len(placeholders) == len(traced.meta.graph_inputs) + len(traced.meta.bases)
    (output,) = (n for n in graph.nodes if n.op == "output")
    assert len(output.args[0]) == traced.meta.num_outputs


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _relation(tensors: list[torch.Tensor], related: Callable[[torch.Tensor, torch.Tensor], Any]) -> list[Any]:
    return [related(a, b) for i, a in enumerate(tensors) for b in tensors[:i]]


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _distance(a: torch.Tensor, b: torch.Tensor) -> int | None:
    offsets = [t.storage_offset() * t.element_size() for t in (a, b)]
    return offsets[0] - offsets[1] if _shares(a, b) else None
