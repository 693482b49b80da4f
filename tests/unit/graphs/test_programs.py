"""Compiled programs, recorded on a stand-in for a device: the same numbers as without, over many steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opforge
from opforge.runtime.graphs.eligible import why_not
from opforge.runtime.observe import counters
from opforge.runtime.targets.cpu import Cpu

from .fake import FakeDevice, FakeRecorder
from .test_region import warnings_of


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[FakeRecorder]:
    made: list[FakeRecorder] = []
    device = FakeDevice()

    def recorder(self: Cpu) -> FakeRecorder:
        made.append(FakeRecorder(device))
        return made[-1]

    monkeypatch.setattr(Cpu, "recorder", recorder)
    torch._dynamo.reset()
    opforge.reset_stats()
    return made


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(f, backend="opforge", options={"strict": True, "cudagraphs": True, **options})


def train(
    make: Callable[[], nn.Module], wrap: Callable[[Any], Any], *, steps: int = 8, late_zero: bool = False
) -> list[float]:
    torch.manual_seed(0)
    model = make()
    run = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(8, 6), torch.randn(8, 3)
        if not late_zero:
            optimizer.zero_grad()
        loss = F.mse_loss(run(x), y)
        if late_zero:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))


@pytest.mark.parametrize("late_zero", [False, True])
def test_training_steps(recorders: list[FakeRecorder], late_zero: bool) -> None:
    want = train(mlp, lambda m: m, late_zero=late_zero)
    got = train(mlp, compiled, late_zero=late_zero)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want))
    assert len(recorders) == 2
    assert sum(r.replayed for r in recorders) >= 10
    assert sum(r.recorded for r in recorders) <= 8


@pytest.mark.parametrize("held", [1, 100])
def test_losses_that_are_held(recorders: list[FakeRecorder], held: int) -> None:
    """Until the next one, or for good: none is overwritten, and both graphs go on sharing memory."""

    def steps(wrap: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        model = mlp()
        run = wrap(lambda x, y: F.mse_loss(model(x), y))
        x, y = torch.randn(8, 6), torch.randn(8, 3)
        losses: list[Tensor] = []
        kept, values = [], []
        for _ in range(12):
            x.normal_()
            kept.append(run(x, y))
            values.append(kept[-1].item())
            del kept[:-held]
            kept[-1].backward()
            for p in model.parameters():
                assert p.grad is not None
                p.data -= 0.05 * p.grad
                p.grad = None
        for loss, value in zip(kept, values[-held:], strict=True):
            assert loss.item() == value
            assert loss.requires_grad
            losses.append(loss)
        return values

    want = steps(lambda f: f)
    got = steps(compiled)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want))
    assert opforge.stats()["unrecorded"] == {}
    assert all(r.recorded <= 3 and r.replayed >= 10 for r in recorders)
    assert len(recorders[0].device.pools) == 1


def test_gradients_that_add_up(recorders: list[FakeRecorder]) -> None:
    torch.manual_seed(0)
    model = mlp()
    run = compiled(model)
    xs = [torch.randn(4, 6) for _ in range(7)]
    for x in xs:
        run(x).square().sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for x in xs:
        model(x).square().sum().backward()
    for g, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(g, p.grad)


def test_two_forwards_before_their_backwards(recorders: list[FakeRecorder]) -> None:
    torch.manual_seed(0)
    model = mlp()
    run = compiled(model)
    for _ in range(5):
        a, b = torch.randn(4, 6), torch.randn(4, 6)
        model.zero_grad()
        first, second = run(a).square().sum(), run(b).sin().sum()
        (second + first).backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        (model(b).sin().sum() + model(a).square().sum()).backward()
        for g, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad)


def test_buffers_that_are_written(recorders: list[FakeRecorder]) -> None:
    torch.manual_seed(0)
    model, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    run = compiled(model)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(8, 4)
            torch.testing.assert_close(run(x), twin(x))
            torch.testing.assert_close(model.running_mean, twin.running_mean)
            torch.testing.assert_close(model.running_var, twin.running_var)
    assert sum(r.replayed for r in recorders) >= 3


def test_results_of_every_step_are_kept(recorders: list[FakeRecorder]) -> None:
    run = compiled(lambda x: (x.sin(), x.view(-1)[1:]), strict=False)
    held = []
    for n in range(9):
        x = torch.full((2, 3), float(n))
        held.append((x, run(x)))
    for x, (sine, view) in held:
        torch.testing.assert_close(sine, x.sin())
        assert view.data_ptr() == x.data_ptr() + 4


def test_sizes_that_change(recorders: list[FakeRecorder]) -> None:
    run = compiled(lambda x: (x * x.shape[0]).sum(0), strict=False)
    for n in (2, 3, 4, 3, 2, 4, 4, 4, 5, 3, 4, 4):
        x = torch.randn(n, 3)
        torch.testing.assert_close(run(x), x.sum(0) * n)


def test_random_numbers_are_drawn_anew(recorders: list[FakeRecorder]) -> None:
    run = compiled(lambda x: F.dropout(x, 0.5), strict=False)
    x = torch.ones(1000)
    drawn = [run(x).clone() for _ in range(6)]
    for k, a in enumerate(drawn):
        assert not any(torch.equal(a, b) for b in drawn[:k])


def test_why_not_is_said(recorders: list[FakeRecorder]) -> None:
    run = compiled(lambda x: x.nonzero(), strict=False)
    run(torch.ones(3))
    torch._dynamo.reset()


def test_conditions_are_not_recorded_and_say_so(recorders: list[FakeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is decided by the predicate at each call; neither the graph nor its branches are recorded."""

    def program(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x * 2,)) + 1

    def calls() -> None:
        with torch.no_grad():
            for sign in (1, 1, -1, 1, -1, -1):
                x = torch.full((3,), float(sign))
                torch.testing.assert_close(run(x), program(x))

    run = compiled(program, strict=False)
    (told,) = warnings_of(calls, monkeypatch)
    assert "cond calls cond (test_programs.py:" in told
    assert " in program: return torch.cond(x.sum() > 0," in told
    assert opforge.stats()["recordings"] == 0
    assert len(opforge.stats()["unrecorded"]) == 1


