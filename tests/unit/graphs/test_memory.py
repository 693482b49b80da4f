"""Recordings that share memory, over a stand-in for a device: what is shared, what returns, and that nothing in use is ever overwritten."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import opforge
from opforge.runtime.config import Config
from opforge.runtime.graphs import region as regions
from opforge.runtime.graphs.memory import Block, Place
from opforge.runtime.graphs.recording import Slot
from opforge.runtime.graphs.region import Region
from opforge.runtime.torch_compat import reinterpret_tensor

from .fake import FakeDevice, FakeRecorder

TENSOR, FIXED = Slot(), Slot(fixed=True)
SMALL = Config.cudagraphs_clone_bytes
ROWS = 16  # so that a kept tensor is a kilobyte


@pytest.fixture(autouse=True)
def counted() -> None:
    opforge.reset_stats()


def forward(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    """The result, and what is kept for the backward."""
    a = x * w
    b = a.sin()
    c = b * w
    return c.sum(0), a, b, c


def backward(args: list[Any]) -> Sequence[Tensor]:
    """Gradients; gives up what was kept while it runs."""
    a, b, c, w, g = args
    args.clear()
    first = b + c
    del b, c
    second = first * a.cos()
    del a
    return second * g, (second * w * g).sum(0)


class Step:
    """A forward and its backward on one device."""

    def __init__(self, device: FakeDevice, **options: Any) -> None:
        self.recorders = [FakeRecorder(device), FakeRecorder(device)]
        self.forward = Region(forward, [TENSOR, FIXED], self.recorders[0], needed=[1, 2, 3], **options)
        self.backward = Region(backward, [FIXED, FIXED, FIXED, FIXED, TENSOR], self.recorders[1], boxed=True, **options)

    def __call__(self, x: Tensor, w: Tensor, g: Tensor) -> Sequence[Tensor]:
        """The result and the gradients."""
        y, *kept = self.forward(x, w)
        kept += [w, g]
        return y, *self.backward.run(kept)

    def recorded(self) -> list[int]:
        return [r.recorded for r in self.recorders]


def data() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(ROWS, ROWS), torch.randn(ROWS), torch.randn(ROWS)


def eager(x: Tensor, w: Tensor, g: Tensor) -> Sequence[Tensor]:
    y, *kept = forward(x, w)
    return y, *backward([*kept, w, g])


def close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_backward_is_recorded_in_what_its_forward_kept() -> None:
    reserved = {}
    for share in (True, False):
        device = FakeDevice()
        step, (x, w, g) = Step(device, share=share), data()
        for _ in range(6):
            close(step(x, w, g), eager(x, w, g))
            x.normal_()
        assert step.recorded() == [1, 1]
        assert [r.replayed for r in step.recorders] == [5, 5]
        reserved[share] = device.reserved()
        assert len(step.backward.recordings[0].given) == (3 if share else 0)
    assert reserved[True] < reserved[False]


def test_regions_share_temporary_memory() -> None:
    device = FakeDevice()
    x = torch.randn(ROWS, ROWS)
    found = [Region(lambda x, n=n: (x.sum() + n,), [TENSOR], FakeRecorder(device)) for n in range(5)]
    for _ in range(4):
        for n, region in enumerate(found):
            torch.testing.assert_close(region(x)[0], x.sum() + n)
    assert len(device.pools) == 1
    assert all(len(region.recordings) == 1 for region in found)


def with_gradients_that_stay(step: Step) -> None:
    """Those of the step before are dropped after the next forward."""
    x, w, g = data()
    gradients: Sequence[Tensor] = ()
    for _ in range(8):
        want = eager(x, w, g)
        y, *kept = step.forward(x, w)
        close([y], want[:1])
        close(gradients, want[1:] if gradients else ())
        del gradients
        kept += [w, g]
        gradients = step.backward.run(kept)
        del y
        close(gradients, want[1:])
    assert not step.forward.private_pool
    assert sum(step.recorded()) <= 4
    assert step.recorders[0].replayed >= 5
    assert opforge.stats()["unrecorded"] == {}


def test_gradients_that_stay_give_their_backward_a_private_pool() -> None:
    """A forward would overwrite them: they get memory of their own."""
    step = Step(FakeDevice(), small=0)
    with_gradients_that_stay(step)
    assert step.backward.private_pool


def test_small_gradients_that_stay_are_copies() -> None:
    step = Step(FakeDevice())
    with_gradients_that_stay(step)
    assert not step.backward.private_pool
    assert step.backward.fresh == {0, 1}


@pytest.mark.parametrize("small", [0, SMALL])
def test_a_loss_that_is_held_until_the_next_step(small: int) -> None:
    """It is copied, and both go on sharing memory."""
    device = FakeDevice()
    step, (x, w, g) = Step(device, small=small), data()
    y = None
    for _ in range(8):
        x.normal_()
        want = eager(x, w, g)
        y, *kept = step.forward(x, w)
        kept += [w, g]
        close([y, *step.backward.run(kept)], want)
    assert y is not None
    assert step.forward.private_pool == (small == 0)
    assert step.forward.fresh == (set() if small == 0 else {0})
    assert opforge.stats()["unrecorded"] == {}
    if small:
        assert step.recorded() == [2, 2]
        assert len(device.pools) == 1
        (segments,) = (pool.segments for pool in device.pools)
        assert not any(s.data_ptr() <= y.data_ptr() < s.data_ptr() + s.numel() for s in segments)


def test_losses_of_all_steps() -> None:
    """More than there are versions of a recording."""
    step, (x, w, g) = Step(FakeDevice(), strict=True), data()
    losses = []
    for _ in range(3 * regions.VERSIONS):
        x.normal_()
        y, *kept = step.forward(x, w)
        losses.append((y, eager(x, w, g)[0]))
        step.backward.run([*kept, w, g])
        del kept
    for y, want in losses:
        torch.testing.assert_close(y, want)
    assert step.recorded()[0] == 2
    assert opforge.stats()["unrecorded"] == {}


def test_what_the_backward_reads_stays_where_it_is() -> None:
    """A held result that is also kept is no copy: the backward would be recorded for each."""
    step, (x, w, g) = Step(FakeDevice()), data()
    a = None
    for _ in range(6):
        y, *kept = step.forward(x, w)
        a = kept[0]
        close(step.backward.run([*kept, w, g]), eager(x, w, g)[1:])
        del y, kept
    assert a is not None
    assert step.forward.private_pool
    assert step.forward.fresh == set()


def test_small_is_counted_in_all() -> None:
    """Of three held results, of which two are small enough together, one stays where it was: versions are recorded for it."""
    n = SMALL // 10
    region = Region(lambda x: (x + 1, x + 2, x + 3), [TENSOR], FakeRecorder())
    x = torch.zeros(n)  # four tenths
    held: tuple[Any, ...] = ()
    for k in range(8):
        x.fill_(k)
        got = region(x)
        assert [t.eq(k + d).all() for d, t in enumerate(got, 1)] == [True] * 3
        assert all(t.eq(k - 1 + d).all() for d, t in enumerate(held, 1))
        held = tuple(got)
    assert region.private_pool
    assert [len(r.fresh) for r in region.recordings] == [2, 2]
    assert opforge.stats()["unrecorded"] == {}


def test_what_is_kept_beyond_the_backward_is_not_overwritten() -> None:
    """As with `retain_graph=True`: then the backward may not use that memory."""
    step, (x, w, g) = Step(FakeDevice()), data()
    for _ in range(3):
        step(x, w, g)
    for _ in range(4):
        x.normal_()
        y, *kept = step.forward(x, w)
        want = [t.clone() for t in kept]
        for _ in range(2):
            close(step.backward.run([*kept, w, g]), eager(x, w, g)[1:])
            close(kept, want)
        del y, kept


@pytest.mark.parametrize("hold", [lambda t: t, lambda t: t.detach(), lambda t: t.untyped_storage(), lambda t: [t[1:]]])
def test_any_other_use_of_what_a_backward_gives_up_counts(hold: Callable[[Tensor], Any]) -> None:
    step, (x, w, g) = Step(FakeDevice()), data()
    for _ in range(3):
        step(x, w, g)
    y, *kept = step.forward(x, w)
    b = kept[1].clone()
    held = hold(kept[1])
    replayed = step.recorders[1].replayed
    kept += [w, g]
    close(step.backward.run(kept), eager(x, w, g)[1:])
    assert step.recorders[1].replayed == replayed
    found = held[0] if isinstance(held, list) else held
    values = (
        torch.empty(0).set_(found, 0, b.shape, b.stride()) if not isinstance(found, Tensor) else found  # type: ignore[call-overload]
    )
    torch.testing.assert_close(values, b[1:] if isinstance(held, list) else b)
    del y


def test_memory_returns_with_the_regions() -> None:
    device = FakeDevice()
    step, (x, w, g) = Step(device), data()
    for _ in range(4):
        held = step(x, w, g)
    assert device.reserved()
    del step
    assert not device.reserved()
    close(held, eager(x, w, g))


def test_results_outlive_a_recording_whose_memory_was_given_away() -> None:
    """The allocator does not know these results: their pool stays until they are gone."""
    device = FakeDevice()
    step, (x, w, g) = Step(device), data()
    for _ in range(4):
        step(x, w, g)
    y, *kept = step.forward(x, w)
    assert not all(b.allocated for b in step.forward.recordings[0].own.blocks)
    del step
    gc.collect()
    assert device.reserved()
    close([y, *kept], forward(x, w))
    other = Step(device)
    for _ in range(4):
        other(x, w, g)
    close([y, *kept], forward(x, w))
    del y, kept, other
    third = Step(device)
    third(x, w, g)
    third(x, w, g)
    assert len(device.pools) == 1


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_a_recording_that_fails_leaves_arguments_and_results(which: int, late: bool) -> None:
    """Also when what a backward gives up was given up already."""
    step, (x, w, g) = Step(FakeDevice()), data()
    other = Step(step.recorders[0].device)  # type: ignore[arg-type]
    for _ in range(3):
        other(x, w, g)
    step(x, w, g)
    setattr(step.recorders[which], "late_error" if late else "error", torch.cuda.OutOfMemoryError("out of memory"))
    for _ in range(4):
        x.normal_()
        close(step(x, w, g), eager(x, w, g))
        close(other(x, w, g), eager(x, w, g))
    assert opforge.stats()["unrecorded"] == {"OutOfMemoryError: out of memory": 1}
    assert other.recorded() == [2, 2]  # in a new pool: the one that has grown for what failed is gone
    setattr(step.recorders[which], "late_error" if late else "error", None)  # its traceback has the old pool
    assert len(step.recorders[0].device.pools) == 1


def test_a_new_recording_between_a_forward_and_its_backward() -> None:
    """What the forward keeps is at addresses that the allocator takes for free: others wait, and both are recorded anew."""
    device = FakeDevice()
    step, (x, w, g) = Step(device), data()
    for _ in range(3):
        step(x, w, g)
    between = Region(lambda x: (x + 1, x.sum(0)), [TENSOR], FakeRecorder(device))
    for _ in range(8):
        y, *kept = step.forward(x, w)
        close(between(x), (x + 1, x.sum(0)))
        kept += [w, g]
        close([y, *step.backward.run(kept)], eager(x, w, g))
        del y
    assert between.recordings
    assert between.recorder.replayed >= 5  # type: ignore[attr-defined]
    assert len(device.pools) == 1


def test_streams_and_devices_share_nothing() -> None:
    device = FakeDevice()
    steps, (x, w, g) = [Step(device), Step(FakeDevice())], data()
    for stream in (0, 1):
        for step in steps:
            for recorder in step.recorders:
                recorder.stream = stream
            for _ in range(3):
                close(step(x, w, g), eager(x, w, g))
    assert len(device.pools) == 2


def test_what_others_hold_of_a_result_is_not_counted_as_its_own() -> None:
    """An operator that returns a tensor which it keeps: that is no memory to give away."""
    constant = torch.arange(4.0)
    region = Region(lambda x: (constant, x + 1), [TENSOR], FakeRecorder())
    place = Place.of(constant)
    block = Block(constant.untyped_storage())
    block.add(constant.view(4))
    block.count()
    assert not block.alone
    assert block.uses() == 0
    assert torch.equal(place.tensor(constant.untyped_storage()), constant)
    x = torch.zeros(2)
    for _ in range(4):
        assert torch.equal(region(x)[0], constant)


def test_what_cannot_be_made_again_from_its_address_stays() -> None:
    t = torch.ones(3, dtype=torch.complex64).conj()
    block = Block(t.untyped_storage())
    block.add(t)
    del t
    block.count()
    assert (block.uses(), block.alone) == (0, False)


def test_a_block_counts_the_same_after_it_was_let_go() -> None:
    t = torch.arange(8.0)
    block = Block(t.untyped_storage())
    block.add(t)
    del t
    block.count()
    assert (block.uses(), block.alone) == (0, True)
    user = reinterpret_tensor(block.own.tensors[0], (2, 4), (4, 1), 0)  # type: ignore[union-attr]
    assert block.uses() == 1
    block.hold(block.let_go())
    assert (block.uses(), block.allocated) == (1, True)
    del user
    assert block.uses() == 0
    kept = torch.UntypedStorage(64)
    block.address = kept.data_ptr()
    block.hold(block.let_go())
    assert (block.uses(), block.allocated) == (0, False)
    assert block.own.tensors[0].data_ptr() == kept.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [0, 4096])
@pytest.mark.parametrize("inference", [False, True])
def test_a_storage_that_its_user_resizes(size: int, inference: bool) -> None:
    """It has other memory then, and is no longer what a replay writes."""
    with torch.inference_mode(inference):
        t = torch.arange(8.0)
        block = Block(t.untyped_storage())
        block.add(t.view(2, 4))
        del t
        block.count()
        user = reinterpret_tensor(block.own.tensors[0], (8,), (1,), 0)  # type: ignore[union-attr]
    assert block.uses() == 1
    user.untyped_storage().resize_(size)
    assert (block.uses(), block.allocated) == (0, False)
    (own,) = block.own.tensors  # type: ignore[union-attr]
    assert own.data_ptr() == block.address != user.data_ptr()
    assert (own.shape, own.untyped_storage().nbytes(), own.is_inference()) == ((2, 4), 32, inference)
    block.hold(block.let_go())
    assert block.uses() == 1  # `own`, which the test holds


def play(seed: int, choices: Sequence[tuple[int, int]]) -> None:
    """Calls, backwards, drops and failures of several steps on one device, in any order: nothing that is held ever changes."""
    device = FakeDevice(seed)
    rng = random.Random(seed)
    small = rng.choice([0, 600, SMALL])
    steps = [Step(device, share=False, small=small), Step(device, small=small), Step(device, small=small)]
    lone = Region(lambda x: (x.sum(0), x * 2), [TENSOR], FakeRecorder(device), small=small)
    inputs = [data() for _ in range(2)]
    held: list[tuple[Sequence[Tensor], list[Tensor]]] = []
    pending: list[tuple[Step, list[Any], Sequence[Tensor]]] = []

    def hold(*tensors: Tensor) -> None:
        held.append((tensors, [t.clone() for t in tensors]))

    for kind, n in choices:
        step = steps[n % len(steps)]
        x, w, g = inputs[n % len(inputs)]
        if kind <= 3:  # a step at once, as most programs do
            y, *gradients = step(x, w, g)
            close([y, *gradients], eager(x, w, g))
            if kind == 2:
                hold(*gradients)
            if kind == 3:
                hold(y)
            del y, gradients
        elif kind == 4:
            y, *kept = step.forward(x, w)
            close([y, *kept], forward(x, w))
            if (use := n // 3 % 5) < 2:
                hold([kept[n % 3], kept[n % 3].detach()][use])
            pending.append((step, [*kept, w, g], eager(x, w, g)[1:]))
            del y, kept
        elif kind == 5 and pending:
            step, arguments, want = pending.pop(n % len(pending))
            if n // 3 % 4 == 0:
                close(step.backward.run(list(arguments)), want)  # the graph is retained
            gradients = step.backward.run(arguments)
            close(gradients, want)
            if n % 2:
                hold(*gradients)
            del gradients, arguments
        elif kind == 6:
            total, double = lone(x)
            close([total, double], [x.sum(0), x * 2])
            if n % 2:
                hold(total if n % 4 == 1 else double)
            del total, double
        elif kind == 7 and held:
            held.pop(n % len(held))
        elif kind == 8:
            x.normal_()
        elif kind == 9:
            if n % 2:
                inputs[n % len(inputs)] = data()  # other addresses
            else:
                steps[n % len(steps)] = step = Step(device, share=bool(n % len(steps)))
                for _ in range(3):
                    step(x, w, g)
        elif kind == 10:
            step.recorders[n % 2].late_error = RuntimeError("capture failed") if rng.random() < 0.5 else None
        elif kind == 11:
            with torch.inference_mode():
                close(step.forward(x, w), forward(x, w))
        elif kind == 12:
            for recorder in (*step.recorders, lone.recorder):
                recorder.stream = n % 2  # type: ignore[attr-defined]
        del x, w, g
        for tensors, want in held:
            for t, value in zip(tensors, want, strict=True):
                assert torch.equal(t, value)
        for _, arguments, want in pending:
            a, b, c, w, g = arguments
            torch.testing.assert_close(backward([a.clone(), b.clone(), c.clone(), w, g]), tuple(want))
            del a, b, c, w, g, arguments


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 60)), max_size=80))
def test_nothing_that_is_held_ever_changes(seed: int, choices: list[tuple[int, int]]) -> None:
    play(seed, choices)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_is_held_changes_in_long_runs(seed: int) -> None:
    rng = random.Random(seed)
    weights = [8, 8, 2, 3, 4, 6, 4, 6, 3, 3, 1, 1, 1]
    kinds = rng.choices(range(13), weights, k=250)
    play(seed, [(kind, rng.randrange(60)) for kind in kinds])


def test_limits_hold_where_memory_is_shared() -> None:
    """However often addresses change, recordings and pools stay few."""
    device = FakeDevice()
    step = Step(device)
    alive = []
    for _ in range(3 * regions.RECORDINGS):
        x, w, g = data()
        alive.append((x, w, g))
        close(step(x, w, g), eager(x, w, g))
    assert all(n <= 3 * regions.RECORDINGS for n in step.recorded())
    assert len(device.pools) <= 3
