"""Functionalized randomness (A8): distributions, independence, reproducibility, and the same numbers in forward and backward."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import opforge
from opforge.generated.random import RANDOM
from opforge.runtime import compile_fx

STRICT = {"strict": True, "debug.verify": True}
N = 200_000


def compiled(fn: Callable[..., Any], **kw: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    opforge.reset_stats()
    return torch.compile(fn, backend="opforge", options={**STRICT, **kw.pop("options", {})}, **kw)  # type: ignore[no-any-return]


def native(externs: int = 1) -> None:
    """Nothing ran by an eager kernel but the draw of the seed."""
    found = opforge.stats()["externs"]
    assert found == {"opforge.philox_seed.default": externs}, found


def draw(fn: Callable[..., Any], *args: Any, seed: int = 0, **kw: Any) -> Any:
    run = compiled(fn, **kw)
    torch.manual_seed(seed)
    return run(*args)


# --- distributions


def normal_cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x.double())


# program, distribution function
CONTINUOUS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "rand": (lambda: torch.rand(N), lambda x: x),
    "rand_float64": (lambda: torch.rand(N, dtype=torch.float64), lambda x: x),
    "rand_like": (lambda: torch.rand_like(torch.empty(N)), lambda x: x),
    "uniform": (lambda: torch.empty(N).uniform_(-2, 5), lambda x: (x + 2) / 7),
    "randn": (lambda: torch.randn(N), normal_cdf),
    "randn_float64": (lambda: torch.randn(N, dtype=torch.float64), normal_cdf),
    "randn_like": (lambda: torch.randn_like(torch.empty(N)), normal_cdf),
    "normal_": (lambda: torch.empty(N).normal_(3, 0.5), lambda x: normal_cdf((x - 3) / 0.5)),
    "normal": (lambda: torch.normal(1.0, 2.0, (N,)), lambda x: normal_cdf((x - 1) / 2)),
    "normal_around": (lambda: torch.normal(torch.full((N,), 2.0), 3.0), lambda x: normal_cdf((x - 2) / 3)),
    "normal_by": (lambda: torch.normal(2.0, torch.full((N,), 3.0)), lambda x: normal_cdf((x - 2) / 3)),
    "normal_tensors": (
        lambda: torch.normal(torch.full((N,), 2.0), torch.full((N,), 3.0)),
        lambda x: normal_cdf((x - 2) / 3),
    ),
    "exponential": (lambda: torch.empty(N).exponential_(2.5), lambda x: -torch.expm1(-2.5 * x)),
    "log_normal": (lambda: torch.empty(N).log_normal_(0.5, 0.25), lambda x: normal_cdf((x.log() - 0.5) / 0.25)),
    "cauchy": (lambda: torch.empty(N).cauchy_(1, 2), lambda x: 0.5 + torch.atan((x - 1) / 2) / math.pi),
}


def kolmogorov(x: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """Greatest distance of the empirical distribution function from `cdf`, times the root of the number of elements."""
    ordered = cdf(x.double().sort().values)
    n = x.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())) * math.sqrt(n)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_distribution(name: str) -> None:
    program, cdf = CONTINUOUS[name]
    x = draw(program)
    reasons = {k for k in opforge.stats()["externs"] if "philox_seed" not in k and "_assert_async" not in k}
    assert not reasons
    assert x.isfinite().all()
    assert kolmogorov(x, cdf) < 1.95, "the chance of more is 0.1%"
    assert x.unique().numel() > 0.98 * min(N, 2**22)


DISCRETE: dict[str, tuple[Callable[[], Tensor], list[float], int]] = {
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), [0.7, 0.3], 0),
    "bernoulli_p": (lambda: torch.empty(N).bernoulli_(0.3), [0.7, 0.3], 0),
    "bernoulli_bool": (lambda: torch.empty(N, dtype=torch.bool).bernoulli_(0.3), [0.7, 0.3], 0),
    "bernoulli_int": (lambda: torch.empty(N, dtype=torch.int64).bernoulli_(0.3), [0.7, 0.3], 0),
    "bernoulli_tensor": (lambda: torch.empty(N).bernoulli_(torch.full((N,), 0.3)), [0.7, 0.3], 0),
    "randint": (lambda: torch.randint(10, (N,)), [0.1] * 10, 0),
    "randint_low": (lambda: torch.randint(-3, 4, (N,)), [1 / 7] * 7, -3),
    "randint_int8": (lambda: torch.randint(-3, 4, (N,), dtype=torch.int8), [1 / 7] * 7, -3),
    "randint_float": (lambda: torch.randint(0, 5, (N,), dtype=torch.float32), [0.2] * 5, 0),
    "randint_like": (lambda: torch.randint_like(torch.empty(N), 5), [0.2] * 5, 0),
    "randint_like_low": (lambda: torch.randint_like(torch.empty(N), 2, 7), [0.2] * 5, 2),
    "random_": (lambda: torch.empty(N, dtype=torch.int64).random_(2, 7), [0.2] * 5, 2),
    "random_to": (lambda: torch.empty(N).random_(4), [0.25] * 4, 0),
    "geometric": (lambda: torch.empty(N).geometric_(0.4), [0.4 * 0.6**k for k in range(12)], 1),
    "geometric_int": (lambda: torch.empty(N, dtype=torch.int64).geometric_(0.4), [0.4 * 0.6**k for k in range(12)], 1),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_frequencies(name: str) -> None:
    program, expected, first = DISCRETE[name]
    x = draw(program)
    assert not {k for k in opforge.stats()["externs"] if "philox_seed" not in k and "_assert_async" not in k}
    assert (x == x.trunc()).all() if x.is_floating_point() else True
    values = x.long() - first
    assert int(values.min()) >= 0
    counts = torch.bincount(values)
    if sum(expected) > 1 - 1e-9:
        assert counts.numel() == len(expected)
    for count, p in zip(counts.tolist(), expected, strict=False):
        assert abs(count - N * p) < 5 * math.sqrt(N * p * (1 - p)), (counts, expected)


def test_wide_ranges() -> None:
    low, high = -(2**63), 2**63 - 1

    def program() -> tuple[Tensor, ...]:
        # Three quarters of 2 ** 64: a remainder of 64 bits would come from the first third of it twice as often.
        return torch.randint(low, high, (N,)), torch.randint(low, 2**62, (N,)), torch.randint(0, 2**40, (N,))

    full, three, forty = draw(program)
    native()
    assert kolmogorov(full.double() / 2.0**64 + 0.5, lambda x: x) < 1.95
    assert kolmogorov((three.double() / 2.0**62 + 2) / 3, lambda x: x) < 1.95
    assert kolmogorov(forty.double() / 2.0**40, lambda x: x) < 1.95
    assert abs(float((full & 1).double().mean()) - 0.5) < 0.006
    assert int(three.max()) < 2**62


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_has_the_dtypes_bits_and_never_one(dtype: torch.dtype) -> None:
    def program() -> tuple[Tensor, Tensor]:
        return torch.rand(1_000_000, dtype=dtype), torch.empty(1_000_000, dtype=dtype).uniform_(1, 2)

    x, y = draw(program)
    assert x.dtype == dtype
    assert float(x.min()) >= 0
    assert float(x.max()) < 1
    assert float(y.min()) >= 1
    assert float(y.max()) < 2
    bits = round(-math.log2(torch.finfo(dtype).eps)) + 1
    scaled = x.double() * 2.0**bits
    assert torch.equal(scaled, scaled.trunc())
    assert (scaled.long() & 1).bool().any(), "the last bit is random, too"
    assert abs(float(x.double().mean()) - 0.5) < 0.002 + 2.0 ** -(bits + 1)


def test_normal_is_finite_and_has_tails() -> None:
    x = draw(lambda: torch.randn(4_000_000))
    assert x.isfinite().all()
    assert 4.7 < float(x.abs().max()) < 6.8
    assert abs(float((x.double() ** 4).mean()) - 3) < 0.03


# --- independence


def correlation(a: Tensor, b: Tensor) -> float:
    """Of two equally long samples; scaled so that it is about standard normal for independent ones."""
    a, b = a.flatten().double(), b.flatten().double()
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.norm() * b.norm())) * math.sqrt(a.numel())


def test_elements_rows_streams_and_calls_are_independent() -> None:
    run = compiled(lambda: (torch.rand(512, 512), torch.rand(512, 512), torch.randn(512, 512)))
    torch.manual_seed(1)
    a, b, c = run()
    later, *_ = run()
    for shift in (1, 2, 3, 4, 8, 512):
        flat = a.flatten()
        assert abs(correlation(flat[:-shift], flat[shift:])) < 4.5, shift
    assert abs(correlation(a, b)) < 4.5
    assert abs(correlation(a, c)) < 4.5
    assert abs(correlation(a, later)) < 4.5
    assert abs(correlation(a, a.T)) < 4.5
    assert not torch.equal(a[:256], a[256:])  # what different threads wrote
    assert abs(correlation(a[:256], a[256:])) < 4.5


def test_neighbouring_seeds_are_independent() -> None:
    run = compiled(lambda: torch.rand(1 << 18))
    drawn = []
    for seed in range(3):
        torch.manual_seed(seed)
        drawn.append(run())
    assert abs(correlation(drawn[0], drawn[1])) < 4.5
    assert abs(correlation(drawn[1], drawn[2])) < 4.5


# --- reproducibility


def test_seed_decides_and_state_advances_alike() -> None:
    run = compiled(lambda x: (F.dropout(x, 0.5), torch.rand(7)))
    x = torch.ones(1000)
    torch.manual_seed(5)
    first, second = run(x), run(x)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    again = run(x)
    between = torch.get_rng_state()
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], second[0])
    assert all(map(torch.equal, second, run(x)))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(between, state)
    # One seed a call, however many numbers are drawn.
    torch.manual_seed(5)
    torch.empty(1, dtype=torch.int64).random_(-(2**63), None)
    assert torch.equal(between, torch.get_rng_state())


def test_compiling_leaves_the_generator_alone() -> None:
    run = compiled(lambda x: F.dropout(x, 0.5).sum())
    torch.manual_seed(5)
    run(torch.ones(10, requires_grad=True))
    cold = torch.get_rng_state()
    torch.manual_seed(5)
    run(torch.ones(10, requires_grad=True))
    assert torch.equal(cold, torch.get_rng_state())


def test_fork_rng() -> None:
    run = compiled(lambda: torch.rand(64))
    torch.manual_seed(2)
    a = run()
    torch.manual_seed(2)
    with torch.random.fork_rng():
        inside = run()
        run()
    assert torch.equal(a, inside)
    assert torch.equal(a, run())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_numbers_do_not_depend_on_threads(threads: int) -> None:
    before = torch.get_num_threads()
    expected = reference(7, 0, (300, 333))
    try:
        torch.set_num_threads(threads)
        run = compiled(lambda: torch.rand(300, 333), options={"parallel_threshold": 1})
        torch.manual_seed(7)
        assert torch.equal(run(), expected)
    finally:
        torch.set_num_threads(before)


def reference(seed: int, stream: int, size: tuple[int, ...]) -> Tensor:
    """What `torch.rand(size)` gives as the draw number `stream` of a call after `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    drawn = torch.ops.opforge.philox_seed(device=torch.device("cpu"))
    return torch.ops.opforge.philox_uniform(drawn, stream, list(size), 0.0, 1.0, dtype=torch.float32)


@pytest.mark.parametrize("target", ["auto", "scalar"])
@pytest.mark.parametrize("size", [(7,), (64, 64), (33, 31), (5, 3, 17), (1, 1), (0, 4), ()])
def test_numbers_do_not_depend_on_lanes_or_shape(target: str, size: tuple[int, ...]) -> None:
    run = compiled(lambda: torch.rand(size) + 0, options={"target": target})
    torch.manual_seed(7)
    assert torch.equal(run(), reference(7, 0, size))


def test_a_transposed_result_has_the_numbers_at_their_places() -> None:
    x = torch.empty(40, 24).T
    run = compiled(lambda x: torch.rand_like(x))
    torch.manual_seed(7)
    y = run(x)
    assert y.stride() == x.stride()
    assert torch.equal(y, reference(7, 0, (24, 40)))


# --- forward and backward


def test_backward_has_the_forwards_mask_and_keeps_only_the_seed() -> None:
    def program(x: Tensor) -> Tensor:
        return F.dropout(x, 0.25)

    x = torch.randn(100, 37, requires_grad=True)
    run = compiled(program)
    y = run(x)
    kept = y.grad_fn.saved_tensors
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.where(y == 0, 0.0, torch.tensor(1 / 0.75)))
    assert torch.equal(y != 0, grad != 0)
    assert sum(t.numel() for t in kept) == 1, "the seed, no mask"
    native()


def test_dropout_in_a_chain_keeps_no_mask() -> None:
    w = torch.randn(64, 64, requires_grad=True)

    def program(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x @ w, 0.5).relu() @ w, 0.5)

    x = torch.randn(32, 64, requires_grad=True)
    y = compiled(program)(x)
    assert not any(t.dtype == torch.bool for t in y.grad_fn.saved_tensors)
    y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_eager_checkpoint_around_compiled_code(reentrant: bool) -> None:
    run = compiled(lambda x: F.dropout(x, 0.5) * x)
    x = torch.randn(500, requires_grad=True)
    y = checkpoint(run, x, use_reentrant=reentrant)
    (grad,) = torch.autograd.grad(y.sum(), x) if not reentrant else (y.sum().backward() or x.grad,)
    assert torch.equal(y != 0, grad != 0)


def test_checkpoint_inside_compiled_code() -> None:
    def program(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5) * 2, x, use_reentrant=False)

    x = torch.rand(500, requires_grad=True) + 0.1
    x.retain_grad()
    y = compiled(program)(x)
    y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0)
    native()


def test_traced_checkpoint_gets_its_streams_again() -> None:
    # Traced without Dynamo, the region really runs twice; it puts the state of the generator back before the second time.
    def program(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5) * 2, x, use_reentrant=False) + torch.rand_like(x)

    from opforge.runtime.dispatch.trace import trace

    x = torch.rand(50, requires_grad=True)
    graph = trace(program, [x], training=True, random="philox").graph.graph
    draws = [n for n in graph.nodes if "philox_uniform" in str(n.target)]
    assert len([n for n in graph.nodes if "philox_seed" in str(n.target)]) == 1
    assert sorted(n.args[1] for n in draws) == [0, 0, 1]


def test_training_with_dropout_learns() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
    run = compiled(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(256, 16)
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.mse_loss(run(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    assert not [k for k in opforge.stats()["externs"] if not k.endswith(("mm.default", "philox_seed.default"))]


def test_evaluation_has_no_randomness() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    run = compiled(model)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    x = torch.randn(3, 4, generator=torch.Generator())
    torch.testing.assert_close(run(x), model(x))
    assert torch.equal(state, torch.get_rng_state())


# --- cases of one operator


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_dropout(p: float, dtype: torch.dtype) -> None:
    x = torch.full((64, 33), 3.0, dtype=dtype)
    with torch.no_grad():
        y = draw(lambda x: F.dropout(x, p), x)
    assert y.dtype == dtype
    if p == 1:
        assert (y == 0).all()
        return
    scaled = (x[0, 0] * (torch.ones((), dtype=dtype) / (1 - p))).item()
    assert set(y.unique().tolist()) <= {0.0, scaled}
    kept = float((y != 0).double().mean())
    assert abs(kept - (1 - p)) < 5 * math.sqrt(p * (1 - p) / y.numel()) + 1e-12


@pytest.mark.parametrize("train", [True, None, False])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_native_dropout(p: float, train: bool | None) -> None:
    x = torch.full((1000,), 2.0)
    y, mask = draw(lambda x: torch.native_dropout(x, p, train), x)
    assert mask.dtype == torch.bool
    expected = torch.native_dropout(x, p, train)
    assert y.dtype == expected[0].dtype
    if train is False or p in (0.0, 1.0):
        assert torch.equal(y, expected[0])
        assert torch.equal(mask, expected[1])
    else:
        torch.testing.assert_close(y, x * mask / (1 - p))
        assert 0.6 < float(mask.double().mean()) < 0.8


def test_rrelu() -> None:
    x = torch.randn(N, requires_grad=True)
    y = draw(lambda x: F.rrelu(x, 0.1, 0.4, training=True), x)
    native()
    ratio = (y / x).detach()[x < 0]
    assert torch.equal(y[x > 0], x[x > 0])
    assert kolmogorov((ratio - 0.1) / 0.3, lambda r: r) < 1.95 + 0.1
    y.sum().backward()
    torch.testing.assert_close(x.grad[x < 0], ratio)


def test_other_dropouts_and_modules() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        return (
            F.dropout2d(x, 0.5),
            F.alpha_dropout(x, 0.5, True),
            F.feature_alpha_dropout(x, 0.5, True),
            F.gumbel_softmax(x, 1.0),
        )

    x = torch.ones(16, 32, 5, 5, requires_grad=True)
    channels, *rest = draw(program, x)
    native()
    flat = channels.detach().flatten(2)
    assert torch.equal(flat, flat[:, :, :1].expand_as(flat))
    assert set(flat.unique().tolist()) == {0.0, 2.0}
    for r in rest:
        assert r.isfinite().all()
    (channels.sum() + sum(r.square().sum() for r in rest)).backward()
    assert x.grad.isfinite().all()


def test_writes_in_place() -> None:
    def program(x: Tensor) -> Tensor:
        x[1:3].uniform_(5, 6)
        y = torch.zeros(3, 4)
        y.T[0].normal_(100, 1)
        return y

    x = torch.zeros(4, 5)
    run = compiled(program)
    torch.manual_seed(0)
    version = x._version
    y = run(x)
    assert x._version > version
    assert (x[0] == 0).all()
    assert (x[3] == 0).all()
    assert ((x[1:3] >= 5) & (x[1:3] < 6)).all()
    assert (y[:, 0] > 90).all()
    assert (y[:, 1:] == 0).all()


def test_zero_sizes() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        return torch.rand(0, 3), F.dropout(x, 0.5), torch.randn_like(x), torch.randint(5, (2, 0))

    results = draw(program, torch.empty(0, 4))
    assert [tuple(r.shape) for r in results] == [(0, 3), (0, 4), (0, 4), (2, 0)]


def test_dynamic_shapes() -> None:
    run = compiled(lambda x: F.dropout(x, 0.5) + torch.rand(x.shape[0], 3).sum(), dynamic=True)
    for n in (4, 9, 33):
        x = torch.ones(n, 5, requires_grad=True)
        y = run(x)
        y.sum().backward()
        assert set(x.grad.unique().tolist()) <= {0.0, 2.0}
    assert opforge.stats()["graphs"] == 1


def test_dynamic_shapes_have_the_numbers_of_static_ones() -> None:
    run = compiled(lambda x: torch.rand(x.shape[0], 7) + 0 * x, dynamic=True)
    for n in (4, 9):
        torch.manual_seed(3)
        assert torch.equal(run(torch.ones(n, 7)), reference(3, 0, (n, 7)))


# --- eager's own


def test_eagers_stream_by_setting() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        return F.dropout(x, 0.5), torch.rand(5), torch.randn_like(x), torch.randint(9, (4,)), x.clone().uniform_()

    x = torch.ones(6, 7)
    run = compiled(program, options={"random": "eager"})
    torch.manual_seed(3)
    expected = program(x)
    torch.manual_seed(3)
    assert all(map(torch.equal, run(x), expected))


def permuted_input(x: Tensor) -> Tensor:
    x.permute(2, 0, 1).bernoulli_(0.5)
    return x * 2


@pytest.mark.parametrize(
    "program",
    [
        lambda x: F.dropout(x.transpose(0, 1), 0.5),
        lambda x: F.alpha_dropout(x.permute(2, 0, 1), 0.5, training=True) + 1,
        lambda x: (x * 2).transpose(1, 2)[:, ::2].bernoulli_(0.3) + 1,
        lambda x: torch.rand_like(x.transpose(0, 1)),
        lambda x: (x * 2).transpose(0, 1).uniform_() + 1,
        lambda x: (x * 2).transpose(0, 1).normal_() + 1,
        permuted_input,
    ],
)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_eagers_stream_follows_the_layout(program: Callable[[Tensor], Tensor], training: bool, dynamic: bool) -> None:
    """Eager draws in the order of memory. Dropout of a transposed tensor, as in a TransformerEncoderLayer, got the numbers of a row-major one."""
    results = []
    for run in (program, compiled(program, options={"random": "eager"}, dynamic=dynamic)):
        x = torch.linspace(-1, 1, 2 * 3 * 8).reshape(2, 3, 8)
        leaf = x.clone().requires_grad_(training)
        given = leaf * 1
        torch.manual_seed(3)
        y = run(given)
        if y.requires_grad:
            y.square().sum().backward()
        results.append((y.detach(), given.detach(), leaf.grad, torch.rand(2)))
    for eager, ours in zip(*results, strict=True):
        assert (eager is None) == (ours is None)
        if eager is not None:
            torch.testing.assert_close(ours, eager)


def test_sampling_by_search_keeps_eagers_stream() -> None:
    def program(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.multinomial(p, 3), torch.randperm(9), torch.poisson(p)

    p = torch.rand(8)
    run = compiled(program)
    torch.manual_seed(3)
    expected = program(p)
    torch.manual_seed(3)
    assert all(map(torch.equal, run(p), expected))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.bernoulli_(1.5),
        lambda x: x.uniform_(3, 1),
        lambda x: x.normal_(0, -1),
        lambda x: x.exponential_(-1.0),
        lambda x: x.geometric_(1.5),
        lambda x: x.cauchy_(0, -1.0),
        lambda x: x.log_normal_(0, -1.0),
        lambda x: torch.randint(5, 5, (3,)),
        lambda x: torch.randint(0, 300, (3,), dtype=torch.uint8),
        lambda x: torch.bernoulli(x + 2),
        lambda x: torch.normal(0.0, x - 2),
    ],
)
def test_what_eager_refuses_is_refused(program: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(4)
    with pytest.raises(RuntimeError) as eager:
        program(x)
    x = torch.ones(4)
    run = torch.compile(program, backend="opforge")
    torch._dynamo.reset()
    with pytest.raises(RuntimeError) as ours:
        run(x)
    assert type(ours.value) is type(eager.value) or isinstance(ours.value, RuntimeError)
    assert torch.equal(x, torch.ones(4))


def test_every_entry_is_drawn_here() -> None:
    """No spec entry without a program above: the overloads that the programs of this file recorded."""
    seen: set[str] = set()
    from opforge.runtime.dispatch.randomness import streams as randomness

    programs = [p for p, _ in CONTINUOUS.values()] + [p for p, _, _ in DISCRETE.values()]
    original = randomness.RANDOM

    class Watching(dict):  # type: ignore[type-arg]
        def get(self, key: str, default: Any = None) -> Any:
            if key in original:
                seen.add(key)
            return original.get(key, default)

    randomness.RANDOM = Watching()  # type: ignore[assignment]
    try:
        from opforge.runtime.dispatch.trace import trace

        for p in programs:
            trace(p, [], random="philox")
        trace(lambda x: F.rrelu(x, training=True), [torch.ones(3)], random="philox")
        trace(lambda x: torch.native_dropout(x, 0.5, True), [torch.ones(3)], random="philox")
        trace(lambda x: x.random_(), [torch.ones(3)], random="philox")
    finally:
        randomness.RANDOM = original
    # The overloads with a generator of the caller's own are only reached with None, which torch's Python API never passes on.
    missing = {k for k in RANDOM if "generator" not in k and k not in seen}
    assert not missing


def test_explicit_generator_is_eagers() -> None:
    from opforge.runtime.dispatch.trace import trace

    generator = torch.Generator().manual_seed(4)
    graph = trace(lambda x: x.bernoulli_(0.5, generator=generator), [torch.ones(3)], random="philox").graph.graph
    assert not [n for n in graph.nodes if "philox" in str(n.target)]


def test_history_tells_of_seeds() -> None:
    compiled(lambda: torch.rand(3) + torch.rand(3))()
    text = compile_fx.HISTORY[-1].wrapper
    assert text.count("philox_seed") >= 1
    assert copy.copy(opforge.stats())["externs"] == {"opforge.philox_seed.default": 1}
