"""Results have eager's dtypes, strides and offsets: of every operator that has an entry, for arguments in many layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import opforge
from opforge.generated.ops import ANY_STRIDES
from opforge.runtime.dispatch.operators.elementwise import Operand, elementwise_strides
from opforge.runtime.torch_compat import minor_version
from opforge.testing.op_check import Op
from tests.generated.test_ops import OPS
from tests.support.layout_check import differences, first_case, is_registered, place
from tests.support.layouts import in_other_layouts, laid_out

ELSEWHERE = ("prims.cbrt.default", "prims.isfinite.default", "prims.frexp.default", "prims.collapse_view.default")
"""Eager runs them by compositions in Python, which lay dimensions of size 1 out in ways of their own; only torch's decompositions call them."""

DIFFERENT = {
    "aten.native_batch_norm_backward": "A17: the layout of the gradient depends on those of both arguments where a dimension has size 1",
    "aten.one_hot": "A17: torch traces a comparison in its place, which has the layout of the operand",
    "prims.conj_physical": "A17: of complex numbers, the strides of dimensions of size 1 are contiguous ones",
    "aten.mvlgamma": "A17: torch traces elementwise operators in its place, eager's kernel gives a contiguous result",
}
"""Operators whose results are traced in another layout than eager's for some arguments."""
if minor_version() not in ("2.11", "2.12", "2.13"):
    DIFFERENT["aten.native_group_norm_backward"] = (
        "A17: since torch 2.14 dimensions of size 1 keep the strides of a contiguous input"
    )


def _in_turns(k: int, op: Op) -> Any:
    """Every eighth operator is checked by `make test`, all of them by `make test-all`."""
    marks = [pytest.mark.slow] if k % 8 else []
    if op.id == "aten.adaptive_max_pool3d_backward":
        marks.append(
            pytest.mark.skip(
                reason="A17: eager's kernel reads positions that are not contiguous as if they were, and crashes"
            )
        )
    if op.id in DIFFERENT:
        marks.append(pytest.mark.xfail(reason=DIFFERENT[op.id]))
    return pytest.param(op, marks=marks, id=op.id)


@pytest.mark.parametrize("op", [_in_turns(k, op) for k, op in enumerate(OPS)])
def test_traced_layouts_are_those_of_eager(op: Op) -> None:
    cases = [
        c
        for overload in op.overloads
        if overload not in ELSEWHERE and is_registered(overload) and (c := first_case(op, overload)) is not None
    ]
    with torch.no_grad():
        found = [text for case in cases for text in differences(case)]
    assert not found, "\n".join(found[:8])


TURNED = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
ODD = torch.arange(40.0).as_strided((3, 1, 4), (4, 7, 1))
ROWS = torch.arange(30.0).reshape(6, 5)
PROGRAMS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "rolled": (lambda x: torch.roll(x, 1, 0), TURNED),
    "rolled twice": (lambda x: torch.roll(x, (1, 2), (0, 3)), TURNED),
    "rolled by nothing": (lambda x: torch.roll(x, 3, 1), TURNED),
    "rolled flat": (lambda x: torch.roll(x, 7), TURNED),
    "rolled, read as it lies": (lambda x: torch.roll(x, 1, 0).as_strided((4,), (1,)), TURNED),
    "rolled, read further on": (lambda x: torch.roll(x, 1, 0).as_strided((4,), (1,), 3), TURNED),
    "rolled, read, used": (lambda x: torch.roll(x, 1, 0).as_strided((4, 2), (5, 3), 3) * 2, TURNED),
    "read as it lies": (lambda x: (x * 2).as_strided((4,), (1,), 3), TURNED),
    "a part, read as it lies": (lambda x: (x * 2)[1:].as_strided((4,), (1,)), ROWS),
    "the last rows": (lambda x: (x * 2)[2:], ROWS),
    "the last row": (lambda x: (x * 2)[-1], ROWS),
    "ones": (torch.ones_like, ODD),
    "zeros": (torch.zeros_like, ODD),
    "full": (lambda x: torch.full_like(x, 3.0), ODD),
    "ones, contiguous": (lambda x: torch.ones_like(x, memory_format=torch.contiguous_format), ODD),
    "copied": (lambda x: x.clone(), ODD),
    "flipped": (lambda x: x.flip(0), ODD),
    "filled": (lambda x: x.index_fill(0, torch.tensor([1]), 2.0), ODD),
    "limited": (lambda x: torch.nn.functional.hardtanh(x, -1, 9), ODD),
    "doubled": (lambda x: x * 2, ODD),
    "triangle": (lambda x: x.tril(), ROWS.t()),
    "a column by a row": (lambda x: x.t() * 2, ROWS[:1]),
    "a diagonal": (lambda x: x.diagonal() + 0, ROWS[:1]),
    "a column": (lambda x: x * x[:, 2].view(-1, 1), ROWS[:1]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_results_lie_as_eager_has_them(name: str, dynamic: bool) -> None:
    """Strides of dimensions of size 1 included: programs and `as_strided` read them."""
    program, x = PROGRAMS[name]
    torch._dynamo.reset()
    opforge.reset_stats()
    found, expected = torch.compile(program, backend="opforge", fullgraph=True, dynamic=dynamic)(x), program(x)
    assert place(found) == place(expected)
    assert torch.equal(found, expected)
    # Where what a symbol is tells which element lies where, the graph is left to eager.
    assert not opforge.stats()["fallbacks"] or (dynamic and "read" in name)


def test_sorted_values_and_positions() -> None:
    for x in (ODD, TURNED):
        torch._dynamo.reset()
        found, expected = torch.compile(torch.sort, backend="opforge", fullgraph=True)(x), torch.sort(x)
        assert [place(t) for t in found] == [place(t) for t in expected]
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("overload", sorted(ANY_STRIDES))
def test_operators_that_take_any_strides_give_the_same(overload: str) -> None:
    """`any_strides` of an entry: neither values nor strides of the result depend on those of the arguments."""
    op = next(o for o in OPS if overload in o.overloads)
    case = first_case(op, overload)
    assert case is not None
    expected = case.call(case.args, case.kwargs)
    for label, (args, kwargs) in in_other_layouts(case.args, case.kwargs):
        if "repeated" in label or "cut" in label:  # other values
            continue
        found = case.call(args, kwargs)
        assert place(found) == place(expected), label
        torch.testing.assert_close(found, expected)


def test_the_model_of_elementwise_layouts() -> None:
    """The first operand that tells two dimensions apart orders them; where all lie alike without gaps, their strides are kept as they are."""
    rows, columns = Operand((3, 5), (5, 1)), Operand((3, 5), (1, 3))
    assert elementwise_strides((3, 5), [rows, columns]) == (5, 1)
    assert elementwise_strides((3, 5), [columns, rows]) == (1, 3)
    assert elementwise_strides((3, 5), [Operand((5,), (1,)), columns]) == (1, 3)
    assert elementwise_strides((1, 5), [Operand((1, 5), (7, 1))]) == (5, 1)
    assert elementwise_strides((3, 1, 4), [Operand((3, 1, 4), (1, 9, 3))]) == (1, 9, 3)
    assert elementwise_strides((3, 1), [Operand((3, 1), (1, 7)), Operand((), ())]) == (1, 3)
    assert laid_out(torch.zeros(2, 3), [1, 0], 2, 3).stride() == (2, 4)
