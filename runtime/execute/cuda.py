"""What wrappers of graphs on a GPU need while they run: memory of the current stream, and kernels launched through the driver."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable

import torch

from ...errors import BuildError
from ..torch_compat import cuda_stream, empty_strided_cuda
from . import support
from .support import conform, out_of_range, overload, reinterpret

_INVALID_CONTEXT = 201
_MAX_THREADS = 0  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PLAIN_SHARED = 48 << 10  # bytes that a kernel may have without asking
_BUFFER, _SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*

Loaded = tuple[ctypes.c_void_p, int, int]
"""A function, bytes of shared memory, threads."""

empty_strided = empty_strided_cuda


class Workspaces(support.Workspaces):
    """Of the current device and stream: work of one stream runs in order."""

    __slots__ = ()

    def place(self) -> support.Place:
        index = torch.cuda.current_device()
        return torch.device("cuda", index), cuda_stream(index)


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver. Raises `BuildError` where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BuildError(f"the CUDA driver cannot be loaded: {error}") from error
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3
    return library


def _said(code: int) -> str:
    text = ctypes.c_char_p()
    driver().cuGetErrorString(code, ctypes.byref(text))
    return f"CUDA error {code} ({(text.value or b'unknown').decode()})"


def _built(code: int, what: str) -> None:
    if code:
        raise BuildError(f"{_said(code)} while {what}")


def load_function(binary: bytes, name: str, shared: int, threads: int) -> ctypes.c_void_p:
    """The kernel `name` of a cubin, in the current device's context, for blocks of so many threads and bytes of shared memory. Raises
    `BuildError` for what the device does not take.
    """
    torch.cuda.current_stream()  # the context exists and is current in this thread
    cuda = driver()
    module, function, most = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    _built(cuda.cuModuleLoadData(ctypes.byref(module), binary), f"loading the kernel {name}")
    _built(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding the kernel {name}")
    _built(cuda.cuFuncGetAttribute(ctypes.byref(most), _MAX_THREADS, function), f"asking for the threads of {name}")
    if threads > most.value:
        raise BuildError(f"a block of {name} has {threads} threads, and its registers are enough for {most.value}")
    if shared > _PLAIN_SHARED:
        _built(
            cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared),
            f"giving {name} {shared} bytes of shared memory",
        )
    return function


def launcher(
    first: Loaded, other: Callable[[], Loaded], name: str, pointers: int, sizes: int, device: int
) -> Callable[..., None]:
    """A function that launches a kernel on the current stream: it takes the number of programs, addresses and sizes.

    first  for addresses that are all multiples of 16: the function, with its shared memory and its threads.
    other  loads that for other addresses.
    """
    count = pointers + sizes
    # Triton's kernels take two addresses more, of scratch memory that these kernels do not have.
    values_type, extra_type = ctypes.c_uint64 * (count + 2), ctypes.c_void_p * 5
    size = ctypes.c_size_t(8 * (count + 2))
    launch = driver().cuLaunchKernel
    known: list[Loaded | None] = [first, None]

    def run(programs: int, *arguments: int) -> None:
        which = 1 if functools.reduce(operator.or_, arguments[:pointers], 0) & 15 else 0
        found = known[which]
        if found is None:
            found = known[which] = other()
        if not programs:
            return
        function, shared, threads = found
        values = values_type(*arguments)
        extra = extra_type(_BUFFER, ctypes.addressof(values), _SIZE, ctypes.addressof(size), _END)
        stream = cuda_stream(device)
        code = launch(function, programs, 1, 1, threads, 1, 1, shared, stream, None, extra)
        if code == _INVALID_CONTEXT:  # a thread that has not used the device yet
            torch.cuda.current_stream(device)
            code = launch(function, programs, 1, 1, threads, 1, 1, shared, stream, None, extra)
        if code:
            raise RuntimeError(f"{_said(code)} while launching {name}")

    return run


__all__ = [
    "Workspaces",
    "conform",
    "empty_strided",
    "launcher",
    "load_function",
    "out_of_range",
    "overload",
    "reinterpret",
]
