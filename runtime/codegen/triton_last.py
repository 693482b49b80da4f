"""Small kernels that the last program of the kernel before them runs: long sums without a second launch.

Each program of the first kernel stores its part, then counts itself in the device's memory. The one that comes last finds all parts stored, and
computes what follows in one block: the same sums in the same order as a kernel of its own, whichever program it is. Then it sets the counter back,
so that the next launch, and each replay of a CUDA graph, begins at 0.

The count is an atomic addition that releases what was written before and acquires what others have released, for the whole device. All threads of a
program meet before it, so that it speaks for all of them; its result comes to all of them through shared memory, behind another barrier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ...generated.tuning import Last
from ..kernels.plan import Kernel, KernelStep, Plan
from ..kernels.statements import kernel_checks
from ..kernels.steps import home
from .triton_launch import Launch

COUNTER = "i32"
FOLLOWING = "tl.full([], 0, tl.int32)"  # which program a follower believes to be: its only one
_START = "@triton.jit\n"


def followed(
    plan: Plan, shapes: Mapping[str, Launch], free: Collection[str], last: Last
) -> Iterator[tuple[Kernel, ...]]:
    """Kernels of a plan with those that run in their last programs, in order; of `free` ones only. Nothing stands between them in the plan, each
    follower reads what one of them has written, and none may raise.
    """
    chain: list[Kernel] = []
    written: set[str] = set()
    for step in plan.steps:
        k = step.kernel if isinstance(step, KernelStep) else None
        if k is not None and (k.name not in free or not _plain(k, shapes[k.name])):
            k = None
        if chain and k is not None and _fits(shapes[k.name], last) and {home(plan, b) for b in k.reads} & written:
            chain.append(k)
        else:
            if len(chain) > 1:
                yield tuple(chain)
            chain, written = [k] if k is not None else [], set()
        if k is not None:
            written |= {home(plan, b) for b in k.writes}
    if len(chain) > 1:
        yield tuple(chain)


def block_of(shape: Launch) -> tuple[int, int]:
    """XBLOCK and RBLOCK of a follower: all of its points and steps."""
    return _power(shape.outer), _power(shape.inner)


def chain_source(
    name: str, chain: Sequence[Kernel], modules: Sequence[str], following: Sequence[tuple[int, int]]
) -> str:
    """The Triton module of a function for a chain of kernels, of which each has a module, and each but the first a block. It takes the buffers of
    one kernel after another's, and the address of a counter.
    """
    head = modules[0].partition(_START)[0]
    functions = [_START + module.partition(_START)[2] for module in modules]
    taken = [[f"{b}_{k}" for b in (*one.reads, *one.writes)] for k, one in enumerate(chain)]
    lines = [
        f"def {name}({', '.join(a for some in taken for a in some)}, counter, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):",
        f"    {chain[0].name}({', '.join(taken[0])}, XBLOCK, RBLOCK)",
        "    tl.debug_barrier()",
        '    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")',
        "    if arrived == tl.num_programs(0) - 1:",
    ]
    for one, some, (x, r) in zip(chain[1:], taken[1:], following, strict=True):
        lines += ["        tl.debug_barrier()", f"        {one.name}({', '.join(some)}, {x}, {r})"]
    lines.append("        tl.store(counter, 0)")
    return head + "\n\n".join([*functions, _START + "\n".join(lines) + "\n"])


def _plain(k: Kernel, shape: Launch) -> bool:
    """Whether a kernel can be part of a chain: loops with a known number of points, which neither raise nor are a product of matrices."""
    if k.symbols or k.tile is not None or k.parts or k.team > 1 or shape.product or kernel_checks(k):
        return False
    return isinstance(shape.outer, int) and isinstance(shape.inner, int) and shape.outer > 0


def _fits(shape: Launch, last: Last) -> bool:
    if shape.square or not isinstance(shape.outer, int) or shape.outer > last.rows:
        return False
    x, r = block_of(shape)
    return x * r <= last.elements


def _power(n: object) -> int:
    assert isinstance(n, int)
    return 1 << max(n - 1, 0).bit_length()


__all__ = ["COUNTER", "FOLLOWING", "block_of", "chain_source", "followed"]
