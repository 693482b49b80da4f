"""The functional graph in its wrapper, under Dynamo and no_grad: dynamic shapes, sizes from data, modules, autocast."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import opforge
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.dispatch.wrapper.source import bind
from opforge.runtime.torch_compat import minor_version
from tests.support.aliasing import iota, same_effect
from tests.support.matrix import symbolic


def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    traced = trace(gm, inputs)
    return bind(traced, traced.graph)


DYNAMIC = {
    "reduce": lambda x: (x + 1).relu().sum(0),
    "reshape": lambda x: x.view(-1)[1:].reshape(1, -1) + x.shape[0],
    "outputs": lambda x: (x.t(), x[1:], x.shape[1] * 2, (x * 2)[:1]),
    "shared": lambda x: (lambda y: (y[:1], y[1:]))(x * 2),
    "factories": lambda x: (x.new_empty(x.shape[0] // 2).fill_(1.0), torch.arange(x.shape[0])),
    "resample": lambda x: torch.nn.functional.interpolate(x[None, None], scale_factor=2.0),
    "matmul": lambda x: x @ x.t() / x.shape[1] ** 0.5,
}


@pytest.mark.parametrize("name", sorted(DYNAMIC))
def test_dynamic_shapes(name: str) -> None:
    program = DYNAMIC[name]
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for shape in ((3, 4), (5, 6), (8, 2)):
            same_effect(program, compiled, lambda shape=shape: [iota(*shape)])


def test_dynamic_shapes_with_writes() -> None:
    def program(x, n: int):
        x[1:].add_(n)
        return x.view(-1)[::2], x.repeat(n, 1)

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for shape, n in (((3, 4), 2), ((5, 6), 3)):
            same_effect(program, compiled, lambda shape=shape, n=n: [iota(*shape), n])


def test_sizes_that_depend_on_data() -> None:
    def program(x):
        n = int(x[0, 1].item())
        torch._check(n >= 0)
        torch._check(n <= 3)
        y = x * 2
        return x.nonzero(), x[x > 2] * 2, y.narrow(0, 0, n), y, x.sum().item()

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend, dynamic=True, fullgraph=True)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True),
        torch.no_grad(),
    ):
        for shape in ((3, 4), (5, 6)):
            same_effect(program, compiled, lambda shape=shape: [iota(*shape)])


def test_modules_in_training_mode_under_no_grad() -> None:
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.Dropout(0.5))
    expected, actual = torch.nn.Sequential(*layers), torch.nn.Sequential(*copy.deepcopy(layers))
    torch._dynamo.reset()
    compiled = torch.compile(actual, backend=backend)
    with torch.no_grad():
        for step in range(3):
            x = torch.randn(2, 1, 8, 8)
            torch.manual_seed(step)
            wanted = expected(x)
            torch.manual_seed(step)
            assert torch.equal(compiled(x), wanted)
    for a, b in zip(expected.buffers(), actual.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_in_the_graph_and_not_applied_twice(inside: bool) -> None:
    def program(x):
        if inside:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x + 1
        return x @ x + 1

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        same_effect(program, compiled, lambda: [iota(4, 4)])


@pytest.mark.skipif(
    minor_version() not in ("2.11", "2.12", "2.13"), reason="C10: gradient takes symbolic sizes since torch 2.14"
)
def test_a_kernel_that_reads_symbolic_sizes_as_numbers_is_named_by_its_line() -> None:
    """`operator aten::stride does not exist` was said."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.gradient(x)[0] * 2

    def keep(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        captured.append(gm)
        return gm

    opforge.reset_stats()
    torch._dynamo.reset()
    captured: list[torch.fx.GraphModule] = []
    x = torch.randn(4, 5)
    torch.compile(program, backend=keep, dynamic=False)(x)
    # With `dynamic=True` Dynamo's own run finds the sizes out.
    (found,) = opforge.compile_fx(captured[0], symbolic([x])[0])(x)
    torch.testing.assert_close(found, program(x))
    (reason,) = opforge.stats()["fallbacks"]
    assert "a kernel of torch reads symbolic sizes as plain numbers (test_through_dynamo.py:" in reason


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("lasting", [False, True])
def test_default_device(lasting: bool, dynamic: bool) -> None:
    """Dynamo's graphs of torch 2.11 do not say on which device their new tensors are (aot_eager makes them on the processor)."""
    made: list[str] = []

    def seen(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        traced = trace(gm, inputs).graph.graph
        made.extend(n.meta["val"].device.type for n in traced.nodes if "arange" in str(n.target))
        return gm

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[0], dtype=torch.float32) / 2

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=seen, dynamic=dynamic, fullgraph=True)
    x = torch.ones(5)
    try:
        if lasting:
            torch.set_default_device("meta")
        with contextlib.nullcontext() if lasting else torch.device("meta"):
            assert compiled(x).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert compiled(x).device.type == "cpu"
    assert made == ["meta", "cpu"]
