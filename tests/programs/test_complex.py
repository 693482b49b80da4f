"""Complex tensors in compiled programs: what is native, in one kernel with what is beside it, and as exact as eager is."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import opforge

DTYPES = [torch.complex64, torch.complex128]


def compiled(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The results of the compiled function, and what was counted."""
    opforge.reset_stats()
    torch._dynamo.reset()
    found = torch.compile(function, backend="opforge", **options)(*inputs)
    return found, opforge.stats()


def same(function: Callable[..., Any], *inputs: Any, **options: Any) -> dict[str, Any]:
    """Compiled, compared with eager, without an eager kernel in it; what was counted."""
    found, stats = compiled(function, *inputs, **options)
    for ours, eager in zip(tree_leaves(found), tree_leaves(function(*inputs)), strict=True):
        torch.testing.assert_close(ours, eager.resolve_conj(), equal_nan=True)
    assert stats["externs"] == {}
    assert stats["fallbacks"] == {}
    return stats


def numbers(*shape: int, dtype: torch.dtype = torch.complex64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_is_one_kernel(dtype: torch.dtype) -> None:
    x, y, z = (numbers(5, 7, dtype=dtype, seed=k) for k in range(3))
    assert same(lambda x, y, z: x * y + z.conj(), x, y, z)["kernels"] == 1


def test_layouts() -> None:
    x, y = numbers(6, 4).t(), numbers(8, 12)[::2, 1::2]
    assert same(lambda x, y: (x * 2 + y[:, :6], x.t().reshape(3, 8) / 3j), x, y)["kernels"] > 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_parts_and_back(dynamic: bool) -> None:
    x = numbers(4, 6)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        parts = torch.view_as_real(x * 1j)
        whole = torch.view_as_complex(parts * 2)
        return (
            whole.t() * x.real.t(),
            x.imag + 1,
            whole[1:, ::2].conj() + 1,
            torch.complex(x.real, x.real),
            x.mH @ x if False else x.mH,
        )

    same(lambda x: program(x)[:4], x, dynamic=dynamic)


def test_reductions() -> None:
    x = numbers(33, 65)
    same(lambda x: (x.sum(), x.sum(0), x.sum(1, True), x.mean(), x.mean(0), x.cumsum(0), x.cumsum(1)), x)
    same(lambda x: (torch.linalg.vector_norm(x), x.norm(1), x.any(), x.all(1), torch.count_nonzero(x)), x)


def test_a_sum_is_at_least_as_exact_as_eager() -> None:
    x = numbers(3, 20001) + 1000
    (found,), _ = compiled(lambda x: (x.sum(1),), x)
    exact = x.to(torch.complex128).sum(1)
    assert (found - exact).abs().max() <= (x.sum(1) - exact).abs().max()


def test_dtypes_and_numbers_are_promoted() -> None:
    x, r, d, i = numbers(5), torch.randn(5), torch.randn(5, dtype=torch.float64), torch.arange(5)
    same(
        lambda x, r, d, i: (
            x + r,
            x * d,
            x - i,
            r * 2j,
            i + 1j,
            d * 1j,
            2 / x,
            x / 3,
            r.to(torch.complex128),
            x.bool(),
        ),
        x,
        r,
        d,
        i,
    )
    same(
        lambda x: (
            x.to(torch.complex128),
            x.eq(x[0]),
            x != 2j,
            torch.where(x.real > 0, x, 1.5),
            x.masked_fill(x.imag > 0, 1j),
        ),
        x,
    )


def test_what_is_made_joined_and_filled() -> None:
    x = numbers(4, 3)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.cat([x, x.to(torch.complex128)[:2]])
        z = torch.stack([x, torch.zeros_like(x), torch.full_like(x, 2 - 1j)], 1)
        w = torch.nn.functional.pad(x, (1, 2), value=0.5) + torch.eye(4, 6, dtype=x.dtype)
        return y, z, w, torch.tril(x), x.flip(0).roll(1, 1), x.diagonal() + x.new_ones(3)

    same(program, x)


def test_indices() -> None:
    x, k, m = numbers(6, 5), torch.tensor([0, 3, 3]), torch.tensor([[0, 4, 1], [2, 2, 0]])

    def program(x: Tensor, k: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[k] = x[:3] * 2
        y[1:3, ::2] += 1
        return (
            y,
            x[k],
            x.gather(1, m),
            x.index_add(0, k, x[:3]),
            x.index_add(0, k, x[:3], alpha=2j),
            x.scatter_add(1, m, x[:2, :3]),
        )

    same(program, x, k, m)


def test_an_input_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        x.mul_(2j).add_(1)
        return x.sum()

    a, b = numbers(3, 4), numbers(3, 4)
    (found,), _ = compiled(lambda x: (program(x),), a)
    torch.testing.assert_close(found, program(b))
    torch.testing.assert_close(a, b)


def test_beside_eager_kernels() -> None:
    x = numbers(8, 8)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.fft.fft((x * 2).t())
        return y.abs(), torch.linalg.svd(y.conj() + x)[1], (x.mH @ y).imag * 2

    found, stats = compiled(program, x)
    for ours, eager in zip(found, program(x), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert set(stats["externs"]) == {"aten._fft_c2c.default", "aten._linalg_svd.default", "aten.mm.default"}


def test_sparse_complex_tensors_stay_eager_s() -> None:
    x = numbers(3, 3)
    (found,), _ = compiled(lambda x: ((x * 2).to_sparse().to_dense() + x,), x)
    torch.testing.assert_close(found, x * 3)


def test_complex_halves_are_eager_s() -> None:
    x = numbers(6).to(torch.complex32)
    found, stats = compiled(lambda x: x * 2, x)
    torch.testing.assert_close(found, x * 2)
    assert "aten.mul.Tensor: dtype complex32" in stats["reasons"]


def test_operators_without_a_complex_body_are_eager_s() -> None:
    x = numbers(6)
    found, stats = compiled(lambda x: torch.tanh(x) + x.prod(), x)
    torch.testing.assert_close(found, torch.tanh(x) + x.prod())
    assert set(stats["externs"]) == {"aten.tanh.default", "aten.prod.default"}


GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, y: (x * y.conj()).abs().sum(),
    "div": lambda x, y: (x / y).real.pow(2).sum() + (2j / x).imag.sum(),
    "exp": lambda x, y: (x.exp() + y**3 + y.square()).abs().mean(),
    "parts": lambda x, y: (torch.view_as_real(x) * 3).sum() + x.angle().sum() + (x.imag * y.real).sum(),
    "whole": lambda x, y: (torch.complex(x.real, y.imag) * torch.polar(x.abs(), y.angle())).real.sum(),
    "reductions": lambda x, y: (x.cumsum(0) * y.mean(1, True) + x.sum(0)).abs().sum() + torch.linalg.vector_norm(y),
    "slices": lambda x, y: (torch.cat([x[1:], y[:2, ::1]]) * torch.nn.functional.pad(x, (0, 0, 0, 1))[:5]).imag.sum(),
    "index": lambda x, y: (x[torch.tensor([0, 2, 2])] * y[1]).real.sum() + torch.where(x.real > 0, x, y).imag.sum(),
    "dtypes": lambda x, y: (x.to(torch.complex128) * y.real + x.imag).abs().sum().to(torch.float32),
}


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in GRADIENTS), ("slices", True), ("reductions", True)]
)
def test_gradients(name: str, dynamic: bool) -> None:
    function = GRADIENTS[name]
    ours, eager, exact = [
        [numbers(4, 3, seed=k).to(d).requires_grad_() for k in range(2)] for d in (DTYPES[0], DTYPES[0], DTYPES[1])
    ]
    loss, stats = compiled(function, *ours, dynamic=dynamic)
    loss.backward()
    function(*eager).backward()
    function(*exact).backward()
    assert opforge.stats()["externs"] == {}
    assert stats["fallbacks"] == {}
    for a, b, c in zip(ours, eager, exact, strict=True):
        if c.grad is None:
            assert a.grad is None or not a.grad.any()
            continue
        assert a.grad is not None
        assert b.grad is not None
        bound = 3 * (b.grad - c.grad).abs().max() + 1e-6 * c.grad.abs().max()
        assert (a.grad - c.grad).abs().max() <= bound


