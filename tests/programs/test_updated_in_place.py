"""Indexed updates of an input, as a decoder makes of its cache: in the input's own memory where nobody can tell, and as eager everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opforge.runtime import compile_fx

Run = Callable[..., Any]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def cache(dtype: torch.dtype = torch.float32, positions: int = 64) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, positions, 8, dtype=dtype)


def step(dtype: torch.dtype = torch.float32, positions: int = 1) -> Tensor:
    return torch.randn(2, 3, positions, 8, dtype=dtype)


def run(program: Run, *inputs: Tensor, dynamic: bool = False) -> list[str]:
    """Checks inputs and results beside eager, and gives the lines of the graph's Python."""
    torch._dynamo.reset()
    mine, theirs = [[torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in inputs] for _ in "12"]
    before = [t.data_ptr() for t in mine]
    options = {"debug.verify": True, "strict": True}
    with torch.no_grad():
        want = program(*theirs)
        got = torch.compile(program, backend="opforge", options=options, dynamic=dynamic or None)(*mine)
    torch.testing.assert_close(got, want)
    for a, b, t in zip(mine, theirs, inputs, strict=True):
        assert torch.equal(a, b)
        assert (a.stride(), a._version > 0) == (t.stride(), b._version > 0)
    assert [t.data_ptr() for t in mine] == before
    return compile_fx.HISTORY[-1].wrapper.splitlines()


def moved(lines: list[str], large: str = "(2, 3, 64, 8)") -> list[str]:
    """Lines that copy into an input, or have memory of a cache's size."""
    return [line for line in lines if ".copy_(" in line or (large in line and "arg" not in line)]


def index_copy(c: Tensor, p: Tensor, k: Tensor) -> None:
    c.index_copy_(2, p, k)


def assigned(c: Tensor, p: Tensor, k: Tensor) -> None:
    c[:, :, p] = k


def added(c: Tensor, p: Tensor, k: Tensor) -> None:
    c.index_add_(2, p, k)


def filled(c: Tensor, p: Tensor, k: Tensor) -> None:
    c.index_fill_(2, p, 3.0)


def put_and_read(c: Tensor, p: Tensor, k: Tensor) -> Tensor:
    c[:, :, p] = k * 2 + 1
    return c.float().sum((0, 1))


def returned(c: Tensor, p: Tensor, k: Tensor) -> Tensor:
    c.index_copy_(2, p, k)
    return c


def twice(c: Tensor, p: Tensor, k: Tensor) -> Tensor:
    c.index_copy_(2, p, k)
    c[:, :, p - 1] = k.flip(1)
    c.index_copy_(2, p + 1, k * 3)
    return c.amax(-1)


def read_before(c: Tensor, p: Tensor, k: Tensor) -> Tensor:
    old = c.sum(-1)
    c.index_copy_(2, p, k)
    return old


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("program", [index_copy, assigned, filled, put_and_read, returned, read_before])
def test_nothing_is_copied(program: Run, dtype: torch.dtype) -> None:
    for positions in ([3], [5, 6, 7], [9, 2, 9]):
        inputs = (cache(dtype), torch.tensor(positions), step(dtype, len(positions)))
        lines = run(program, *inputs)
        assert not moved(lines), "\n".join(lines)


