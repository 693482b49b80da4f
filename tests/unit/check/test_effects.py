"""The plan checker on what has effects: mutations of inputs, scatters, calls of eager kernels."""

import pytest

from opforge.errors import PlanError
from opforge.runtime.check.plan import check
from opforge.runtime.ir.verify import verify
from opforge.runtime.kernels.plan import Allocation, CopyStep, ViewOf
from tests.support.ir_text import parse
from tests.support.plans import call_of, dtypes_of, kernel, plan_of


def make(text):
    program = parse(text)
    verify(program)
    return program, dtypes_of(program)


def reject(program, plan, *parts):
    with pytest.raises(PlanError) as error:
        check(program, plan)
    for part in parts:
        assert part in str(error.value)


# -- mutations ---------------------------------------------------------------------------------------------------------
MUTATE = """
input x: float32[4]
nest old: float32[4] for (i0<4)
  value x[i0]
nest new: float32[4] for (i0<4)
  value add(x[i0], 1.0:float32)
output old
mutate x = new
"""


def mutate(steps="onc", **allocations):
    program, d = make(MUTATE)
    table = {
        "o": kernel("ko", "o0<4", [("", ["store old[o0] x[o0]"])], d),
        "n": kernel("kn", "o0<4", [("", ["store new[o0] add(x[o0], 1.0:float32)"])], d),
        "c": CopyStep("x", "new"),
    }
    return program, plan_of(program, [table[s] for s in steps], allocations)


def test_mutation_is_right():
    check(*mutate())
    check(*mutate("on", new=Allocation("alias", of="x")))


def test_clone_after_the_mutation():
    reject(
        *mutate("nco"),
        "step 2 (kernel 'ko')",
        "'x' is read after its memory was overwritten by the copy of 'new' in step 1",
    )
    reject(
        *mutate("no", new=Allocation("alias", of="x")),
        "step 1 (kernel 'ko')",
        "'x' is read after its memory was overwritten by 'new' in step 0",
    )


def test_clone_dropped():
    program, plan = mutate("nc")
    plan.outputs = (ViewOf("x", (4,), (1,), 0),)
    reject(program, plan, "output 0", "'x' is read after its memory was overwritten by the copy of 'new'")


def test_mutation_dropped():
    reject(*mutate("on"), "input 'x' at the end", "it should hold 'new', but no step puts that value there")


def test_wrong_copy():
    program, plan = mutate()
    plan.steps[-1] = CopyStep("x", "old")
    reject(program, plan, "input 'x' at the end", "it should hold 'new', but was given 'old'")


def test_aliased_inputs():
    """`z` is a view of `x`'s memory: writing `x` loses it."""
    text = MUTATE.replace("nest old", "input z: float32[4]\nnest old").replace("value x[i0]\n", "value z[i0]\n")
    program, d = make(text)
    ko = kernel("ko", "o0<4", [("", ["store old[o0] z[o0]"])], d)
    kn = kernel("kn", "o0<4", [("", ["store new[o0] add(x[o0], 1.0:float32)"])], d)
    check(program, plan_of(program, [kn, CopyStep("x", "new"), ko]))
    together = {"z": Allocation("alias", of="x")}
    reject(
        program,
        plan_of(program, [kn, CopyStep("x", "new"), ko], together),
        "step 2 (kernel 'ko')",
        "'z' is read after its memory was overwritten",
    )


# -- scatter -----------------------------------------------------------------------------------------------------------
SCATTER = """
input x: float32[6]
input idx: int64[3]
nest base: float32[6] for (i0<6)
  value neg(x[i0])
nest y: float32[6] for (i0<6)
  into base[at(idx[d0], 0, 5)] sum over (d0<3)
  value x[d0]
output y
"""
COPY = ("c0<6", ["store y[c0] neg(x[c0])"])
UPDATE = ("u0<3", ["store sum y[at(idx[u0], 0, 5)] x[u0]"])


def scatter(*phases, **allocations):
    program, d = make(SCATTER)
    return program, plan_of(program, [kernel("k", "", phases, d)], allocations)


def test_scatter_is_right():
    check(*scatter(COPY, UPDATE))


def test_scatter_overwritten_by_a_later_fill():
    reject(*scatter(UPDATE, COPY), "step 0", "'y' is updated, but never starts as a copy of 'base'")


