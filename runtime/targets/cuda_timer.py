"""Times kernels on a CUDA device, in memory of their own: nothing of the program's is read or written, its random numbers are not drawn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType

import torch

from ..build.triton_job import Binary
from ..execute.launch import borrowed_function, launcher
from ..execute.support import overload
from ..ir.nodes import Buffer, Ref, Size, contiguous_strides
from ..kernels.plan import ExternStep, ViewOf
from ..render.triton_unit import TritonKernel
from ..torch_compat import no_modes
from .autotune import Memory, Task, Trial

AHEAD, FILLS = 128 << 20, 3  # bytes that are written, and how often, while launches of a sample are prepared
NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


class CudaTimer:
    """`Timer` for the device `index`."""

    def __init__(self, index: int) -> None:
        self.index = index

    def why_not(self) -> str:
        return "a CUDA graph is being recorded" if torch.cuda.is_current_stream_capturing() else ""

    @contextmanager
    def bench(self, task: Task, given: Mapping[str, torch.Tensor] = NOTHING) -> Iterator[CudaBench]:
        """`given`: contents of memory by its name, instead of random ones."""
        # The caller may trace with fake tensors.
        with no_modes(), torch.no_grad(), torch.cuda.device(self.index), ExitStack() as stack:
            generator = torch.Generator("cuda")
            memory = {
                name: given[name].clone() if name in given else filled(m, generator) for name, m in task.memory.items()
            }
            yield CudaBench(memory, stack)
            torch.cuda.synchronize()


class CudaBench:
    """`Bench`: the memory by its names; what is loaded goes with `stack`."""

    def __init__(self, memory: Mapping[str, torch.Tensor], stack: ExitStack) -> None:
        self.memory, self.stack = memory, stack
        self.ahead = torch.empty(AHEAD, dtype=torch.uint8, device="cuda")

    def call(self, step: ExternStep, target: str, layouts: Mapping[str, Buffer]) -> Callable[[], None]:
        def strided(name: str, shape: Sequence[Size], stride: Sequence[Size], offset: Size) -> torch.Tensor:
            *sizes, first = [n for n in (*shape, *stride, offset) if isinstance(n, int)]
            return self.memory[name].as_strided(sizes[: len(shape)], sizes[len(shape) :], first)

        def tensor(given: object) -> object:
            if isinstance(given, ViewOf):
                return strided(given.buffer, given.shape, given.stride, given.offset)
            return whole(given.buffer) if isinstance(given, Ref) else given

        def whole(name: str) -> torch.Tensor:
            b = layouts[name]
            return strided(name, b.shape, b.stride or contiguous_strides(b.shape), b.offset)

        run = functools.partial(overload(target), *map(tensor, step.args), out=whole(step.out[0]))
        run()
        torch.cuda.synchronize()
        return run

    def load(self, trial: Trial, one: TritonKernel, binary: Binary) -> Callable[[], None]:
        shared, threads = binary.meta["shared"], trial.shape.gpu.limits.warp * binary.meta["warps"]
        function = self.stack.enter_context(borrowed_function(binary.cubin, binary.meta["name"], shared, threads))
        loaded = function, shared, threads
        numbers, addresses = trial.numbers(one), [self.memory[name].data_ptr() for name in trial.pointers]
        if trial.group is not None and trial.group.pointer_table:
            table = torch.tensor([*numbers, *addresses], device="cuda")
            self.stack.callback(table.data_ptr)  # it lives as long
            numbers, addresses = [len(trial.group.kernels)], [table.data_ptr()]
        device, scratch = torch.cuda.current_device(), binary.meta.get("scratch", 0)
        launch = launcher(loaded, lambda: loaded, one.name, len(addresses), 0, device, numbers, scratch)
        run = functools.partial(launch, trial.programs(one), *addresses)
        run()
        torch.cuda.synchronize()
        return run

    def time(self, run: Callable[[], None], calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # While the device is busy with this the launches are prepared: else a small kernel's time would be that of its launch.
        for _ in range(FILLS):
            self.ahead.zero_()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls


def filled(memory: Memory, generator: torch.Generator) -> torch.Tensor:
    """Memory with random numbers, booleans, or zeros, which are positions everywhere."""
    dtype = getattr(torch, memory.dtype)
    made = torch.zeros(memory.elements, dtype=dtype, device="cuda")
    if dtype.is_floating_point:
        made.normal_(generator=generator)
    elif dtype == torch.bool:
        made.random_(0, 2, generator=generator)
    return made


__all__ = ["CudaBench", "CudaTimer", "filled"]
