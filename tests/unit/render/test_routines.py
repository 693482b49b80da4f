"""Calls of C++ routines: sorts, linear algebra and others that are no loop nests, as steps of a compiled graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import opforge
from opforge.generated.kernels import GPU_ROUTINES
from opforge.runtime.ir.nodes import Buffer, Extern
from opforge.runtime.ir.routines import routine_of
from tests.support.accuracy import assert_as_accurate
from tests.unit.lower.test_gpu import externs, lowered

ROOT = Path(__file__).parents[3]


def compiled(program: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> list[torch.Tensor]:
    """What one graph without eager kernels returns."""
    torch._dynamo.reset()
    opforge.reset_stats()
    with opforge.config.patch({"debug.verify": True, "opt_level": "1"}):
        found = torch.compile(program, backend="opforge", fullgraph=True, dynamic=dynamic)(*inputs)
    stats = opforge.stats()
    assert not stats["reasons"]
    assert not stats["fallbacks"]
    return pytree.tree_leaves(found)


def same(program: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> None:
    """Bit for bit, and laid out as in eager."""
    for ours, eager in zip(
        compiled(program, *inputs, dynamic=dynamic), pytree.tree_leaves(program(*inputs)), strict=True
    ):
        assert ours.stride() == eager.stride()
        assert torch.equal(ours.nan_to_num(77), eager.nan_to_num(77))


def accurate(program: Callable[..., Any], *inputs: torch.Tensor) -> None:
    ours, eager = compiled(program, *inputs), pytree.tree_leaves(program(*inputs))
    exact = pytree.tree_leaves(program(*(t.double() if t.is_floating_point() else t for t in inputs)))
    for a, b, c in zip(ours, eager, exact, strict=True):
        if b.is_floating_point():
            assert_as_accurate(a, b, c)
        else:
            assert torch.equal(a, b)


def test_every_routine_that_a_spec_names_is_there() -> None:
    named = {
        m for p in (ROOT / "generated" / "ops").glob("*.py") for m in re.findall(r'"(\w+)\.(\w+)", \[', p.read_text())
    }
    found = {
        (p.stem.removeprefix("routine_"), m)
        for p in (ROOT / "generated" / "kernels").glob("routine_*.h")
        for m in re.findall(r"\bvoid (\w+)\(", p.read_text())
    }
    assert named
    assert not named - found


def test_what_is_a_call_of_a_routine() -> None:
    out = (Buffer("y", (3,), "float32", (1,)),)
    assert routine_of(Extern(out, "routine.sorting.sort", (), compiled=True)) == ("sorting", "sort")
    assert routine_of(Extern(out, "routine.sorting.sort", ())) is None
    assert routine_of(Extern(out, "branch_0", (), compiled=True)) is None


@pytest.mark.parametrize("n", [1, 5, 17, 300])
def test_ties_are_eagers(n: int) -> None:
    """Of equal elements eager's algorithms leave some first: an unstable sort, a selection, the last of the most frequent."""
    x = torch.randint(0, 4, (3, n)).float()
    x[0, n // 2] = float("nan")
    x[1, 0] = -0.0

    def program(x: torch.Tensor) -> Any:
        found = [
            x.sort(1),
            x.sort(1, descending=True),
            torch.sort(x, dim=1, stable=True),
            x.topk(n // 2 + 1),
            x.topk(1),
        ]
        return [*found, x.topk(n, largest=False), x.mode(1), x.median(1), x.nanmedian(1), x.cummax(1), x.cummin(1)]

    same(program, x)


def test_strides_of_what_goes_in_and_comes_out() -> None:
    """A routine reads views where they lie, and writes results laid out as eager does."""
    x = torch.randn(4, 5, 6)
    same(lambda x: (x.transpose(0, 2).sort(1), x[:, 1:4].topk(2, dim=1), x.permute(2, 0, 1)[1].cummax(0)), x)
    same(lambda x: ((x * 2).transpose(0, 1).sort(0)[0] + 1, x.expand(2, 4, 5, 6).median(1)), x)
    a = torch.randn(2, 5, 4, 4)
    accurate(lambda a: (torch.linalg.inv(a), torch.linalg.inv(a.mT), torch.linalg.qr(a[0].mT)), a)


def test_sizes_that_are_symbols() -> None:
    """Running extremes have no limit, so their sizes may be known only when the program runs; sorts are eager's then."""
    same(lambda x: x.cummax(1), torch.randn(4, 9), dynamic=True)


def test_searches() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[1.0, 2.0, 2.0, 3.0, nan], [0.0, 0.0, 0.5, 7.0, inf]])
    values = torch.tensor([[0.0, 2.0, nan], [3.0, inf, 0.5]])
    back = torch.tensor([4, 3, 2, 1, 0]).repeat(2, 1)

    def program(rows: torch.Tensor, values: torch.Tensor, back: torch.Tensor) -> Any:
        flipped = rows.flip(1)
        return [
            torch.searchsorted(rows, values),
            torch.searchsorted(rows, values, side="right", out_int32=True),
            torch.searchsorted(flipped, values, sorter=back),
            torch.bucketize(values, rows[0], right=True),
        ]

    same(program, rows, values, back)


