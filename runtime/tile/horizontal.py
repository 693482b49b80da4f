"""Horizontal fusion: kernels of equal text as one launch. Which can be members, and how many blocks a program goes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...generated.tuning import Rule
from ..kernels.plan import Kernel
from ..machine import Gpu
from .coalesce import is_pointwise_kernel
from .launch import Launch


@dataclass(frozen=True)
class Members:
    """How a kernel for `count` others is written.

    unit           their numbers of points are passed as multiples of it.
    pointer_table  whether their addresses are in a table; `count` is then the least power of two that is enough for them.
    """

    count: int
    unit: int
    pointer_table: bool = False


@dataclass(frozen=True)
class HorizontalGroup:
    """Kernels that run as one function, called `name`; `points` of each, all multiples of `unit`, and the number of addresses of each."""

    name: str
    kernels: tuple[str, ...]
    points: tuple[int, ...]
    unit: int
    gpu: Gpu
    pointers: int = 1

    @property
    def pointer_table(self) -> bool:
        """Whether the addresses are in a table: the members are many, or have more addresses than a kernel has arguments."""
        count = len(self.kernels)
        room = self.gpu.limits.arguments // 8 - 2  # but for Triton's own
        return count > self.gpu.costs.group.tree or count * (self.pointers + 2) > room

    @property
    def members(self) -> Members:
        count = len(self.kernels)
        return Members(1 << (count - 1).bit_length() if self.pointer_table else count, self.unit, self.pointer_table)

    def programs(self, span: int) -> int:
        """How many programs of `span` points it has; none works on two members."""
        return sum(-(-n // span) for n in self.points)

    def numbers(self, span: int) -> list[int]:
        """What is passed beside the addresses: each member's number of points, in units, and its first program."""
        firsts = [0]
        for n in self.points[:-1]:
            firsts.append(firsts[-1] + -(-n // span))
        return [n // self.unit for n in self.points] + firsts


def can_join(kernel: Kernel, shape: Launch) -> bool:
    """Whether a kernel can be a member: it is pointwise, with a known number of points."""
    return (
        is_pointwise_kernel(kernel)
        and not kernel.grid_loop
        and shape.inner == 1
        and isinstance(shape.outer, int)
        and not shape.transpose
    )


def unit_of(points: int, gpu: Gpu) -> int:
    """In how many a number of points is told: with a multiple of what a thread loads at once, of whatever type, a mask is the same for all of it."""
    return 1 if points % gpu.limits.vector else gpu.limits.vector


def steps(points: Sequence[int], rule: Rule) -> int:
    """How many blocks a program of a group with so many points goes through: with more points than the programs that keep a GPU busy have in
    one block each, they go through several.
    """
    most_useful = min(sum(points) // (rule.x * rule.programs), max(points) // rule.x, rule.r)
    return 1 << max(most_useful, 1).bit_length() - 1


__all__ = ["HorizontalGroup", "Members", "can_join", "steps", "unit_of"]
