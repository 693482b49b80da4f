"""Dtypes and strides of results where torch's fake kernels are wrong about them: `correction` entries of `specs/decompositions.yaml`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opforge
from opforge.errors import MetadataError, OpforgeWarning
from tests.support.matrix import symbolic

aten = torch.ops.aten


def brain(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def transposed(*shape: int) -> torch.Tensor:
    return torch.randn(shape).transpose(-1, -2).contiguous().transpose(-1, -2)


def channels_last(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def channels() -> tuple[torch.Tensor, ...]:
    """Weight, bias, running mean and variance of 4 channels."""
    return torch.randn(4), torch.randn(4), torch.randn(4), torch.rand(4) + 0.5


Call = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]
CALLS: dict[str, Call] = {
    "max unpool": (
        lambda x: F.max_unpool2d(x, (torch.arange(20).expand(6, 20) * 4).reshape(2, 3, 4, 5), 2),
        lambda: (channels_last(2, 3, 4, 5),),
    ),
    "layer norm": (aten.native_layer_norm, lambda: (brain(3, 8), [8], torch.randn(8), torch.randn(8), 1e-5)),
    "layer norm, bias only": (aten.native_layer_norm, lambda: (brain(3, 8), [8], None, torch.randn(8), 1e-5)),
    "group norm": (aten.native_group_norm, lambda: (brain(2, 4, 6), torch.randn(4), torch.randn(4), 2, 4, 6, 2, 1e-5)),
    "group norm backward": (
        aten.native_group_norm_backward,
        lambda: (
            brain(2, 4, 6),
            brain(2, 4, 6),
            torch.randn(2, 2),
            torch.rand(2, 2),
            torch.randn(4),
            2,
            4,
            6,
            2,
            [True] * 3,
        ),
    ),
    "batch norm": (aten._native_batch_norm_legit_functional, lambda: (brain(2, 4, 6), *channels(), True, 0.1, 1e-5)),
    "batch norm, no weight": (
        aten._native_batch_norm_legit_functional,
        lambda: (brain(2, 4, 6), None, None, *channels()[2:], True, 0.1, 1e-5),
    ),
    "batch norm, all bfloat16": (
        aten._native_batch_norm_legit_functional,
        lambda: (brain(2, 4, 6), *(c.bfloat16() for c in channels()), True, 0.1, 1e-5),
    ),
    "batch norm, transposed": (
        aten._native_batch_norm_legit_functional,
        lambda: (transposed(2, 4, 6), *channels(), True, 0.1, 1e-5),
    ),
    "batch norm, matrix": (
        aten._native_batch_norm_legit_functional,
        lambda: (transposed(6, 4), *channels(), True, 0.1, 1e-5),
    ),
    "batch norm, channels-last": (
        aten._native_batch_norm_legit_functional,
        lambda: (channels_last(2, 4, 6, 5), *channels(), True, 0.1, 1e-5),
    ),
    "batch norm without statistics": (
        aten._native_batch_norm_legit.no_stats,
        lambda: (brain(2, 4, 6), *channels()[:2], True, 0.1, 1e-5),
    ),
    "batch norm by statistics": (
        aten._native_batch_norm_legit_no_training,
        lambda: (brain(2, 4, 6), *channels(), 0.1, 1e-5),
    ),
    "batch norm backward": (
        aten.native_batch_norm_backward,
        lambda: (
            *(transposed(2, 4, 6), transposed(2, 4, 6), torch.randn(4)),
            *(*channels()[2:], *channels()[2:], True, 1e-5, [True] * 3),
        ),
    ),
    "layer norm by name": (torch.native_layer_norm, lambda: (brain(3, 8), [8], torch.randn(8), None, 1e-5)),
    "channel shuffle": (F.channel_shuffle, lambda: (channels_last(2, 4, 3, 5), 2)),
    "channel shuffle, transposed": (F.channel_shuffle, lambda: (transposed(2, 4, 3, 5), 2)),
    "log sigmoid, transposed": (F.logsigmoid, lambda: (transposed(2, 4, 6),)),
    "log sigmoid, channels-last": (aten.log_sigmoid_forward, lambda: (channels_last(2, 4, 6, 5),)),
    "power of a number": (aten.pow.Scalar, lambda: (2.5, transposed(2, 4, 6))),
    "power of a number, channels-last": (lambda x: 2**x, lambda: (channels_last(2, 4, 6, 5),)),
    "log softmax backward": (
        lambda g, y: aten._log_softmax_backward_data(g, y, 1, y.dtype),
        lambda: (transposed(4, 6), transposed(4, 6).log_softmax(1)),
    ),
    "mean squared error backward": (aten.mse_loss_backward, lambda: (*(transposed(4, 6) for _ in range(3)), 0)),
    "smooth loss backward": (aten.smooth_l1_loss_backward, lambda: (*(transposed(4, 6) for _ in range(3)), 0, 1.0)),
    "huber loss backward": (aten.huber_loss_backward, lambda: (*(transposed(4, 6) for _ in range(3)), 0, 1.0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_dtypes_and_strides_are_those_of_eager(name: str) -> None:
    op, make = CALLS[name]
    torch.manual_seed(0)
    args = make()
    torch._dynamo.reset()
    opforge.reset_stats()
    with torch.no_grad():
        expected = op(*args)
        found = torch.compile(lambda *args: op(*args), backend="opforge", options={"strict": True})(*args)
    assert not opforge.stats()["externs"]
    exact = op(*(a.double() if isinstance(a, torch.Tensor) else a for a in args))
    single = isinstance(expected, torch.Tensor)
    for e, f, x in zip(*(([t] if single else t) for t in (expected, found, exact)), strict=True):
        assert (e.dtype, e.shape, e.stride()) == (f.dtype, f.shape, f.stride())
        unit = torch.finfo(e.dtype).eps * x.abs()
        assert ((f - x).abs() <= 2 * (e - x).abs().max().nan_to_num() + unit).all() if x.numel() else True


def test_training_under_autocast_keeps_the_statistics_of_a_norm_in_float32() -> None:
    torch.manual_seed(0)
    block = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.GroupNorm(2, 8), torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
    )
    x = torch.randn(16, 8)

    def gradients(run: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        block.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            run(x).float().pow(2).mean().backward()
        return [p.grad.clone() for p in block.parameters()]

    torch._dynamo.reset()
    exact = gradients(block, torch.float32)
    eager = gradients(block, torch.bfloat16)
    ours = gradients(torch.compile(block, backend="opforge"), torch.bfloat16)
    for o, e, x64 in zip(ours, eager, exact, strict=True):
        assert (o - x64).norm() <= 2 * (e - x64).norm() + 1e-6


def test_a_result_of_another_dtype_than_traced_is_converted_and_told() -> None:
    from opforge.runtime.execute.support import conform

    t = torch.arange(6.0).reshape(2, 3)
    said = r"aten.example.default returned torch.float32 where tracing says torch.bfloat16; it is converted, please report it"
    with pytest.warns(OpforgeWarning, match=said):
        out = conform(t, torch.bfloat16, (2, 3), (1, 2), "aten.example.default")
    assert (out.dtype, out.stride()) == (torch.bfloat16, (1, 2))
    assert torch.equal(out.float(), t)


def test_a_result_of_other_sizes_than_traced_leaves_the_graph_to_eager() -> None:
    """Same strides, fewer elements: kernels would read past its end."""

    @torch.library.custom_op("opforge_test::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x[: len(x) // 2].clone()

    halved.register_fake(torch.empty_like)
    said = r"opforge_test.halved.default returned sizes \[2, 3\] where tracing says \[4, 3\]: .*, mend the function that is registered"
    strict = torch.compile(lambda x: halved(x) + 1, backend="opforge", options={"strict": True})
    with pytest.raises(MetadataError, match=said):
        strict(torch.ones(4, 3))

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        return halved(x) * 2

    torch._dynamo.reset()
    opforge.reset_stats()
    run, y = torch.compile(program, backend="opforge"), torch.zeros(3)
    x = torch.arange(12.0).reshape(4, 3)
    with pytest.warns(OpforgeWarning, match=said):
        assert torch.equal(run(x, y), x[:2] * 2)
    assert torch.equal(run(x, y), x[:2] * 2)
    assert torch.equal(y, torch.full((3,), 2.0))  # each call wrote once
    assert list(opforge.stats()["fallbacks"].values()) == [1]


def test_sizes_that_torch_foretells_wrongly_are_left_to_eager() -> None:
    """For one row and no reduction torch's fake kernel says [1], and the kernel gives []."""
    x, target = torch.randn(4), torch.tensor([1, 0, -1, 2])
    run = torch.compile(lambda x: F.multilabel_margin_loss(x * 1, target, reduction="none"), backend="opforge")
    with pytest.warns(OpforgeWarning, match="multilabel_margin_loss_forward"):
        found = run(x)
    assert found.shape == ()
    torch.testing.assert_close(found, F.multilabel_margin_loss(x, target, reduction="none"))


