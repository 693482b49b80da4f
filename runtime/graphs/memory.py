"""The memory of recordings: who uses the results that lie in it, and what the next recording may use.

What a recording allocates comes from a pool, at addresses that each of its replays writes again: results, intermediate values, memory that
libraries work in. A pool that recordings share gives one of them what nobody used while it was made: temporary memory of the others, their
results that were gone, and what a backward gives up while it runs. So each recording knows which results of others were in use all the while
(`spared`): those it cannot touch. All other memory of the pool it may write, and it is replayed only when nobody uses a result there.

Torch's allocator knows a result while the storage lives that it made for it. When that is gone, the next recording gets the memory, and later
results are made at the address (`Block.allocated` is false). While such a result is in use, nothing can be recorded in the pool: the allocator
would give its memory away.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from sys import getrefcount
from typing import Any, NamedTuple

import torch

from ..torch_compat import WeakStorage, no_modes, reinterpret_tensor, storage_at, storage_uses, tensor_uses

_numbers = itertools.count()
_address, _size = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes


class Place(NamedTuple):
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, t: torch.Tensor) -> Place:
        return cls(t.dtype, tuple(t.shape), t.stride(), int(t.storage_offset()))

    @staticmethod
    def says_all(t: torch.Tensor) -> bool:
        """Whether a tensor can be made again from its place."""
        return not (t.is_conj() or t.is_neg() or t.is_quantized)

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        with no_modes():
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            return empty.set_(storage, self.offset, self.shape, self.stride)


class _Own(NamedTuple):
    """What a recording holds of a result: one object, so that who has it counts the same whatever other threads let go of."""

    storage: torch.UntypedStorage
    tensors: list[torch.Tensor]
    unused: int  # how many tensors, and names in Python, the storage has where nobody else uses it


def _uses(weak: WeakStorage) -> int:
    """How many tensors and names in Python use a storage that no recording holds."""
    n = _counted(weak)
    return max(1, n - _LONE + 1) if n else 0


def _counted(weak: WeakStorage) -> int:
    storage = weak.get()
    return 0 if storage is None else storage_uses(weak.key) + getrefcount(storage)


def _lone() -> int:
    t = torch.empty(1)
    return _counted(WeakStorage(t.untyped_storage()))


_LONE = _lone()
"""What one tensor alone counts."""


def _in_a_list() -> int:
    own = _Own(torch.empty(1).untyped_storage(), [], 0)
    (listed,) = map(getrefcount, [own.storage])
    return listed - getrefcount(own.storage)


_IN_A_LIST = _in_a_list()
"""What a list of storages adds to the names of each, where all are counted in one go."""


class Block:
    """The memory of one storage among a recording's results, always at the same address."""

    __slots__ = ("address", "allocated", "alone", "device", "number", "own", "places", "resized", "size", "weak")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.number = next(_numbers)
        self.address, self.size, self.device = storage.data_ptr(), storage.nbytes(), storage.device
        self.places: list[Place] = []
        self.allocated = self.alone = True
        self.resized = False  # somebody has resized the storage that he was given
        self.weak = WeakStorage(storage)
        self.own: _Own | None = _Own(storage, [], 0)  # None when the recording is gone

    def add(self, t: torch.Tensor) -> int:
        """One more result in it; its number among them."""
        assert self.own is not None
        self.places.append(Place.of(t))
        self.own.tensors.append(t)
        return len(self.places) - 1

    def count(self) -> None:
        """Note how it looks while nobody else uses it: now. Whoever does is taken for one that stays (memory of a constant): it is not given up.
        Nor is it where a tensor could not be made again.
        """
        assert self.own is not None
        self.own = self.own._replace(unused=0)
        self.own = self.own._replace(unused=self.uses())
        self.alone = self.weak.uses() == len(self.places) + 1 and all(map(Place.says_all, self.own.tensors))

    def can_be_copied(self) -> bool:
        """Whether the results in it can be given out in other memory: all are of one dtype, and nobody else knows the memory."""
        return (
            self.alone and len({p.dtype for p in self.places}) == 1 and self.size % self.places[0].dtype.itemsize == 0
        )

    def elements(self) -> torch.Tensor:
        """All of the memory, in the dtype of the results: of those that `can_be_copied`."""
        assert self.own is not None
        place, size = self.places[0], self.size // self.places[0].dtype.itemsize
        return reinterpret_tensor(self.own.tensors[0], (size,), (1,), -place.offset)

    def uses(self) -> int:
        """How many tensors and names in Python use the memory, beside the recording's own."""
        self.keep_place()
        own = self.own
        if own is None:
            return _uses(self.weak)
        return storage_uses(self.weak.key) + getrefcount(own.storage) - own.unused

    def keep_place(self) -> None:
        """Where somebody has resized the storage, it has other memory now, or none, and is theirs alone. The replays write where they did, so the
        results are at that address in a storage of the recording's own; the allocator takes the memory for free. Such a storage cannot be resized,
        so `resized` results are best given out as copies.
        """
        own = self.own
        if own is None or (own.storage.data_ptr() == self.address and own.storage.nbytes() == self.size):
            return
        with torch.inference_mode(own.tensors[0].is_inference()):
            self._own_anew(0)
        self.resized = True
        del own
        self.count()

    def let_go(self) -> int:
        """Give the memory back, unless others use it. The argument for `hold`."""
        own, self.own = self.own, None
        return 0 if own is None else own.unused

    def hold(self, unused: int) -> None:
        """Take the memory again after `let_go`: the storage that others use, or else the address."""
        if (storage := self.weak.get()) is None:
            self._own_anew(unused)
            self.count()
        else:
            self.own = _Own(storage, [p.tensor(storage) for p in self.places], unused)

    def _own_anew(self, unused: int) -> None:
        storage = storage_at(self.address, self.size, self.device)
        self.weak, self.allocated = WeakStorage(storage), False
        self.own = _Own(storage, [p.tensor(storage) for p in self.places], unused)


