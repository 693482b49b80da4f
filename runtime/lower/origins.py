"""Where a node of a graph comes from, for comments, profiles and errors."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..dispatch.record.source import module_of, user_frame
from ..ir.quote import one_line

LONGEST = 100
"""Characters of a source line that comments and errors show."""


def spec_of(lowering: Any) -> str:
    """The file that holds a lowering: the user's spec file, or the generated module of opforge's own."""
    code = getattr(lowering, "__code__", None)
    path = str(code.co_filename).replace(chr(92), "/") if code is not None else "<opforge ?>"
    return path.removeprefix("<opforge ").removesuffix(">") if path.startswith("<") else path.rpartition("/")[2]


def origin_of(name: str, node: fx.Node) -> str:
    """`op: source line`; the printers make a comment of it (`ir/quote.py`)."""
    packet = name.split(".")[1]
    trace = node.meta.get("stack_trace")
    if not trace:
        return packet
    lines = [text for text in map(str.strip, trace.rstrip().rsplit("\n", 2)[1:]) if text.strip("^~ ")]
    line = lines[-1] if lines else ""
    return f"{packet}: {line[:LONGEST]}"


def place_of(name: str, node: fx.Node) -> str:
    """`op (file.py:12 in forward): source line`, or `op (module 1.emb, an Embedding)` where no line is known, for errors."""
    frame, packet = user_frame(node.meta.get("stack_trace")), name.split(".")[1]
    if frame is None:
        module = module_of(node)
        return one_line(f"{packet} ({module})") if module else packet
    line = frame.code[:LONGEST]
    return one_line(f"{packet} ({frame.file}:{frame.line} in {frame.function})" + (f": {line}" if line else ""))


__all__ = ["origin_of", "place_of", "spec_of"]
