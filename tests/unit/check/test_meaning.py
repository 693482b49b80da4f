"""Equal values that program and plan say in other words: what conditions, definitions and positions decide is accepted, its like is not."""

import pytest

from opforge.errors import PlanError
from opforge.runtime.check.plan import check
from opforge.runtime.ir.index import sym
from opforge.runtime.ir.verify import verify
from tests.support.ir_text import parse
from tests.support.plans import dtypes_of, kernel, plan_of

# Inside of a narrower condition a wider one holds.
NARROWER = """
input x: float32[17]
nest one: float32[16] for (i0<16)
  value 1.0:float32
nest s: float32[17] for (i0<17)
  value where(lt([i0], 16:int64):bool, one[i0] if lt([i0], 16:int64):bool, x[i0])
nest z: float32[17] for (i0<17)
  value where(lt([i0], 2:int64):bool, neg(s[i0]), s[i0])
output z
"""
# … also where the number of elements is a symbol.
ROLLED = """
symbol s0 = 9
input x: float32[s0]
nest r: float32[s0] for (i0<s0)
  value x[(i0 - 1) % s0]
nest z: float32[s0] for (i0<s0)
  value where(ge([i0], 1:int64):bool, neg(r[i0]), r[i0])
output z
"""
# A position that is a coordinate by definition decides which half of a concatenation is read.
POSITION = """
input x: float32[2]
nest c: float32[4] for (i0<4)
  value where(lt([i0], 2:int64):bool, x[i0] if lt([i0], 2:int64):bool, neg(x[i0 - 2] if ge([i0], 2:int64):bool))
nest n: int64[2] for (i0<2)
  value [i0]
nest z: float32[2] for (i0<2)
  value c[at(bounded{("IndexError", "index", )}(n[i0], 4:int64, True:bool):int64, 0, 3)]
output z
"""
# A condition that is decided two definitions away.
FAR = """
input x: float32[4]
nest no: bool[4] for (i0<4)
  value False:bool
nest also: bool[2, 2] for (i0<2, i1<2)
  value no[2 * i0 + i1]
nest z: float32[2, 2] for (i0<2, i1<2)
  value where(also[i0, i1], 0.0:float32, x[2 * i0 + i1])
output z
"""
# One condition on data, and the same on a masked load where the mask holds.
MASKED = """
input x: float32[4]
nest p: bool[4] for (i0<4)
  value gt(x[i0], 0.0:float32):bool
nest w: float32[2] for (i0<2)
  value where(p[i0 + 2], x[i0 + 2], 5.0:float32)
nest z: float32[4] for (i0<4)
  value where(p[i0], where(ge([i0], 2:int64):bool, w[i0 - 2] if ge([i0], 2:int64):bool, 7.0:float32), 9.0:float32)
output z
"""
_MASKED = "x[o0] if ge([o0], 2:int64):bool"
_INNER = f"where(gt({_MASKED}, 0.0:float32):bool, {_MASKED}, 5.0:float32)"


@pytest.mark.parametrize(
    ("text", "loops", "at", "right", "wrong"),
    [
        (
            NARROWER,
            "o0<17",
            "o0",
            "where(lt([o0], 2:int64):bool, neg(1.0:float32), where(lt([o0], 16:int64):bool, 1.0:float32, x[o0]))",
            (
                "where(lt([o0], 2:int64):bool, neg(x[o0]), where(lt([o0], 16:int64):bool, 1.0:float32, x[o0]))",
                "where(lt([o0], 2:int64):bool, neg(1.0:float32), 1.0:float32)",
            ),
        ),
        (
            ROLLED,
            "o0<s0",
            "o0",
            "where(ge([o0], 1:int64):bool, neg(x[o0 - 1] if ge([o0], 1:int64):bool), x[(o0 - 1) % s0])",
            ("where(ge([o0], 1:int64):bool, neg(x[o0]), x[(o0 - 1) % s0])",),
        ),
        (POSITION, "o0<2", "o0", "x[o0]", ("neg(x[o0])", "x[1 - o0]")),
        (FAR, "o0<2, o1<2", "o0, o1", "x[2 * o0 + o1]", ("0.0:float32", "x[2 * o1 + o0]")),
        (
            MASKED,
            "o0<4",
            "o0",
            f"where(gt(x[o0], 0.0:float32):bool, where(ge([o0], 2:int64):bool, {_INNER}, 7.0:float32), 9.0:float32)",
            (
                f"where(lt(x[o0], 0.0:float32):bool, where(ge([o0], 2:int64):bool, {_INNER}, 7.0:float32), 9.0:float32)",
                f"where(ge([o0], 2:int64):bool, {_INNER}, 9.0:float32)",
                "where(gt(x[o0], 0.0:float32):bool, where(ge([o0], 2:int64):bool, 5.0:float32, 7.0:float32), 9.0:float32)",
            ),
        ),
    ],
    ids=["narrower", "rolled", "position", "far", "masked"],
)
def test_in_other_words(text: str, loops: str, at: str, right: str, wrong: tuple[str, ...]) -> None:
    program = parse(text)
    verify(program)
    symbols = {"s0": sym("s0")} if "s0" in text else {}
    dtypes = dtypes_of(program)

    def plan(value: str):  # type: ignore[no-untyped-def]
        return plan_of(program, [kernel("k", loops, [("", [f"store z[{at}] {value}"])], dtypes, symbols=symbols)])

    check(program, plan(right))
    for value in wrong:
        with pytest.raises(PlanError, match="'z': phase 0 stores another value"):
            check(program, plan(value))
