"""Triton kernels that the program itself launches: one call in the graph, which makes new contents of what the kernel writes.

A kernel takes addresses, so what it writes is told by regions of storage (`regions.py`): each region that one of the written arguments lies in
is handed over whole, and arguments that lie in it, written or read, are views of that memory. So kernels that read what they write
find it there, whatever the views are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....errors import UnsupportedError
from ...torch_compat import is_traceable_wrapper_subclass, user_kernel
from ..control.functions import is_simple
from ..record.recorder import Recorder
from ..storage.regions import Layout, Value
from .writes import python_function, writes_of


@dataclass(frozen=True)
class Argument:
    """A parameter's value: `written` memory number `index`, or a view of it (`index`, and view number `view`), `operand`, or `number`."""

    name: str
    kind: str
    index: int
    view: int = -1
    block: tuple[int, ...] | None = None
    """A descriptor of blocks of this shape is made for the tensor."""


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with what is known of its call. It is the target of a node, whose arguments are lists: the memory that is written, other tensors,
    their strides, views (sizes, strides, offset from the first element), numbers, and grids, one for each configuration.

    `launch(...)` runs the kernel on copies of what it writes and returns these, as a tuple; `run(...)` writes.
    """

    kernel: Any
    name: str
    arguments: tuple[Argument, ...]
    constants: Mapping[str, Any]
    effect: bool
    keywords: tuple[str, ...] = ()
    """Arguments that the program passes by name: Triton reads options of its compiler among them, also where a parameter has that name."""
    __module__ = __name__

    @property
    def __name__(self) -> str:
        return f"launch_{self.name}"

    def __str__(self) -> str:
        return self.__name__

    def __call__(self, written: Sequence[torch.Tensor], *rest: Any) -> tuple[torch.Tensor, ...]:
        copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in written]
        self.run(*copies, *rest)
        return tuple(copies)

    def run(self, *given: Any) -> None:
        """Launch the kernel. `given`: written tensors, then the lists."""
        *written, operands, strides, views, numbers, grids = given
        values = dict(self.constants)
        for a in self.arguments:
            if a.kind == "number":
                values[a.name] = numbers[a.index]
                continue
            if a.kind == "operand":
                t = operands[a.index]
                if t.stride() != tuple(strides[a.index]):
                    t = _laid_out(t, strides[a.index])
            else:
                t = written[a.index]
                if a.view >= 0:
                    size, stride, offset = views[a.view]
                    t = t.as_strided(size, stride, t.storage_offset() + offset)
            values[a.name] = t if a.block is None else _descriptor(t, a.block)
        # In the order of the parameters: hooks of `triton.autotune` look at positions.
        first = []
        for name in self.kernel.arg_names:
            if name not in values or name in self.keywords:
                break
            first.append(values.pop(name))
        self.kernel[self._grid(grids)](*first, **values)

    def _grid(self, grids: Sequence[Sequence[int]]) -> Any:
        if len(grids) == 1:
            return tuple(grids[0])
        configurations = [c.kwargs for c in self.kernel.configs]

        def grid(meta: Mapping[str, Any]) -> tuple[int, ...]:
            for known, g in zip(configurations, grids, strict=True):
                if all(meta.get(k) == v for k, v in known.items()):
                    return tuple(g)
            raise UnsupportedError(
                f"the kernel {self.name} is launched with a configuration that it did not have while tracing"
            )

        return grid


def _laid_out(t: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The same values with other strides. Along a dimension of stride zero all elements are the same."""
    once = t[tuple(slice(None) if s else slice(1) for s in stride)]
    return torch.empty_strided(once.shape, stride, dtype=t.dtype, device=t.device).copy_(once).expand(t.shape)


