"""Kernels that have no binary for odd addresses work on aligned copies: functions that stand in for the driver's add 1 in the processor's memory."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import opforge
from opforge.errors import BuildError, ResourceError
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.execute import launch, pointer_tables
from opforge.runtime.execute.aligned import Arguments, copies_of, with_copies
from opforge.runtime.execute.launch import Loaded, borrowed_function, launcher, load_function
from opforge.runtime.execute.pointer_tables import table_launcher
from opforge.runtime.host.arguments import arguments, written
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.render.triton_horizontal import FILL
from opforge.runtime.targets.cuda import scheduled
from tests.support.gpu_plan import planned
from tests.support.machines import H200

CPU = torch.device("cpu")
FIRST = (0xF00, 0, 128)


def refused() -> Loaded:
    raise BuildError("Triton does not compile k: its process was stopped after 1 s\nand more")


def odd(t: Tensor, after: int = 1) -> Tensor:
    """The same elements in memory that begins `after` elements behind a multiple of 16 bytes, with 7 on both sides."""
    span = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    memory = torch.full((span + after + 3,), 7, dtype=t.dtype)
    made = memory.as_strided(t.shape, t.stride(), after)
    if 0 not in t.stride():
        made.copy_(t)
    assert made.data_ptr() % 16
    return made


class Adder:
    """A kernel of two addresses and a number of elements: what lies at the second becomes what lies at the first, plus 1. It takes no odd ones."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.launches = 0
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        self.cuLaunchKernelEx = prototype(self.launch)

    def launch(self, config: int, function: int, parameters: int | None, extra: int) -> int:
        _, at, *_ = (ctypes.c_uint64 * 5).from_address(extra)
        source, target, count = struct.unpack("3q", ctypes.string_at(at, 24))
        assert function == 0xF00
        assert source % 16 == target % 16 == 0
        self.launches += 1
        self.memory(target, count).copy_(self.memory(source, count) + 1)
        return 0

    def memory(self, address: int, count: int) -> Tensor:
        data = (ctypes.c_char * (count * self.dtype.itemsize)).from_address(address)
        return torch.frombuffer(data, dtype=self.dtype)


@pytest.fixture
def adder(monkeypatch: pytest.MonkeyPatch) -> Adder:
    made = Adder()
    monkeypatch.setattr(launch, "driver", lambda: made)
    monkeypatch.setattr(launch, "cuda_stream", lambda _: 0)
    monkeypatch.setattr(launch, "with_copies", lambda run, told, _: with_copies(run, told, CPU))
    opforge.reset_stats()
    return made


def buffer(shape: str, stride: str, is_written: bool, offset: str = "0") -> tuple[str, str, str, str, bool]:
    return "float32", shape, stride, offset, is_written


VECTORS = Arguments(["n"], [buffer("(n,)", "(1,)", False), buffer("(n,)", "(1,)", True)])


def test_both_at_odd_addresses(adder: Adder) -> None:
    """An exception reached the user. The compiler is asked once, and it is counted once."""
    run = launcher(FIRST, refused, "k", 2, 1, 0, arguments=VECTORS)
    for n in (5, 64):
        x, y = odd(torch.arange(float(n))), odd(torch.zeros(n), 2)
        run(1, x.data_ptr(), y.data_ptr(), n)
        assert torch.equal(y, torch.arange(n) + 1)
        assert y._base is not None
        assert y._base[:2].eq(7).all()
        assert y._base[n + 2 :].eq(7).all()
    assert adder.launches == 2
    ((reason, count),) = opforge.stats()["retries"].items()
    assert count == 1
    assert (
        reason
        == "k works on copies of what is at odd addresses: Triton does not compile k: its process was stopped after 1 s"
    )


def test_aligned_ones_are_not_copied(adder: Adder) -> None:
    run = launcher(FIRST, refused, "k", 2, 1, 0, arguments=VECTORS)
    x, y = torch.arange(8.0), torch.zeros(8)
    run(1, x.data_ptr(), y.data_ptr(), 8)
    assert torch.equal(y, x + 1)
    assert opforge.stats()["retries"] == {}


def test_in_place(adder: Adder) -> None:
    """One address, read and written, is one copy."""
    run = launcher(FIRST, refused, "k", 2, 1, 0, arguments=VECTORS)
    x = odd(torch.arange(9.0))
    for step in (1, 2):
        run(1, x.data_ptr(), x.data_ptr(), 9)
        assert torch.equal(x, torch.arange(9) + step)


