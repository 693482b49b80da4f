"""Programs with tensors that are not plain: what eager makes of them, told part by part, and the comparison of a compiled run with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .accuracy import assert_as_accurate

COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
FLOAT8 = [v for k, v in sorted(vars(torch).items()) if k.startswith("float8_")]

OPAQUE = (torch.bits8, torch.float4_e2m1fn_x2)


@dataclass(frozen=True)
class Program:
    """One program.

    run      takes what `make` makes: tensors, modules, numbers.
    grad     the gradients of its results are compared too.
    kernels  so many loops are compiled at least.
    left     part of the reason for which a graph runs eagerly; "" where none may.
    dynamo   what Dynamo itself changes, and why: the backend `eager` is the truth then, and must differ from a call without Dynamo.
    options  of `torch.compile`.
    """

    run: Callable[..., Any]
    make: Callable[[], Sequence[Any]]
    grad: bool = False
    kernels: int = 0
    left: str = ""
    dynamo: str = ""
    options: tuple[tuple[str, Any], ...] = ()


@dataclass
class Seen:
    """What a run shows: its error's type, or the leaves of its results, its arguments afterwards and their gradients."""

    error: type[BaseException] | None
    leaves: list[Any]
    message: str = ""


def parts(t: Tensor) -> tuple[tuple[Any, ...], list[Tensor]]:
    """What is said of a tensor, and plain tensors that hold its elements."""
    about: list[Any] = [type(t), t.dtype, t.layout, t.device, t.requires_grad, t.is_quantized, t.is_nested]
    t = t.detach()
    if t.is_nested:
        about.append(t.dim())
        if t.layout == torch.jagged:
            about.append(t._ragged_idx)
            held = [t._values, t._offsets] + ([] if t._lengths is None else [t._lengths])
        else:
            held = [t._nested_tensor_size(), *t.unbind()]
        return tuple(about), [p for h in held for p in parts(h)[1]]
    about.append(tuple(t.shape))
    if t.layout == torch.sparse_coo:
        return (*about, t.is_coalesced(), t.dense_dim()), [t._indices(), t._values()]
    if t.layout in COMPRESSED:
        return tuple(about), [*(getattr(t, n)() for n in COMPRESSED[t.layout]), t.values()]
    if t.is_mkldnn:
        return tuple(about), [t.to_dense()]
    names = tuple(getattr(t, "names", ()))  # torch 2.13 has named tensors no more
    about += [t.stride(), names]
    if t.is_quantized:
        about.append(t.qscheme())
        if t.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return (*about, t.q_scale(), t.q_zero_point()), [t.int_repr()]
        return (*about, t.q_per_channel_axis()), [t.int_repr(), t.q_per_channel_scales(), t.q_per_channel_zero_points()]
    return tuple(about), [t.rename(None) if any(names) else t]


def dense_sum(t: Tensor) -> Tensor:
    """A sum of the elements, each with a weight of its own."""
    if t.is_nested:
        return sum((dense_sum(p) for p in t.unbind()), torch.zeros((), dtype=t.dtype))
    if t.layout != torch.strided:
        t = t.to_dense()
    if any(getattr(t, "names", ())):
        t = t.rename(None)
    if t.dtype in FLOAT8:
        t = t.float()
    weights = torch.arange(t.numel(), dtype=torch.float64).reshape(t.shape).cos()
    return (t * weights.to(t.dtype)).sum()


def in_double(a: Any) -> Any:
    """An argument in float64, where it is made of float32; what smaller elements say is exact."""
    if isinstance(a, torch.nn.Module):
        return copy.deepcopy(a)._apply(lambda t: t.double() if t.dtype == torch.float32 else t)
    if isinstance(a, Tensor) and a.dtype == torch.float32:
        return a.detach().to(torch.float64).requires_grad_(a.requires_grad)
    return a


def observe(function: Callable[..., Any], program: Program, double: bool = False) -> Seen:
    """Run it, in float64 if `double`."""
    torch.manual_seed(0)
    args = list(program.make())
    if double:
        args = [in_double(a) for a in args]
    tensors = [
        t for a in args for t in (a.state_dict(keep_vars=True).values() if isinstance(a, torch.nn.Module) else [a])
    ]
    tensors = [t for t in tensors if isinstance(t, Tensor)]
    try:
        with torch.set_grad_enabled(program.grad):
            results = pytree.tree_leaves(function(*args))
            if program.grad:
                followed = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
                if followed:
                    sum(map(dense_sum, followed), torch.zeros(())).backward()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return Seen(type(error), [], str(error))
    grads = [t.grad for t in tensors if t.requires_grad and t.is_leaf]
    return Seen(None, [*results, *tensors, *grads])


def differences(found: Seen, expected: Seen, exact: Callable[[], Seen]) -> list[str]:
    """In what two runs differ; elements that rounding may change are held against a run in float64."""
    if (found.error is None) != (expected.error is None) or not issubclass(
        found.error or object, expected.error or object
    ):
        return [f"raises {found.error}: {found.message}, expected {expected.error}: {expected.message}"]
    if len(found.leaves) != len(expected.leaves):
        return [f"{len(found.leaves)} results, expected {len(expected.leaves)}"]
    out: list[str] = []
    for k, (a, b) in enumerate(zip(found.leaves, expected.leaves, strict=True)):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            if type(a) is not type(b) or a != b:
                out.append(f"leaf {k} is {a!r}, expected {b!r}")
            continue
        (about, own), (wanted, theirs) = parts(a), parts(b)
        if about != wanted or len(own) != len(theirs):
            out.append(f"leaf {k} is {about}, expected {wanted}")
            continue
        for j, (x, y) in enumerate(zip(own, theirs, strict=True)):
            if not _equal(x, y):
                out += _judged(f"leaf {k}, part {j}", x, y, lambda k=k, j=j: parts(exact().leaves[k])[1][j])
    return out


def _equal(x: Tensor, y: Tensor) -> bool:
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    if x.dtype in OPAQUE:
        x, y = x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)
    elif x.dtype in FLOAT8:
        x, y = x.float(), y.float()
    elif x.dtype == torch.complex32:
        x, y = torch.view_as_real(x).float(), torch.view_as_real(y).float()
    return torch.equal(x.nan_to_num(1e9), y.nan_to_num(1e9)) and torch.equal(x.isnan(), y.isnan())


def _judged(what: str, x: Tensor, y: Tensor, exact: Callable[[], Tensor]) -> list[str]:
    if (x.dtype, x.shape) != (y.dtype, y.shape) or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return [f"{what} is {x}, expected {y}"]
    try:
        assert_as_accurate(x.contiguous(), y.contiguous(), exact().double().contiguous())
    except (AssertionError, IndexError, RuntimeError) as error:
        return [f"{what} is {x}, expected {y} ({type(error).__name__}: {error})"]
    return []


__all__ = ["FLOAT8", "Program", "Seen", "differences", "observe", "parts"]
