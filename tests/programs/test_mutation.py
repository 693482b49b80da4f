"""Programs that write to inputs and return aliases, under no_grad: the functional graph in its wrapper does what eager does.

Each program runs twice from fresh inputs; everything a caller can see is compared (tests/support/aliasing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from opforge.runtime.dispatch.trace import trace
from opforge.runtime.dispatch.wrapper.source import bind
from tests.support.aliasing import iota, same_effect, through_dispatch

Program = Callable[..., Any]
CASES: dict[str, tuple[Program, Callable[[], list[Any]]]] = {}


def case(*inputs: Callable[[], Any]) -> Callable[[Program], Program]:
    """Register a program with makers of its inputs (each maker gives one input, or a list of inputs that share storage)."""

    def register(program: Program) -> Program:
        def make() -> list[Any]:
            made: list[Any] = []
            for maker in inputs:
                value = maker()
                made += value if isinstance(value, list) else [value]
            return made

        CASES[program.__name__] = (program, make)
        return program

    return register


def matrix() -> torch.Tensor:
    return iota(3, 4)


def square() -> torch.Tensor:
    return iota(4, 4)


def row() -> torch.Tensor:
    return iota(4)


def transposed() -> torch.Tensor:
    return iota(4, 3).t()


def sliced() -> torch.Tensor:
    return iota(6, 8)[1:4, 2:6]


def halves() -> list[torch.Tensor]:
    base = iota(12)
    return [base[:8], base[4:]]


def columns() -> list[torch.Tensor]:
    base = iota(4, 6)
    return [base[:, :3], base[:, 3:]]


def twice() -> list[torch.Tensor]:
    x = square()
    return [x, x]


def as_ints() -> list[torch.Tensor]:
    x = square()
    return [x, x.view(torch.int32)]


def as_shorts() -> list[torch.Tensor]:
    x = iota(8)
    return [x[2:], x.view(torch.int16)[6:10]]


# --- writes


@case(matrix)
def write_input(x):
    return x.add_(1)


@case(transposed)
def write_transposed(x):
    x.mul_(2)
    return x.sum(0)


@case(sliced)
def write_with_gaps(x):
    x.mul_(2)
    return x.t(), x + 1


@case(matrix)
def write_row(x):
    x[1].add_(1)
    return x * 2


@case(matrix)
def write_chain_of_views(x):
    x.t()[1:3].unsqueeze(0)[0, 0].fill_(7.0)
    return x


@case(square)
def write_block_and_diagonal(x):
    x[1:3, ::2] = 5
    x.diagonal().mul_(3)
    x.view(-1)[5] = -1
    return x.clone()


@case(square)
def write_parts(x):
    a, b = x.chunk(2)
    a.add_(1)
    b.mul_(2)
    first, *_ = x.unbind(1)
    first.zero_()
    return x.sum()


@case(square)
def write_uneven_parts(x):
    a, b = x.split([1, 3], dim=1)
    b.add_(a)
    return a, x


@case(square)
def read_alias_after_write(x):
    top, flat = x[0], x.view(-1)
    x.add_(10)
    flat[1] = 0
    return top * 1, flat + 1


@case(square)
def write_twice_through_one_view(x):
    v = x[:, 1]
    v.add_(1)
    v.mul_(2)
    x[0].add_(1)
    v.add_(1)
    return v + 0


@case(square)
def write_through_dtype_view(x):
    x.view(torch.int32).add_(1)
    return x + 0


@case(square)
def write_through_as_strided(x):
    x.as_strided((2, 2), (1, 4), 5).add_(1)
    return x.as_strided((3,), (5,))


@case(square, row)
def write_with_index(x, r):
    x[torch.tensor([0, 2])] = r
    x.index_add_(0, torch.tensor([1, 1]), x[:2].clone())
    x.masked_fill_(x > 20, 0)
    x.scatter_(1, torch.zeros(4, 1, dtype=torch.int64), 9.0)
    return x.max()


@case(square, square)
def write_out_argument(x, y):
    torch.add(x, 1, out=y)
    values, indices = torch.empty(0), torch.empty(0, dtype=torch.int64)
    torch.max(x, 1, out=(values, indices))
    return y, values, indices


@case(square, square)
def write_list(x, y):
    torch._foreach_add_([x, y], 1.0)
    torch._foreach_mul_([x, y], [2.0, 3.0])
    return x + y


@case(row, lambda: iota(4, dtype=torch.float64))
def write_converts(x, y):
    x.copy_(y)
    x.add_(y)
    return x


@case(row)
def write_itself(x):
    x.copy_(x)
    x.add_(x)
    return x


@case(square, row, row)
def batch_norm_statistics(x, mean, var):
    return torch.nn.functional.batch_norm(x, mean, var, None, None, True, 0.1)


@case(square)
def random_writes(x):
    x.bernoulli_(0.5)
    y = torch.nn.functional.dropout(x, 0.5)
    return y.uniform_(), x.normal_()


@case(matrix)
def write_through_row_of_expanded(x):
    # The parent shares memory with itself: its own scatter would be refused by eager.
    x.expand(2, 3, 4)[1].mul_(2)
    return x + 0


@case(matrix, square)
def write_nothing(x, y):
    # Only the version counters move.
    x[3:].add_(1)
    y.squeeze_()
    return x.sum() + y.sum()


@case(matrix)
def write_one_row_of_strides_that_do_not_matter(x):
    y = torch.zeros_like(x[:1])
    torch.add(y, 1, out=y)
    y.t_()
    y.neg_()
    return [y]


# --- inputs that share memory


@case(twice)
def same_tensor_twice(x, y):
    x.mul_(2)
    return y + 1, x


@case(halves)
def overlapping(x, y):
    x.mul_(2)
    return y + 1, x[4:]


@case(halves)
def overlapping_both_written(x, y):
    x.mul_(2)
    y[::2].add_(1)
    x.sub_(1)
    return y, x.sum()


@case(columns)
def interleaved_but_apart(x, y):
    x.add_(1)
    return y * 2, y


@case(as_ints)
def other_dtype(x, y):
    x.add_(1)
    return y + 0, y.t()


@case(as_shorts)
def other_dtype_and_offset(x, y):
    y.add_(1)
    x.mul_(2)
    return x + 0, y + 0


@case(halves, columns)
def two_groups(a, b, c, d):
    a.add_(1)
    c.add_(b[:3])
    return b * 1, d * 1, c[:, :1]


@case(lambda: [t := square(), t.t(), t[1:3]])
def three_views(x, y, z):
    y[0].add_(100)
    z.mul_(2)
    return x + 0, z, y


# --- outputs


@case(matrix)
def output_is_input(x):
    return x


@case(matrix)
def outputs_view_input(x):
    return x[1], x.t(), x.view(-1), x.expand(2, 3, 4), x.unfold(1, 2, 1), x[:, None]


@case(sliced)
def outputs_view_sliced_input(x):
    return x.t(), x[1:], x[:, ::2], x.as_strided((2,), (3,), 1)


@case(matrix)
def output_views_input_as_dtype(x):
    return x.view(torch.int32), x.view(torch.int16)[1:], x.view(torch.complex64)


@case(lambda: iota(3, 4)[1:])
def output_views_offset_input_as_dtype(x):
    return x.view(torch.uint8)[:, 4:]


@case(matrix)
def outputs_share_intermediate(x):
    y = x * 2
    return y[0], y[1:], y.t()


@case(matrix)
def outputs_share_returned_intermediate(x):
    y = x * 2
    return y[0], y, y.t(), y


@case(matrix)
def alias_of_fresh_only_once(x):
    return (x * 2).t(), (x + 1)[1]


@case(matrix)
def output_parts(x):
    return [*(x + 1).chunk(2, 1), *torch.split(x, 2)]


@case(matrix)
def output_detached(x):
    y = x + 1
    return y, y.detach(), x.detach()


@case(matrix)
def write_intermediate_after_view(x):
    y = x * 2
    v = y[0]
    y.add_(1)
    v.mul_(3)
    return v, y


@case(matrix)
def nothing(x):
    return None


@case(matrix)
def other_results(x):
    return {"a": x + 1, "n": None, "k": [3, 2.5, "text", x.shape[0]], "t": (x, True)}


@case(matrix)
def constants(x):
    return torch.tensor([1, 2]), x + torch.tensor(2.0), torch.ones(2)


@case(lambda: {"a": iota(3), "b": [iota(3), (iota(3), 2)]})
def nested_inputs(d):
    d["b"][0].add_(1)
    return d["a"] * d["b"][1][1] + d["b"][1][0], d["b"][0]


# --- metadata


@case(matrix)
def transpose_input(x):
    x.t_()
    return x * 2


@case(matrix)
def write_and_reshape_input(x):
    x.add_(1)
    x.t_()
    x.unsqueeze_(0)
    x.mul_(2)
    return x[0], x


@case(matrix)
def squeeze_and_stride_input(x):
    x.unsqueeze_(1)
    x.transpose_(0, 2)
    x.squeeze_(1)
    x.as_strided_((2, 2), (4, 1), 1)
    return x + 1


@case(matrix)
def shrink_input(x):
    x.resize_(2, 2)
    return x + 0


@case(square, matrix)
def set_to_other_input(x, y):
    x.add_(1)
    x.set_(y)
    return x + 1


@case(square)
def set_to_intermediate(x):
    old = x.view(-1)
    y = x * 3
    x.set_(y)
    x[0].add_(1)
    return y, old, x


@case(matrix)
def reshape_intermediate(x):
    y = x + 1
    y.t_()
    y.add_(1)
    y.unsqueeze_(0)
    return y


@case(lambda: iota(3, 4).to(torch.complex64))
def complex_views(x):
    torch.view_as_real(x)[..., 0].add_(1)
    x.conj().add_(1)
    return x + 1, x.imag * 2, (x * 2).conj()


@pytest.mark.parametrize("name", sorted(CASES))
def test_like_eager(name: str) -> None:
    through_dispatch(*CASES[name])


@pytest.mark.parametrize("name", ["write_parts", "overlapping", "outputs_view_input", "same_tensor_twice"])
def test_in_inference_mode(name: str) -> None:
    program, make = CASES[name]
    with torch.inference_mode():
        traced = trace(program, make())
        same_effect(program, bind(traced, traced.graph), make)


def test_calls_that_break_the_traces_assumptions_run_the_program() -> None:
    def program(x, y):
        x.add_(1)
        return y * 2

    with torch.no_grad():
        apart = trace(program, [iota(8), iota(8)])
        run = bind(apart, apart.graph)
        same_effect(program, run, lambda: [iota(8), iota(8)])
        same_effect(program, run, lambda: (lambda b: [b[:8], b[4:]])(iota(12)))
        same_effect(program, run, lambda: (lambda b: [b, b])(iota(8)))
        merged = trace(program, (lambda b: [b[:8], b[4:]])(iota(12)))
        run = bind(merged, merged.graph)
        same_effect(program, run, lambda: (lambda b: [b[:8], b[4:]])(iota(12)))
        same_effect(program, run, lambda: (lambda b: [b[:8], b[2:10]])(iota(12)))
        same_effect(program, run, lambda: [iota(8), iota(8)])


def test_graph_that_wrote_its_input_itself() -> None:
    def program(x, y):
        x.add_(y)
        return x * 2

    with torch.no_grad():
        traced = trace(program, [iota(8), iota(8)])
        assert traced.in_place_candidates == ((0, 0),)

        def compiled(x, y):
            updated, result = traced.graph(x, y)
            x.data.copy_(updated)
            return None, result

        same_effect(program, bind(traced, compiled, in_graph=(0,)), lambda: [iota(8), iota(8)])


def test_a_write_moves_a_shared_counter_once() -> None:
    """Arguments that are views of one tensor share its version counter."""

    def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a.add_(1)
        return a * b, c.sin()

    def moved(run: Callable[..., Any]) -> int:
        x = torch.zeros(4)
        run(x, x.view(4), x[:])
        return x._version

    torch._dynamo.reset()
    assert moved(torch.compile(program, backend="opforge")) == moved(program) == 1
