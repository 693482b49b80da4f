"""The plan checker accepts correct plans and rejects each way of breaking them, naming the buffer and the step."""

import pytest

from opforge.errors import PlanError
from opforge.runtime.check.plan import check
from opforge.runtime.ir.index import sym
from opforge.runtime.ir.nodes import Buffer
from opforge.runtime.ir.verify import verify
from opforge.runtime.kernels.plan import Allocation, CopyStep, ViewOf
from tests.support.ir_text import parse
from tests.support.plans import dtypes_of, kernel, plan_of


def make(text):
    program = parse(text)
    verify(program)
    return program, dtypes_of(program)


def reject(program, plan, *parts):
    with pytest.raises(PlanError) as error:
        check(program, plan)
    for part in parts:
        assert part in str(error.value)


# -- a chain through the arena -----------------------------------------------------------------------------------------
CHAIN = """
input x: float32[4, 8]
nest a: float32[4, 8] for (i0<4, i1<8)
  value exp(x[i0, i1])
nest b: float32[4, 8] for (i0<4, i1<8)
  value add(a[i0, i1], x[i0, 7 - i1])
nest c: float32[8, 4] for (i0<8, i1<4)
  value mul(a[i1, i0], b[i1, i0])
output c
"""


def chain(
    b_at=128,
    order=(0, 1, 2),
    a_value="exp(x[o0, o1])",
    a_index="[o0, o1]",
    b_value="add(a[o0, o1], x[o0, 7 - o1])",
    **more,
):
    program, d = make(CHAIN)
    steps = [
        kernel("ka", "o0<4, o1<8", [("", [f"store a{a_index} {a_value}"])], d),
        kernel("kb", "o0<4, o1<8", [("", [f"store b[o0, o1] {b_value}"])], d),
        kernel("kc", "o0<8, o1<4", [("", ["store c[o0, o1] mul(a[o1, o0], b[o1, o0])"])], d),
    ]
    allocations = {"a": Allocation("arena", 0), "b": Allocation("arena", b_at), **more.pop("allocations", {})}
    return program, plan_of(program, [steps[k] for k in order], allocations, arena=more.pop("arena", 256), **more)


def test_chain_is_right():
    check(*chain())


def test_swapped_steps():
    reject(*chain(order=(1, 0, 2)), "step 0 (kernel 'kb')", "'a' is read before anything is written to it")


def test_missing_step():
    reject(*chain(order=(0, 2)), "step 1 (kernel 'kc')", "'b' is read before anything is written to it")


def test_arena_overlap():
    """`b` may be written over `a` for `kb` alone, but `kc` reads `a` after it."""
    reject(
        *chain(b_at=0),
        "step 2 (kernel 'kc')",
        "'a' is read after its memory was overwritten by 'b' in step 1 (kernel 'kb')",
    )


def test_arena_partial_overlap_in_one_kernel():
    reject(
        *chain(b_at=64),
        "step 1 (kernel 'kb')",
        "'a' is read at [o0, o1] in phase 0, but 'b' is written over it",
        "not the same element",
    )


def test_beyond_the_arena():
    reject(*chain(b_at=132), "'b' takes bytes 132..260 of an arena of 256")


def test_misaligned_arena():
    reject(*chain(b_at=126), "'b' is at byte 126, which is not a multiple of its element size 4")


def test_wrong_coordinate():
    reject(
        *chain(a_value="exp(x[o0, 7 - o1])"),
        "step 0 (kernel 'ka')",
        "'a'",
        "stores another value",
        "x[o0, -o1 + 7] instead of x[o0, o1]",
    )


def test_wrong_operation():
    reject(*chain(a_value="sin(x[o0, o1])"), "'a'", "stores another value", "sin(x[o0, o1]) instead of exp(x[o0, o1])")


def test_half_written():
    reject(*chain(a_index="[o0, o1 // 2]"), "step 0 (kernel 'ka')", "'a'")
    program, plan = chain()
    k = kernel("ka", "o0<4, o1<4", [("", ["store a[o0, o1] exp(x[o0, o1])"])], dtypes_of(program))
    plan.steps[0] = plan.steps[0].__class__(k)
    reject(program, plan, "step 1 (kernel 'kb')", "'a' is read, but only a part of it is written (0:4 x 0:4)")


