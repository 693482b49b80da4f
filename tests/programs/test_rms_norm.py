"""`rms_norm` of symbolic sizes: what torch runs in the place of its kernel is what the kernel computes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("weight", ["none", "own", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_as_eager(dtype: torch.dtype, weight: str, dims: int, eps: float | None) -> None:
    torch._dynamo.reset()

    def program(x: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-dims:], w, eps)

    compiled = torch.compile(program, backend="opforge", dynamic=True, options={"strict": True})
    for shape in ((4, 8, 24), (3, 12, 40)):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        own = dtype if weight == "own" else torch.float32
        w = None if weight == "none" else torch.randn(shape[-dims:], dtype=own, requires_grad=True)
        got, want = compiled(x, w), program(x, w)
        assert got.dtype == want.dtype
        leaves = [t for t in (x, w) if t is not None]
        tangent = torch.randn_like(want)
        eps_of = torch.finfo(dtype).eps
        for a, b in zip(
            (got, *torch.autograd.grad(got, leaves, tangent)),
            (want, *torch.autograd.grad(want, leaves, tangent)),
            strict=True,
        ):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=4 * eps_of, atol=4 * eps_of * float(b.detach().abs().max()))


LAYOUTS = {
    "transposed": lambda n: torch.randn(4, n).t(),
    "channels-last": lambda n: torch.randn(2, 3, n, 5).contiguous(memory_format=torch.channels_last),
    "every second": lambda n: torch.randn(4, 2 * n)[:, ::2],
    "expanded": lambda n: torch.randn(n, 1).expand(n, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str) -> None:
    torch._dynamo.reset()

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:])

    compiled = torch.compile(program, backend="opforge", dynamic=True, options={"strict": True})
    for n in (6, 9):
        x = LAYOUTS[layout](n)
        got, want = compiled(x), program(x)
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [[7], [], [8, 4]])
def test_other_sizes_are_refused(shape: list[int]) -> None:
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.rms_norm(x, shape)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="normalized_shape"):
        torch.compile(lambda x: F.rms_norm(x, shape), backend="opforge", dynamic=True)(x)


@pytest.mark.parametrize("shape", [[1], [4, 8], [2, 4, 8]])
@pytest.mark.parametrize("dims", [1, 2])
def test_weights_of_other_sizes_are_refused(dims: int, shape: list[int]) -> None:
    """A weight that can be multiplied with the rows was taken, where eager refuses it."""
    if dims == 2 and shape == [4, 8]:
        shape = [8]
    x, w = torch.randn(4, 8), torch.randn(shape)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-dims:], w)

    with pytest.raises(RuntimeError, match="Expected weight to be of same shape"):
        program(x, w)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape"):
        torch.compile(program, backend="opforge", dynamic=True)(x, w)
