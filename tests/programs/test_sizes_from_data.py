"""Graphs whose sizes are known only while they run, beside eager: one graph for no, one and several elements, values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import opforge
from opforge.runtime.compile_fx import HISTORY, compile_fx
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graphs.eligible import why_not
from opforge.runtime.torch_compat import minor_version

Calls = list[tuple[Any, ...]]
PROGRAMS: dict[str, tuple[Callable[..., Any], Calls]] = {}
COUNTS = (3, 0, 1, 6, 2)
UNTRACED = "GuardOnDataDependentSymNode while tracing"
LEFT = {
    # In torch's own formulas for gradients, in C++: they ask whether there are elements.
    "running sums": UNTRACED,
    "statistics": UNTRACED,
}
# Dynamo of torch 2.11 gives each slice a size of its own, and does not say what it is.
LEFT_ALWAYS = {"parts": "is made from data while the graph runs"} if minor_version() == "2.11" else {}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    opforge.reset_stats()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


def program(name: str, calls: Calls) -> Callable[[Any], Any]:
    def add(fn: Any) -> Any:
        PROGRAMS[name] = fn, calls
        return fn

    return add


def positive(*columns: int) -> Calls:
    """Six rows, of which 3, 0, 1, 6, 2 are greater than 0."""
    found: Calls = []
    for k in COUNTS:
        x = torch.rand((6, *columns), generator=torch.Generator().manual_seed(k)) + 0.1
        x[k:] *= -1
        found.append((x,))
    return found


def numbers(*values: int) -> Calls:
    return [(torch.tensor([k]), torch.arange(8.0)) for k in values]


@program("nonzero", positive())
def _nonzero(x: Any) -> Any:
    at = (x > 0).nonzero()
    return at * 2, at.t()


@program("positions", positive())
def _positions(x: Any) -> Any:
    (i,) = torch.where(x > 0)
    return x[i] * i


@program("masked_select", positive())
def _masked_select(x: Any) -> Any:
    return torch.masked_select(x, x > 0).exp() + 1


@program("sum of what a mask leaves", positive())
def _masked_sum(x: Any) -> Any:
    return x[x > 0].sum(), x[x > 0].mean()


@program("rows", positive(4))
def _rows(x: Any) -> Any:
    y = x[x[:, 0] > 0]
    return torch.softmax(y, -1), F.layer_norm(y, (4,)), y.sum(0), F.relu(y @ torch.ones(4, 3) + 1)


@program("greatest", positive())
def _greatest(x: Any) -> Any:
    return x[x > 0].max()


@program("softmax along it", positive())
def _softmax(x: Any) -> Any:
    return torch.softmax(x[x > 0], 0)


@program("unique", [(torch.tensor(r),) for r in ([1, 2, 0], [0, 0, 0], [4, 4, 5])])
def _unique(x: Any) -> Any:
    v, i, c = torch.unique(x, return_inverse=True, return_counts=True)
    return v + 1, i, c * 2


@program("repeat_interleave", [(torch.ones(3, 2), torch.tensor(r)) for r in ([1, 2, 0], [0, 0, 0], [0, 1, 0])])
def _repeat(x: Any, r: Any) -> Any:
    return x.repeat_interleave(r, 0) * 2


@program("zeros of a number", numbers(3, 0, 1, 8))
def _zeros(n: Any, x: Any) -> Any:
    k = n[0].item()
    torch._check(k >= 0)
    torch._check(k <= 8)
    return torch.zeros(k) + 1, torch.arange(k) * 2


@program("a part of an input", numbers(3, 0, 1, 8, 9))
def _narrowed(n: Any, x: Any) -> Any:
    k = n[0].item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return x[:k].sum(), x.narrow(0, 0, k) * 2


@program("a number as a factor", numbers(3, 0, 1, -2))
def _factor(n: Any, x: Any) -> Any:
    k = n[0].item()
    return x * k + k, k


@program("a float", [(torch.tensor([k]), torch.ones(8)) for k in (3.0, 0.0, -1.5)])
def _float(n: Any, x: Any) -> Any:
    return x * n[0].item()


@program("joined", [(a, -b) for (a,), (b,) in zip(positive(), positive(), strict=True)])
def _joined(x: Any, y: Any) -> Any:
    return torch.cat([x[x > 0], y[y > 0]]) * 2, torch.cat([x[x > 0], y])


@program("broadcast", positive())
def _broadcast(x: Any) -> Any:
    y = x[x > 0]
    return y[:, None] * y[None, :], torch.ones(y.shape[0], 3) + y[:, None], torch.outer(y, x[x > 0.5])


@program("a mask of a mask", positive())
def _chain(x: Any) -> Any:
    y = x[x > 0]
    return y[y > 0.4] * 2, x[x > 0] + (x * 2)[x > 0]


@program("written where a mask holds", positive())
def _written(x: Any) -> Any:
    y, m = x.clone(), x > 0
    y[m] = x[m] * 2
    return y


@program("numbers of elements", positive())
def _sized(x: Any) -> Any:
    y = x[x > 0]
    return y.shape[0], y * y.shape[0], y.numel() + 1


@program("other shapes", positive())
def _reshaped(x: Any) -> Any:
    y = x[x > 0]
    return y.reshape(-1, 1) * 2, y.view(1, -1).sum(1), y.unsqueeze(0).expand(3, -1) + 1


@program("parts", positive())
def _parts(x: Any) -> Any:
    y = x[x > 0]
    return y[:2] + 1, y[1:] * 2


@program("padded", positive())
def _padded(x: Any) -> Any:
    y = x[x > 0]
    return F.pad(y, (1, 2)), F.pad(y, (0, (-y.shape[0]) % 8)).reshape(-1, 8).sum(1)


@program("pairs", [c for k, c in enumerate(positive()) if k != 2] + positive()[:1])
def _pairs(x: Any) -> Any:
    y = x[x > 0]
    torch._check(y.shape[0] % 2 == 0)
    return y.reshape(-1, 2).sum(1)


@program("as many as asked for", positive()[3:4] * 2 + positive()[:1])
def _fixed(x: Any) -> Any:
    y = x[x > 0]
    torch._check(y.shape[0] == x.shape[0])
    return y * x


@program("running sums", positive())
def _running(x: Any) -> Any:
    return x[x > 0].cumsum(0)


@program("statistics", positive())
def _statistics(x: Any) -> Any:
    y = x[x > 0]
    return y.var(), y.prod(), (y > 1).any(), y.std()


@program("a loss of some rows", [(torch.eye(6), torch.arange(6), torch.arange(6) < k) for k in COUNTS])
def _loss(x: Any, target: Any, mask: Any) -> Any:
    return F.cross_entropy(x[mask], target[mask], reduction="sum")


def outcome(fn: Any, args: tuple[Any, ...], training: bool) -> Any:
    """Results, or the type of the error; and the gradients of the arguments."""
    args = copy.deepcopy(args)
    for a in args:
        if training and a.is_floating_point():
            a.requires_grad_()
    try:
        with torch.set_grad_enabled(training):
            results = fn(*args)
    except (RuntimeError, IndexError) as error:
        return type(error)
    flat = pytree.tree_leaves(results)
    total = sum((k + 1) * t.sum() for k, t in enumerate(flat) if isinstance(t, torch.Tensor) and t.requires_grad)
    if not isinstance(total, torch.Tensor):
        return flat
    wanted = [a for a in args if a.requires_grad]
    return [*flat, *torch.autograd.grad(total, wanted, allow_unused=True)]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_for_all_sizes(name: str, training: bool) -> None:
    fn, calls = PROGRAMS[name]
    graphs = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        graphs.append(gm)
        return compile_fx(gm, example_inputs)

    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for args in calls:
        right = outcome(fn, args, training)
        found = outcome(compiled, args, training)
        if isinstance(right, type):
            assert found is right
        else:
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert len(graphs) == 1
    reason = LEFT_ALWAYS.get(name) or (LEFT.get(name, "") if training else "")
    assert [r for r in opforge.stats()["fallbacks"] if not reason or reason not in r] == []
    assert bool(opforge.stats()["fallbacks"]) is bool(reason)


def test_a_condition_says_what_is_wrong() -> None:
    @torch.compile(backend="opforge", fullgraph=True)
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x[x > 0]
        torch._check(y.shape[0] != 2)
        return y * 2

    with torch.no_grad():
        fn(torch.tensor([1.0, -1.0, -1.0]))
        with pytest.raises(RuntimeError, match="Runtime assertion failed for expression Ne"):
            fn(torch.tensor([1.0, 1.0, -1.0]))
    assert opforge.stats()["fallbacks"] == {}


def test_nothing_is_written_before_a_condition_is_checked() -> None:
    """What relies on a size comes behind its condition, also where it reads nothing of what makes the size."""

    @torch.compile(backend="opforge", fullgraph=True)
    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        k = n[0].item()
        out = x.narrow(0, 0, k) + 1
        x.mul_(2)
        torch._check(k < 3)
        return out

    x = torch.ones(4)
    with torch.no_grad():
        fn(x, torch.tensor([2]))
        with pytest.raises(RuntimeError):
            fn(x, torch.tensor([3]))
        with pytest.raises(RuntimeError):
            fn(x, torch.tensor([-1]))
    assert x.tolist() == [2.0] * 4


def test_no_memory_is_read_that_a_size_of_zero_does_not_have() -> None:
    """The gradient of `masked_select` read the first of no elements, and the process ended."""

    @torch.compile(backend="opforge", fullgraph=True)
    def fn(x: torch.Tensor, i: torch.Tensor, like: torch.Tensor) -> Any:
        y = x[x > 0]
        return y.index_select(0, i), torch.zeros_like(like).masked_scatter(like > 0, y)

    with torch.no_grad():
        some, put = fn(torch.ones(3), torch.tensor([2, 0]), torch.ones(2))
        assert (some.tolist(), put.tolist()) == ([1.0, 1.0], [1.0, 1.0])
        with pytest.raises((IndexError, RuntimeError)):
            fn(-torch.ones(3), torch.tensor([2, 0]), torch.ones(2))


def test_a_graph_of_such_sizes_is_not_recorded() -> None:
    """A recording replays the sizes that it saw."""
    reasons = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        reasons.append(why_not(trace(gm, example_inputs).graph, "cpu"))
        return gm.forward

    with torch.no_grad():
        torch.compile(lambda x: x[x > 0] * 2, backend=backend)(torch.ones(3))
        torch.compile(lambda n: torch.ones(4) * n.sum().item(), backend=backend)(torch.ones(3, dtype=torch.int64))
        torch.compile(lambda x: x * 2, backend=backend, dynamic=True)(torch.ones(3))
    # The user's line stands behind each.
    assert [r.partition(" ")[2].partition(" (")[0] for r in reasons] == ["has sizes that its data brings"] * 2 + [""]


def test_sizes_that_are_a_choice_are_computed() -> None:
    """A slice of an unknown number of elements has a size that is no polynomial: it was left to eager."""
    compiled = torch.compile(lambda x: x[x > 0][:2] + 1, backend="opforge", fullgraph=True)
    with torch.no_grad():
        for (x,) in positive():
            torch.testing.assert_close(compiled(x), x[x > 0][:2] + 1)
    assert opforge.stats()["fallbacks"] == {}
    wrapper = HISTORY[-1].wrapper
    assert "size0 = " in wrapper or "slice_copy" in wrapper  # torch before 2.12 calls it another size from data


def test_a_size_that_a_graph_before_has_made() -> None:
    """After a graph break the size is an argument, without a number in the example inputs."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x[x > 0]
        torch._dynamo.graph_break()
        return y * 2 + y.shape[0]

    compiled = torch.compile(fn, backend="opforge")
    with torch.no_grad():
        for (x,) in positive():
            torch.testing.assert_close(compiled(x), fn(x))
    assert opforge.stats()["fallbacks"] == {}