def test_written_in_two_halves_is_right():
    program, plan = chain()
    k = kernel(
        "ka",
        "o0<4, o1<4",
        [("", ["store a[o0, o1] exp(x[o0, o1])", "store a[o0, 4 + o1] exp(x[o0, 4 + o1])"])],
        dtypes_of(program),
    )
    plan.steps[0] = plan.steps[0].__class__(k)
    check(program, plan)


def test_out_of_bounds():
    reject(
        *chain(b_value="add(a[o0, o1], x[o0, 8 - o1])"),
        "step 1 (kernel 'kb')",
        "'x' is accessed at -o1 + 8, which is not within 0..8 - 1",
    )


def test_unlisted_argument():
    program, plan = chain()
    k = plan.steps[1].kernel
    plan.steps[1] = plan.steps[1].__class__(k.__class__(**{**vars(k), "reads": ("a",)}))
    reject(program, plan, "step 1", "'x' is read, but is not an argument")


def test_returned_from_the_arena():
    program, plan = chain(allocations={"c": Allocation("arena", 256)}, arena=512)
    reject(program, plan, "output 0", "'c' is returned, but its memory is not its own (arena)")


def test_output_strides():
    program, plan = chain()
    program.outputs = (program.outputs[0].__class__("c", (1, 8)),)
    reject(program, plan, "output 0", "'c' is returned with strides [4, 1], the caller must see [1, 8]")


def test_wrong_output():
    program, plan = chain()
    plan.outputs = (ViewOf("b", (8, 4), (1, 8), 0),)
    reject(program, plan, "output 0", "the view of 'b' with strides [1, 8] and offset 0 is not buffer 'c'")


def test_overwritten_input():
    reject(
        *chain(allocations={"b": Allocation("alias", of="x")}),
        "step 1 (kernel 'kb')",
        "'x' is read at [o0, -o1 + 7]",
        "'b' is written over it",
    )
    program, plan = chain(b_value="add(a[o0, o1], x[o0, o1])", allocations={"b": Allocation("alias", of="x")})
    program = parse(CHAIN.replace("x[i0, 7 - i1]", "x[i0, i1]"))
    reject(program, plan, "input 'x' at the end", "not mutated by the program", "overwritten by 'b' in step 1")


def test_two_names_in_one_place():
    program, plan = chain(allocations={"c": Allocation("alias", of="a")})
    reject(
        program,
        plan,
        "step 2 (kernel 'kc')",
        "'a' is read at [o1, o0]",
        "'c' is written over it",
        "not the same element",
    )


def test_freed_too_early():
    program, plan = chain(allocations={"a": Allocation("dedicated")}, frees={1: ("a",)})
    reject(program, plan, "step 2", "'a' is read after its memory was freed by step 1 (kernel 'kb')")
    check(*chain(allocations={"a": Allocation("dedicated")}, frees={2: ("a",)}))


# -- in place ----------------------------------------------------------------------------------------------------------
INPLACE = """
input x: float32[4, 8]
nest a: float32[4, 8] for (i0<4, i1<8)
  value exp(x[i0, i1])
nest b: float32[4, 8] for (i0<4, i1<8)
  value neg(a[i0, %s])
output b
"""


def in_place(read, reverse=False):
    program, d = make(INPLACE % ("7 - i1" if reverse else "i1"))
    steps = [
        kernel("ka", "o0<4, o1<8", [("", ["store a[o0, o1] exp(x[o0, o1])"])], d),
        kernel("kb", "o0<4, o1<8", [("", [f"store b[o0, o1] neg(a[o0, {read}])"])], d),
    ]
    return program, plan_of(program, steps, {"a": Allocation("dedicated"), "b": Allocation("alias", of="a")})


def test_in_place_at_the_same_index():
    check(*in_place("o1"))


def test_in_place_at_a_shifted_index():
    reject(*in_place("7 - o1", reverse=True), "step 1", "'a' is read at [o0, -o1 + 7]", "'b' is written over it")


