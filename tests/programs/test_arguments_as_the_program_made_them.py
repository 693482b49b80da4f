"""Calls of eager kernels get their arguments with the strides that the program gave them, unless the operator's entry says that any will do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import opforge

SEEN: list[tuple[int, ...]] = []

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(memory_format=torch.contiguous_format),
    "contiguous of a slice": lambda x: x[:, :2].contiguous(),
    "transpose": lambda x: x.t(),
    "slice": lambda x: x[1:, 1:3],
    "contiguous of a transposed value": lambda x: (x * 2).t().contiguous(),
    "transpose of a value": lambda x: (x * 2).t(),
    "contiguous permutation": lambda x: x.reshape(2, 2, 3).permute(2, 0, 1).contiguous(),
    "reshape of a transpose": lambda x: x.t().reshape(2, -1),
    "a column": lambda x: x[:, :1],
    "a row, transposed": lambda x: x[1:2].t(),
    "a contiguous column": lambda x: x[:, 1:2].contiguous(),
    "a dimension of size 1": lambda x: x.t().unsqueeze(1),
    "channels last": lambda x: x.reshape(1, 2, 2, 3).contiguous(memory_format=torch.channels_last),
    "clone that keeps the layout": lambda x: x.clone(),
    "a column of a value": lambda x: (x * 2)[:, 1],
    "a diagonal of a value": lambda x: (x * 2).diagonal(),
    "every other row of a value": lambda x: (x * 2)[::2, 1:3],
    "a value, expanded": lambda x: (x * 2)[:, :1].expand(-1, 3),
    "memory with gaps": lambda x: torch.empty_strided((3, 2), (8, 3)).copy_(x[:, :2]),
    "parts of complex values": lambda x: torch.complex(x, x + 1).imag,
}


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "repeated rows": lambda x: (x[0] * 2).expand(3, 4),
    "repeated columns": lambda x: (x * 2)[:, 1:2].expand(3, 4),
    "a repeated number": lambda x: x.amax().expand(3, 4),
    "repeated sums": lambda x: x.amax(0).expand(2, 3, 4),
    "a repeated constant": lambda x: x.new_ones(1).expand(3, 4),
    "a repeated choice": lambda x: torch.where(x > 5, 1.0, 0.0)[2].expand(2, 4),
    "every other column": lambda x: (x * 2)[:, ::2],
    "inside of a border": lambda x: torch.nn.functional.pad(x, (1, 1))[:, 1:-1],
    "every other row of two": lambda x: torch.cat([x, x])[::2],
    "windows that overlap": lambda x: (x[0] * 2).unfold(0, 3, 1),
    "rows that overlap": lambda x: (x[0] * 2).as_strided((3, 2), (1, 1)),
    "a dimension of size 1 that repeats": lambda x: (x[0] * 2).as_strided((1, 4), (0, 1)),
    "a dimension of size 1 with an odd stride": lambda x: (x[0] * 2).as_strided((1, 4), (7, 1)),
    "a copy of that": lambda x: x[0].as_strided((1, 4), (7, 1)).clone(),
}
"""Views of values that the program computes: they have no memory yet in which their strides could be expressed."""


@torch.library.custom_op("opforge_strides::in_order", mutates_args=())
def in_order(x: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory."""
    SEEN.append(x.stride())
    return x.as_strided((x.numel(),), (1,)).clone() if dense(x) else x.flatten().clone()


@in_order.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.numel())


def dense(x: Tensor) -> bool:
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return reach == x.numel() and 0 not in x.stride()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    SEEN.clear()
    KEPT.clear()


def check(program: Callable[[Tensor], Tensor], x: Tensor, dynamic: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return in_order(program(x)) + 1

    want, strides = f(x), list(SEEN)
    SEEN.clear()
    got = torch.compile(f, backend="opforge", fullgraph=True, dynamic=dynamic)(x)
    assert strides == SEEN
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_a_custom_operator_sees_the_strides_that_eager_has(name: str, turned: bool) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    check(PROGRAMS[name], x.t().contiguous().t() if turned else x, dynamic=False)


def test_an_operator_of_a_complex_column() -> None:
    @torch.library.custom_op("opforge_strides::real_of", mutates_args=())
    def real_of(z: Tensor) -> Tensor:
        SEEN.append(z.stride())
        return z.real.clone()

    @real_of.register_fake
    def _(z: Tensor) -> Tensor:
        return z.new_empty(z.shape, dtype=torch.float32)

    def f(x: Tensor) -> Tensor:
        return real_of(torch.complex(x, x + 1)[:, 2]) * 2

    x = torch.arange(12.0).reshape(3, 4)
    want = f(x)
    torch.testing.assert_close(torch.compile(f, backend="opforge", fullgraph=True)(x), want, rtol=0, atol=0)
    assert SEEN == [(4,), (4,)]


@pytest.mark.parametrize(
    "name",
    [
        "contiguous",
        "contiguous of a slice",
        "transpose",
        "contiguous of a transposed value",
        "a column of a value",
        "a diagonal of a value",
        "a value, expanded",
        "every other row of a value",
    ],
)
def test_the_same_where_sizes_are_symbols(name: str) -> None:
    check(PROGRAMS[name], torch.arange(12.0).reshape(4, 3).t(), dynamic=True)


@pytest.mark.parametrize("name", VALUES)
def test_views_of_computed_values_have_their_strides(name: str) -> None:
    """They were packed."""
    check(VALUES[name], torch.arange(12.0).reshape(3, 4), dynamic=False)


@pytest.mark.parametrize("name", ["repeated rows", "every other column", "inside of a border"])
def test_views_of_computed_values_of_symbolic_sizes(name: str) -> None:
    program = VALUES[name] if name != "repeated rows" else lambda x: (x[0] * 2).expand(3, x.shape[1])
    check(program, torch.arange(12.0).reshape(3, 4), dynamic=True)


def test_a_repeated_value_is_read_by_others_too() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x[0] * 2).expand(3, 4)
        return in_order(y), y + x

    x = torch.arange(12.0).reshape(3, 4)
    want, strides = f(x), list(SEEN)
    SEEN.clear()
    got = torch.compile(f, backend="opforge", fullgraph=True)(x)
    assert strides == SEEN
    torch.testing.assert_close(got, want, rtol=0, atol=0)


