"""What wrappers of graphs on a GPU need while they run: memory of the current stream, and kernels launched through the driver."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Sequence

import torch

from ...errors import BuildError
from ..torch_compat import cuda_stream, empty_strided_cuda
from . import support
from .support import conform, out_of_range, overload, reinterpret

_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PLAIN_SHARED = 48 << 10  # bytes that a kernel may have without asking
_BUFFER, _SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*

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


def _checked(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {code} ({(text.value or b'unknown').decode()}) while {what}")


def load_function(binary: bytes, name: str, shared: int) -> ctypes.c_void_p:
    """The kernel `name` of a cubin, in the current device's context; `shared`: bytes of shared memory of one block. Raises `RuntimeError`."""
    torch.cuda.current_stream()  # the context exists and is current in this thread
    cuda = driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _checked(cuda.cuModuleLoadData(ctypes.byref(module), binary), f"loading the kernel {name}")
    _checked(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding the kernel {name}")
    if shared > _PLAIN_SHARED:
        _checked(
            cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared),
            f"giving {name} {shared} bytes of shared memory",
        )
    return function


def launcher(
    variants: Sequence[Callable[[], tuple[ctypes.c_void_p, int, int]]],
    name: str,
    pointers: int,
    sizes: int,
    device: int,
) -> Callable[..., None]:
    """A function that launches a kernel on the current stream: it takes the number of programs, addresses and sizes.

    variants  for addresses that are all multiples of 16, and for others: what loads the function, with its shared memory and its threads.
    """
    count = pointers + sizes
    # Triton's kernels take two addresses more, of scratch memory that these kernels do not have.
    values_type, extra_type = ctypes.c_uint64 * (count + 2), ctypes.c_void_p * 5
    size = ctypes.c_size_t(8 * (count + 2))
    launch = driver().cuLaunchKernel
    known: list[tuple[ctypes.c_void_p, int, int] | None] = [None, None]

    def run(programs: int, *arguments: int) -> None:
        which = 1 if functools.reduce(operator.or_, arguments[:pointers], 0) & 15 else 0
        found = known[which]
        if found is None:
            found = known[which] = variants[which]()
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
            _checked(code, f"launching {name}")

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