def test_only_written_elements_are_put_back(adder: Adder) -> None:
    """Another kernel may write the elements between them meanwhile."""
    told = Arguments(["n"], [buffer("(n,)", "(1,)", False), buffer("(n // 2 + 1,)", "(2,)", True)])
    memory = torch.zeros(16)
    x, y = odd(torch.arange(9.0)), memory[1:].as_strided((5,), (2,))
    run = launcher(FIRST, refused, "k", 2, 1, 0, arguments=told)
    run(1, x.data_ptr(), y.data_ptr(), 9)
    assert torch.equal(memory[1:11:2], torch.tensor([1.0, 3, 5, 7, 9]))
    assert memory[0::2].eq(0).all()


def test_expanded_and_empty() -> None:
    """An expanded input has fewer elements than points; what has none is at any address."""
    seen: list[tuple[int, ...]] = []
    told = Arguments([], [buffer("(4, 3)", "(0, 1)", False), buffer("(0, 3)", "(3, 1)", True)])
    run = with_copies(lambda *given: seen.append(given), told, CPU)
    x = odd(torch.arange(3.0).expand(4, 3))
    run(2, x.data_ptr(), 4)
    ((programs, *addresses),) = seen
    assert programs == 2
    assert all(a % 16 == 0 for a in addresses)


def test_in_inference_mode_and_while_autograd_follows(adder: Adder) -> None:
    run = launcher(FIRST, refused, "k", 2, 1, 0, arguments=VECTORS)
    x = odd(torch.arange(5.0))
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode:
            y = odd(torch.zeros(5))
            run(1, x.data_ptr(), y.data_ptr(), 5)
            assert torch.equal(y, torch.arange(5) + 1)


class Tables:
    """Launches a kernel that adds 1 to what lies at each member's first address, and puts it at the second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pointer_tables, "launcher", self.launcher)
        monkeypatch.setattr(
            pointer_tables, "empty_strided_cuda", lambda shape, _, dtype: torch.zeros(shape, dtype=dtype)
        )
        monkeypatch.setattr(pointer_tables, "cuda_stream", lambda _: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        opforge.reset_stats()

    def launcher(self, loaded: Loaded, other: Any, name: str, *_: Any) -> Callable[..., None]:
        def run(programs: int, address: int) -> None:
            points = (ctypes.c_int64 * 8).from_address(address)
            for member in range(2):
                count, source, target = points[member], points[4 + 2 * member], points[5 + 2 * member]
                assert source % 16 == target % 16 == 0
                Adder().memory(target, count).copy_(Adder().memory(source, count) + 1)

        return run

    def fill(self, programs: int, address: int, *numbers: int) -> None:
        ctypes.memmove(address, (ctypes.c_int64 * FILL)(*numbers), 8 * FILL)


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Tables(monkeypatch)
    run = table_launcher(FIRST, refused, "k", fake.fill, [4, 6, 0, 1], 0, [False, True])
    for step in range(3):
        a, b = odd(torch.arange(4.0) + step), torch.arange(6.0) + step
        c, d = torch.zeros(4), odd(torch.zeros(6), 3)
        run(2, [a, b, c, d], [], (0, 2, 1, 3))
        assert torch.equal(c, a + 1)
        assert torch.equal(d, b + 1)
    ((reason, count),) = opforge.stats()["retries"].items()
    assert (count, reason.partition(":")[0]) == (1, "k works on copies of what is at odd addresses")


def test_members_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Tables(monkeypatch)
    run = table_launcher(FIRST, refused, "k", fake.fill, [4, 6, 0, 1], 0, [False, True])
    a, b = odd(torch.arange(4.0)), odd(torch.arange(6.0), 2)
    run(2, [a, b], [], (0, 0, 1, 1))
    assert torch.equal(a, torch.arange(4) + 1)
    assert torch.equal(b, torch.arange(6) + 1)


def test_copies_of_tensors() -> None:
    x, y = odd(torch.arange(6.0).view(2, 3)), torch.zeros(3)
    copies = copies_of([x, y], [True, True])
    copy, same = copies.instead_of([x, y])
    assert same is y
    assert copy.data_ptr() == copies.of[x.data_ptr()]


# --- What the arguments are said to be


def view(told: Sequence[Any], t: Tensor, sizes: dict[str, int]) -> Tensor:
    """The elements of an argument, as its text says them."""
    dtype, shape, stride, offset, _ = told
    assert t.dtype == getattr(torch, dtype)
    return t.as_strided(eval(shape, {}, sizes), eval(stride, {}, sizes), t.storage_offset() + eval(offset, {}, sizes))


def test_arguments_of_a_plan() -> None:
    """Inputs are where they lie; memory of the graph's own is never odd."""
    x, y = torch.randn(6, 10)[1:, ::2], torch.randn(5).expand(5, 5)
    plan = planned(lambda x, y: (x + y).softmax(-1) @ y.sin(), [x, y])
    read = []
    for kernel in plan.kernels():
        sizes, buffers = arguments([kernel], plan)
        assert sizes == []
        assert len(buffers) == len(kernel.reads) + len(kernel.writes) == len(written(kernel))
        for name, told in zip((*kernel.reads, *kernel.writes), buffers, strict=True):
            if told is None:
                assert plan.allocations[name].kind in ("arena", "dedicated")
                continue
            given = {b.name: t for b, t in zip(plan.inputs, (x, y), strict=True)}[name]
            assert torch.equal(view(told, given, {}), given)
            assert told[4] is False
            read.append(name)
    assert sorted(set(read)) == sorted(b.name for b in plan.inputs)