class Results:
    """The blocks of one recording, and the region that it belongs to; `gone` with the recording.

    small      positions of the results in a block, by its number, that another recording could give out as copies.
    positions  of the results in each block, by its number.
    """

    def __init__(self, blocks: Sequence[Block], region: weakref.ref[Any], inference: bool) -> None:
        self.blocks, self.region, self.inference, self.gone = list(blocks), region, inference, False
        self.small: dict[int, frozenset[int]] = {}
        self.positions: dict[int, list[int]] = {}
        self._where = [(b.address, b.size) for b in self.blocks]

    def record_anew(self) -> None:
        """Let the region forget what it has recorded."""
        if (region := self.region()) is not None:
            region.recordings.clear()

    def uses(self) -> list[int]:
        """What `Block.uses` says of each block: a replay asks it of hundreds, so they are counted in one go where that is possible."""
        owns = [own for b in self.blocks if (own := b.own) is not None]
        storages = [own.storage for own in owns]
        if list(zip(map(_address, storages), map(_size, storages), strict=True)) == self._where:
            uses = map(storage_uses, [b.weak.key for b in self.blocks])
            names = map(getrefcount, storages)
            return [n + m - _IN_A_LIST - own.unused for n, m, own in zip(uses, names, owns, strict=True)]
        del storages
        return [b.uses() for b in self.blocks]

    def in_use(self) -> bool:
        return any(self.uses())


class Way(NamedTuple):
    """Blocks that somebody uses, of one recording's results."""

    results: Results
    blocks: list[Block]


