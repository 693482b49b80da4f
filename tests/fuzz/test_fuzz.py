"""Random programs beside eager: a fixed sample of what `make fuzz` runs, and the fuzzer's own parts."""

from __future__ import annotations

import pytest
import torch

from .check import Outcome, check
from .generate import generate
from .judge import differences
from .noise import Noise
from .observe import Sight
from .program import Program, Step, runnable
from .shrink import shrink

PROGRAMS, CHUNK = 300, 10
FIRST = 1_000_000
"""Seeds that the nightly run does not use."""
KNOWN = {
    1_000_009: "A7: a caller's write to a result is refused in the backward though eager keeps another tensor (rewrites join the two)",
    1_000_119: "A5: a view made under no_grad of a computed tensor: eager says that it requires grad, without history",
    1_000_231: "X1: nothing is more exact than float64 to judge by: eager is 2.7e-15 from the true gradient (-1.375), compiled code 3.6e-15",
    1_000_170: "A5: a view of a detached input is made again as a view of the input, and says that it requires grad",
}
"""Programs of the sample that still differ from eager, and why; each must fail until it is mended."""


@pytest.mark.parametrize("first", range(FIRST, FIRST + PROGRAMS, CHUNK))
def test_programs(first: int, quick: None) -> None:
    for seed in sorted({*range(first, first + CHUNK)} - {*KNOWN}):
        program = generate(seed)
        outcome = check(program)
        if outcome.different:
            small, found = shrink(program, outcome, 30)
            pytest.fail(runnable(small, [f"{kind}: {text}" for kind, text in found.different]), pytrace=False)


@pytest.mark.parametrize("seed", [pytest.param(k, marks=pytest.mark.xfail(reason=why)) for k, why in KNOWN.items()])
def test_known(seed: int, quick: None) -> None:
    assert check(generate(seed)).different == []


def test_a_seed_makes_one_program() -> None:
    assert generate(5) == generate(5)
    assert generate(5).source() != generate(6).source()
    assert all(generate(seed).valid() for seed in range(30))


def _program(*steps: Step, results: tuple[str, ...]) -> Program:
    inputs = (Step('grid((n, m), "float32", 1).requires_grad_()', ("p1",)), Step("p1 * 2", ("p2",)))
    return Program(0, inputs, ("p1",), ("p2", "p1"), steps, results)


_CASE = _program(
    Step("p2.sin()", ("v1",)),
    Step("p2 + 1", ("v2",)),
    Step("v2.mul_(p1)"),
    Step("v1 * v2", ("v3",)),
    results=("v3", "v1", "p2"),
)


def test_a_planted_fault_is_found_and_made_small(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that forgets a factor: what is left of the program is the step that shows it."""
    assert not check(_CASE).different

    def wrong(program: Program) -> Outcome:
        broken = any(".sin()" in s.text for s in program.steps)
        return Outcome([("value", "planted")] if broken else [])

    monkeypatch.setattr("tests.fuzz.shrink.check", wrong)
    small, _ = shrink(_CASE, wrong(_CASE), 10)
    assert [s.text for s in small.steps] == ["p2.sin()"]
    assert small.results == ("v1",)


def test_a_failure_is_a_file_that_runs(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    text = runnable(_CASE, ["value: planted"])
    exec(compile(text, "failure.py", "exec"), {"__name__": "__main__"})
    shown = capsys.readouterr().out
    assert "eager" in shown
    assert "opforge" in shown
    assert "raises" not in shown


def _sight(values: torch.Tensor) -> Sight:
    return Sight(values={"result 0": values})


def test_values_are_judged_by_a_float64_run() -> None:
    exact = torch.tensor([1 / 3, 2.0], dtype=torch.float64)
    eager = exact.float()
    near, far = eager * (1 + 1.2e-7), eager * (1 + 2e-6)
    for ours, found in ((eager, False), (near, False), (far, True)):
        kinds = [
            k for k, _ in differences(_sight(eager), _sight(ours), lambda _: _sight(exact), lambda _: _sight(eager))
        ]
        assert kinds == (["value"] if found else [])


def test_roundings_move_but_exact_numbers_do_not() -> None:
    x = torch.arange(8.0)
    with Noise(0):
        assert torch.equal(x * 2, 2 * torch.arange(8.0))
        moved = (x + 0.1).sin()
    assert not torch.equal(moved, (torch.arange(8.0) + 0.1).sin())
    assert torch.allclose(moved, (torch.arange(8.0) + 0.1).sin(), atol=1e-6)  # two roundings of numbers up to 8
