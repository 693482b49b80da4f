"""Whole programs on a CUDA device, beside eager and judged by a float64 run. `make test-gpu`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opforge
from opforge.errors import BuildError
from opforge.runtime.targets import cuda

pytestmark = pytest.mark.gpu


def compiled(f: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    opforge.reset_stats()
    return torch.compile(f, backend="opforge", options={"strict": True}, **kwargs)


def check(f: Callable[..., Tensor], *args: Tensor, **kwargs: Any) -> None:
    """As near to float64 as eager, on every element."""
    with torch.no_grad():
        got, want = compiled(f, **kwargs)(*args), f(*args)
        exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    assert (got.shape, got.dtype, got.stride(), got.device) == (want.shape, want.dtype, want.stride(), want.device)
    if want.numel():
        floor = 2 * torch.finfo(want.dtype).eps * float(exact.abs().max()) if want.is_floating_point() else 0
        assert float((got.double() - exact).abs().max()) <= max(2 * float((want.double() - exact).abs().max()), floor)
    assert opforge.stats()["fallbacks"] == {}


PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "pointwise": (lambda x, y: F.gelu(x) * y + 1, ((1000, 33), (33,))),
    "one element": (lambda x: x.exp(), ((),)),
    "no element": (lambda x: x.exp() + 1, ((0, 4),)),
    "softmax": (lambda x: x.softmax(-1), ((130, 1000),)),
    "softmax of long rows": (lambda x: x.softmax(-1), ((3, 70000),)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (768,), w, b), ((300, 768), (768,), (768,))),
    "sum of all": (lambda x: x.sum(), ((1000, 1000),)),
    "sum of columns": (lambda x: x.sum(0), ((1000, 100),)),
    "argmax": (lambda x: x.argmax(-1), ((100, 3000),)),
    "transposed": (lambda x, y: x.t() + y, ((100, 200), (200, 100))),
    "products": (lambda x, y: torch.relu(x @ y) + 1, ((64, 128), (128, 32))),
    "convolution": (lambda x, w: F.silu(F.conv2d(x, w, padding=1)), ((2, 3, 16, 16), (8, 3, 3, 3))),
    "cat": (lambda x, y: torch.cat([x * 2, y.sin()], 1), ((7, 30), (7, 50))),
    "cumulative": (lambda x: x.cumsum(-1), ((20, 500),)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), ((2, 4, 64, 32),) * 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, dtype: torch.dtype) -> None:
    f, shapes = PROGRAMS[name]
    torch.manual_seed(0)
    check(f, *(torch.randn(s, device="cuda").to(dtype) for s in shapes))


@pytest.mark.parametrize("rows", [1, 3, 16, 40, 64])
@pytest.mark.parametrize("inner", [64, 1000, 4096])
def test_products_of_a_weight_in_bytes(rows: int, inner: int) -> None:
    """Fewer rows than a block, and steps that are no whole blocks."""
    torch.manual_seed(0)
    q = torch.randint(-128, 128, (1500, inner), device="cuda", dtype=torch.int8)
    x, scale, bias = (torch.randn(s, device="cuda").bfloat16() for s in ((rows, inner), (1500, 1), (1500,)))
    check(lambda x, q, s, b: F.gelu(F.linear(x, q.to(x.dtype) * s, b)), x, q, scale / 64, bias)
    assert opforge.stats()["externs"] == {}


@pytest.mark.parametrize("rows", [(2, 600), (1, 700), (4, 1024)])
@pytest.mark.parametrize("vocabulary", [50257, 50258, 50260, 30522, 6001])
def test_logits_of_an_odd_vocabulary(rows: tuple[int, int], vocabulary: int) -> None:
    """Rows begin at 8, 4 or 2 places of a vector in turn; of few rows the elements are stored one by one."""
    torch.manual_seed(0)
    x, w = (torch.randn(s, device="cuda").bfloat16() for s in ((*rows, 768), (vocabulary, 768)))
    check(F.linear, x, w)
    assert opforge.stats()["externs"] == {}


@pytest.fixture(params=["a binary of their own", "copies"])
def odd_addresses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How kernels get at what lies there: with no binary for it they work on aligned copies."""

    def refused(*_: object) -> Any:
        raise BuildError("Triton does not compile it")

    if request.param == "copies":
        monkeypatch.setattr(cuda, "_unaligned", refused)
    return str(request.param)


