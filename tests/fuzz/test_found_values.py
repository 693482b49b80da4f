"""Programs whose values the fuzzer found wrong, or could not judge: what eager's own error is, and by what it is known."""

from __future__ import annotations

import pytest
import torch

import opforge
from opforge.testing.noise import NOISY_RUNS, Noise

from .check import check, in_dtype, see
from .exact_convolution import convolution, convolution_backward
from .program import Program, Step


class _Column(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 0.3).sum(0)


@pytest.mark.parametrize("rows", [17, 24, 31, 32, 33, 64, 100, 1000])
@pytest.mark.parametrize("columns", [5, 40, 64])
def test_column_sums_lose_no_more_than_eager(rows: int, columns: int) -> None:
    """Rows that are alike round the same way each time: 32 float32 additions one after another lost 7 units in the last place of 33 rows."""
    x = (
        torch.randint(-4, 5, (1, columns), generator=torch.Generator().manual_seed(0))
        .expand(rows, columns)
        .contiguous()
    )
    exact = (x + 0.3).double().sum(0)
    ours = opforge.compile_fx(_Column(), [x])(x)
    own = ((x + 0.3).sum(0).double() - exact).abs()
    assert ((ours.double() - exact).abs() <= own.max() + torch.finfo(torch.float32).eps * exact.abs()).all()


def test_a_layout_changed_in_place_has_a_judge(quick: None) -> None:
    """`unsqueeze_` of an expanded tensor: to write its elements back is an error, so nothing was known better than eager."""
    made = (Step('grid((n, m), "float64", 752, 7.3).sin()', ("p1",)), Step("p1.expand(2, *p1.shape)", ("x2",)))
    steps = (Step("x2.unsqueeze_(0)"), Step("F.log_softmax(p1, -1).mean(0)", ("v1",)))
    program = Program(0, made, (), ("p1", "x2"), steps, ("v1",), sizes=((4, 2), (5, 17)))
    sight = in_dtype("float64", program, (5, 17))
    assert sight.raised == {}
    assert "result 0" in sight.lows
    assert check(program).different == []


def _accumulated(dtype: str) -> Program:
    made = (Step(f'grid((), "{dtype}", 116, 8.0).requires_grad_()', ("p1",)),)
    steps = (Step("p1 * 0.3", ("v1",)), Step("torch.lerp(p1, v1, 0.25)", ("v2",)))
    return Program(110919, made, ("p1",), ("p1",), steps, ("v2", "v1"), sizes=((5, 9),))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_one_tensor_are_added_in_any_order(quick: None, dtype: str) -> None:
    """Of 1.5 for itself and -1.5 and -0.1125 from the program, a compiled graph adds the last two first; eager had luck with the first two."""
    program = _accumulated(dtype)
    assert check(program).different == []
    spread = [see(program, program.functions(), (5, 9), around=lambda k=k: Noise(k)) for k in range(NOISY_RUNS)]  # type: ignore[misc]
    gaps = [float((s.values["gradient 0"].double() + 0.1125).abs()) for s in spread]
    eps = torch.finfo(getattr(torch, dtype)).eps
    assert eps / 2 < max(gaps) < 4 * eps


def test_gradients_that_add_up_exactly_stay() -> None:
    with Noise(0):
        x = torch.arange(8.0, requires_grad=True)
        (g,) = torch.autograd.grad((x * 2 + x * 0.5 + x * 4).sum(), x)
    assert torch.equal(g, torch.full((8,), 6.5))


def test_a_remainder_of_a_float_made_of_sizes(quick: None) -> None:
    """torch takes `n / 10 % 2` for an integer and drops the guard on its value: a later call computed with 0.6 in place of 0.7."""
    made = (Step('grid((n, m), "float32", 322, 8.0)', ("p1",)),)
    call = (
        "F.scaled_dot_product_attention(p1[None], p1[None], p1[None], scale=1 / (1 + p1.size(1) / 10 * p1.size(1) % 2))"
    )
    sizes = ((12, 9), (7, 6), (10, 7))
    program = Program(
        0, made, (), ("p1",), (Step(call, ("v1",)),), ("v1",), sizes=sizes, path="dynamo", dynamo_shapes="dynamic"
    )
    assert check(program).different == []


def test_what_dynamo_refuses_in_a_later_graph_is_its_own(quick: None) -> None:
    """Sizes become symbols in the second graph; Dynamo has no `abs` of a condition on them (numbers, 2000055)."""
    made = (Step('grid((m,), "float32", 541, 8.0)', ("p1",)),)
    steps = (Step("p1 / (abs(p1.shape[0] > 5) + 1)", ("v1",)),)
    program = Program(
        0, made, (), ("p1",), steps, ("v1",), sizes=((2, 2), (2, 3)), path="dynamo", dynamo_shapes="automatic"
    )
    assert check(program).different == []


def test_float64_convolutions_and_attention_have_a_judge(quick: None) -> None:
    """A running variance was 0.02 units in the last place off, eager's 1.6, and eager was taken for right (modules, 3000105)."""
    layers = "nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, eps=0.1), nn.ReLU()).double()"
    made = (Step('grid((n, 3, 6, m), "float64", 578)', ("p1",)), Step(f"fill({layers}, 376)", ("w1",)))
    steps = (Step("w1(p1)", ("v1",)), Step("F.scaled_dot_product_attention(p1, p1, p1)", ("v2",)))
    program = Program(0, made, (), ("p1", "w1"), steps, ("v1", "v2"), sizes=((4, 8),), path="dynamo", family="modules")
    sight = in_dtype("float64", program, (4, 8))
    assert sight.raised == {}
    assert {"result 0", "result 1", "buffer 0.1.running_var"} <= sight.lows.keys()
    assert check(program).different == []


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_of_arrays(transposed: bool) -> None:
    how = ([2, 1], [1, 0], [1, 2], transposed, [1, 0] if transposed else [0, 0], 2)
    x, w = torch.randn(2, 4, 7, 6).double(), torch.randn(4, 2, 3, 2).double()
    expected = torch.ops.aten.convolution(x, w, None, *how)
    torch.testing.assert_close(torch.from_numpy(convolution(x.numpy(), w.numpy(), None, *how)), expected)
    g = torch.randn_like(expected)
    gradients = torch.ops.aten.convolution_backward(g, x, w, [4], *how, [True] * 3)
    for own, other in zip(
        convolution_backward(g.numpy(), x.numpy(), w.numpy(), [4], *how, [True] * 3), gradients, strict=True
    ):
        torch.testing.assert_close(torch.from_numpy(own), other)


def test_running_statistics_may_round_otherwise_too(quick: None) -> None:
    """Eager's order of adding happened to give the mean of a softmax, a power of two, exactly (modules, 3001161)."""
    made = (Step('grid((n, 3, 6, m), "float32", 373)', ("p1",)), Step("fill(nn.BatchNorm2d(3, eps=0.1), 331)", ("w1",)))
    program = Program(
        0,
        made,
        (),
        ("p1", "w1"),
        (Step("w1(p1.softmax(-1))", ("v1",)),),
        ("v1",),
        sizes=((5, 8),),
        path="dynamo",
        family="modules",
    )
    assert check(program).different == []
