"""What eager rejects because a position is out of range, a compiled program rejects with the same exception, and memory stays whole.

Every program is compiled once; then valid calls (also at both ends of the range) must give eager's values, and each invalid call must raise
what eager raises, with the inputs untouched and the program as good as before. Positions far away would end the process if they were used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opforge

FAR = (2**40, -(2**40))
Program = Callable[..., Any]
Args = tuple[Any, ...]
CASES: dict[str, tuple[Program, list[Args], list[Args]]] = {}


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


def reals(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape) / 7


def case(name: str, program: Program, valid: list[Args], invalid: list[Args]) -> None:
    CASES[name] = program, valid, invalid


def swept(
    name: str, program: Callable[[torch.Tensor], Any], n: int, wraps: bool = False, shape: tuple[int, ...] = (3,)
) -> None:
    """A program of positions in 0..n-1 (and -n..-1 where it wraps): both ends are valid, one step further is not."""

    def at(value: int, place: int) -> torch.Tensor:
        k = torch.arange(torch.Size(shape).numel()) % n
        k[place] = value
        return k.reshape(shape)

    ends = (0, n - 1, -n, -1) if wraps else (0, n - 1)
    bad = (n, -n - 1) if wraps else (n, -1)
    case(name, program, [(at(v, 0),) for v in ends], [(at(v, -1),) for v in (*bad, *FAR)])


X = reals(5, 6)
swept("embedding", lambda k: F.embedding(k, X) * 2, 5)
swept("embedding_mean", lambda k: F.embedding(k, reals(5, 40)).mean(-1), 5, shape=(2, 9))
swept("embedding_padding", lambda k: F.embedding(k, X, padding_idx=2), 5)
swept("embedding_int32", lambda k: F.embedding(k.clamp(-(2**31), 2**31 - 1).int(), X), 5)
swept("embedding_bfloat16", lambda k: F.embedding(k, X.bfloat16()), 5)
swept("index_select_rows", lambda k: X.index_select(0, k), 5)
swept("index_select_columns", lambda k: X.index_select(1, k) + 1, 6)
swept("index_select_last_of_three", lambda k: reals(2, 3, 4).index_select(2, k), 4)
swept("index_select_vector", lambda k: reals(7).index_select(0, k), 7)
swept("gather_rows", lambda k: X.gather(0, k), 5, shape=(2, 6))
swept("gather_columns", lambda k: X.gather(1, k).exp(), 6, shape=(5, 19))
swept("gather_expanded", lambda k: X.gather(0, k.expand(3, 6)), 5, shape=(3, 1))
swept("gather_bool", lambda k: (X > 2).gather(1, k), 6, shape=(5, 3))
swept("scatter_source", lambda k: X.scatter(1, k, reals(5, 1)), 6, shape=(5, 1))
swept("scatter_value", lambda k: X.scatter(0, k, 2.5), 5, shape=(2, 6))
swept("scatter_add", lambda k: X.scatter_add(1, k, reals(5, 9)), 6, shape=(5, 9))
swept("scatter_reduce", lambda k: X.scatter_reduce(0, k, reals(3, 6), "amax"), 5, shape=(3, 6))
swept("scatter_reduce_prod", lambda k: X.scatter_reduce(0, k, reals(3, 6), "prod"), 5, shape=(3, 6))
swept("index", lambda k: X[k] - 1, 5, wraps=True)
swept("index_many", lambda k: reals(50, 3)[k].sum(), 50, wraps=True, shape=(40,))
swept("index_second", lambda k: X[:, k], 6, wraps=True)
swept("index_two", lambda k: X[k, k % 6], 5, wraps=True)
swept("index_two_second", lambda k: X[k.abs() % 5, k], 6, wraps=True)
swept("index_scalar", lambda k: torch.ops.aten.index.Tensor(X, [k[2]]), 5, wraps=True)
swept("index_int32", lambda k: X[k.clamp(-(2**31), 2**31 - 1).int()], 5, wraps=True)
swept("index_then_part", lambda k: X[k][:1], 5, wraps=True)
swept("index_in_cat", lambda k: torch.cat([X[k], X, X[k] * 2]), 5, wraps=True)
swept("index_in_cat_columns", lambda k: torch.cat([X[:, k], X], 1), 6, wraps=True)
swept("index_in_pad", lambda k: F.pad(X[k], (1, 2, 0, 1)), 5, wraps=True)
swept("index_in_where", lambda k: torch.where(X[:3] > 1e9, X[k], X[:3]), 5, wraps=True)
swept("index_transposed", lambda k: X[k].t().contiguous(), 5, wraps=True)
swept("index_summed", lambda k: X[k].sum(0), 5, wraps=True)
swept("index_softmax", lambda k: X[:, k].softmax(1), 6, wraps=True, shape=(30,))
swept("index_put", lambda k: X.index_put((k,), reals(3, 6)), 5, wraps=True)
swept("index_put_accumulate", lambda k: X.index_put((k,), reals(3, 6), accumulate=True), 5, wraps=True)
swept("index_put_two", lambda k: X.index_put((k, k.abs() % 6), reals(3), accumulate=True), 5, wraps=True)
swept("index_add", lambda k: X.index_add(0, k, reals(3, 6)), 5)
swept("index_add_columns", lambda k: X.index_add(1, k, reals(5, 3)), 6)
swept("index_add_scaled", lambda k: X.index_add(1, k, reals(5, 3), alpha=2), 6)
swept("index_add_middle", lambda k: reals(2, 4, 3).index_add(1, k, reals(2, 3, 3)), 4)
swept("index_add_vector", lambda k: reals(5).index_add(0, k, reals(3)), 5)
swept("index_copy", lambda k: X.index_copy(0, k, reals(1, 6)), 5, shape=(1,))
swept("index_fill", lambda k: X.index_fill(1, k, 3.0), 6, wraps=True)
swept("index_fill_tensor", lambda k: X.index_fill(0, k, torch.tensor(3.0)), 5, wraps=True)
swept("index_reduce", lambda k: X.index_reduce(0, k, reals(3, 6), "amax"), 5)
swept("take", lambda k: X.take(k) * 3, 30, wraps=True, shape=(2, 5))
swept("put", lambda k: X.put(k, reals(3)), 30, wraps=True)
swept("nll_loss", lambda k: F.nll_loss(X, k), 6, shape=(5,))
swept("nll_loss_each", lambda k: F.nll_loss(X, k, reduction="none"), 6, shape=(5,))
swept("nll_loss_weights", lambda k: F.nll_loss(X, k, weight=reals(6)), 6, shape=(5,))
swept("nll_loss_image", lambda k: F.nll_loss(reals(2, 3, 4, 4), k), 3, shape=(2, 4, 4))
swept("cross_entropy", lambda k: F.cross_entropy(X, k), 6, shape=(5,))
swept("cross_entropy_smooth", lambda k: F.cross_entropy(X, k, label_smoothing=0.1), 6, shape=(5,))
swept("embedding_bag", lambda k: F.embedding_bag(k, X, mode="mean"), 5, shape=(2, 3))
swept("embedding_bag_max", lambda k: F.embedding_bag(k, X, mode="max"), 5, shape=(2, 3))
swept("computed", lambda k: X[k * 2 - k], 5, wraps=True)
swept("of_two_operators", lambda k: X.index_select(0, k) + X.gather(0, k.reshape(3, 1)), 5)
swept("large", lambda k: reals(70, 64).index_select(0, k), 70, shape=(900,))
swept("large_gather", lambda k: reals(60, 1000).gather(0, k), 60, shape=(50, 1000))
swept("large_index_add", lambda k: reals(70, 64).index_add(0, k, torch.ones(900, 64)), 70, shape=(900,))
swept("large_scatter_add", lambda k: reals(60, 1000).scatter_add(0, k, torch.ones(50, 1000)), 60, shape=(50, 1000))
case(
    "cross_entropy_ignored",
    lambda x, k: F.cross_entropy(x, k),
    [(X, ints(0, 5, -100, 2, -100)), (X, ints(-100, 5, 1, 2, 3))],
    [(X, ints(0, 6, -100, 2, -100)), (X, ints(0, 1, -99, 2, -100)), (X, ints(-1, 1, -100, 2, -100))],
)
case(
    "nll_ignored_class",
    lambda x, k: F.nll_loss(x, k, ignore_index=9),
    [(X, ints(0, 9, 9, 2, 5))],
    [(X, ints(0, 9, 8, 2, 5)), (X, ints(0, 9, 9, 2, -100))],
)


def outcome(program: Program, args: Args) -> tuple[type[BaseException] | None, Any]:
    try:
        return None, program(*args)
    except (IndexError, RuntimeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", CASES)
def test_errors_are_eager_s(name: str) -> None:
    program, valid, invalid = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="opforge", fullgraph=True)
    for args in valid:
        torch.testing.assert_close(compiled(*args), program(*args))
    for args in invalid:
        before = [a.clone() for a in args]
        expected, _ = outcome(program, args)
        assert expected is not None, "not an invalid call"
        raised, message = outcome(compiled, args)
        assert raised is expected, message
        assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))
        torch.testing.assert_close(compiled(*valid[0]), program(*valid[0]))


def test_the_error_names_operator_and_line() -> None:
    def program(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return x.gather(1, k) + 1

    compiled = torch.compile(program, backend="opforge")
    with pytest.raises(
        RuntimeError, match=r"index out of range in gather \(test_index_errors.py:\d+ in program\): return x.gather"
    ):
        compiled(X, torch.full((5, 1), 6))


@pytest.mark.parametrize("grad", [False, True])
def test_an_embedding_s_error_names_the_line_that_calls_it(grad: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4))

        def forward(self, k: torch.Tensor) -> torch.Tensor:
            return self.inner(k) * 2

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad), pytest.raises(IndexError) as caught:
        torch.compile(Model(), backend="opforge")(ints(1, 5))
    assert re.search(
        r"embedding \(test_index_errors.py:\d+ in forward\): return self.inner\(k\) \* 2$", str(caught.value)
    )


@pytest.mark.parametrize("grad", [False, True])
def test_where_no_line_is_the_user_s_the_module_is_named(grad: bool) -> None:
    """Modules of torch alone have no line in between: `index out of range in embedding` was all."""
    embedding = torch.nn.Embedding(5, 4)
    nested = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(embedding, torch.nn.Linear(4, 4)))
    for model, place in ((nested, "module 1.0, an Embedding"), (embedding, "module Embedding")):
        torch._dynamo.reset()
        with torch.set_grad_enabled(grad), pytest.raises(IndexError) as caught:
            torch.compile(model, backend="opforge")(ints(1, 5))
        assert str(caught.value) == f"index out of range in embedding ({place})"


def test_a_written_input_stays_as_it_was() -> None:
    def program(x: torch.Tensor, k: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.mul_(2)
        x.index_add_(0, k, y)
        x.index_put_((k,), y, accumulate=True)
        return x.sum()

    compiled = torch.compile(program, backend="opforge")
    for k, good in ((ints(0, 4), True), (ints(0, 5), False), (ints(3, 3), True), (ints(-1, 0), False)):
        x, y = X.clone(), reals(2, 6)
        other = X.clone()
        if good:
            torch.testing.assert_close(compiled(x, k, y), program(other, k, reals(2, 6)))
            torch.testing.assert_close(x, other)
        else:
            with pytest.raises(RuntimeError, match="index out of range in index_add"):
                compiled(x, k, y)
            assert torch.equal(x, X)
            assert torch.equal(y, reals(2, 6))


def test_no_positions_no_fault() -> None:
    none = torch.empty(0, dtype=torch.int64)
    for program in (lambda k: X[k], lambda k: X.index_select(1, k), lambda k: X.index_add(0, k, reals(0, 6))):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(program, backend="opforge")(none), program(none))


def test_a_dimension_without_elements_has_no_position() -> None:
    for program in (lambda x, k: x[k], lambda x, k: x.index_select(0, k), lambda x, k: x.gather(0, k[:, None])):
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="opforge")
        args = (torch.empty(0, 6), ints(0))
        expected, _ = outcome(program, args)
        assert expected is not None
        assert outcome(compiled, args)[0] is expected


@pytest.mark.parametrize("sizes", [(5, 3), (9, 4), (6, 40)])
def test_sizes_known_at_run_time(sizes: tuple[int, int]) -> None:
    def program(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return x[k] + F.embedding(k % x.shape[0], x)

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="opforge", dynamic=True)
    n, m = sizes
    x = reals(n, m)
    for k in (ints(0, n - 1, -n, -1), ints(1, n - 1, 0)):
        torch.testing.assert_close(compiled(x, k), program(x, k))
    for bad in (n, -n - 1, *FAR):
        with pytest.raises(IndexError, match="index out of range in index"):
            compiled(x, ints(0, bad, 1))


def test_gradients() -> None:
    def program(w: torch.Tensor, k: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.embedding(k, w) @ w.t(), t)

    def run(f: Program, k: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = reals(5, 6).requires_grad_()
        loss = f(w, k, t)
        loss.backward()
        assert w.grad is not None
        return loss.detach(), w.grad

    compiled = torch.compile(program, backend="opforge")
    good, target = ints(0, 4, 4), ints(1, -100, 4)
    torch.testing.assert_close(run(compiled, good, target), run(program, good, target))
    for k, t in ((ints(0, 5, 1), target), (good, ints(1, 5, -100)), (good, ints(1, -1, 0))):
        with pytest.raises(IndexError):
            run(program, k, t)
        with pytest.raises(IndexError):
            run(compiled, k, t)
    torch.testing.assert_close(run(compiled, good, target), run(program, good, target))


def test_checks_off() -> None:
    def program(k: torch.Tensor) -> torch.Tensor:
        return X[k]

    with opforge.config.patch({"index_checks": False}):
        compiled = torch.compile(program, backend="opforge")
        torch.testing.assert_close(compiled(ints(0, 4, -1)), program(ints(0, 4, -1)))
    from opforge.runtime.compile_fx import HISTORY

    assert "out_of_range" not in HISTORY[-1].wrapper
