"""Wrappers are straight-line source with only the lines that the graph needs; when it needs none there is no wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from opforge.runtime.dispatch.trace import trace
from opforge.runtime.dispatch.wrapper.source import bind, emit_wrapper
from tests.support.aliasing import iota


def source(program: Callable[..., Any], *inputs: Any) -> str:
    with torch.no_grad():
        return emit_wrapper(trace(program, list(inputs)), "compiled")


def test_pure_graphs_have_no_wrapper() -> None:
    def program(x, y):
        return x + y, x * y

    with torch.no_grad():
        traced = trace(program, [iota(3), iota(3)])
    assert emit_wrapper(traced, "compiled") == "run = compiled\n"
    assert bind(traced, traced.graph) is traced.graph


def write(x):
    x.add_(1)
    return x.sum()


def aliases(x):
    y = x * 2
    return x.t(), y[1:], y[0], x


def reshape(x):
    x.mul_(2)
    x.t_()
    return (x[1],)


def overlap(x, y):
    x.add_(1)
    return {"y": y * 2, "n": 3}


def replace(x, y):
    x.set_(y)
    return [y.view(torch.int32)]


WRAPPERS = {
    "write": (
        (write, iota(3, 4)),
        """\
def run(*args):
    x0 = args[0]
    out = compiled(*args)
    x0.copy_(out[0])
    r0 = out[1]
    return r0
""",
    ),
    "aliases": (
        (aliases, iota(3, 4)),
        """\
def run(*args):
    x0 = args[0]
    out = compiled(*args)
    r0 = as_strided(x0, (4, 3), (1, 4), x0.storage_offset())
    r1 = as_strided(out[0], (2, 4), (4, 1), out[0].storage_offset() + 4)
    r2 = as_strided(out[0], (4,), (1,), out[0].storage_offset())
    r3 = x0
    return (r0, r1, r2, r3)
""",
    ),
    "reshape": (
        (reshape, iota(3, 4)),
        """\
def run(*args):
    x0 = args[0]
    out = compiled(*args)
    x0.copy_(out[0])
    f0 = x0.storage_offset()
    x0.grad_fn; x0.as_strided_((4, 3), (1, 4), x0.storage_offset())
    r0 = as_strided(x0, (3,), (4,), f0 + 1)
    return (r0,)
""",
    ),
    "overlap": (
        (overlap, (base := iota(12))[:8], base[4:]),
        """\
def run(*args):
    x0 = args[0]
    x1 = args[1]
    p0 = x0.data_ptr()
    p1 = x1.data_ptr()
    if p1 - p0 != 16:
        return program(*args)
    base0 = as_strided(x0, (12,), (1,), x0.storage_offset())
    out = compiled(base0)
    base0.data.copy_(out[0])
    increment_shared_version((x0, x1))
    r0 = out[1]
    r1 = 3
    return {'y': r0, 'n': r1}
""",
    ),
    "replace": (
        (replace, iota(3), iota(4)),
        """\
def run(*args):
    x0 = args[0]
    x1 = args[1]
    compiled(*args)
    r0 = reinterpreted(x1, torch.int32, (4,), (1,), x1.storage_offset(), 0)
    r0 = r0.detach()
    r1 = as_strided(x1, (4,), (1,), x1.storage_offset())
    x0.set_(r1)
    return [r0]
""",
    ),
}


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_source(name: str) -> None:
    (program, *inputs), expected = WRAPPERS[name]
    assert source(program, *inputs) == expected


def test_outputs_written_by_the_graph_are_not_copied() -> None:
    with torch.no_grad():
        traced = trace(write, [iota(3, 4)])
    text = emit_wrapper(traced, "compiled", in_graph=(0,))
    assert "x0.copy_" not in text
    assert "    increment_version(x0)\n" in text
