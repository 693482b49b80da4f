"""`require` of operator entries: what is printed of each form, and the tests that the clauses become."""

from __future__ import annotations

import textwrap
from pathlib import Path

from opforge.generator.check_ops import build
from opforge.generator.diagnostics import Diagnostics
from opforge.generator.emit import invalid_tests
from opforge.generator.emit.lowerings import function_text
from opforge.generator.load import load_spec, load_text
from opforge.generator.model import Model
from opforge.generator.op_entries import OpEntry
from opforge.generator.run import SPECS_DIR
from opforge.generator.torch_schemas import TorchSchemas

TORCH = TorchSchemas.snapshot()
SCALARS = load_spec(SPECS_DIR / "scalars.yaml", Diagnostics())


def made(text: str) -> tuple[OpEntry, ...]:
    diags = Diagnostics()
    doc = load_text(textwrap.dedent(text), "t.yaml", diags)
    entries = build(doc, Model(Path(), {"scalars": SCALARS, "ops": doc}, {}, TORCH), diags)
    assert not diags, diags.render()
    return entries


def function(text: str) -> str:
    (entry,) = made(text)
    return function_text(entry.lowerings[0])


def emitted(text: str) -> str:
    return "\n".join(invalid_tests.emit(Model(Path(), {}, {"ops": made(text)}, TORCH)).values())


def test_conditions_of_the_call_come_first_and_conditions_of_elements_after_native_if() -> None:
    assert function(
        """
        - op: aten.index_fill.int_Scalar
          doc: fill
          kind: composite
          require:
            - each: {index: "value < size(self, dim)"}
              raises: IndexError
              says: index out of range
              bad: ["F(3), 0, C(3, 1), 1.0"]
            - that: rank(self) > 0
              bad: ["F(), 0, C(0, 1), 1.0"]
          native_if: rank(index) == 1
          let: {n: "size(self, dim)"}
          body: return self
        """
    ) == textwrap.dedent(
        """
        def index_fill_int_Scalar(b, self, dim, index, value):
            b.require(rank(self) > 0, "rank(self) > 0")
            b.native_if(rank(index) == 1, "rank(index) == 1")
            index = b.each(index, lambda value_: value_ < size(self, dim), "IndexError", "index out of range")
            n = size(self, dim)
            return self
        """
    ).strip("\n")


def test_a_condition_narrows_what_follows() -> None:
    assert "b.require(dtype is not None" in function(
        """
        - op: aten.sum.default
          doc: sum
          kind: composite
          require:
            - that: dtype is not None
              bad: ["F(3)"]
          native_if: is_float(dtype)
          body: return self
        """
    )


def test_a_name_in_the_body_stands_for_type_and_text() -> None:
    assert function(
        """
        - op: aten.cholesky
          doc: factors
          kind: composite
          require:
            - demanded: positive
              raises: LinAlgError
              says: not positive-definite
              bad: ["C(-1.0, 3, 3)"]
          body: return demanded(self, self, positive)
        """
    ).endswith('return b.demanded(self, self, "LinAlgError", "not positive-definite")')


def test_every_clause_becomes_a_test_with_the_values_of_the_entry_in_it() -> None:
    text = emitted(
        """
        - op:
            aten.max_unpool2d: {dims: 2}
          doc: unpool
          kind: composite
          require:
            - that: rank(self) > dims
              bad: ["F(3), I(3, 3), [8, 6]"]
            - that: not is_on_gpu(self)
            - each: {indices: value >= 0}
              raises: RuntimeError
              says: a negative index
              bad: ["F(1, 3, 3), C(-1, 1, 3, 3), [8, 6]"]
          body: return self
        """
    )
    overloads = '("aten.max_unpool2d.default",)'
    assert f'Clause("aten.max_unpool2d", {overloads}, "rank(self) > 2", ("F(3), I(3, 3), [8, 6]",))' in text
    assert f'{overloads}, "a negative index", ("F(1, 3, 3), C(-1, 1, 3, 3), [8, 6]",), raises="RuntimeError")' in text
    assert text.count("Clause(") == 2
    assert "Positions(" not in text


def test_entries_with_positions_are_tested_out_of_range_also_where_they_call_one() -> None:
    text = emitted(
        """
        - op: aten.take
          doc: elements
          kind: gather
          shape: shape(index)
          with: {at_: "index_of(index[*i], numel(self))"}
          at: self[*unlinear(at_, shape(self))]
          tests: ["F(5, 6), S(30, 2, 4)"]
        - op: aten.gather
          doc: elements
          kind: composite
          body: return take(self, index)
          tests: ["F(5), 0, I(5, 3)", "F(5), 0, F(3)"]
        - op: aten._unsafe_index.Tensor
          doc: elements
          kind: composite
          raises: nothing
          body: return take(self, self)
          tests: ["F(5, 6), [S(5, 3)]"]
        """
    )
    assert 'Positions("aten.take", ("aten.take.default",), ("F(5, 6), S(30, 2, 4)",))' in text
    assert 'Positions("aten.gather", ("aten.gather.default",), ("F(5), 0, I(5, 3)",))' in text
    assert text.count("Positions(") == 2
