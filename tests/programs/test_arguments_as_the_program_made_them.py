"""Calls of eager kernels get their arguments with the strides that the program gave them, unless the operator's entry says that any will do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

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
    ],
)
def test_the_same_where_sizes_are_symbols(name: str) -> None:
    check(PROGRAMS[name], torch.arange(12.0).reshape(4, 3).t(), dynamic=True)


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
