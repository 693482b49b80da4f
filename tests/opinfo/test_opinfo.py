"""A fixed sample of torch's own tables of operators and modules beside eager, the slow whole, and the harness's own parts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import opforge
from tests.fuzz.builds import together
from tests.fuzz.check import quick_builds

from .check import Result, check, finish, prepare
from .database import DTYPES, VARIANTS, Call, Case, calls, cases, entries, quiet, sampled
from .listed import BY_DYNAMO, KNOWN, RANDOM, UNSPECIFIED, UNSPECIFIED_RESULTS, UNTOLD, is_in, known
from .observe import fresh
from .report import Summary, line
from .workers import run_all

CALLS, CHUNK = 1, 16
"""Calls of a case of the sample, and rows of one test."""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of prepared headers and compiled kernels of the session."""
    return tmp_path_factory.mktemp("opinfo")


@pytest.fixture
def quick(prepared: Path) -> Iterator[None]:
    """Quick builds in force for one test."""
    with quiet(), quick_builds(prepared):
        yield


@cache
def _sample() -> list[Case]:
    """For each row one dtype, one variant, and static or symbolic sizes, chosen by its name; for modules, which take long, static ones."""
    rows: dict[str, list[Case]] = {}
    for case in (*cases(), *cases(dynamic=True)):
        if not known(case) and not (case.dynamic and entries()[case.entry].kind == "Module"):
            rows.setdefault(case.entry, []).append(case)
    found = []
    for name, some in rows.items():
        variant = random.Random(name).choice(sorted({c.variant for c in some}))
        found.append(random.Random(name).choice([c for c in some if c.variant == variant]))
    return found


def _problems(some: Sequence[Case], folder: Path, limit: int) -> list[str]:
    made = [call for case in some for call in sampled(calls(case), limit)]
    with together(folder):
        ready = [prepare(call) for call in made]
        results = [(p.call, finish(p)) for p in ready]
    return [_problem(call, r) for call, r in results if r.different]


def _problem(call: Call, result: Result) -> str:
    return f"{call.case}, sample {call.number} ({call.label}): {result.outcome}: {result.different[0]}"


_CHUNKS = range(0, 52)


@pytest.mark.parametrize("chunk", _CHUNKS)
def test_sample(chunk: int, quick: None, tmp_path: Path) -> None:
    some = _sample()
    assert len(some) <= CHUNK * len(_CHUNKS), "more rows than tests take: let _CHUNKS grow"
    assert _problems(some[chunk :: len(_CHUNKS)], tmp_path, CALLS) == []


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_all(variant: str, dynamic: bool, tmp_path: Path) -> None:
    """Every row and dtype; of each case at most eight calls (`python -m tests.opinfo` makes all)."""
    summary = Summary()
    for report in run_all(cases(variants=[variant], dynamic=dynamic), tmp_path, jobs=2, limit=8):
        summary.add(report)
    assert [(str(Case(**r["case"])), r["failures"][:1]) for r in summary.failures] == [], line(summary)


if KNOWN:  # else there is nothing to test, and pytest would count a skip

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [n for n in KNOWN if not n.endswith(" cuda")])  # others: tests/gpu/test_opinfo.py
    def test_known_failures_still_fail(name: str, quick: None) -> None:
        row = name.split()[0].replace("*", ".*")
        found = [c for d in (False, True) for c in cases(f"^{row}$", dynamic=d) if known(c) == KNOWN[name]]
        assert any(check(call).different for case in found for call in calls(case)), "mended: take it off the list"


# -- the harness itself ------------------------------------------------------------------------------------------------
def test_the_tables_are_whole() -> None:
    assert len(entries()) > 780
    for table in (RANDOM, UNSPECIFIED, UNSPECIFIED_RESULTS, UNTOLD, BY_DYNAMO):
        for name in table:
            assert any(is_in({name: ""}, Case(e, "float32", "forward")) for e in entries()), name
    some = cases("^add$")
    assert {c.variant for c in some} == set(VARIANTS)
    assert {c.dtype for c in some} == {*DTYPES.values(), "any"}
    with pytest.raises(ValueError, match="fp31"):
        cases(dtypes=["fp31"])


def _call(function: Any, *leaves: Any, variant: str = "forward") -> Call:
    return Call(Case("add", "float32", variant), 0, function, list(leaves))


