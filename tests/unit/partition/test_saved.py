"""What is kept in cases where it is known; tags, budgets, overwritten inputs, random values."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from opforge.errors import UnsupportedError
from opforge.runtime.partition import Partition, partition
from tests.unit.partition.joint import joint_graph
from tests.unit.partition.memory import measured_peak
from tests.unit.partition.models import MODELS, blocks
from tests.unit.partition.test_partition import assert_same, check_form, inputs_of, run

BUDGETS = [k / 10 for k in range(11)]


def cut(function: Any, *shapes: tuple[int, ...], **options: Any) -> tuple[fx.GraphModule, Partition]:
    joint, primals, outputs = joint_graph(function, [torch.randn(s, requires_grad=True) for s in shapes])
    p = partition(joint, primals, outputs, **options)
    check_form(p, primals, outputs)
    return joint, p


def own(p: Partition) -> list[str]:
    """Names of what is kept beside inputs and outputs."""
    return [n for n, (what, _) in zip(p.saved, p.origins, strict=True) if what == "saved"]


def nodes(graph: fx.GraphModule, op: Any) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.target is op]


# -- known cases -------------------------------------------------------------------------------------------------------
def test_a_chain_of_gelu_keeps_its_input() -> None:
    _, p = cut(lambda x: F.gelu(F.gelu(F.gelu(x))), (64, 64))
    assert p.saved_bytes == 0
    assert p.origins == (("primal", 0),)


def test_relu_keeps_its_output() -> None:
    _, p = cut(lambda x, w: F.relu(x @ w), (8, 8), (8, 8))
    assert p.saved_bytes == 0
    assert ("output", 0) in p.origins


def test_a_mask_is_kept_rather_than_what_it_was_made_of() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        return (torch.where(h > 0, h, h * 0.1) * 2).sum()

    _, p = cut(f, (8, 16), (16, 32))
    assert p.saved_bytes == 8 * 32  # bool


EXTREMES = {
    "amax": lambda x: x.amax(-1),
    "max": lambda x: x.max(),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf"), -1),
}


@pytest.mark.parametrize("budget", [1.0, 0.5])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_what_holds_a_maximum_is_not_summed_up_again(extreme: str, budget: float) -> None:
    """The gradient looks for elements equal to the maximum. Of values summed up again in another order none may be, and it was 0 / 0."""
    _, p = cut(lambda x: EXTREMES[extreme](F.layer_norm(x, x.shape)), (33, 17), budget=budget)
    work = [n for op in (torch.ops.aten.eq.Tensor, torch.ops.aten.eq.Scalar) for n in nodes(p.backward, op)]
    for n in work:
        work += n.all_input_nodes
    assert torch.ops.aten.native_layer_norm.default not in {n.target for n in work}
    assert p.saved_bytes <= 33 * 17 * 4 + 256


MASKS = {
    "of a maximum": lambda y: y >= y.amax(-1, keepdim=True),
    "of what is no maximum": lambda y: y != y.amax(-1, keepdim=True),
    "of the greatest": lambda y: y >= y.topk(3, -1).values[..., -1:],
    "of the smallest": lambda y: y <= y.kthvalue(4, -1, keepdim=True).values,
    "of a sorted one": lambda y: y > y.sort(-1).values[..., 2:3],
    "of a position": lambda y: y == y.gather(-1, y.argmax(-1, keepdim=True)),
    "of a row": lambda y: y < y.index_select(0, torch.tensor([2])),
}


@pytest.mark.parametrize("mask", MASKS)
def test_what_a_mask_is_made_of_is_not_summed_up_again(mask: str) -> None:
    """The threshold was kept, and what is compared with it was summed up again: the element that is the threshold may then be below it."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        y = F.layer_norm(x, x.shape)
        return torch.where(MASKS[mask](y), y, 0) * w

    _, p = cut(program, (33, 17), (33, 17))
    work = [n for n in p.backward.graph.nodes if getattr(n.meta.get("val"), "dtype", None) is torch.bool]
    for n in work:
        work += n.all_input_nodes
    assert torch.ops.aten.native_layer_norm.default not in {n.target for n in work}


def test_what_holds_a_maximum_is_computed_again_without_sums() -> None:
    _, p = cut(lambda x: (x * 2).amax(-1), (64, 64))
    assert p.saved_bytes <= 64 * 4
    assert nodes(p.backward, torch.ops.aten.mul.Tensor)


