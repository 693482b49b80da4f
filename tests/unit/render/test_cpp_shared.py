"""Functions that differ only in the numbers of their addresses become one function; all others stay apart."""

from __future__ import annotations

from dataclasses import replace

from opforge.runtime.render.cpp_shared import FEW, SHORT, Function, shared

SIZES = {"a": "const float*", "out": "float*", "s0": "int64_t"}


def body(channels: int, start: int, source: str = "a") -> str:
    """Lines as a kernel has them, with a number twice, and one that is the length of an array."""
    lines = [
        "    float acc[4];",
        f"    for (int64_t o0p{start} = 0; o0p{start} < 8; ++o0p{start}) {{",
        "        float reg_sum_3;",
        f"        const auto t1 = loadu({source} + s0 * {channels} + o0p{start}, 4);",
        f"        storeu(out + o0p{start} * {channels} + {start}, t1);",
        "    }",
    ]
    return "\n".join([*lines, *["    // more"] * SHORT])


def functions(count: int) -> list[Function]:
    return [Function(f"k{k}", SIZES, body(10 + k, 3 * k), exported=True) for k in range(count)]


def test_numbers_are_arguments() -> None:
    common, *calls = shared(functions(FEW))
    assert common.name == "k0_shared"
    assert list(common.params) == ["a", "s0", "out", "opf_number0", "opf_number1"]
    assert "float acc[4];" in common.body
    assert "s0 * opf_number0 + o0p0, 4" in common.body
    assert "o0p0 * opf_number0 + opf_number1" in common.body
    assert "o0p0 < 8" in common.body, "all have this one"
    for k, call in enumerate(calls):
        assert call.name == f"k{k}"
        assert call.exported
        assert call.body.endswith(f", {10 + k}, {3 * k});")


def test_names_are_handed_over_in_order() -> None:
    given = functions(FEW)
    given[2] = replace(given[2], params={"b": "const float*", "out": "float*", "s0": "int64_t"}, body=body(12, 6, "b"))
    common, *calls = shared(given)
    place = list(common.params).index("a")
    assert [f.body.split("(")[1].split(", ")[place] for f in calls] == ["a", "a", "b", "a"]


def test_what_stays_apart() -> None:
    few = functions(FEW - 1)
    assert shared(few) == few
    fixed = [replace(f, params={**SIZES, "s0": "float"}) for f in functions(FEW)]
    assert shared(fixed) == fixed, "nothing has a symbolic size"
    checked = [replace(f, result="int") for f in functions(FEW)]
    assert shared(checked) == checked
    short = [replace(f, body=f"    out[s0 * {k}] = a[0];") for k, f in enumerate(functions(FEW))]
    assert shared(short) == short
    longer = functions(FEW)
    longer[1] = replace(longer[1], body=longer[1].body.replace("acc[4]", "acc[8]"))
    assert shared(longer) == longer, "an array's length is no number of an address"
    other = functions(FEW)
    other[3] = replace(other[3], params={**SIZES, "a": "const double*"})
    assert shared(other) == other


def test_the_common_function_stands_before_its_first_call_and_after_what_it_calls() -> None:
    called = Function("apart", {"s0": "int64_t"}, "    ;")
    found = shared([called, *functions(FEW), Function("last", SIZES, "    ;")])
    assert [f.name for f in found] == ["apart", "k0_shared", "k0", "k1", "k2", "k3", "last"]
