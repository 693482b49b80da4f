"""One recording of a compiled region: the addresses that it reads and writes, and how it is replayed for new arguments.

A replay runs at the addresses that were recorded, those of the results too. It waits until nobody uses what it would overwrite: its own last
results, and those of others in memory that it shares with them (`memory`). How many tensors use a result's storage says whether someone
does: views, gradients and what autograd saved count alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..dispatch.storage.overlap import overlaps_itself
from ..dispatch.storage.regions import Layout
from ..torch_compat import copy_all, reinterpret_tensor, same_addresses
from .memory import Block, Loan, Place, Pool, Results, Way

Boxed = Callable[[list[Any]], Sequence[Any]]
"""A function of a list of arguments, which it may empty: then what only the list holds is freed while it runs."""
State = tuple[Hashable, bool]
"""Where work goes, and whether in inference mode."""


class Recorder(Protocol):
    """Records the work of a device: CUDA, or a stand-in in tests."""

    def place(self) -> Hashable:
        """Where work goes now (a device's stream); None where nothing can be recorded or replayed."""
        ...

    def shares(self) -> bool:
        """Whether recordings can share memory: what is freed while something is recorded stays where it is until its pool is gone."""
        ...

    def memory(self) -> Any:
        """A new pool of memory for recordings, which lasts as long as the object and what uses it."""
        ...

    def record(
        self, call: Boxed, inputs: list[Any], memory: Any, shared: bool
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        """Record what `call(inputs)` does without doing it, in `memory`, which others record in too if it is `shared`. A function that does it,
        and what the call returned. Raises what it raises.
        """
        ...


@dataclass(frozen=True)
class Slot:
    """One argument of a region.

    number   a size: a recording is for one value of it.
    unread   nothing reads it.
    fixed    a tensor that is never copied to an address of the recording: a parameter, a written input, what a forward kept.
    dynamic  its sizes are not known when it is compiled.
    """

    number: bool = False
    unread: bool = False
    fixed: bool = False
    dynamic: bool = False


class Recording:
    """A region recorded for `args`, of which those at `copied` are copied to memory of the recording first. The list is as before.

    fresh   positions of results that are given out as copies, in memory of nobody's recording, where they are small: of so many bytes (`small`)
            in all.
    needed  positions of results that are not: a backward reads them where they are.

    Nothing has run yet: the results hold nothing before the first `replay`.
    """

    def __init__(
        self,
        call: Boxed,
        args: list[Any],
        slots: Sequence[Slot],
        copied: Sequence[int],
        recorder: Recorder,
        pool: Pool,
        region: weakref.ref[Any],
        *,
        shared: bool,
        small: int,
        fresh: Collection[int] = (),
        needed: Collection[int] = (),
    ) -> None:
        self.pool = pool
        self.state = (recorder.place(), torch.is_inference_mode_enabled())
        self.numbers = [(k, args[k]) for k, s in enumerate(slots) if s.number]
        self.shapes = [(k, args[k].shape, args[k].stride()) for k, s in enumerate(slots) if s.dynamic]
        self.copied = list(copied)
        self.read = [k for k, s in enumerate(slots) if not (s.number or s.unread or k in copied)]
        self.addresses = [args[k].data_ptr() for k in self.read]
        buffers = {k: empty_like(args[k]) for k in copied}
        self.buffers = [without_repeats(t) for t in buffers.values()]
        inputs = [buffers.get(k, a) for k, a in enumerate(args)]
        loan = Loan(pool, args)
        try:
            self.run, results = recorder.record(call, inputs, pool.memory, shared)
        finally:
            loan.end()
        inputs.clear()
        self.spared, self.given = loan.spared, loan.given
        lost = {k for where in self.given.values() for k in where}
        known = [(k, buffers.get(k, a)) for k, a in enumerate(args) if k not in lost]
        blocks: dict[int, Block] = {}
        self.results: list[_Maker] = [_maker(r, known, blocks) for r in results]
        del results, known, loan
        self.own = Results([b for b in blocks.values() if b.size], region, self.state[1])
        for block in self.own.blocks:
            block.count()
        self.fresh: list[Block] = []
        self._give_copies({*fresh}, needed, small)
        self._sort()
        pool.add(self, self.own)

    def _give_copies(self, fresh: set[int], needed: Collection[int], small: int) -> None:
        """Make copies of the results that should be, and note which others could be: whole blocks of memory, so that what shared it still does."""
        places: dict[int, dict[int, _Home]] = {}
        for k, r in enumerate(self.results):
            if isinstance(r, _Home):
                places.setdefault(r.block.number, {})[k] = r
        self.own.positions = {number: list(some) for number, some in places.items()}
        left = small
        self.can = [b for b in self.own.blocks if b.can_be_copied() and places[b.number].keys().isdisjoint(needed)]
        for block in sorted(self.can, key=lambda b: not fresh.issuperset(places[b.number])):  # those first that should
            if block.size > left:
                continue
            if not fresh.issuperset(places[block.number]):
                self.own.small[block.number] = frozenset(places[block.number])
                continue
            left -= block.size
            self._copy_out(block)

    def _copy_out(self, block: Block) -> None:
        """The results in a block are copies from now on."""
        for k, r in enumerate(self.results):
            if isinstance(r, _Home) and r.block is block:
                self.results[k] = _Copy(len(self.fresh), r.shape, r.stride, block.places[r.k].offset)
        self.fresh.append(block)
        self.can.remove(block)

    def _sort(self) -> None:
        """The results that lie in the recording's memory, which each replay makes in one go, and the others, with their positions."""
        homes = [(k, r) for k, r in enumerate(self.results) if isinstance(r, _Home)]
        self._homes = [r for _, r in homes]
        self._made = [k for k, _ in homes], [r.shape for _, r in homes], [r.stride for _, r in homes], [0] * len(homes)
        self._others: list[tuple[int, _Copy | _Argument | _View | _Constant]] = [
            (k, r) for k, r in enumerate(self.results) if not isinstance(r, _Home)
        ]

    def fits(self, args: Sequence[Any], state: State) -> bool:
        """Whether it was recorded for these sizes and addresses."""
        return (
            state == self.state
            and all(args[k] == n for k, n in self.numbers)
            and same_addresses([args[k] for k in self.read], self.addresses)
            and all(args[k].shape == shape and args[k].stride() == stride for k, shape, stride in self.shapes)
        )

    def conflicts(self, args: Sequence[Any]) -> list[Way]:
        """Results that somebody uses and a replay might overwrite. Only the list may hold arguments that this was given to overwrite."""
        return self.pool.conflicts(self.spared, self.given, args)

    def replay(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The results for these arguments, which fit. Nothing is in the way."""
        if self.copied:
            copy_all(self.buffers, [without_repeats(args[k]) for k in self.copied])
        self.run()
        self.pool.used(self.own)
        if resized := [b for b in self.can if b.resized]:
            for block in resized:
                self._copy_out(block)
            self._sort()
        copies: list[torch.Tensor] = []
        if self.fresh:
            there = [b.elements() for b in self.fresh]
            copies = [torch.empty_like(t) for t in there]
            copy_all(copies, there)
        results: list[Any] = [None] * len(self.results)
        places, shapes, strides, offsets = self._made
        memory = [r.block.own.tensors[r.k] for r in self._homes]  # type: ignore[union-attr]  # while the recording lives
        for k, t in zip(places, map(reinterpret_tensor, memory, shapes, strides, offsets), strict=True):
            results[k] = t
        for k, r in self._others:
            results[k] = r.make(args, copies)
        return tuple(results)


@dataclass(frozen=True)
class _Home:
    """A result in memory of the recording, as tensor `k` of the block's: each call gets a tensor of its own there."""

    block: Block
    k: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Copy:
    """A result in a copy of the memory that the recording writes."""

    n: int  # among the copies
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def make(self, args: Sequence[Any], copies: Sequence[torch.Tensor]) -> torch.Tensor:
        return reinterpret_tensor(copies[self.n], self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Argument:
    """A result that is an argument."""

    k: int

    def make(self, args: Sequence[Any], copies: Sequence[torch.Tensor]) -> Any:
        return args[self.k]


@dataclass(frozen=True)
class _View:
    """A result in the memory of an argument, so many bytes after where it begins."""

    k: int
    place: Place
    after: int

    def make(self, args: Sequence[Any], copies: Sequence[torch.Tensor]) -> torch.Tensor:
        t, there = args[self.k], self.place
        if t.dtype == there.dtype:
            return reinterpret_tensor(t, there.shape, there.stride, self.after // t.itemsize)
        start = t.storage_offset() * t.itemsize + self.after
        return there._replace(offset=start // there.dtype.itemsize).tensor(t.untyped_storage())


@dataclass(frozen=True)
class _Constant:
    value: Any

    def make(self, args: Sequence[Any], copies: Sequence[torch.Tensor]) -> Any:
        return self.value


_Maker = _Home | _Copy | _Argument | _View | _Constant


def _maker(result: Any, known: Sequence[tuple[int, Any]], blocks: dict[int, Block]) -> _Maker:
    """How to make a result again: `known` are the arguments that it may be or share memory with, `blocks` those of other results by storage."""
    if not isinstance(result, torch.Tensor):
        return _Constant(result)
    for k, t in known:
        if t is result:
            return _Argument(k)
    storage = result.untyped_storage()
    for k, t in known:
        if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata == storage._cdata:
            after = result.storage_offset() * result.itemsize - t.storage_offset() * t.itemsize
            return _View(k, Place.of(result), int(after))
    if (block := blocks.get(storage._cdata)) is None:
        block = blocks[storage._cdata] = Block(storage)
    return _Home(block, block.add(result), tuple(result.shape), result.stride())


def empty_like(t: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor of the same strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def without_repeats(t: torch.Tensor) -> torch.Tensor:
    """An expanded tensor without its repetitions: every element once."""
    if 0 not in t.stride():
        return t
    shape = [1 if s == 0 else n for n, s in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(shape, t.stride())


def can_copy(t: torch.Tensor) -> bool:
    """Whether a copy at another address can have the same strides: but for expanded dimensions no element is there twice."""
    return not overlaps_itself(Layout.of(without_repeats(t)))
