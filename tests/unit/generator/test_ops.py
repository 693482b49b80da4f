"""Operator entries: a tiny spec in, the exact function out; and what is said of wrong ones."""

from __future__ import annotations

import textwrap
import warnings
from pathlib import Path

import pytest
import torch

import opforge
from opforge.errors import SpecError
from opforge.generator import run
from opforge.generator.check_ops import build
from opforge.generator.diagnostics import Diagnostics
from opforge.generator.emit.lowerings import function_text
from opforge.generator.load import load_spec, load_text
from opforge.generator.model import Model
from opforge.generator.op_entries import WITHOUT_LOWERING
from opforge.generator.run import SPECS_DIR, load_model, load_user_model
from opforge.generator.torch_schemas import TorchSchemas
from opforge.generator.user import generate_module, load_user_specs

TORCH = TorchSchemas.snapshot()
SCALARS = load_spec(SPECS_DIR / "scalars.yaml", Diagnostics())


def checked(text: str) -> tuple[dict[str, str], str]:
    """Overload → printed function, and the rendered mistakes."""
    diags = Diagnostics()
    doc = load_text(textwrap.dedent(text), "t.yaml", diags)
    entries = build(doc, Model(Path(), {"scalars": SCALARS, "ops": doc}, {}, TORCH), diags)
    return {w.schema.id: function_text(w) for e in entries for w in e.lowerings}, diags.render() if diags else ""


def printed(text: str) -> dict[str, str]:
    functions, mistakes = checked(text)
    assert mistakes == ""
    return functions


