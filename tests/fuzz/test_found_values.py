"""Programs whose values the fuzzer found wrong, or could not judge: what eager's own error is, and by what it is known."""

from __future__ import annotations

import pytest
import torch

import opforge

from .check import check, in_dtype
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
