"""Loads what was built: shared libraries by ctypes, and generated wrappers as Python modules with a real file name."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import itertools
import os
import re
import threading
import types
from collections.abc import Mapping
from pathlib import Path

from ...errors import BuildError
from ..build.compiler import compiled
from ..build.manifest import Entry
from ..build.scratch import scratch_dir, warn_once
from ..config import Config

__all__ = ["build_library", "load_file", "load_library", "load_wrapper"]

_MAPS_OF_A_LIBRARY = 16  # about five, and some for what allocates memory meanwhile

_libraries: dict[str, ctypes.CDLL] = {}
_lock = threading.Lock()


def build_library(source: str, *, name: str, cfg: Config) -> ctypes.CDLL:
    """Compiles (or finds in the cache) and loads one C++ source.

    A library from the cache that the system refuses to load (a folder mounted noexec, a library it was linked with is
    gone) gives one warning and is compiled again for this process. Raises `BuildError`.
    """
    entry, file = compiled(source, name=name, cfg=cfg)
    try:
        return load_file(entry, file)
    except BuildError as error:
        if not cfg.cache:
            raise
        warn_once("load", entry.file(file), f"{error}; it is compiled again, for this process only")
        return load_file(*compiled(source, name=name, cfg=dataclasses.replace(cfg, cache=False)))


def load_file(entry: Entry, file: str) -> ctypes.CDLL:
    """A shared library of the cache, loaded once per process: opened, verified, and loaded from what was opened, so that nobody can put
    another file in its place in between. Raises `BuildError` when it is not what the cache has noted, or cannot be loaded.
    """
    path = entry.file(file)
    if (known := _libraries.get(str(path))) is not None:
        return known
    try:
        descriptor = entry.open(file)
    except OSError as error:
        raise BuildError(f"the compiled kernel {path} cannot be loaded: {error}") from error
    try:
        return load_library(path, descriptor)
    finally:
        os.close(descriptor)


def load_library(path: Path | str, descriptor: int | None = None) -> ctypes.CDLL:
    """The shared library at `path`, loaded once per process; from `descriptor` where the system can (Linux). Raises `BuildError` when it
    cannot be loaded.
    """
    name = str(path)
    with _lock:
        library = _libraries.get(name)
        if library is None:
            try:
                library = _libraries[name] = ctypes.CDLL(name if descriptor is None else _opened(name, descriptor))
            except OSError as error:
                raise BuildError(f"the compiled kernel {name} cannot be loaded: {error}{_why_unmapped()}") from error
        return library


_numbers = itertools.count(1)


def _opened(name: str, descriptor: int) -> str:
    """What the loader opens for the open file; `name` where the system has no names for descriptors.

    The loader takes a name that it has seen for the library that it had then, and numbers of descriptors come again: so each name is spelled
    in a way of its own, by empty steps between the folder and the number.
    """
    folder = "/proc/self/fd"
    if not os.path.exists(f"{folder}/{descriptor}"):
        return name
    steps = "".join("./" if bit == "1" else "/" for bit in f"{next(_numbers):b}")
    return f"{folder}/{steps}{descriptor}"


def _why_unmapped() -> str:
    """What to do where a process has as many memory maps as Linux allows: libraries stay loaded, each takes about five."""
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text(encoding="utf-8"))
        maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    except (OSError, ValueError):
        return ""
    if maps < limit - _MAPS_OF_A_LIBRARY:
        return ""
    return (
        f" (this process has {maps} memory maps, and the system allows {limit}: compile fewer graphs in one process, "
        "or have an administrator raise vm.max_map_count)"
    )


def load_wrapper(
    path_or_source: Path | str,
    name: str,
    namespace: Mapping[str, object] | None = None,
    contents: bytes | None = None,
) -> types.ModuleType:
    """Runs generated Python source as a module called `name`, with the globals in `namespace` set before it runs.

    A `Path` is the file to load (`contents`: what is in it, where that is known already). A `str` is source text, which
    is written to this process's scratch folder first, so that tracebacks, debuggers and `inspect` show its lines. Writes
    no bytecode and does not touch `sys.modules`. What the source raises is not caught; `OSError` when the file cannot be
    read or written.
    """
    if isinstance(path_or_source, Path):
        path, data = path_or_source, path_or_source.read_bytes() if contents is None else contents
        source = data.decode()
    else:
        source = path_or_source
        path = _wrapper_file(source, name)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    module.__dict__.update(namespace or {})
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def _wrapper_file(source: str, name: str) -> Path:
    stem = re.sub(r"[^A-Za-z0-9_]", "_", name)[:64]
    folder = scratch_dir() / "wrappers"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{stem}_{hashlib.sha256(source.encode()).hexdigest()[:12]}.py"
    path.write_text(source, encoding="utf-8")
    return path