def test_factors_with_exchanged_rows() -> None:
    a, b = torch.randn(3, 5, 5), torch.randn(3, 5, 2)
    factors, pivots = torch.linalg.lu_factor(a)
    assert not torch.equal(pivots, torch.arange(1, 6, dtype=torch.int32).expand(3, 5))

    def program(factors: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor) -> Any:
        solved = [torch.linalg.lu_solve(factors, pivots, b, adjoint=adjoint) for adjoint in (False, True)]
        right = [torch.linalg.lu_solve(factors, pivots, b.mT, left=False, adjoint=adjoint) for adjoint in (False, True)]
        return [*solved, *right, *torch.lu_unpack(factors, pivots)]

    accurate(program, factors, pivots, b)


def test_gradients_of_determinants_and_solutions() -> None:
    """Their factors are kept for the backward, in eager's convention: of a row-major matrix those of its transpose."""
    for turned in (False, True):
        a, b = torch.randn(4, 4), torch.randn(4, 2)
        results = []
        for run in (True, False):
            x, y = (a.mT if turned else a).detach().requires_grad_(), b.clone().requires_grad_()

            def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return torch.linalg.solve(x, y).sum() + torch.linalg.det(x) + torch.logdet(x @ x.mT)

            torch._dynamo.reset()
            (torch.compile(program, backend="opforge") if run else program)(x, y).backward()
            results.append([x.grad, y.grad])
        for ours, eager in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)


def test_matrices_without_an_inverse() -> None:
    flat = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    for program in (torch.linalg.inv, torch.linalg.cholesky, lambda x: torch.linalg.solve(x, x)):
        torch._dynamo.reset()
        with pytest.raises(torch.linalg.LinAlgError):
            program(-flat)
        with pytest.raises(torch.linalg.LinAlgError):
            torch.compile(program, backend="opforge")(-flat)
    assert compiled(lambda x: torch.linalg.inv_ex(x).info, flat)[0] == torch.linalg.inv_ex(flat).info


def test_values_of_what_is_not_finite() -> None:
    odd = torch.tensor([[1.0, float("nan")], [0.0, 1.0]])
    for program in (torch.linalg.svdvals, torch.linalg.pinv):
        torch._dynamo.reset()
        with pytest.raises(torch.linalg.LinAlgError):
            program(odd)
        with pytest.raises(torch.linalg.LinAlgError, match="non-finite"):
            torch.compile(program, backend="opforge")(odd)


def test_values_of_singular_and_odd_matrices() -> None:
    x = torch.randn(6, 2) @ torch.randn(2, 4)

    def program(x: torch.Tensor) -> Any:
        return [
            torch.linalg.svdvals(x),
            torch.linalg.pinv(x),
            torch.linalg.matrix_norm(x, "nuc"),
            torch.linalg.eigvalsh(x[:4] + x[:4].mT),
        ]

    ours, eager = compiled(program, x), program(x)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_lengths_that_do_not_fit() -> None:
    x = torch.randn(6, 2)
    for lengths in ([2, 3], [7, -1]):
        bad = torch.tensor(lengths)
        torch._dynamo.reset()
        with pytest.raises(RuntimeError):
            torch.segment_reduce(x, "sum", lengths=bad)
        with pytest.raises(RuntimeError, match="segment_reduce"):
            torch.compile(lambda x, n: torch.segment_reduce(x, "sum", lengths=n), backend="opforge")(x, bad)
    accurate(lambda x, n: torch.segment_reduce(x, "mean", lengths=n), x, torch.tensor([2, 0, 4]))


def test_orders_that_no_integer_is() -> None:
    """Torch cuts them to the least integer, and the polynomial of that order is 0."""
    x = torch.tensor([0.3, -0.5, 2.0, 1.0])
    n = torch.tensor([1e30, float("nan"), -1e30, float("inf")])
    same(lambda x, n: [torch.special.laguerre_polynomial_l(x, n), torch.special.chebyshev_polynomial_t(x, n)], x, n)


def test_a_gpu_has_few_routines() -> None:
    program = lowered(lambda x: (x.sort(1), x.cummax(1), x.frexp()), (4, 8), dtype=torch.float32)
    assert externs(program) == ["routine.sorting.sort", "routine.sorting.running", "aten.frexp.Tensor"]


def test_routines_of_a_gpu_are_those_of_a_processor() -> None:
    for name in GPU_ROUTINES:
        file, _, function = name.partition(".")
        kernels = ROOT / "generated" / "kernels"
        assert f"void {function}(" in (kernels / f"routine_{file}.h").read_text()
        assert re.search(rf"def {function}\(\s*rows,", (kernels / f"triton_routine_{file}.py").read_text())
