"""Kernels on a GPU, loaded and launched through the driver. All that does not change from call to call is prepared; the rest is a few numbers
written into memory that the driver reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...errors import BuildError, ResourceError, first_line
from ..observe import counters
from ..torch_compat import cuda_stream, empty_strided_cuda
from .aligned import Arguments, with_copies

_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_TOO_MUCH = 1, 701  # an attribute that a function cannot have, and too few resources for a launch
_MAX_THREADS = 0  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PLAIN_SHARED = 48 << 10  # bytes that a kernel may have without asking
_BUFFER, _SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*
_STREAM, _ARGUMENTS = 32, 56  # bytes into a block of memory that starts with a CUlaunchConfig
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE: the launch begins only where there is room for all of its programs
_ATTRIBUTE = 72, 8  # bytes of a CUlaunchAttribute, and where its value is
_TOGETHER = 16  # addresses, from which on it is cheaper to look at the bytes of all at once
# Addresses that each of Triton's kernels takes after its arguments: of its scratch memory, which few of these have, and of a profile's.
_SCRATCH = 2

NO_ARGUMENTS = Arguments((), ())
Loaded = tuple[int, int, int]
"""A function, bytes of shared memory, threads."""
Launch = Callable[..., None]


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver. Raises `BuildError` where there is none, or one that is too old."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    except (OSError, AttributeError) as error:
        raise BuildError(f"the CUDA driver cannot be used (CUDA 12 or newer is needed): {error}") from error
    return library


def _said(code: int) -> str:
    text = ctypes.c_char_p()
    driver().cuGetErrorString(code, ctypes.byref(text))
    return f"CUDA error {code} ({(text.value or b'unknown').decode()})"


def _built(code: int, what: str) -> None:
    if code:
        raise BuildError(f"{_said(code)} while {what}")


def _fits(code: int, what: str) -> None:
    """Raises `ResourceError` where a kernel asks for more than the device has; as `_built` else."""
    if code in _TOO_MUCH:
        raise ResourceError(f"{_said(code)} while {what}")
    _built(code, what)


def _enter(device: int) -> None:
    """Gives this thread the context that torch uses, if it has none yet: torch itself does so only where it needs one."""
    cuda, context = driver(), ctypes.c_void_p()
    _built(cuda.cuCtxGetCurrent(ctypes.byref(context)), "asking for this thread's context")
    if not context.value:
        _built(cuda.cuCtxSetCurrent(_primary(device)), "giving this thread a context")


@functools.cache
def _primary(device: int) -> ctypes.c_void_p:
    """A device's primary context, which is kept until the process ends."""
    torch.cuda.init()
    context = ctypes.c_void_p()
    _built(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"opening the context of device {device}")
    return context


def load_function(binary: bytes, name: str, shared: int, threads: int) -> int:
    """The kernel `name` of a cubin, in the current device's context, for blocks of so many threads and bytes of shared memory. Raises
    `BuildError` for what the device does not take, `ResourceError` if it asks for too much.
    """
    return _load(binary, name, shared, threads)[1]


@contextlib.contextmanager
def borrowed_function(binary: bytes, name: str, shared: int, threads: int) -> Iterator[int]:
    """As `load_function`, for a kernel that is unloaded in the end; by then the device must be done with it."""
    module, function = _load(binary, name, shared, threads)
    try:
        yield function
    finally:
        driver().cuModuleUnload(module)  # what cannot be unloaded stays


def _load(binary: bytes, name: str, shared: int, threads: int) -> tuple[ctypes.c_void_p, int]:
    """A module, and the function in it."""
    cuda = driver()
    _enter(torch.cuda.current_device())
    module, function, most = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    _built(cuda.cuModuleLoadData(ctypes.byref(module), binary), f"loading the kernel {name}")
    try:
        _built(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding the kernel {name}")
        _built(cuda.cuFuncGetAttribute(ctypes.byref(most), _MAX_THREADS, function), f"asking for the threads of {name}")
        if threads > most.value:
            raise ResourceError(
                f"a block of {name} has {threads} threads, and its registers are enough for {most.value}"
            )
        if shared > _PLAIN_SHARED:
            _fits(
                cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared),
                f"giving {name} {shared} bytes of shared memory",
            )
    except BuildError:
        cuda.cuModuleUnload(module)  # what cannot be unloaded stays
        raise
    assert function.value
    return module, function.value


def launcher(
    first: Loaded,
    other: Callable[[], Loaded],
    name: str,
    pointers: int,
    sizes: int,
    device: int,
    numbers: Sequence[int] = (),
    scratch: int = 0,
    arguments: Arguments = NO_ARGUMENTS,
    cooperative: bool = False,
) -> Callable[..., None]:
    """A function that launches a kernel on the current stream: it takes the number of programs, addresses and sizes.

    first        for addresses that are all multiples of 16: the function, with its shared memory and its threads.
    other        loads the same for other addresses; if it raises `BuildError`, `first` works on copies, which is counted.
    numbers      further arguments of the kernel, after the sizes: the same in every launch.
    scratch      bytes of memory for each program (of a kernel without `numbers`), allocated for each launch.
    arguments    what the addresses and sizes are.
    cooperative  whether its programs wait for each other: all of them run at once, or the launch raises RuntimeError.
    """
    known: list[Launch] = []
    count, behind = pointers + sizes + bool(scratch), _SCRATCH - bool(scratch)  # the address of that memory comes last
    assert not (scratch and numbers), name

    def unaligned(*given: int) -> None:
        if not known:
            try:
                known.append(_launch(other(), name, count, 0, device, unaligned, numbers, behind, cooperative))
            except BuildError as error:
                count_copied(name, error)
                known.append(with_copies(run, arguments, torch.device("cuda", device)))
        known[0](*given)

    run = _launch(first, name, count, pointers, device, unaligned, numbers, behind, cooperative)
    if not scratch:
        return run

    def with_scratch(programs: int, *arguments: int) -> None:
        # Work of one stream runs in order: what is freed here is not used again before the kernel is done.
        memory = empty_strided_cuda((programs * scratch,), (1,), torch.uint8)
        run(programs, *arguments, memory.data_ptr())

    return with_scratch


