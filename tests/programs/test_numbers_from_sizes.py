"""Numbers that a program, or an operator, computes of sizes that are symbols: no reason to leave the graph, or an operator, to eager."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import opforge


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


ROWS = (drawn(4, 3), drawn(6, 3), drawn(2, 3), drawn(31, 3))
IMAGES = (drawn(1, 2, 5, 6), drawn(2, 2, 7, 8), drawn(3, 2, 4, 4))
PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor] | nn.Module, tuple[Tensor, ...]]] = {
    "root": (lambda x: x.mean() * x.shape[0] ** 0.5, ROWS),
    "quotients": (lambda x: x / x.shape[0] ** -0.5 + x.shape[0] / 3, ROWS),
    "std": (lambda x: x.std(0), ROWS),
    "variance of all": (lambda x: x.var(), ROWS),
    "half a correction": (lambda x: x.var(0, correction=0.5), ROWS),
    "less than none": (lambda x: x.var(0, correction=-1), ROWS),
    "too many": (lambda x: x.var(0, correction=5), ROWS),
    "smoothed labels": (lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long), label_smoothing=0.1), ROWS),
    "batch norm": (nn.BatchNorm1d(3), ROWS),
    "batch norm of images": (nn.BatchNorm2d(2), IMAGES),
    "instance norm": (nn.InstanceNorm2d(2, track_running_stats=True), IMAGES),
    "reflected": (nn.ReflectionPad2d(1), IMAGES),
    "repeated": (nn.ReplicationPad2d(1), IMAGES),
    "around": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), IMAGES),
    "far around": (nn.CircularPad2d((1, 3, 2, 0)), IMAGES),
    "at least one": (lambda x: x * (x.shape[0] / max(x.shape[0] - 2, 1)), ROWS),
    "nearest": (nn.Upsample(scale_factor=2.0), IMAGES),
    "between": (lambda x: F.interpolate(x, size=(x.shape[2] * 2, 9), mode="bilinear"), IMAGES),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sizes_that_change(name: str, dynamic: bool | None, dtype: torch.dtype) -> None:
    """Results, gradients and running statistics for each size."""
    torch._dynamo.reset()
    opforge.reset_stats()
    made, inputs = PROGRAMS[name]
    program: Any = copy.deepcopy(made).to(dtype) if isinstance(made, nn.Module) else made
    own = copy.deepcopy(program)
    compiled = torch.compile(own, backend="opforge", dynamic=dynamic, fullgraph=True)
    for x in inputs:
        ours, eager = (x.to(dtype).clone().requires_grad_() for _ in range(2))
        found, expected = compiled(ours), program(eager)
        torch.testing.assert_close(found, expected, equal_nan=True)
        for y, leaf in (found, ours), (expected, eager):
            weights = torch.linspace(-1, 1, y.numel(), dtype=dtype).reshape(y.shape)
            (y * weights).sum().backward()
            assert leaf.grad is not None
        torch.testing.assert_close(ours.grad, eager.grad, equal_nan=True)
    if isinstance(program, nn.Module):
        torch.testing.assert_close(own.state_dict(), program.state_dict())
    stats = opforge.stats()
    assert stats["fallbacks"] == {}
    assert [reason for reason in stats["reasons"] if "fails with" in reason] == []


@pytest.mark.parametrize("distance", [1, 3])
def test_a_write_beside_what_is_read(distance: int) -> None:
    """Two halves of a row share no element, whatever its size; what is moved by less than its own size does."""

    def halves(x: Tensor) -> Tensor:
        y = x * 2
        n = y.shape[1] // 2
        y[:, :n] = y[:, n : 2 * n]
        return y

    def moved(x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape[0], x.shape[1] + distance)
        y[:, distance:] = x
        y[:, :-distance].copy_(y[:, distance:])
        return y

    for program, apart in (halves, True), (moved, False):
        torch._dynamo.reset()
        opforge.reset_stats()
        compiled = torch.compile(program, backend="opforge", dynamic=True)
        with torch.no_grad():
            for n in (8, 11, 4):
                x = drawn(3, n)
                assert torch.equal(compiled(x), program(x))
        reasons = list(opforge.stats()["fallbacks"])
        assert bool(reasons) is not apart
        assert apart or "writes elements that it also reads" in reasons[0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("factor", [0.5, 0.9, 1.2, 1.3, 1.5, 2.0, 2.1])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_sizes_that_a_factor_leaves_alone(mode: str, factor: float, dynamic: bool) -> None:
    """Eager's kernels for a processor copy where sizes are equal, and halve positions where one is twice the other, whatever the factor is."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: F.interpolate(x, scale_factor=factor, mode=mode), backend="opforge", dynamic=dynamic
    )
    for n in (3, 4, 5, 7, 10):
        ours, eager = (drawn(2, 3, n).requires_grad_() for _ in range(2))
        found, expected = compiled(ours), F.interpolate(eager, scale_factor=factor, mode=mode)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for y, leaf in (found, ours), (expected, eager):
            (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
            assert leaf.grad is not None
        torch.testing.assert_close(ours.grad, eager.grad)


@pytest.mark.parametrize(
    ("program", "compiled_for_all"),
    [
        (lambda x: F.interpolate(x, None, 1.5), False),
        (lambda x: F.interpolate(x, scale_factor=(1.5,), mode="linear"), False),
        (lambda x: F.upsample(x, scale_factor=1.5, mode="linear"), False),
        (lambda x: F.upsample_nearest(x, scale_factor=1.5), False),
        (lambda x: F.interpolate(x, scale_factor=(0.5,), mode="linear"), True),
        (lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"), True),
        (lambda x: F.interpolate(x, scale_factor=1.5, recompute_scale_factor=True), True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*upsample")
def test_factors_with_sizes_that_change(program: Callable[[Tensor], Tensor], compiled_for_all: bool) -> None:
    """The eager kernels treat sizes that are equal, and those that are twice as large, in a way of their own: torch's decomposition for symbolic
    sizes does not, so a factor that may lead there leaves the graph to eager.
    """
    torch._dynamo.reset()
    opforge.reset_stats()
    compiled = torch.compile(program, backend="opforge", dynamic=True)
    for n in (4, 5, 7):
        torch.testing.assert_close(compiled(drawn(2, 3, n)), program(drawn(2, 3, n)))
    reasons = list(opforge.stats()["fallbacks"])
    assert bool(reasons) is not compiled_for_all
    assert compiled_for_all or "torch's decomposition for symbolic sizes does not" in reasons[0]


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "scale of attention": lambda x: torch.softmax(x @ x.mT / math.sqrt(x.size(-1) * x.size(0)), -1) @ x,
    "functions of math": lambda x: x * math.cos(x.shape[0]) + math.tanh(x.shape[0] / 7) - math.log2(x.shape[0]),
    "rounded": lambda x: x.sin() * round(x.shape[0] * 0.5, 2),
    "rounded to an integer": lambda x: (x.long() * round(x.shape[0] * 0.7), x * math.floor(x.shape[0] / 3)),
    "least of floats": lambda x: x * min(1.0, x.shape[0] / 5) + max(0.25, 1 / x.shape[0]),
    "comparison of a size": lambda x: (x * (x.shape[0] > 5), x.long() + (x.shape[0] > 5)),
    "comparison of a float": lambda x: x + (math.sqrt(x.shape[0]) >= 2.3),
    "filled by a comparison": lambda x: torch.full((x.shape[0],), x.shape[0] >= 5),
    "a comparison as a float": lambda x: x + float(x.shape[0] > 1) * float(x.shape[0] > 100),
    "a bool by a factor": lambda x: torch.add(x.long(), x.shape[0] > 5, alpha=2),
    "powers": lambda x: x * 0.9 ** x.shape[0] + x.shape[0] ** 0.25,
    "a comparison with a comparison": lambda x: x * ((x.shape[0] / 4) > (x.shape[0] <= 5)) + ((x.shape[0] > 9) < x.shape[0] / 40),
    "the larger of a float and a comparison": lambda x: x * max(x.shape[0] / 10, x.shape[0] == 6),
    "a chosen comparison": lambda x: x * max(math.tanh(x.shape[0] / 40), (x.shape[0] > 5) > x.shape[0] / 20),
    "a chosen comparison for an eager kernel": lambda x: x.clamp(max=max(math.tanh(x.shape[0] / 40), (x.shape[0] > 5) > x.shape[0] / 20)),
    "bits": lambda x: x * (x.shape[0] & 5) + (x.shape[0] | 3) - (x.shape[0] ^ x.shape[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_number_of_a_size_is_a_value(name: str) -> None:
    """Values and dtypes as eager has them, in one graph for all sizes."""
    torch._dynamo.reset()
    opforge.reset_stats()
    program = VALUES[name]
    compiled = torch.compile(program, backend="opforge", dynamic=True, fullgraph=True)
    for x in ROWS[:2] + ROWS[3:]:
        torch.testing.assert_close(compiled(x), program(x))
    assert opforge.stats()["fallbacks"] == {}
    assert opforge.stats()["graphs"] == 1


def test_a_number_of_a_size_in_a_training_step() -> None:
    """The backward has the scale, and the bool, of its forward."""
    torch._dynamo.reset()
    opforge.reset_stats()

    def program(x: Tensor) -> Tensor:
        return (x.sin() / math.sqrt(x.shape[0])).cos() * (x.shape[0] > 5)

    compiled = torch.compile(program, backend="opforge", dynamic=True, fullgraph=True)
    for x in ROWS:
        ours, eager = (x.clone().requires_grad_() for _ in range(2))
        found, expected = compiled(ours), program(eager)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(ours.grad, eager.grad)
    assert opforge.stats()["fallbacks"] == {}


def test_a_counter_of_steps_is_a_value() -> None:
    """A schedule in Python: what it makes of its counter is a number of the graph."""
    torch._dynamo.reset()
    opforge.reset_stats()

    def update(w: Tensor, step: int) -> Tensor:
        rate = 0.5 * (1 + math.cos(math.pi * step / 100)) * 0.9**step * min(1.0, step / 4)
        return w - rate * w.cos()

    compiled = torch.compile(update, backend="opforge", fullgraph=True)
    w = drawn(8, 3)
    for step in range(1, 8):
        torch.testing.assert_close(compiled(w, step), update(w, step))
    assert opforge.stats()["fallbacks"] == {}
    assert opforge.stats()["graphs"] <= 3


OF_ITEMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an integer": lambda x, t: (x * int(t.item()), x.long() + round(t.item())),
    "absolute value": lambda x, t: x * abs(t.item()) + math.sqrt(abs(t.item())),
    "greatest": lambda x, t: x * max(t.item(), 1.0) + min(t.item(), 2),
    "comparison": lambda x, t: x * (t.item() > 2),
    "sizes": lambda x, t: (torch.zeros(int(abs(t.item())), 3) + x[0], torch.ones(int(t.item() ** 2)).sum()),
    "up to an item": lambda x, t: torch.arange(t.long().abs().item()) * x.sum(),
    "remainder": lambda x, t: x * (t.item() % 3) + t.long().item() % 2,
}


@pytest.mark.parametrize("name", OF_ITEMS)
def test_a_number_of_an_item_is_a_value(name: str) -> None:
    """One graph, whatever the tensor has. `int` of an item let an error out of Dynamo; the others ran eagerly."""
    torch._dynamo.reset()
    opforge.reset_stats()
    program, x = OF_ITEMS[name], drawn(4, 3)
    compiled = torch.compile(program, backend="opforge", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for value in (3.5, 2.25, -7.0, 0.0):
            torch.testing.assert_close(compiled(x, torch.tensor(value)), program(x, torch.tensor(value)))
    assert opforge.stats()["fallbacks"] == {}


RAISING: dict[str, tuple[Callable[[Tensor, Any], Tensor], tuple[Any, ...]]] = {
    "quotient of a float": (lambda x, a: x * (1 / a), (1.5, 2.5, 0.0, 4.0)),
    "quotient of a counter": (lambda x, n: x * (1 / (n - 5)), (2, 3, 5, 7)),
    "remainder of a counter": (lambda x, n: x * (7 % (n - 5)), (2, 3, 5, 7)),
    "quotient of integers": (lambda x, n: x.long() * (7 // (n - 5)), (2, 3, 5, 7)),
    "power": (lambda x, n: x * 10.0**n, (7, 8, 400, 9)),
    "root": (lambda x, a: x * math.sqrt(a), (1.5, 2.5, -1.0, 3.5)),
    "logarithm": (lambda x, n: x * math.log2(n - 5), (8, 7, 5, 9)),
    "large product": (lambda x, n: x.long() * (n * n), (2, 3, 10**10, 5)),
    "large integer": (lambda x, a: x.long() * int(a), (1.5, 2.5, 1e30, 1e19, 4.5)),
}


@pytest.mark.parametrize("name", RAISING)
def test_numbers_that_python_refuses(name: str) -> None:
    """Kernels went on with an infinity or with the low bits of a large integer; a remainder by 0 ended the process."""
    torch._dynamo.reset()
    program, numbers = RAISING[name]
    compiled = torch.compile(program, backend="opforge")
    x = drawn(4, 3)
    for n in numbers:
        try:
            expected = program(x, n)
        except (ArithmeticError, ValueError) as error:
            with pytest.raises(type(error)):
                compiled(x, n)
        else:
            torch.testing.assert_close(compiled(x, n), expected)


def test_a_size_times_a_large_integer() -> None:
    """Kernels computed with its low 64 bits."""
    torch._dynamo.reset()
    divided = torch.compile(lambda x: x * (x.shape[0] * 10**17 / 3), backend="opforge", dynamic=True)
    whole = torch.compile(lambda x: x * (x.shape[0] * -(10**17)), backend="opforge", dynamic=True)
    for n in (60, 300):
        x = torch.ones(n, dtype=torch.float64)
        torch.testing.assert_close(divided(x), x * (n * 10**17 / 3))
    torch.testing.assert_close(whole(x[:60]), x[:60] * -6e18)
    with pytest.raises(OverflowError):
        whole(x)


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as a float": lambda x: x * float(x.shape[0] ** 2 * 10**8),
    "divided": lambda x: x * (x.shape[0] ** 2 * 10**8 / 7),
    "beside a float": lambda x: x * (x.shape[0] ** 2 * 10**8 + 0.5),
    "its root": lambda x: x * math.sqrt(x.shape[0] ** 2 * 10**8),
    "of a sum": lambda x: x / float((x.shape[0] + 3) * (x.shape[0] - 7) * 10**8),
}


@pytest.mark.usefixtures("fresh_stats")
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_sizes_that_becomes_a_float(name: str) -> None:
    """Kernels computed it with 64 bits; Python has no such limit."""
    torch._dynamo.reset()
    compiled = torch.compile(PRODUCTS[name], backend="opforge", dynamic=True)
    for n in (8, 60, 400_000, 480_000):
        x = torch.ones(n, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), PRODUCTS[name](x), rtol=0, atol=0)
    assert opforge.stats()["fallbacks"] == {}


def test_an_item_that_python_refuses() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        divided = torch.compile(lambda x, t: x * (1 / t.item()), backend="opforge")
        whole = torch.compile(lambda x, t: x * int(t.item()), backend="opforge")
        x = drawn(4, 3)
        torch.testing.assert_close(divided(x, torch.tensor(4.0)), x * 0.25)
        with pytest.raises(ZeroDivisionError):
            divided(x, torch.tensor(0.0))
        torch.testing.assert_close(whole(x, torch.tensor(4.75)), x * 4)
        with pytest.raises(RuntimeError, match="too large for an integer of 64 bits"):
            whole(x, torch.tensor(1e30))


def torch_of(name: str) -> Any:
    """A function of torch that takes numbers in the place of tensors, which its signature does not say."""
    return getattr(torch, name)


OF_NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "floor of a quotient": lambda x: x * torch_of("div")(-7, 2, rounding_mode="floor"),
    "truncated quotient": lambda x: x * torch_of("div")(-7, 2, rounding_mode="trunc"),
    "quotients": lambda x: (x * torch_of("true_divide")(7, 2), torch_of("div")(7, 4) + x, torch_of("floor_divide")(-7, 2) - x),
    "sums and products": lambda x: (x * torch_of("add")(3, 1), x + torch_of("mul")(2, 3.0), x - torch_of("sub")(3, 0), x * torch_of("mul")(5, 1)),
    "a number and a tensor": lambda x: (torch_of("mul")(1, x.long()), torch_of("add")(0, x.half()), torch_of("div")(1, x), torch_of("sub")(2, x)),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_an_operator_takes_numbers_for_tensors(name: str) -> None:
    """Rewrites ask about tensors: a number in the place of one was an internal error."""
    torch._dynamo.reset()
    opforge.reset_stats()
    program, x = OF_NUMBERS[name], drawn(5, 3)
    torch.testing.assert_close(torch.compile(program, backend="opforge", fullgraph=True)(x), program(x))
    assert opforge.stats()["fallbacks"] == {}


COUNTERS: dict[str, tuple[Callable[[Tensor, int], Tensor], int]] = {
    "exp": (lambda x, step: x * math.exp(-step / 10), 4),
    "log": (lambda x, step: x * math.log(step + 1), 4),
    "a power of e": (lambda x, step: x * math.e ** (-step / 10), 1),
    "log2": (lambda x, step: x * (math.log2(step + 1) * math.log(2)), 1),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_functions_of_a_counter_that_dynamo_takes_for_constants(name: str) -> None:
    """`math.exp` and `math.log` get numbers, so that each value has a graph; what says the same has one."""
    torch._dynamo.reset()
    opforge.reset_stats()
    program, graphs = COUNTERS[name]
    compiled = torch.compile(program, backend="opforge", dynamic=True, fullgraph=True)
    for step in (3, 5, 8, 13):
        torch.testing.assert_close(compiled(ROWS[0], step), program(ROWS[0], step))
    assert (opforge.stats()["graphs"], opforge.stats()["fallbacks"]) == (graphs, {})


@pytest.mark.parametrize("exponent", [0.5, -0.5, 1 / 3])
def test_a_fractional_power_of_a_number_that_may_be_negative(exponent: float) -> None:
    """It is a complex number then: torch refuses it while tracing, whatever the backend, and a graph of positive ones guards its sign."""

    def program(x: Tensor) -> Tensor:
        return x * (x.shape[0] - 6) ** exponent

    def outcome(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        try:
            return f(x)
        except RuntimeError as error:
            return type(error)

    torch._dynamo.reset()
    opforge.reset_stats()
    ours, eager = (torch.compile(program, backend=backend, dynamic=True) for backend in ("opforge", "eager"))
    whole = opforge.aot_function(program, opforge.aot.nop, dynamic=True)
    for n in (9, 8, 5, 4, 12):
        x = drawn(n)
        found, expected = outcome(ours, x), outcome(eager, x)
        assert type(found) is type(expected)
        if isinstance(expected, Tensor):
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(expected, program(x))
        else:
            assert found is expected
    assert (opforge.stats()["graphs"], opforge.stats()["fallbacks"]) == (1, {})
    for n in (5, 9, 4):
        torch.testing.assert_close(whole(drawn(n)), program(drawn(n)))
    assert all("while tracing" in reason for reason in opforge.stats()["fallbacks"])


def test_a_whole_power_of_a_number_that_may_be_negative() -> None:
    """Torch's bounds of such a power recursed without end."""
    torch._dynamo.reset()
    opforge.reset_stats()

    def program(x: Tensor) -> Tensor:
        return x * (3 - x.shape[0]) ** x.shape[0]

    compiled = torch.compile(program, backend="opforge", dynamic=True, fullgraph=True)
    for n in (9, 8, 5, 4, 3, 12):
        torch.testing.assert_close(compiled(drawn(n)), program(drawn(n)))
    stats = opforge.stats()
    assert (stats["graphs"], stats["fallbacks"], stats["externs"]) == (1, {}, {})


def test_numbers_and_sums_of_sizes_in_one_kernel() -> None:
    """A kernel's own names for sums of sizes are none of its arguments: a number made of sizes was called `size1` as one of them was, and the
    graph did not compile (fuzzer, seed 7300002).
    """

    def program(x: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        halves = torch.cat([x.sin(), x[: n // 2] * (n // 2), x[1:]])
        return halves.clamp(-abs(n + n), abs(n**0.5 + math.tanh(n / 10))) * (math.cos(n) > n // 2)

    compiled = torch.compile(program, backend="opforge", dynamic=True)
    for n in (9, 12):
        x = torch.linspace(-3, 3, n)
        torch.testing.assert_close(compiled(x), program(x))
    assert not opforge.stats()["fallbacks"]
