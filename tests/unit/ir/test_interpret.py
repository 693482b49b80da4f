"""The reference interpreter on programs written by hand."""

from textwrap import dedent

import pytest
import torch

from opforge.errors import IRError
from tests.support.ir_interpreter import interpret
from tests.support.ir_text import parse


def run(text: str, *inputs: torch.Tensor, **options: bool) -> list[torch.Tensor]:
    return interpret(parse(dedent(text)), inputs, **options)  # type: ignore[arg-type]


def test_a_reduction_over_two_loops_in_row_major_order() -> None:
    x = torch.randn(3, 4, 5)
    text = """
    program
    input x: float32[3, 4, 5]
    nest y: int64[3] for (i0<3) reduce argmax over (r0<4, r1<5)
      value x[i0, r0, r1]
    output y
    """
    assert torch.equal(run(text, x)[0], x.flatten(1).argmax(1))


def test_updates_run_in_order() -> None:
    text = """
    program
    input x: float32[3]
    input k: int64[4]
    input v: float32[4]
    nest y: float32[3] for (i0<3)
      into x[at(k[r0], 0, 2)] set over (r0<4)
      value v[r0]
    output y
    """
    (y,) = run(text, torch.zeros(3), torch.tensor([0, 2, 0, 0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert y.tolist() == [4.0, 0.0, 2.0]


def test_a_read_out_of_range_is_an_error() -> None:
    text = """
    program
    input x: float32[3]
    nest y: float32[4] for (i0<4)
      value x[i0]
    output y
    """
    with pytest.raises(IRError, match=r"coordinate 0 leaves 0\.\.2"):
        run(text, torch.zeros(3))


def test_exact_mode_rounds_nowhere() -> None:
    text = """
    program
    input x: bfloat16[1]
    nest y: bfloat16[1] for (0)
      value mul(x[0], x[0])
    output y
    """
    x = torch.tensor([1.0078125], dtype=torch.bfloat16)
    assert run(text, x, exact=True)[0].item() == 1.0078125**2
    assert run(text, x)[0].item() == (x * x).item()
