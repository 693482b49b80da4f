"""Semaphores in a device's memory, by which the programs of a kernel find out which of them is the last. Each is 0 whenever no kernel uses it: the
last program resets it.

Kernels of one stream run one after another, so a stream needs one semaphore. A recorded CUDA graph is replayed on any stream, also while others run:
a recording has semaphores of its own, which no other launch ever gets.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch

from ..machine import gpu_target
from ..torch_compat import cuda_stream, empty_strided_cuda
from .launch import driver

SEMAPHORES = 4096  # of a device: one for each recording, and for each stream
RECORDINGS = 64  # whose semaphores are remembered: those that may still be going on

_lock = threading.Lock()
_free: dict[int, list[int]] = {}  # addresses, by device
_memory: list[torch.Tensor] = []  # never freed: recorded graphs hold addresses in it
_of_streams: dict[tuple[int, ...], int] = {}  # by device and stream
_of_recordings: dict[tuple[int, ...], int] = {}  # by device, recording and stream


def prepare(device: int) -> None:
    """Allocates a device's semaphores, unless it has some or a graph is being recorded (their memory would be the graph's)."""
    with _lock:
        if device not in _free and not torch.cuda.is_current_stream_capturing():
            apart = apart_on(device)
            memory = torch.zeros(SEMAPHORES * apart, dtype=torch.int32, device=torch.device("cuda", device))
            torch.cuda.synchronize(device)  # other streams use them too
            start = memory.data_ptr()
            _memory.append(memory)
            _free[device] = [start + 4 * apart * k for k in reversed(range(SEMAPHORES))]


def apart_on(device: int) -> int:
    """32-bit numbers from one semaphore to the next: two in one sector of memory would make kernels of two streams wait for each other."""
    major, minor = torch.cuda.get_device_capability(device)
    return gpu_target(10 * major + minor).limits.sector // 4


def with_semaphore(run: Callable[..., None], device: int, workspace: int = 0) -> Callable[..., None]:
    """A function that launches a kernel as `run` does and passes the address of a semaphore as its last argument; and behind it, if `workspace` is
    not 0, the address of so many bytes that only this launch uses.
    """
    prepare(device)
    apart = apart_on(device)

    def launch(programs: int, *arguments: int) -> None:
        # Work of one stream runs in order: what is freed after the launch is not used again before the kernel is done.
        memory = empty_strided_cuda((workspace,), (1,), torch.uint8) if workspace else None
        last = () if memory is None else (memory.data_ptr(),)
        address = _semaphore(device)
        if address:
            run(programs, *arguments, address, *last)
            return
        # None is left: one for this launch alone, set to 0 before it, on the same stream or in the same graph.
        made = empty_strided_cuda((apart,), (1,), torch.int32)
        made.zero_()
        run(programs, *arguments, made.data_ptr(), *last)

    return launch


def _semaphore(device: int) -> int:
    """The address of the semaphore for launches on the current stream, or 0 if there is none."""
    stream = cuda_stream(device)
    if not torch.cuda.is_current_stream_capturing():
        return _of_streams.get((device, stream)) or _take(_of_streams, (device, stream), device)
    recording = device, _recording(stream), stream
    found = _of_recordings.get(recording)
    if found is None:
        found = _take(_of_recordings, recording, device)
        while len(_of_recordings) > RECORDINGS:
            with _lock:
                _of_recordings.pop(next(iter(_of_recordings)), None)
    return found


def _take(known: dict[tuple[int, ...], int], key: tuple[int, ...], device: int) -> int:
    with _lock:
        if key not in known and _free.get(device):
            known[key] = _free[device].pop()
        return known.get(key, 0)


def _recording(stream: int) -> int:
    """The driver's number of the recording that a stream takes part in, which no other recording ever gets. Raises RuntimeError if it cannot say."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    ask = driver().cuStreamGetCaptureInfo_v2
    if code := ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None):
        raise RuntimeError(f"CUDA error {code} while asking for the recording that a stream takes part in")
    return number.value


__all__ = ["prepare", "with_semaphore"]
