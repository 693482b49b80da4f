"""Folders of this process: a private one, removed at exit, and one for sources that failed to build, which stays."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import os
import shutil
import stat
import tempfile
import threading
import time
import warnings
from pathlib import Path

import filelock

from ...errors import OpforgeWarning

__all__ = ["keep_source", "scratch_dir", "warn_once"]

_ALIVE = "alive.lock"
#: A process that starts looks at so many folders of others at most.
_MOST_LOOKED_AT = 64
#: Seconds within which a process that has made its lock file also holds the lock.
_NEW_S = 60.0

_lock = threading.Lock()
_held: list[filelock.BaseFileLock] = []
_dirs: dict[tuple[int, str], Path] = {}
_warned: set[tuple[str, str]] = set()


def scratch_dir() -> Path:
    """A folder that only this process and user can use (mode 0700), removed at exit. Raises `OSError`."""
    return _process_dir("opforge-", remove=True)


def keep_source(source: str, name: str, dump_dir: str, suffix: str = "cpp") -> Path:
    """Writes a source that failed to build to `dump_dir`, or to a temporary folder that stays; returns its path.

    The file is named by `name` and content, so that the same failure is kept once per process. A `dump_dir` that does
    not take it gives one warning. Raises `OSError` when the temporary folder does not take it either.
    """
    file = f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:12]}.{suffix}"
    if dump_dir:
        try:
            return _write_source(Path(dump_dir), file, source)
        except OSError as error:
            warn_once("dump", dump_dir, f"opforge: cannot keep a source in {dump_dir}: {error}")
    return _write_source(_process_dir("opforge-failed-", remove=False), file, source)


def _write_source(folder: Path, file: str, source: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    path.write_text(source, encoding="utf-8")
    return path


def warn_once(kind: str, subject: object, message: str) -> None:
    """Issues `message` as an `OpforgeWarning`, once per process for each (kind, subject)."""
    with _lock:
        seen = (kind, str(subject)) in _warned
        _warned.add((kind, str(subject)))
    if not seen:
        warnings.warn(message, OpforgeWarning, stacklevel=3)


def _process_dir(prefix: str, *, remove: bool) -> Path:
    # Keyed by process: a forked child must neither write into its parent's folder nor remove it.
    with _lock:
        path = _dirs.get((os.getpid(), prefix))
        if path is None or not path.is_dir():
            path = Path(tempfile.mkdtemp(prefix=prefix))
            if remove:
                _hold(path)
                _remove_abandoned(path.parent, prefix)
                atexit.register(_remove, path, os.getpid())
            _dirs[os.getpid(), prefix] = path
        return path


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _hold(folder: Path) -> None:
    """Marks a folder as one of a living process: the lock goes with it, however it ends."""
    with contextlib.suppress(OSError, NotImplementedError):  # a file system without locks
        lock = filelock.FileLock(folder / _ALIVE, timeout=0, mode=0o600)
        lock.acquire()
        _held.append(lock)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes what processes that were killed have left of theirs in `parent`."""
    for alive in itertools.islice(parent.glob(f"{prefix}*/{_ALIVE}"), _MOST_LOOKED_AT):
        folder = alive.parent
        try:
            info = os.lstat(folder)
            if not stat.S_ISDIR(info.st_mode) or (hasattr(os, "geteuid") and info.st_uid != os.geteuid()):
                continue
            if time.time() - os.lstat(alive).st_mtime < _NEW_S:
                continue
            with filelock.FileLock(alive, timeout=0, mode=0o600):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, NotImplementedError):  # its process lives, or another one removes it
            continue
