"""Tensor subclasses that wrap others (MISSION A9): inputs, parameters, results, gradients, writes, aliases, nested; as eager has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import opforge
from opforge.errors import MetadataError
from tests.support.subclasses import Coercing, Logged, Scaled, Two, compare

Program = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    opforge.reset_stats()


def compiled(fn: Callable[..., Any], **kw: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="opforge", fullgraph=True, options={"strict": True}, **kw)  # type: ignore[no-any-return]


def two(*shape: int, grad: bool = False) -> Two:
    return Two(torch.randn(shape), torch.randn(shape)).requires_grad_(grad)


def computed(*shape: int) -> Two:
    """A `Two` that requires grad and is no leaf."""
    return two(*shape, grad=True) * 1.5  # type: ignore[no-any-return]


def nested(*shape: int, grad: bool = False) -> Two:
    return Two(Logged(torch.randn(shape)), Logged(torch.randn(shape))).requires_grad_(grad)


def scaled(*shape: int) -> Scaled:
    return Scaled(torch.randint(-9, 9, shape, dtype=torch.int8), torch.tensor(0.5))


def two_outputs(x: Any, y: Any) -> Any:
    z = x * y
    return z, (z + 1).sin(), 3


def write(x: Any, y: Any) -> Any:
    x.mul_(2)
    return x + y


def write_and_return(x: Any, y: Any) -> Any:
    x.add_(y)
    return x


def write_a_view(x: Any, y: Any) -> Any:
    x[0].mul_(3)
    x.view(-1)[1:].add_(1)
    return x.sum() * y


PURE: dict[str, Program] = {
    "matmul": lambda x, y: (x @ y.t()).relu(),
    "outputs": two_outputs,
    "reduction": lambda x, y: (x.softmax(-1) * y).sum(),
    "input": lambda x, y: (x, y * 2, x),
    "same": lambda x, y: [lambda z: (z, z)][0](x * y),
    "view": lambda x, y: (x.view(-1), x * y),
    "views": lambda x, y: (x.t()[1:], y[0]),
    "view_of_result": lambda x, y: (x * y).t(),
    "result_and_view": lambda x, y: [lambda z: (z, z.t())][0](x * y),
    "detached": lambda x, y: (x.detach(), x * y.detach()),
    "metadata": lambda x, y: x.new_ones(x.shape) * y,
    "normalized": lambda x, y: nn.functional.layer_norm(x, (3,)) * y,
}
WRITES: dict[str, Program] = {
    "write": write,
    "write_and_return": write_and_return,
    "write_a_view": write_a_view,
    "write_twice": lambda x, y: (x.mul_(2).add_(y), x.t()),
    "copy": lambda x, y: x.copy_(y * 2),
}
INPUTS: dict[str, Callable[[], list[Any]]] = {
    "two": lambda: [two(2, 3), two(2, 3)],
    "two_and_plain": lambda: [two(2, 3), torch.randn(2, 3)],
    "plain_and_two": lambda: [torch.randn(2, 3), two(2, 3)],
    "nested": lambda: [nested(2, 3), nested(2, 3)],
    "tagged": lambda: [Two(torch.randn(2, 3), torch.randn(2, 3), "left"), two(2, 3)],
    "transposed": lambda: [two(3, 2).t(), two(2, 3)],
    "logged": lambda: [Logged(torch.randn(2, 3)), Logged(torch.randn(2, 3))],
}
FOLLOWED: dict[str, Callable[[], list[Any]]] = {
    "leaf": lambda: [two(2, 3, grad=True), two(2, 3, grad=True)],
    "one_leaf": lambda: [two(2, 3, grad=True), two(2, 3)],
    "computed": lambda: [computed(2, 3), two(2, 3)],
    "plain_leaf": lambda: [two(2, 3, grad=True), torch.randn(2, 3, requires_grad=True)],
    "only_plain": lambda: [two(2, 3), torch.randn(2, 3, requires_grad=True)],
    "nested": lambda: [nested(2, 3, grad=True), nested(2, 3, grad=True)],
    "logged": lambda: [Logged(torch.randn(2, 3)).requires_grad_(), Logged(torch.randn(2, 3))],
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", [*PURE, *WRITES])
def test_inference(name: str, inputs: str) -> None:
    program = (PURE | WRITES)[name]
    if inputs == "plain_and_two" and name in WRITES and name != "write" and name != "write_a_view":
        pytest.skip("eager cannot write a subclass into a plain tensor (A9)")
    if inputs == "transposed" and name in ("view", "write_a_view"):
        pytest.skip("eager refuses to view a transposed matrix as a vector (A9)")
    with torch.no_grad():
        compare(program, compiled(program), INPUTS[inputs])


@pytest.mark.parametrize("inputs", FOLLOWED)
@pytest.mark.parametrize("name", PURE)
def test_training(name: str, inputs: str) -> None:
    compare(PURE[name], compiled(PURE[name]), FOLLOWED[inputs])


@pytest.mark.parametrize("inputs", ["leaf", "one_leaf", "computed", "plain_leaf", "nested"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_that_autograd_follows(name: str, inputs: str) -> None:
    """Eager refuses writes to leaves that require grad, with the same type."""
    program = WRITES[name]
    run = torch.compile(program, backend="opforge")
    try:
        compare(program, program, FOLLOWED[inputs])
    except RuntimeError:
        with pytest.raises(RuntimeError):
            run(*FOLLOWED[inputs]())
        return
    compare(program, run, FOLLOWED[inputs])


class Layer(nn.Module):
    """A linear layer whose weight is a subclass, and a buffer that it counts in."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point() and not isinstance(weight, Scaled))
        self.register_buffer("calls", Two(torch.zeros(2), torch.ones(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return nn.functional.linear(x, self.weight).relu()


@pytest.mark.parametrize("weight", [lambda: two(4, 3), lambda: nested(4, 3), lambda: scaled(4, 3)])
def test_parameters(weight: Callable[[], torch.Tensor]) -> None:
    seen = []
    for wrap in (lambda m: m, compiled):
        torch.manual_seed(0)
        layer = Layer(weight())
        run = wrap(layer)
        x = torch.randn(5, 3, requires_grad=True)
        for _ in range(2):
            y = run(x)
            y.sum().backward()
        seen.append([y, x.grad, layer.weight.grad, layer.calls, layer.weight])
    from tests.support.subclasses import equal

    equal(*seen)


def test_dynamic_shapes() -> None:
    for name in ("matmul", "outputs", "views", "write"):
        torch._dynamo.reset()
        run = torch.compile(PURE.get(name, write), backend="opforge", dynamic=True, fullgraph=True)
        for rows in (2, 5, 7):
            grad = name != "write"
            compare(PURE.get(name, write), run, lambda rows=rows, grad=grad: [two(rows, 3, grad=grad), two(rows, 3)])
    assert not opforge.stats()["fallbacks"]


def test_the_same_wrapper_twice() -> None:
    def twice() -> list[Any]:
        x = two(2, 3, grad=True)
        return [x, x]

    program = PURE["matmul"]
    compare(program, compiled(program), twice)


def test_gradients_are_made_as_the_backward_expects_them() -> None:
    def program(x: Any) -> Any:
        return x.sin()

    run = compiled(program)
    x = Coercing(torch.ones(2), torch.zeros(2), "one").requires_grad_()
    run(x).backward(Coercing(torch.ones(2), torch.ones(2), "other"))
    assert x.grad.tag == "one"
    assert torch.equal(x.grad.b, torch.ones(2))
    x = Coercing(torch.ones(2), torch.zeros(2)).requires_grad_()
    run(x).backward(Coercing(torch.ones(4)[::2], torch.ones(4)[::2]))
    assert torch.equal(x.grad.b, torch.ones(2))
    with pytest.raises(
        RuntimeError, match=r"gradient of result .* is a Tensor, but its backward was compiled for a Coercing"
    ):
        run(x).backward(torch.ones(2))
    y = torch.ones(2, requires_grad=True)
    run(y).backward(Coercing(torch.ones(2), torch.ones(2)))
    torch.testing.assert_close(y.grad, torch.ones(2).cos() * 2)
    with pytest.raises(RuntimeError, match="is a Two, but its backward was compiled for a plain tensor"):
        run(y).backward(Two(torch.ones(2), torch.ones(2)))


def test_a_write_between_forward_and_backward_is_noticed() -> None:
    x = two(3, grad=True) * 1
    y = compiled(lambda x: x.sin())(x)
    x.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones_like(y))


def test_the_wrapper_is_straight_line_source() -> None:
    from opforge.runtime.compile_fx import HISTORY

    compiled(PURE["outputs"])(two(2, 3, grad=True), two(2, 3))
    assert "w0 = Two0.__tensor_unflatten__({'a': out[0], 'b': out[1]}, '', (2, 3), (3, 1))" in HISTORY[-1].function


@pytest.fixture
def mesh() -> Any:
    """A mesh of this process alone."""
    distributed = pytest.importorskip("torch.distributed", reason="torch was built without distributed (A9)")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch was built without Gloo (A9)")
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
def test_dtensor(mesh: Any, dim: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    seen = []
    for wrap in (lambda m: m, compiled):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        weight, bias = layer.weight.detach(), layer.bias.detach()
        layer.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(dim)]))
        layer.bias = nn.Parameter(distribute_tensor(bias, mesh, [Replicate()]))
        x = distribute_tensor(torch.randn(5, 4), mesh, [Replicate()])
        y = wrap(layer)(x).relu()
        torch.autograd.backward([y], [torch.ones_like(y)])
        seen.append([y, layer.weight.grad, layer.bias.grad])
    for expected, actual in zip(*seen, strict=True):
        assert type(expected) is type(actual)
        assert expected.placements == actual.placements
        torch.testing.assert_close(actual.to_local(), expected.to_local())


