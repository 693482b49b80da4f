"""Positions that data brings: kept in range, reported, and only where they count. At every number of lanes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opforge.errors import IRError, UnsupportedError
from opforge.runtime.ir.guards import checks
from opforge.runtime.ir.index import sym
from opforge.runtime.ir.nodes import Buffer, Node, Output, Program, const
from opforge.runtime.ir.text import dump
from opforge.runtime.ir.verify import verify
from opforge.runtime.kernels.statements import kernel_checks
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.lower.language.builder import Builder
from opforge.runtime.lower.language.names import value_of
from opforge.runtime.lower.language.tensor import Tensor
from tests.support.ir_text import parse
from tests.support.loops import agree, plan_of, program_of, run, view

lanes_of = pytest.mark.parametrize("lanes", [1, 4, 8, 16])


def taken(b: Builder, x: Tensor, k: Tensor) -> Tensor:
    """`x[k]`, one position for each element."""
    b.begin("taken", "taken: x[k]")
    i = b.coords(k.shape)
    return b.define(k.shape, b.at(x, [b.place_of(b.at(k, i), x.shape[0])]))


def rows(b: Builder, x: Tensor, k: Tensor) -> Tensor:
    """`x[k]`, one position for each row."""
    b.begin("rows", "rows: x[k]")
    i = b.coords([k.shape[0], x.shape[1]])
    return b.define([k.shape[0], x.shape[1]], b.at(x, [b.place_of(b.at(k, i[:1]), x.shape[0]), i[1]]))


def updated(b: Builder, base: Tensor, k: Tensor, y: Tensor) -> Tensor:
    b.begin("updated", "updated: base[k] += y")
    b.raises("RuntimeError")
    r = b.rcoords(k.shape)
    return b.scatter(base, r, b.at(y, r), [b.place_of(b.at(k, r), base.shape[0])], "sum")


@lanes_of
@pytest.mark.parametrize("count", [1, 5, 16, 37])
def test_the_ends_are_in_range(lanes: int, count: int) -> None:
    k = torch.arange(count) % 11
    k[-1] = 10
    agree(run(taken, [torch.randn(11), k], lanes=lanes))
    agree(run(rows, [torch.randn(11, 6), k], lanes=lanes))
    agree(run(updated, [torch.randn(11), k, torch.randn(count)], lanes=lanes))


@lanes_of
@pytest.mark.parametrize("bad", [-1, 11, 2**40, -(2**62)])
@pytest.mark.parametrize("where", [0, 15, 36])
def test_one_position_out_of_range(lanes: int, bad: int, where: int) -> None:
    k = torch.arange(37) % 11
    k[where] = bad
    with pytest.raises(IndexError, match=r"index out of range in taken: x\[k\]"):
        run(taken, [torch.randn(11), k], lanes=lanes)
    with pytest.raises(IndexError, match="index out of range in rows"):
        run(rows, [torch.randn(11, 20), k], lanes=lanes)
    with pytest.raises(RuntimeError, match="index out of range in updated"):
        run(updated, [torch.randn(11), k, torch.randn(37)], lanes=lanes)


@lanes_of
def test_many_threads(lanes: int) -> None:
    k = torch.arange(70_000) % 11
    agree(run(taken, [torch.randn(11), k], lanes=lanes, threshold=64))
    k[-1] = 11
    with pytest.raises(IndexError):
        run(taken, [torch.randn(11), k], lanes=lanes, threshold=64)


def guarded(b: Builder, x: Tensor, k: Tensor) -> Tensor:
    """`x[k]` for the first elements only, zero after them."""
    b.begin("guarded", "guarded")
    i = b.coords(k.shape)
    value = b.at(x, [b.place_of(b.at(k, i), x.shape[0])])
    return b.define(k.shape, b.guarded(s.lt(value_of(i[0]), 20), value, 0.0), x.dtype)


@lanes_of
def test_what_is_never_used_is_no_fault(lanes: int) -> None:
    k = torch.arange(37) % 11
    k[20:] = 99
    agree(run(guarded, [torch.randn(11), k], lanes=lanes))
    k[19] = 99
    with pytest.raises(IndexError, match="guarded"):
        run(guarded, [torch.randn(11), k], lanes=lanes)


@lanes_of
def test_an_update_that_is_skipped_is_no_fault(lanes: int) -> None:
    def some(b: Builder, base: Tensor, k: Tensor, y: Tensor) -> Tensor:
        r = b.rcoords(k.shape)
        place = b.place_of(b.at(k, r), base.shape[0])
        return b.scatter(base, r, b.at(y, r), [place], "sum", s.ge(b.at(y, r), 0.0))

    k, y = torch.arange(37) % 11, torch.rand(37)
    k[5], y[5] = -100, -1.0
    agree(run(some, [torch.zeros(11), k, y], lanes=lanes))
    y[5] = 1.0
    with pytest.raises(IndexError):
        run(some, [torch.zeros(11), k, y], lanes=lanes)


def test_a_part_of_a_result_still_checks_all_of_it() -> None:
    def first(b: Builder, x: Tensor, k: Tensor) -> Tensor:
        t = taken(b, x, k)
        i = b.coords([3])
        return b.define([3], b.at(t, i))

    k = torch.tensor([0, 1, 2, 11])
    with pytest.raises(IndexError):
        run(first, [torch.randn(11), k])
    agree(run(first, [torch.randn(11), k.clamp(max=10)]))


def test_views_of_all_elements_do_not_hinder_fusion() -> None:
    def turned(b: Builder, x: Tensor, k: Tensor) -> Tensor:
        t = view(b, taken(b, x, k), [6, 2])
        i = b.coords([2, 6])
        return b.define([2, 6], b.at(t, [i[1], i[0]]))

    ran = run(turned, [torch.randn(11), torch.arange(12) % 11])
    agree(ran)
    assert len(ran.plan.kernels()) == 1


def test_the_first_operator_that_failed_is_named() -> None:
    def both(b: Builder, x: Tensor, k: Tensor) -> Tensor:
        b.begin("one", "one")
        i = b.coords(k.shape)
        first = b.at(x, [b.place_of(b.at(k, i), x.shape[0])])
        b.begin("two", "two")
        b.raises("RuntimeError")
        return b.define(k.shape, s.add(first, b.at(x, [b.place_of(s.mul(b.at(k, i), 2), x.shape[0])])))

    good = torch.arange(6)
    agree(run(both, [torch.randn(11), good]))
    with pytest.raises(RuntimeError, match="two"):
        run(both, [torch.randn(11), good + 1])
    with pytest.raises(IndexError, match="one"):
        run(both, [torch.randn(11), good + 7])


PROVED: dict[str, Any] = {
    "coordinate": lambda k, i: i,
    "remainder": lambda k, i: s.remainder(k, s.constant(11, "int64")),
    "clamp": lambda k, i: s.minimum(s.maximum(k, 0), 10),
    "constant": lambda k, i: s.constant(3, "int64"),
}


@pytest.mark.parametrize("name", PROVED)
def test_what_is_proved_costs_nothing(name: str) -> None:
    def build(b: Builder, x: Tensor, k: Tensor) -> Tensor:
        i = b.coords(k.shape)
        return b.define(k.shape, b.at(x, [b.place_of(PROVED[name](b.at(k, i), value_of(i[0])), x.shape[0])]))

    ran = run(build, [torch.randn(11), torch.randint(-50, 50, (7,))])
    agree(ran)
    assert not any(kernel_checks(k) for k in ran.plan.kernels())
    assert "opf_fault" not in ran.source


def test_positions_that_become_coordinates_lose_their_check() -> None:
    def build(b: Builder, x: Tensor) -> Tensor:
        i = b.coords([7])
        k = b.define([7], value_of(i[0] + 2))
        return taken(b, x, k)

    program = program_of(build, [torch.randn(11)])
    assert any(checks([n.body]) for n in program.items)  # type: ignore[union-attr]
    assert not any(kernel_checks(k) for k in plan_of(program).kernels())
    agree(run(build, [torch.randn(11)]))
    with pytest.raises(IndexError):
        run(build, [torch.randn(8)])


def test_without_checks_there_is_nothing() -> None:
    b = Builder({}, {}, checks=False)
    x = Tensor("x", (4,), "int64", b)
    assert b.place_of(b.at(x, b.coords([4])), 3).text == "at(x[i0], 0, 2)"


def test_no_position_of_an_empty_dimension() -> None:
    b = Builder({}, {})
    x = Tensor("x", (4,), "int64", b)
    for n in (0, sym("s0") - 2):
        with pytest.raises(UnsupportedError, match="may have no elements"):
            b.place_of(b.at(x, b.coords([4])), n)
    assert b.place_of(b.at(x, b.coords([4])), sym("s0") * 3).text


def test_text_reads_back() -> None:
    program = program_of(taken, [torch.randn(11), torch.arange(4)])
    assert 'bounded{("IndexError", "index out of range in taken: x[k]", )}' in dump(program)
    assert parse(dump(program)).items == program.items


def test_the_verifier_knows_it() -> None:
    def broken(*args: Any, attr: Any) -> Program:
        b = Builder({}, {})
        out = b.define([], Node("bounded", args, "int64", attr))
        return Program((Buffer("x", (), "int64"),), b.items, (Output(out.name),))

    three, yes = const(3, "int64"), const(True, "bool")
    verify(broken(three, three, yes, attr=("IndexError", "")))
    with pytest.raises(IRError, match="takes a position, a size"):
        verify(broken(three, yes, three, attr=("IndexError", "")))
    with pytest.raises(IRError, match="raises one of"):
        verify(broken(three, three, yes, attr=("KeyError", "")))