THROUGH_COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "times": lambda x: (x * 2j).abs(),
    "spectrum": lambda x: torch.fft.rfft(x).abs() + 1,
    "back": lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 + 2j)),
    "inverse": lambda x: torch.fft.ifft(x).imag * x,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", THROUGH_COMPLEX)
def test_real_numbers_by_way_of_complex_ones(name: str, dynamic: bool) -> None:
    """Their gradient is the real part of another: a view with gaps."""
    function = THROUGH_COMPLEX[name]
    ours, eager = (numbers(4, 8).real.clone().requires_grad_() for _ in range(2))
    found, _ = compiled(function, ours, dynamic=dynamic)
    expected = function(eager)
    torch.testing.assert_close(found, expected)
    weights = torch.linspace(-1, 1, found.numel()).reshape(found.shape)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, eager.grad)
    assert opforge.stats()["fallbacks"] == {}


def test_windows_that_overlap_are_not_kept() -> None:
    """A backward that was handed them laid out otherwise would read others."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.view_as_real(torch.stft(x, 16, window=w, return_complex=True))

    ours, eager = (
        [numbers(2, 100).real.clone().requires_grad_(), numbers(16).real.clone().requires_grad_()] for _ in range(2)
    )
    found, _ = compiled(function, *ours)
    weights = torch.linspace(-1, 1, found.numel()).reshape(found.shape)
    (found * weights).sum().backward()
    (function(*eager) * weights).sum().backward()
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_result_may_be_written() -> None:
    """Autograd lets nobody write to views that its functions return, and a result is none in eager."""
    x = numbers(4, 3).requires_grad_()
    (y, z), _ = compiled(lambda x: (x * 2, x.exp()), x)
    assert not y._is_view()
    assert not z._is_view()
    y.mul_(3)
    y.abs().sum().backward(retain_graph=True)
    torch.testing.assert_close(x.grad, 6 * (x / x.abs()).detach())
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.abs().sum().backward()


PARTS: dict[str, Callable[[Tensor], Any]] = {
    "real": lambda x: (x * 2).real,
    "both": lambda x: ((y := x * 2).imag, y, y.real[1:]),
    "of an input": lambda x: (x.real, x.imag[1:].t()),
    "side by side": lambda x: torch.view_as_real(x * 2)[:, 1],
    "of a kernel's result": lambda x: torch.fft.ifft2(x).real,
    "put together": lambda x: (torch.view_as_complex(y := torch.view_as_real(x) * 3), y),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_results_that_are_parts_of_complex_numbers(name: str, dynamic: bool, training: bool) -> None:
    """Autograd follows such views, unlike others with another dtype."""
    function = PARTS[name]
    ours, eager = (numbers(4, 6).requires_grad_(training) for _ in range(2))
    found, stats = compiled(function, ours, dynamic=dynamic)
    assert stats["fallbacks"] == {}
    pairs = list(zip(tree_leaves(found), tree_leaves(function(eager)), strict=True))
    for a, b in pairs:
        assert (a.stride(), a.requires_grad) == (b.stride(), b.requires_grad)
        torch.testing.assert_close(a, b)
    if training:
        for k, x in enumerate((ours, eager)):
            sum((n + 1) * (pair[k] ** 2).abs().sum() for n, pair in enumerate(pairs)).backward()  # type: ignore[union-attr]
            assert x.grad is not None
        torch.testing.assert_close(ours.grad, eager.grad)


class Lazily(torch.autograd.Function):
    """A custom function whose result, and whose gradient, are lazy conjugates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.conj())
        return (x * 2).conj()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (grad * 2 + x).conj()


