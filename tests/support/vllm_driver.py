"""What vLLM does with a compiler: it traces a model once, splits the graph at some operators, and has each other piece compiled for one range of
sizes after the other, or loaded by a handle that an earlier process has kept in a file. Run as a program with a cache folder, it prints JSON.
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx.passes.split_module import split_module

import opforge
from opforge.clients.vllm import Compiler


@dataclass(frozen=True)
class Range:
    """Sizes from `start` to `end`, both included, as vLLM names them."""

    start: int
    end: int

    def is_single_size(self) -> bool:
        return self.start == self.end


RANGES = (Range(1, 2048), Range(4, 4))


def model(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Three pieces; the one in the middle, a sort in place of attention, stays eager."""
    h = torch.nn.functional.silu(x @ w) + b
    h = torch.sort(h, dim=1).values
    return torch.nn.functional.layer_norm(h, (8,)) + h.mean(1, keepdim=True)


def arguments(rows: int) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, 8, generator=draws), torch.eye(8) + 0.5, torch.ones(8)]


def pieces() -> tuple[torch.fx.GraphModule, list[str]]:
    """The model's graph, split, and the names of the pieces to be compiled."""
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    x = arguments(5)
    torch._dynamo.mark_dynamic(x[0], 0)
    torch.compile(model, backend=keep, fullgraph=True)(*x)
    numbers: dict[torch.fx.Node, int] = {}
    number = 0
    for node in found[0].graph.nodes:
        if node.target is torch.sort:
            number = 1
        elif number == 1 and node.target is not operator.getitem:  # parts of its result belong to it
            number = 2
        numbers[node] = number
    split = split_module(found[0], None, lambda node: numbers[node], keep_original_order=True)
    return split, ["submod_0", "submod_2"]


def example_inputs(graph: torch.fx.GraphModule, sizes: Range) -> list[Any]:
    """Fake inputs out of the graph for a range, real ones for one size."""
    fake = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    if not sizes.is_single_size():
        return fake
    number = [sizes.start if isinstance(x, torch.SymInt) else x for x in fake]
    return [
        torch.ones([sizes.start if isinstance(n, torch.SymInt) else n for n in x.shape])
        if isinstance(x, torch.Tensor)
        else x
        for x in number
    ]


def run(
    split: torch.fx.GraphModule, names: list[str], folder: Path, sizes: Range, ancient: bool = False
) -> dict[str, Any]:
    """Compile or load the named pieces for `sizes`, and run the model. `ancient`: with the arguments of older releases."""
    compiler = Compiler()
    compiler.initialize_cache(str(folder / "backbone"), False, "backbone")
    kept = folder / "handles.py"
    handles = ast.literal_eval(kept.read_text()) if kept.exists() else {}
    opforge.reset_stats()
    loaded = 0
    for index, name in enumerate(names):
        graph: Any = split._modules[name]
        inputs, key = example_inputs(graph, sizes), (sizes.start, sizes.end, index, compiler.name)
        old_range = sizes.start if sizes.is_single_size() else None
        if key in handles:
            rest = (index, old_range) if ancient else (sizes,)
            call, loaded = compiler.load(handles[key], graph, inputs, *rest), loaded + 1
        else:
            call, handles[key] = compiler.compile(
                graph, inputs, {"epilogue_fusion": True}, old_range if ancient else sizes
            )
        split.__dict__[name] = call  # as vLLM does: it is no module
    kept.write_text(repr(handles))
    errors = []
    for rows in [sizes.start] if sizes.is_single_size() else [2, 5, 19]:
        x = arguments(rows)
        result = split.forward(rows, *x)[0]
        exact = model(*[a.double() for a in x])
        errors.append(float((result - exact).abs().max()))
    stats = opforge.stats()
    facts = {"loaded": loaded, "error": max(errors), "hash": compiler.compute_hash(None)}
    return facts | {k: stats[k] for k in ("graphs", "cache_hits", "fallbacks")}


if __name__ == "__main__":
    graphs, ancient = pieces(), "ancient" in sys.argv[2:]
    print(json.dumps([run(*graphs, Path(sys.argv[1]), sizes, ancient) for sizes in RANGES]))