def lines(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


# -- what is printed ---------------------------------------------------------------------------------------------------
def test_a_packet_covers_its_functional_overloads_and_numbers_are_operands_where_tensors_are() -> None:
    functions = printed(
        """
        - op: aten.add
          doc: sum
          kind: pointwise
          expr:
            - if: alpha == 1
              is: self + other
            - is: self + alpha * other
        """
    )
    assert sorted(functions) == ["aten.add.Scalar", "aten.add.Tensor"]
    assert functions["aten.add.Tensor"] == lines(
        """
        def add_Tensor(b, self, other, *, alpha=1):
            p = b.pointwise((self, other))
            self, other = p.operands
            if alpha == 1:
                return p.result(self + other)
            return p.result(self + alpha * other)
        """
    )


def test_scalars_comparisons_and_options_of_pointwise() -> None:
    functions = printed(
        """
        - op: aten.threshold
          doc: where above
          kind: pointwise
          compute: same
          with: {low: self <= threshold}
          expr: where(low & (self == self), value, abs(self))
        - op: aten.where.self
          doc: choice
          kind: pointwise
          promoted: [self, other]
          expr: where(condition, self, other)
        """
    )
    assert functions["aten.threshold.default"] == lines(
        """
        def threshold(b, self, threshold, value):
            p = b.pointwise((self,), compute="same")
            (self,) = p.operands
            low = self <= threshold
            return p.result(s.where(low & s.eq(self, self), value, s.abs(self)))
        """
    )
    assert functions["aten.where.self"] == lines(
        """
        def where_self(b, condition, self, other):
            p = b.pointwise((self, other), plain=(condition,))
            self, other, condition = p.operands
            return p.result(s.where(condition, self, other))
        """
    )


def test_coordinates_and_helpers_hidden_by_arguments() -> None:
    functions = printed(
        """
        - op: aten.expand
          doc: repeated
          kind: view
          native_if: rank(self) > 0
          let: {lead: len(size) - rank(self)}
          shape: "[size(self, k - lead) if n == -1 else n for k, n in enumerate(size)]"
          at: self[*broadcasted(i, shape(self))]
        """
    )
    assert functions["aten.expand.default"] == lines(
        """
        def expand(b, self, size, *, implicit=False):
            b.native_if(rank(self) > 0, "rank(self) > 0")
            lead = len(size) - rank(self)
            out = [size_of(self, k - lead) if n == -1 else n for k, n in enumerate(size)]
            i = b.coords(out)
            return b.define(out, b.at(self, broadcasted(i, shape(self))))
        """
    )


def test_a_reduction_with_a_finish() -> None:
    functions = printed(
        """
        - op: aten.mean.dim
          doc: mean
          kind: reduction
          let: {dims: "dims_of(dim, rank(self))"}
          shape: reduced(shape(self), dims, keepdim)
          over: kept(shape(self), dims)
          reduce: sum
          at: self[*unreduced(i, r, dims, keepdim)]
          dtype: dtype or dtype(self)
          finish: value / prod(kept(shape(self), dims))
        """
    )
    assert functions["aten.mean.dim"] == lines(
        """
        def mean_dim(b, self, dim, keepdim=False, *, dtype=None):
            dims = dims_of(dim, rank(self))
            out = reduced(shape(self), dims, keepdim)
            i = b.coords(out)
            r = b.rcoords(kept(shape(self), dims))
            value = b.at(b.reduce("sum", out, r, b.at(self, unreduced(i, r, dims, keepdim)), dtype or dtype_of(self), exact=True), i)
            return b.define(out, value / prod(kept(shape(self), dims)), dtype or dtype_of(self))
        """
    )


def test_scatter_and_scan() -> None:
    functions = printed(
        """
        - op: aten.index_add
          doc: rows added
          kind: scatter
          let: {d: "wrap(dim, rank(self))"}
          base: self
          over: shape(source)
          into: replace(r, d, index_of(index[r[d]], size(self, d)))
          mode: sum
          at: source[*r]
        - op: aten.cumsum
          doc: running sum
          kind: scan
          shape: shape(self)
          scan: sum
          dim: wrap(dim, rank(self))
          at: self[*i]
        """
    )
    assert functions["aten.index_add.default"] == lines(
        """
        def index_add(b, self, dim, index, source, *, alpha=1):
            d = wrap(dim, rank(self))
            r = b.rcoords(shape(source))
            return b.scatter(self, r, b.at(source, r), replace(r, d, b.index_of(b.at(index, [r[d]]), size(self, d))), mode="sum")
        """
    )
    assert functions["aten.cumsum.default"] == lines(
        """
        def cumsum(b, self, dim, *, dtype=None):
            out = shape(self)
            i = b.coords(out)
            return b.scan("sum", out, wrap(dim, rank(self)), b.at(self, i))
        """
    )


COMPOSITE = """
    - op: aten.sub.Tensor
      doc: difference
      kind: pointwise
      symbol: "-"
      expr: self - other
    - op: aten.eq
      doc: equality
      kind: pointwise
      symbol: "=="
      promote: bool
      expr: self == other
    - op: aten.amax
      doc: greatest
      kind: reduction
      let: {dims: "dims_of(dim, rank(self))"}
      shape: reduced(shape(self), dims, keepdim)
      over: kept(shape(self), dims)
      reduce: max
      at: self[*unreduced(i, r, dims, keepdim)]
"""


def test_one_entry_for_operators_with_values() -> None:
    functions = printed(
        """
        - op:
            aten.max_unpool2d: {dims: 2, words: [float32, 1]}
            aten.max_unpool3d: {dims: -3, words: []}
          doc: without the last dimensions
          kind: gather
          native_if: rank(self) > dims   and len(words) < 2
          shape: shape(self)[:-dims]
          at: self[*i] ** dims
        """
    )
    assert functions["aten.max_unpool2d.default"] == lines(
        """
        def max_unpool2d(b, self, indices, output_size):
            b.native_if(rank(self) > 2 and len(["float32", 1]) < 2, 'rank(self) > 2 and len(["float32", 1]) < 2')
            out = shape(self)[:-2]
            i = b.coords(out)
            return b.define(out, b.at(self, i) ** 2)
        """
    )
    assert functions["aten.max_unpool3d.default"].endswith("return b.define(out, b.at(self, i) ** -3)")


def test_one_entry_for_operators_that_differ_in_a_function() -> None:
    functions = printed(
        COMPOSITE
        + """
    - op:
        aten.fmod.Tensor: {function: fmod, name: fmod}
        aten.add.Tensor: {function: add, name: add}
      doc: a function of two
      kind: pointwise
      expr: function(self, other) if name == "fmod" else function(other, self)
    - op:
        aten.max.default: {function: amax}
        aten.sum.default: {function: sum.dim_IntList}
      doc: over all dimensions
      kind: composite
      body: |
        return function(self, [0])
    - op: aten.sum.dim_IntList
      doc: what is called
      kind: composite
      body: |
        return self
        """
    )
    assert 's.fmod(self, other) if "fmod" == "fmod" else s.fmod(other, self)' in functions["aten.fmod.Tensor"]
    assert 's.add(self, other) if "add" == "fmod" else s.add(other, self)' in functions["aten.add.Tensor"]
    assert functions["aten.max.default"].endswith('return b.call("aten.amax.default", self, [0])')
    assert functions["aten.sum.default"].endswith('return b.call("aten.sum.dim_IntList", self, [0])')


def test_a_composite_calls_operators_by_name_and_by_symbol() -> None:
    functions = printed(
        COMPOSITE
        + """
    - op: aten._softmax
      doc: nonsense with the right types
      kind: composite
      body: |
        m = amax(self, [dim], keepdim=True)
        if half_to_float:
            return eq(self, m)
        elif size(self, dim) < 2:
            return self == m
        return self - m
        """
    )
    assert functions["aten._softmax.default"] == lines(
        """
        def _softmax(b, self, dim, half_to_float):
            m = b.call("aten.amax.default", self, [dim], keepdim=True)
            if half_to_float:
                return b.call("aten.eq.Tensor", self, m)
            elif lt(size(self, dim), 2):
                return b.call("aten.eq.Tensor", self, m)
            return self - m
        """
    )


# -- mistakes ----------------------------------------------------------------------------------------------------------
def pointwise(expr: str, op: str = "aten.abs", more: str = "") -> str:
    return f"- op: {op}\n  doc: d\n  kind: pointwise\n{more}  expr: {expr}\n"


def view(at: str, more: str = "", op: str = "aten.clone") -> str:
    return f"- op: {op}\n  doc: d\n  kind: view\n{more}  shape: shape(self)\n  at: {at}\n"


def composite(body: str, op: str = "aten.silu") -> str:
    return (
        textwrap.dedent(COMPOSITE)
        + f"- op: {op}\n  doc: d\n  kind: composite\n  body: |\n{textwrap.indent(body, '    ')}\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (pointwise("self", op="aten.abss"), "1:7: error: torch has no operator 'aten.abss'; did you mean 'aten.abs'?"),
        (
            pointwise("self", op="aten.add.Tenso"),
            "1:7: error: 'aten.add' has no overload 'Tenso'; did you mean 'Tensor'?",
        ),
        (
            pointwise("self", op="add"),
            "1:7: error: expected an operator, 'namespace.name' or 'namespace.name.overload', found 'add'",
        ),
        (pointwise("self", op="aten.add_.Tensor"), "has no overload that a graph can hold"),
        (pointwise("self * alhpa", op="aten.add"), "4:16: error: unknown name 'alhpa'; did you mean 'alpha'?"),
        (pointwise("tahn(self)"), "4:9: error: unknown name 'tahn'; did you mean 'tanh'?"),
        (pointwise("where(self, 1)"), "4:9: error: the scalar 'where' takes 3 arguments, found 2"),
        (pointwise("exp"), "4:9: error: 'exp' must be called: exp(...)"),
        (
            pointwise("self if self > 0 else 0"),
            "4:17: error: 'self > 0' differs per element: choose with where(cond, a, b)",
        ),
        (pointwise("where(self > 0 and self < 1, self, 0)"), "'and' decides while lowering: for an elem write '&'"),
        (pointwise("self[0]"), "4:9: error: 'self' is an elem here, not a tensor: it has no coordinates"),
        (pointwise("self * i[0]"), "4:16: error: unknown name 'i'"),
        (
            pointwise("self", more="  promote: flaot\n"),
            "expected 'default', 'float', 'bool', 'first' or 'none', found 'flaot'; did you mean",
        ),
        (
            pointwise("self", more="  dtype: '\"floatt32\"'\n"),
            "expected a dtype, found 'floatt32'; did you mean 'float32'?",
        ),
        (
            pointwise("self", more="  shape: shape(self)\n"),
            "4:3: error: unknown key 'shape' for kind 'pointwise' (it belongs to",
        ),
        (
            pointwise("self", op="aten.max.dim"),
            "'aten.max.dim' returns (Tensor values, Tensor indices): use 'composite'",
        ),
        (
            pointwise("weight * self", op="aten.binary_cross_entropy"),
            "'weight' may be None: test it with 'is None' first",
        ),
        (view("self[i]"), "'i' is a list of coordinates: write self[*i]"),
        (view("self[self[*i]]"), "coordinate: expected an index, found an elem 'self[*i]': use index_of(elem, n)"),
        (view("self"), "5:7: error: expected an elem, found a tensor 'self': read it at coordinates, as in x[*i]"),
        (view("self[*drop(i)]"), "'drop' takes 2 arguments, found 1: drop(l: list[T], d: int)"),
        (
            view("self[*drop(i, size(self, 0))]"),
            "drop, 'd': expected an int, found an index 'size(self, 0)': use known(...)",
        ),
        (view("self[*i]", more="  let: {n: memory_format + sizes}\n"), "4:28: error: unknown name 'sizes'"),
        (view("self[*i] + self"), "'self' is a tensor beside an elem: read it at coordinates, self[...]"),
        (composite("return amax(self, 1)"), "'aten.amax.default': 'dim' needs a list, write [1]"),
        (composite("return amax(self, [0], keepdims=True)"), "no argument 'keepdims'; did you mean 'keepdim'?"),
        (composite("return amax(self, [0], 1, 2)"), "takes 3 arguments by position, found 4"),
        (composite("return amx(self, [0])"), "unknown name 'amx'; did you mean 'amax'?"),
        (composite("return tanh(self)"), "'tanh' has no native lowering in the specs"),
        (composite("x = self - 1"), "a path through the body ends without 'return'"),
        (composite("if rank(self) == 0:\n    x = self\nreturn x"), "'x' may have no value here"),
        (composite("return self\nreturn self"), "never reached: everything before it returns"),
        (composite("return rank(self)"), "'aten.silu.default' returns a tensor, found an int"),
        (composite("return self, self"), "'aten.silu.default' returns a tensor, found a tuple[tensor, tensor]"),
        (composite("return self * 2"), "no operator entry has the symbol '*'"),
        (
            "- op: aten.abs\n  doc: d\n  kind: pontwise\n  expr: self\n",
            "3:9: error: unknown kind 'pontwise'; did you mean 'pointwise'?",
        ),
        (
            "- op: aten.sum\n  doc: d\n  kind: reduction\n  reduce: summ\n  shape: '[]'\n  over: shape(self)\n  at: self[*r]\n",
            "no reduction 'summ'; did you mean 'sum'?",
        ),
        (pointwise("self") + pointwise("-self"), "'aten.abs' is covered twice"),
    ],
)
def test_mistakes_are_placed_and_named(text: str, message: str) -> None:
    _, mistakes = checked(text)
    assert message in mistakes


