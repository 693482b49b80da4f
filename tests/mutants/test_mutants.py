"""Mutation testing of the specs: the variants themselves, a few entries end to end, and the files of results."""

from __future__ import annotations

from pathlib import Path

import pytest

from opforge.generator.run import load_model

from . import sites
from .__main__ import main
from .mutate import changes
from .ops import NotCompilable
from .report import Results, page_text, table
from .sites import Mutant
from .worker import Worker, chosen


def _texts(text: str, what: str = "", **options: object) -> set[str]:
    return {c.text for c in changes(text, **options) if what in ("", c.what)}  # type: ignore[arg-type]


def test_variants_of_an_expression() -> None:
    assert _texts("a + b") == {"a - b", "a", "b"}
    assert _texts("a < 2", "comparison") == {"a <= 2", "a >= 2"}
    assert _texts("a and not b") == {"a or not b", "b", "not b", "a", "a and b"} - {"b"}
    assert _texts("f(a, b)") == {"f(b, a)", "a", "f(a)"}
    assert _texts("f(a, b)", commutative={"f"}) == {"a", "f(a)"}
    assert _texts("x if c else y") == {"y if c else x", "x", "y"}
    assert _texts("0.5 * a", "constant") == {"0.75 * a"}
    assert _texts("f(a, k=True)") == {"a", "f(a)", "f(a, k=False)"}
    assert _texts("not an expression") == set()


def test_variants_that_mean_the_same_are_left_out() -> None:
    exchanged = _texts("[m + x + y for m, x, y in zip(inner, before, after)]", "arguments exchanged")
    assert exchanged == set()
    exchanged = _texts("[m - x + y for m, x, y in zip(inner, before, after)]", "arguments exchanged")
    assert exchanged == {
        "[m - x + y for m, x, y in zip(before, inner, after)]",
        "[m - x + y for m, x, y in zip(inner, after, before)]",
    }
    assert "abs(value_of(b - a))" not in _texts("abs(value_of(a - b))")
    assert "b - abs(a)" in _texts("abs(a) - b")


def test_a_variant_knows_the_functions_around_it() -> None:
    inside = {c.text: c.inside for c in changes("f(g(a) + 1, b) * c")}
    assert inside["f(g(a) + 2, b) * c"] == ("f",)
    assert inside["f(a + 1, b) * c"] == ("f",)
    assert inside["f(g(a) + 1, b)"] == ()


def test_a_variant_knows_the_functions_that_it_calls_no_more() -> None:
    old, new = "is_float(x) and pays_as_loops(x, numel(x))", "is_float(x) and numel(x) > 3"
    assert Mutant("ops", "", "f", ("native_if",), "", old, new).gone == ["pays_as_loops"]


def test_variants_of_statements() -> None:
    body = "n = size(x, 0)\nreturn n - 1\n"
    assert "n = size(x, 0)\nreturn n + 1" in _texts(body, body=True)
    assert "n = size(x, 1)\nreturn n - 1" in _texts(body, body=True)


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker(1.0, 0)


def _run(worker: Worker, kind: str, entry: str) -> dict[str, str]:
    found: list[dict[str, str]] = []
    worker.run(kind, entry, set(), found.append)  # type: ignore[arg-type]
    return {r["shown"]: r["status"] for r in found}


def test_wrong_uses_of_a_parameter_are_killed(worker: Worker) -> None:
    """Issue 35: `softplus` without the division by beta passed, since no case had another beta."""
    entry = next(e for e in worker.base.entries("ops") if e.id == "aten.softplus")
    tests = worker.tests("ops", entry)
    wrong = "where(self * beta > threshold, self, log1p(exp(self * beta)))"
    (mutant,) = [m for m in sites.mutants_of(entry, "ops", set()) if m.new == wrong]
    assert "aten.softplus.default" in str(tests.killed_by(mutant.of(entry)))
    assert tests.left_out == []


def test_a_rule_without_its_condition_is_run(worker: Worker) -> None:
    found = _run(worker, "rewrites", "div_power_of_two")
    assert "killed" in found.values()
    assert set(found.values()) <= {"killed", "survived", "refused"}


def test_keys_stay_and_samples_are_parts(worker: Worker) -> None:
    entry = next(e for e in worker.base.entries("ops") if e.id == "aten.gelu")
    found = list(sites.mutants_of(entry, "ops", set()))
    assert len({m.key for m in found}) == len(found)
    few, more = chosen(found, 0.2, 1), chosen(found, 0.5, 1)
    assert set(few) < set(more) < set(found)
    assert few == chosen(found[::-1], 0.2, 1)[::-1]


def test_results_are_kept_and_gone_on_from(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results = Results.read(path)
    report = {"file": "specs/ops/a.yaml", "entry": "aten.a", "shown": "aten.a expr (operator): `x` → `y`", "by": ""}
    results.add({**report, "key": "1", "status": "killed"})
    results.add({**report, "key": "2", "status": "survived"})
    path.write_text(path.read_text() + '{"key": "3", "stat')  # a run that was ended while it wrote
    assert Results.read(path).done == {"1", "2"}
    assert Results.read(path, forget_survivors=True).done == {"1"}
    assert "50.0%" in table(results.reports)
    page = page_text(results.reports, 40)
    assert "- `specs/ops/a.yaml` aten.a expr (operator): `x` → `y`" in page
    assert "not yet looked into (1)" in page
    assert "2 of 40 mutants were run. 0 of the 1 survivors have a reason; without these, 50.0% are killed." in page


def test_a_name_that_there_is_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["mutants", "--entry", "aten.softplux"])
    assert main() == 2
    assert "did you mean 'aten.softplus'" in capsys.readouterr().err


def test_every_entry_has_a_kind_that_is_run() -> None:
    model = load_model()
    assert {"aten.softplus", "sub_zero"} <= {e.id for kind in ("ops", "rewrites") for e in model.entries(kind)}


def test_a_scalar_with_exchanged_arguments_is_killed(worker: Worker) -> None:
    entry = next(e for e in worker.base.entries("scalars") if e.id == "copysign")
    tests = worker.tests("scalars", entry)
    mutants = {(m.path, m.what): m for m in sites.mutants_of(entry, "scalars", set())}
    for target in ("cpp", "triton"):
        said = str(tests.killed_by(mutants[(target,), "arguments exchanged"].of(entry)))
        assert said.startswith("AssertionError: copysign_float32_float32"), said


def test_a_table_that_two_rules_fit_is_refused(worker: Worker) -> None:
    entry = next(e for e in worker.base.entries("mutations") if e.id == "mutation_type")
    tests = worker.tests("mutations", entry)
    found = {m.what: m for m in sites.mutants_of(entry, "mutations", set()) if m.path[:2] == ("rules", 0)}
    with pytest.raises(NotCompilable):
        tests.killed_by(found["condition dropped"].of(entry))
    assert tests._texts(found["another result"].of(entry)) != tests.texts


def test_an_entry_that_is_missing(worker: Worker) -> None:
    entry = next(e for e in worker.base.entries("random") if e.id == "aten.cauchy")
    tests = worker.tests("random", entry)
    (dropped,) = [m for m in sites.mutants_of(entry, "random", set()) if not m.path]
    assert dropped.of(entry) is None
    assert "aten.cauchy" not in str(tests._texts(None))
