"""The plan checker on what runs along loops: blocks of outer iterations, scans; and on views that eager kernels get."""

import pytest

from opforge.runtime.check.plan import check
from opforge.runtime.kernels.plan import ViewOf
from tests.support.plans import call_of, kernel, plan_of

from .test_plan import make, reject

# -- blocks ------------------------------------------------------------------------------------------------------------
BLOCKS = """
input x: float32[8]
nest a: float32[8] for (i0<8)
  value exp(x[i0])
nest y: float32[2, 4] for (i0<2, i1<4)
  value neg(a[{}])
output a
output y
"""


@pytest.mark.parametrize("read", ["4 * {o} + {r}", "4 * {o} - {r} + 3"])
def test_blocks_of_one_iteration(read):
    """Rows of a flat buffer: an outer iteration writes four elements and reads those four, in any order."""
    program, d = make(BLOCKS.format(read.format(o="i0", r="i1")))
    phases = [
        ("r0<4", ["store a[4 * o0 + r0] exp(x[4 * o0 + r0])"]),
        ("r1<4", [f"store y[o0, r1] neg(a[{read.format(o='o0', r='r1')}])"]),
    ]
    check(program, plan_of(program, [kernel("k", "o0<2", phases, d)]))


@pytest.mark.parametrize("read", ["4 * {r} // 4 + 4 * {o}", "2 * {o} + {r}", "{o} + 2 * {r}", "4 - 4 * {o} + {r}"])
def test_blocks_of_other_iterations(read):
    program, d = make(BLOCKS.format(read.format(o="i0", r="i1")))
    place = read.format(o="o0", r="r1")
    phases = [
        ("r0<4", ["store a[4 * o0 + r0] exp(x[4 * o0 + r0])"]),
        ("r1<4", [f"store y[o0, r1] neg(a[{place}])"]),
    ]
    plan = plan_of(program, [kernel("k", "o0<2", phases, d)])
    if "//" in read:
        check(program, plan)  # the same block, told in another way
    else:
        reject(program, plan, "'a' is read in phase 1", "which another outer iteration writes")


def test_blocks_that_reach_into_the_next():
    """Five elements to each iteration, of blocks of four."""
    program, d = make(BLOCKS.format("4 * i0 + i1").replace("float32[8]", "float32[9]").replace("i0<8", "i0<9"))
    phases = [
        ("r0<5", ["store a[4 * o0 + r0] exp(x[4 * o0 + r0])"]),
        ("r1<4", ["store y[o0, r1] neg(a[4 * o0 + r1])"]),
    ]
    reject(program, plan_of(program, [kernel("k", "o0<2", phases, d)]), "which another outer iteration writes")


# -- scans -------------------------------------------------------------------------------------------------------------
SCAN = """
input x: float32[4, 8]
nest s: float32[4, 8] for (i0<4, i1<8) scan sum dim 1
  value exp(x[i0, i1])
output s
"""


def test_scan():
    program, d = make(SCAN)

    def plan(outer, inner, line):
        return plan_of(program, [kernel("k", outer, [(inner, [line])], d)])

    check(program, plan("o0<4", "o1<8", "scan sum s[o0, o1] exp(x[o0, o1])"))
    reject(program, plan("o0<4", "o1<8", "scan prod s[o0, o1] exp(x[o0, o1])"), "'s' is not the prod scan")
    reject(
        program,
        plan("o1<8", "o0<4", "scan sum s[o0, o1] exp(x[o0, o1])"),
        "'s': the scan does not run along dimension 1",
    )
    reject(
        program, plan("o0<4", "o1<8", "scan sum s[o0, o1] exp(x[o0, 7 - o1])"), "'s': the scan runs over another value"
    )


RUNNING = """
input x: float32[4, 8]
nest s: float32[4, 8] for (i0<4, i1<8) scan sum dim 1
  value exp(x[i0, i1])
nest y: float32[4, 8] for (i0<4, i1<8)
  value neg(s[i0, i1])
output y
"""


def running(outer, inner, line, tile, read, after="r2<8"):
    program, d = make(RUNNING)
    phases = [(inner, [line]), (after, [f"store y[o0, r2] neg({read})" if "y[" not in read else read])]
    return program, plan_of(program, [kernel("k", outer, phases, d, scratch=tile)])


def test_scan_through_a_tile():
    line = "scan sum tile[r1] exp(x[o0, r1])"
    check(*running("o0<4", "r1<8", line, "tile: float32[8]", "tile[r2]"))
    for inner, wrong, read, message in (
        ("r1<8", line, "tile[7 - r2]", "another value"),
        ("r1<8", line.replace("sum", "prod"), "tile[r2]", "another value"),
        ("r1<8", line.replace("r1])", "7 - r1])"), "tile[r2]", "another value"),
        ("r1<8", "scan sum tile[7 - r1] exp(x[o0, 7 - r1])", "tile[r2]", "cannot be read as a definition"),
        ("r1<7", line, "tile[r2]", "is not fully written"),
    ):
        reject(*running("o0<4", inner, wrong, "tile: float32[8]", read), message)


def test_a_scan_runs_along_one_loop():
    """Two inner loops are one run of all rows, in the kernel that is made of them."""
    both = "store y[r2, r3] neg(tile[r2, r3])"
    line = "scan sum tile[r0, r1] exp(x[r0, r1])"
    reject(
        *running("", "r0<4, r1<8", line, "tile: float32[4, 8]", both, "r2<4, r3<8"), "runs on from row to row, over 2"
    )
    line = "scan sum tile[r0, r1] exp(x[o0, 4 * r0 + r1])"
    reject(
        *running("o0<4", "r0<2, r1<4", line, "tile: float32[2, 4]", "tile[r2 // 4, r2 % 4]"), "runs on from row to row"
    )


# -- arguments of eager kernels ----------------------------------------------------------------------------------------
def test_negative_strides():
    program, _ = make("""
input x: float32[4]
nest back: float32[4] for (i0<4)
  value x[3 - i0]
extern s: float32[4] stride [1] = ns.f.default(&back)
output s
""")
    step = call_of(program, "ns.f.default", back=ViewOf("x", (4,), (-1,), 3))
    reject(program, plan_of(program, [step]), "a view of 'x' reaches element")