@pytest.mark.parametrize("function", [torch.unique_consecutive, torch.unique])
def test_positions_of_no_elements_are_integers(function: Callable[..., Any]) -> None:
    """They came back as float32, a dtype that nobody asked for."""
    run = torch.compile(lambda x: function(x, dim=1, return_inverse=True), backend="opforge")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        values, positions = run(torch.zeros(5, 0, 5))
    assert (values.shape, positions.dtype, positions.shape) == ((5, 0, 5), torch.int64, (0,))


OUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "computed in it": lambda x, o: torch.cumsum(x, 0, out=o),
    "rounded to it": lambda x, o: torch.add(x, 0.1, out=o),
    "refused by clamp": lambda x, o: torch.clamp(x, -1, 1, out=o),
    "refused by softmax": lambda x, o: torch.softmax(x, 0, out=o),
    "refused by tril": lambda x, o: torch.tril(x, out=o),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OUTS)
@pytest.mark.filterwarnings("ignore::opforge.errors.OpforgeWarning")
def test_a_result_of_another_dtype_than_the_operators(name: str, dtype: torch.dtype) -> None:
    """Running sums were those of float32, and what eager refuses was taken."""
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))

    def outcome(run: Callable[..., Any]) -> Any:
        torch._dynamo.reset()
        out = torch.zeros(9, 4, dtype=dtype)
        try:
            run(x, out)
        except RuntimeError:
            assert not out.any()
            return "refused"
        return out

    ours, eager = outcome(torch.compile(OUTS[name], backend="opforge")), outcome(OUTS[name])
    assert isinstance(ours, str) == isinstance(eager, str)
    assert isinstance(eager, str) or torch.equal(ours, eager)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_an_out_of_the_right_sizes_keeps_its_strides(dtype: torch.dtype) -> None:
    """Fake kernels of some operators lay it out anew, the kernels do not."""
    a, b = torch.randn(5, 5, dtype=dtype), torch.randn(5, 3, dtype=dtype)
    out = torch.ones(5, 3, 2, dtype=dtype)[..., 0]
    graph = torch.fx.symbolic_trace(lambda out, a, b: torch.linalg.solve(a, b, out=out))
    opforge.compile_fx(graph, [out, a, b])(out, a, b)
    assert out.stride() == (6, 2)
    torch.testing.assert_close(out, torch.linalg.solve(a, b))