X = torch.arange(12.0).reshape(3, 4) / 7


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda x: x.sin() + 1e-4, "value"),
        (lambda x: x.sin().double(), "dtype, size"),
        (lambda x: x.sin()[:2], "dtype, size"),
        (lambda x: x.sin().t().contiguous().t(), "strides"),
        (lambda x: x.sin_(), "value"),
    ],
)
def test_a_planted_fault_is_found(wrong: Any, kind: str, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a compiler that makes something else of the sine."""
    assert check(_call(torch.sin, X)).outcome == "native"
    monkeypatch.setattr(opforge, "compile_fx", lambda gm, inputs: lambda x: (wrong(x),))
    result = check(_call(torch.sin, X))
    assert result.outcome == "wrong"
    assert kind in [k for k, _ in result.different]


@pytest.mark.parametrize("change", [lambda v: v + 1e-3, lambda v: v.conj_physical()])
def test_a_wrong_complex_number_is_found(change: Any, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.complex(X, -X)
    assert check(_call(torch.sin, z)).outcome == "eager"
    monkeypatch.setattr(opforge, "compile_fx", lambda gm, inputs: lambda x: (change(x.sin()),))
    assert check(_call(torch.sin, z)).outcome == "wrong"


def test_a_view_that_is_none_and_a_wrong_gradient_are_found(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(_call(torch.t, X)).outcome == "native"
    assert check(_call(torch.sin, X.clone().requires_grad_(), variant="backward")).outcome == "native"
    monkeypatch.setattr(opforge, "compile_fx", lambda gm, inputs: lambda x: (x.t().clone().t().contiguous().t(),))
    assert "shared memory" in [k for k, _ in check(_call(torch.t, X)).different]
    monkeypatch.setattr(opforge, "compile_fx", lambda gm, inputs: lambda x: (x.sin() + x * 1e-3 - x.detach() * 1e-3,))
    wrong = check(_call(torch.sin, X.clone().requires_grad_(), variant="backward"))
    assert {k for k, _ in wrong.different} == {"gradient"}


def test_exceptions_are_compared_by_their_type(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call(lambda x: torch.mm(x, x), X)
    assert check(call).outcome == "raises"

    def refuse(gm: Any, inputs: Any) -> Any:
        raise IndexError("another type")

    monkeypatch.setattr(opforge, "compile_fx", refuse)
    assert check(call).outcome == "error"


def test_copies_keep_what_tensors_share() -> None:
    base = torch.arange(24.0)
    odd, conj = base.view(4, 6).t()[::2], torch.complex(base, base).conj()
    a, b, c, d = fresh([base, odd, conj, base])
    assert (b.stride(), b.storage_offset()) == (odd.stride(), odd.storage_offset())
    assert a is d
    assert c.is_conj()
    assert torch.equal(c, conj)
    a.zero_()
    assert not b.any()
    assert odd.any()


def test_kernels_of_a_gpu_run_by_the_interpreter(tmp_path: Path) -> None:
    """Native ones, eager kernels beside them, gradients, a symbolic size; and with the last program of each launch left out."""
    pytest.importorskip("triton")
    some = [
        *cases("^(softmax|logcumsumexp|mm|index_add)$", ["fp32"], ["forward"], device="interpreter"),
        *cases("^nn.functional.layer_norm$", ["fp32"], ["backward"], device="interpreter"),
        *cases("^sin$", ["fp32"], ["forward"], dynamic=True, device="interpreter"),
    ]
    made = list(run_all(some, tmp_path, jobs=1, limit=1))
    assert {r["case"]["entry"]: r["outcome"] for r in made} == {
        "softmax": "native",
        "logcumsumexp": "native",
        "index_add": "native",
        "nn.functional.layer_norm": "native",
        "sin": "native",
        "mm": "eager",
    }
    assert all(r["kernels"] for r in made if r["outcome"] == "native")
    made = list(run_all(some, tmp_path, jobs=1, limit=1, worker="tests.opinfo.lazy_worker"))
    assert {r["case"]["entry"] for r in made if r["outcome"] == "wrong"} == {r["case"]["entry"] for r in made} - {"mm"}


@pytest.mark.parametrize("chunk", range(4))
def test_sample_by_the_interpreter(chunk: int, tmp_path: Path) -> None:
    """Every fourth row, with what the tables have found: kernels that run others at their end, atomic sums of a constant."""
    pytest.importorskip("triton")
    some = cases(dtypes=["fp32"], variants=["forward"], device="interpreter")[chunk::16]
    if chunk == 0:
        some += cases("^nn.functional.cosine_similarity$", ["fp32"], ["forward"], device="interpreter")
        some += cases("^index_reduce.mean$", ["int64"], ["noncontiguous"], device="interpreter")
    made = list(run_all(some, tmp_path, jobs=1, limit=CALLS))
    assert len(made) == len(some)
    assert [r for r in made if r["outcome"] not in ("native", "eager", "raises") and not known(Case(**r["case"]))] == []


def test_quotients_by_a_symbol_by_the_interpreter(tmp_path: Path) -> None:
    """A mean in 16 bits of symbolic size: its divisor is a number, not a block of numbers."""
    pytest.importorskip("triton")
    some = cases("^mean$", ["bf16"], ["forward"], dynamic=True, device="interpreter")
    (made,) = run_all(some, tmp_path)
    assert made["outcome"] == "native", made["failures"]


def test_a_sweep_ends_when_its_time_is_over(tmp_path: Path) -> None:
    assert list(run_all(cases("^(abs|add)$", ["fp32"], ["forward"]), tmp_path, jobs=1, seconds=0)) == []


@pytest.mark.slow
def test_a_crash_and_a_hang_are_outcomes(tmp_path: Path) -> None:
    """The worker of this test ends at one row, and sleeps at another; the others are reported."""
    some = cases("^(abs|add|sub|mul)$", ["fp32"], ["forward"])
    made = run_all(some, tmp_path, jobs=1, timeout=20, worker="tests.opinfo.dying_worker")
    assert {r["case"]["entry"]: r["outcome"] for r in made} == {
        "abs": "native",
        "add": "crash",
        "sub": "hang",
        "mul": "native",
    }
