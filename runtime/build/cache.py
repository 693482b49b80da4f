"""The on-disk cache: content-addressed folders of plain files, safe to share between processes; nothing is unpickled.

    <cache_dir>/v1/                     private (0700)
        locks/<3 hex digits>.lock       held while an artifact is being made
        <aa>/<digest>/                  one entry; appears whole, by a rename
            manifest.json               digest and size of every file, versions, and what the maker noted
            <files>

Nobody else can write to any of these folders or to their parents: owners and modes are checked. So a file that passes
its digest check cannot change between the check and its use. A damaged or foreign entry is a miss with one warning, and
`put` replaces it. A disk that does not take an entry gives one warning, and the entry lives in this process's scratch
folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from ...errors import CacheError
from ..config import Config, current
from . import artifacts
from .manifest import (
    FORMAT,
    MANIFEST,
    DamagedEntryError,
    Entry,
    check_private,
    make_private,
    make_trusted,
    read_entry,
    sync_dir,
    write_entry,
)
from .scratch import scratch_dir, warn_once

__all__ = ["LOCK_TIMEOUT_S", "Cache", "Entry", "default_dir", "key"]

#: Seconds to wait for another process that makes the same artifact; after that both make it, and the first one stays.
LOCK_TIMEOUT_S = 120.0

_SWEEP_EVERY_S = 600.0
_STALE_TEMPORARY_S = 24 * 3600.0
#: Seconds within which a process has loaded the entry that it found or made.
_LOADING_S = 60.0
_ENTRY_IN_THE_WAY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)

_DIGEST = re.compile(r"[0-9a-f]{64}")

_opened: dict[tuple[Path, int], Cache] = {}


def key(parts: Mapping[str, str]) -> str:
    """The sha256 hex digest of named texts; their order does not matter, and no two sets of parts read the same."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        for text in (name, parts[name]):
            data = text.encode()
            digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()


def default_dir() -> Path:
    """The user's cache folder for opforge (`~/.cache/opforge` on Linux); it need not exist. Raises `CacheError` without platformdirs."""
    try:
        import platformdirs
    except ModuleNotFoundError as error:
        raise CacheError(
            "no folder is known for opforge's cache, since platformdirs is missing: `pip install platformdirs`, or set OPFORGE_CACHE_DIR"
        ) from error
    return Path(platformdirs.user_cache_dir("opforge", appauthor=False))


def _open(directory: Path, size_limit: int, *, own: bool = False) -> Cache:
    cache = _opened.get((directory, size_limit))
    if cache is None:
        cache = _opened[directory, size_limit] = Cache(directory, size_limit, own=own)
    return cache


