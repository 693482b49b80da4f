"""Backwards in which only some results got a gradient: what the others need may have been written since, and eager does not mind."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import opforge

Program = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def _apart(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x * w, x.sin(), (w * w).sum()


def _computed_again(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Eager keeps the exponential for the first result and `x` for the second: the exponential of another `x` would be wrong."""
    return x.exp() + w, (x * x).sum(), w.cos()


def _results_kept(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x.tanh(), (w * 3).sigmoid(), x + w


def _written_inside(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    x.mul_(w)
    return (x * x).sum(), w.exp(), x + 1


def _views_of_values(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """As `_computed_again`, seen through a view."""
    return x.exp()[0], w * x, x.sigmoid()[1] * w[1]


PROGRAMS = [_apart, _results_kept, _written_inside, _computed_again, _views_of_values]
NAMES = ["input 0", "input 1", "result 0", "result 1", "result 2"]


def _outcome(program: Program, written: str, chosen: tuple[int, ...]) -> str | list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.rand(3, 4, generator=generator, requires_grad=True) for _ in range(2)]
    inputs = [t * 1 for t in leaves]
    results = program(*inputs)
    place, k = written.split()
    with torch.no_grad():
        (inputs if place == "input" else results)[int(k)].add_(1)
    roots = [results[i] for i in chosen]
    try:
        return list(torch.autograd.grad(roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True))
    except RuntimeError as error:
        return "modified by an inplace operation" if "modified by an inplace operation" in str(error) else str(error)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", PROGRAMS, ids=[p.__name__.strip("_") for p in PROGRAMS])
def test_writes_between_as_eager(program: Program, dynamic: bool) -> None:
    compiled = torch.compile(program, backend="opforge", dynamic=dynamic)
    refused = 0
    for written in NAMES:
        for chosen in itertools.chain(*(itertools.combinations(range(3), n) for n in (1, 2, 3))):
            expected = _outcome(program, written, chosen)
            refused += isinstance(expected, str)
            found = _outcome(compiled, written, chosen)
            if isinstance(expected, str) or isinstance(found, str):
                assert found == expected, (written, chosen)
            else:
                assert [g is None for g in found] == [g is None for g in expected], (written, chosen)
                torch.testing.assert_close(
                    [g for g in found if g is not None], [g for g in expected if g is not None], rtol=1e-5, atol=1e-6
                )
    assert 0 < refused < 7 * len(NAMES)


def _shown_as_another_object(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The first result is what the second one's backward reads, behind `detach`."""
    y = x.sin()
    return y.detach(), (y * y).sum(), w + 1


def test_writes_to_what_only_others_share() -> None:
    """The tensor object that the backward keeps is nobody's: the version counter is, by another object."""
    compiled = torch.compile(_shown_as_another_object, backend="opforge")
    for chosen, refused in (((1,), True), ((1, 2), True), ((2,), False)):
        for program in (_shown_as_another_object, compiled):
            assert isinstance(_outcome(program, "result 0", chosen), str) == refused, (program, chosen)
    base = torch.rand(4, requires_grad=True) * 1
    for program in (
        lambda t: (t.sum(), (t * t).sum()),
        torch.compile(lambda t: (t.sum(), (t * t).sum()), backend="opforge"),
    ):
        first, second = program(base[1:])
        with torch.no_grad():
            base.add_(1)
        torch.autograd.grad(first, base, retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            torch.autograd.grad(second, base)


def test_memory_goes_with_the_backward() -> None:
    """What was saved for some results does not live as long as the graph does."""
    program = torch.compile(lambda t: ((t * t).sum(), t.sum()), backend="opforge")
    leaf = torch.rand(4, requires_grad=True)
    inside = leaf * 1
    storage = torch.multiprocessing.reductions.StorageWeakRef(inside.untyped_storage())
    results = program(inside)
    del inside
    assert not storage.expired()
    torch.autograd.backward(results)
    assert storage.expired()
    assert results[0].requires_grad


REPLACED: dict[str, Callable[[], Tensor]] = {
    "values": lambda: torch.arange(16.0).reshape(4, 4),
    "strides": lambda: torch.arange(16.0).reshape(4, 4).t(),
    "strides and place": lambda: torch.arange(64.0).reshape(8, 8)[::2, ::2],
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("way", REPLACED)
@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: (x * w,),
        lambda x, w: (x * w, x.exp()),
        lambda x, w: (x @ w, x.exp() + w),
        lambda x, w: (x * w, w.exp() + x),
    ],
    ids=["one", "several", "library", "kept for another"],
)
def test_data_that_replaces_an_inputs_own(program: Program, way: str, dynamic: bool) -> None:
    """Autograd saves inputs as objects: its formulas read what `.data =` put there since the forward, in its own layout."""
    found = []
    for run in (program, torch.compile(program, backend="opforge", dynamic=dynamic)):
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.rand(4, 4, generator=generator, requires_grad=True) for _ in range(2))
        first = run(x, w)[0]
        w.data = REPLACED[way]()
        found.append(torch.autograd.grad(first.sum(), (x, w)))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(2, 4, 4), torch.ones(4, 4, dtype=torch.float64)])
def test_data_of_another_type_is_refused(other: Tensor, dynamic: bool) -> None:
    """The code that was made for the first sizes would read beyond the memory."""
    for program in (lambda x, w: (x * w,), lambda x, w: (x * w, x.exp())):
        x, w = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4)
        first = torch.compile(program, backend="opforge", dynamic=dynamic)(x, w)[0]
        w.data = other
        with pytest.raises(RuntimeError, match=r"before the backward its data was\s+replaced"):
            first.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooks"])
