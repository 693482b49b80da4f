"""Recorded regions over a stand-in for a device: which calls replay, what is copied, and that no result is ever overwritten."""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import opforge
from opforge.errors import OpforgeWarning, UnsupportedError
from opforge.runtime.build import scratch
from opforge.runtime.graphs import region as regions
from opforge.runtime.graphs.recording import Slot, can_copy
from opforge.runtime.graphs.region import Region

from .fake import FakeRecorder

TOLD = "opforge: a compiled graph runs without the CUDA graph that was asked for: {} (strict=True raises instead)"
TENSOR, FIXED, NUMBER = Slot(), Slot(fixed=True), Slot(number=True)


def made(f: Callable[..., Sequence[Any]], *slots: Slot, **options: Any) -> tuple[Region, FakeRecorder]:
    recorder = FakeRecorder()
    opforge.reset_stats()
    return Region(f, slots, recorder, **options), recorder


def warnings_of(f: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What opforge warns of, if it has warned of nothing before."""
    monkeypatch.setattr(scratch, "_warned", set())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        f()
    return [str(w.message) for w in said if issubclass(w.category, OpforgeWarning)]


def warmed(f: Callable[..., Sequence[Any]], *slots: Slot, args: Sequence[Any]) -> tuple[Region, FakeRecorder]:
    region, recorder = made(f, *slots)
    region(*args)
    return region, recorder


def test_the_first_call_runs_the_second_records_the_rest_replay() -> None:
    region, recorder = made(lambda x: (x * 2,), TENSOR)
    x = torch.arange(4.0)
    for n in range(5):
        x.fill_(n)
        assert torch.equal(region(x)[0], x * 2)
    assert (recorder.recorded, recorder.replayed) == (1, 4)
    assert opforge.stats()["recordings"] == 1


def test_results_that_are_held_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    region, recorder = made(lambda x: (x + 1, x - 1), TENSOR, small=0)
    x = torch.zeros(3)
    held = []

    def calls() -> None:
        for n in range(10):
            x.fill_(n)
            held.append(region(x))

    assert warnings_of(calls, monkeypatch) == [TOLD.format("results of 4 calls are held while it is called again")]
    for n, (up, down) in enumerate(held):
        assert up.eq(n + 1).all()
        assert down.eq(n - 1).all()
    assert recorder.recorded == regions.VERSIONS
    (reason,) = opforge.stats()["unrecorded"]
    assert "are held" in reason


@pytest.mark.parametrize("strict", [False, True])
def test_lines_that_made_what_is_held(monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    """Of the results that somebody holds only: the first one is dropped."""
    lines = [
        "a.py:1 in f: x + 1",
        "a.py:2 in f: x - 1",
        "a.py:2 in f: x - 1",
        "a.py:4 in f: x * 4",
        "a.py:5 in f: x * 5",
    ]
    region = Region(
        lambda x: (x + 1, x - 1, x - 2, x * 4, x * 5), [TENSOR], FakeRecorder(), strict=strict, lines=lines, small=0
    )
    x, held = torch.zeros(3), []
    reason = "results of 4 calls are held while it is called again; results made by a.py:2 in f: x - 1 and by a.py:4 in f: x * 4 and 1 more"

    def calls() -> None:
        for _ in range(7):
            held.append(region(x)[1:])

    opforge.reset_stats()
    if strict:
        with pytest.raises(UnsupportedError, match=re.escape(reason)):
            calls()
    else:
        assert warnings_of(calls, monkeypatch) == [TOLD.format(reason)]
        assert opforge.stats()["unrecorded"] == {reason: 2}


def test_many_sizes_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["a.py:1 in f: x + 1"]
    region = Region(lambda x: (x + 1,), [Slot(dynamic=True)], FakeRecorder(), lines=lines)
    xs = [torch.zeros(n) for n in range(1, 30)]
    (told,) = warnings_of(lambda: [region(x) for x in xs], monkeypatch)
    assert told == TOLD.format(
        "it was recorded 16 times, for other sizes or addresses; results made by a.py:1 in f: x + 1"
    )


def test_small_results_that_are_held_are_copies() -> None:
    """From the second recording on, for as long as somebody wants them; the others stay where they are written."""
    region, recorder = made(lambda x: (x + 1, x - 1, x[:1] * 2), TENSOR, strict=True)
    x = torch.zeros(3)
    held = []
    for n in range(20):
        x.fill_(n)
        up, down, double = region(x)
        assert double.eq(2 * n).all()
        held += [(n + 1, up), (n - 1, down)]
        for value, t in held:
            assert t.eq(value).all()
        del double
    assert recorder.recorded == 2
    assert region.fresh == {0, 1}
    assert opforge.stats()["unrecorded"] == {}


def test_copies_are_laid_out_as_the_results_and_share_memory_as_they_do() -> None:
    def f(x: Tensor) -> Sequence[Tensor]:
        y, z = x * 2, (x + 1).sum(0)
        return y.t(), y[1:, ::2], y[0], z.expand(4, 3), torch.arange(3) + x[0].long(), x[:0] + 1

    region, recorder = made(f, TENSOR)
    x = torch.zeros(2, 3)
    held = []
    for n in range(6):
        x.fill_(n)
        got, want = region(x), f(x)
        held.append((got, [t.clone() for t in want]))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
            assert (a.stride(), a.storage_offset(), a.dtype) == (b.stride(), b.storage_offset(), b.dtype)
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
            if n:  # not the call that ran as it is
                assert (a._version, a._base, a.requires_grad, a.is_inference()) == (0, None, False, False)
        got[0][0, 1] = -1.0
        assert got[1][0, 0] == -1
        assert got[2].ne(-1).all()
        got[0][0, 1] = 2.0 * n
    for some, copies in held:
        for a, b in zip(some, copies, strict=True):
            assert torch.equal(a, b)
    assert region.fresh == {0, 1, 2, 3, 4}
    assert recorder.recorded == 2


@pytest.mark.parametrize("inference", [False, True])
def test_results_whose_storage_was_resized_are_copies(inference: bool) -> None:
    """A storage that is made at an address cannot be resized, and theirs have to be."""
    with torch.inference_mode(inference):
        x = torch.randn(8, 8)
        region, recorder = warmed(lambda x: ((y := x * 2), y[1:], x.sin()), TENSOR, args=(x,))
        region(x)
        (recording,) = region.recordings
        for block in recording.own.blocks:
            block.resized = True  # as `keep_place` says on a device; the stand-in's own storages cannot be resized
        for k in range(6):
            y, part, sine = region(x)
            torch.testing.assert_close((y, part, sine), (x * 2, x[1:] * 2, x.sin()))
            assert part.untyped_storage()._cdata == y.untyped_storage()._cdata
            assert y.is_inference() == inference
            for t in (y, sine):
                t.untyped_storage().resize_((0, 4096, 256)[k % 3])
    assert (len(region.recordings), recorder.replayed) == (1, 7)  # the recording call too


def test_copies_in_inference_mode_are_inference_tensors() -> None:
    region, _ = made(lambda x: (x + 1,), TENSOR)
    x = torch.zeros(3)
    held = []
    with torch.inference_mode():
        for _ in range(4):
            held += region(x)
    assert region.fresh == {0}
    assert all(t.is_inference() for t in held)


def test_memory_of_several_dtypes_is_not_copied() -> None:
    def f(x: Tensor) -> Sequence[Tensor]:
        y = x + 1
        return y, y.view(torch.int32)

    region, recorder = made(f, TENSOR)
    x = torch.zeros(3)
    held = []
    for n in range(3):
        x.fill_(n)
        held.append((n, region(x)))
    for n, (y, bits) in held:
        assert y.eq(n + 1).all()
        assert y.data_ptr() == bits.data_ptr()
    assert region.fresh == set()
    assert recorder.recorded == 2  # versions


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t[1:],
        lambda t: t.detach(),
        lambda t: t.view(-1).view(2, 2),
        lambda t: t.untyped_storage(),
        lambda t: [t],
    ],
)
def test_whoever_holds_a_result_in_any_way_keeps_it(hold: Callable[[Tensor], Any]) -> None:
    region, recorder = warmed(lambda x: (x + 1,), TENSOR, args=[torch.zeros(4)])
    x = torch.zeros(4)
    region(x)  # the first recording
    kept = hold(region(x)[0])
    x.fill_(5)
    region(x)
    assert recorder.recorded == 2
    del kept
    region(x)
    assert recorder.recorded == 2


def test_a_result_that_was_let_go_costs_no_second_recording() -> None:
    region, recorder = warmed(lambda x: (x + 1,), TENSOR, args=[torch.zeros(4)])
    x = torch.zeros(4)
    for _ in range(20):
        out = region(x)
        del out
    assert recorder.recorded == 1


def test_gradients_that_add_up_over_steps() -> None:
    """The gradient that the first backward gave stays with the parameter; later ones are added to it."""
    weight = torch.zeros(3, requires_grad=True)
    g = torch.ones(3)
    region, recorder = warmed(lambda g: (g * 2,), TENSOR, args=[g])
    for step in range(1, 9):
        g.fill_(step)
        gradient = region(g)[0]
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad.add_(gradient)
        del gradient
        assert weight.grad.eq(sum(2 * s for s in range(1, step + 1))).all()
    assert recorder.recorded == 2


def test_a_forward_whose_results_wait_for_two_backwards() -> None:
    forward, ahead = made(lambda x, w: (x @ w, x), TENSOR, FIXED)
    backward, behind = made(lambda x, w, g: (g @ w.t(), x.t() @ g), TENSOR, FIXED, TENSOR)
    w = torch.randn(3, 3)
    xs = [torch.randn(2, 3) for _ in range(2)]
    for _ in range(5):
        runs = [forward(x, w) for x in xs]
        for x, (y, kept) in zip(xs, runs, strict=True):
            dx, dw = backward(kept, w, y)
            torch.testing.assert_close(dx, y @ w.t())
            torch.testing.assert_close(dw, x.t() @ y)
        del runs, y, kept, dx, dw
        w += 0.1
    assert ahead.recorded <= 4
    assert behind.recorded <= 4


def test_an_input_that_moves_is_copied_after_a_while() -> None:
    region, recorder = made(lambda x, w: (x * w,), TENSOR, FIXED)
    w = torch.full((3,), 2.0)
    alive = []
    for n in range(12):
        x = torch.full((3,), float(n))
        alive.append(x)  # so that the next one is elsewhere
        out = region(x, w)[0]
        assert out.eq(2 * n).all()
        assert x.eq(n).all()
        del out
    assert region.copied == [0]
    assert recorder.recorded <= regions.MOVES + 3


def test_a_fixed_input_that_moves_is_recorded_anew_up_to_a_limit() -> None:
    region, recorder = made(lambda w: (w + 1,), FIXED)
    alive = []
    for n in range(40):
        w = torch.full((3,), float(n))
        alive.append(w)
        assert region(w)[0].eq(n + 1).all()
    assert region.copied == []
    assert recorder.recorded == regions.RECORDINGS
    assert region(alive[5])[0].eq(6).all()


def test_expanded_inputs_are_copied_without_their_repetitions() -> None:
    region, _ = made(lambda x: (x.sum(0), x), TENSOR)
    alive = []
    for n in range(8):
        x = torch.full((1, 3), float(n)).expand(5, 3)
        alive.append(x)
        total, same = region(x)
        assert total.eq(5 * n).all()
        assert same is x
        del total, same
    assert region.copied == [0]


@pytest.mark.parametrize(
    ("shape", "stride", "can"),
    [
        ((3, 4), (4, 1), True),
        ((3, 4), (0, 1), True),
        ((3, 4), (1, 3), True),
        ((3, 4), (1, 1), False),
        ((3,), (2,), True),
    ],
)
def test_what_can_be_copied_with_its_strides(shape: tuple[int, ...], stride: tuple[int, ...], can: bool) -> None:
    assert can_copy(torch.empty(64).as_strided(shape, stride)) is can


def test_what_cannot_be_copied_is_read_where_it_is() -> None:
    region, _ = made(lambda x: (x + 1,), TENSOR)
    alive = []
    for n in range(8):
        x = torch.full((6,), float(n)).as_strided((3, 4), (1, 1))
        alive.append(x)
        assert region(x)[0].eq(n + 1).all()
    assert region.copied == []


def test_sizes_and_shapes_belong_to_a_recording() -> None:
    region, recorder = made(lambda n, x: (x[:n] * n,), NUMBER, Slot(dynamic=True))
    x = torch.arange(6.0)
    for n in (2, 2, 3, 3, 2, 3):
        assert torch.equal(region(n, x)[0], x[:n] * n)
        y = x[: n + 1]
        assert torch.equal(region(n, y)[0], y[:n] * n)
    assert recorder.recorded == 4


def test_what_nobody_reads_may_move() -> None:
    region, recorder = made(lambda x, y: (y + 1,), Slot(unread=True), TENSOR)
    y = torch.zeros(2)
    alive = []
    for _ in range(6):
        alive.append(torch.zeros(2))
        region(alive[-1], y)
    assert recorder.recorded == 1
    assert region.copied == []


def test_results_that_are_arguments_or_views_of_them() -> None:
    region, _ = made(lambda x, n: (x, x[1:], n, None), TENSOR, NUMBER)
    x = torch.arange(4.0)
    for _ in range(3):
        same, view, n, nothing = region(x, 7)
        assert same is x
        assert view.data_ptr() == x.data_ptr() + 4
        assert torch.equal(view, x[1:])
        assert (n, nothing) == (7, None)


def test_what_is_written_is_written_once_for_each_call() -> None:
    def step(x: Tensor) -> tuple[Tensor]:
        x.add_(1)
        return (x * 2,)

    region, _ = made(step, FIXED)
    x = torch.zeros(3)
    for n in range(1, 6):
        assert region(x)[0].eq(2 * n).all()
        assert x.eq(n).all()


def test_results_are_tensors_of_their_own() -> None:
    """Version counters, attributes and history of one call's results do not reach the next call's."""
    region, recorder = warmed(lambda x: (x + 1,), TENSOR, args=[torch.zeros(2)])
    x = torch.zeros(2)
    region(x)
    first = region(x)[0]
    first.mul_(3)
    first.note = 1  # type: ignore[attr-defined]
    assert first._version == 1
    del first
    second = region(x)[0]
    assert second._version == 0
    assert not hasattr(second, "note")
    assert second.eq(1).all()
    assert recorder.recorded == 1


def test_another_stream_has_recordings_of_its_own() -> None:
    region, recorder = warmed(lambda x: (x + 1,), TENSOR, args=[torch.zeros(2)])
    x = torch.zeros(2)
    region(x)
    recorder.stream = 1
    region(x)
    assert recorder.recorded == 2
    recorder.stream = None  # being captured by someone else
    replayed = recorder.replayed
    assert region(x)[0].eq(1).all()
    assert recorder.replayed == replayed


def test_what_cannot_be_recorded_runs_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    region, recorder = made(lambda x: (x + 1,), TENSOR)
    recorder.error = RuntimeError("operation not permitted when stream is capturing\nmore")
    x = torch.zeros(2)

    def calls() -> None:
        for _ in range(4):
            assert region(x)[0].eq(1).all()

    told = "RuntimeError: operation not permitted when stream is capturing"
    assert warnings_of(calls, monkeypatch) == [TOLD.format(told)]
    assert opforge.stats()["unrecorded"] == {"RuntimeError: operation not permitted when stream is capturing": 1}
    region, recorder = made(lambda x: (x + 1,), TENSOR, strict=True)
    recorder.error = torch.cuda.OutOfMemoryError("out of memory")
    region(x)
    with pytest.raises(UnsupportedError, match="out of memory"):
        region(x)


def test_errors_of_the_program_itself_are_raised() -> None:
    def fails(x: Tensor) -> tuple[Tensor]:
        if x[0] > 3:
            raise IndexError("index 4 is out of range")
        return (x,)

    region, _ = made(fails, TENSOR)
    with pytest.raises(IndexError, match="out of range"):
        region(torch.full((2,), 4.0))


def test_memory_goes_with_the_region() -> None:
    region, _ = warmed(lambda x: (x + 1,), TENSOR, args=[torch.zeros(2)])
    x = torch.zeros(2)
    out = region(x)[0]
    home = weakref.ref(region.recordings[0].own.blocks[0].own.tensors[0])  # type: ignore[union-attr]
    del region
    assert home() is None
    assert out.eq(1).all()


def test_threads_take_turns() -> None:
    region, _ = warmed(lambda x: (x + 1,), TENSOR, args=[torch.zeros(64)])
    wrong = []

    def work(n: int) -> None:
        x = torch.full((64,), float(n))
        for _ in range(50):
            if not region(x)[0].eq(n + 1).all():
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_grad_modes_do_not_mix() -> None:
    region, recorder = warmed(lambda x: (x + 1,), TENSOR, args=[torch.zeros(2)])
    x = torch.zeros(2)
    region(x)
    with torch.inference_mode():
        region(x)
    assert recorder.recorded == 2
