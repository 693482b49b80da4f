"""Progress of one compilation that takes long: which stage it is in, and how many kernels are built.

Nothing is shown in the first two seconds. Then, on a terminal, one line that moves and goes away at the end; with the
setting `progress` on and no terminal, one plain line for each stage. Whatever goes wrong with showing, compiling goes on.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["DELAY_S", "Progress"]

#: Seconds of compiling before anything is shown.
DELAY_S = 2.0

# One line on the terminal at a time: a graph that is compiled meanwhile in another thread stays silent.
_showing = threading.Lock()


class Progress:
    """Shows the stages of one compilation. `setting` is "auto" (on a terminal only), "on" or "off"."""

    def __init__(self, setting: str = "auto", *, stream: TextIO | None = None, delay_s: float | None = None) -> None:
        given: TextIO | None = sys.stderr if stream is None else stream
        self._stream: Any = _Nowhere() if given is None else given  # a program without standard streams
        self._terminal = setting != "off" and _is_terminal(self._stream)
        self._start = time.monotonic()
        self._text = ""
        self._kernels = (0, 0)
        self._lock = threading.Lock()
        self._line: Any = None
        self._shown = False
        self._timer: threading.Timer | None = None
        if self._terminal or setting == "on":
            # What takes long is one wait for the compiler: only another thread can show something meanwhile.
            self._timer = threading.Timer(DELAY_S if delay_s is None else delay_s, self._begin)
            self._timer.daemon = True
            self._timer.start()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The stage that compiling is in for the length of the block."""
        before, self._text = self._text, name
        self._update()
        try:
            yield
        finally:
            self._text = before

    def kernels(self, done: int, total: int) -> None:
        """How many of the graph's kernels are built."""
        self._kernels = (done, total)
        self._update()

    def close(self) -> None:
        """Take the line away. Must be called, in the end, whatever happened."""
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            self._timer = None
            if self._shown:
                self._shown = False
                if self._line is not None:
                    self._attempt(self._line.stop)
                _showing.release()

    def _message(self) -> str:
        done, total = self._kernels
        counts = f", {done}/{total} kernels" if total else ""
        return f"opforge: compiling ({self._text or 'graph'}{counts})"

    def _begin(self) -> None:
        with self._lock:
            if self._timer is None or not _showing.acquire(blocking=False):
                return
            if self._terminal:
                self._attempt(self._make_line)
            self._shown = True  # not before there is a line: stages that begin meanwhile would be printed, and stay
        self._update()

    def _make_line(self) -> None:
        try:
            console = importlib.import_module("rich.console").Console(file=self._stream)
            parts = importlib.import_module("rich.progress")
        except ImportError:
            return  # plain lines do
        columns = (parts.SpinnerColumn(), parts.TextColumn("{task.description}"), parts.TimeElapsedColumn())
        line = parts.Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
        task = line.add_task(self._message(), total=None)
        line.tasks[0].start_time = line.get_time() - (time.monotonic() - self._start)
        line.start()
        self._line, self._task = line, task

    def _update(self) -> None:
        if not self._shown:
            return
        if self._line is not None:
            self._attempt(lambda: self._line.update(self._task, description=self._message()))
        else:
            self._attempt(self._print)

    def _print(self) -> None:
        print(f"{self._message()}, {time.monotonic() - self._start:.1f} s", file=self._stream, flush=True)

    def _attempt(self, action: Any) -> None:
        """Run something that writes to the stream; where that fails (it may be closed or gone), showing ends, nothing else."""
        try:
            action()
        except Exception:  # noqa: BLE001 - the stream may be anything that the program has put there
            self._line = None
            self._stream = _Nowhere()


class _Nowhere:
    """A stream that takes everything."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return None

    def isatty(self) -> bool:
        return False


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (ValueError, AttributeError):  # closed, or no file
        return False