KEPT: list[Tensor] = []


@torch.library.custom_op("opforge_strides::kept", mutates_args=())
def kept(x: Tensor) -> Tensor:
    KEPT.append(x)
    return x * 2


@kept.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("opforge_strides::kept_beside", mutates_args={"total"})
def kept_beside(x: Tensor, total: Tensor) -> None:
    KEPT.append(x)
    total.add_(x)


def chained(x: Tensor) -> Tensor:
    y = kept(x + 1)
    return kept((y + 3).relu().t() @ x + x.sum()) + 1


def beside_a_write(x: Tensor) -> Tensor:
    total = x * 2
    kept_beside(x + 1, total)
    return kept(total.sin().t())[1:] + x.t()[1:]


def viewed(x: Tensor) -> Tensor:
    y = x + 1
    return kept(y[1:, :2]).sum() + kept(y.t()).cos() + (y * 3).exp()


def under_a_condition(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1e9, torch.sin, lambda t: kept(t) + 1, (x + 1,)).exp() + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [chained, beside_a_write, viewed, under_a_condition])
def test_an_operator_keeps_its_argument(program: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    """It kept a part of the arena, where later values and those of the next call came to lie. Nor did its storage begin where eager's does."""
    opforge.reset_stats()
    compiled = torch.compile(program, backend="opforge", fullgraph=True, dynamic=dynamic)
    inputs = [torch.randn(6, 6, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    seen: list[list[Tensor]] = []
    for f in (program, compiled):
        KEPT.clear()
        results = [f(x) for x in inputs]
        seen.append([*results, *KEPT])
    torch.testing.assert_close(seen[1], seen[0])
    eager, ours = ([t.storage_offset() for t in part[len(inputs) :]] for part in seen)
    assert ours == eager
    assert not opforge.stats()["fallbacks"]


def test_a_view_and_its_copy_are_two_arguments() -> None:
    def f(x: Tensor) -> Tensor:
        return in_order(x.t()) + 10 * in_order(x.t().contiguous())

    x = torch.arange(12.0).reshape(3, 4)
    want = f(x)
    torch.testing.assert_close(torch.compile(f, backend="opforge", fullgraph=True)(x), want, rtol=0, atol=0)
    assert SEEN[:2] == SEEN[2:]


def test_an_lstm_of_batches_first() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(8, 16, num_layers=2, batch_first=True).eval()
    x = torch.randn(4, 7, 8)
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        got, (h, c) = torch.compile(model, backend="opforge")(x)
        want, (wanted_h, wanted_c) = model(x)
    for a, b in ((got, want), (h, wanted_h), (c, wanted_c)):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("given", ["rows", "channels_last"])
def test_a_convolution_of_a_copy(given: str) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 32, 3).eval()
    x = torch.randn(2, 32, 32, 16).permute(0, 3, 1, 2)

    def f(x: Tensor) -> Tensor:
        return conv(x.contiguous() if given == "rows" else x)

    with torch.no_grad():
        got, want = torch.compile(f, backend="opforge", fullgraph=True)(x), f(x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_gradient_that_repeats_one_number_is_returned_too(dynamic: bool) -> None:
    """It had memory of its own then, in which no elements repeat: the backward ran eagerly."""

    def f(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return (nn.functional.conv1d(x, w) + y).sum()

    torch._dynamo.reset()
    opforge.reset_stats()
    compiled = torch.compile(f, backend="opforge", fullgraph=True, dynamic=dynamic)
    given = [torch.randn(s, requires_grad=True) for s in ((2, 60, 14), (30, 60, 3), (2, 30, 12))]
    torch.testing.assert_close(*(torch.autograd.grad(g(*given), given) for g in (compiled, f)), rtol=1e-4, atol=1e-4)
    assert not opforge.stats()["fallbacks"]


def test_a_view_that_an_operator_takes_is_returned_twice() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.cat([x, x])[::2]
        z = (x[0] * 2).expand(3, 4)
        return in_order(y) + in_order(z), y.clone(), z.clone()

    x = torch.arange(6.0).reshape(3, 2).repeat(1, 2)
    want = f(x)
    torch.testing.assert_close(torch.compile(f, backend="opforge", fullgraph=True)(x), want, rtol=0, atol=0)
    assert SEEN[:2] == SEEN[2:]
