"""Where a node of a graph comes from, as text for comments of generated code and for errors."""

from __future__ import annotations

from torch import fx

from ..dispatch.source import module_of, user_frame


def origin(name: str, node: fx.Node) -> str:
    """`op: source line`, on one line and safe inside a comment of any target language."""
    packet = name.split(".")[1]
    trace = node.meta.get("stack_trace")
    if not trace:
        return packet
    lines = [text for text in map(str.strip, trace.rstrip().rsplit("\n", 2)[1:]) if text.strip("^~ ")]
    line = lines[-1] if lines else ""
    return f"{packet}: {_harmless(line)}"


def _harmless(line: str) -> str:
    """A source line as it may stand in comments and texts of any target language."""
    return line[:100].replace("\\", "/").replace("*/", "* /")


def place(name: str, node: fx.Node) -> str:
    """`op (file.py:12 in forward): source line`, or `op (module 1.emb, an Embedding)` where no line is known, for errors."""
    frame, packet = user_frame(node.meta.get("stack_trace")), name.split(".")[1]
    if frame is None:
        module = module_of(node)
        return f"{packet} ({module})" if module else packet
    line = _harmless(frame.code)
    return f"{packet} ({frame.file}:{frame.line} in {frame.function})" + (f": {line}" if line else "")


__all__ = ["origin", "place"]