LAZY: dict[str, Callable[[Tensor], Any]] = {
    "checkpoint": lambda x: checkpoint(lambda y: (y.exp() * 2).conj(), x, use_reentrant=False),
    "custom function": lambda x: Lazily.apply(x * 1.5),
    "result": lambda x: (x * 2).conj(),
    "layout": lambda x: (x * 2).mH,
    "part": lambda x: (x * 2).conj()[:, 1:3],
    "base first": lambda x: ((y := x * 2), y.conj()),
    "base last": lambda x: ((y := x * 2).conj(), y),
    "two": lambda x: ((y := x * 2).conj(), y.t().conj()),
    "input": lambda x: x.conj(),
    "part of an input": lambda x: x[1:].conj(),
    "without history": lambda x: (x * 2).conj().detach(),
    "kernel": lambda x: torch.fft.ifft(x.real),
    "written": lambda x: (x * 2).conj().add_(1j),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_conjugate_is_one_here_too(name: str, dynamic: bool, training: bool) -> None:
    function = LAZY[name]
    ours, eager = (numbers(4, 6).requires_grad_(training) for _ in range(2))
    found, stats = compiled(function, ours, dynamic=dynamic)
    assert stats["fallbacks"] == {}
    pairs = list(zip(tree_leaves(found), tree_leaves(function(eager)), strict=True))
    assert any(b.is_conj() for _, b in pairs)
    for a, b in pairs:
        assert (a.is_conj(), a.stride(), a.requires_grad) == (b.is_conj(), b.stride(), b.requires_grad)
        torch.testing.assert_close(a, b)
    homes = [
        [t.untyped_storage()._cdata for t in (x, *found)]
        for x, found in zip((ours, eager), zip(*pairs, strict=True), strict=True)
    ]
    assert [homes[0].index(h) for h in homes[0]] == [homes[1].index(h) for h in homes[1]]
    if any(b.requires_grad for _, b in pairs):
        for k, x in enumerate((ours, eager)):
            sum((pair[k] * (2 + 1j)).abs().sum() for pair in pairs if pair[k].requires_grad).backward()  # type: ignore[union-attr]
            assert x.grad is not None
        torch.testing.assert_close(ours.grad, eager.grad)


def test_a_lazy_conjugate_under_inference_mode() -> None:
    x = numbers(4, 6)
    with torch.inference_mode():
        found, stats = compiled(lambda x: ((x * 2).mH, x.conj()), x)
    assert stats["fallbacks"] == {}
    assert all(t.is_conj() and t.is_inference() == kept for t, kept in zip(found, (True, False), strict=True))
    torch.testing.assert_close(found, ((x * 2).mH, x.conj()))


ODD = [0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 1e30, 1e-30, 3e38, 1e-40, 89.0]
SPECIAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "number": lambda x, y: x * 2 / 2.5,
    "real": lambda x, y: x * y.real / y.imag,
    "under": lambda x, y: 1.5 / x,
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
    "exp": lambda x, y: x.exp(),
    "abs": lambda x, y: x.abs(),
    "angle": lambda x, y: x.angle(),
    "reciprocal": lambda x, y: x.reciprocal(),
    "cube": lambda x, y: x**3,
    "neg": lambda x, y: -x,
    "conj": lambda x, y: x.conj_physical(),
    "eq": lambda x, y: x == y,
    "logic": lambda x, y: torch.logical_and(x, y) ^ x.logical_not(),
    "bool": lambda x, y: x.bool(),
    "finite": lambda x, y: x.isfinite() ^ x.isnan(),
    "where": lambda x, y: torch.where(x.real > 0, x, y),
    "polar": lambda x, y: torch.polar(x.real, x.imag),
}


