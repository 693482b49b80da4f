"""The verifier accepts good programs and names what is wrong with bad ones."""

import pytest

from opforge.errors import IRError
from opforge.runtime.ir.verify import verify
from tests.support.ir_text import parse

GOOD = """
symbol s0 = 16
input x: float32[s0, 12]
input idx: int64[5]
nest v: float32[s0, 3, 4] for (i0<s0, i1<3, i2<4)
  value x[i0, 4*i1 + i2]
nest w: float32[s0, 12] for (i0<s0, i1<12)
  value v[i0, i1 // 4, i1 % 4]
nest row: float32[s0] for (i0<s0) reduce sum over (r0<12)
  value w[i0, r0]
nest pad: float32[s0, 14] for (i0<s0, i1<14)
  value w[i0, i1 - 1] if ge([i1], 1:int64):bool
nest g: float32[5] for (i0<5)
  value w[0, at(idx[i0], 0, 11)]
nest sc: float32[s0] for (i0<s0)
  into row[d0] sum over (d0<5) if lt([d0], [s0]):bool
  value g[d0]
extern m: float32[s0, 2] stride [2, 1] = ns.op.default(&w)
output m
output value {s0}
mutate x = w
"""


def test_good():
    verify(parse(GOOD))


BAD = [
    ("nest y: float32[s0, 12] for (i0<s0, i1<12)\n  value x[i0, i1 + 1]",
     "nest 'y': x[i0, i1 + 1]: index i1 + 1 is not within 0..12 - 1, and no mask guards it"),
    ("nest y: float32[s0] for (i0<s0)\n  value x[i0 + 1, 0]", "nest 'y': x[i0 + 1, 0]: index i0 + 1 is not within 0..s0 - 1, and no mask guards it"),
    ("nest y: float32[s0] for (i0<s0)\n  value x[i0]", "nest 'y': x[i0] has 1 coordinates, the buffer has shape [s0, 12]"),
    ("nest x: float32[1] for (0)\n  value 1.0:float32", "nest 'x': 'x' is defined twice"),
    ('nest y: float32[s0] for (i0<s0) from "a.py:3"\n  value idx[0]', "nest 'y' (a.py:3): the value is int64, the buffer float32"),
    ("nest y: float32[7] for (i0<5)\n  value 1.0:float32", "nest 'y': variable 'i0' runs to 5 over a dimension of size 7"),
    ("nest y: float32[7] for (0)\n  value 1.0:float32",
     "nest 'y': coordinate 0 is 0; it must be a variable, or 0 for a dimension of size 1 (this one has size 7)"),
    ("nest y: float32[7] for (i0<7) over (r0<4)\n  value 1.0:float32", "nest 'y': reduction variables without a reduction"),
    ("nest y: float32[7, 7] for (i0<7, i0<7)\n  value 1.0:float32", "nest 'y': two loops are called 'i0'"),
    ("nest y: float32[7] for (i0<7)\n  value x[0, at(idx[0], None, 11)]",
     "nest 'y': x[0, at(idx[0], None, 11)]: index at(idx[0], None, 11) is not within 0..12 - 1, and no mask guards it"),
    ("nest y: float32[7] for (i0<7)\n  value x[0, at(x[0, 0], 0, 11)]", "nest 'y': an index is float32, not an integer"),
    ("nest y: float32[7] for (i0<7)\n  value x[0, 0] if x[0, 1]", "nest 'y': the mask of x[0, 0] is not one bool"),
    ("nest y: int64[7] for (i0<7)\n  value x[0, 0]:int64", "nest 'y': x[0, 0] is read as int64, the buffer is float32"),
    ("nest y: float32[7] for (i0<7)\n  value 1:float32", "nest 'y': constant 1 of type int has dtype float32"),
    ("nest y: float32[7] for (i0<7)\n  value q[i0]:float32\nnest q: float32[7] for (i0<7)\n  value 1.0:float32",
     "nest 'y': buffer 'q' is read before it is defined"),
    ("output q", "output 0: buffer 'q' is not defined"),
    ("mutate idx = x", "mutation of 'idx': 'x' is float32[s0, 12], the input int64[5]"),
    ("mutate x = x\nmutate x = x", "mutation of 'x': it is mutated twice"),
    ("extern m: float32[2] = ns.op.default(&nope)", "extern 'ns.op.default': buffer 'nope' is not defined"),
    ("nest y: float32[4] for (i0<4)\n  into x[0, 0] set over (d0<3)\n  value 1.0:float32",
     "nest 'y': the base 'x' is float32[s0, 12], the result float32[4]"),
    ("nest y: int64[5] for (i0<5)\n  into idx[d0] set over (d0<6)\n  value 1:int64",
     "nest 'y': index 0 of the update, d0, is not within 0..5 - 1, and no mask guards it"),
    ("nest y: int64[5] for (i0<5) scan sum dim 1\n  value 1:int64", "nest 'y': scan along dimension 1 of 1"),
    ("nest y: float32[12] for (i0<12)\n  value add(1.0:float64, x[0, i0])", "nest 'y': 'add' has arguments of float64 and float32"),
    ("nest y: float32[12] for (i0<12)\n  value addd(x[0, i0])", "nest 'y': 'addd' is not an operation of specs/scalars.yaml"),
    ("nest y: float32[12] for (i0<12)\n  value add(x[0, i0])", "nest 'y': 'add' takes 2 arguments, not 1"),
    ("nest y: float32[5] for (i0<5)\n  value sqrt(idx[i0]):float32", "nest 'y': argument 0 of 'sqrt' is int64, not float"),
    ("nest y: float32[5] for (i0<5)\n  value lt(idx[i0], idx[i0]):float32", "nest 'y': 'lt' gives bool here, not float32"),
    ("nest y: float32[1] for (0) reduce summ over (r0<5)\n  value x[0, r0]", "nest 'y': 'summ' is not a reduction of specs/scalars.yaml"),
    ("nest y: float32[1] for (0) reduce argmax over (r0<5)\n  value x[0, r0]",
     "nest 'y': the reduction 'argmax' of float32 gives int64, the buffer is float32"),
    ("nest y: bool[1] for (0) reduce any over (r0<5)\n  value x[0, r0]", "nest 'y': the reduction 'any' takes bool, the value is float32"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_bad(text, message):
    program = parse("symbol s0 = 16\ninput x: float32[s0, 12]\ninput idx: int64[5]\n" + text)
    with pytest.raises(IRError) as error:
        verify(program)
    assert str(error.value) == message


def test_undeclared_symbol():
    program = parse(GOOD)
    program.symbols = ()
    with pytest.raises(IRError, match="symbol 's0' is not declared"):
        verify(program)