def count_copied(name: str, error: BuildError) -> None:
    """A kernel has no binary for odd addresses: what lies there is copied to aligned memory in each call."""
    counters.count_retry(f"{name} works on copies of what is at odd addresses: {first_line(error)}")


def _launch(
    loaded: Loaded,
    name: str,
    count: int,
    aligned: int,
    device: int,
    unaligned: Launch,
    numbers: Sequence[int],
    behind: int,
    cooperative: bool,
) -> Launch:
    """Launches one function with `count` arguments, then `numbers`, then `behind` zeros; if not all of the first `aligned` arguments are multiples
    of 16, calls `unaligned` instead. The driver refuses a launch with more bytes of arguments than the function takes, as if it had too few
    registers (error 701).
    """
    function, shared, threads = loaded
    cuda = driver()

    def again(code: int, config: int, given: tuple[int | None, int | None]) -> None:
        if code == _INVALID_CONTEXT:  # a thread that has not used the device yet
            _enter(device)
            code = cuda.cuLaunchKernelEx(config, function, *given)
        if code:
            raise RuntimeError(f"{_said(code)} while launching {name}")

    # The configuration's end: the stream, then where its attributes are, and how many.
    words = "QQQ" if cooperative else f"Q{_ARGUMENTS - _STREAM - 8}x"
    return _maker(count, aligned, cooperative)(  # type: ignore[no-any-return]
        free=[],
        fresh=functools.partial(_Block, count, shared, threads, numbers, aligned, behind, cooperative),
        odd=int.from_bytes(struct.pack("q", 15) * aligned, "little"),
        pack=struct.Struct(f"{words}{count}q").pack_into,
        launch=cuda.cuLaunchKernelEx,
        function=function,
        stream=cuda_stream,
        device=device,
        again=again,
        unaligned=unaligned,
    )


class _Block:
    """Memory for one launch at a time: the configuration, the arguments, and where they are. As ctypes takes them: plain numbers."""

    __slots__ = ("addresses", "attributes", "config", "extra", "grid", "keep", "memory", "pointers")

    def __init__(
        self,
        count: int,
        shared: int,
        threads: int,
        numbers: Sequence[int],
        aligned: int,
        behind: int,
        cooperative: bool,
    ) -> None:
        arguments = 8 * (count + len(numbers) + behind)
        self.memory = ctypes.create_string_buffer(_ARGUMENTS + arguments)
        struct.pack_into(f"{len(numbers)}q", self.memory, _ARGUMENTS + 8 * count, *numbers)
        struct.pack_into("7I", self.memory, 0, 1, 1, 1, threads, 1, 1, shared)
        self.addresses = memoryview(self.memory).cast("B")[_ARGUMENTS : _ARGUMENTS + 8 * aligned]
        self.config = ctypes.addressof(self.memory)
        self.grid = ctypes.c_uint.from_buffer(self.memory)
        size = ctypes.c_size_t(arguments)
        extra = (ctypes.c_void_p * 5)(_BUFFER, self.config + _ARGUMENTS, _SIZE, ctypes.addressof(size), _END)
        self.extra = ctypes.addressof(extra)
        self.keep: tuple[object, ...] = (size, extra)
        if cooperative:
            # A launch that is recorded and begins only with all of its programs takes arguments one by one alone.
            places = range(self.config + _ARGUMENTS, self.config + _ARGUMENTS + arguments, 8)
            pointers = (ctypes.c_void_p * len(places))(*places)
            attribute = ctypes.create_string_buffer(_ATTRIBUTE[0])
            struct.pack_into("i", attribute, 0, _COOPERATIVE)
            struct.pack_into("i", attribute, _ATTRIBUTE[1], 1)
            self.pointers, self.attributes = ctypes.addressof(pointers), ctypes.addressof(attribute)
            self.keep += (pointers, attribute)


@functools.cache
def _maker(count: int, aligned: int, cooperative: bool) -> Callable[..., Any]:
    """Makes functions of exactly so many arguments: packing and unpacking tuples costs more than the rest. Threads take blocks from `free`."""
    names = [f"a{k}" for k in range(count)]
    other = f"return unaligned(programs, {', '.join(names)})"
    before = f"if ({' | '.join(names[:aligned])}) & 15: {other}" if 0 < aligned <= _TOGETHER else ""
    attributes = "block.attributes, 1, " if cooperative else ""
    given = "block.pointers, None" if cooperative else "None, block.extra"
    after = f"if number(block.addresses, 'little') & odd: give(block); {other}" if aligned > _TOGETHER else ""
    source = f"""
def make(free, fresh, pack, launch, function, stream, device, again, unaligned, odd):
    take, give, number = free.pop, free.append, int.from_bytes
    def run(programs, {", ".join(names)}):
        {before}
        if not programs:
            return
        try:
            block = take()
        except IndexError:
            block = fresh()
        block.grid.value = programs
        pack(block.memory, {_STREAM}, stream(device), {attributes}{", ".join(names)})
        {after}
        if code := launch(block.config, function, {given}):
            again(code, block.config, ({given}))
        give(block)
    return run
"""
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<launcher of {count} arguments>", "exec"), namespace)
    made: Callable[..., Any] = namespace["make"]
    return made


__all__ = ["Loaded", "borrowed_function", "count_copied", "driver", "launcher", "load_function"]
