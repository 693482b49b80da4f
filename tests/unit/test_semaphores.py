"""Semaphores of kernels whose last program does more: which launch gets which, by functions that stand in for the driver's. Needs no GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from opforge.generated.targets import GPU_TARGETS
from opforge.runtime.execute import semaphores


class Device:
    """Launches are written down; semaphores are in the processor's memory."""

    def __init__(self) -> None:
        self.stream, self.recording = 1, 0
        self.launches: list[tuple[int, ...]] = []
        self.made: list[torch.Tensor] = []
        self.code = 0

    def cuStreamGetCaptureInfo_v2(self, stream: ctypes.c_void_p, status: Any, number: Any, *rest: None) -> int:
        assert stream.value == self.stream
        assert rest == (None, None, None)
        number._obj.value = self.recording
        return self.code

    def run(self, programs: int, *arguments: int) -> None:
        self.launches.append((programs, *arguments))

    def empty(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.made.append(torch.full(shape, -1, dtype=dtype))
        return self.made[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, zeros = Device(), torch.zeros
    for name in ("_free", "_of_streams", "_of_recordings"):
        monkeypatch.setattr(semaphores, name, {})
    monkeypatch.setattr(semaphores, "_memory", [])
    monkeypatch.setattr(semaphores, "driver", lambda: made)
    monkeypatch.setattr(semaphores, "cuda_stream", lambda index: made.stream)
    monkeypatch.setattr(semaphores, "empty_strided_cuda", made.empty)
    monkeypatch.setattr(torch, "zeros", lambda *a, device, **k: zeros(*a, **k))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.recording > 0)
    return made


def semaphore_of(device: Device, run: Any) -> int:
    run(7, 16, 32)
    *first, semaphore = device.launches[-1]
    assert first == [7, 16, 32]
    return semaphore


def test_a_stream_has_one(device: Device) -> None:
    run, other = semaphores.with_semaphore(device.run, 0), semaphores.with_semaphore(device.run, 0)
    one = semaphore_of(device, run)
    assert semaphore_of(device, other) == one
    device.stream = 2
    assert semaphore_of(device, run) != one
    device.stream = 1
    assert semaphore_of(device, run) == one
    assert one % 16 == 0
    assert len(semaphores._memory) == 1


def test_a_recording_has_one_of_its_own(device: Device) -> None:
    run = semaphores.with_semaphore(device.run, 0)
    found = {semaphore_of(device, run)}
    for device.recording in (1, 2, 3):
        one = semaphore_of(device, run)
        assert semaphore_of(device, run) == one
        assert one not in found
        found.add(one)
        device.stream += 1  # a branch of the recording
        branch = semaphore_of(device, run)
        assert branch not in found
        found.add(branch)


def test_no_two_lie_in_one_sector(device: Device) -> None:
    run, sector = semaphores.with_semaphore(device.run, 0), GPU_TARGETS["sm_90"].limits.sector
    found = []
    for device.stream in range(1, 40):
        found.append(semaphore_of(device, run))
    assert len({address // sector for address in found}) == len(found)


def test_none_is_given_out_twice(device: Device) -> None:
    run = semaphores.with_semaphore(device.run, 0)
    found = []
    for device.recording in range(1, semaphores.SEMAPHORES + 1):
        found.append(semaphore_of(device, run))
    assert len(set(found)) == semaphores.SEMAPHORES
    assert not device.made
    assert len(semaphores._of_recordings) == semaphores.RECORDINGS
    # Those that come too late have one for each launch.
    for device.recording in range(semaphores.SEMAPHORES + 1, semaphores.SEMAPHORES + 3):
        assert semaphore_of(device, run) == device.made[-1].data_ptr()
        assert not device.made[-1].any()
    assert len(device.made) == 2


def test_a_graph_that_is_recorded_first(device: Device) -> None:
    """The memory that is made then is the graph's own: no other launch may use it."""
    device.recording = 1
    run = semaphores.with_semaphore(device.run, 0)
    assert semaphore_of(device, run) == device.made[-1].data_ptr()
    assert not semaphores._memory
    device.recording = 0
    semaphores.with_semaphore(device.run, 0)
    assert semaphore_of(device, run) != device.made[-1].data_ptr()


def test_a_driver_that_cannot_say(device: Device) -> None:
    run = semaphores.with_semaphore(device.run, 0)
    device.recording, device.code = 1, 999
    with pytest.raises(RuntimeError, match="999"):
        run(1)


def test_devices_have_their_own(device: Device) -> None:
    assert semaphore_of(device, semaphores.with_semaphore(device.run, 0)) != semaphore_of(
        device, semaphores.with_semaphore(device.run, 1)
    )
    assert len(semaphores._memory) == 2
