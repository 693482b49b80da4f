"""Private names of the artifacts that `torch.compiler.save_cache_artifacts` carries to other processes."""

from typing import Any

# What one kind of cache gives, its registration by name, and what records it.
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

__all__ = ["CacheArtifact", "record_artifact", "register_artifacts"]


def register_artifacts(cls: type[CacheArtifact]) -> None:
    """Let torch make artifacts of this type out of saved bytes; once in a process."""
    if cls.type() not in CacheArtifactFactory._artifact_types:
        CacheArtifactFactory.register(cls)


def record_artifact(cls: type[CacheArtifact], key: str, content: Any) -> None:
    """Have the next `torch.compiler.save_cache_artifacts()` take it."""
    CacheArtifactManager.record_artifact(cls.type(), key, content)
