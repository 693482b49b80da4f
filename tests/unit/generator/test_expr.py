"""The expression language: parsing, printing, types, and where mistakes are said to be."""

from __future__ import annotations

import ast
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opforge.generator.diagnostics import Diagnostics
from opforge.generator.expr.helpers import HELPERS
from opforge.generator.expr.parse import Text, parse_body, parse_expression
from opforge.generator.expr.printer import print_body, print_expression
from opforge.generator.expr.types import (
    ANY,
    INDEX,
    INT,
    NUMBER,
    accepts,
    join,
    list_of,
    of_schema,
    optional,
    parse_type,
)
from opforge.generator.load import load_text
from opforge.runtime.lower.language import names as runtime_names


def text_of(value: str) -> Text:
    """A text as it stands in an entry, in a block scalar."""
    block = textwrap.indent(value, "    ")
    diags = Diagnostics()
    (entry,) = load_text(f"- op: x\n  expr: |\n{block}\n", "t.yaml", diags).entries
    return Text(entry, ("expr",), entry["expr"], diags)


def parsed(value: str) -> ast.expr:
    source = text_of(value)
    tree = parse_expression(source)
    assert tree is not None, source.diags.render()
    return tree


# -- printing ----------------------------------------------------------------------------------------------------------
names = st.sampled_from(["x", "self", "other", "alpha", "dim"])
atoms = (
    names
    | st.integers(0, 99).map(str)
    | st.floats(0, 1e9).map(repr)
    | st.sampled_from(["True", "None", '"tanh"', "[]", "shape(x)"])
)


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.sampled_from(
        ["+", "-", "*", "/", "//", "%", "**", "&", "|", "^", "<<", ">>", "and", "or", "<", "==", "in", "is not"]
    )
    return (
        st.tuples(inner, binary, inner).map(lambda t: f"({t[0]}) {t[1]} ({t[2]})")
        | st.tuples(st.sampled_from(["-", "~", "not "]), inner).map(lambda t: f"{t[0]}({t[1]})")
        | st.tuples(inner, inner, inner).map(lambda t: f"({t[0]}) if ({t[1]}) else ({t[2]})")
        | st.lists(inner, max_size=3).map(lambda l: f"[{', '.join(l)}]")
        | st.lists(inner, min_size=1, max_size=3).map(lambda l: f"({', '.join(l)},)")
        | st.tuples(names, st.lists(inner, max_size=3)).map(lambda t: f"{t[0]}({', '.join(t[1])})")
        | st.tuples(names, inner).map(lambda t: f"{t[0]}(key={t[1]}, *[x])")
        | st.tuples(inner, inner).map(lambda t: f"({t[0]})[{t[1]}]")
        | st.tuples(inner, inner).map(lambda t: f"({t[0]})[({t[1]}):]")
        | st.tuples(names, inner).map(lambda t: f"{t[0]}[*({t[1]}), 0]")
        | st.tuples(inner, inner, inner).map(lambda t: f"[{t[0]} for n in ({t[1]}) if ({t[2]})]")
        | st.tuples(inner, inner).map(lambda t: f"all({t[0]} for n, k in ({t[1]}))")
    )


@given(st.recursive(atoms, grown, max_leaves=8))
def test_printing_a_parsed_text_is_canonical_and_keeps_its_meaning(text: str) -> None:
    tree = parsed(text)
    once = print_expression(tree)
    again = parsed(once)
    assert ast.dump(again) == ast.dump(tree)
    assert print_expression(again) == once


@pytest.mark.parametrize(
    "text",
    [
        "0.5 * self * (1 + tanh(0.7978845608028654 * (self + 0.044715 * self * self * self)))",
        "-x ** 2",
        "(-x) ** 2",
        "x ** -1",
        "a - (b - c)",
        "(a if b else c) + 1",
        "not (a and b) or c",
        "[*l, 1, l[1:], l[:2], l[a:b]]",
        "self[*i[:d], i[d] + 1, *i[d + 1:]]",
        "[n if k in dims else 1 for k, n in enumerate(shape(self)) if n is not None]",
        "[a + n for k, (a, n) in enumerate(zip(l, m))]",
        "sum.dim_IntList(x, [dim], keepdim=True)",
        '"tanh" if x == "none" else (1,)',
    ],
)
def test_canonical_texts_print_as_they_are(text: str) -> None:
    assert print_expression(parsed(text)) == text


def test_a_body_prints_as_it_is() -> None:
    body = textwrap.dedent(
        """\
        m = amax(self, [dim], keepdim=True)
        if half and x is not None:
            a, b = f(self)
        elif dim == 0:
            a = m
        else:
            return self
        return a, m
        """
    )
    tree = parse_body(text_of(body))
    assert tree is not None
    assert print_body(tree) == body