RANKS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "read": lambda x, o: (torch.linalg.matrix_rank(x, out=o), o + 0)[1],
    "returned": lambda x, o: torch.linalg.matrix_rank(x, tol=0.5, out=o),
    "operator": lambda x, o: torch.ops.aten.linalg_matrix_rank.out(x, 0.5, out=o),
}


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.filterwarnings("ignore::opforge.errors.OpforgeWarning")
def test_an_out_that_torch_does_not_write_while_it_traces(name: str) -> None:
    """It stayed as it was: torch gives another tensor back where an argument is no plain one. The peers do not write it either."""
    x = torch.eye(3)
    for run in (
        torch.compile(RANKS[name], backend="opforge", fullgraph=True),
        opforge.aot_function(RANKS[name], lambda gm, _: gm),
    ):
        out = torch.zeros((), dtype=torch.int64)
        result = run(x, out)
        assert (int(out), int(result), out._version) == (3, 3, 1)


def test_an_example_that_a_fake_kernel_lays_out_anew_is_as_it_was() -> None:
    out, x = torch.ones(5, 10, 5, 2)[..., 0], torch.randn(5, 10, 5)
    examples, _ = symbolic([out, x])
    before = examples[0].stride()
    compiled = opforge.compile_fx(torch.fx.symbolic_trace(lambda out, x: torch.msort(x, out=out)), examples)
    assert examples[0].stride() == before
    compiled(out, x)
    assert torch.equal(out, torch.msort(x))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float16])
