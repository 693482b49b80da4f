"""Text of the user's program in generated source stays text: a lone carriage return behind `//` once made the rest of the line code."""

from __future__ import annotations

import ast
import io
import linecache
import tokenize
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import opforge
from opforge.runtime.host.from_plan import host_program
from opforge.runtime.host.python import python_source
from opforge.runtime.ir.nodes import Buffer, Ref
from opforge.runtime.ir.quote import attribute, comment_text, identifier, one_line, python_string
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.lower.language.builder import Builder
from opforge.runtime.lower.language.tensor import Tensor
from opforge.runtime.render.cpp_unit import anonymous
from opforge.runtime.render.triton import render_kernel
from tests.support.loops import agree, plan_of, pointwise, program_of, run
from tests.unit.render.test_checks import taken

BREAKS = [chr(k) for k in [*range(0x20), 0x7F, *range(0x80, 0xA0), 0x2028, 0x2029, 0xFEFF, 0xD800]]
ENDINGS = ["\\", "\\ ", "??/", "???/", "?" * 5 + "/", "?\\", "??\\", "*/", "*\\", "**//*/", "/*", "//", "#", "\\#", "%"]
QUOTES = [
    '"',
    "'",
    '"""',
    "'''",
    "\\'",
    '\\"',
    "\\\\'",
    'R"(',
    "{",
    "}",
    "{0}",
    "{x}}",
    "\\N{DIGIT ONE}",
    "\\x",
    "\\u12",
]
NAMES = [
    "größe",
    "名前",
    "\N{LATIN SMALL LIGATURE FI}",
    "\N{RIGHT-TO-LEFT OVERRIDE}x",
    "😀",
    "coding: utf-16",
    "type: ignore",
]
TEXTS = [f"x + 1 {c}\n#error code of the user's" if c == "\n" else f"x + 1 {c}#error code" for c in BREAKS]
TEXTS += [f"x + 1 {end}" for end in [*ENDINGS, *QUOTES, *NAMES]]

each_text = pytest.mark.parametrize("text", TEXTS, ids=ascii)


@each_text
def test_a_comment_is_one_line_of_c_and_of_python(text: str) -> None:
    said = comment_text(text)
    assert said.isascii()
    assert said.replace("\t", "").isprintable()
    assert not any(c in said for c in ("\\", "??", "*/"))
    tokens = list(tokenize.generate_tokens(io.StringIO(f"# {said}\nx = 1\n").readline))
    assert tokens[0].type == tokenize.COMMENT
    assert ast.dump(ast.parse(f"x = 1  # {said}\ny = 2\n")) == ast.dump(ast.parse("x = 1\ny = 2\n"))


@each_text
def test_a_string_has_its_value_and_no_sign_of_a_comment(text: str) -> None:
    said = python_string(text)
    assert ast.literal_eval(said) == text
    assert said.isascii()
    assert said.isprintable()
    assert "#" not in said


@each_text
def test_an_error_is_one_line(text: str) -> None:
    assert len(one_line(text).splitlines()) == 1
    one_line(text).encode()  # no lone surrogate, which no stream takes


def test_ordinary_text_stays_as_it_is() -> None:
    for text in ("add: y = x + 1  # one", "mul: f(x)[0] * {'a': 2}['a']", 'sin: "text" if a ? b'):
        assert comment_text(text) == one_line(text) == text
    assert python_string("it's") == repr("it's")
    assert one_line("größe = 名前") == "größe = 名前"


@pytest.mark.parametrize(
    "name", ["data", "größe", "\N{LATIN SMALL LIGATURE FI}", "class", "a b", "x; raise SystemExit", "#", "0"]
)
def test_attributes_of_any_name(name: str) -> None:
    holder = type("Holder", (), {})()
    setattr(holder, name, 3)
    assert eval(attribute("holder", name), {"holder": holder}) == 3
    assert f"r_{identifier(name)}".isidentifier()
    assert identifier(name).isascii()


def hostile(b: Builder, x: Tensor) -> tuple[Tensor, ...]:
    """A kernel of its own value, and a library call with a demand, for each of the texts."""
    made = []
    for k, text in enumerate(TEXTS):
        b.begin(f"add{k}", f"add: {text}")
        made.append(pointwise(b, lambda a, k=k: s.add(a, float(k)), x))
    b.begin("negative", f"neg: {''.join(TEXTS)}")
    out = Buffer("negative", x.shape, "float32", (1,))
    made += b.extern([out], "aten.neg.default", (Ref(x.name),), (), True)
    b.items[-1] = replace(b.items[-1], demands=(("True", "".join(TEXTS)),))
    return tuple(made)


def test_kernels_and_wrappers_with_all_of_it() -> None:
    """Compiled by the C++ compiler, and run."""
    ran = run(hostile, [torch.randn(9)], lanes=1)
    agree(ran)
    assert ran.source.isascii()
    for text in TEXTS:
        assert f"// add: {comment_text(text)}\n" in ran.source
    program = program_of(hostile, [torch.randn(9)])
    plan = plan_of(program)
    wrapper = python_source(host_program(plan, [b.name for b in program.inputs], {}))
    assert f"# neg: {comment_text(''.join(TEXTS))}\n" in wrapper
    assert python_string("".join(TEXTS)) in wrapper
    compile(wrapper, "wrapper", "exec")


def test_triton_kernels_with_all_of_it() -> None:
    plan = plan_of(program_of(hostile, [torch.randn(9)]))
    said = "".join(render_kernel(k, plan.layouts) for k in plan.kernels())
    assert said.isascii()
    compile(said, "kernels", "exec")
    for text in TEXTS:
        assert comment_text(text) in said


@each_text
def test_assertions_of_triton_kernels(text: str) -> None:
    def build(b: Builder, x: Tensor, k: Tensor) -> Tensor:
        begin = b.begin
        b.begin = lambda prefix, origin, place="": begin(prefix, text, text)  # type: ignore[method-assign]
        return taken(b, x, k)

    (kernel,) = plan_of(program := program_of(build, [torch.randn(9), torch.arange(5)])).kernels()
    said = render_kernel(kernel, plan_of(program).layouts)
    strings = {n.value for n in ast.walk(ast.parse(said)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    (message,) = (python_string(value) for value in strings if text in value)
    other = said.replace(f"{message})", f"{message}) + 1")
    assert other != said
    # Once a "#" of the message hid what follows it from the comparison of kernels.
    assert anonymous(said, kernel.name, (), comment="#") != anonymous(other, kernel.name, (), comment="#")


@pytest.mark.parametrize("c", ["\r", "\0", "\u2028", "\\"], ids=ascii)
def test_a_program_made_of_text(c: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As eager, compiled: `#error` behind a carriage return in a comment of the user's is no line of a kernel."""
    line = f"    return x.sin() + 1.0  # one{c}#error this is a comment\n"
    whole = f"def program(x):\n{line}"
    monkeypatch.setitem(linecache.cache, "<made>", (len(whole), None, ["def program(x):\n", line], "<made>"))
    names: dict = {}
    exec(compile(whole.replace(c, ""), "<made>", "exec"), names)
    x = torch.randn(7)
    torch._dynamo.reset()
    opforge.reset_stats()
    torch.testing.assert_close(torch.compile(names["program"], backend="opforge")(x), names["program"](x))
    assert not opforge.stats()["fallbacks"]
