"""Random programs beside eager: a fixed sample of what `make fuzz` runs, and the fuzzer's own parts."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opforge
from opforge.errors import BuildError
from opforge.runtime.render.cpp_unit import PRELUDE
from opforge.testing.noise import Noise, NoiseOfStatistics

from . import campaign
from .builds import Batch, together
from .check import Outcome, check, check_all, in_dtype
from .exact import Exact
from .families import FAMILIES, ORDINARY, program_of
from .generate import generate
from .judge import differences
from .observe import Sight, default_dtype, see
from .program import Program, Step, runnable
from .shrink import shrink
from .workers import Range, Summary

PROGRAMS, CHUNK = 300, 10
FIRST = 1_000_000
"""Seeds that the nightly run does not use."""
KNOWN: dict[int, str] = {}
"""Programs of the sample that still differ from eager, and why; each must fail until it is mended."""


@pytest.mark.parametrize("first", range(FIRST, FIRST + PROGRAMS, CHUNK))
def test_programs(first: int, quick: None, tmp_path: Path) -> None:
    programs = [generate(seed) for seed in sorted({*range(first, first + CHUNK)} - {*KNOWN})]
    with together(tmp_path):
        outcomes = check_all(programs)
    for program, outcome in zip(programs, outcomes, strict=True):
        if outcome.different:
            small, found = shrink(program, outcome, 30)
            pytest.fail(runnable(small, [f"{kind}: {text}" for kind, text in found.different]), pytrace=False)


@pytest.mark.parametrize("family", ORDINARY)
def test_programs_of_ordinary_families(family: str, quick: None) -> None:
    """Some programs of each family; they go through Dynamo, so they take a second or two each."""
    for seed in range(FIRST, FIRST + 4):
        program = program_of(family, seed)
        outcome = check(program)
        assert not outcome.different, runnable(program, [f"{kind}: {text}" for kind, text in outcome.different])


@pytest.mark.parametrize("family", ORDINARY)
def test_programs_of_families_are_valid(family: str) -> None:
    programs = [program_of(family, seed) for seed in range(6)]
    assert all(p.valid() and p.steps and p.results for p in programs)
    assert programs == [program_of(family, seed) for seed in range(6)]
    assert len({p.source() for p in programs}) == 6


def test_the_hostile_family_is_what_it_was() -> None:
    assert program_of("aliasing", 7) == generate(7)
    assert [f for f in FAMILIES if not FAMILIES[f].ordinary] == ["aliasing"]


def test_state_is_compared(quick: None) -> None:
    """An attribute that the program writes, and a buffer of a module, are part of what a caller sees."""
    program = Program(
        0,
        (Step('grid((n, m), "float32", 1)', ("p1",)), Step("fill(nn.BatchNorm1d(6), 3)", ("w1",))),
        (),
        ("p1", "w1"),
        (Step('state.__setattr__("count", state.count + 1)'), Step("w1(p1) * state.count", ("v1",))),
        ("v1",),
        sizes=((4, 6), (4, 6)),
        path="dynamo",
        family="attributes",
        before=(Step("state.count = call"),),
        dynamo_shapes="automatic",
    )
    assert not check(program).different
    functions = program.functions()
    eager = see(program, functions, (4, 6), number=1)
    forgets = see(program, functions, (4, 6), lambda x, w: [x], number=1)
    assert (eager.facts["state.count: value"], forgets.facts["state.count: value"]) == (2, 1)
    batches = "buffer 0.num_batches_tracked"
    assert (int(eager.values[batches]), int(forgets.values[batches])) == (1, 0)
    assert not torch.equal(eager.values["buffer 0.running_mean"], forgets.values["buffer 0.running_mean"])


def test_the_summary_counts_by_family() -> None:
    summary = Summary()
    report = {**_report("norms", 3), "graphs": 4, "eager_graphs": 1}
    summary.add(report)
    summary.add({**report, "family": "raw", "kinds": ["value"]})
    summary.add({**report, "family": "raw", "raised": ["in backward"]})
    assert summary.families["norms"].eager_share == 0.25
    assert (summary.families["raw"].programs, summary.families["raw"].differences) == (2, 1)
    assert summary.families["raw"].graphs == 4
    assert "raw:3: value" in summary.text(1.0)


if KNOWN:  # else there is nothing to test, and pytest would count a skip

    @pytest.mark.parametrize("seed", [pytest.param(k, marks=pytest.mark.xfail(reason=y)) for k, y in KNOWN.items()])
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


def test_kernels_built_together_are_told_apart(quick: None) -> None:
    """Units with the same names do not meet, and one that does not compile fails alone."""
    batch = Batch()
    head = PRELUDE.read_text()
    kernel = 'extern "C" __attribute__((visibility("default"))) int k0_add(const int x) {{ return x + {}; }}\n'
    cfg = opforge.config.current()
    calls = []
    for text in ("1", "2", "nothing"):
        unit = batch.compile_library(head + kernel.format(text), name="kernels", cfg=cfg)
        calls.append(batch.kernels(unit)["k0_add"])
        calls[-1].argtypes, calls[-1].restype = [ctypes.c_int], ctypes.c_int
    assert (calls[0](5), calls[1](5)) == (6, 7)
    with pytest.raises(BuildError, match="nothing"):
        calls[2](5)


def test_a_failure_is_a_file_that_runs(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    text = runnable(_CASE, ["value: planted"])
    exec(compile(text, "failure.py", "exec"), {"__name__": "__main__"})
    shown = capsys.readouterr().out
    assert "eager" in shown
    assert "opforge" in shown
    assert "raises" not in shown


def _report(family: str, seed: int) -> dict[str, Any]:
    """What a worker says of a program that is as eager's."""
    report = {"family": family, "seed": seed, "kinds": [], "eager": "", "backward": False, "externs": 0, "graphs": 1}
    return {**report, "eager_graphs": 0, "dynamic": False, "raised": [], "fake_strides": False, "path": "dynamo"}


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