def test_a_norm_that_is_compared_with_zero_keeps_no_more() -> None:
    """The gradient of a 2-norm asks whether it is 0: no element is looked for."""
    _, p = cut(lambda x: torch.linalg.vector_norm(F.layer_norm(x, x.shape), 2, -1), (33, 17))
    assert p.saved_bytes <= 33 * 4 + 2 * 4


def test_layer_norm_keeps_mean_and_rstd() -> None:
    _, p = cut(lambda x, g, b: F.layer_norm(x, (64,), g, b), (32, 64), (64,), (64,))
    assert p.saved_bytes == 2 * 32 * 4
    assert {("primal", 0), ("primal", 1)} <= set(p.origins)


def test_layer_norm_of_a_product_keeps_it_and_two_columns() -> None:
    _, p = cut(lambda x, w, g, b: F.layer_norm(x @ w, (64,), g, b), (32, 64), (64, 64), (64,), (64,))
    assert p.saved_bytes == 32 * 64 * 4 + 2 * 32 * 4


def test_softmax_keeps_its_result() -> None:
    _, p = cut(lambda x, w, v: (x @ w).softmax(-1) @ v, (32, 64), (64, 64), (64, 8))
    assert p.saved_bytes == 32 * 64 * 4


def test_sum_keeps_nothing() -> None:
    _, p = cut(lambda x, w: (x @ w).sum(), (8, 8), (8, 8))
    assert p.saved_bytes == 0


def test_views_of_one_product_are_kept_as_the_product() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        q, k = (x @ w).view(4, 2, 2, 8).unbind(2)
        return (q.sin() * k.sin()).sum()

    _, p = cut(f, (8, 16), (16, 16))
    assert own(p) == ["mm"]


def test_a_small_part_of_a_product_is_copied() -> None:
    _, p = cut(lambda x, w, v: ((x @ w)[:1] * v).sum(), (64, 16), (16, 16), (16,))
    assert p.saved_bytes == 16 * 4
    assert own(p)[0].endswith("_kept")


def test_equal_nodes_are_kept_once() -> None:
    _, p = cut(lambda x, w: ((x.half() @ w.half()) @ w.half()).float(), (8, 8), (8, 8))
    halves = [n for n in p.forward.graph.nodes if n.name in own(p) and n.meta["val"].dtype is torch.float16]
    assert len(halves) <= 3


def test_a_value_read_far_away_is_not_computed_again() -> None:
    """Computed again, a residual stream would lie in memory from the first use of its end to the last of its beginning."""
    function, args = blocks(6)
    joint, primals, outputs = joint_graph(function, args)
    p = partition(joint, primals, outputs)
    again = [n for n in nodes(p.backward, torch.ops.aten.add.Tensor) if not n.meta.get("backward")]
    assert len(again) <= 1, "only the last sum, which nothing reads far away"


# -- random values -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", BUDGETS[::5])
def test_random_values_are_drawn_once(budget: float) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(F.dropout(x @ w, 0.5).sin() @ w, 0.5)

    joint, p = cut(f, (16, 16), (16, 16), budget=budget)
    draws = [n for n in joint.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    assert draws
    assert len([n for n in p.forward.graph.nodes if n.target is draws[0].target]) == len(draws)
    assert not [n for n in p.backward.graph.nodes if n.target is draws[0].target]


def test_random_values_of_the_forward_are_drawn_even_if_nothing_reads_them() -> None:
    def f(x: Tensor) -> Tensor:
        torch.rand_like(x)
        return x.sin()

    _joint, p = cut(f, (4,))
    assert (
        len([n for n in p.forward.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())])
        == 1
    )


# -- checkpointed regions ----------------------------------------------------------------------------------------------
def tagged(count: int) -> tuple[fx.GraphModule, int, int]:
    """Residual blocks, each of which is a checkpointed region."""

    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = x + F.gelu(x @ w) @ w
        return x.sum()

    joint, primals, outputs = joint_graph(f, [torch.randn(16, 16, requires_grad=True) for _ in range(count + 1)])
    region = 0
    for n in joint.graph.nodes:
        if n.op == "call_function" and not n.meta.get("backward") and n.target is not torch.ops.aten.sum.default:
            n.meta["region"] = region
            region += n.target is torch.ops.aten.add.Tensor
    return joint, primals, outputs