@pytest.mark.parametrize("options", [{}, {"cudagraphs": True}])
def test_inputs_at_odd_addresses(odd_addresses: str, options: dict[str, bool]) -> None:
    base = torch.randn(4001, device="cuda")
    torch._dynamo.reset()
    opforge.reset_stats()
    f = torch.compile(lambda x: (x * 2).sin(), backend="opforge", options={"strict": True, **options})
    for start in (0, 1, 1, 1, 2, 3, 4):
        x = base[start : start + 1000]
        torch.testing.assert_close(f(x), (x * 2).sin())
    assert bool(opforge.stats()["retries"]) == (odd_addresses == "copies")


def test_symbolic_sizes() -> None:
    f = compiled(lambda x: x.softmax(-1) + 1, dynamic=True)
    for n in (5, 17, 130, 5000):
        x = torch.randn(n, n + 3, device="cuda")
        torch.testing.assert_close(f(x), x.softmax(-1) + 1)


def test_another_stream() -> None:
    f = compiled(lambda x: ((x @ x).relu() @ x).softmax(-1))
    x = torch.randn(256, 256, device="cuda") / 16
    want = f(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = [f(x) for _ in range(20)]
    stream.synchronize()
    assert all(torch.equal(g, want) for g in got)


def test_processor_scalars_and_tensors_in_between() -> None:
    def f(x: Tensor, s: Tensor) -> Tensor:
        return (x * s + s.cos()).relu()

    x, s = torch.randn(100, device="cuda"), torch.tensor(0.5)
    torch.testing.assert_close(compiled(f)(x, s), f(x, s))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [True, False])
def test_gradients_of_max_pools(dtype: torch.dtype, last: bool) -> None:
    """The same in every run, and without a call of an eager kernel; ties and NaNs go where eager's go."""
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (4, 16, 30, 29), device="cuda").to(dtype)
    x[0, 0, 3, 4] = float("nan")
    x = x.to(memory_format=torch.channels_last) if last else x
    pools: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.max_pool2d(x, (3, 2), (2, 3), (1, 1), (1, 2), True),
        lambda x: F.adaptive_max_pool2d(x, (7, 11)),
    ]
    for f in pools:
        grad = torch.randn_like(f(x))
        one, again, eager, wide = (x.detach().clone().requires_grad_() for _ in range(4))
        run = compiled(f)
        run(one).backward(grad)
        run(again).backward(grad)
        f(eager).backward(grad)
        exact = torch.autograd.grad(f(wide.double()), wide, grad.double())[0].double()
        assert torch.equal(one.grad, again.grad)
        error, theirs = (float((t.grad.double() - exact).abs().max()) for t in (one, eager))
        assert error <= max(2 * theirs, torch.finfo(dtype).eps * float(exact.abs().max()))
        assert opforge.stats()["externs"] == {}