_CANCELLING = _program(
    Step("p2.double().sin()", ("v1",)),
    Step("F.layer_norm(v1, v1.shape[-1:])", ("v2",)),
    Step("(v2 * v1 + 1).log1p().sum() - 15", ("v3",)),
    results=("v3", "v2"),
)
_SIZE = (4, 6)


def _judged(program: Program, name: str, error: float) -> list[tuple[str, str]]:
    """What is said of results that are eager's but for `error`, in units in the last place of the largest value, in one of them."""
    functions = program.functions()
    eager = see(program, functions, _SIZE)
    ours = Sight(dict(eager.facts), {k: t.clone() for k, t in eager.values.items()})
    ours.values[name].view(-1)[0] += error * torch.finfo(ours.values[name].dtype).eps * eager.values[name].abs().max()
    return differences(
        eager,
        ours,
        lambda dtype: in_dtype(dtype, program, _SIZE),
        lambda seed: see(program, functions, _SIZE, around=lambda: Noise(seed)),
    )


@pytest.mark.parametrize("name", ["result 0", "result 1", "gradient 0"])
def test_float64_programs_are_judged_by_their_condition(name: str) -> None:
    """An error as of one more rounding passes; one of twenty, at the scale at which this program loses digits, does not."""
    assert _judged(_CANCELLING, name, 0.4) == []
    assert _judged(_CANCELLING, name, 20.0) != []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [*range(0, 40, 4), 46, 51])
def test_what_is_more_exact_than_float64_agrees_with_it(family: str, seed: int) -> None:
    program = program_of(family, seed)
    with default_dtype("float64"):
        plain = see(program, program.functions("float64"), program.sizes[0])
    exact = in_dtype("float64", program, program.sizes[0])
    assert set(plain.raised) == set(exact.raised)
    for name, value in plain.values.items():
        torch.testing.assert_close(exact.values[name], value, rtol=1e-9, atol=1e-9, equal_nan=True)
        if name in exact.lows and value.is_floating_point():
            assert (exact.lows[name].abs() <= 2.0**-53 * value.abs() + 1e-300).all()