# -- softmax: registers, phases ----------------------------------------------------------------------------------------
SOFTMAX = """
input x: float32[4, 8]
nest m: float32[4] for (i0<4) reduce max over (r0<8)
  value x[i0, r0]
nest e: float32[4, 8] for (i0<4, i1<8)
  value exp(sub(x[i0, i1], m[i0]))
nest s: float32[4] for (i0<4) reduce sum over (r0<8)
  value e[i0, r0]
nest y: float32[4, 8] for (i0<4, i1<8)
  value div(e[i0, i1], s[i0])
output y
"""
MAX = ("r0<8", ["reduce vm max x[o0, r0]"])
SUM = ("r1<8", ["reduce vs sum exp(sub(x[o0, r1], vm[]))"])
DIV = ("r2<8", ["store y[o0, r2] div(exp(sub(x[o0, r2], vm[])), vs[])"])


def softmax(*phases, allocations=None, **kw):
    program, d = make(SOFTMAX)
    return program, plan_of(
        program, [kernel("k", "o0<4", phases, {**d, "vs": "float32", "vm": "float32"}, **kw)], allocations
    )


def test_softmax_is_right():
    check(*softmax(MAX, SUM, DIV))


def test_split_reduction_loops_are_right():
    parts = ("r1<2, r3<4", ["reduce vs sum exp(sub(x[o0, 4 * r1 + r3], vm[]))"])
    check(*softmax(MAX, parts, DIV))


def test_softmax_through_a_tile_is_right():
    fill = ("r1<8", ["store t[r1] exp(sub(x[o0, r1], vm[]))", "reduce vs sum exp(sub(x[o0, r1], vm[]))"])
    check(*softmax(MAX, fill, ("r2<8", ["store y[o0, r2] div(t[r2], vs[])"]), scratch="t: float32[8]"))


def test_tile_read_reversed():
    fill = ("r1<8", ["store t[r1] exp(sub(x[o0, r1], vm[]))", "reduce vs sum exp(sub(x[o0, r1], vm[]))"])
    reject(
        *softmax(MAX, fill, ("r2<8", ["store y[o0, r2] div(t[7 - r2], vs[])"]), scratch="t: float32[8]"),
        "'y'",
        "another value",
    )


def test_tile_half_written():
    fill = ("r1<4", ["store t[r1] exp(sub(x[o0, r1], vm[]))"])
    reject(
        *softmax(MAX, SUM, fill, ("r2<8", ["store y[o0, r2] div(t[r2], vs[])"]), scratch="t: float32[8]"),
        "tile 't'",
        "not fully written",
    )


def test_read_before_reduce():
    reject(
        *softmax(SUM, MAX, DIV),
        "step 0 (kernel 'k')",
        "register 'vm' is read in phase 0, before its reduction in phase 1",
    )


def test_reduce_in_the_same_phase():
    both = ("r0<8", ["reduce vm max x[o0, r0]", "reduce vs sum exp(sub(x[o0, r0], vm[]))"])
    reject(*softmax(both, DIV), "register 'vm' is read in phase 0, before its reduction in phase 0")


def test_reduce_over_half():
    half = ("r0<4", ["reduce vm max x[o0, r0]"])
    reject(*softmax(half, SUM, DIV), "'y': phase 2 stores another value than the program defines")


def test_wrong_reduction():
    reject(*softmax(("r0<8", ["reduce vm min x[o0, r0]"]), SUM, DIV), "'y'", "another value")


def test_softmax_in_place_needs_the_input_to_be_mutated():
    program, plan = softmax(MAX, SUM, DIV, allocations={"y": Allocation("alias", of="x")})
    reject(program, plan, "output 0", "'y' is returned, but its memory is not its own (input x)")
    program.outputs, plan.outputs = (), ()
    program.mutations = (("x", "y"),)
    check(program, plan)


def test_softmax_over_rows_in_place_of_columns():
    """Each outer iteration would write what others still read."""
    text = SOFTMAX.replace("value div(e[i0, i1], s[i0])", "value div(e[i0, i1], s[3 - i0])").replace(
        "output y", "mutate x = y"
    )
    program, d = make(text)
    flip = [("r0<8", ["reduce vm max x[3 - o0, r0]"]), ("r1<8", ["reduce vs sum exp(sub(x[3 - o0, r1], vm[]))"])]
    own = [("r2<8", ["reduce wm max x[o0, r2]"]), ("r3<8", ["store y[o0, r3] div(exp(sub(x[o0, r3], wm[])), vs[])"])]
    k = kernel("k", "o0<4", [*flip, *own], d)
    check(program, plan_of(program, [k, CopyStep("x", "y")], outputs=()))
    reject(
        program,
        plan_of(program, [k], {"y": Allocation("alias", of="x")}),
        "step 0",
        "'x' is read at [-o0 + 3, r0]",
        "by another outer iteration",
    )


