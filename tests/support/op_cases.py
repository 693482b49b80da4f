"""The `tests` of operator entries as calls: argument texts → tensors, and a functional graph with that one call."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32)
_DTYPES = {str(d).removeprefix("torch."): d for d in _PLAIN}
_DTYPES |= {"int64": torch.int64, "uint8": torch.uint8, "bool": torch.bool}
_DTYPES |= {"complex64": torch.complex64, "complex128": torch.complex128}


@dataclass
class Maker:
    """Makes the tensors that a text names (`F(2, 3)`, `I(9, 4)`, …); floats have `dtype`, and every maker starts from the same seed."""

    dtype: torch.dtype = torch.float32
    seed: int = 0

    def arguments(self, text: str) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of a text such as `F(2, 3), [1], keepdim=True`."""
        self.generator = torch.Generator().manual_seed(self.seed)
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        return [self.value(a) for a in call.args], {str(k.arg): self.value(k.value) for k in call.keywords}

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.tensor(node.func.id, [self.value(a) for a in node.args])
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(e) for e in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        if isinstance(node, ast.Name):
            return _DTYPES[node.id] if node.id in _DTYPES else {"inf": float("inf"), "nan": float("nan")}[node.id]
        assert isinstance(node, ast.Constant), ast.dump(node)
        return node.value

    def tensor(self, kind: str, sizes: list[int]) -> torch.Tensor:
        g = self.generator
        if kind in "IS":
            high, *sizes = sizes
            return torch.randint(0 if kind == "I" else -high, high, sizes, generator=g)
        if kind == "B":
            return torch.rand(sizes, generator=g) < 0.5
        if kind == "F":
            kind_of = self.dtype if self.dtype.is_complex else torch.float32
            return torch.randn(sizes, generator=g, dtype=kind_of).to(self.dtype)
        low, span = (0.5, 2.0) if kind == "P" else (0.05, 0.9)
        return (torch.rand(sizes, generator=g) * span + low).to(self.dtype)


def default_cases(op: torch._ops.OpOverload) -> list[str]:
    """Argument texts for an elementwise operator that has none of its own: equal shapes, and broadcasting ones."""
    cases = []
    for shapes in (("(3, 5)", "(3, 5)", "(3, 5)"), ("(2, 3, 5)", "(5)", "(3, 1)")):
        left = iter(shapes)
        parts = []
        for a in op._schema.arguments:
            text = str(a.type)
            if text == "Tensor":
                parts.append(f"F{next(left)}")
            elif not a.has_default_value():
                parts.append("0.75" if text in ("number", "float") else "1")
        cases.append(", ".join(parts))
    return cases


def graph_of(
    op: torch._ops.OpOverload, args: list[Any], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A functional graph that calls `op` once, with fake values, and the tensors for its placeholders."""
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []
    fakes: list[torch.Tensor] = []
    mode = FakeTensorMode()

    def leaf(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            node = graph.placeholder(f"x{len(inputs)}")
            inputs.append(x)
            fakes.append(mode.from_tensor(x))
            node.meta["val"] = fakes[-1]
            return node
        return [leaf(v) for v in x] if isinstance(x, list) else x

    nodes = [leaf(a) for a in args]
    named = {k: leaf(v) for k, v in kwargs.items()}
    call = graph.call_function(op, tuple(nodes), named)
    with mode:
        call.meta["val"] = op(*_faked(args, inputs, fakes), **{k: _faked(v, inputs, fakes) for k, v in kwargs.items()})
    graph.output((call,))
    if not isinstance(call.meta["val"], torch.Tensor):
        graph.erase_node(next(n for n in graph.nodes if n.op == "output"))
        items = []
        for k, v in enumerate(call.meta["val"]):
            item = graph.call_function(__import__("operator").getitem, (call, k))
            item.meta["val"] = v
            items.append(item)
        graph.output(tuple(items))
    return fx.GraphModule(torch.nn.Module(), graph), inputs


def _faked(x: Any, inputs: list[torch.Tensor], fakes: list[torch.Tensor]) -> Any:
    if isinstance(x, torch.Tensor):
        return next(f for t, f in zip(inputs, fakes, strict=True) if t is x)
    return [_faked(v, inputs, fakes) for v in x] if isinstance(x, list) else x