# -- what is rejected --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x +", "t.yaml:3:8: error: expected an expression: invalid syntax"),
        ("x.__class__", "t.yaml:3:5: error: an attribute is not part of the expression language"),
        ("1 + (lambda: 0)()", "t.yaml:3:10: error: a lambda is not part of the expression language"),
        ('f"{x}"', "t.yaml:3:5: error: an f-string is not part of the expression language"),
        ("x @ y", "t.yaml:3:5: error: '@' is not part of the expression language"),
        ("(y := 1)", "t.yaml:3:6: error: ':=' is not part of the expression language"),
        ("{1: 2}", "t.yaml:3:5: error: a dict is not part of the expression language"),
        ("1j * x", "t.yaml:3:5: error: a literal of type 'complex' is not part of the expression language"),
        ("0 < x < 1", "t.yaml:3:5: error: write a chained comparison as two, joined by 'and' ('&' for elems)"),
        ("f(**k)", "t.yaml:3:7: error: '**' in a call is not part of the expression language"),
        ("l[::2]", "t.yaml:3:7: error: a slice has no step here: use reversed(l)"),
        ("[a for a in b for c in d]", "t.yaml:3:5: error: a comprehension has one 'for'"),
        ("x # no", "t.yaml:3:7: error: an expression holds no comment: put it in a YAML comment above"),
        ("-" * 200 + "x", "nested deeper than 60 levels"),
        ("(" * 300 + "x" + ")" * 300, "too many nested parentheses"),
        ("x" * 9000, "longer than 8000 characters"),
    ],
)
def test_everything_outside_the_whitelist_is_rejected_at_its_place(text: str, message: str) -> None:
    source = text_of(text)
    assert parse_expression(source) is None
    assert message in source.diags.render()


def test_the_place_is_right_on_later_lines_and_after_wide_characters() -> None:
    source = text_of('f("äöü",\n  x.y)')
    assert parse_expression(source) is None
    assert "t.yaml:4:7: error: an attribute" in source.diags.render()
    source = text_of('f("äöü", x.y)')
    assert parse_expression(source) is None
    assert "t.yaml:3:14: error: an attribute" in source.diags.render()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("for k in l:\n    x = k", "a 'for' loop is not part of the expression language"),
        ("import os", "an import is not part of the expression language"),
        ("x.y = 1", "expected 'name = expression' or 'a, b = expression'"),
        ("x += 1", "an update is not part of the expression language"),
        ("f(x)", "an expression alone is not part of the expression language"),
        ("def f():\n    return 1", "a function is not part of the expression language"),
    ],
)
def test_only_assignments_ifs_and_returns_are_statements(body: str, message: str) -> None:
    source = text_of(body)
    assert parse_body(source) is None
    assert message in source.diags.render()


# -- types -------------------------------------------------------------------------------------------------------------
def test_types_of_torch_schemas() -> None:
    cases = {
        "Tensor": "tensor",
        "SymInt[]?": "optional[list[index]]",
        "Tensor?[]": "list[optional[tensor]]",
        "int[1]": "list[int]",
    }
    cases |= {"Scalar": "number", "ScalarType?": "optional[dtype]", "MemoryFormat?": "any", "bool": "bool"}
    assert {k: str(of_schema(k)) for k in cases} == cases


def test_narrow_types_stand_for_wide_ones_and_not_the_reverse() -> None:
    elem, tensor = parse_type("elem"), parse_type("tensor")
    assert accepts(INDEX, INT)
    assert not accepts(INT, INDEX)
    assert accepts(elem, NUMBER)
    assert not accepts(NUMBER, elem)
    assert not accepts(elem, tensor)
    assert accepts(optional(tensor), tensor)
    assert not accepts(tensor, optional(tensor))
    assert accepts(list_of(INDEX), list_of(INT))
    assert accepts(parse_type("int | list[int]"), list_of(INT))


def test_join_is_the_narrowest_common_type() -> None:
    assert join(INT, INDEX) == INDEX
    assert join(INDEX, NUMBER) == NUMBER
    assert join(parse_type("none"), INT) == optional(INT)
    assert join(list_of(INT), list_of(INDEX)) == list_of(INDEX)
    assert join(parse_type("str"), INT) == ANY


def test_every_helper_of_the_language_exists_at_run_time() -> None:
    from opforge.runtime.lower.language.builder import Builder

    missing = [h.name for h in HELPERS.values() if h.origin == "names" and not hasattr(runtime_names, h.name)]
    missing += [h.name for h in HELPERS.values() if h.origin == "builder" and not hasattr(Builder, h.name)]
    assert missing == []