@pytest.mark.parametrize(
    "operator",
    [lambda x: x.sin().sum(), lambda x: (x @ x.t()).sum(), lambda x: F.gelu(x).mean(), lambda x: x.sin().max()],
)
def test_what_is_more_exact_than_float64(operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Forward and gradient against 40 digits."""
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    with Exact() as exact:
        y = operator(x)
        (g,) = torch.autograd.grad(y, x)
        low = exact.low(y)
        assert low is not None
        assert exact.low(g) is not None
    assert 0 < abs(float(low)) <= 2.0**-53 * abs(float(y.detach()))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3)])
def test_what_is_more_exact_than_float64_of_a_fixed_input(norm: nn.Module) -> None:
    """A norm's backward gives no gradient of its input then, and the others are not taken for one another."""
    norm, x = norm.double(), torch.randn(4, 3, dtype=torch.float64)

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((norm(x) * x.sin()).sum(), [norm.weight, norm.bias])

    plain = gradients()
    with Exact() as exact:
        for found, expected in zip(gradients(), plain, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert exact.low(found) is not None


@torch.library.custom_op("opforge_fuzz::normed", mutates_args=())
def normed(x: torch.Tensor, running_mean: torch.Tensor, reserve: torch.Tensor) -> torch.Tensor:
    assert reserve.tolist() == [1, 255]
    return x - running_mean


def test_noise_leaves_integers() -> None:
    """A batch norm of cuDNN's hands its backward bytes."""
    x, mean = torch.rand(50), torch.rand(50)
    with NoiseOfStatistics(0):
        moved = normed(x, mean, torch.tensor([1, 255], dtype=torch.uint8))
    assert not torch.equal(moved, x - mean)
    assert torch.allclose(moved, x - mean, atol=1e-6)


def test_noise_moves_float64() -> None:
    x = torch.arange(1.0, 50.0, dtype=torch.float64) / 7
    with Noise(0):
        moved = x.sin()
    assert 0 < float(((moved - x.sin()) / x.sin()).abs().max()) < 1e-14


def test_roundings_move_but_exact_numbers_do_not() -> None:
    x = torch.arange(8.0)
    with Noise(0):
        assert torch.equal(x * 2, 2 * torch.arange(8.0))
        moved = (x + 0.1).sin()
    assert not torch.equal(moved, (torch.arange(8.0) + 0.1).sin())
    assert torch.allclose(moved, (torch.arange(8.0) + 0.1).sin(), atol=1e-6)  # two roundings of numbers up to 8


def test_a_campaign_goes_on_where_it_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, options = tmp_path / "parts.jsonl", argparse.Namespace(minutes=0, first=5, part=10)
    assert campaign.run(path, ["norms"], options, tmp_path) == 0
    summary = Summary()
    for seed in range(5, 15):
        summary.add({**_report("norms", seed), "eager_graphs": seed == 7, "eager": "no rule" if seed == 7 else ""})
    part = campaign.Part.of(Range("norms", range(5, 15)), summary, 1.0)
    path.write_text(json.dumps(dataclasses.asdict(part)) + "\n")
    (read,) = campaign.read(path)
    assert read == part
    following = campaign.ranges([read], ["raw", "norms"], 5, 10)
    assert [next(following) for _ in range(3)] == [
        Range("raw", range(5, 15)),
        Range("norms", range(15, 25)),
        Range("raw", range(15, 25)),
    ]
    text = campaign.totals([read, dataclasses.replace(read, first=15, differences=["norms:16: value"])])
    assert "20 programs, 1 differ from eager" in text
    assert "10.00%  5..24" in text
    assert "2 left to eager: norms: no rule" in text


@pytest.mark.parametrize(("family", "seed"), [("norms", 100603), ("modules", 100297), ("counters", 200000)])
def test_kernels_of_a_gpu(family: str, seed: int) -> None:
    """Found on a GPU: a maximum that the backward did not find again, a rule without end; and numbers that change, which a GPU reads from memory."""
    words = ["--device", "interpreter", "--family", family, "--first", str(seed), "--programs", "1", "--jobs", "1"]
    run = subprocess.run([sys.executable, "-m", "tests.fuzz", *words, "--shrink", "0"], capture_output=True, text=True)
    assert "1 programs in" in run.stdout, run.stderr
    assert run.returncode == 0, run.stdout