def test_training() -> None:
    """Curves of both from the same start, as near to float64 as eager's."""

    def curve(dtype: torch.dtype, backend: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10)).to("cuda", dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        torch._dynamo.reset()
        step = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend=backend)
        losses = []
        for _ in range(10):
            x, y = torch.randn(32, 64).to("cuda", dtype), torch.randint(0, 10, (32,)).cuda()
            loss = step(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    exact, eager, ours = curve(torch.float64, "eager"), curve(torch.float32, "eager"), curve(torch.float32, "opforge")
    error = [max(abs(a - b) for a, b in zip(c, exact, strict=True)) for c in (eager, ours)]
    assert error[1] <= max(4 * error[0], 1e-6)


def test_found_in_the_cache(tmp_path: Any) -> None:
    x = torch.randn(100, 200, device="cuda")
    for hit in (False, True):
        with opforge.config.patch(cache_dir=str(tmp_path)):
            got = compiled(lambda x: x.softmax(-1))(x)
        torch.testing.assert_close(got, x.softmax(-1))
        assert opforge.last_artifacts().cached is hit


def test_inputs_written_in_place() -> None:
    """By kernels, whose threads share elements of rows: no copy is left, and the contents are eager's each time."""

    def f(x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        z = x * y[:, None]
        y.add_(z.sum(-1), alpha=1e-3)
        m.mul_(0.9).add_(y, alpha=0.1)
        return z

    run = compiled(f)
    x, y, m = torch.randn(300, 5000, device="cuda"), torch.randn(300, device="cuda"), torch.zeros(300, device="cuda")
    other = [t.clone() for t in (y, m)]
    with torch.no_grad():
        for _ in range(50):
            torch.testing.assert_close(run(x, y, m), f(x, *other))
            torch.testing.assert_close([y, m], other)
    assert ".copy_(" not in opforge.last_artifacts().wrapper


def trained_by_adamw(dtype: torch.dtype, shapes: list[tuple[int, ...]], backend: str, **options: Any) -> list[Tensor]:
    """Parameters after five steps of AdamW from the same start with the same gradients."""
    generator = torch.Generator().manual_seed(0)

    def rand(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to("cuda", dtype)

    parameters = [nn.Parameter(rand(s)) for s in shapes]
    optimizer = torch.optim.AdamW(parameters, 1e-2, foreach=True, capturable=True)
    torch._dynamo.reset()
    opforge.reset_stats()
    step = torch.compile(optimizer.step, backend=backend, options=options or None)
    for _ in range(5):
        for p in parameters:
            p.grad = rand(tuple(p.shape))
        step()
    return [p.detach() for p in parameters]


def test_optimizer_of_many_tensors() -> None:
    """A few launches for 150 parameters of odd sizes, written in place."""
    shapes: list[tuple[int, ...]] = [
        (33,),
        (7, 5),
        (16, 16),
        (1,),
        (2, 8, 4),
        (1000,),
        (1, 1),
        (129, 257),
        (3, 16, 1),
        (15, 1),
    ]
    shapes *= 15
    exact, eager = (trained_by_adamw(t, shapes, "eager") for t in (torch.float64, torch.float32))
    ours = trained_by_adamw(torch.float32, shapes, "opforge", strict=True)
    stats = opforge.stats()
    assert stats["fallbacks"] == {}
    assert stats["kernels"] <= 30 * stats["graphs"]  # of two for each parameter
    # The largest error of five steps of rounding in one small parameter is an accident: eager's own is above this floor in a tenth of
    # them. So parameters of one shape are judged together, and all of them by what is typical.
    for k in range(10):
        wanted_errors, errors, scale = [0.0], [0.0], 0.0
        for got, near, want in zip(ours[k::10], eager[k::10], exact[k::10], strict=True):
            wanted_errors.append(float((near.double() - want).abs().max()))
            errors.append(float((got.double() - want).abs().max()))
            scale = max(scale, float(want.abs().max()))
        assert max(errors) <= max(2 * max(wanted_errors), 2 * torch.finfo(torch.float32).eps * scale)
    mine, theirs = ([(a.double() - w).flatten() for a, w in zip(some, exact, strict=True)] for some in (ours, eager))
    typical, wanted = (float(torch.cat(e).square().mean().sqrt()) for e in (mine, theirs))
    assert typical <= 1.1 * wanted


def test_kernels_in_one_launch_give_the_same(odd_addresses: str) -> None:
    """As each does by itself; sizes of 0 and 1, members at odd addresses, and those that are written in place."""
    sizes = [5, 0, 64, 7, 4096, 1, 96, 1, 2049, 31, 100000]
    base = [torch.randn(n + 1, device="cuda") for n in sizes]

    def f(*tensors: Tensor) -> tuple[Tensor, ...]:
        for t in tensors[::2]:
            t.mul_(2).add_(1)
        return tuple((t * 3).exp() + 1 for t in tensors[1::2])

    run = compiled(f)
    for start in (0, 1):
        given = [t[start : start + n] for t, n in zip(base, sizes, strict=True)]
        ours, theirs, alone = ([t.clone() if start == 0 else _odd(t) for t in given] for _ in range(3))
        got, want = run(*ours), f(*theirs)
        torch.testing.assert_close([*got, *ours], [*want, *theirs])
        one = compiled(f)  # the same kernel for a pair of tensors
        for k in range(0, len(sizes) - 1, 2):
            (single,) = one(alone[k], alone[k + 1])
            assert torch.equal(single, got[k // 2])
            assert torch.equal(alone[k], ours[k])
        assert bool(opforge.stats()["retries"]) == (odd_addresses == "copies" and start == 1)
        run = compiled(f)


def _odd(t: Tensor) -> Tensor:
    """A copy that begins four bytes after an address that is a multiple of 16."""
    return torch.cat([t[:1], t])[1:] if t.numel() else t


FAULT = """
import torch
def f(x, i):
    return x[i] * 2
x, i = torch.randn(10, 5, device="cuda"), torch.tensor([0, 9, 10], device="cuda")
run = torch.compile(f, backend="opforge", options={"strict": True})
assert torch.equal(run(x, i[:2].repeat(2)[:3]), f(x, i[:2].repeat(2)[:3]))
try:
    run(x, i)
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error)
"""


def test_position_out_of_range() -> None:
    """As in eager code: a message of the kernel's, and an error when the device is next waited for. It ends the device's use: another process."""
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, check=False)
    assert "device-side assert triggered" in done.stdout, done.stderr
    assert "IndexError: index out of range in " in done.stderr + done.stdout


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_measured_blocks(cudagraphs: bool, tmp_path: Path) -> None:
    """Whatever is fastest: results as near to float64 as before, no random number of the program's drawn, and nothing measured twice."""

    def f(x: Tensor, y: Tensor, w: Tensor, q: Tensor) -> Tensor:
        y = F.layer_norm(F.gelu(x) * y, (512,), w)
        y = F.gelu(F.linear(y[:48], q.to(y.dtype) / 64)).mT.contiguous() * 2
        return torch.cat([y.softmax(-1), y.cumsum(-1)], 1) + x.sum(0).mean()

    def with_more(*args: Tensor) -> tuple[Tensor, Tensor]:
        return f(*args), args[2] * 3

    torch.manual_seed(0)
    tensors = [torch.randn(s, device="cuda").bfloat16() for s in ((4096, 512), (4096, 512), (512,))]
    tensors.append(torch.randint(-128, 128, (1024, 512), device="cuda", dtype=torch.int8))
    want, exact = f(*tensors), f(*(t.double() for t in tensors))
    allowed = 2 * max(float((want - exact).abs().max()), torch.finfo(want.dtype).eps * float(exact.abs().max()))
    state = torch.cuda.get_rng_state()
    options = {"strict": True, "max_autotune": True, "cudagraphs": cudagraphs, "cache_dir": str(tmp_path)}
    for program, did in ((f, "measured"), (with_more, "stored")):
        torch._dynamo.reset()
        opforge.reset_stats()
        run = torch.compile(program, backend="opforge", options=options)
        with torch.no_grad():
            results = [run(*tensors) for _ in range(4)]
        got = [r if isinstance(r, Tensor) else r[0] for r in results]
        assert all(torch.equal(g, got[0]) for g in got)
        assert float((got[0] - exact).abs().max()) <= allowed
        stats = opforge.stats()
        assert stats["tuned"].get(did, 0) >= 2, stats
        assert stats["fallbacks"] == {}
    assert cudagraphs or torch.equal(torch.cuda.get_rng_state(), state)


def test_mode_that_measures() -> None:
    torch._dynamo.reset()
    opforge.reset_stats()
    x = torch.randn(1000, 100, device="cuda")
    run = torch.compile(lambda x: x.softmax(-1).exp() + 3, backend="opforge", mode="max-autotune")
    torch.testing.assert_close(run(x), x.softmax(-1).exp() + 3)
    assert sum(opforge.stats()["tuned"].values()) == 1 or opforge.stats()["cache_hits"] == 1
    assert opforge.stats()["fallbacks"] == {}
