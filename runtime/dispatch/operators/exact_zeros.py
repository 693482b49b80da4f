"""Zeros without memory, which forward-mode formulas take where an operand has no tangent: how operators are recorded that get them.

Torch computes with them above the recorder, in kernels that read sizes as plain numbers and return tensors that are not fake. Wherever its
Python dispatcher is on, those kernels are replaced by what is here. A product with such zeros is exactly zero, whatever the other factor is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....generated.dispatch_tables import ROLES
from ....generated.linear import FIRST, PRODUCT, SUM
from ...torch_compat import DispatchKey, OpOverload, is_zerotensor, kernels_of_zeros


def register() -> None:
    """Replace torch's kernels, for the process."""
    for op in kernels_of_zeros():
        if DispatchKey.ZeroTensor not in op.py_kernels:
            op.py_impl(DispatchKey.ZeroTensor)(_kernel(op))


def _kernel(op: OpOverload) -> Callable[..., Any]:
    name = str(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        zero = [isinstance(a, torch.Tensor) and is_zerotensor(a) for a in args]
        memory = [_in_memory(a) if z else a for a, z in zip(args, zero, strict=True)]
        out = op(*memory, **kwargs)
        first = zero[0] and (op.is_view or name in FIRST)
        every = name in SUM and all(z for a, z in zip(args, zero, strict=True) if isinstance(a, torch.Tensor))
        zero_too = first or every or (name in PRODUCT and any(zero))
        return ROLES["exact_zeros"](out.shape, dtype=out.dtype, device=out.device) if zero_too else out

    return kernel


def _in_memory(zeros: torch.Tensor) -> torch.Tensor:
    # Not `torch.zeros`, whose result is another tensor object than the operator's.
    out: torch.Tensor = ROLES["zeros"](zeros.shape, 0, dtype=zeros.dtype, device=zeros.device)
    return out
