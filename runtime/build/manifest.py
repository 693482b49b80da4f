"""One cache entry on disk: a folder of files and `manifest.json`, written durably and read with every check made."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "FORMAT",
    "MANIFEST",
    "DamagedEntryError",
    "Entry",
    "check_private",
    "make_private",
    "make_trusted",
    "read_entry",
    "sync_dir",
    "write_entry",
]

FORMAT = 1
MANIFEST = "manifest.json"

# One plain file name: no separator, no leading dot, so that a manifest cannot point outside its folder.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")


class DamagedEntryError(Exception):
    """An entry exists but cannot be trusted; the message says why. Internal: the cache turns it into a miss."""


@dataclass(frozen=True)
class Entry:
    """A verified cache entry: its key, its folder, the names of its files, what its maker noted (JSON values), and for each file the
    digest and the size that the manifest lists.
    """

    key: str
    path: Path
    files: tuple[str, ...]
    meta: Mapping[str, Any]
    listed: Mapping[str, Mapping[str, Any]]

    def file(self, name: str) -> Path:
        """The path of one of the entry's files. Raises `KeyError` when the entry has no such file."""
        if name not in self.files:
            raise KeyError(f"cache entry {self.key} has no file {name!r}; it has {', '.join(self.files)}")
        return self.path / name

    def open(self, name: str) -> int:
        """A descriptor of one of the files, whose contents have been verified through it: what is read or mapped from it is what was checked,
        whatever has happened to the name. Raises `KeyError` as `file` does, and `OSError` where the file is not what it must be.
        """
        path = self.file(name)
        try:
            return _open_checked(path, self.listed[name])[0]
        except DamagedEntryError as error:
            raise OSError(errno.EIO, str(error), str(path)) from error

    def read(self, name: str) -> bytes:
        """The contents of one of the files, verified. Raises as `open` does."""
        path = self.file(name)
        try:
            return _checked(path, self.listed[name])
        except DamagedEntryError as error:
            raise OSError(errno.EIO, str(error), str(path)) from error


def write_entry(folder: Path, key: str, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> int:
    """Fills the existing private `folder` with files and their manifest, synced to disk; returns the bytes written.

    Raises `OSError` when the disk does not take it, `ValueError` for a file name that is not plain, and `TypeError` for
    a `meta` that is not JSON.
    """
    listed: dict[str, dict[str, Any]] = {}
    total = 0
    for name, data in files.items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"{name!r} cannot be the name of a file in the cache")
        _write_synced(folder / name, data)
        listed[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        total += len(data)
    body = {
        "format": FORMAT,
        "key": key,
        "files": listed,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "meta": dict(meta),
    }
    text = json.dumps({**body, "sha256": _digest(body)}, indent=1, sort_keys=True).encode()
    _write_synced(folder / MANIFEST, text)
    sync_dir(folder)
    return total + len(text)


def read_entry(folder: Path, key: str) -> Entry | None:
    """The entry in `folder`, or None when there is no such folder.

    Raises `DamagedEntryError` when owner, mode, manifest, or the digest of a file is not what it must be.
    """
    try:
        check_private(folder, stat.S_ISDIR)
    except FileNotFoundError:
        return None
    try:
        manifest = _read_manifest(folder / MANIFEST, key)
        names = tuple(manifest["files"])
        for name in names:
            _checked(folder / name, manifest["files"][name])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedEntryError(f"{type(error).__name__}: {error}") from error
    return Entry(key, folder, names, manifest["meta"], manifest["files"])


def check_private(path: Path, is_kind: Any) -> None:
    """Checks that `path` is of the kind (`stat.S_ISDIR`, `stat.S_ISREG`), ours, and writable by nobody else.

    Raises `DamagedEntryError`, or `OSError` when it cannot be looked at. Links are not followed.
    """
    _check_owner(path, os.lstat(path), is_kind)


def _check_owner(path: Path, info: os.stat_result, is_kind: Any) -> None:
    if not is_kind(info.st_mode):
        raise DamagedEntryError(f"{path} is not a plain file or folder")
    if hasattr(os, "geteuid") and info.st_uid != os.geteuid():
        raise DamagedEntryError(f"{path} belongs to user {info.st_uid}, not to user {os.geteuid()}")
    _check_mode(path, info.st_mode)


def _check_mode(path: Path, mode: int) -> None:
    if os.name == "posix" and mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DamagedEntryError(f"{path} can be written by other users (mode {stat.S_IMODE(mode):04o})")


def make_private(folder: Path) -> None:
    """Makes `folder` for this user alone (0700), or checks that an existing one is private. Raises as `check_private` does."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_private(folder, stat.S_ISDIR)


def make_trusted(path: Path) -> None:
    """Makes the folder `path` and its missing parents (0700), and checks that nobody else can put another one in its place.

    Raises `DamagedEntryError` when `path` or a parent can be changed by another user, and `OSError` when a folder
    cannot be made or looked at.
    """
    missing: list[Path] = []
    existing = path
    while not os.path.lexists(existing):
        missing.append(existing)
        existing = existing.parent
    _check_parents(existing)
    for folder in reversed(missing):
        make_private(folder)


def _check_parents(path: Path) -> None:
    """Checks `path`, its parents, and those of every link on the way: each belongs to this user or to root, and only they can write to it.

    Everybody may write to a folder with the sticky bit, such as /tmp: what is inside belongs to its owner alone.
    """
    if not hasattr(os, "geteuid"):
        return
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        start = waiting.pop()
        for folder in {start, *start.parents} - seen:
            seen.add(folder)
            info = os.lstat(folder)
            if info.st_uid not in (0, os.geteuid()):
                raise DamagedEntryError(
                    f"{folder} belongs to user {info.st_uid}, neither to user {os.geteuid()} nor to root"
                )
            if stat.S_ISLNK(info.st_mode):
                waiting.append(folder.parent / os.readlink(folder))
            elif not info.st_mode & stat.S_ISVTX:
                _check_mode(folder, info.st_mode)


def sync_dir(path: Path) -> None:
    """Makes the names in a folder durable. Raises `OSError`."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(path: Path, key: str) -> dict[str, Any]:
    descriptor = _open_private(path)
    with open(descriptor, "rb") as file:
        manifest = json.loads(file.read())
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise DamagedEntryError(f"{path} does not have the digest that it states")
    if manifest["format"] != FORMAT or manifest["key"] != key:
        raise DamagedEntryError(f"{path} is of format {manifest['format']} for key {manifest['key']}")
    return manifest


def _open_private(path: Path) -> int:
    """A descriptor of a plain file that is ours and that nobody else can write, checked after it was opened. Raises as `check_private` does."""
    # Neither a link is followed, nor is a pipe waited for.
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedEntryError(f"{path} is not a plain file or folder") from error
        raise
    try:
        _check_owner(path, os.fstat(descriptor), stat.S_ISREG)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_checked(path: Path, listed: Mapping[str, Any]) -> tuple[int, bytes]:
    """The descriptor of a file with the contents that the manifest lists, and these, read through it."""
    if not _FILE_NAME.fullmatch(path.name):
        raise DamagedEntryError(f"{path.name!r} is no plain file name")
    descriptor = _open_private(path)
    try:
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read()
        if len(data) != listed["bytes"] or hashlib.sha256(data).hexdigest() != listed["sha256"]:
            raise DamagedEntryError(f"{path} has {len(data)} bytes and not the content that the manifest lists")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, data


def _checked(path: Path, listed: Mapping[str, Any]) -> bytes:
    descriptor, data = _open_checked(path, listed)
    os.close(descriptor)
    return data


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
