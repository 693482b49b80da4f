"""A compiled region whose calls are recorded and replayed: which recording a call takes, when a new one is made, and when none is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import OpforgeError, UnsupportedError, first_line
from ..observe import counters
from .recording import Recorder, Recording, Slot, can_copy

WARM_UPS = 1  # calls that load kernels and libraries before anything is recorded
MOVES = 2  # changes of its address after which an input is copied
VERSIONS = 4  # recordings for the same addresses, whose results are in use at once
RECORDINGS = 16  # in all


class Region:
    """A function of the arguments of `call`, which returns the same.

    An input that stays where it was is read there; one that moves is copied to where the recording reads it, but for `fixed` ones. A call
    for which there is no recording, and for which none should be made, runs as it is; why is counted.

    strict  raise `UnsupportedError` where nothing can be recorded.
    """

    def __init__(
        self, call: Callable[..., Sequence[Any]], slots: Sequence[Slot], recorder: Recorder, *, strict: bool = False
    ) -> None:
        self.call, self.slots, self.recorder, self.strict = call, list(slots), recorder, strict
        self.recordings: list[Recording] = []
        self.copied: list[int] = []
        self.off = ""
        self._calls = 0
        self._last: list[int] | None = None
        self._moves = [0] * len(self.slots)
        self._lock = threading.RLock()  # a backward runs in a thread of its own

    def __call__(self, *args: Any) -> Sequence[Any]:
        with self._lock:
            state = (self.recorder.place(), torch.is_inference_mode_enabled())
            busy = 0
            if not self.off and state[0] is not None:
                for recording in self.recordings:
                    if recording.fits(args, state):
                        if recording.idle():
                            return recording.replay(args)
                        busy += 1
                if (made := self._record(args, busy)) is not None:
                    return made.replay(args)
        return self.call(*args)

    def _record(self, args: Sequence[Any], busy: int) -> Recording | None:
        """A new recording for these arguments, or None where the call should run as it is."""
        self._calls += 1
        self._follow(args)
        if self._calls <= WARM_UPS:
            return None
        if busy >= VERSIONS:
            self._refuse(f"results of {busy} calls are held while it is called again")
            return None
        if len(self.recordings) >= RECORDINGS:
            self._refuse(f"it was recorded {RECORDINGS} times, for other sizes or addresses")
            return None
        try:
            made = Recording(self.call, args, self.slots, self.copied, self.recorder)
        except (OpforgeError, RuntimeError) as error:
            self.off = f"{type(error).__name__}: {first_line(error)}"
            self.recordings.clear()
            self._refuse(self.off, error)
            return None
        counters.count_recording()
        self.recordings.insert(0, made)
        return made

    def _follow(self, args: Sequence[Any]) -> None:
        """Note which inputs have moved since the last call without a recording. Those that did so often are copied from now on."""
        here = [t.data_ptr() if isinstance(t, torch.Tensor) else 0 for t in args]
        last, self._last = self._last, here
        if last is None:
            return
        for k, slot in enumerate(self.slots):
            if here[k] == last[k] or slot.number or slot.unread or slot.fixed or k in self.copied:
                continue
            self._moves[k] += 1
            if self._moves[k] > MOVES and can_copy(args[k]):
                self.copied.append(k)
                self.recordings.clear()  # they read it where it was

    def _refuse(self, reason: str, error: Exception | None = None) -> None:
        counters.count_unrecorded(reason)
        if self.strict:
            raise UnsupportedError(f"a compiled graph is not recorded as a CUDA graph: {reason}") from error
