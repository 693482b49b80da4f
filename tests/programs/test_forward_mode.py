"""Compiled functions called under `torch.autograd.forward_ad.dual_level`: values, tangents and gradients as eager's, by compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.utils._pytree import tree_leaves

import opforge
from opforge.runtime.torch_compat import minor_version
from tests.support.accuracy import assert_as_accurate

Program = Callable[..., Any]
SECOND_ORDER = "a gradient is computed inside of dual_level: its tangents are those of eager kernels"

pytestmark = pytest.mark.usefixtures("fresh_stats")

#: Since torch 2.14 Dynamo leaves calls to eager that have inputs with tangents: it lost the tangents under other backends.
DYNAMO_TAKES_TANGENTS = minor_version() in ("2.11", "2.12", "2.13")
by_dynamo = pytest.mark.skipif(
    not DYNAMO_TAKES_TANGENTS, reason="C10: since torch 2.14 Dynamo leaves inputs with tangents to eager"
)


def tensors(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def pairs(results: Any) -> list[Tensor | None]:
    """Values and tangents, one after the other."""
    return [t for r in tree_leaves(results) if isinstance(r, Tensor) for t in unpack_dual(r)]


def run(
    f: Program, inputs: Sequence[Tensor], tangents: dict[int, Tensor], dtype: torch.dtype | None = None
) -> list[Tensor | None]:
    """Values and tangents of the results of `f`, then of its inputs afterwards; without grad."""
    given = [t.to(dtype) if dtype and t.is_floating_point() else t.clone() for t in inputs]
    moved = {i: t.to(dtype) if dtype else t.clone() for i, t in tangents.items()}
    with torch.no_grad(), dual_level():
        args = [make_dual(t, moved[i]) if i in moved else t for i, t in enumerate(given)]
        result = f(*args)
        return [t if t is None else t.clone() for t in pairs([result, args])]


def same(f: Program, inputs: Sequence[Tensor], moved: Sequence[int], *, dynamic: bool = False) -> None:
    """Eager's values and tangents, as near to those in float64, from kernels."""
    tangents = dict(zip(moved, tensors(*(tuple(inputs[i].shape) for i in moved), seed=1), strict=True))
    compiled = torch.compile(f, backend="opforge", dynamic=dynamic)
    expected, exact = run(f, inputs, tangents), run(f, inputs, tangents, torch.float64)
    found = run(compiled, inputs, tangents)
    stats = opforge.stats()
    assert not stats["fallbacks"], stats
    assert stats["kernels"] or not DYNAMO_TAKES_TANGENTS
    assert [t is None for t in found] == [t is None for t in expected]
    for ours, theirs, truth in zip(found, expected, exact, strict=True):
        if theirs is not None:
            judge(ours, theirs, truth)