def test_a_result_has_eagers_strides() -> None:
    """The fake kernel of `unique` along a dimension says that its result is contiguous; and such a graph has conditions, which may run again."""
    compiled = torch.compile(lambda x: torch.unique(x, dim=1), backend="opforge", fullgraph=True)
    x = torch.randint(0, 3, (3, 4, 5))
    with torch.no_grad():
        assert compiled(x).stride() == torch.unique(x, dim=1).stride()
    (reason,) = opforge.stats()["fallbacks"]
    assert "returned strides" in reason


def test_a_view_at_a_place_from_data_is_left_to_eager() -> None:
    """Its offset was read from a copy, which has none."""
    compiled = torch.compile(lambda x, n: torch.narrow(x, 0, n, 2), backend="opforge", fullgraph=True)
    x = torch.arange(5.0)
    with torch.no_grad():
        for k in (2, -3, 0):
            assert compiled(x, torch.tensor(k)).tolist() == torch.narrow(x, 0, torch.tensor(k), 2).tolist()


def test_a_branch_by_a_size_of_the_program_itself() -> None:
    """Dynamo ends the graph there: what it goes by is a result, a bool."""

    def branch(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = x[x > 0]
        if y.shape[0] > 3:
            return y * 2
        return x + 1 if t.item() < 2.5 else x - 1

    compiled = torch.compile(branch, backend="opforge")
    for x, t in (((torch.arange(12.0) - k).clone(), torch.tensor(float(k))) for k in (0, 8, 11, 2, 12)):
        assert torch.equal(compiled(x, t), branch(x, t))
    assert opforge.stats()["fallbacks"] == {}


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_powers_by_a_number_from_data(dynamic: bool | None) -> None:
    """Where all sizes are known, autograd was asked to compare the number, and the whole graph ran eagerly."""

    def program(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return (x * x + 1) ** n.item() + torch.lerp(x, x * 2, n.item()) + (n.item() + 2) ** x

    compiled = torch.compile(program, backend="opforge", fullgraph=True, dynamic=dynamic)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for n in (0, 3, 2):
            given = [torch.linspace(-1, 1, 12).view(3, 4).requires_grad_() for _ in range(2)]
            results = [f(x, torch.tensor(n)) for f, x in zip((compiled, program), given, strict=True)]
            torch.testing.assert_close(*results)
            torch.testing.assert_close(
                *(torch.autograd.grad(y.sum(), x)[0] for y, x in zip(results, given, strict=True))
            )
    assert opforge.stats()["fallbacks"] == {}