def _descriptor(t: torch.Tensor, block: Sequence[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(t, list(block))


def record_launch(
    recorder: Recorder,
    *,
    kernel_idx: int,
    constant_args_idx: int,
    grid: Sequence[Any],
    tma_descriptor_metadata: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    launch_kwargs: Sequence[str] | None = None,
) -> None:
    """Record a launch, as Dynamo says it (`launch_kwargs` since torch 2.14). Raises `UnsupportedError` for a kernel of which it is not known what
    it writes, and for arguments that lie in memory in a way that cannot be said.
    """
    kernel = user_kernel(kernel_idx, constant_args_idx)
    _Record(recorder, *kernel, tma_descriptor_metadata).record(grid, kwargs, tuple(launch_kwargs or ()))


def record_launch_on_copies(
    recorder: Recorder, *, tensors_to_clone: Sequence[str], kwargs: Mapping[str, Any], **rest: Any
) -> dict[str, Any]:
    """The functional form (of exported programs): what the kernel writes are copies, which are returned by name."""
    with recorder:
        copies = {name: kwargs[name].clone() for name in tensors_to_clone}
    record_launch(recorder, kwargs={**kwargs, **copies}, **rest)
    return copies


class _Record:
    def __init__(
        self, recorder: Recorder, kernel: Any, constants: Mapping[str, Any], blocks: Mapping[str, Any]
    ) -> None:
        self.recorder, self.kernel, self.constants = recorder, kernel, constants
        self.name = getattr(python_function(kernel), "__name__", "kernel")
        self.blocks = {name: self._block(name, told) for name, told in blocks.items()}
        self.whole: list[Value] = []
        self.operands: list[torch.Tensor] = []
        self.views: list[Any] = []
        self.numbers: list[Any] = []

    def _fail(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"the kernel {self.name}{self.recorder.where()} {what}")

    def _block(self, name: str, told: Any) -> tuple[int, ...]:
        if told[0] != "stable" or not all(isinstance(n, int) for n in told[1][0]):
            raise self._fail(f"takes {name} by an old kind of descriptor")
        return tuple(told[1][0])

    def record(self, grid: Sequence[Any], kwargs: Mapping[str, Any], keywords: tuple[str, ...]) -> None:
        recorder = self.recorder
        tensors = {name: t for name, t in kwargs.items() if isinstance(t, torch.Tensor)}
        values = {name: self._value(name, t) for name, t in tensors.items()}
        writes = writes_of(self.kernel, tensors, self.constants)
        for name in tensors:
            if name in writes.names:
                self._add_region(values[name])
        arguments = tuple(self._argument(name, v, values.get(name)) for name, v in kwargs.items())
        constants = {k: v for k, v in self.constants.items() if k not in kwargs}
        launch = Launch(self.kernel, self.name, arguments, constants, writes.effect, keywords)
        nodes = [recorder.current(root) for root in self.whole]
        with recorder.fake_mode:
            new = tuple(
                torch.empty_strided(v.layout.size, v.layout.stride, dtype=v.layout.dtype, device=n.meta["val"].device)
                for v, n in zip(self.whole, nodes, strict=True)
            )
        rest = [
            self.operands,
            [list(t.stride()) for t in self.operands],
            self.views,
            self.numbers,
            [list(g) for g in grid],
        ]
        node = recorder.call(launch, (nodes, *(recorder.nodes(r) for r in rest)), {}, new, keep=writes.effect)
        for k, (root, t) in enumerate(zip(self.whole, new, strict=True)):
            # Without a word to autograd, and no version is counted, as in eager.
            root.region.version += 1
            root.node, root.version = recorder._item(node, k, t), root.region.version
            recorder.written_storages.add(root.region.key)

    def _value(self, name: str, t: torch.Tensor) -> Value:
        if is_traceable_wrapper_subclass(t) or t.layout != torch.strided or t.is_conj() or t.is_neg():
            raise self._fail(f"takes {name}, which is no plain tensor")
        return self.recorder.value(t)

    def _add_region(self, value: Value) -> None:
        root = value.root
        if any(root is known for known in self.whole):
            return
        self.recorder._may_write(root)
        if value.region.loose:
            raise self._fail("writes to a tensor of which a view reaches outside")
        if not is_simple(self.recorder.current(root).meta["val"]) or root.layout.conj or root.layout.neg:
            raise self._fail("writes to a tensor with gaps between its elements")
        self.whole.append(root)

    def _argument(self, name: str, v: Any, value: Value | None) -> Argument:
        block = self.blocks.get(name)
        if value is None:
            self.numbers.append(v)
            return Argument(name, "number", len(self.numbers) - 1)
        index = next((k for k, root in enumerate(self.whole) if root is value.root), None)
        if index is None:
            self.operands.append(v)
            return Argument(name, "operand", len(self.operands) - 1, block=block)
        own, base = value.layout, value.root.layout
        if own.dtype != base.dtype:
            raise self._fail(f"writes to the memory of {name} as {own.dtype}, which is {base.dtype}")
        if _places(own) == _places(base):
            return Argument(name, "written", index, block=block)
        self.views.append([list(own.size), list(own.stride), own.offset - base.offset])
        return Argument(name, "written", index, len(self.views) - 1, block)


def _places(layout: Layout) -> tuple[Any, ...]:
    return layout.key()[1:4]
