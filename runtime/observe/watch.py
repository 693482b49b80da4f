"""One compilation as seen from outside: seconds by stage, progress on the terminal, and the texts for `dump_dir` and torch's log switches."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..torch_compat import current_compile
from . import torch_logs
from .dump import Dump
from .log import LOG
from .progress import Progress

__all__ = ["Watch", "readable"]


class Watch:
    """Passed through all stages of one graph's compilation; made of the settings `progress` and `dump_dir`. `compile_id` is Dynamo's number of
    the compile, for a backward that is compiled later; `name` the one that the program gives to its graphs.
    """

    def __init__(self, progress: str, dump_dir: str, compile_id: object = None, name: str = "") -> None:
        self.name = name
        self.compile_id = compile_id or current_compile()
        self.seconds: dict[str, float] = {}
        self.progress = Progress(progress)
        self.dump = Dump(dump_dir)
        self._prefix = ""

    def inside(self, name: str) -> Watch:
        """The watch of a graph that another one runs: times are added to those of all, and texts have the name in theirs."""
        watch = copy.copy(self)
        watch._prefix = f"{self._prefix}{name}_"
        return watch

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what is inside as `name` (added up when a stage is entered again)."""
        start = time.perf_counter()
        try:
            with self.progress.stage(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def title(self) -> str:
        """`graph 0/1` by Dynamo's number of the compile, `step 0/1` with a name; of a graph that this one runs with its name."""
        return " ".join(
            filter(None, (self.name or "graph", str(self.compile_id or ""), self._prefix.replace("_", " ").strip()))
        )

    @property
    def wanted(self) -> bool:
        """Whether anybody reads the texts."""
        return self._read or any(map(torch_logs.wanted, torch_logs.TOLD))

    @property
    def _read(self) -> bool:
        return bool(self.dump) or LOG.isEnabledFor(logging.DEBUG)

    def text(self, name: str, make: Callable[[], str], what: str = "") -> None:
        """What a stage made: a file of that name where `dump_dir` is set, a message where TORCH_LOGS has +opforge, and where torch's log switches
        or its structured trace ask for it; `what` is its key in `torch_logs.TOLD`.
        """
        if self._read or (what and torch_logs.wanted(what)):
            text = make()
            LOG.debug("%s%s\n%s", self._prefix, name, text)
            self.dump.text(self._prefix + name, lambda: text)
            if what:
                self.tell(what, lambda: text)

    @property
    def _named(self) -> str:
        return f"{self.name}: " if self.name else ""

    def tell(self, what: str, make: Callable[[], str]) -> None:
        """`text` for torch's switches and trace alone."""
        if torch_logs.wanted(what):
            torch_logs.tell(what, self._named + self._prefix.replace("_", " "), make(), self.compile_id)

    def graph(self, name: str, graph: object, what: str) -> None:
        """`text` of a graph: its operators with sizes, strides and devices, below the lines of the program that they come from."""
        self.text(name, lambda: readable(graph), what)

    def close(self) -> None:
        """Take the progress line away and write the texts; to be called however compiling ended."""
        self.progress.close()
        self.dump.write()


def readable(graph: object) -> str:
    """A graph as Python, with what is known of its values and the program's lines; another callable as its name."""
    if not isinstance(graph, torch.fx.GraphModule):
        return str(graph)
    return graph.print_readable(print_output=False, include_stride=True, include_device=True)