def test_regions_are_computed_again_and_their_boundaries_kept() -> None:
    joint, primals, outputs = tagged(4)
    p = partition(joint, primals, outputs)
    assert own(p) == ["add", "add_1", "add_2"]
    assert len([n for n in nodes(p.backward, torch.ops.aten.mm.default) if not n.meta.get("backward")]) == 4
    flat = [torch.randn(16, 16) for _ in range(primals)]
    tangent = [torch.randn(())]
    outs, grads = joint(*flat, *tangent)
    mine, my_grads = run(p, flat, tangent, outputs)
    assert_same(mine, outs)
    assert_same(my_grads, grads)


def test_a_region_is_computed_again_when_its_backward_begins() -> None:
    joint, primals, outputs = tagged(3)
    p = partition(joint, primals, outputs)
    side = ["b" if n.meta.get("backward") else "f" for n in nodes(p.backward, torch.ops.aten.mm.default)]
    text = "".join(side)
    assert text.startswith("f")
    assert "bf" in text, "all regions were computed again before the first gradient"


def test_a_region_that_ran_again_in_the_backward_stays_there() -> None:
    """`torch.utils.checkpoint` records the region's nodes a second time: they are not the forward's."""
    from torch.utils.checkpoint import checkpoint

    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = x + checkpoint(lambda x: F.gelu(F.layer_norm(x, (16,)) @ w) @ w, x, use_reentrant=False)
        return x.sum()

    joint, p = cut(f, (32, 16), (16, 16))
    products = nodes(joint, torch.ops.aten.mm.default)
    here = [len(nodes(g, torch.ops.aten.mm.default)) for g in (p.forward, p.backward)]
    assert here == [6, len(products) - 6]
    assert p.saved_bytes == 2 * 32 * 16 * 4


def test_random_values_in_a_region_are_kept() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (F.dropout(x @ w, 0.5).sin() @ w).sum()

    joint, primals, outputs = joint_graph(f, [torch.randn(16, 16, requires_grad=True) for _ in range(2)])
    for n in joint.graph.nodes:
        if n.op == "call_function" and not n.meta.get("backward"):
            n.meta["region"] = 1
    p = partition(joint, primals, outputs)
    check_form(p, primals, outputs)
    flat, tangents = inputs_of(joint, [torch.randn(16, 16) for _ in range(primals)])
    torch.manual_seed(3)
    outs, grads = joint(*flat, *tangents)
    torch.manual_seed(3)
    mine, my_grads = run(p, flat, tangents, outputs)
    assert_same(mine, outs)
    assert_same(my_grads, grads)


# -- budgets -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_bytes_fall_with_the_budget(name: str) -> None:
    function, args = MODELS[name]()
    joint, primals, outputs = joint_graph(function, args)
    found = [partition(joint, primals, outputs, budget=b).saved_bytes for b in BUDGETS]
    assert found == sorted(found)


@pytest.mark.parametrize("name", ["blocks", "attention", "conv_bn"])
def test_measured_peak_falls_with_the_budget(name: str) -> None:
    function, args = blocks(8, 16, rows=512) if name == "blocks" else MODELS[name]()
    joint, primals, outputs = joint_graph(function, args)
    flat, tangents = inputs_of(joint, args)
    peaks = []
    for budget in BUDGETS:
        p = partition(joint, primals, outputs, budget=budget)
        peaks.append(measured_peak(p, flat, tangents, outputs))
    assert peaks == sorted(peaks)
    if name == "blocks":
        assert peaks[0] < 0.65 * peaks[-1]


def test_the_default_policy_keeps_at_least_as_much() -> None:
    for name in MODELS:
        function, args = MODELS[name]()
        joint, primals, outputs = joint_graph(function, args)
        more = partition(joint, primals, outputs, policy="default").saved_bytes
        assert more >= partition(joint, primals, outputs).saved_bytes


# -- inputs that are overwritten -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["default", "min_cut"])
def test_an_overwritten_input_is_copied(policy: Any) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin() * x

    joint, p = cut(f, (8, 8), (8, 8), policy=policy, never_saved_raw=(0,))
    assert ("primal", 0) not in p.origins
    flat, tangents = inputs_of(joint, [torch.randn(8, 8) for _ in range(2)])
    outs, grads = joint(*flat, *tangents)
    results = list(p.forward(*flat))
    flat[0].fill_(float("nan"))
    assert_same(results[:1], outs)
    assert_same(p.backward(*results[1:], *tangents), grads)