@pytest.mark.parametrize("bounds", [(-0.9, 2.1, 2.0), (0.5, 6, 1.5), (-2.7, 3, 1), (-2.7, 3), (0, 5.5), (9, 0, -2)])
def test_a_range_of_integers_between_floats(bounds: tuple[float, ...], dtype: torch.dtype) -> None:
    """Eager makes integers of the bounds first; ours were rounded element by element."""
    run = torch.compile(lambda: torch.arange(*bounds, dtype=dtype), backend="opforge", fullgraph=True)
    assert torch.equal(run(), torch.arange(*bounds, dtype=dtype))


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_dropout_that_drops_nothing_returns_its_input(p: float) -> None:
    """With symbolic sizes torch's own decomposition of it copies."""
    compiled = torch.compile(lambda x: torch.nn.functional.dropout(x, p, p == 0), backend="opforge", dynamic=True)
    x = torch.ones(3, 5, requires_grad=True)
    assert compiled(x) is x


@torch.library.custom_op("opforge_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    """A copy, as a transposed view of new memory."""
    return x.t().clone(memory_format=torch.contiguous_format).t()


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, (1, x.shape[0]), dtype=x.dtype)


turned.register_autograd(lambda ctx, grad: grad * 1)

WRITES: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {  # each with whether eager raises
    "through a detached tensor": (lambda v: v.detach().mul_(2), True),
    "of all elements": (lambda v: v.detach().zero_(), True),
    "through a view": (lambda v: v[0].mul_(2), True),
    "followed by autograd": (lambda v: v.mul_(2), True),
    "of a copy": (lambda v: v.clone().mul_(2), False),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.filterwarnings("ignore::opforge.errors.OpforgeWarning")
def test_a_write_to_a_view_that_an_operator_made_is_refused_as_in_eager(name: str) -> None:
    """The compiled result was no view, and the error was lost (fuzzer, raw 3000704)."""
    write, raises = WRITES[name]

    def program(x: torch.Tensor) -> torch.Tensor:
        v = torch.ops.opforge_tests.turned(x)
        write(v)
        return v

    torch._dynamo.reset()
    opforge.reset_stats()
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    compiled = torch.compile(program, backend="opforge")
    if not raises:
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
        assert gradient.tolist() == torch.ones(2, 3).tolist()
        assert not opforge.stats()["fallbacks"]
        return
    for run in (program, compiled):
        with pytest.raises(RuntimeError, match=r"is a view and (is being|its base or another)"):
            torch.autograd.grad(run(x).sum(), x)
    (reason,) = opforge.stats()["fallbacks"]
    assert "returned a view of another tensor" in reason


def test_a_result_that_is_no_view_is_written_in_compiled_code() -> None:
    @torch.library.custom_op("opforge_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, grad: grad * 2)

    def program(x: torch.Tensor) -> torch.Tensor:
        v = torch.ops.opforge_tests.doubled(x)
        v.mul_(3)
        v.detach().add_(1)
        return v

    torch._dynamo.reset()
    opforge.reset_stats()
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    result = torch.compile(program, backend="opforge")(x)
    assert result.tolist() == (x * 6 + 1).tolist()
    assert torch.autograd.grad(result.sum(), x)[0].tolist() == torch.full((2, 3), 6.0).tolist()
    assert not opforge.stats()["fallbacks"]


def test_narrow_vectors_are_multiplied_in_the_result_s_dtype() -> None:
    """Their product was rounded to bfloat16 first: an error of 0.004 of 3.7."""
    rows, columns, onto = brain(64), brain(48), torch.randn(64, 48)
    got = torch.compile(torch.addr, backend="opforge")(onto, rows, columns)
    want = onto.double() + rows.double()[:, None] * columns.double()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=2e-7, atol=2e-7)