def kinds(t: Tensor) -> Tensor:
    """What of a number does not depend on rounding: whether it is nan, or which infinity."""
    t = torch.view_as_real(t) if t.is_complex() else t.to(torch.float64)
    return torch.where(t.isnan(), 3, torch.where(t.isinf(), t.sign(), 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_are_eager_s(dtype: torch.dtype) -> None:
    points = torch.tensor([complex(a, b) for a in ODD for b in ODD], dtype=dtype)
    x, y = points.repeat_interleave(len(points)), points.repeat(len(points))
    found, stats = compiled(lambda x, y: [f(x, y) for f in SPECIAL.values()], x, y)
    assert stats["externs"] == {}
    wrong = {
        name: (x[k], y[k], ours[k], eager[k])
        for (name, f), ours in zip(SPECIAL.items(), found, strict=True)
        if (unlike := (kinds(ours) != kinds(eager := f(x, y))).nonzero()).numel()
        for k in [int(unlike[0, 0])]
    }
    assert not wrong


def test_a_sum_keeps_the_other_part_of_an_infinity() -> None:
    """Eager multiplies the second operand by alpha, 1 + 0i, which makes nan of 0 times infinity; the parts of a sum are sums of parts."""
    x, y = torch.tensor([1 + 1j]), torch.tensor([complex(0.0, math.inf)])
    found, _ = compiled(lambda x, y: x + y, x, y)
    assert found.tolist() == [complex(1.0, math.inf)]


def test_a_result_that_is_a_view_of_an_input() -> None:
    x = numbers(3, 4)
    found, _ = compiled(lambda x: (x.t(), x.real, torch.view_as_real(x)), x)
    assert [t.data_ptr() for t in found] == [x.data_ptr()] * 3


def test_a_user_s_operator_may_say_that_it_is_complex(tmp_path: Any) -> None:
    from opforge.generated import ops

    spec = tmp_path / "mine.yaml"
    spec.write_text(
        "- op: opf_complex::twice\n".replace("::", ".")
        + "  doc: Twice\n  kind: pointwise\n  complex: true\n  expr: self + self\n"
    )
    with torch.library._scoped_library("opf_complex", "DEF") as library:
        library.define("twice(Tensor self) -> Tensor")
        library.impl("twice", lambda x: x + x, "CPU")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        opforge.load_specs(str(spec))
        assert "opf_complex.twice.default" in ops.COMPLEX
        assert same(lambda x: torch.ops.opf_complex.twice(x) * 2, numbers(4))["kernels"] == 1