def test_all_mistakes_of_a_file_are_reported_at_once() -> None:
    _, mistakes = checked(pointwise("sefl") + pointwise("where(self)", op="aten.neg") + pointwise("x +", op="aten.exp"))
    assert "t.yaml:4:9: error: unknown name 'sefl'; did you mean 'self'?" in mistakes
    assert "t.yaml:8:9: error: the scalar 'where' takes 3 arguments, found 1" in mistakes
    assert "t.yaml:12:12: error: expected an expression: invalid syntax" in mistakes
    assert mistakes.endswith("3 errors")


def test_nested_calls_are_checked_in_linear_time() -> None:
    assert checked(pointwise("abs(" * 50 + "self" + ")" * 50)) != ("", "")
    _, mistakes = checked(pointwise("abs(" * 50 + "slef" + ")" * 50))
    assert mistakes.count("error:") == 1


def test_every_entry_of_the_specs_is_covered_by_a_lowering_or_a_reason() -> None:
    from opforge.generated import ops

    assert len(ops.LOWERINGS) >= 250
    for info in ops.OPS.values():
        for overload in info.overloads:
            assert (overload in ops.LOWERINGS) == (info.kind not in WITHOUT_LOWERING)
            assert info.kind != "extern" or overload in ops.EXTERN


# -- a user's file -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def library() -> torch.library.Library:
    lib = torch.library.Library("opforge_unit", "FRAGMENT")
    lib.define("shrink(Tensor x, float by) -> Tensor")
    lib.impl("shrink", lambda x, by: torch.where(x.abs() <= by, 0.0, x - x.sign() * by), "CompositeExplicitAutograd")
    torch.library.register_fake("opforge_unit::shrink", lambda x, by: torch.empty_like(x), lib=lib)
    return lib