def test_data_of_a_tensor_that_nobody_else_holds(hooked: bool, dynamic: bool) -> None:
    """Autograd holds the object: that the program has dropped it since changes nothing, nor do hooks that give it back."""
    program = lambda x, w: (x * w, x.exp() * w)  # noqa: E731
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hooked else contextlib.nullcontext()
    for chosen in ((0,), (1,), (0, 1)):
        found = []
        for run in (program, torch.compile(program, backend="opforge", dynamic=dynamic)):
            x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
            with hooks:
                results = run(x, w)
            w.data = torch.full((3,), 5.0)
            del w
            found.append(torch.autograd.grad([results[k].sum() for k in chosen], x))
        torch.testing.assert_close(found[1], found[0])


def test_what_hooks_have_copied_may_be_written() -> None:
    """Autograd does not check the versions of what hooks packed."""
    for chosen in ((0,), (0, 1)):
        found = []
        program = lambda x, w: (x * w, x.exp())  # noqa: E731
        for run in (program, torch.compile(program, backend="opforge")):
            x, w = torch.ones(4, requires_grad=True), torch.full((4,), 3.0)
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
                results = run(x, w)
            w.add_(1)
            found.append(torch.autograd.grad([results[k].sum() for k in chosen], x))
        torch.testing.assert_close(found[1], found[0])


def test_a_view_that_autograd_lost_runs_in_eager() -> None:
    """Autograd refuses to say where such a view comes from; operators without a gradient still take it."""
    base = torch.rand(3, 4, requires_grad=True) * 1
    with torch.no_grad():
        view = base[0]
        base.t_()
    program = torch.fx.symbolic_trace(lambda t: torch.bucketize(t, torch.arange(3.0)))
    compiled = opforge.compile_fx(program, [view])
    torch.testing.assert_close(compiled(view), program(view))
    with (
        opforge.config.patch(strict=True),
        pytest.raises(opforge.errors.UnsupportedError, match="cannot tell where an input"),
    ):
        opforge.compile_fx(program, [view])


def _parts(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gradient of `x` is put together of those of its parts: the missing one is zero, not zero divided by zero."""
    a, b = x.chunk(2)
    return a.log(), b * w[0], x.t().sqrt() * w[0, 0]


def _rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a, b, c, d = x.unbind()
    return a.sqrt(), (b * w[0]).sum(), torch.stack([c, d]).rsqrt()


def _power_of_zero(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the second result is zeros that no tangent comes to."""
    return x.log(), x**0 + w.sum(), w * 1


def _power_of_zero_before(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """There eager's own gradient is zero divided by zero."""
    h = x.sqrt()
    return h.log(), h**0, w * 1


def _power_of_zero_in_columns(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x.t().log(), x.t() ** 0, x**0 * w.sum()


@pytest.mark.parametrize(
    "program",
    [_parts, _rows, _power_of_zero, _power_of_zero_before, _power_of_zero_in_columns],
    ids=lambda f: f.__name__.strip("_"),
)
def test_what_is_infinite_for_a_missing_gradient_stays_out(program: Program) -> None:
    compiled = torch.compile(program, backend="opforge")
    for chosen in [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)]:
        found = []
        for run in (program, compiled):
            x, w = torch.zeros(4, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
            results = run(x, w)
            found.append(torch.autograd.grad([results[k].sum() for k in chosen], x, allow_unused=True)[0])
        assert (found[0] is None) == (found[1] is None), chosen
        if found[0] is not None:
            torch.testing.assert_close(found[1], found[0], equal_nan=True)


class _TwoNorms(nn.Module):
    """Two results of their own statistics, a scale that eager keeps, and a buffer that nothing reads in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.register_buffer("shift", torch.rand(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.norms[0](x).exp() * self.scale, self.norms[1](x).tanh() + self.shift


PARTS = [
    "nothing",
    "norms.0.running_mean",
    "norms.1.running_var",
    "norms.0.num_batches_tracked",
    "norms.1.weight",
    "scale",
    "shift",
]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_writes_to_parameters_and_buffers_between(dynamic: bool, hooked: bool) -> None:
    """Eager's batch norm keeps its running statistics, which our backward does not read: their versions are compared all the same."""
    torch.manual_seed(0)
    model = _TwoNorms().double()
    state = {k: t.clone() for k, t in model.state_dict().items()}
    compiled = torch.compile(model, backend="opforge", dynamic=dynamic)
    refused = 0
    for written in PARTS:
        for chosen in ((0,), (1,), (0, 1)):
            found = []
            for run in (model, compiled):
                model.load_state_dict(state)
                x = torch.rand(
                    5, 3, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(1)
                )
                saved = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
                with saved if hooked else contextlib.nullcontext():
                    results = run(x)
                if written != "nothing":
                    with torch.no_grad():
                        model.state_dict()[written].add_(1)
                try:
                    found.append(torch.autograd.grad([results[k].square().sum() for k in chosen], x)[0])
                except RuntimeError as error:
                    if "modified by an inplace operation" not in str(error):
                        raise
                    found.append(written)
            refused += isinstance(found[0], str)
            if any(isinstance(f, str) for f in found):
                assert found[0] == found[1], (written, chosen)
            else:
                torch.testing.assert_close(found[1], found[0])
    assert (refused == 0) == hooked
