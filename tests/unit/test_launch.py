"""What the driver is given at each launch, by a function that stands in for the driver's. Needs no GPU."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from opforge.runtime.execute import launch
from opforge.runtime.execute.launch import Loaded, launcher

STREAM = 0x1234
FIRST, OTHER = (0xF00, 4096, 128), (0xBA0, 0, 64)
AT = 1 << 40  # an address


class Driver:
    """Records launches: function, grid, block, shared memory, stream, arguments."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.codes: list[int] = []
        self.zeros = 2  # arguments at the end, of scratch memory and of a profile's
        self.meanwhile: Callable[[], None] = lambda: None
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        self.cuLaunchKernelEx = prototype(self.launch)

    def launch(self, config: int, function: int, parameters: int | None, extra: int) -> int:
        assert parameters is None
        x, y, z, bx, by, bz, shared, stream, attributes, count = struct.unpack(
            "7I4xQQI4x", ctypes.string_at(config, 56)
        )
        buffer, at, size, size_at, end = (ctypes.c_uint64 * 5).from_address(extra)
        assert (buffer, size, end) == (1, 2, 0)
        length = ctypes.c_size_t.from_address(size_at).value
        self.meanwhile()
        arguments = struct.unpack(f"{length // 8}q", ctypes.string_at(at, length))
        own = len(arguments) - self.zeros
        assert (y, z, by, bz, attributes, count, {*arguments[own:]}) == (1, 1, 1, 1, 0, 0, {0})
        self.launches.append((function, x, bx, shared, stream, *arguments[:own]))
        return self.codes.pop() if self.codes else 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = f"error {code}".encode()
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(launch, "driver", lambda: made)
    monkeypatch.setattr(launch, "cuda_stream", lambda device: STREAM + device)
    return made


def never() -> Loaded:
    raise AssertionError("nothing here is at an odd address")


def test_arguments_and_configuration(driver: Driver) -> None:
    run = launcher(FIRST, never, "k", 2, 1, 3)
    run(7, AT, AT + 16, 5)
    run(1, AT + 32, AT, 6)
    run(0, AT, AT, 0)  # nothing to do: nothing is launched
    rest = (128, 4096, STREAM + 3)
    assert driver.launches == [(0xF00, 7, *rest, AT, AT + 16, 5), (0xF00, 1, *rest, AT + 32, AT, 6)]


def test_odd_addresses_load_another_function_once(driver: Driver) -> None:
    loads: list[int] = []

    def other() -> Loaded:
        loads.append(1)
        return OTHER

    run = launcher(FIRST, other, "k", 2, 1, 0)
    run(2, AT, AT, 7)  # sizes may be odd
    run(2, AT + 4, AT, 7)
    run(2, AT, AT + 8, 7)
    assert loads == [1]
    assert [ran[0] for ran in driver.launches] == [0xF00, 0xBA0, 0xBA0]
    assert driver.launches[1] == (0xBA0, 2, 64, 0, STREAM, AT + 4, AT, 7)


def test_many_arguments(driver: Driver) -> None:
    run = launcher(FIRST, never, "k", 1000, 3, 0)
    arguments = [AT + 16 * k for k in range(1000)] + [1, 2, 3]
    run(1, *arguments)
    assert driver.launches == [(0xF00, 1, 128, 4096, STREAM, *arguments)]
    with pytest.raises(TypeError):
        run(1, *arguments[1:])


def test_threads_do_not_share_memory(driver: Driver) -> None:
    """Each launch waits until both are inside of the driver."""
    run = launcher(FIRST, never, "k", 1, 0, 0)
    barrier = threading.Barrier(2, timeout=20)
    driver.meanwhile = lambda: (barrier.wait(), None)[1]
    threads = [threading.Thread(target=run, args=(k + 1, AT + 16 * k)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(ran[1:] for ran in driver.launches) == [(k + 1, 128, 4096, STREAM, AT + 16 * k) for k in range(2)]


def test_errors(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launcher(FIRST, never, "k9_add", 1, 0, 0)
    driver.codes = [719]
    with pytest.raises(RuntimeError, match=r"CUDA error 719 \(error 719\) while launching k9_add"):
        run(1, AT)
    # A thread without a context: torch makes one, and the launch is made again.
    asked: list[int] = []
    monkeypatch.setattr(launch, "_enter", asked.append)
    driver.codes = [201]
    run(1, AT)
    assert asked == [0]
    assert len(driver.launches) == 3
    driver.codes = [719, 201]
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        run(1, AT)
    run(1, AT)


def test_numbers_that_do_not_change(driver: Driver) -> None:
    """They follow the sizes in every block of memory, also of the other function."""
    run = launcher(FIRST, lambda: OTHER, "k", 2, 1, 0, [8, 9])
    run(1, AT, AT, 5)
    run(2, AT, AT + 4, 6)
    assert driver.launches == [
        (0xF00, 1, 128, 4096, STREAM, AT, AT, 5, 8, 9),
        (0xBA0, 2, 64, 0, STREAM, AT, AT + 4, 6, 8, 9),
    ]


def test_one_odd_address_of_many(driver: Driver) -> None:
    run = launcher(FIRST, lambda: OTHER, "k", 40, 1, 0, [7])
    for odd in (None, 0, 17, 39):
        arguments = [AT + 16 * k + (4 if k == odd else 0) for k in range(40)]
        run(3, *arguments, 5)  # the size is odd, which does not matter
        wanted = FIRST if odd is None else OTHER
        assert driver.launches[-1] == (wanted[0], 3, wanted[2], wanted[1], STREAM, *arguments, 5, 7)
    assert len(driver.launches) == 4


def test_scratch_memory(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch has its own; its address takes the place of one of the zeros, also in a launch of the other function."""
    asked: list[int] = []

    def empty(shape: tuple[int], *_: object) -> torch.Tensor:
        asked.append(shape[0])
        return torch.empty(shape[0], dtype=torch.uint8)

    monkeypatch.setattr(launch, "empty_strided_cuda", empty)
    driver.zeros = 1
    run = launcher(FIRST, lambda: OTHER, "k", 2, 1, 0, scratch=256)
    run(3, AT, AT, 5)
    run(4, AT, AT + 4, 6)
    assert asked == [768, 1024]
    assert [one[:-1] for one in driver.launches] == [
        (0xF00, 3, 128, 4096, STREAM, AT, AT, 5),
        (0xBA0, 4, 64, 0, STREAM, AT, AT + 4, 6),
    ]
    assert all(one[-1] for one in driver.launches)