def judge(ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
    """As `assert_as_accurate`, for positions too, and for a single number, whose error is a matter of luck, within a few of its last places."""
    if not ours.is_floating_point():
        torch.testing.assert_close(ours, theirs)
    elif ours.numel() > 1:
        assert_as_accurate(ours, theirs, truth.double())
    else:
        torch.testing.assert_close(ours.double(), truth.double(), rtol=1e-6, atol=1e-6)


def pointwise(x: Tensor, y: Tensor) -> Tensor:
    return x.sin() * y + x.exp()


PROGRAMS: dict[str, tuple[Program, tuple[tuple[int, ...], ...]]] = {
    "pointwise": (pointwise, ((40, 50), (40, 50))),
    "products": (lambda x, y: F.gelu(x @ y.t()).softmax(-1), ((40, 50), (40, 50))),
    "reductions": (lambda x, y: (x.norm(), (x * y).std(1), (x + y).sum(0), x.cumsum(0)), ((40, 50), (40, 50))),
    "logarithms": (lambda x, y: (torch.logsumexp(x * y, 1), y.log_softmax(0)), ((40, 50), (40, 50))),
    "parts": (lambda x, y: (torch.cat([x, y]), torch.stack([x, y], 1), x[1:] * y[:-1]), ((40, 50), (40, 50))),
    "choices": (lambda x, y: (torch.where(x > 0, x, y), x.max(-1), y.sort(0), x.clamp(-1, 1)), ((40, 50), (40, 50))),
    "layers": (
        lambda x, w: F.max_pool2d(F.relu(F.conv2d(x, w, padding=1)), 2),
        ((2, 3, 8, 8), (4, 3, 3, 3)),
    ),
    "norms": (lambda x, w: F.layer_norm(x, (50,), w) + F.batch_norm(x, None, None, w, None, True), ((80, 50), (50,))),
    "loss": (lambda x, y: F.cross_entropy(x @ y.t(), torch.arange(40) % 7), ((40, 50), (40, 50))),
}


@pytest.mark.parametrize("moved", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_tangents(name: str, moved: tuple[int, ...]) -> None:
    f, shapes = PROGRAMS[name]
    same(f, tensors(*shapes), moved)


@pytest.mark.parametrize("moved", [(0,), (0, 1)])
@pytest.mark.parametrize("name", ["pointwise", "products", "reductions", "parts"])
def test_symbolic_sizes(name: str, moved: tuple[int, ...]) -> None:
    f, shapes = PROGRAMS[name]
    same(f, tensors(*shapes), moved, dynamic=True)


@by_dynamo
def test_one_variant_for_all_sizes() -> None:
    """The second call has other sizes, and runs the code of the first."""
    compiled = torch.compile(pointwise, backend="opforge", dynamic=True)
    for n in (5, 7, 9):
        inputs, moved = tensors((4, n), (4, n)), {0: tensors((4, n), seed=1)[0]}
        torch.testing.assert_close(run(compiled, inputs, moved), run(pointwise, inputs, moved))
    assert opforge.stats()["graphs"] == 1, opforge.stats()
    assert not opforge.stats()["fallbacks"]


def test_a_product_with_an_operand_that_does_not_move() -> None:
    """Its tangent is exactly zero, and zero times infinity would be nan."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return x * y.reciprocal()

    x, t = tensors((6,), (6,))
    y = torch.tensor([0.0, 1.0, 2.0, 0.0, -1.0, 4.0])
    same(f, [x, y], [0])
    with dual_level(), torch.no_grad():
        found = unpack_dual(torch.compile(f, backend="opforge")(make_dual(x, t), y)).tangent
    assert not found.isnan().any()


# --- writes, views, and what is returned


def write_with_moving(x: Tensor, y: Tensor) -> Any:
    return x.mul_(y).sin()


def write_to_view(x: Tensor, y: Tensor) -> Any:
    return x[1:].mul_(y[1:]), x * 2


@pytest.mark.parametrize("f", [write_with_moving, write_to_view])
@pytest.mark.parametrize("moved", [(0,), (1,), (0, 1)])
def test_writes_reach_value_and_tangent_of_an_input(f: Program, moved: tuple[int, ...]) -> None:
    same(f, tensors((4, 5), (4, 5)), moved)


def test_what_comes_back_is_the_input_or_a_view_of_it() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        z = x * y
        return x, z, z, x[1:], y

    for run_ in (f, torch.compile(f, backend="opforge")):
        x, y, t = tensors((4, 5), (4, 5), (4, 5))
        with dual_level(), torch.no_grad():
            dual = make_dual(x, t)
            a, z, again, part, b = run_(dual, y)
            assert a is dual
            assert z is again
            assert b is y
            part.mul_(2)
            moved = t.clone()
            torch.testing.assert_close(unpack_dual(dual).tangent, moved)
            torch.testing.assert_close(unpack_dual(part).tangent, moved[1:])
            assert part.data_ptr() == x[1:].data_ptr()
    assert not opforge.stats()["fallbacks"]


def test_tangents_that_are_one_tensor_or_the_value() -> None:
    x, y, t = tensors((4, 5), (4, 5), (4, 5))
    compiled = torch.compile(lambda x, y: x * y + x, backend="opforge")
    for tangents in ({0: t, 1: t}, {0: x, 1: y}, {0: t}):
        with dual_level(), torch.no_grad():
            args = [make_dual(a, tangents[i]) if i in tangents else a for i, a in enumerate((x, y))]
            torch.testing.assert_close(pairs(compiled(*args)), pairs(args[0] * args[1] + args[0]))
    assert not opforge.stats()["fallbacks"]


def test_zeros_without_memory_as_a_tangent() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x * y + x

    x, y, t = tensors((4, 5), (4, 5), (4, 5))
    with dual_level(), torch.no_grad():
        zeros = torch._efficientzerotensor((4, 5))
        args = make_dual(x, zeros), make_dual(y, t)
        torch.testing.assert_close(pairs(torch.compile(f, backend="opforge")(*args)), pairs(f(*args)))
    assert not opforge.stats()["fallbacks"]


# --- which inputs move


@by_dynamo
def test_each_set_of_tangents_has_code_of_its_own() -> None:
    """Dynamo compiles once, and does not look at who has a tangent."""
    x, y, s, t = tensors((4, 5), (4, 5), (4, 5), (4, 5))
    compiled = torch.compile(pointwise, backend="opforge")
    with torch.no_grad():
        for _ in range(2):
            with dual_level():
                for moved in ({0: s}, {1: t}, {}, {0: s, 1: t}, {0: s}):
                    args = [make_dual(a, moved[i]) if i in moved else a for i, a in enumerate((x, y))]
                    torch.testing.assert_close(pairs(compiled(*args)), pairs(pointwise(*args)))
            torch.testing.assert_close(compiled(x, y), pointwise(x, y))
    assert opforge.stats()["graphs"] == 5, opforge.stats()
    assert not opforge.stats()["fallbacks"]


def test_parameters_with_tangents() -> None:
    def model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
        )

    def results(backend: str | None, dtype: torch.dtype) -> list[Tensor]:
        layers = model().to(dtype)
        call = layers if backend is None else torch.compile(layers, backend=backend)
        x, t, u = tensors((5, 6), (8, 6), (8,), dtype=dtype)
        weight, bias = layers[0].weight, layers[0].bias
        del layers[0].weight, layers[0].bias
        with dual_level():
            layers[0].weight, layers[0].bias = make_dual(weight, t), make_dual(bias, u)
            value, tangent = unpack_dual(call(x))
        (value.square().sum() + tangent.square().sum()).backward()
        gradients = [layers[3].weight.grad, layers[3].bias.grad, weight.grad, bias.grad]
        return [value.detach(), tangent.detach(), *gradients, layers[2].running_mean, layers[2].running_var]

    found = results("opforge", torch.float32)
    assert not opforge.stats()["fallbacks"]
    for ours, truth in zip(found, results(None, torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5 * float(truth.abs().max()))


def test_a_graph_that_nothing_guards() -> None:
    """Compiled outside of a level by `compile_fx`, and called inside of one."""
    x, y, t = tensors((4, 5), (4, 5), (4, 5))
    compiled = opforge.compile_fx(torch.fx.symbolic_trace(pointwise), [x, y])
    torch.testing.assert_close(compiled(x, y), pointwise(x, y))
    with dual_level():
        torch.testing.assert_close(pairs(compiled(make_dual(x, t), y)), pairs(pointwise(make_dual(x, t), y)))
        torch.testing.assert_close(compiled(x, y), pointwise(x, y))
    assert not opforge.stats()["fallbacks"]


def test_tangents_that_a_program_makes_itself() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        inner = make_dual(y, x.detach()).sin()
        return inner, unpack_dual(inner).tangent * x

    x, y, t = tensors((4, 5), (4, 5), (4, 5))
    with dual_level(), torch.no_grad():
        torch.testing.assert_close(pairs(torch.compile(f, backend="opforge")(x, y)), pairs(f(x, y)))
        args = make_dual(x, t), y
        torch.testing.assert_close(pairs(torch.compile(f, backend="opforge")(*args)), pairs(f(*args)))
    assert not opforge.stats()["fallbacks"]


def level_of_its_own(x: Tensor, t: Tensor) -> Any:
    with dual_level():
        return unpack_dual(make_dual(x, t).sin() * 2)


def two_levels(x: Tensor, t: Tensor) -> Any:
    with dual_level():
        first = unpack_dual(make_dual(x, t).sin()).tangent
    with dual_level():
        return first, unpack_dual(make_dual(first, t).cos()).tangent


def level_under_gradients(x: Tensor, t: Tensor) -> Any:
    with dual_level():
        value, tangent = unpack_dual((make_dual(x * x, t).sin() * x).sum(0))
    return value, tangent


@pytest.mark.parametrize("f", [level_of_its_own, two_levels, level_under_gradients])
def test_levels_that_a_program_enters_itself(f: Program) -> None:
    """The tangent of such a program was None: it was traced without forward-mode differentiation."""
    torch._dynamo.reset()
    x, t = tensors((4, 5), (4, 5))
    x.requires_grad_(f is level_under_gradients)
    compiled, eager = torch.compile(f, backend="opforge")(x, t), f(x, t)
    torch.testing.assert_close(tuple(compiled), tuple(eager))
    if f is level_under_gradients:
        ours, theirs = (torch.autograd.grad(v.sum() + d.square().sum(), x) for v, d in (compiled, eager))
        torch.testing.assert_close(ours, theirs)
    assert not opforge.stats()["fallbacks"]


# --- reverse mode too


@pytest.mark.parametrize("name", ["pointwise", "reductions", "parts", "layers", "norms"])
def test_gradients_of_values_and_tangents(name: str) -> None:
    """Reverse over forward, after the level has ended."""
    f, shapes = PROGRAMS[name]
    inputs, tangents = tensors(*shapes), tensors(*shapes, seed=1)

    def gradients(f: Program, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        with dual_level():
            out = f(*(make_dual(a, t.to(dtype)) for a, t in zip(leaves, tangents, strict=True)))
            results = [t for t in pairs(out) if t is not None and t.requires_grad]
        return list(torch.autograd.grad([t.square().sum() for t in results], leaves))

    found = gradients(torch.compile(f, backend="opforge"), torch.float32)
    assert not opforge.stats()["fallbacks"]
    assert opforge.stats()["kernels"] or not DYNAMO_TAKES_TANGENTS
    for ours, theirs, truth in zip(found, gradients(f, torch.float32), gradients(f, torch.float64), strict=True):
        judge(ours, theirs, truth)


@pytest.mark.parametrize("name", ["pointwise", "products", "layers", "norms", "loss"])
def test_gradients_inside_of_the_level_move(name: str) -> None:
    """Forward over reverse: a product with the Hessian. (The formulas of a batch norm's tangents hold its statistics for constants, so that
    the gradient of a tangent is another one than the tangent of a gradient: a first attempt was off by 3 of 3.4.)
    """
    f, shapes = PROGRAMS[name]
    inputs, tangents = tensors(*shapes), tensors(*shapes, seed=1)

    def gradients(f: Program, dtype: torch.dtype) -> list[Tensor | None]:
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        with dual_level():
            args = [make_dual(a, t.to(dtype)) for a, t in zip(leaves, tangents, strict=True)]
            loss = f(*args).sin().sum()
            return [t if t is None else t.clone() for t in pairs(torch.autograd.grad(loss, args))]

    found = gradients(torch.compile(f, backend="opforge"), torch.float32)
    # The forward is compiled, and the primal gradient.
    assert list(opforge.stats()["fallbacks"]) == ([SECOND_ORDER] if DYNAMO_TAKES_TANGENTS else [])
    for ours, theirs, truth in zip(found, gradients(f, torch.float32), gradients(f, torch.float64), strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), truth, rtol=1e-3, atol=2e-4)


def test_a_gradient_with_a_tangent_arrives_at_an_ordinary_backward() -> None:
    x, y, g, t = tensors((4, 5), (4, 5), (4, 5), (4, 5))
    x.requires_grad_()
    found = []
    for f in (pointwise, torch.compile(pointwise, backend="opforge")):
        out = f(x, y)
        with dual_level():
            found.append(pairs(torch.autograd.grad(out, [x], make_dual(g, t), retain_graph=True)))
            found[-1] += pairs(torch.autograd.grad(out, [x], g))
    torch.testing.assert_close(found[1], found[0])
    assert not opforge.stats()["fallbacks"]


def test_tangents_that_require_grad() -> None:
    x, y, t = tensors((4, 5), (4, 5), (4, 5))
    t.requires_grad_()
    found = []
    for f in (pointwise, torch.compile(pointwise, backend="opforge")):
        with dual_level():
            value, tangent = unpack_dual(f(make_dual(x, t), y))
        found.append([value, tangent, *torch.autograd.grad(tangent.square().sum(), [t])])
    torch.testing.assert_close(found[1], found[0])
    assert not opforge.stats()["fallbacks"]


# --- what eager refuses, and mixed precision


def test_an_operator_without_a_forward_formula() -> None:
    x, y, t = tensors((4, 4), (3, 4), (4, 4))
    with dual_level(), pytest.raises(NotImplementedError, match="forward AD with _cdist_forward"):
        torch.compile(torch.cdist, backend="opforge")(make_dual(x, t), y)


def test_a_custom_function_without_jvp() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    x, t = tensors((4,), (4,))
    with dual_level(), pytest.raises(NotImplementedError, match="must implement the jvp function"):
        torch.compile(lambda x: Twice.apply(x) + 1, backend="opforge")(make_dual(x.requires_grad_(), t))


def test_autocast() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ y.t()).sin()

    same(f, tensors((4, 5), (4, 5)), (0,))


@by_dynamo
def test_a_random_program_with_gradients_is_left_to_eager() -> None:
    """It cannot be run once more for how its gradients move."""
    x, t = tensors((64,), (64,))
    with dual_level():
        out = torch.compile(lambda x: F.dropout(x, 0.5) * 2, backend="opforge")(make_dual(x.requires_grad_(), t))
        value, tangent = unpack_dual(out)
    torch.testing.assert_close(tangent, torch.where(value == 0, 0, 4 * t))
    assert "draws random numbers" in next(iter(opforge.stats()["fallbacks"]))


@pytest.mark.parametrize("name", ["jvp of grad", "hessian"])
def test_levels_that_a_graph_enters_are_left_where_it_runs_eagerly(name: str) -> None:
    """Tracing ends between a graph's own calls that enter a level and leave it: a level that stayed made every later one raise."""
    w, x = torch.randn(5, requires_grad=True), torch.randn(5)

    def cubes(z: torch.Tensor) -> torch.Tensor:
        return ((z * w) ** 3).sum()

    def program(z: torch.Tensor) -> torch.Tensor:
        return (
            torch.func.hessian(cubes)(z) if name == "hessian" else torch.func.jvp(torch.func.grad(cubes), (z,), (z,))[1]
        )

    torch._dynamo.reset()
    opforge.reset_stats()
    want = program(x)
    for _ in range(2):
        torch.testing.assert_close(torch.compile(program, backend="opforge")(x), want)
    torch.testing.assert_close(program(x), want)
    (reason,) = opforge.stats()["fallbacks"]
    assert "a gradient by torch.func" in reason
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(dual * 2).tangent, 2 * x)