SHRINK = """\
- op: opforge_unit.shrink
  doc: Towards zero
  kind: pointwise
  expr: where(abs(x) <= by, 0.0, x - sign(x) * by)
"""


def test_a_users_file_holds_operators_only(tmp_path: Path) -> None:
    """Another entry would be checked and then left out, without a word."""
    path = tmp_path / "mixed.yaml"
    path.write_text("- rule: relu_of_relu\n  doc: a\n  match: relu(relu(x))\n  replace: relu(x)\n  test: {x: [3]}\n")
    with pytest.raises(SpecError, match=r"mixed\.yaml:1:3: error: a spec file of your own holds operators .* a 'rule'"):
        generate_module(path)


@pytest.mark.parametrize("ruff", [True, False], ids=["ruff", "no ruff"])
def test_a_users_operator_is_native_after_load_specs(
    tmp_path: Path, library: torch.library.Library, monkeypatch: pytest.MonkeyPatch, ruff: bool
) -> None:
    torch._dynamo.reset()
    if not ruff:  # which only readers of the module need
        monkeypatch.setattr(run, "_find_ruff", lambda: None)
    path = tmp_path / "my_ops.yaml"
    path.write_text(SHRINK)
    assert "return p.result(s.where(s.abs(x) <= by, 0.0, x - s.sign(x) * by))" in generate_module(path)
    assert load_user_specs(path) == ["opforge_unit.shrink.default"]
    x = torch.randn(3, 5)
    opforge.reset_stats()
    compiled = torch.compile(lambda x: torch.ops.opforge_unit.shrink(x, 0.5) + 1, backend="opforge", fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.ops.opforge_unit.shrink(x, 0.5) + 1)
    stats = opforge.stats()
    assert (stats["externs"], stats["fallbacks"], stats["kernels"]) == ({}, {}, 1)


def test_a_wrong_users_file_is_a_spec_error_with_its_place(tmp_path: Path, library: torch.library.Library) -> None:
    path = tmp_path / "my_ops.yaml"
    path.write_text(SHRINK.replace("sign(x)", "sgin(x)"))
    with pytest.raises(SpecError, match=r"my_ops.yaml:4:38: error: unknown name 'sgin'; did you mean 'sign'\?"):
        generate_module(path)


def test_spec_text_is_never_evaluated(tmp_path: Path, library: torch.library.Library) -> None:
    path = tmp_path / "my_ops.yaml"
    path.write_text(SHRINK.replace("sign(x)", '__import__("os").system("true")'))
    with pytest.raises(
        SpecError, match=r"an attribute is not part of the expression language|only a name can be called"
    ):
        load_user_specs(path)


def test_odd_spacing_is_no_warning(tmp_path: Path) -> None:
    spec = tmp_path / "odd.yaml"
    spec.write_text(
        textwrap.dedent(
            """
            - op: aten.relu.default
              doc: odd spacing
              kind: pointwise
              expr: maximum(self, 0if True else 1)
            """
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_user_model(spec, load_model()).size == 1
