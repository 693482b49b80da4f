"""The user's line that a node comes from, read out of the stack trace that Dynamo keeps with it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"\n]*)", line (\d+), in ([^\n]*)(?:\n[ \t]*(?!File ")([^\n]*))?')
_ROOT = re.compile(r"^\w+\['\w+'\]\.?")  # Dynamo's word for the compiled module, as L['self']
_TORCH = str(Path(torch.__file__).parent) + os.sep


@dataclass(frozen=True)
class Frame:
    """One frame of a stack trace: file name without folders, line number, function, and the text of the line."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.code}" if self.code else "")


def user_frame(trace: str | None) -> Frame | None:
    """The innermost frame that is not torch's own; of a trace of torch's frames alone (a compiled optimizer's) the innermost. None where there
    is none.
    """
    frames = _FRAME.findall(trace or "")
    if not frames:
        return None
    own = [f for f in frames if not f[0].startswith(_TORCH)]
    path, line, function, code = (own or frames)[-1]
    return Frame(path.replace("\\", "/").rpartition("/")[2], int(line), function.strip(), code.strip())


def source_of(node: fx.Node) -> str:
    """`file.py:12 in forward: code`, the user's line that made a node, else its module; empty where neither is known. Kept in the node's
    metadata.
    """
    known: str | None = node.meta.get("source")
    if known is None:
        frame = user_frame(node.meta.get("stack_trace") or node.stack_trace)
        known = node.meta["source"] = module_of(node) if frame is None else str(frame)
    return known


def module_of(node: fx.Node) -> str:
    """`module 1.emb, an Embedding`: where a node comes from that no line of the user's made, since the modules of torch that are compiled
    (`nn.Sequential(nn.Embedding(...), ...)`) have none in between. Empty where there is no module.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    inside = _ROOT.sub("", path)
    article = "an" if name[:1] in "AEIOU" else "a"
    return f"module {inside}, {article} {name}" if inside else f"module {name}"