def test_arguments_of_symbolic_size() -> None:
    """The texts are read with the sizes that the kernel gets anyway."""
    found: list[tuple[list[str], list[Any]]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        program = lower(trace(gm, inputs).graph).program
        plan = scheduled(separate_outputs(program), Config(), H200)
        (kernel,) = plan.kernels()
        found.append(arguments([kernel], plan))
        symbols.extend(str(s) for s in inputs if not isinstance(s, Tensor))
        return gm.forward

    symbols: list[str] = []
    x = torch.randn(7, 12)[:, 1:]
    with torch.no_grad():
        torch.compile(lambda x: x.exp(), backend=backend, dynamic=True)(x)
    ((sizes, (told, result)),) = found
    assert result is None
    values = dict(zip(sorted(sizes, key=symbols.index), (7, 11, 12), strict=True))
    assert torch.equal(view(told, x, values), x)


# --- What a device refuses


class Modules:
    """The driver's functions that load a kernel; each call's result is `codes[name]`."""

    def __init__(self, threads: int = 1024, **codes: int) -> None:
        self.threads, self.codes, self.unloaded = threads, codes, 0

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self.call, name)

    def call(self, name: str, *arguments: Any) -> int:
        if name == "cuFuncGetAttribute":
            arguments[0]._obj.value = self.threads
        elif name == "cuModuleGetFunction":
            arguments[0]._obj.value = 0xF00
        elif name == "cuGetErrorString":
            arguments[1]._obj.value = b"what it says"
        self.unloaded += name == "cuModuleUnload"
        return self.codes.get(name, 0)


def load(monkeypatch: pytest.MonkeyPatch, modules: Modules) -> int:
    monkeypatch.setattr(launch, "driver", lambda: modules)
    monkeypatch.setattr(launch, "_enter", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return load_function(b"", "k", 100 << 10, 512)


def test_what_asks_for_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, Modules()) == 0xF00
    registers, shared = Modules(256), Modules(cuFuncSetAttribute=1)
    with pytest.raises(ResourceError, match="a block of k has 512 threads, and its registers are enough for 256"):
        load(monkeypatch, registers)
    with pytest.raises(ResourceError, match=r"CUDA error 1 \(what it says\) while giving k 102400 bytes"):
        load(monkeypatch, shared)
    assert (registers.unloaded, shared.unloaded) == (1, 1)


@pytest.mark.parametrize(("name", "code"), [("cuModuleLoadData", 2), ("cuFuncSetAttribute", 700)])
def test_what_another_configuration_does_not_mend(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """A device without free memory, or one that an assertion has ended."""
    with pytest.raises(BuildError) as raised:
        load(monkeypatch, Modules(**{name: code}))
    assert not isinstance(raised.value, ResourceError)


def test_borrowed_functions_are_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = Modules()
    load(monkeypatch, modules)
    with borrowed_function(b"", "k", 0, 32) as function:
        assert (function, modules.unloaded) == (0xF00, 0)
    assert modules.unloaded == 1