def test_several_results_of_one_kernel():
    program, d = make(SOFTMAX.replace("output y", "output y\noutput m\noutput e"))
    more = [("", ["store m[o0] vm[]"]), ("r3<8", ["store e[o0, r3] exp(sub(x[o0, r3], vm[]))"])]
    check(program, plan_of(program, [kernel("k", "o0<4", [MAX, SUM, DIV, *more], d)]))
    shared = [("r2<8", ["store e[o0, r2] exp(sub(x[o0, r2], vm[]))", "store y[o0, r2] div(e[o0, r2], vs[])"])]
    check(program, plan_of(program, [kernel("k", "o0<4", [MAX, SUM, *shared, more[0]], d)]))
    dropped = plan_of(program, [kernel("k", "o0<4", [MAX, SUM, DIV, more[0]], d)])
    reject(program, dropped, "output 2", "'e' is read before anything is written to it")
    overlapping = plan_of(program, [kernel("k", "o0<4", [MAX, SUM, DIV, *more], d)], {"e": Allocation("alias", of="y")})
    reject(program, overlapping, "step 0", "'y' and 'e', both written here, overlap")


def test_reads_what_another_iteration_writes():
    program, d = make(CHAIN.replace("x[i0, 7 - i1]", "a[3 - i0, i1]"))
    both = [("o1<8", ["store a[o0, o1] exp(x[o0, o1])"]), ("o2<8", ["store b[o0, o2] add(a[o0, o2], a[3 - o0, o2])"])]
    last = kernel("kc", "o0<8, o1<4", [("", ["store c[o0, o1] mul(a[o1, o0], b[o1, o0])"])], d)
    plan = plan_of(program, [kernel("k", "o0<4", both, d), last])
    reject(program, plan, "step 0", "'a' is read in phase 1 at [-o0 + 3, o2], which another outer iteration writes")


# -- masks, concatenation ----------------------------------------------------------------------------------------------
CAT = """
input x: float32[4]
input y: float32[3]
nest c: float32[7] for (i0<7)
  value where(lt([i0], 4:int64):bool, x[i0] if lt([i0], 4:int64):bool, y[i0 - 4] if ge([i0], 4:int64):bool)
nest z: float32[7] for (i0<7)
  value neg(c[i0])
output z
"""


def test_masked_loads_inlined():
    program, d = make(CAT)
    mask = "lt([o0], 4:int64):bool"
    whole = f"store z[o0] neg(where({mask}, x[o0] if {mask}, y[o0 - 4] if ge([o0], 4:int64):bool))"
    check(program, plan_of(program, [kernel("k", "o0<7", [("", [whole])], d)]))
    parts = [("o0<4", ["store z[o0] neg(x[o0])"]), ("o1<3", ["store z[o1 + 4] neg(y[o1])"])]
    check(program, plan_of(program, [kernel("k", "", parts, d)]))
    wrong = [("o0<4", ["store z[o0] neg(x[o0])"]), ("o1<3", ["store z[o1 + 4] neg(y[2 - o1])"])]
    reject(
        program,
        plan_of(program, [kernel("k", "", wrong, d)]),
        "'z': phase 1 stores another value",
        "y[-o1 + 2] instead of y[o1]",
    )
    twice = [("o0<5", ["store z[o0] neg(x[o0])"]), ("o1<3", ["store z[o1 + 4] neg(y[o1])"])]
    reject(
        program, plan_of(program, [kernel("k", "", twice, d)]), "'x' is accessed at o0, which is not within 0..4 - 1"
    )