def test_the_line_that_made_what_is_held(recorders: list[FakeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who asked for a mode learns once why it does nothing, and where."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        held = x.sin() + 1  # this one
        dropped = x.cos() * 2
        return held, dropped

    run = torch.compile(program, backend="opforge", mode="reduce-overhead")
    x = torch.randn(1 << 15)
    kept: list[Tensor] = []

    def calls() -> None:
        with torch.no_grad():
            kept.extend(run(x)[0] for _ in range(10))

    (told,) = warnings_of(calls, monkeypatch)
    assert re.search(
        r"results of 4 calls are held while it is called again; results made by test_programs.py:\d+", told
    )
    assert "held = x.sin() + 1  # this one (strict" in told
    assert "dropped" not in told
    for y in kept:
        assert torch.equal(y, kept[0])


def test_what_torchs_switch_tells(recorders: list[FakeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_LOGS=cudagraphs: each recording with its graph, and what is not recorded."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(counters, "note", lambda switch, line: told.append((switch, line)))
    run = torch.compile(lambda x: x.sin() + 1, backend="opforge", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            run(torch.randn(4))
        torch.compile(
            lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), backend="opforge", mode="reduce-overhead"
        )(torch.randn(3))
    recorded = [line for switch, line in told if switch == "cudagraphs"]
    assert recorded[0] == "graph 0/0 is recorded"
    assert recorded[-1].startswith("not recorded as a CUDA graph: cond calls cond")
    assert ("perf_hints", recorded[-1]) in told


@pytest.mark.parametrize(("size", "recorded"), [(0, 4), (12 << 10, 4), (20 << 10, 2)])
def test_results_are_copied_by_setting(recorders: list[FakeRecorder], size: int, recorded: int) -> None:
    """Of 16 KB that is held: as many recordings as there may be, or one more, of which it is a copy. It is never overwritten."""
    run = compiled(lambda x: x.sin() + 1, cudagraphs_clone_bytes=size, strict=False)
    x = torch.randn(4 << 10)
    with torch.no_grad():
        held = [run(x.fill_(n)) for n in range(10)]
    for n, y in enumerate(held):
        torch.testing.assert_close(y, torch.full_like(x, n).sin() + 1)
    assert [r.recorded for r in recorders] == [recorded]
    assert recorders[0].replayed == (4 if recorded == 4 else 9)
    assert sum(opforge.stats()["unrecorded"].values()) == (5 if recorded == 4 else 0)


def test_an_input_elsewhere_is_told_with_the_line_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a graph for a GPU: its inputs come from no line."""

    def program(x: Tensor, there: Tensor) -> Tensor:
        y = x * 2
        return y + there

    reasons: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        (there,) = [n for n in gm.graph.nodes if n.op == "placeholder"][1:]
        there.meta["val"] = there.meta["example_value"].to("meta")
        reasons.append(why_not(gm, "cpu"))
        return gm.forward

    torch.compile(program, backend=backend)(torch.randn(3), torch.randn(3))
    ((reason,),) = [reasons]
    assert re.fullmatch(
        r"l_there_ is on the device meta \(test_programs.py:\d+ in program: return y \+ there\)", reason
    )


def test_a_mode_turns_it_on(recorders: list[FakeRecorder]) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    run = torch.compile(double, backend="opforge", mode="reduce-overhead")
    x = torch.ones(3)
    for _ in range(4):
        out = run(x)
        assert out.eq(2).all()
        del out
    assert sum(r.replayed for r in recorders) == 3
    assert opforge.stats()["recordings"] == 1
