"""Pointer tables of horizontally fused kernels: the addresses of their members, in the device's memory.

A small kernel writes a table from its arguments. After that the table never changes: other addresses make another table. So no kernel reads what a
later call may overwrite: neither the host's memory, nor a table that work of another stream, or of this one, still reads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...errors import BuildError
from ..render.triton_horizontal import FILL
from ..torch_compat import cuda_stream, empty_strided_cuda, same_addresses
from .aligned import copies_of
from .launch import Launch, Loaded, count_copied, launcher

KEPT = 4  # tables of a stream: results that are held until the next call is through are made in other memory than the last ones
STREAMS = 8  # whose tables are kept


@dataclass(frozen=True)
class PointerTable:
    """A table that is written, or will be before all that is launched later on its stream. Whoever holds it keeps its memory alive.

    tensors, others  the addresses in it: of tensors, and of parts of an arena.
    aligned          all of them are multiples of 16.
    """

    memory: torch.Tensor
    address: int
    tensors: list[int]
    others: list[int]
    aligned: bool

    def fits(self, tensors: list[torch.Tensor], others: list[int]) -> bool:
        return others == self.others and same_addresses(tensors, self.tensors)


class PointerTables:
    """The tables of one kernel, by stream.

    numbers  what stands in a table before the addresses.
    fill     launches a kernel that writes FILL numbers to an address.
    """

    def __init__(self, numbers: Sequence[int], fill: Launch, device: int) -> None:
        self._numbers, self._fill, self._device = numbers, fill, device
        self._known: dict[int, list[PointerTable]] = {}
        self._lock = threading.Lock()

    def find(self, tensors: list[torch.Tensor], others: list[int], order: Sequence[int]) -> PointerTable:
        """The table of these addresses, in this order, for the current stream. While a CUDA graph is recorded it is made in the graph, by each
        replay, in memory of the graph: it lasts as long as the graph, and nothing else writes there while it is read.
        """
        if torch.cuda.is_current_stream_capturing():
            return self._make(tensors, others, order)
        stream = cuda_stream(self._device)
        tables = self._known.get(stream, [])
        for one in tables:
            if one.fits(tensors, others):
                return one
        made = self._make(tensors, others, order)
        # A list that is read meanwhile, by another thread, does not change. The memory of what is dropped is used again in the stream's order.
        with self._lock:
            if not tables and len(self._known) >= STREAMS:
                self._known.pop(next(iter(self._known)))
            self._known[stream] = [made, *tables[: KEPT - 1]]
        return made

    def _make(self, tensors: list[torch.Tensor], others: list[int], order: Sequence[int]) -> PointerTable:
        found = [t.data_ptr() for t in tensors]
        addresses = [*found, *others]
        words = [*self._numbers, *(addresses[k] for k in order)]
        words += [0] * (-len(words) % FILL)
        memory = empty_strided_cuda((len(words),), (1,), torch.int64)
        start = memory.data_ptr()
        for k in range(0, len(words), FILL):
            self._fill(1, start + 8 * k, *words[k : k + FILL])
        return PointerTable(memory, start, found, others, not any(a & 15 for a in addresses))


def table_launcher(
    first: Loaded,
    other: Callable[[], Loaded],
    name: str,
    fill: Launch,
    numbers: Sequence[int],
    device: int,
    written: Sequence[bool],
) -> Callable[..., None]:
    """A function that launches a kernel on the current stream, with a pointer table. It takes the number of programs, a list of tensors, a
    list of further addresses, and for each pointer of each member which of all these it is.

    first    for addresses that are all multiples of 16: the function, with its shared memory and its threads.
    other    loads that for other addresses; where it raises `BuildError`, `first` works on copies, which is counted.
    fill     launches a kernel that writes FILL numbers to an address.
    numbers  what stands in the table before the addresses: two for each member.
    written  which of a member's pointers it writes to.
    """

    def unaligned() -> Loaded:
        raise AssertionError("memory of torch's allocator is aligned")

    tables, members = PointerTables(numbers, fill, device), len(numbers) // 2
    runs: dict[bool, Launch | None] = {True: launcher(first, unaligned, name, 1, 0, device, [members])}

    def run(programs: int, tensors: list[torch.Tensor], others: list[int], order: Sequence[int]) -> None:
        if not programs:
            return
        found = tables.find(tensors, others, order)
        if found.aligned not in runs:
            try:
                runs[False] = launcher(other(), unaligned, name, 1, 0, device, [members])
            except BuildError as error:
                count_copied(name, error)
                runs[False] = None
        if (launch := runs[found.aligned]) is not None:
            launch(programs, found.address)
            return
        into = {k for k, w in zip(order, itertools.cycle(written), strict=False) if w}
        copies = copies_of(tensors, [k in into for k in range(len(tensors))])
        run(programs, copies.instead_of(tensors), others, order)
        copies.put_back()

    return run


__all__ = ["PointerTable", "PointerTables", "table_launcher"]