def test_conditions_known_by_other_names():
    """A mask that holds by what another buffer is, and comparisons of floats, which may both fail."""
    program, d = make("""
input x: float32[4]
nest yes: bool[4] for (i0<4)
  value True:bool
nest chosen: float32[4] for (i0<4)
  value where(yes[i0], x[i0], 0.0:float32)
nest half: float32[4] for (i0<4)
  value where(lt(x[i0], 1.0:float32):bool, 2.0:float32, where(ge(x[i0], 1.0:float32):bool, 3.0:float32, 4.0:float32))
output chosen
output half
""")
    half = "store half[o0] where(lt(x[o0], 1.0:float32):bool, 2.0:float32, {})"
    nested = half.format("where(ge(x[o0], 1.0:float32):bool, 3.0:float32, 4.0:float32)")

    def plan(*lines):
        return plan_of(program, [kernel("k", "o0<4", [("", list(lines))], d)])

    check(program, plan("store chosen[o0] x[o0]", nested))
    reject(program, plan("store chosen[o0] 0.0:float32", nested), "'chosen': phase 0 stores another value")
    reject(program, plan("store chosen[o0] x[o0]", half.format("3.0:float32")), "'half': phase 0 stores another value")


def test_nothing_proves_itself():
    """A comparison that its coordinates decide is not thereby equal to another one."""
    program, d = make("""
input x: float32[4]
nest z: bool[4] for (i0<4)
  value gt(x[i0], 0.0:float32):bool
output z
""")
    wrong = kernel("k", "o0<4", [("", ["store z[o0] lt([o0], 5:int64):bool"])], d)
    reject(program, plan_of(program, [wrong]), "'z': phase 0 stores another value", "True:bool instead of gt(x[o0]")


# -- sizes known at run time -------------------------------------------------------------------------------------------
DYNAMIC = """
symbol s0 = 16
input x: float32[s0, 8]
nest v: float32[8 * s0] for (i0<8 * s0)
  value exp(x[i0 // 8, i0 % 8])
nest r: float32[s0] for (i0<s0) reduce sum over (r0<8)
  value v[8 * i0 + r0]
output r
"""


def test_symbolic_sizes():
    program, d = make(DYNAMIC)
    s0 = {"s0": sym("s0")}
    right = kernel(
        "k", "o0<s0", [("r0<8", ["reduce v0 sum exp(x[o0, r0])"]), ("", ["store r[o0] v0[]"])], d, symbols=s0
    )
    check(program, plan_of(program, [right]))
    wrong = kernel(
        "k", "o0<s0", [("r0<8", ["reduce v0 sum exp(x[s0 - 1 - o0, r0])"]), ("", ["store r[o0] v0[]"])], d, symbols=s0
    )
    reject(program, plan_of(program, [wrong]), "'r'", "another value")


def test_view_of_another_dtype_read_late():
    """`bits` lives in `a`'s memory; the kernel that reads `a` comes after it was overwritten."""
    program, d = make("""
input x: float32[4]
nest a: float32[4] for (i0<4)
  value exp(x[i0])
nest bits: int32[4] for (i0<4)
  value add(bitcast(a[i0]):int32, 1:int32)
nest y: float32[4] for (i0<4)
  value add(a[i0], to_dtype(bits[i0]):float32)
output y
""")
    steps = [
        kernel("ka", "o0<4", [("", ["store a[o0] exp(x[o0])"])], d),
        kernel("kb", "o0<4", [("", ["store bits[o0] add(bitcast(a[o0]):int32, 1:int32)"])], d),
        kernel("ky", "o0<4", [("", ["store y[o0] add(a[o0], to_dtype(bits[o0]):float32)"])], d),
    ]
    check(program, plan_of(program, steps, {"a": Allocation("arena", 0), "bits": Allocation("arena", 64)}, arena=128))
    late = plan_of(program, steps, {"a": Allocation("arena", 0), "bits": Allocation("alias", of="a")}, arena=128)
    reject(
        program,
        late,
        "step 2 (kernel 'ky')",
        "'a' is read after its memory was overwritten by 'bits' in step 1 (kernel 'kb')",
    )


def test_overlapping_elements():
    program, plan = chain()
    plan.layouts["c"] = Buffer("c", (8, 4), "float32", (0, 1))
    reject(program, plan, "step 2", "'c' is written, but elements of its layout share memory")