def test_scatter_in_place():
    program, d = make(SCATTER)
    first = kernel("kb", "o0<6", [("", ["store base[o0] neg(x[o0])"])], d)
    update = kernel("ku", "", [UPDATE], d)
    allocations = {"base": Allocation("dedicated"), "y": Allocation("alias", of="base")}
    check(program, plan_of(program, [first, update], allocations))
    fill = kernel("kf", "o0<6", [("", ["store y[o0] neg(x[o0])"])], d)
    reject(
        program,
        plan_of(program, [first, update, fill], allocations),
        "step 2 (kernel 'kf')",
        "'y'",
        "its indexed update is missing",
    )
    reject(program, plan_of(program, [update], allocations), "step 0", "'base' is read before anything is written")


def test_scatter_of_another_value():
    wrong = ("u0<3", ["store sum y[at(idx[u0], 0, 5)] x[u0 + 1]"])
    reject(*scatter(COPY, wrong), "'y': its indexed update is not the program's")
    reject(
        *scatter(COPY, ("u0<3", ["store sum y[at(idx[2 - u0], 0, 5)] x[u0]"])),
        "'y': its indexed update is not the program's",
    )


def test_scatter_race():
    program, d = make(SCATTER)
    first = kernel("kb", "o0<6", [("", ["store base[o0] neg(x[o0])"])], d)
    update = kernel("ku", "u0<3", [("", ["store sum y[at(idx[u0], 0, 5)] x[u0]"])], d)
    allocations = {"base": Allocation("dedicated"), "y": Allocation("alias", of="base")}
    check(program, plan_of(program, [first, update], allocations))
    st = update.phases[0].body[0]
    bare = update.__class__(
        **{
            **vars(update),
            "phases": (update.phases[0].__class__((), (st.__class__(**{**vars(st), "atomic": False}),)),),
        }
    )
    reject(program, plan_of(program, [first, bare], allocations), "step 1", "'y' may be updated twice in one element")


# -- extern calls ------------------------------------------------------------------------------------------------------
EXTERN = """
input x: float32[4, 6]
nest a: float32[4, 6] for (i0<4, i1<6)
  value exp(x[i0, i1])
nest t: float32[6, 2, 2] for (i0<6, i1<2, i2<2)
  value a[2 * i1 + i2, i0]
nest h: float32[4, 3] for (i0<4, i1<3)
  value a[i0, i1 + 3]
extern m: float32[6] stride [1] = ns.f.default(&t, &h, 3)
nest y: float32[6] for (i0<6)
  value neg(m[i0])
output y
"""
TV, HV = ViewOf("a", (6, 2, 2), (1, 12, 6), 0), ViewOf("a", (4, 3), (6, 1), 3)


def extern(t=TV, h=HV, args=None, order="aey", **allocations):
    program, d = make(EXTERN)
    table = {
        "a": kernel("ka", "o0<4, o1<6", [("", ["store a[o0, o1] exp(x[o0, o1])"])], d),
        "e": call_of(program, "ns.f.default", t=t, h=h),
        "y": kernel("ky", "o0<6", [("", ["store y[o0] neg(m[o0])"])], d),
    }
    if args is not None:
        e = table["e"]
        table["e"] = e.__class__(e.call, args, e.kwargs)
    return program, plan_of(program, [table[s] for s in order], {"a": Allocation("dedicated"), **allocations})


def test_extern_is_right():
    check(*extern())


def test_extern_views():
    reject(
        *extern(t=ViewOf("a", (6, 2, 2), (1, 6, 12), 0)),
        "step 1 (extern 'ns.f.default')",
        "the view of 'a' with strides [1, 6, 12]",
        "not buffer 't'",
    )
    reject(*extern(h=ViewOf("a", (4, 3), (6, 1), 4)), "a view of 'a' reaches element 24, beyond the buffer")
    reject(*extern(h=ViewOf("a", (4, 3), (6, 1), 2)), "the view of 'a'", "offset 2 is not buffer 'h'")
    reject(*extern(h=ViewOf("x", (4, 3), (6, 1), 3)), "the view of 'x'", "is not buffer 'h'")
    reject(*extern(h=ViewOf("a", (3, 4), (6, 1), 3)), "a view of 'a' has shape [3, 4], 'h' has [4, 3]")


def test_extern_arguments():
    reject(*extern(args=(TV, HV, 4)), "argument 4 should be 3")
    reject(*extern(order="ay"), "step 1 (kernel 'ky')", "'m' is read before anything is written")
    reject(*extern(order="aeey"), "step 2", "the program has no such call (or it is made twice)")
    reject(*extern(order="eay"), "step 0", "'a' is read before anything is written")
