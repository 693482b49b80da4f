"""A compiled region whose calls are recorded and replayed: which recording a call takes, when a new one is made, and when none is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from ...errors import OpforgeError, first_line
from ..config import Config
from ..execute.ranges import range_name
from ..observe import counters
from ..torch_compat import profiler_enabled
from .eligible import unrecorded
from .memory import Pool, Way
from .recording import Boxed, Recorder, Recording, Slot, State, can_copy

WARM_UPS = 1  # calls that load kernels and libraries before anything is recorded
MOVES = 2  # changes of its address after which an input is copied
VERSIONS = 4  # recordings for the same addresses, whose results are in use at once
RECORDINGS = 16  # in all
LINES = 2  # that are said to have made results
WAITS = 2  # times that a region asks others to record anew, so that it can record in the memory that they share

_shared: weakref.WeakValueDictionary[Hashable, Pool] = weakref.WeakValueDictionary()
"""The pool of each place in which new recordings are made."""
_turns = threading.RLock()
"""Recordings that share memory are chosen, replayed and made one after the other: a backward runs in a thread of its own."""


class Region:
    """A function of the arguments of `call`, which returns the same.

    An input that stays where it was is read there; one that moves is copied to where the recording reads it, but for `fixed` ones. A call
    for which there is no recording, and for which none should be made, runs as it is; why is counted.

    Its recordings share memory with those of other regions, until results that are still in use would be overwritten by another region, or by
    this one. Then the next ones are made with a `private_pool`, each in memory of its own.

    A result that was held when the region was called again, or another one that shares its memory, is given out as a copy from then on, where
    it is small.

    boxed   `call` takes a list, which it may empty, and is called by `run`.
    strict  raise `UnsupportedError` where nothing can be recorded.
    needed  positions of results that are never copied: a backward reads them where they are.
    lines   the user's line that made each result, for what is said of them.
    small   bytes of a recording's results, in all, that may be given out as copies.
    title   the graph's name, for profilers.
    """

    def __init__(
        self,
        call: Callable[..., Sequence[Any]],
        slots: Sequence[Slot],
        recorder: Recorder,
        *,
        boxed: bool = False,
        strict: bool = False,
        share: bool = True,
        needed: Collection[int] = (),
        lines: Sequence[str] = (),
        small: int = Config.cudagraphs_clone_bytes,
        title: str = "graph",
    ) -> None:
        self._title = title
        self.lines, self.small = list(lines), small
        self.call: Boxed = call if boxed else lambda args: call(*args)
        self.slots, self.recorder, self.strict = list(slots), recorder, strict
        self.private_pool = not (share and recorder.shares())
        self.needed, self.fresh = frozenset(needed), set[int]()
        self.recordings: list[Recording] = []
        self.copied: list[int] = []
        self.off = ""
        self._calls = self._waits = 0
        self._last: list[int] | None = None
        self._moves = [0] * len(self.slots)

    def __call__(self, *args: Any) -> Sequence[Any]:
        return self.run(list(args))

    def run(self, args: list[Any]) -> Sequence[Any]:
        """A call with a list, which it may empty: nobody else need hold the arguments."""
        # Who is recorded by somebody else waits for nobody.
        if not self.off and (place := self.recorder.place()) is not None:
            with _turns:
                results = self._recorded(args, (place, torch.is_inference_mode_enabled()))
            if results is not None:
                args.clear()
                return results
        return self.call(args)

    def _recorded(self, args: list[Any], state: State) -> Sequence[Any] | None:
        """The results of a recording, or None where the call should run as it is."""
        ways = []
        for recording in self.recordings:
            if recording.fits(args, state):
                if not (way := recording.conflicts(args)):
                    return self._replayed(recording, args)
                ways.append(way)
        made = self._record(args, state, ways)
        return None if made is None else self._replayed(made, args)

    def _replayed(self, recording: Recording, args: list[Any]) -> Sequence[Any]:
        if not profiler_enabled():
            return recording.replay(args)
        with record_function(range_name(self._title, "replayed")):
            return recording.replay(args)

    def _record(self, args: list[Any], state: State, ways: Sequence[Sequence[Way]]) -> Recording | None:
        """A new recording for these arguments, or None; `ways`: of each one that fits what is in its way."""
        self._calls += 1
        self._follow(args)
        if self._calls <= WARM_UPS:
            return None
        if (regions := _to_copy(ways)) is not None:
            for region, positions in regions:
                region.fresh |= positions
                region.recordings.clear()
            if any(region is not self for region, _ in regions):
                # As where they part: what they gave out is gone before long, and their recordings and these are made in one memory.
                for region, _ in regions:
                    region._calls = 0
                self.recordings.clear()
                return None
            ways = [] if regions else ways
        elif not self.private_pool and self._part(ways):
            return None
        if len(ways) >= VERSIONS:
            held = _lines([way for some in ways for way in some])
            unrecorded(f"results of {len(ways)} calls are held while it is called again{held}", self.strict)
            return None
        if len(self.recordings) >= RECORDINGS:
            told = _told(self.lines)
            unrecorded(f"it was recorded {RECORDINGS} times, for other sizes or addresses{told}", self.strict)
            return None
        if (pool := self._pool(state)) is None:
            return None
        try:
            made = Recording(
                self.call,
                args,
                self.slots,
                self.copied,
                self.recorder,
                pool,
                weakref.ref(self),
                shared=not self.private_pool,
                small=self.small,
                fresh=self.fresh,
                needed=self.needed,
            )
        except (OpforgeError, RuntimeError) as error:
            # The pool has grown for it, and may be unusable: those that share it are recorded anew in another one, so that it goes.
            pool.end()
            self.off = f"{type(error).__name__}: {first_line(error)}{_told(self.lines)}"
            self.recordings.clear()
            unrecorded(self.off, self.strict, error)
            return None
        counters.count_recording(self._title)
        self.recordings.insert(0, made)
        return made

    def _part(self, ways: Sequence[Sequence[Way]]) -> bool:
        """Give private pools to the regions whose results conflict. Whether to wait until these are gone."""
        regions = [way.results.region() for some in ways for way in some]
        if not regions:
            return False
        if all(region is self for region in regions):
            self.private_pool = True
            return False
        for region in regions:
            if region is not None and not region.private_pool:
                region.private_pool = True
                region.recordings.clear()
                region._calls = 0
        self.recordings.clear()
        return True

    def _pool(self, state: State) -> Pool | None:
        """Where to record now; None to wait until others have recorded anew."""
        if self.private_pool:
            return Pool(self.recorder.memory())
        pool = _shared.get(state[0])
        if pool is not None and not pool.broken:
            if not (unknown := pool.unknown()):
                return pool
            if self._waits < WAITS:
                self._waits += 1
                for results in unknown:
                    results.record_anew()
                return None
        pool = _shared[state[0]] = Pool(self.recorder.memory())
        return pool

    def _follow(self, args: Sequence[Any]) -> None:
        """Note which inputs have moved since the last call without a recording. Those that did so often are copied from now on."""
        here = [t.data_ptr() if isinstance(t, torch.Tensor) else 0 for t in args]
        last, self._last = self._last, here
        if last is None:
            return
        for k, slot in enumerate(self.slots):
            if here[k] == last[k] or slot.number or slot.unread or slot.fixed or k in self.copied:
                continue
            self._moves[k] += 1
            if self._moves[k] > MOVES and can_copy(args[k]):
                self.copied.append(k)
                self.recordings.clear()  # they read it where it was


def _lines(ways: Sequence[Way]) -> str:
    """The lines that made results which are held."""
    found: list[str] = []
    for way in ways:
        if (region := way.results.region()) is not None and region.lines:
            found += [region.lines[k] for block in way.blocks for k in way.results.positions[block.number]]
    return _told(found)


def _told(lines: Sequence[str]) -> str:
    """Lines of the user's at the end of what is said, two at most."""
    several = list(dict.fromkeys(filter(None, lines)))
    more = f" and {len(several) - LINES} more" if len(several) > LINES else ""
    return f"; results made by {' and by '.join(several[:LINES])}{more}" if several else ""


def _to_copy(ways: Sequence[Sequence[Way]]) -> list[tuple[Region, frozenset[int]]] | None:
    """Regions that can give out as copies, from now on, all of their results that are in the way: with the positions of these. None where some
    cannot, or nothing is in the way. Of recordings that are forgotten no more results come, so nothing need be done.
    """
    found: list[tuple[Region, frozenset[int]]] = []
    for way in (way for some in ways for way in some):
        region = way.results.region()
        if region is None or not any(r.own is way.results for r in region.recordings):
            continue
        for block in way.blocks:
            if (positions := way.results.small.get(block.number)) is None:
                return None
            found.append((region, positions))
    return found if ways else None


__all__ = ["Region"]
