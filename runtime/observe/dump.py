"""The setting `dump_dir`: every stage of a compiled graph as files for people to read.

    <dump_dir>/graph_0000/01_dynamo_graph.py, 02_functional_graph.py, …

and with `debug.folders` what `opforge repro` runs (`folder.py`).

A graph's folder appears whole, by a rename; its number is the next free one, also among several processes. A folder that
does not take the files gives one warning, and compiling goes on.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from ...errors import OpforgeWarning

__all__ = ["Dump"]

_lock = threading.Lock()
_warned: set[str] = set()


class Dump:
    """Collects the stages of one graph; `folder` "" collects nothing and costs nothing."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: dict[str, str] = {}
        self.extra: dict[str, str | bytes] = {}

    def __bool__(self) -> bool:
        return bool(self.folder)

    def text(self, name: str, make: Callable[[], str]) -> None:
        """The next stage: a file called `<number>_<name>`. `make` is called only when stages are wanted."""
        if self.folder:
            text = make()
            self.files[f"{len(self.files) + 1:02d}_{name}"] = text if text.endswith("\n") else text + "\n"

    def add(self, files: Mapping[str, str | bytes]) -> None:
        """Files that are no stages: their names have no number."""
        self.extra.update(files)

    def write(self) -> Path | None:
        """Write what was collected; returns the graph's folder, or None when nothing is wanted or could be written."""
        if not self.files:
            return None
        try:
            return self._write(Path(self.folder))
        except OSError as error:
            with _lock:
                seen = self.folder in _warned
                _warned.add(self.folder)
            if not seen:
                message = f"opforge: cannot write the stages of compiled graphs to {self.folder}: {error}"
                warnings.warn(message, OpforgeWarning, stacklevel=2)
            return None

    def _write(self, root: Path) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".graph-", dir=root))
        try:
            for name, content in {**self.files, **self.extra}.items():
                (temporary / name).write_bytes(content.encode() if isinstance(content, str) else content)
            temporary.chmod(0o755)
            number = sum(1 for _ in root.glob("graph_*"))
            while True:
                target = root / f"graph_{number:04d}"
                try:
                    os.rename(temporary, target)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                        raise
                    number += 1
                else:
                    return target
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
