"""Rules for calls that are alike but for one number: all of them are replaced, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from opforge.generated.rewrites import RULES
from opforge.runtime.graph.alike import Alike
from opforge.runtime.graph.patterns import Rule
from opforge.runtime.graph.rewrite import Report, rewrite

T, B, K, N = 3, 4, 5, 6


def rewritten(fn: Callable[..., Any], *shapes: tuple[int, ...], device: str = "cuda") -> tuple[fx.GraphModule, Report]:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(torch.empty(s)) for s in shapes]
    gm = make_fx(fn, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    report = rewrite(gm, RULES, device=device)
    gm.recompile()
    return gm, report


def products(gm: fx.GraphModule) -> int:
    return sum(n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for n in gm.graph.nodes)


def each_row(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.stack([torch.addmm(c, x, w.t()).tanh() for x in xs])


def each_column(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.stack([torch.mm(xs[:, t], w.t()).tanh() for t in range(xs.shape[1])])


def from_the_end(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.stack([torch.addmm(c, xs[-t - 1], w.t()).tanh() for t in range(len(xs))])


def twice(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.stack([torch.addmm(c, x, w.t()).tanh() + torch.mm(x, w.t()).exp() for x in xs])


def cast_rows(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """As under autocast: each slice is cast, and the weight once for each."""
    return torch.stack([torch.addmm(c, x.double().float(), w.t()).tanh() for x in xs])


def cast_columns(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.stack([torch.mm(xs[:, t].double(), w.double().t()).tanh() for t in range(xs.shape[1])]).float()


def the_same_again(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    first = [torch.mm(xs[t], w.t()).tanh() for t in range(len(xs))]
    return torch.stack([a + torch.mm(xs[t], w.t()).exp() for t, a in enumerate(first)])


def all_but_one(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.stack([torch.addmm(c, xs[t], w.t()).tanh() for t in range(len(xs) - 1)])


def one_by_another_matrix(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.stack([torch.addmm(c, x, (w * 2 if t == 1 else w).t()).tanh() for t, x in enumerate(xs)])


def by_matrices_of_their_own(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.stack([torch.mm(x, (w * t).t()).tanh() for t, x in enumerate(xs)])


def random_matrices(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.stack([torch.mm(x, torch.bernoulli(w).t()).tanh() for x in xs])


@torch.library.custom_op("opforge_each::of_its_own", mutates_args=())
def of_its_own(w: Tensor) -> Tensor:
    """Who knows what it does: nothing says that it gives the same twice."""
    return w.clone()


@of_its_own.register_fake
def _(w: Tensor) -> Tensor:
    return torch.empty_like(w)


def matrices_of_a_user(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.stack([torch.mm(x, of_its_own(w).t()).tanh() for x in xs])


def returned(xs: Tensor, w: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.addmm(c, x, w.t()) for x in xs)


def of_both(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """The bias of each is the one before."""
    h = xs[0] @ xs.new_zeros(K, N)
    for x in xs:
        h = torch.addmm(h, x, w.t()).tanh()
    return h


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        *((each_row, 1), (each_column, 1), (from_the_end, 1), (twice, 2), (all_but_one, T - 1)),
        *((cast_rows, 1), (cast_columns, 1), (the_same_again, 1)),
        *((one_by_another_matrix, T), (random_matrices, T), (matrices_of_a_user, T), (returned, T), (of_both, T + 1)),
    ],
)
def test_which_are_one_product(fn: Callable[..., Any], count: int) -> None:
    shape = (B, T, K) if fn in (each_column, cast_columns) else (T, B, K)
    gm, _ = rewritten(fn, shape, (N, K), (N,))
    assert products(gm) == count
    if fn is not random_matrices:
        given = torch.randn(shape), torch.randn(N, K), torch.randn(N)
        for found, eager in zip(gm(*given), fn(*given), strict=True):
            torch.testing.assert_close(found, eager)


def test_loops_of_a_processor_stay() -> None:
    gm, _ = rewritten(each_row, (T, B, K), (N, K), (N,), device="cpu")
    assert products(gm) == T
    gm, _ = rewritten(each_row, (T, 16, 64), (64, 64), (64,), device="cpu")
    assert products(gm) == 1


def test_large_results_stay_apart() -> None:
    gm, _ = rewritten(each_row, (T, 2048, 8), (1024, 8), (1024,))
    assert products(gm) == T


@pytest.mark.parametrize("fn", [all_but_one, one_by_another_matrix, by_matrices_of_their_own])
def test_calls_that_lack_one_are_looked_at_once(fn: Callable[..., Any]) -> None:
    looked_at: list[str] = []
    rules = {h: tuple(rule if rule.each is None else counted(rule, looked_at) for rule in g) for h, g in RULES.items()}
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(torch.empty(s)) for s in ((40, B, K), (N, K), (N,))]
    gm = make_fx(fn, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    count = products(gm)
    rewrite(gm, rules, device="cuda")
    assert products(gm) == count
    assert len(looked_at) == count


def test_what_does_not_fit_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by copies of a matrix, found to be one after the other; half of them are returned, and never fit."""
    steps, looked_at = 40, 0
    again = Alike._again

    def counted(*args: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return again(*args)

    def fn(xs: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        found, h = [], xs[0]
        for _ in range(steps):
            copy = (w * 1).t()
            found.append(xs[0] @ copy)
            h = torch.tanh(xs[1] @ copy + h)
        return (h, *found)

    monkeypatch.setattr(Alike, "_again", counted)
    rewritten(fn, (2, B, K), (K, K))
    assert 0 < looked_at < 10 * steps


def counted(rule: Rule, looked_at: list[str]) -> Rule:
    def when(found: dict[str, Any]) -> bool:
        looked_at.append(rule.name)
        return rule.when(found)

    return replace(rule, when=when)


def test_an_index_that_is_no_number() -> None:
    """A slice at a place that a tensor tells is in no group."""

    graph = fx.Graph()
    with FakeTensorMode() as mode:
        x, w = (mode.from_tensor(torch.empty(s)) for s in ((1, B, K), (K, N)))
        nodes = [graph.placeholder(n) for n in ("x", "w", "k")]
        for node, val in zip(nodes, (x, w, 0), strict=True):
            node.meta["val"] = val
        picked = graph.call_function(torch.ops.aten.select.int, (nodes[0], 0, nodes[2]))
        picked.meta["val"] = x[0]
        product = graph.call_function(torch.ops.aten.mm.default, (picked, nodes[1]))
        product.meta["val"] = x[0] @ w
    graph.output((product,))
    report = rewrite(fx.GraphModule({}, graph), RULES, device="cuda")
    assert report.applied == []


def test_who_looks_at_the_storage_gets_its_own() -> None:
    """A slice of a larger product does not begin where its storage does."""

    def fn(xs: Tensor, w: Tensor, c: Tensor) -> Tensor:
        return torch.stack([torch.as_strided(x @ w.t(), (2,), (1,)) + 1 for x in xs])

    gm, _ = rewritten(fn, (T, B, K), (N, K), (N,))
    assert products(gm) == T


def test_any_result_of_a_call() -> None:
    """`unbind(x)[i]` is `select(x, i)`, whichever i."""
    gm, report = rewritten(lambda x: torch.stack([t + 1 for t in x.unbind(1)]), (2, 3))
    assert [rule for rule, _ in report.applied] == ["select_of_unbind"] * 3
    x = torch.randn(2, 3)
    assert torch.equal(gm(x), torch.stack([t + 1 for t in x.unbind(1)]))
