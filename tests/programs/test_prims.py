"""Graphs of torch's primitives, as its own references make them: native, and as eager has them; views of theirs share memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, _refs, fx
from torch.fx.experimental.proxy_tensor import make_fx

import opforge
from tests.support.accuracy import assert_as_accurate
from tests.support.gpu_plan import planned
from tests.support.triton_run import job_of, launch_interpreted, results

prims = torch.ops.prims
Program = Callable[[Tensor, Tensor], Tensor]


def _shapes(x: Tensor, y: Tensor) -> Tensor:
    return _refs.cat([_refs.flip(_refs.transpose(x, 0, 1), [0]), _refs.reshape(y, [y.shape[1], y.shape[0]])], 1)


def _blocks(x: Tensor, y: Tensor) -> Tensor:
    apart = prims.split_dim(x, 0, 2)
    turned = prims.transpose(apart, [1, 0, 2])
    return prims.mul(prims.collapse(turned, 0, 1), prims.rev(y, [0, 1]))


REFERENCES: dict[str, Program] = {
    "softmax": lambda x, y: _refs.softmax(x, -1),
    "variance": lambda x, y: _refs.var(x, [0], correction=1) * _refs.rsqrt(_refs.exp(y)),
    "shapes": _shapes,
    "shifted": lambda x, y: _refs.sub(x, _refs.amax(x, [1], True)),
    "gated": lambda x, y: _refs.mul(_refs.tanh(x), _refs.sigmoid(y)),
    "chosen": lambda x, y: _refs.where(_refs.gt(x, _refs.neg(y)), _refs.maximum(x, y), _refs.sin(x)),
    "counted": lambda x, y: _refs.add(x, _refs.arange(x.shape[1], device=x.device)),
    "distance": lambda x, y: _refs.hypot(_refs.atan2(x, y), _refs.expm1(y)),
    "blocks": _blocks,
}
FAST = ("gated", "blocks", "chosen")


def _traced(f: Program, x: Tensor, y: Tensor, mode: str = "real") -> fx.GraphModule:
    """The graph of a program; it holds primitives."""
    graph = make_fx(f, tracing_mode=mode)(x, y)
    assert any(str(n.target).startswith("prims.") for n in graph.graph.nodes)
    return graph


def _check(run: Callable[..., Tensor], eagerly: Program, x: Tensor, y: Tensor) -> None:
    found, eager = run(x, y), eagerly(x, y)
    if eager.is_floating_point():
        assert_as_accurate(found, eager, eagerly(x.double(), y.double()))
    else:
        assert torch.equal(found, eager)
        assert (found.dtype, found.stride()) == (eager.dtype, eager.stride())


def _native() -> None:
    stats = opforge.stats()
    assert (stats["externs"], stats["fallbacks"]) == ({}, {})
    assert stats["graphs"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REFERENCES)
def test_references(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4, dtype=dtype), torch.randn(6, 4, dtype=dtype)
    f = _traced(REFERENCES[name], x, y)
    opforge.reset_stats()
    _check(torch.compile(f, backend="opforge", fullgraph=True), REFERENCES[name], x, y)
    _native()


@pytest.mark.parametrize("name", FAST)
def test_references_of_other_layouts(name: str) -> None:
    """Columns first, and one operand with gaps between its elements."""
    x, y = torch.randn(4, 6).t(), torch.randn(6, 8)[:, ::2]
    f = _traced(REFERENCES[name], x, y)
    opforge.reset_stats()
    _check(torch.compile(f, backend="opforge", fullgraph=True), REFERENCES[name], x, y)
    _native()


@pytest.mark.parametrize("name", FAST)
def test_references_of_no_elements(name: str) -> None:
    x, y = torch.randn(6, 0), torch.randn(6, 0)
    f = _traced(REFERENCES[name], x, y)
    opforge.reset_stats()
    _check(torch.compile(f, backend="opforge", fullgraph=True), REFERENCES[name], x, y)
    assert not opforge.stats()["externs"]


@pytest.mark.parametrize("name", ["variance", "shapes", "gated", "counted", "distance"])
def test_references_of_any_size(name: str) -> None:
    first = torch.randn(6, 4), torch.randn(6, 4)
    f = _traced(REFERENCES[name], *first, mode="symbolic")
    run = torch.compile(f, backend="opforge", fullgraph=True, dynamic=True)
    opforge.reset_stats()
    for rows, columns in ((6, 4), (8, 5), (10, 3)):
        _check(run, REFERENCES[name], torch.randn(rows, columns), torch.randn(rows, columns))
    _native()


INTEGERS: dict[str, Program] = {
    "bits": lambda x, y: prims.bitwise_xor(prims.shift_left(x, y), prims.bitwise_not(prims.bitwise_and(x, y))),
    "sums": lambda x, y: prims.sum(prims.mul(x, y), [0]),
    "extremes": lambda x, y: prims.sub(prims.amax(x, [1]), prims.amin(y, [1])),
    "divisors": lambda x, y: prims.gcd(x, prims.add(y, x)),
    "order": lambda x, y: prims.where(prims.lt(x, y), prims.sign(x), prims.floor(y)),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    x, y = torch.randint(-9, 9, (5, 7)), torch.randint(0, 9, (5, 7))
    opforge.reset_stats()
    _check(torch.compile(INTEGERS[name], backend="opforge", fullgraph=True), INTEGERS[name], x, y)
    _native()


def test_what_has_no_quotient_is_an_error_as_in_eager() -> None:
    run = torch.compile(lambda x, y: prims.div(x, y), backend="opforge", fullgraph=True)
    x = torch.tensor([7, -7, 6])
    assert torch.equal(run(x, torch.tensor([2, 2, -4])), torch.tensor([3, -3, -1]))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(x, torch.tensor([2, 0, 1]))


@pytest.mark.parametrize("name", ["sum", "var", "amax"])
def test_dimensions_twice_are_an_error_as_in_eager(name: str) -> None:
    """Torch does not look for them while it traces."""
    more = (1.0,) if name == "var" else ()
    run = torch.compile(lambda x: getattr(prims, name)(x, [0, 0], *more), backend="opforge", fullgraph=True)
    with pytest.raises((RuntimeError, IndexError), match="dim"):
        run(torch.randn(3, 4))


def test_an_extreme_of_nothing_is_an_error_as_in_eager() -> None:
    run = torch.compile(lambda x: prims.amax(x, [1]), backend="opforge", fullgraph=True)
    with pytest.raises(IndexError, match="non-zero size"):
        run(torch.randn(3, 0))


# -- views -------------------------------------------------------------------------------------------------------------
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: prims.transpose(x, [1, 0]),
    "squeeze": lambda x: prims.squeeze(x.unsqueeze(0), [0]),
    "split_dim": lambda x: prims.split_dim(x, 1, 2),
    "collapse_view": lambda x: prims.collapse_view(x, 0, 1),
    "broadcast_in_dim": lambda x: prims.broadcast_in_dim(x, [1, 3, 4], [1, 2]),
    "view_of": lambda x: prims.view_of(x),
    "conj": lambda x: prims.conj(x),
    "real": lambda x: prims.real(x),
    "imag": lambda x: prims.imag(x),
}
OF_COMPLEX = ("conj", "real", "imag")


def _base(name: str) -> Tensor:
    return torch.randn(3, 4, dtype=torch.complex64 if name in OF_COMPLEX else torch.float32)


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_view(name: str) -> None:
    """What was written to the conjugate went back into the tensor as it was, once the view was native."""
    view = VIEWS[name]

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        v = view(x)
        v.add_(1j if name == "conj" else 1)
        return v * 2, x + 1

    ours = _base(name)
    theirs = ours.clone()
    opforge.reset_stats()
    found, eager = torch.compile(program, backend="opforge", fullgraph=True)(ours), program(theirs)
    assert torch.equal(ours, theirs)
    assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
    assert not opforge.stats()["fallbacks"]
    assert not opforge.stats()["externs"] or name == "broadcast_in_dim"  # elements may be there twice


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_sees_what_is_written_later(name: str) -> None:
    view = VIEWS[name]

    def program(x: Tensor) -> Tensor:
        x = x + 1
        v = view(x)
        x.mul_(2)
        return v * 3

    x = _base(name)
    assert torch.equal(torch.compile(program, backend="opforge", fullgraph=True)(x), program(x))


@pytest.mark.parametrize("name", [n for n in VIEWS if n != "conj"])
def test_a_returned_view_is_one(name: str) -> None:
    """`real` and `imag` came back with the layout of a tensor of their own, over the parts of other elements."""
    x = _base(name)
    found, eager = torch.compile(VIEWS[name], backend="opforge", fullgraph=True)(x), VIEWS[name](x)
    assert (found.stride(), found.storage_offset()) == (eager.stride(), eager.storage_offset())
    assert found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(found, eager)


# -- the other target --------------------------------------------------------------------------------------------------
TRITON: dict[str, Program] = {
    **{name: REFERENCES[name] for name in ("softmax", "shapes", "gated", "chosen", "blocks")},
    "roots": lambda x, y: prims.add(prims.cbrt(x), prims.sqrt(prims.abs(y))),
    "products": lambda x, y: prims.prod(prims.trunc(prims.fmod(x, y)), [0]),
    "variance": lambda x, y: prims.var(prims.cat([x, y], 1), [1], 1.0),
    "numbers": lambda x, y: prims.add(x, prims.full_like(y, 2.5, dtype=y.dtype, device=y.device, requires_grad=False)),
}


def test_triton_kernels_without_a_gpu() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    plans = {name: planned(f, [x, y]) for name, f in TRITON.items()}
    for (name, plan), memory in zip(
        plans.items(), launch_interpreted([job_of(p, [x, y]) for p in plans.values()]), strict=True
    ):
        assert len(plan.kernels()) == len(plan.steps), name
        (found,) = results(plan, memory)
        assert_as_accurate(found, TRITON[name](x, y), TRITON[name](x.double(), y.double()))
