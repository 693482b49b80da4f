"""What `torch.compiler.save_cache_artifacts()` takes of opforge's cache, and `load_cache_artifacts()` puts there: the entries that were used.

An entry is `opforge1`, the length of a JSON header in eight bytes, the header (key, what the maker noted, size and digest of each file), and the
files. As in the cache the key says for which opforge, torch, settings and machine it was made: an entry from elsewhere is never asked for.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import CacheError, OpforgeWarning
from ..torch_compat import CacheArtifact, record_artifact, register_artifacts
from .manifest import Entry

__all__ = ["EntryArtifact", "packed", "record", "unpacked"]


def _nowhere(key: str, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> object:
    raise CacheError("opforge's cache is not loaded")


put: Callable[[str, Mapping[str, bytes], Mapping[str, Any]], object] = _nowhere
"""Puts an entry into the cache in force: `build.cache`, which records its entries here, says how."""

_MAGIC = b"opforge1"
_LENGTH = 8


def packed(entry: Entry) -> bytes:
    """An entry as bytes. Raises `OSError` where it is gone, or is not what its manifest says."""
    contents = [entry.read(name) for name in entry.files]
    header = {"key": entry.key, "meta": dict(entry.meta), "files": {name: entry.listed[name] for name in entry.files}}
    text = json.dumps(header, sort_keys=True).encode()
    return b"".join((_MAGIC, len(text).to_bytes(_LENGTH, "little"), text, *contents))


def unpacked(data: bytes) -> tuple[str, dict[str, bytes], Mapping[str, Any]]:
    """Key, files and notes of `packed` bytes. Raises `CacheError`, which says what is wrong with them."""
    start = len(_MAGIC) + _LENGTH
    if not data.startswith(_MAGIC) or len(data) < start:
        raise CacheError("they are no entry of opforge's cache")
    at = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    try:
        header = json.loads(data[start:at])
        key, meta, listed = header["key"], header["meta"], header["files"]
        files = {}
        for name, about in listed.items():
            files[name] = data[at : at + about["bytes"]]
            at += about["bytes"]
            if hashlib.sha256(files[name]).hexdigest() != about["sha256"]:
                raise CacheError(f"{name} is not what was saved")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"their header is damaged ({type(error).__name__}: {error})") from error
    if at != len(data):
        raise CacheError(f"they have {len(data)} bytes, not {at}")
    return key, files, meta


class EntryArtifact(CacheArtifact):
    """One entry: of the cache (its files are read when it is saved), or out of saved bytes."""

    def __init__(self, key: str, content: Entry | bytes) -> None:
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "_source", content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EntryArtifact) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def content(self) -> bytes:  # type: ignore[override]
        """The bytes to save; none where the entry has been removed meanwhile."""
        source: Entry | bytes = self._source  # type: ignore[attr-defined]
        if isinstance(source, bytes):
            return source
        try:
            return packed(source)
        except OSError as error:
            _refuse(self.key, f"it is gone from the cache ({error})", "saved")
            return b""

    @staticmethod
    def encode(content: Any) -> Any:
        return content

    @staticmethod
    def type() -> str:
        return "opforge"

    def populate_cache(self) -> None:
        """Put it into the cache in force; what is broken gives one warning, with the reason."""
        try:
            key, files, meta = unpacked(self.content)
            if key != self.key:
                raise CacheError("they are another entry")
            put(key, files, meta)
        except (CacheError, OSError, ValueError, TypeError) as error:
            _refuse(self.key, f"{error}", "loaded")


def _refuse(key: str, why: str, what: str) -> None:
    warnings.warn(f"opforge: the artifact {key[:12]} is not {what}: {why}", OpforgeWarning, stacklevel=2)


def record(entry: Entry) -> None:
    """An entry was used: the next `torch.compiler.save_cache_artifacts()` has it."""
    record_artifact(EntryArtifact, entry.key, entry)


register_artifacts(EntryArtifact)
