"""What the specs say of a library call: where it can write, what it reads, what it multiplies."""

from __future__ import annotations

from ...generated.ops import ANY_STRIDES, OUT, PRODUCTS, ROW_BYTES
from ..ir.nodes import Extern, is_paired
from ..ir.routines import routine_of


def has_out(call: Extern) -> bool:
    """Whether the kernel can write its result into given memory."""
    own = call.single and call.target in OUT and not is_paired(call) and not call.elsewhere
    return own or routine_of(call) is not None


def row_bytes(call: Extern) -> int:
    """At multiples of how many bytes the rows of its matrices should start; 0: it does not matter."""
    return 0 if is_paired(call) else ROW_BYTES.get(call.target, 0)


def any_strides(call: Extern) -> bool:
    """Whether its kernel reads arguments of whatever strides as well: its entry says so. A routine reads them where they lie."""
    return routine_of(call) is not None or (call.target in ANY_STRIDES and not is_paired(call))


def factors(call: Extern) -> tuple[int, ...] | None:
    """Which arguments a call multiplies, if it is a product of matrices, and which one it adds, if any."""
    ours = call.single and not call.kwargs and not is_paired(call) and not call.elsewhere
    return PRODUCTS.get(call.target) if ours else None
