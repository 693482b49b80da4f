"""Constants on the CPU in graphs for another device become numbers where kernels read them."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from opforge.runtime.graph.scalars import give_numbers

aten = torch.ops.aten


def graph_with(constant: torch.Tensor, dtype: torch.dtype, *, cast: bool = False) -> tuple[fx.GraphModule, fx.Node]:
    """x / constant, x on another device; the call."""
    mode = FakeTensorMode()
    graph = fx.Graph()
    x, c = graph.placeholder("x"), graph.get_attr("c")
    with mode:
        x.meta["val"] = torch.empty(3, 4, dtype=dtype, device="meta")
    c.meta["val"] = mode.from_tensor(constant)
    if cast:
        c = graph.call_function(aten._to_copy.default, (c,), {"dtype": torch.float32})
        with mode:
            c.meta["val"] = torch.empty((), dtype=torch.float32)
    call = graph.call_function(aten.div.Tensor, (x, c))
    with mode:
        call.meta["val"] = torch.empty(
            3, 4, dtype=torch.result_type(torch.empty(1, dtype=dtype), constant), device="meta"
        )
    graph.output((call,))
    return fx.GraphModule({"c": constant}, graph), call


def test_a_constant_is_a_number() -> None:
    for cast in (False, True):
        gm, call = graph_with(torch.tensor(30.0), torch.bfloat16, cast=cast)
        assert give_numbers(gm, "meta") == [call.name]
        assert call.args[1] == 30.0
        assert [n.op for n in gm.graph.nodes] == ["placeholder", "call_function", "output"]


def test_a_number_made_a_tensor_is_one() -> None:
    """As traces under `vmap` have it."""
    gm, call = graph_with(torch.tensor(30.0), torch.float32)
    constant = call.args[1]
    with gm.graph.inserting_before(call):
        made = gm.graph.call_function(aten._to_copy.default, (30.0,), {"dtype": torch.float32})
    made.meta["val"] = constant.meta["val"]
    call.args = (call.args[0], made)
    gm.graph.erase_node(constant)
    assert give_numbers(gm, "meta") == [call.name]
    assert call.args[1] == 30.0


def test_one_that_gives_the_result_its_dtype_stays() -> None:
    gm, call = graph_with(torch.tensor(30.0, dtype=torch.float64), torch.int64)
    assert call.meta["val"].dtype == torch.float64
    assert give_numbers(gm, "meta") == []
    assert isinstance(call.args[1], fx.Node)


def test_on_the_device_itself_nothing_changes() -> None:
    gm, _ = graph_with(torch.tensor(30.0), torch.float32)
    assert give_numbers(gm, "cpu") == []


def test_a_parameter_is_no_constant() -> None:
    gm, _ = graph_with(torch.tensor(30.0), torch.float32)
    gm.c = torch.nn.Parameter(torch.tensor(30.0))
    assert give_numbers(gm, "meta") == []
