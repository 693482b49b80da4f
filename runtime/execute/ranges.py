"""Ranges of a profiler: while one is on, a graph runs by a copy of its wrapper in which each kernel and call of a library has a range of its own.

`opforge::k3_layer_norm_gelu | x = self.norm(F.gelu(x))`: the function that is called, and the line of the program that it computes. Torch's
profiler shows them on the CPU and, under `torch.autograd.profiler.emit_nvtx`, NVIDIA's.
"""

from __future__ import annotations

import ast
import io
import threading
import tokenize
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

from torch.profiler import record_function

from ..ir.quote import comment_text
from .load import load_wrapper

__all__ = ["Ranges", "range_name", "with_ranges"]

LONGEST = 120
"""Characters of a range's name."""


class Ranges:
    """The copy of a wrapper that a profiled call goes to; made at the first one.

    module     the wrapper, with all that it calls.
    source     its text.
    functions  names of the kernels and graphs that it calls.
    title      the graph's name.
    """

    def __init__(self, module: ModuleType, source: str, functions: Collection[str], title: str) -> None:
        self._module, self._source, self._functions, self._title = module, source, functions, title
        self._call: Callable[..., Any] | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        return (self._call or self._made())(*args)

    def _made(self) -> Callable[..., Any]:
        with self._lock:
            if self._call is None:
                known = self._module.__dict__
                namespace = {name: known[name] for name in self._functions if name in known} | {"span": record_function}
                text = with_ranges(self._source, self._functions, self._title)
                copy = load_wrapper(text, f"{self._module.__name__}_ranges", namespace)
                # Constants come from elsewhere, and the memory of intermediate values is shared with calls that nobody profiles.
                copy.__dict__.update(
                    {k: v for k, v in known.items() if k not in ("call", "in_ranges", "__file__", "__name__")}
                )
                self._call = copy.call
            return self._call


def range_name(name: str, about: str) -> str:
    """A range's name, cut to `LONGEST` characters.

    It has printable ASCII characters alone and no double quotes: in its Chrome traces torch calls others "unknown", and quotes end the text.
    """
    text = f"opforge::{name} | {about}" if about else f"opforge::{name}"
    text = comment_text(text).replace('"', "'").replace("\t", " ")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def with_ranges(source: str, functions: Collection[str], title: str) -> str:
    """The source of a wrapper with a range around its `call`, and around each statement in it that calls one of `functions` or an operator."""
    tree = ast.parse(source)
    called = {name: name for name in functions} | dict(_operators(tree))
    comments = _comments(source)
    lines = source.splitlines()
    (call,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "call")
    first = call.body[0].lineno
    out = [*lines[: first - 1], f"    with span({range_name(title, '')!r}):"]
    for statement in call.body:
        text = [f"    {line}" for line in lines[statement.lineno - 1 : statement.end_lineno]]
        calls = [n.func.id for n in ast.walk(statement) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        if "profiled" in calls:
            continue
        if ours := [called[name] for name in calls if name in called]:
            about = comments.get(statement.end_lineno or 0, "")
            about = about.removeprefix(f"{ours[0].partition('.')[2].partition('.')[0]}: ")  # an operator's own name
            out.append(f"        with span({range_name(ours[0], about)!r}):")
            text = [f"    {line}" for line in text]
        out += text
    return "\n".join(out) + "\n"


def _operators(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Of `op_0 = overload('aten.mm.default')` in the module: `op_0`, `aten.mm`."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or len(node.value.args) != 1:
            continue
        (target,), (value,) = node.targets, node.value.args
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield target.id, value.value.removesuffix(".default")


def _comments(source: str) -> dict[int, str]:
    """The comment at the end of each line that has one, by the line's number."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