def test_the_gradient_of_a_sum_of_a_dtensor(mesh: Any) -> None:
    """It has strides of 0, which the backward was not traced with."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
    gradients = []
    for run in (lambda f: f, lambda f: torch.compile(f, backend="opforge")):
        x.grad = None
        run(lambda x: (x @ x).relu())(x).sum().backward()
        gradients.append(x.grad.to_local())
    torch.testing.assert_close(*gradients)


@torch.library.custom_op("test_subclasses::scaled_pair", mutates_args=())
def scaled_pair(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + 1, Two(x * 2, x * 3)]


scaled_pair.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x)])


@pytest.mark.parametrize("training", [False, True])
def test_a_result_that_is_still_under_way_is_waited_for(training: bool, mesh: Any) -> None:
    """A kernel would read the address of the wrapper, which is none."""
    import torch.distributed._functional_collectives

    wrap = torch.ops._c10d_functional._wrap_tensor_autograd.default
    results = []
    for k in range(2):
        x = torch.linspace(0, 1, 12).requires_grad_(training)
        program = lambda x: (wrap(x.sin()) * 2, wrap(x.cos()))  # noqa: E731
        y, z = (compiled(program) if k else program)(x)
        if training:
            (y.sum() + z.sum()).backward()
        results.append((y.detach() + 0, z.detach() + 0, x.grad))
    torch.testing.assert_close(results[1], results[0])


def test_a_result_that_wraps_tensors_is_refused_by_name() -> None:
    with pytest.raises(MetadataError, match=r"test_subclasses.scaled_pair.default returned a Two"):
        compiled(lambda x: scaled_pair(x)[1] * 2)(torch.ones(3))
