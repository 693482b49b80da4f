"""Private names of storages, allocation, and the CUDA runtime."""

import functools
from typing import Any

import torch

# How many tensors and Python objects use a storage, which is named by its `_cdata`.
from torch._C import _storage_Use_Count as storage_uses  # type: ignore[attr-defined]

# Allocation and re-viewing without the dispatcher: a third of the cost of torch.empty_strided / torch.as_strided.
from torch._C._dynamo.guards import _empty_strided_cpu as empty_strided_cpu  # type: ignore[attr-defined]
from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided_cuda  # type: ignore[attr-defined]
from torch._C._dynamo.guards import _reinterpret_tensor as reinterpret_tensor  # type: ignore[attr-defined]

__all__ = [
    "WeakStorage", "abandon_capture", "copy_all", "cuda_stream", "drop_library_workspaces", "empty_strided_cpu", "empty_strided_cuda",
    "reinterpret_tensor", "same_addresses", "storage_at", "storage_uses", "tensor_uses",
]  # fmt: skip


def drop_library_workspaces() -> None:
    """Let go of the memory that torch keeps for cuBLAS, one piece for each handle and stream: the next product gets its own."""
    torch._C._cuda_clearCublasWorkspaces()


def abandon_capture(device: int, pool: tuple[int, int]) -> None:
    """After a capture that failed: the allocator ends it for the pool, as at the end of one that did not fail."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)  # type: ignore[attr-defined]
    except RuntimeError:  # torch came as far itself
        return
    torch._C._cuda_releasePool(device, pool)  # type: ignore[attr-defined]


def cuda_stream(index: int) -> int:
    """The current CUDA stream of device `index` as the driver's handle, without a Python object for it."""
    return torch._C._cuda_getCurrentRawStream(index)  # type: ignore[attr-defined]


def tensor_uses(t: Any) -> int:
    """How many there are that use a tensor, its Python object counted as one: other tensors of its memory do not count."""
    return t._use_count()  # type: ignore[no-any-return]


def storage_at(address: int, size: int, device: Any) -> Any:
    """A storage of `size` bytes at an address, which does not own its memory."""
    return torch._C._construct_storage_from_data_pointer(address, device, size)


class WeakStorage:
    """A reference to a storage that does not keep its memory."""

    __slots__ = ("_free", "key")

    def __init__(self, storage: Any) -> None:
        self._free = type(storage)._free_weak_ref
        self.key: int = storage._weak_ref()  # the storage's `_cdata`

    def get(self) -> Any:
        """The storage; None where nobody uses it any more."""
        return torch.UntypedStorage._new_with_weak_ptr(self.key)  # type: ignore[attr-defined]

    def uses(self) -> int:
        """How many tensors and Python objects use the storage."""
        return storage_uses(self.key)  # type: ignore[no-any-return]

    def __del__(self) -> None:
        self._free(self.key)


@functools.cache
def _numbers(count: int) -> list[int]:
    return list(range(count))


def same_addresses(tensors: list[Any], addresses: list[int]) -> bool:
    """Whether the tensors' elements begin at these addresses; in one call where torch is built for CUDA."""
    if (equal := getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)) is not None:
        return bool(equal(tensors, addresses, _numbers(len(addresses))))
    return [t.data_ptr() for t in tensors] == addresses


def copy_all(targets: list[Any], sources: list[Any]) -> None:
    """Copy each source into its target, in few kernels."""
    torch._foreach_copy_(targets, sources)
