"""Last-block reductions: which small kernels the last program of the kernel before them runs, so that long sums need no second launch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ...generated.tuning import Last
from ..kernels.plan import Kernel, KernelStep, Plan
from ..kernels.statements import kernel_checks
from ..kernels.steps import allocation_root
from .launch import Launch


def last_block_chains(
    plan: Plan, shapes: Mapping[str, Launch], free: Collection[str], last: Last
) -> Iterator[tuple[Kernel, ...]]:
    """Chains of `free` kernels of a plan: one with those that run in its last program, in order. Nothing stands between them in the plan, each
    follower reads what one before it has written, and none may raise.
    """
    chain: list[Kernel] = []
    written: set[str] = set()
    for step in plan.steps:
        k = step.kernel if isinstance(step, KernelStep) else None
        if k is not None and (k.name not in free or not _plain(k, shapes[k.name])):
            k = None
        if (
            chain
            and k is not None
            and _fits(shapes[k.name], last)
            and {allocation_root(plan, b) for b in k.reads} & written
        ):
            chain.append(k)
        else:
            if len(chain) > 1:
                yield tuple(chain)
            chain, written = [k] if k is not None else [], set()
        if k is not None:
            written |= {allocation_root(plan, b) for b in k.writes}
    if len(chain) > 1:
        yield tuple(chain)


def block_of(shape: Launch) -> tuple[int, int]:
    """XBLOCK and RBLOCK of a follower: all of its points and steps."""
    return _power(shape.outer), _power(shape.inner)


def _plain(k: Kernel, shape: Launch) -> bool:
    """Whether a kernel can be part of a chain: its number of points is known, it has no checks that raise, and it is no matrix product."""
    if k.symbols or k.tile is not None or k.parts or k.splits > 1 or shape.product or kernel_checks(k):
        return False
    return isinstance(shape.outer, int) and isinstance(shape.inner, int) and shape.outer > 0


def _fits(shape: Launch, last: Last) -> bool:
    if shape.transpose or not isinstance(shape.outer, int) or shape.outer > last.rows:
        return False
    x, r = block_of(shape)
    return x * r <= last.elements


def _power(n: object) -> int:
    assert isinstance(n, int)
    return 1 << max(n - 1, 0).bit_length()


__all__ = ["block_of", "last_block_chains"]