class Cache:
    """A content-addressed cache in a folder; any number of processes and threads may use it at once.

    `size_limit` is in bytes, 0 for none. `own`: the folder is inside this process's scratch folder, whose parents are
    not checked. Raises `CacheError` when the folder cannot be made, or when others can change it or a parent.
    """

    def __init__(self, directory: Path, size_limit: int = 0, *, own: bool = False) -> None:
        self.root = Path(os.path.abspath(directory)) / f"v{FORMAT}"
        self.size_limit = size_limit
        self._own = own
        self._spill: Cache | None = None
        self._used: dict[str, float] = {}  # key: when this process found or made the entry
        self._put_since_sweep = 0
        try:
            self._make_root()
            # A disk that is full or read-only may still hold entries to read: `put` says so when it does not take one.
            with contextlib.suppress(OSError):
                make_private(self.root / "locks")
        except (OSError, DamagedEntryError) as error:
            raise CacheError(f"cannot use {directory} as opforge's cache: {error}") from error

    @classmethod
    def current(cls, cfg: Config) -> Cache:
        """The cache that `cfg` asks for: on disk, or this process's own when `cache` is off or the folder is unusable.

        Raises `OSError` when even this process's scratch folder cannot be made.
        """
        if cfg.cache:
            try:
                directory = Path(cfg.cache_dir) if cfg.cache_dir else default_dir()
                return _open(directory, cfg.cache_size_limit_mb << 20)
            except CacheError as error:
                warn_once("cache", cfg.cache_dir, f"{error}; compiled code is kept for this process only")
        return _open(scratch_dir() / "cache", 0, own=True)

    def folder(self, key: str) -> Path:
        """Where the entry of `key`, a digest by `key()`, lives if there is one."""
        if not _DIGEST.fullmatch(key):
            raise ValueError(f"{key!r} is no cache key; keys are made by cache.key()")
        return self.root / key[:2] / key

    def get(self, key: str) -> Entry | None:
        """The verified entry of `key`, or None. A damaged or foreign entry counts as none and gives one warning."""
        entry = self._read(key)
        if entry is None:
            return self._spill.get(key) if self._spill else None
        self._used[key] = time.time()
        # The manifest's time is the time of last use; another process may have evicted the entry meanwhile.
        with contextlib.suppress(OSError):
            os.utime(entry.path / MANIFEST)
        self._record(entry)
        return entry

    def put(self, key: str, files: Mapping[str, bytes | Path], meta: Mapping[str, Any]) -> Entry:
        """Stores files (contents, or paths to copy) and JSON `meta` under `key`; returns the stored entry.

        When another process was first, its entry stays and is returned. When the disk does not take it, there is one
        warning, and the entry is stored for this process only. Raises `ValueError` or `TypeError` for wrong arguments,
        `OSError` for a file that cannot be read, and `CacheError` when no folder takes the entry.
        """
        contents = {name: data if isinstance(data, bytes) else data.read_bytes() for name, data in files.items()}
        try:
            entry = self._store(key, contents, meta)
        except (DamagedEntryError, OSError) as error:
            message = f"opforge's cache {self.root} does not take new entries: {error}"
            if self.root.is_relative_to(scratch_dir()):
                raise CacheError(message) from error
            warn_once("cache", self.root, f"{message}; compiled code is kept for this process only")
            self._spill = _open(scratch_dir() / "cache", 0, own=True)
            return self._spill.put(key, contents, meta)
        self._used[key] = time.time()
        self._sweep_if_due()
        self._record(entry)
        return entry

    def _record(self, entry: Entry) -> None:
        if not self._own:  # who switches the cache off carries nothing elsewhere
            artifacts.record(entry)

    def drop(self, key: str) -> bool:
        """Removes the entry of `key`; whether it is gone."""
        try:
            self._move_away(self.folder(key))
        except OSError:
            return False
        return self._spill is None or self._spill.drop(key)

    @contextlib.contextmanager
    def lock(self, key: str, timeout_s: float | None = None) -> Iterator[bool]:
        """Held while making the artifact of `key`, so that others wait and then find it. Yields whether it is held.

        Without it (a timeout, a file system without locks) making it twice is only wasted work, never wrong.
        """
        timeout = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
        lock = filelock.FileLock(self.root / "locks" / f"{key[:3]}.lock", timeout=timeout, mode=0o600)
        try:
            lock.acquire()
        except (OSError, NotImplementedError):  # a timeout is an OSError too
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def sweep(self) -> int:
        """Removes least recently used entries until the rest is under 0.9 of the limit; returns the number removed.

        Entries that this process may be loading right now stay. Also removes what crashed processes left behind.
        """
        self._put_since_sweep = 0
        with contextlib.suppress(OSError):
            (self.root / "swept").touch(mode=0o600)
        for path in self.root.glob("tmp-*"):
            if time.time() - _mtime(path) > _STALE_TEMPORARY_S:
                shutil.rmtree(path, ignore_errors=True)
        entries = [(_mtime(p / MANIFEST), _bytes_in(p), p) for p in self.root.glob("[0-9a-f][0-9a-f]/*")]
        total = sum(size for _, size, _ in entries)
        removed = 0
        if self.size_limit and total > self.size_limit:
            for _, size, path in sorted(entries):
                if total <= self.size_limit * 9 // 10:
                    break
                if time.time() - self._used.get(path.name, 0.0) > _LOADING_S:
                    self._move_away(path)
                    total -= size
                    removed += 1
        return removed

    def _make_root(self) -> None:
        """Makes the folders down to `root`, or checks them. Raises `OSError`, or `DamagedEntryError` where others can change one."""
        if self._own:
            make_private(self.root.parents[1])
            make_private(self.root.parent)
        else:
            make_trusted(self.root.parent)
        make_private(self.root)

    def _read(self, key: str) -> Entry | None:
        try:
            check_private(self.folder(key).parent, stat.S_ISDIR)
        except (DamagedEntryError, OSError):
            return None  # there is none, or `put` says why it is not used
        try:
            return read_entry(self.folder(key), key)
        except (DamagedEntryError, OSError) as error:
            if not os.path.lexists(self.folder(key)):
                return None  # another process has removed it meanwhile
            warn_once("entry", self.folder(key), f"a damaged entry of opforge's cache is made again: {error}")
            return None

    def _store(self, key: str, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> Entry:
        self._make_root()  # somebody may have emptied the cache meanwhile
        temporary = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.root))
        try:
            written = write_entry(temporary, key, files, meta)
            target = self.folder(key)
            make_private(target.parent)
            while True:
                try:
                    os.rename(temporary, target)
                except OSError as error:
                    if error.errno not in _ENTRY_IN_THE_WAY:
                        raise
                    if (entry := self._read(key)) is not None:
                        return entry
                    self._move_away(target)
                else:
                    sync_dir(target.parent)
                    self._put_since_sweep += written
                    break
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        entry = self._read(key)
        if entry is None:
            raise OSError(errno.EIO, "an entry just written cannot be read back", str(target))
        return entry

    def _move_away(self, path: Path) -> None:
        """Removes an entry by a rename first, so that no reader sees half of it."""
        grave = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.root))
        with contextlib.suppress(FileNotFoundError):  # another process was first
            os.rename(path, grave / path.name)
        shutil.rmtree(grave, ignore_errors=True)

    def _sweep_if_due(self) -> None:
        if not self.size_limit:
            return
        last = _mtime(self.root / "swept")
        # A sweep looks at every entry, so it is done for a good deal of new data, and else rarely, by any one process.
        if self._put_since_sweep > self.size_limit // 16 or (time.time() - last) > _SWEEP_EVERY_S:
            self.sweep()


def _mtime(path: Path) -> float:
    """Time of last change in seconds, 0.0 when there is no such file."""
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _bytes_in(folder: Path) -> int:
    try:
        with os.scandir(folder) as files:
            return sum(file.stat(follow_symlinks=False).st_size for file in files)
    except OSError:
        return 0


artifacts.put = lambda key, files, meta: Cache.current(current()).put(key, files, meta)
