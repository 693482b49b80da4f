"""Custom operators that take their arguments by address, as kernels of C libraries do: they see the layout that they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def _memory(x: torch.Tensor) -> torch.Tensor:
    """The elements of `x` in the order of its memory. Tensors with gaps, or with elements that share memory, are read by their positions."""
    sizes = [(s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]
    dense = x.numel() == 1 + sum(s * (n - 1) for s, n in sizes) and 0 not in [s for s, _ in sizes]
    return x.as_strided((x.numel(),), (1,), x.storage_offset()) if dense else x.reshape(-1)


@torch.library.custom_op("fuzz_raw::in_order", mutates_args=())
def in_order(x: torch.Tensor) -> torch.Tensor:
    """Running sums over the memory of `x`."""
    return _memory(x).cumsum(0).reshape(x.shape)


@in_order.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


in_order.register_autograd(lambda ctx, grad: grad.contiguous() * 2)


@torch.library.custom_op("fuzz_raw::layout", mutates_args=())
def layout(x: torch.Tensor) -> torch.Tensor:
    """The strides of `x`; 0 where nothing depends on them."""
    matters = [s if n > 1 and x.numel() else 0 for s, n in zip(x.stride(), x.shape, strict=True)]
    return torch.tensor(matters, dtype=torch.int64)


@layout.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.dim(), dtype=torch.int64)


@torch.library.custom_op("fuzz_raw::running", mutates_args=())
def running(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Each element and a share of the one before it in memory."""
    flat = _memory(x)
    return (flat + factor * torch.nn.functional.pad(flat[:-1], (1, 0))).reshape(x.shape)


@running.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("fuzz_raw::weighted", mutates_args=())
def weighted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum of products in the order of memory; its gradient reads memory too."""
    n = min(x.numel(), y.numel())
    return (_memory(x)[:n] * _memory(y)[:n]).sum()


@weighted.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.promote_types(x.dtype, y.dtype))


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _weighted_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = ctx.saved_tensors
    return (grad * in_order(x.contiguous())).to(x.dtype), (grad * in_order(y)).to(y.dtype)


weighted.register_autograd(_weighted_backward, setup_context=_save)


@torch.library.custom_op("fuzz_raw::transposed", mutates_args=())
def transposed(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` whose memory is in the opposite order of dimensions."""
    back = tuple(range(x.dim() - 1, -1, -1))
    return x.permute(back).clone(memory_format=torch.contiguous_format).permute(back)


@transposed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    back = tuple(range(x.dim() - 1, -1, -1))
    return x.permute(back).new_empty(tuple(x.shape[k] for k in back)).permute(back)


transposed.register_autograd(lambda ctx, grad: grad * 1)


@torch.library.custom_op("fuzz_raw::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of the memory of `x`, and its strides as numbers of the same dtype."""
    flat = _memory(x)
    return flat.clone() * 0.5, layout(x).to(x.dtype)


@halves.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.numel()), x.new_empty(x.dim())


@torch.library.custom_op("fuzz_raw::joined", mutates_args=())
def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The memory of all parts, one after another."""
    return torch.cat([_memory(p).to(parts[0].dtype) for p in parts])


@joined.register_fake
def _(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0].new_empty(sum(p.numel() for p in parts))


@torch.library.custom_op("fuzz_raw::scale_", mutates_args=("x",))
def scale_(x: torch.Tensor, factor: float) -> None:
    """Multiplies element k of the memory of `x` by `factor` + k % 3."""
    weight = factor + torch.arange(x.numel()).remainder(3).to(x.dtype)
    sizes = sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)
    if 0 in [s for s, _ in sizes]:
        return
    order = sorted(range(x.dim()), key=lambda d: -x.stride(d) if x.shape[d] > 1 else 0)
    ordered = x.permute(order)
    ordered.mul_(weight.view(ordered.shape))


@scale_.register_fake
def _(x: torch.Tensor, factor: float) -> None:
    return None


@torch.library.custom_op("fuzz_raw::add_out", mutates_args=("out",))
def add_out(x: torch.Tensor, out: torch.Tensor) -> None:
    """Adds the memory of `x` to the first elements of `out`, in the order of its positions. Refuses what torch's own operators refuse."""
    if 0 in [s for s, n in zip(out.stride(), out.shape, strict=True) if n > 1]:
        raise RuntimeError("elements of `out` share memory")
    if x.untyped_storage()._cdata == out.untyped_storage()._cdata:
        raise RuntimeError("`x` and `out` share memory")
    n = min(x.numel(), out.numel())
    total = out.reshape(-1).clone()
    total[:n] += _memory(x)[:n].to(out.dtype)
    out.copy_(total.view(out.shape))


@add_out.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None
