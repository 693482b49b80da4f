"""What a trace leaves: functional graphs with metadata, state as it was, errors that name the line."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from opforge.errors import UnsupportedError
from opforge.generated.decompositions import CONTROL
from opforge.generated.schemas import MutationType, OutputType
from opforge.runtime.dispatch.autograd.needs_grad import wants_grad
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.dispatch.wrapper.source import bind
from tests.support.aliasing import check_graph, iota, same_effect, through_dispatch


def targets(graph: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


def test_composites_decompose_and_the_rest_stays_whole() -> None:
    def program(x, w, b):
        y = torch.nn.functional.linear(x, w, b)
        y = torch.nn.functional.layer_norm(y, (4,))
        return torch.softmax(torch.nn.functional.gelu(y), -1)

    traced = through_dispatch(program, lambda: [iota(2, 3, 4), iota(4, 4), iota(4)])
    found = [name.replace("_unsafe_view", "view") for name in targets(traced.graph)]  # which torch has taken since 2.14
    assert found == [
        "aten.view.default",
        "aten.t.default",
        "aten.addmm.default",
        "aten.view.default",
        "aten.native_layer_norm.default",
        "aten.gelu.default",
        "aten._softmax.default",
    ]


def test_attention_stays_one_operator() -> None:
    def program(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    traced = through_dispatch(program, lambda: [iota(1, 2, 4, 8) / 64 for _ in range(3)])
    assert targets(traced.graph) == ["aten._scaled_dot_product_flash_attention_for_cpu.default"]


def test_aliases_and_dead_code_leave_no_nodes_but_random_ones_stay() -> None:
    def program(x):
        x.sin()
        torch.rand(2)
        return x.detach().view(4) + 1

    traced = through_dispatch(program, lambda: [iota(4)])
    assert targets(traced.graph) == ["aten.rand.default", "aten.add.Tensor"]


def test_one_scatter_for_writes_through_one_view() -> None:
    def program(x):
        row = x[0]
        for _ in range(5):
            row.add_(1)
        return x + 0

    traced = through_dispatch(program, lambda: [iota(3, 4)])
    assert targets(traced.graph).count("aten.select_scatter.default") == 1


def test_metadata_of_a_program_with_everything() -> None:
    def program(x, y, z):
        x.add_(1)
        y.t_()
        fresh = x * 2
        return fresh[0], x, fresh, z[1:], None, x

    traced = through_dispatch(program, lambda: [iota(3, 4), iota(3, 4), iota(3, 4)])
    meta = traced.meta
    assert [i.mutation_type for i in meta.input_info] == [
        MutationType.DATA,
        MutationType.METADATA,
        MutationType.NOT_MUTATED,
    ]
    assert [o.output_type for o in meta.output_info] == [
        OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT,
        OutputType.IS_INPUT,
        OutputType.NON_ALIAS,
        OutputType.ALIAS_OF_INPUT,
        OutputType.NOT_TENSOR,
        OutputType.IS_INPUT,
    ]
    assert meta.num_mutated_inputs == 2
    assert traced.in_place_candidates == ((0, 0),)


def test_nodes_know_their_line() -> None:
    seen: list[fx.GraphModule] = []

    def backend(gm, inputs):
        seen.append(trace(gm, inputs).graph)
        return gm.forward

    def program(x):
        return torch.nn.functional.linear(x, x)  # this line

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(program, backend=backend)(iota(3, 3))
    nodes = [n for n in seen[0].graph.nodes if n.op == "call_function"]
    assert len(nodes) == 2
    for node in nodes:
        assert node.meta["source"].startswith("test_trace.py:")
        assert node.meta["source"].endswith("in program: return torch.nn.functional.linear(x, x)  # this line")
        assert "test_trace.py" in node.meta["stack_trace"]


def test_graph_modules_lift_what_they_hold() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return self.linear(x) + self.count

    torch.manual_seed(0)
    model = Model()
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_method("add_", (graph.get_attr("count"), 1))
    y = graph.call_module("linear", (x,))
    graph.output(graph.call_function(operator.add, (y, graph.get_attr("count"))))
    hand = fx.GraphModule(model, graph)
    for program in (model, hand):
        with torch.no_grad():
            traced = trace(program, [iota(2, 4)])
            check_graph(traced)
            assert sorted(name for name, _ in traced.lifted) == ["count", "linear.bias", "linear.weight"]
            run = bind(traced, traced.graph)
            before = model.count.item()
            expected = model.linear(iota(2, 4)) + before + 1
            assert torch.equal(run(iota(2, 4)), expected)
            assert model.count.item() == before + 1
            model.linear.weight.mul_(0.5)
            assert torch.equal(run(iota(2, 4)), model.linear(iota(2, 4)) + before + 2)


def test_exported_programs() -> None:
    class Model(torch.nn.Module):
        def forward(self, d, scale: int):
            return {"sum": d["a"] + d["b"][0] * scale, "view": [d["a"].t()]}

    args = ({"a": iota(2, 3), "b": (iota(2, 3),)}, 3)
    program = torch.export.export(Model(), args, strict=False).module()
    with torch.no_grad():
        traced = trace(program, args)
        run = bind(traced, traced.graph)
        same_effect(Model(), run, lambda: [{"a": iota(2, 3), "b": (iota(2, 3),)}, 3])


def test_nothing_real_is_touched_and_state_is_put_back() -> None:
    x, rng = iota(3, 4), torch.get_rng_state()

    def program(x):
        torch.set_grad_enabled(True)
        torch.autocast("cpu", torch.bfloat16).__enter__()
        x.add_(torch.rand(3, 4)).t_()
        raise ValueError("stop")

    with torch.no_grad():
        with pytest.raises(UnsupportedError, match="ValueError while tracing: stop"):
            trace(program, [x])
        assert not torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(x, iota(3, 4))
    assert x.shape == (3, 4)
    assert x._version == 0


UNSUPPORTED: dict[str, tuple[Any, Any, str]] = {
    "grows": (lambda x: x.resize_(8), lambda: [iota(4)], "changes the size of a storage"),
    "expanded": (lambda x: x.expand(3, 4).add_(1), lambda: [iota(4)], "elements share memory"),
    "object": (lambda x: (x, object()), lambda: [iota(4)], "an output is a object"),
    "data": (lambda x: x + 1 if x.sum() > 0 else x, lambda: [iota(4)], "while tracing"),
    "sparse": (lambda x: x * 2, lambda: [iota(4).to_sparse()], "only strided tensors are traced"),
    "conj": (lambda x: x * 2, lambda: [iota(4).to(torch.complex64).conj()], "call resolve_conj"),
    "shape": (lambda x: x + iota(3), lambda: [iota(4)], "while tracing"),
}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_programs_say_so(name: str) -> None:
    program, make, message = UNSUPPORTED[name]
    with torch.no_grad(), pytest.raises(UnsupportedError, match=message):
        trace(program, make())


def test_higher_order_operators_that_the_spec_does_not_know_are_left_to_eager_with_their_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(CONTROL, "cond")
    messages: list[str] = []

    def backend(gm, inputs):
        with pytest.raises(UnsupportedError) as error:
            trace(gm, inputs)
        messages.append(str(error.value))
        return gm.forward

    def program(x):
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(program, backend=backend)(iota(3)), iota(3) + 1)
    assert "the higher-order operator cond cannot be traced yet (test_trace.py:" in messages[0]


def test_wants_grad() -> None:
    plain, leaf = iota(3), iota(3).requires_grad_()
    graph = fx.symbolic_trace(lambda x: x * 2)
    assert not wants_grad(graph, [plain])
    assert wants_grad(graph, [leaf])
    assert wants_grad(torch.nn.Linear(2, 2), [plain])
    with torch.no_grad():
        assert not wants_grad(graph, [leaf])

    class Enabling(torch.nn.Module):
        def forward(self, x):
            torch.set_grad_enabled(True)
            return x * 2

    gm = fx.GraphModule(torch.nn.Module(), fx.Graph())
    x = gm.graph.placeholder("x")
    gm.graph.call_function(torch._C._set_grad_enabled, (True,))
    gm.graph.output(gm.graph.call_function(operator.mul, (x, 2)))
    with torch.no_grad():
        assert wants_grad(gm, [leaf])
        assert not wants_grad(gm, [plain])
