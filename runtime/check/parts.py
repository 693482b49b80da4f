"""Kernels that run steps as one under the checker: what the parts may read and write. That each part is right is checked as for any step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ..kernels.plan import ExternStep, Kernel, KernelStep


def check_parts(kernel: Kernel, fail: Callable[[str], NoReturn]) -> set[str]:
    """The buffers that the parts write. What they read from elsewhere must be the kernel's arguments, and what they make last its results."""
    if kernel.phases or kernel.outer or kernel.scratch or kernel.grid_loop or kernel.serial:
        fail("it runs other steps, and has loops of its own")
    made: set[str] = set()
    for part in kernel.parts:
        reads, writes = _touched(part, fail)
        for name in reads:
            if name in kernel.writes:
                fail(f"buffer {name!r} is read by a part of the kernel that writes it")
            if name not in made and name not in kernel.reads:
                fail(f"buffer {name!r} is read by a part, but is neither an argument nor made by an earlier part")
        for name in writes:
            if name in made:
                fail(f"buffer {name!r} is made by two parts")
            if name in kernel.reads:
                fail(f"buffer {name!r} is made by a part, but is an argument")
            if name in kernel.writes and part is not kernel.parts[-1]:
                fail(f"result {name!r} is made before the last part")
        made |= set(writes)
    for name in kernel.writes:
        if name not in made:
            fail(f"buffer {name!r} is to be written, but no part makes it")
    return made


def _touched(part: KernelStep | ExternStep, fail: Callable[[str], NoReturn]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a part reads and writes."""
    if isinstance(part, KernelStep):
        if part.kernel.parts:
            fail(f"part {part.kernel.name!r} has parts itself")
        return part.kernel.reads, part.kernel.writes
    if part.call.effect:
        fail(f"part {part.call.target!r} has an effect")
    if set(part.out) != {b.name for b in part.call.outs}:
        fail(f"part {part.call.target!r} allocates its result itself")
    return tuple(dict.fromkeys(_buffers((part.args, part.kwargs)))), part.out


def _buffers(tree: object) -> list[str]:
    if isinstance(tree, (list, tuple)):
        return [name for x in tree for name in _buffers(x)]
    name = getattr(tree, "buffer", None)
    return [name] if isinstance(name, str) else []


__all__ = ["check_parts"]
