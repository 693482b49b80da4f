"""One recording of a compiled region: the addresses that it reads and writes, and how it is replayed for new arguments.

A replay runs at the addresses that were recorded, those of the results too. Memory of a recording is its own, so replays of others never
touch it; its own replay would overwrite its results, and waits until nobody holds them. How many tensors use a result's storage says
whether someone does: views, gradients and what autograd saved count alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..dispatch.overlap import overlaps_itself
from ..dispatch.regions import Layout
from ..torch_compat import copy_all, reinterpret_tensor, same_addresses, storage_uses


class Recorder(Protocol):
    """Records the work of a device: CUDA, or a stand-in in tests."""

    def place(self) -> Hashable:
        """Where work goes now (a stream); None where nothing can be recorded or replayed."""
        ...

    def record(
        self, call: Callable[..., Sequence[Any]], inputs: Sequence[Any]
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        """Record what `call(*inputs)` does without doing it. A function that does it, and what the call returned. Raises what it raises."""
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
    """A region recorded for `args`, of which those at `copied` are copied to memory of the recording first.

    Nothing has run yet: the results hold nothing before the first `replay`.
    """

    def __init__(
        self,
        call: Callable[..., Sequence[Any]],
        args: Sequence[Any],
        slots: Sequence[Slot],
        copied: Sequence[int],
        recorder: Recorder,
    ) -> None:
        self.state = (recorder.place(), torch.is_inference_mode_enabled())
        self.numbers = [(k, args[k]) for k, s in enumerate(slots) if s.number]
        self.shapes = [(k, args[k].shape, args[k].stride()) for k, s in enumerate(slots) if s.dynamic]
        self.copied = list(copied)
        self.read = [k for k, s in enumerate(slots) if not (s.number or s.unread or k in copied)]
        self.addresses = [args[k].data_ptr() for k in self.read]
        inputs = list(args)
        for k in copied:
            inputs[k] = torch.empty_strided(args[k].shape, args[k].stride(), dtype=args[k].dtype, device=args[k].device)
        self.buffers = [without_repeats(inputs[k]) for k in copied]
        self.run, results = recorder.record(call, inputs)
        self.results = [_maker(r, inputs) for r in results]
        del results
        self.storages = list(
            {s._cdata: s for r in self.results if isinstance(r, _Home) for s in (r.home.untyped_storage(),)}.values()
        )
        self.unused = [_uses(s) for s in self.storages]

    def fits(self, args: Sequence[Any], state: tuple[Hashable, bool]) -> bool:
        """Whether it was recorded for these sizes and addresses."""
        return (
            state == self.state
            and all(args[k] == n for k, n in self.numbers)
            and same_addresses([args[k] for k in self.read], self.addresses)
            and all(args[k].shape == shape and args[k].stride() == stride for k, shape, stride in self.shapes)
        )

    def idle(self) -> bool:
        """Whether nobody holds a result of the last replay."""
        return [_uses(s) for s in self.storages] == self.unused

    def replay(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The results for these arguments, which fit. The recording is idle."""
        if self.copied:
            copy_all(self.buffers, [without_repeats(args[k]) for k in self.copied])
        self.run()
        return tuple(r.make(args) for r in self.results)


def _uses(storage: torch.UntypedStorage) -> int:
    """How many tensors, and how many names in Python, a storage has."""
    return storage_uses(storage._cdata) + sys.getrefcount(storage)


@dataclass(frozen=True)
class _Home:
    """A result in memory of the recording: each call gets a tensor of its own there."""

    home: torch.Tensor

    def make(self, args: Sequence[Any]) -> torch.Tensor:
        return reinterpret_tensor(self.home, self.home.shape, self.home.stride(), 0)


@dataclass(frozen=True)
class _Argument:
    """A result that is an argument."""

    k: int

    def make(self, args: Sequence[Any]) -> Any:
        return args[self.k]


@dataclass(frozen=True)
class _View:
    """A result in the memory of an argument."""

    k: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def make(self, args: Sequence[Any]) -> torch.Tensor:
        return reinterpret_tensor(args[self.k], self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Constant:
    value: Any

    def make(self, args: Sequence[Any]) -> Any:
        return self.value


def _maker(result: Any, inputs: Sequence[Any]) -> _Home | _Argument | _View | _Constant:
    if not isinstance(result, torch.Tensor):
        return _Constant(result)
    for k, t in enumerate(inputs):
        if t is result:
            return _Argument(k)
    storage = result.untyped_storage()._cdata
    for k, t in enumerate(inputs):
        if isinstance(t, torch.Tensor) and t.dtype == result.dtype and t.untyped_storage()._cdata == storage:
            offset = result.storage_offset() - t.storage_offset()
            return _View(k, tuple(result.shape), tuple(result.stride()), int(offset))
    return _Home(result)


def without_repeats(t: torch.Tensor) -> torch.Tensor:
    """An expanded tensor without its repetitions: every element once."""
    if 0 not in t.stride():
        return t
    shape = [1 if s == 0 else n for n, s in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(shape, t.stride())


def can_copy(t: torch.Tensor) -> bool:
    """Whether a copy at another address can have the same strides: but for expanded dimensions no element is there twice."""
    return not overlaps_itself(Layout.of(without_repeats(t)))
