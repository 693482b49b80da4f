"""Launches with copies of what lies at addresses that are no multiples of 16, for kernels that were not compiled for such."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..build.triton_job import ALIGNED
from ..torch_compat import no_modes, storage_at

Buffer = tuple[str, str, str, str, bool]
"""Of a kernel's argument: its dtype, its shape, strides and offset as Python source over the names of the sizes, and whether it is written."""


class Arguments(NamedTuple):
    """What a kernel's arguments are: the names of its sizes, and its buffers in the order of their addresses; None for one that is never odd."""

    sizes: Sequence[str]
    buffers: Sequence[Buffer | None]


class _View(NamedTuple):
    """Elements in memory that begins at some address."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    written: bool

    @property
    def bytes(self) -> int:
        """To the end of the last element."""
        if 0 in self.shape:
            return 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def inside(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


class Copies:
    """Aligned copies of what `views` say to lie at each odd address: `of` has where each one is."""

    def __init__(self, views: dict[int, list[_View]], device: torch.device) -> None:
        self.views, self.device = views, device
        with no_modes(), torch.inference_mode(False), torch.no_grad():
            self.memory = {address: self._copy(address, max(v.bytes for v in some)) for address, some in views.items()}
        self.of = {address: memory.data_ptr() for address, memory in self.memory.items()}

    def _copy(self, address: int, size: int) -> torch.Tensor:
        made = torch.empty(max(size, ALIGNED), dtype=torch.uint8, device=self.device)
        if size:
            made[:size].copy_(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._there(address, size)))
        return made

    def _there(self, address: int, size: int) -> torch.UntypedStorage:
        return storage_at(address, size, self.device)  # type: ignore[no-any-return]

    def instead_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, with the copy's memory for each that has one."""
        return [self.memory.get(t.data_ptr(), t) for t in tensors]

    def put_back(self) -> None:
        """What was written, and nothing beside it, is where it belongs. After the launch, on its stream."""
        with no_modes(), torch.inference_mode(False), torch.no_grad():
            for address, some in self.views.items():
                for view in some:
                    if view.written and view.bytes:
                        here = view.inside(self.memory[address].untyped_storage())
                        view.inside(self._there(address, view.bytes)).copy_(here)


def with_copies(run: Callable[..., None], arguments: Arguments, device: torch.device) -> Callable[..., None]:
    """A function that launches as `run` does, which takes aligned addresses, with copies of what is not aligned."""

    def launch(programs: int, *given: int) -> None:
        copies = Copies(_odd(arguments, given), device)
        count = len(arguments.buffers)
        run(programs, *(copies.of.get(a, a) for a in given[:count]), *given[count:])
        copies.put_back()

    return launch


def _odd(arguments: Arguments, given: Sequence[int]) -> dict[int, list[_View]]:
    count = len(arguments.buffers)
    names = dict(zip(arguments.sizes, given[count:], strict=False))
    found: dict[int, list[_View]] = {}
    for buffer, address in zip(arguments.buffers, given, strict=False):
        if address % ALIGNED:
            assert buffer is not None, "memory of torch's allocator is aligned"
            dtype, *place, written = buffer
            shape, stride, offset = (eval(text, {}, names) for text in place)
            found.setdefault(address, []).append(_View(getattr(torch, dtype), shape, stride, offset, written))
    return found


def copies_of(tensors: Sequence[torch.Tensor], written: Sequence[bool]) -> Copies:
    """Of those tensors that begin at odd addresses."""
    views: dict[int, list[_View]] = {}
    for t, w in zip(tensors, written, strict=True):
        if (address := t.data_ptr()) % ALIGNED:
            views.setdefault(address, []).append(_View(t.dtype, tuple(t.shape), t.stride(), 0, w))
    return Copies(views, tensors[0].device)


__all__ = ["ALIGNED", "Arguments", "Buffer", "Copies", "copies_of", "with_copies"]
