"""Tables of addresses: what kernels are launched with, by functions that stand in for the driver's and for the allocator. Needs no GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from opforge.runtime.execute import pointer_tables
from opforge.runtime.execute.launch import Loaded
from opforge.runtime.execute.pointer_tables import KEPT, STREAMS, table_launcher
from opforge.runtime.render.triton_horizontal import FILL

FIRST, OTHER = (0xF00, 0, 128), (0xBA0, 0, 64)
NUMBERS = [4, 6, 0, 1]  # of two members: numbers of points, first programs


class Device:
    """Launches happen at once; tables are in the processor's memory."""

    def __init__(self) -> None:
        self.stream, self.capturing = 1, False
        self.fills = self.loads = 0
        self.made: list[weakref.ref[Tensor]] = []
        self.launches: list[tuple[Any, ...]] = []

    def launcher(
        self, loaded: Loaded, other: Any, name: str, pointers: int, sizes: int, device: int, numbers: Any
    ) -> Any:
        def run(programs: int, address: int) -> None:
            table = next(t for r in self.made if (t := r()) is not None and t.data_ptr() == address)
            self.launches.append((loaded[0], self.stream, programs, *numbers, table.tolist()[: 4 + 2 * 2]))

        assert (name, pointers, sizes, device) == ("k", 1, 0, 3)
        return run

    def empty(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        memory = torch.full(shape, -1, dtype=dtype)
        self.made.append(weakref.ref(memory))
        return memory

    def fill(self, programs: int, address: int, *numbers: int) -> None:
        assert (programs, len(numbers)) == (1, FILL)
        self.fills += 1
        for r in self.made:
            if (t := r()) is not None and 0 <= (at := (address - t.data_ptr()) // 8) < t.numel():
                t[at : at + FILL] = torch.tensor(numbers)

    def other(self) -> Loaded:
        self.loads += 1
        return OTHER

    def alive(self) -> int:
        gc.collect()
        return sum(r() is not None for r in self.made)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(pointer_tables, "launcher", made.launcher)
    monkeypatch.setattr(pointer_tables, "empty_strided_cuda", made.empty)
    monkeypatch.setattr(pointer_tables, "cuda_stream", lambda index: made.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


def launcher_of(device: Device, numbers: list[int] = NUMBERS) -> Any:
    return table_launcher(FIRST, device.other, "k", device.fill, numbers, 3, [False, True])


def test_a_table_is_written_when_addresses_are_others(device: Device) -> None:
    run = launcher_of(device)
    a, b, c = (torch.empty(16) for _ in range(3))
    at = a.data_ptr() + 4096
    order = (0, 2, 1, 2)
    for _ in range(3):
        run(7, [a, b], [at], order)
    assert device.fills == 1
    wanted = [*NUMBERS, a.data_ptr(), at, b.data_ptr(), at]
    assert device.launches == [(FIRST[0], 1, 7, 2, wanted)] * 3
    run(7, [a, c], [at], order)
    run(7, [a, c], [at + 16], order)
    assert device.fills == 3
    assert [ran[-1][4:] for ran in device.launches[3:]] == [
        [a.data_ptr(), at, c.data_ptr(), at],
        [a.data_ptr(), at + 16, c.data_ptr(), at + 16],
    ]
    run(0, [a, c], [at + 32], order)  # nothing to do
    assert (device.fills, len(device.launches)) == (3, 5)


def test_results_in_turns_are_written_once(device: Device) -> None:
    """As those of a program that drops a result after it has made the next one."""
    run = launcher_of(device)
    some = [torch.empty(16) for _ in range(KEPT)]
    for _ in range(3):
        for t in some:
            run(1, [t], [], (0, 0, 0, 0))
    assert device.fills == KEPT
    run(1, [torch.empty(64)], [], (0, 0, 0, 0))
    assert device.alive() == KEPT


def test_streams_have_tables_of_their_own(device: Device) -> None:
    """One may be read while work of another stream has not begun."""
    run = launcher_of(device)
    t = torch.empty(16)
    for stream in (1, 2, 1, 2):
        device.stream = stream
        run(1, [t], [], (0, 0, 0, 0))
    assert device.fills == 2
    for stream in range(3, 3 + 2 * STREAMS):
        device.stream = stream
        run(1, [t], [], (0, 0, 0, 0))
    assert device.alive() == STREAMS


def test_a_recording_writes_its_table_itself(device: Device) -> None:
    """None of another call, which may be dropped while the recording lives; and none that later calls find."""
    run = launcher_of(device)
    t = torch.empty(16)
    run(1, [t], [], (0, 0, 0, 0))
    device.capturing = True
    run(1, [t], [], (0, 0, 0, 0))
    run(1, [t], [], (0, 0, 0, 0))
    assert (device.fills, device.alive()) == (3, 1)
    device.capturing = False
    run(1, [t], [], (0, 0, 0, 0))
    assert device.fills == 3
    assert all(ran == device.launches[0] for ran in device.launches)


def test_odd_addresses_load_another_function_once(device: Device) -> None:
    run = launcher_of(device)
    whole = torch.empty(64)
    for tensors, others in (([whole], []), ([whole[1:]], []), ([whole], [whole.data_ptr() + 8]), ([whole], [16])):
        run(1, tensors, others, (0, 0, 0, 0))
    assert [ran[0] for ran in device.launches] == [FIRST[0], OTHER[0], OTHER[0], FIRST[0]]
    assert device.loads == 1


def test_long_tables(device: Device) -> None:
    """Of several launches that write them."""
    members = FILL
    run = launcher_of(device, list(range(2 * members)))
    t = torch.empty(16)
    run(1, [t], [], (0,) * 3 * members)
    assert device.fills == 5
    (table,) = [found for r in device.made if (found := r()) is not None]
    assert table.tolist() == [*range(2 * members), *[t.data_ptr()] * 3 * members]


def test_what_has_failed_is_not_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launcher_of(device)
    t = torch.empty(16)
    with monkeypatch.context() as patch:
        patch.setattr(
            pointer_tables, "empty_strided_cuda", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none left"))
        )
        with pytest.raises(torch.OutOfMemoryError):
            run(1, [t], [], (0, 0, 0, 0))
    run(1, [t], [], (0, 0, 0, 0))
    assert (device.fills, len(device.launches)) == (1, 1)