def test_a_view_of_an_overwritten_input_is_copied() -> None:
    joint, p = cut(lambda x: x.t()[1:3].sin().sum(), (8, 8), never_saved_raw=(0,))
    flat, tangents = inputs_of(joint, [torch.randn(8, 8)])
    _outs, grads = joint(*flat, *tangents)
    results = list(p.forward(*flat))
    flat[0].fill_(float("nan"))
    assert_same(p.backward(*results[1:], *tangents), grads)


@pytest.mark.parametrize("policy", ["default", "min_cut"])
def test_an_output_that_its_caller_overwrites_is_not_kept(policy: Any) -> None:
    """What the backward reads of it is computed again where that is cheap, else copied."""
    for f in (lambda x, w: x.exp() * w, lambda x, w: (x @ w).exp()):
        joint, p = cut(f, (8, 8), (8, 8), policy=policy, lent=(0,))
        assert ("output", 0) not in p.origins
        flat, tangents = inputs_of(joint, [torch.randn(8, 8) for _ in range(2)])
        _outs, grads = joint(*flat, *tangents)
        results = list(p.forward(*flat))
        results[0].fill_(float("nan"))
        assert_same(p.backward(*results[1:], *tangents), grads)


# -- form --------------------------------------------------------------------------------------------------------------
def test_gradients_that_are_none_stay_none() -> None:
    _, p = cut(lambda x, w: x.sin(), (4,), (4,))
    end = next(n for n in reversed(p.backward.graph.nodes) if n.op == "output")
    assert end.args[0][1] is None


def test_two_runs_give_the_same_text() -> None:
    function, args = MODELS["attention"]()
    joint, primals, outputs = joint_graph(function, args)
    first, second = (partition(joint, primals, outputs, budget=0.5) for _ in range(2))
    assert first.forward.code == second.forward.code
    assert first.backward.code == second.backward.code


def test_saved_tensors_never_share_memory() -> None:
    for name in MODELS:
        function, args = MODELS[name]()
        joint, primals, outputs = joint_graph(function, args)
        for policy in ("default", "min_cut"):
            p = partition(joint, primals, outputs, policy=policy)  # type: ignore[arg-type]
            results = p.forward(*inputs_of(joint, args)[0])
            kept = [t.untyped_storage().data_ptr() for t in results[outputs : outputs + p.saved_tensors]]
            assert len(kept) == len(set(kept)), f"{name}, {policy}: {p.saved}"


def test_a_symbol_that_only_shapes_mention_is_handed_over() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x.reshape(-1) * w).sum()

    args = [torch.randn(6, 4, requires_grad=True), torch.randn(24, requires_grad=True)]
    joint, primals, outputs = joint_graph(f, args, dynamic=True)
    p = partition(joint, primals, outputs)
    check_form(p, primals, outputs)
    told = set()
    for n in p.backward.graph.nodes:
        value = n.meta.get("val")
        if n.op == "placeholder":
            parts = [*value.shape, *value.stride()] if isinstance(value, Tensor) else [value]
            told |= {s.node.expr for s in parts if isinstance(s, torch.SymInt)}
        elif isinstance(value, Tensor):
            assert all(s.node.expr.free_symbols <= told for s in value.shape if isinstance(s, torch.SymInt))


def test_wrong_arguments() -> None:
    joint, primals, outputs = joint_graph(lambda x: x.sin(), [torch.randn(4, requires_grad=True)])
    with pytest.raises(ValueError, match="policy"):
        partition(joint, primals, outputs, policy="other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget"):
        partition(joint, primals, outputs, budget=1.5)
    with pytest.raises(ValueError, match="forward outputs"):
        partition(joint, primals, outputs + 1)


def test_a_value_that_cannot_be_handed_over() -> None:
    """A list that a tagged region makes cannot be kept, and what it comes from cannot be computed twice."""
    joint, primals, outputs = joint_graph(lambda x: x.sin(), [torch.randn(4, requires_grad=True)])
    graph = joint.graph
    x = next(n for n in graph.nodes if n.op == "placeholder")
    with graph.inserting_after(x):
        pair = graph.call_function(torch.ops.aten.kthvalue.default, (x, 1))
        pair.meta["val"] = torch.kthvalue(torch.empty(4, device="meta"), 1)
    mul = next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    mul.args = (mul.args[0], pair)
    with pytest.raises(UnsupportedError, match="kthvalue"):
        partition(joint, primals, outputs)
