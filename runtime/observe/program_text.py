"""A graph of Dynamo's as a Python file that can be read back (`testing/recorded.py`): one class for each graph, the program's own last."""

from __future__ import annotations

import builtins
import importlib
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..torch_compat import HigherOrderOperator

__all__ = ["Unwritable", "constants_of", "graphs_of", "program_text"]

PROGRAM = "Program"
# Names that FX gives every graph; only graphs with a pytree signature use the two, and those are written without it.
_UNUSED = ("fx_pytree", "pytree")
_KNOWN = {"NoneType": "NoneType = type(None)", "inf": "from math import inf", "nan": "from math import nan"}

HEAD = '''"""A graph that opforge compiled. `opforge repro FOLDER`, or this file, runs it by eager kernels and by opforge and compares."""

'''
TAIL = """
if __name__ == "__main__":
    import pathlib
    import sys

    from opforge.testing.repro import main

    sys.exit(main(pathlib.Path(__file__).resolve().parent))
"""


class Unwritable(Exception):
    """A graph holds something that Python text cannot say."""


def program_text(gm: fx.GraphModule) -> str:
    """The file. Raises `Unwritable` where a node calls or holds what has no importable name."""
    imports: dict[str, str] = {}
    classes = []
    for path, graph in graphs_of(gm):
        code = _plain(graph).python_code("self")
        for name, value in code.globals.items():
            if name not in _UNUSED:
                imports[name] = _import(name, value)
        classes.append(f"class {class_name(path)}(torch.nn.Module):\n{textwrap.indent(code.src.strip(), '    ')}\n")
    imports.setdefault("torch", "import torch")
    lines = sorted({line for line in imports.values() if line})
    return HEAD + "\n".join(lines) + "\n\n\n" + "\n\n".join(reversed(classes)) + "\n" + TAIL


def class_name(path: str) -> str:
    """The class of the graph at that attribute of the program; "" for the program's own."""
    return f"{PROGRAM}_{path.replace('.', '__')}" if path else PROGRAM


def graphs_of(gm: fx.GraphModule, path: str = "") -> Iterator[tuple[str, fx.GraphModule]]:
    """The graph and those that it calls, each with its dotted attribute."""
    yield path, gm
    for node in gm.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        value = _attribute(gm, node.target)
        below = f"{path}.{node.target}" if path else str(node.target)
        if isinstance(value, fx.GraphModule):
            yield from graphs_of(value, below)
        elif isinstance(value, torch.nn.Module):
            raise Unwritable(f"the graph calls a module, {node.target} ({type(value).__name__})")


def constants_of(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The tensors that the graphs hold, by dotted attribute. Raises `Unwritable` for anything else that they hold."""
    found: dict[str, torch.Tensor] = {}
    for path, graph in graphs_of(gm):
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                value = _attribute(graph, node.target)
                if isinstance(value, torch.Tensor):
                    found[f"{path}.{node.target}" if path else str(node.target)] = value
                elif not isinstance(value, fx.GraphModule):
                    raise Unwritable(f"the graph holds {node.target}, a {type(value).__name__}")
    return found


def _attribute(root: Any, target: Any) -> Any:
    for name in str(target).split("."):
        root = getattr(root, name)
    return root


def _plain(gm: fx.GraphModule) -> fx.Graph:
    """The graph without a pytree signature: flat arguments. Raises `Unwritable` for nodes that would be read back as something else."""
    graph = fx.Graph()
    out = graph.graph_copy(gm.graph, {})
    graph.output(out)
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and any(key == "kernel_idx" for key in node.kwargs):
            raise Unwritable(f"{node.name} launches a Triton kernel of the program's own")
    return graph


def _import(name: str, value: Any) -> str:
    """The line that gives the name its value."""
    if name in _KNOWN:
        return _KNOWN[name]
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}"
    if getattr(builtins, name, None) is value:
        return ""
    module, qualified = (
        getattr(value, "__module__", None),
        getattr(value, "__qualname__", getattr(value, "__name__", "")),
    )
    if value is torch.device:
        module, qualified = "torch", "device"
    if module is not None and module != "__main__" and "<" not in qualified:
        try:
            found = _attribute(importlib.import_module(module), qualified)
        except (ImportError, AttributeError):
            found = None
        if found is value:
            if "." in qualified:
                return f"import {module}; {name} = {module}.{qualified}"
            return f"from {module} import {qualified}" + ("" if qualified == name else f" as {name}")
    raise Unwritable(f"the graph calls {name}, which cannot be imported")
