"""The user's line for programs that are plain Python: read from the stack, where a graph would tell it by its nodes."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ..dispatch.operators.schema import op_info
from ..dispatch.record.recorder import Recorder
from ..torch_compat import FakeTensor, is_traceable_wrapper_subclass, pytree

_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
# The frames outside of these are the caller's, not the traced program's.
_ENTRIES = (str(Path(__file__).with_name("record.py")), str(Path(_INSIDE[1], "dispatch", "trace.py")))


class FrameRecorder(Recorder):
    """A recorder for programs that are Python functions and modules. Nodes and messages have the user's line from the running frames; real
    tensors that the program holds, other than its inputs, become constants of the graph.

    lines  where a storage was last written or laid out anew.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lines: dict[int, str] = {}
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._held_storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op_info(func).kind != "lift":
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._known, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _known(self, t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, FakeTensor) or is_traceable_wrapper_subclass(t):
            return t
        if t.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"the program holds a tensor of shape {list(t.shape)} that requires grad{self.where()}; pass it as an input, or make it a "
                "parameter of the module"
            )
        if id(t) not in self._held:
            fake = self.fake_mode.from_tensor(t.detach(), static_shapes=True)
            self.regions.add(fake, self._constant(t, fake)).region.constant = True
            self._held[id(t)] = (t, fake)
            self._held_storages.add(self.regions.key(fake))
        return self._held[id(t)][1]

    def write(self, t: torch.Tensor, new: fx.Node) -> None:
        """As the recorder's. Raises `UnsupportedError` for a tensor that the program holds."""
        key = self.regions.key(t)
        if key in self._held_storages:
            raise UnsupportedError(
                f"the program writes to a tensor of shape {list(t.shape)} that it holds{self.where()}; pass it as an input, or register it as "
                "a buffer of the module"
            )
        self.lines[key] = self.where()
        super().write(t, new)

    def _metadata_op(self, info: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self.lines[self.regions.key(args[0])] = self.where()
        return super()._metadata_op(info, types, args, kwargs)

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


def source_text(frame: FrameType, number: int | None = None) -> str:
    """`file.py:12 in forward: code`, of the line that runs or the one given."""
    code, number = frame.f_code, number or frame.f_lineno
    line = linecache.getline(code.co_filename, number).strip()
    return f"{Path(code.co_filename).name}:{number} in {code.co_name}: {line}"


def _trace_text(frame: FrameType) -> str:
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n    {line}'


def where_raised(error: BaseException) -> str:
    """` (line …)` of the traced program that raised `error`; empty when none did."""
    place, found = error.__traceback__, None
    while place is not None:
        name = place.tb_frame.f_code.co_filename
        if name in _ENTRIES:
            found = None
        elif not name.startswith((*_INSIDE, "<eval_with_key>")):
            found = place
        place = place.tb_next
    return "" if found is None else f" ({source_text(found.tb_frame, found.tb_lineno)})"


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
