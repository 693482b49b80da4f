"""The user's line for programs that are plain Python: read from the stack, where a graph would tell it by its nodes."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

from ..dispatch.recorder import Recorder

_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
# The frames outside of these are the caller's, not the traced program's.
_ENTRIES = (str(Path(__file__).with_name("record.py")), str(Path(_INSIDE[1], "dispatch", "trace.py")))


class FrameRecorder(Recorder):
    """A recorder that takes a node's `stack_trace` and `source`, and the place in its messages, from the running Python frames."""

    def call(self, op: Any, args: Any, kwargs: Any, val: Any, *, keep: bool = False) -> fx.Node:
        """As the recorder's, with the user's line."""
        node = super().call(op, args, kwargs, val, keep=keep)
        if self.origin is None and not self.backward and "source" not in node.meta:
            frame = _user_frame()
            if frame is not None:
                node.meta["stack_trace"], node.meta["source"] = _trace_text(frame), source_text(frame)
        return node

    def where(self) -> str:
        """` (line …)` of the traced program."""
        frame = _user_frame() if self.origin is None else None
        return super().where() if frame is None else f" ({source_text(frame)})"


def source_text(frame: FrameType) -> str:
    """`file.py:12 in forward: code`."""
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}: {line}"


def _trace_text(frame: FrameType) -> str:
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n    {line}'


def _user_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor ours; None when there is none inside of the trace."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_INSIDE, "<eval_with_key>")):
            return frame
        if name in _ENTRIES:
            return None
        frame = frame.f_back
    return None