def two_caches(c: Tensor, p: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """One layer of a decoder after another: both caches are written, then read by a library call, which may raise."""
    c.index_copy_(2, p, k)
    v[:, :, p] = k.neg()
    q = F.scaled_dot_product_attention(k, c, v)
    c2 = (q @ w).relu()
    return c2 @ w


def layers(c: Tensor, p: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    for kept in (c, v):
        kept.index_copy_(2, p, k)
        k = k @ w + F.scaled_dot_product_attention(k, kept, kept)
    return k


@pytest.mark.parametrize("program", [two_caches, layers])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_decoder_copies_nothing(program: Run, dynamic: bool) -> None:
    lines = run(program, cache(), torch.tensor([3]), step(), cache() + 1, torch.eye(8) * 2, dynamic=dynamic)
    assert not [line for line in lines if ".copy_(" in line], "\n".join(lines)
    assert dynamic or not moved(lines), "\n".join(lines)


@pytest.mark.parametrize("dynamic", [False, True])
def test_several_updates_of_one_input(dynamic: bool) -> None:
    lines = run(twice, cache(), torch.tensor([3, 7]), step(positions=2), dynamic=dynamic)
    assert not [line for line in lines if ".copy_(" in line], "\n".join(lines)


@pytest.mark.parametrize("program", [index_copy, assigned, added, filled, put_and_read])
def test_other_layouts(program: Run) -> None:
    k, p = step(positions=2), torch.tensor([1, 4])
    for c in (cache().transpose(1, 2).contiguous().transpose(1, 2), cache(positions=128)[:, :, ::2], cache()[:, :, :9]):
        lines = run(program, c, p, k)
        assert not [line for line in lines if ".copy_(" in line], "\n".join(lines)


def read_after(c: Tensor, p: Tensor, k: Tensor) -> Tensor:
    old = c[:, :, :2] * 2
    c.index_copy_(2, p, k)
    return c @ old.mT


def read_while(c: Tensor, p: Tensor, k: Tensor) -> None:
    c.index_copy_(2, p, c[:, :, : p.shape[0]].flip(2) + k)


def read_there(c: Tensor, p: Tensor, k: Tensor) -> None:
    c[:, :, p] = c[:, :, p] * 0.5 + k  # a position that comes twice gets a value made of the old one, twice


def kept(c: Tensor, p: Tensor, k: Tensor) -> Tensor:
    old = c.clone()
    c.index_copy_(2, p, k)
    return old


def copied_to(c: Tensor, p: Tensor, k: Tensor, d: Tensor) -> None:
    d.copy_(c)
    c.index_copy_(2, p, k)


def swapped(c: Tensor, p: Tensor, k: Tensor, d: Tensor) -> None:
    old = c.clone()
    c.copy_(d)
    d.copy_(old)
    d.index_copy_(2, p, k)


def moving(c: Tensor, p: Tensor, k: Tensor) -> None:
    c.index_copy_(2, p, k)
    p.add_(1)


def raises_before(c: Tensor, p: Tensor, k: Tensor) -> Tensor:
    r = k @ k.mT
    c.index_copy_(2, p, k)
    return r


@pytest.mark.parametrize(
    "program", [read_after, read_while, read_there, kept, copied_to, swapped, moving, raises_before, added, returned]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_as_eager(program: Run, dynamic: bool) -> None:
    more = (cache() - 1,) if program in (copied_to, swapped) else ()
    run(program, cache(), torch.tensor([9, 2, 9]), step(positions=3), *more, dynamic=dynamic)


def test_an_input_that_another_one_is_a_view_of() -> None:
    def program(c: Tensor, d: Tensor, p: Tensor, k: Tensor) -> Tensor:
        c.index_copy_(2, p, k)
        return d * 2

    torch._dynamo.reset()
    mine, theirs = cache(), cache()
    p, k = torch.tensor([0]), step()
    compiled = torch.compile(program, backend="opforge", options={"debug.verify": True})
    with torch.no_grad():
        assert torch.equal(compiled(mine, mine[:, :, :2], p, k), program(theirs, theirs[:, :, :2], p, k))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("program", [index_copy, assigned, added, filled, put_and_read, twice])
@pytest.mark.parametrize("positions", [[64], [3, 99], [3, -65]])
def test_a_position_out_of_range_changes_nothing(program: Run, positions: list[int]) -> None:
    torch._dynamo.reset()
    c, p, k = cache(), torch.tensor(positions), step(positions=len(positions))
    before = c.clone()
    with torch.no_grad():
        with pytest.raises((IndexError, RuntimeError)) as eager:
            program(c.clone(), p, k)
        with pytest.raises(eager.type):
            torch.compile(program, backend="opforge", options={"debug.verify": True, "strict": True})(c, p, k)
    assert torch.equal(c, before)


def test_what_raises_before_the_update_changes_nothing() -> None:
    def program(c: Tensor, p: Tensor, k: Tensor, other: Tensor) -> Tensor:
        r = torch.linalg.cholesky(other)
        c.index_copy_(2, p, k)
        return r

    torch._dynamo.reset()
    c, p, k = cache(), torch.tensor([1]), step()
    before = c.clone()
    compiled = torch.compile(program, backend="opforge", options={"debug.verify": True, "strict": True})
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            compiled(c, p, k, -torch.eye(3))
        assert torch.equal(c, before)
        compiled(c, p, k, torch.eye(3))
    assert torch.equal(c[:, :, 1:2], k)


def test_layers_share_the_check_of_their_position() -> None:
    """The caches of two layers, keys and values, behind products that may raise: four updates, one check."""

    def program(c: Tensor, p: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        for _ in range(2):
            for kept in (c, v):
                kept.index_copy_(2, p, k)
            k = F.scaled_dot_product_attention(k @ w, c, v)
        return k

    lines = run(program, cache(), torch.tensor([3]), step(), cache() + 1, torch.eye(8) * 2)
    assert not moved(lines), "\n".join(lines)
    assert sum("_position" in line and "opf_fault" in line for line in lines) == 1
