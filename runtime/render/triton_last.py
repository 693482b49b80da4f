"""Last-block reductions: small kernels that the last program of the kernel before them runs, so that a long sum needs no second launch.

Each program of the first kernel stores its partial result, then adds 1 to a semaphore in the device's memory. The one that comes last finds all
partial results stored, and computes what follows in one block: the same sums in the same order as a kernel of its own, whichever program it is. Then
it resets the semaphore, so that the next launch, and each replay of a CUDA graph, begins at 0.

The addition is atomic: it releases what was written before and acquires what others have released, for the whole device. A barrier before it waits
for all threads of the program, so that it speaks for all of them; its result comes to all of them through shared memory, behind another barrier.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.plan import Kernel

SEMAPHORE = "i32"  # the type behind the pointer to it
FOLLOWING = "tl.full([], 0, tl.int32)"  # the program id in a follower, which has one program
_START = "@triton.jit\n"


def chain_source(
    name: str, chain: Sequence[Kernel], modules: Sequence[str], following: Sequence[tuple[int, int]]
) -> str:
    """The Triton module of a function for a chain of kernels, of which each has a module, and each but the first a block. It takes the buffers of
    one kernel after another's, and the address of a semaphore.
    """
    head = modules[0].partition(_START)[0]
    functions = [_START + module.partition(_START)[2] for module in modules]
    taken = [[f"{b}_{k}" for b in (*one.reads, *one.writes)] for k, one in enumerate(chain)]
    lines = [
        f"def {name}({', '.join(a for some in taken for a in some)}, semaphore, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):",
        f"    {chain[0].name}({', '.join(taken[0])}, XBLOCK, RBLOCK)",
        "    tl.debug_barrier()",
        '    arrived = tl.atomic_add(semaphore, 1, sem="acq_rel", scope="gpu")',
        "    if arrived == tl.num_programs(0) - 1:",
    ]
    for one, some, (x, r) in zip(chain[1:], taken[1:], following, strict=True):
        lines += ["        tl.debug_barrier()", f"        {one.name}({', '.join(some)}, {x}, {r})"]
    lines.append("        tl.store(semaphore, 0)")
    return head + "\n\n".join([*functions, _START + "\n".join(lines) + "\n"])


__all__ = ["FOLLOWING", "SEMAPHORE", "chain_source"]
