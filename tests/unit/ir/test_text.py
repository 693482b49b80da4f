"""The text form of the loop IR reads back as the same objects."""

import pytest
import torch

from opforge.errors import IRError
from opforge.runtime.ir.index import Var, of, sym, var
from opforge.runtime.ir.nodes import (
    Buffer,
    Extern,
    Nest,
    Node,
    Output,
    Program,
    Ref,
    Scatter,
    const,
    index_node,
    indirect,
    load,
)
from opforge.runtime.ir.text import dump
from tests.support.ir_text import parse


def op(name, *args, dtype=None, attr=None):
    return Node(name, args, dtype or args[-1].dtype, attr)


def everything() -> Program:
    s90 = sym("s90", 16)
    i, j, r = var("i0", 4), var("i1", s90), Var("r0", s90)
    x = load("x", (i, j), "float32")
    shared = op("exp", x)
    mask = op(
        "and",
        op("ge", index_node(j), const(2, "int64"), dtype="bool"),
        op("lt", index_node(j), const(9, "int64"), dtype="bool"),
    )
    y = Nest(
        "y",
        (4, s90, 1),
        "float32",
        (i, j, of(Var("i2", 1))),
        op("add", shared, op("mul", shared, load("x", (3 - i, (j * 3 + 1) // 2 % s90), "float32", mask))),
    )
    row = Nest(
        "row", (4,), "float32", (i,), load("y", (i, of(r), 0), "float32"), (r,), "sum", origin='model.py:3 "x.sum(1)"'
    )
    run = Nest("run", (4, s90), "float32", (i, j), x, scan="sum", scan_dim=1)
    at = indirect(load("idx", (i,), "int64"), 0, 3)
    sc = Nest(
        "sc",
        (4,),
        "float32",
        (i,),
        op("neg", load("row", (of(Var("d0", 4)),), "float32")),
        scatter=Scatter(
            "row",
            (at.subst({i.var: var("d0", 4)}, lambda v: indirect(load("idx", (var("d0", 4),), "int64"), 0, 3)),),
            "sum",
            (Var("d0", 4),),
            op("ne", index_node(var("d0", 4)), const(1, "int64"), dtype="bool"),
        ),
    )
    flags = Nest(
        "flags",
        (4,),
        "bool",
        (i,),
        op(
            "eq",
            op("to_dtype", load("x", (at, 0), "float32"), dtype="bfloat16"),
            const(float("-inf"), "bfloat16"),
            dtype="bool",
        ),
    )
    call = Extern(
        (Buffer("m", (4, 2), "float32", (2, 1)), Buffer("n", (), "int64", ())),
        "ns.topk.default",
        ([Ref("y"), (Ref("row", (s90, 1)),)], 2, s90 * 2, -1.5, None, "mean", torch.float32),
        (("device", torch.device("cpu")), ("flag", True), ("e", ())),
        False,
        True,
        "topk",
    )
    deep = load("m", (i, 0), "float32")
    for _ in range(40):
        deep = op("sin", deep)
    scalar = Nest("z", (4,), "float32", (i,), op("fancy", deep, const(float("nan"), "float32"), attr=(1, "a")))
    return Program(
        (Buffer("x", (4, s90), "float32", (s90, 1)), Buffer("idx", (4,), "int64", (2,), 3)),
        [y, row, run, sc, flags, call, scalar],
        (Output("y", (s90, 1, 1)), Output("z"), Output(None, None, s90 + 1), Output(None, None, 3)),
        (("x", "run"),),
        ("s90",),
    )


def test_round_trip_is_exact():
    program = everything()
    text = dump(program)
    again = parse(text)
    assert again == program
    assert dump(again) == text
    assert again.items[0].body is program.items[0].body


def test_a_call_that_must_return_no_views():
    call = Extern((Buffer("y", (2,), "float32", (1,)),), "ns.op.default", (Ref("x"),), whole=True)
    program = Program((Buffer("x", (2,), "float32", (1,)),), [call], (Output("y", (1,)),), ())
    assert "ns.op.default(&x) whole" in dump(program)
    assert parse(dump(program)) == program


def test_form():
    text = dump(everything())
    assert (
        'nest row: float32[4] for (i0<4) reduce sum over (r0<s90) from "model.py:3 \\"x.sum(1)\\""\n  value y[i0, r0, 0]\n'
        in text
    )
    assert "  t0 = exp(x[i0, i1])\n" in text
    assert text.count("exp(") == 1
    assert "symbol s90 = 16\n" in text
    assert "mutate x = run\n" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input x: float33[4]", "line 1: expected a dtype, found 'float33'"),
        ("input x: float32[s90]", "line 1: 's90' is neither a loop variable here nor a symbol"),
        ("nest y: float32[4] for (i0<4)\n  value x[i0]", "line 2: buffer 'x' is not defined above"),
        ("nest y: float32[4] for (i0<4)", "nest 'y' has no value"),
        ("nest y: float32[4] for (i0<4)\n  value neg(t3)", "line 2: 't3' is not defined above"),
        ("  value 1", "line 1: an indented line must follow a nest"),
        ("frobnicate", "line 1: expected program, symbol, input, nest, extern, output or mutate, found 'frobnicate'"),
        ("input x: float32[4] ?", "line 1: unexpected character '?'"),
    ],
)
def test_errors_name_the_line(text, message):
    with pytest.raises(IRError) as error:
        parse(text)
    assert str(error.value) == message


def test_equal_text_of_different_loops_is_not_one_index():
    """`x[i0]` over 4 and over 8 print the same; as indirect indices they were once the same object."""
    a, b = (indirect(load("x", (var("i0", n),), "int64"), 0, 3) for n in (4, 8))
    assert a is not b