class Pool:
    """Memory of recordings that run in turns, on one stream. `memory` is what the recorder has made for it, and lives as long."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.broken = False
        self.all: list[Results] = []
        self.recent: list[Results] = []  # those of which something may be in use

    def add(self, recording: object, results: Results) -> None:
        """Results of a new recording, for as long as it lives or somebody uses them."""
        self.all.append(results)
        weakref.finalize(recording, _drop, results, self).atexit = False

    def end(self) -> None:
        """Nothing is recorded in it again, and what was is forgotten, after a recording failed in it."""
        self.broken = True
        for results in self.all:
            results.record_anew()

    def used(self, results: Results) -> None:
        """They were given out."""
        if results not in self.recent:
            self.recent.append(results)

    def conflicts(self, spared: frozenset[int], given: Mapping[int, tuple[int, ...]], args: Sequence[Any]) -> list[Way]:
        """Results in use that a replay may overwrite: all but those in blocks that are `spared`, and those in blocks at an address that is
        `given` to it with some of its arguments, if nothing else uses them.
        """
        found = []
        for results in self.recent[:]:
            counts = results.uses()
            if not any(counts):
                self.recent.remove(results)
                continue
            blocks = []
            for block, n in zip(results.blocks, counts, strict=True):
                if not n or block.number in spared:
                    continue
                where = given.get(block.address)
                if where is None or n != len(where) or any(_references(args, k) != _ALONE for k in where):
                    blocks.append(block)
            if blocks:
                found.append(Way(results, blocks))
        return found

    def unknown(self) -> list[Results]:
        """Results in use whose memory the allocator takes for free."""
        return [r for r in self.all if any(not b.allocated and b.uses() for b in r.blocks)]


def _references(args: Sequence[Any], k: int) -> tuple[int, int]:
    """How many names in Python, and how many users in all, an argument has."""
    t = args[k]
    return getrefcount(t), tensor_uses(t)


_ALONE = _references([torch.empty(0)], 0)
"""Of an argument that only the list of arguments holds."""


class Loan:
    """While something is recorded in a pool, its memory but for what is used belongs to the recording. The arguments that lie there leave the
    list for that time, so that the recording may give them up; `end` puts them back.
    """

    def __init__(self, pool: Pool, args: list[Any]) -> None:
        _prune()
        self.pool, self.args = pool, args
        pool.all = [r for r in pool.all if not r.gone or r.in_use()]
        for r in pool.all:
            for b in r.blocks:
                b.keep_place()
        known = {b.weak.key: b for r in pool.all for b in r.blocks}
        self.notes = []
        for k, t in enumerate(args):
            if not isinstance(t, torch.Tensor) or not Place.says_all(t):
                continue
            if (block := known.get(t.untyped_storage()._cdata)) is not None:
                self.notes.append((k, block, Place.of(t), weakref.ref(t)))
                args[k] = None
        self.lent = [
            (r, b, b.let_go()) for r in pool.all for b in r.blocks if b.alone and b.allocated and b.own is not None
        ]
        self.spared: frozenset[int] = frozenset()
        self.given: dict[int, tuple[int, ...]] = {}

    def end(self) -> None:
        """The arguments are as they were; `spared` and `given` are known."""
        pool = self.pool
        self.spared = frozenset(b.number for r in pool.all for b in r.blocks if b.allocated and b.weak.uses())
        for results, block, unused in self.lent:
            with torch.inference_mode(results.inference):
                block.hold(unused)
            if results.gone:  # meanwhile
                block.let_go()
        for k, block, place, tensor in self.notes:
            storage = block.weak.get() or storage_at(block.address, block.size, block.device)
            t = tensor()
            self.args[k] = place.tensor(storage) if t is None else t
            if block.number not in self.spared:
                self.given[block.address] = (*self.given.get(block.address, ()), k)


_lasting: dict[int, tuple[Pool, Block]] = {}
"""Results that are in use, of recordings that are gone, whose memory the allocator takes for free: their pools must stay."""


def _drop(results: Results, pool: Pool) -> None:
    """Let go of a recording's results. Any thread may come here at any time."""
    results.gone = True
    for block in results.blocks:
        block.let_go()
        if not block.allocated and block.uses():
            _lasting[block.number] = (pool, block)
    _prune()


def _prune() -> None:
    for number, (_, block) in list(_lasting.items()):
        if not block.uses():
            _lasting.pop(number, None)
