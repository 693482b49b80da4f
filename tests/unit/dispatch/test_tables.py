"""Decision tables are proved: an uncovered or doubly covered combination is refused by name."""

from __future__ import annotations

import itertools

import pytest

from opforge.errors import MetadataError
from opforge.generated.dispatch_tables import (
    base_steps,
    history_steps,
    input_steps,
    mutation_type,
    output_steps,
    output_type,
    view_history,
)
from opforge.generated.schemas import InputAliasInfo, MutationType, OutputAliasInfo, OutputType, Place
from opforge.generated.wrapper_steps import STEPS
from opforge.generator.diagnostics import Diagnostics
from opforge.generator.load import load_text
from opforge.generator.tables import build_table

ENUMS = {"Color": ("RED", "GREEN", "BLUE")}
HEAD = """
- table: paint
  doc: What to do.
  over: {wet: bool, color: Color}
  gives: steps
"""


def mistakes(text: str) -> list[str]:
    diags = Diagnostics()
    (entry,) = load_text(HEAD + text, "t.yaml", diags)
    table = build_table(entry, ENUMS, ("wait", "paint"), diags)
    assert (table is None) == bool(diags)
    return [f"{m.pos.line}: {m.message}" for m in diags.mistakes]


def test_total_and_unambiguous() -> None:
    assert not mistakes("""
  impossible:
    - {when: wet and color == BLUE, why: blue dries at once}
  rules:
    - {when: "wet and color in [RED, GREEN]", then: wait}
    - {when: not wet, then: [wait, paint]}
""")


def test_uncovered() -> None:
    assert mistakes("""
  rules:
    - {when: wet and color != GREEN, then: wait}
    - {when: not wet, then: paint}
""") == ["8: table 'paint': no rule holds for wet, color=GREEN"]


def test_covered_twice() -> None:
    assert mistakes("""
  rules:
    - {when: wet, then: wait}
    - {when: not wet, then: paint}
    - {when: color == RED and not wet, then: wait}
""") == ["10: table 'paint': two rules hold for not wet, color=RED"]


def test_never() -> None:
    assert mistakes("""
  impossible:
    - {when: wet and not wet, why: nothing is both}
    - {when: color == BLUE, why: no blue}
  rules:
    - {when: "color in [RED, GREEN]", then: wait}
    - {when: color == BLUE, then: wait}
""") == ["12: table 'paint': this rule never holds", "8: table 'paint': this exclusion never holds"]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("wett", "expected a predicate that is a bool, found 'wett'; did you mean 'wet'?"),
        ("color", "expected a predicate that is a bool, found 'color'"),
        ("wet == RED", "expected a predicate that is an enum, found 'wet'"),
        ("color == RAD", "expected 'RED', 'GREEN' or 'BLUE', found 'RAD'; did you mean 'RED'?"),
        ("color in RED", "expected ==, != with a member, or `in`, `not in` with a list of members"),
        ("wet + 1", "expected and, or, not, a predicate or a comparison, found 'wet + 1'"),
        ("wet and", "expected a condition: invalid syntax"),
    ],
)
def test_wrong_conditions(condition: str, message: str) -> None:
    found = mistakes(f"\n  rules:\n    - {{when: '{condition}', then: wait}}\n")
    assert found == [f"8: {message}"]


def test_wrong_result() -> None:
    assert mistakes("""
  rules:
    - {when: wet, then: wiat}
    - {when: not wet, then: [paint, dry]}
""") == [
        "8: expected 'wait' or 'paint', found 'wiat'; did you mean 'wait'?",
        "9: expected 'wait' or 'paint', found 'dry'",
    ]


def test_generated_tables_decide_every_combination() -> None:
    for data, metadata, storage, version in itertools.product((False, True), repeat=4):
        if metadata and storage:
            with pytest.raises(MetadataError, match="another storage"):
                mutation_type(data, metadata, storage, version)
        else:
            assert isinstance(mutation_type(data, metadata, storage, version), MutationType)
    decided = 0
    for flags in itertools.product((False, True), repeat=8):
        try:
            assert isinstance(output_type(*flags), OutputType)
            decided += 1
        except MetadataError:
            pass
    assert decided > 20
    for mutation, *flags in itertools.product(MutationType, *[(False, True)] * 5):
        in_graph, merged, told, tracked, seen = flags
        try:
            assert set(input_steps(mutation, in_graph, merged, told, tracked, seen)) <= set(STEPS)
        except MetadataError:
            assert in_graph or told or not tracked or not seen
    for followed, tracked, seen in itertools.product((False, True), repeat=3):
        try:
            assert len(base_steps(followed, tracked, seen)) == 1
        except MetadataError:
            assert not tracked or not seen
    for output, known, dtype_view, relaid in itertools.product(OutputType, *[(False, True)] * 3):
        try:
            assert len(output_steps(output, known, dtype_view, relaid)) == 1
        except MetadataError:
            assert known or dtype_view or relaid
    for flags in itertools.product((False, True), repeat=7):
        source, followed, says, view, other_base, _, shares_version = flags
        try:
            assert set(history_steps(view_history(*flags))) <= set(STEPS)
        except MetadataError:
            assert (followed and not (source and says and view)) or (view and not shares_version) or other_base


def test_structs_check_themselves() -> None:
    with pytest.raises(
        MetadataError, match="InputAliasInfo needs new elements for an input whose elements are written"
    ):
        InputAliasInfo(MutationType.DATA)
    with pytest.raises(MetadataError, match="OutputAliasInfo needs a place for an alias"):
        OutputAliasInfo(OutputType.ALIAS_OF_INPUT, source=0)
    with pytest.raises(MetadataError, match="Place needs a stride for every size"):
        Place("torch.float32", (2, 3), (1,), 0)
