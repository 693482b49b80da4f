"""Export (MISSION A11): graphs and signatures beside those of torch's own `aot_export_*`, and every restriction by its message."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.aot_autograd as peer
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import opforge
from opforge.aot import GraphSignature, aot_export_joint_simple, aot_export_module
from opforge.errors import ExportError


class Program(nn.Module):
    """A parameter `p`, a frozen parameter `frozen`, buffers `count` and `table`, and any forward."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(1.0, 4.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.ones(3))
        self.seen: list[Any] = []
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        self.steps.add_(1)
        logits = self.net(x)
        return F.cross_entropy(logits, target), logits.detach()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.out(self.embed(ids).sin())
        return F.cross_entropy(logits, ids), logits.argmax(-1)


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.constant = nn.Parameter(torch.ones(3)), torch.randn(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.p * x + self.constant).sum(), self.constant + x


def loss_of(m: Program, x: Tensor) -> tuple[Tensor]:
    return ((m.p * x).sum(),)


def nested(m: Program, batch: dict[str, Any], *, scale: Any = 1.0) -> Any:
    batch["x"].mul_(2)
    m.count.add_(1)
    return (m.p * batch["x"] * scale).sum(), [batch["pair"][0] + m.count, {"k": batch["pair"][1]}]


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "batch_norm": (BatchNorm, (torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])), {}),
    "batch_norm_eval": (lambda: BatchNorm().eval(), (torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])), {}),
    "tied": (Tied, (torch.tensor([1, 2, 4, 4]),), {}),
    "plain": (lambda: Program(loss_of), (torch.randn(3),), {}),
    "input_grad": (lambda: Program(loss_of), (torch.randn(3, requires_grad=True),), {}),
    "same_input_twice": (lambda: Program(lambda m, x, y: ((m.p * x * y).sum(),)), (torch.ones(3),) * 2, {}),
    "same_grad_input_twice": (
        lambda: Program(lambda m, x, y: ((m.p * x * y).sum(),)), (torch.ones(3, requires_grad=True),) * 2, {},
    ),
    "written_input": (lambda: Program(lambda m, x: ((m.p * x.mul_(2)).sum(), x)), (torch.randn(3),), {}),
    "written_through_views": (
        lambda: Program(lambda m, x: ((x.view(2, 3)[1].add_(m.table), (m.p * x[:3]).sum())[1],)), (torch.randn(6),), {},
    ),
    "buffer_written_and_returned": (
        lambda: Program(lambda m, x: (m.table.add_(x), (m.p * m.table).sum(), m.table.clone())[1:]), (torch.randn(3),), {},
    ),
    "outputs_that_alias": (
        lambda: Program(lambda m, x: ((m.p * x).sum(), x.view(3, 1), x, m.table, m.table[1:])), (torch.randn(3),), {},
    ),
    "loss_of_one_element": (lambda: Program(lambda m, x: ((m.p * x).sum().view(1, 1),)), (torch.randn(3),), {}),
    "frozen": (lambda: Program(lambda m, x: ((m.p * m.frozen * x).sum(),)), (torch.randn(3),), {}),
}  # fmt: skip


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = make()
    return module, copy.deepcopy(module)


def clones(args: Any) -> Any:
    memo: dict[int, Tensor] = {}

    def clone(t: Tensor) -> Tensor:
        return memo.setdefault(id(t), t.detach().clone().requires_grad_(t.requires_grad))

    return pytree.tree_map_only(Tensor, clone, args)


def held(module: nn.Module) -> list[Tensor]:
    tables = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return [t for table in tables for _, t in table]


def run(graph: fx.GraphModule, module: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    given = [t.detach().clone() for t in held(module)]
    flat = [t.detach().clone() if isinstance(t, Tensor) else t for t in pytree.tree_leaves((args, kwargs))]
    return list(graph(*given, *flat))


def names(graph: fx.GraphModule, op: str) -> list[Any]:
    if op == "placeholder":
        return [n.name for n in graph.graph.nodes if n.op == op]
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    return [getattr(o, "name", None) for o in output.args[0]]


def by_position(signature: Any, graph: fx.GraphModule) -> dict[str, Any]:
    """A signature whose names of nodes are replaced by positions: comparable between two graphs."""
    at = {n: f"in{k}" for k, n in enumerate(names(graph, "placeholder"))}
    out: dict[Any, list[str]] = {}
    for k, n in enumerate(names(graph, "output")):
        out.setdefault(n, []).append(f"out{k}")
    updates = (
        len(signature.buffers_to_mutate) + len(signature.parameters_to_mutate) + len(signature.user_inputs_to_mutate)
    )
    first, last = (lambda n: out[n][0]), (lambda n: out[n][-1])
    backward = signature.backward_signature
    return {
        "parameters": signature.parameters,
        "buffers": signature.buffers,
        "user_inputs": [at[n] for n in signature.user_inputs],
        "user_outputs": len(signature.user_outputs),
        "none": [n is None for n in signature.user_outputs],
        "updates": updates,
        "inputs_to_parameters": {at[k]: v for k, v in signature.inputs_to_parameters.items()},
        "inputs_to_buffers": {at[k]: v for k, v in signature.inputs_to_buffers.items()},
        "buffers_to_mutate": {first(k): v for k, v in signature.buffers_to_mutate.items()},
        "parameters_to_mutate": {first(k): v for k, v in signature.parameters_to_mutate.items()},
        "user_inputs_to_mutate": {first(k): at[v] for k, v in signature.user_inputs_to_mutate.items()},
        "in_spec": signature.in_spec,
        "out_spec": signature.out_spec,
        "tokens": (signature.input_tokens, signature.output_tokens),
        "gradients_to_parameters": backward and {last(k): v for k, v in backward.gradients_to_parameters.items()},
        "gradients_to_user_inputs": backward and {last(k): at[v] for k, v in backward.gradients_to_user_inputs.items()},
    }


@pytest.mark.parametrize("joint", [False, True], ids=["inference", "joint"])
@pytest.mark.parametrize("case", CASES)
def test_a_graph_and_its_signature_are_torchs(case: str, joint: bool) -> None:
    make, args, kwargs = CASES[case]
    module, other = twins(make)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    loss = 0 if joint else None
    options = {"trace_joint": joint, "output_loss_index": loss}
    given = clones((args, kwargs))
    graph, signature = aot_export_module(module, given[0], kwargs=given[1], **options)
    theirs, their_signature = peer.aot_export_module(other, *clones((args,)), **options)
    assert by_position(signature, graph) == by_position(their_signature, theirs)
    torch.testing.assert_close(given, clones((args, kwargs)), rtol=0, atol=0)
    torch.testing.assert_close(dict(module.state_dict()), state, rtol=0, atol=0)
    mine, expected = run(graph, module, args, kwargs), run(theirs, other, args, kwargs)
    torch.testing.assert_close(mine, expected, rtol=0, atol=0)
    check_beside_eager(module, graph, signature, args, kwargs, loss)
    graph.graph.lint()
    assert not any(
        n.target.is_mutable for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload) and False
    )


def check_beside_eager(
    module: nn.Module, graph: fx.GraphModule, signature: GraphSignature, args: Any, kwargs: Any, loss: int | None
) -> None:
    """Run the graph as a reader of the signature would, and the module itself."""
    module = copy.deepcopy(module)
    found = run(graph, module, args, kwargs)
    args, kwargs = clones((args, kwargs))
    flat = pytree.tree_leaves((args, kwargs))
    eager = module(*args, **kwargs) if loss is not None else torch.no_grad()(module)(*args, **kwargs)
    results, spec = pytree.tree_flatten(eager)
    assert signature.out_spec == spec
    updates = [*signature.buffers_to_mutate, *signature.parameters_to_mutate, *signature.user_inputs_to_mutate]
    user = found[len(updates) : len(updates) + len(results)]
    torch.testing.assert_close(user, [r.detach() if isinstance(r, Tensor) else r for r in results], rtol=0, atol=0)
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    tensors = dict(zip(signature.user_inputs, flat, strict=True))
    outputs = names(graph, "output")[: len(updates)]
    assert sorted(map(str, outputs)) == sorted(updates)
    for name, value in zip(outputs, found, strict=False):
        target = {**signature.buffers_to_mutate, **signature.parameters_to_mutate}.get(name)
        now = state[target] if target else tensors[signature.user_inputs_to_mutate[name]]
        torch.testing.assert_close(value, now.detach(), rtol=0, atol=0)
    if loss is None:
        return
    backward = signature.backward_signature
    assert backward is not None
    assert backward.loss_output == signature.user_outputs[loss]
    results[loss].sum().backward()
    gradients = dict(
        zip(names(graph, "output")[len(updates) + len(results) :], found[len(updates) + len(results) :], strict=True)
    )
    shared: dict[int, Tensor] = {}
    wanted = {**backward.gradients_to_parameters, **backward.gradients_to_user_inputs}
    assert list(gradients) == list(wanted)
    for name, target in wanted.items():
        t = state[target] if name in backward.gradients_to_parameters else tensors[target]
        shared[id(t)] = shared.get(id(t), torch.zeros_like(t)) + gradients[name]
    for t in (*state.values(), *flat):
        if isinstance(t, Tensor) and t.requires_grad:
            torch.testing.assert_close(shared[id(t)], t.grad)


@pytest.mark.parametrize("joint", [False, True], ids=["inference", "joint"])
def test_containers_keyword_arguments_and_numbers(joint: bool) -> None:
    """torch takes no containers of outputs in a joint export, and no numbers as inputs; here they work."""
    batch = {"x": torch.randn(3), "pair": (torch.randn(()), torch.randn(2))}
    for scale in (2.0, torch.tensor(2.0)):
        module = Program(nested)
        graph, signature = aot_export_module(
            module, (batch,), kwargs={"scale": scale}, trace_joint=joint, output_loss_index=0 if joint else None
        )
        check_beside_eager(module, graph, signature, (batch,), {"scale": scale}, 0 if joint else None)
        assert len(signature.user_inputs) == 4
    module = Program(lambda m, x: {"loss": (m.p * x).sum(), "n": 3, "none": None})
    graph, signature = aot_export_module(
        module, (torch.ones(3),), trace_joint=joint, output_loss_index=0 if joint else None
    )
    assert signature.user_outputs[1:] == [None, None]
    check_beside_eager(module, graph, signature, (torch.ones(3),), {}, 0 if joint else None)


def test_the_loss_may_stand_anywhere() -> None:
    module = Program(lambda m, x: (m.count.add_(1), (m.p.detach() * x), (m.p * x).sum())[1:])
    for index in (1, -1):
        graph, signature = aot_export_module(module, (torch.ones(3),), trace_joint=True, output_loss_index=index)
        assert signature.backward_signature.loss_output == signature.user_outputs[1]
        check_beside_eager(module, graph, signature, (torch.ones(3),), {}, 1)


def test_gradients_and_updates_that_are_equal_keep_names_of_their_own() -> None:
    """torch's signature loses one of two parameters with the same gradient."""
    module = Program(lambda m, x: ((m.p + m.frozen).sum() + x.sum(),))
    module.frozen.requires_grad_()
    graph, signature = aot_export_module(module, (torch.ones(3),), trace_joint=True, output_loss_index=0)
    assert list(signature.backward_signature.gradients_to_parameters.values()) == ["p", "frozen"]
    check_beside_eager(module, graph, signature, (torch.ones(3),), {}, 0)
    module = Program(lambda m, x: (m.table.copy_(x), m.count.copy_(x.sum() * 0), m.frozen.detach().copy_(x), x + 1)[3:])
    graph, signature = aot_export_module(module, (torch.ones(3),), trace_joint=False)
    assert list(signature.buffers_to_mutate.values()) == ["count", "table"]
    check_beside_eager(module, graph, signature, (torch.ones(3),), {}, None)


@pytest.mark.parametrize("joint", [False, True], ids=["inference", "joint"])
def test_a_buffer_may_be_assigned(joint: bool) -> None:
    """torch's `aot_export_module` loses the assignment."""

    def fn(m: Program, x: Tensor) -> Any:
        old = m.table
        m.table = m.table + x
        m.count = m.count + 1
        return (m.p * m.table).sum(), old, m.count

    module = Program(fn)
    first = module.table
    loss = 0 if joint else None
    graph, signature = aot_export_module(module, (torch.ones(3),), trace_joint=joint, output_loss_index=loss)
    assert module.table is first
    assert list(signature.buffers_to_mutate.values()) == ["count", "table"]
    check_beside_eager(module, graph, signature, (torch.ones(3),), {}, loss)


def test_an_inference_export_may_write_parameters() -> None:
    def fn(m: Program, x: Tensor) -> Any:
        with torch.no_grad():
            m.p.add_(x)
        return (m.p * x,)

    module = Program(fn)
    graph, signature = aot_export_module(module, (torch.ones(3),), trace_joint=False)
    assert list(signature.parameters_to_mutate.values()) == ["p"]
    check_beside_eager(module, graph, signature, (torch.ones(3),), {}, None)


def test_sizes_may_be_symbols() -> None:
    module, args = BatchNorm(), (torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))
    for joint in (False, True):
        loss = 0 if joint else None
        graph, signature = aot_export_module(
            module, args, trace_joint=joint, output_loss_index=loss, dynamic_shapes=True
        )
        for n in (5, 7, 12):
            more = torch.randn(n, 3), torch.randint(0, 2, (n,))
            check_beside_eager(module, graph, signature, more, {}, loss)
        fixed, _ = aot_export_module(module, args, trace_joint=joint, output_loss_index=loss)
        shapes = [
            n.meta["val"].shape[0]
            for g in (graph, fixed)
            for n in g.graph.nodes
            if n.name == names(g, "placeholder")[-1]
        ]
        assert isinstance(shapes[0], torch.SymInt)
        assert shapes[1] == 5
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(a, static_shapes=False) for a in args]
    graph, _ = aot_export_module(module, fakes, trace_joint=False)
    check_beside_eager(module, graph, _, (torch.randn(6, 3), torch.randint(0, 2, (6,))), {}, None)


def test_decompositions_hold() -> None:
    table = torch._decomp.get_decompositions([torch.ops.aten.gelu, torch.ops.aten.gelu_backward])
    module, args = BatchNorm(), (torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))
    graph, signature = aot_export_module(module, args, trace_joint=True, output_loss_index=0, decompositions=table)
    assert not [n for n in graph.graph.nodes if n.target in table]
    found = run(graph, module, args, {})
    plain, _ = aot_export_module(module, args, trace_joint=True, output_loss_index=0)
    assert [n for n in plain.graph.nodes if n.target in table]
    torch.testing.assert_close(found, run(plain, module, args, {}))
    assert set(signature.buffers_to_mutate.values()) >= {"steps", "net.1.running_mean"}


def test_random_numbers_are_eagers() -> None:
    module = Program(lambda m, x: (F.dropout(m.p * x, 0.5).sum(),))
    graph, _ = aot_export_module(module, (torch.ones(3),), trace_joint=True, output_loss_index=0)
    for seed in range(3):
        torch.manual_seed(seed)
        loss = module(torch.ones(3))[0]
        (gradient,) = torch.autograd.grad(loss, module.p)
        torch.manual_seed(seed)
        torch.testing.assert_close(run(graph, module, (torch.ones(3),), {}), [loss.detach(), gradient], rtol=0, atol=0)


def test_a_graph_module_with_constants_exports() -> None:
    module = fx.symbolic_trace(Constants())
    assert any(n.op == "get_attr" and n.target == "constant" for n in module.graph.nodes)
    graph, signature = aot_export_module(module, (torch.randn(3),), trace_joint=True, output_loss_index=0)
    assert signature.parameters == ["p"]
    check_beside_eager(module, graph, signature, (torch.randn(3),), {}, 0)


# --- restrictions

X, XG = torch.ones(3), torch.ones(3, requires_grad=True)
LINE = r"\(test_export.py:\d+ in <lambda>: .*\)"


def scalar(m: Program, x: Tensor) -> Tensor:
    return (m.p * x).sum()


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool, str]] = {
    "transposed": (lambda m, x: (x.t_() * 1, scalar(m, X))[1], (torch.ones(2, 3),), True,
                   rf"input args\[0\] gets another shape, stride or storage {LINE}; .*underscore, and use its result"),
    "transposed_inference": (lambda m, x: x.t_() * 1, (torch.ones(2, 3),), False, r"input args\[0\] gets another shape"),
    "resized": (lambda m, x: x.resize_(2) * 1, (torch.ones(3),), False, "changes the size of a storage|gets another shape"),
    "set": (lambda m, x, y: x.set_(y) * 1, (torch.ones(3), torch.ones(3)), False,
            r"input args\[0\] gets another shape, stride or storage"),
    "parameter_written": (lambda m, x: (m.p.detach().add_(1), scalar(m, x))[1], (X,), True,
                          rf"parameter 'p' requires grad and is written {LINE}; write to a clone of it"),
    "input_written": (lambda m, x: (x.clone(), x.detach().mul_(2), scalar(m, x))[2], (XG,), True,
                      rf"input args\[0\] requires grad and is written {LINE}"),
    "buffer_with_grad": (lambda m, x: (m.table.add_(m.p), scalar(m, x))[1], (X,), True,
                         rf"buffer 'table' is given a value that requires grad {LINE}; only the loss may: detach\(\)"),
    "buffer_assigned_with_grad": (lambda m, x: (setattr(m, "table", m.table + m.p), scalar(m, x))[1], (X,), True,
                                  rf"buffer 'table' is given a value that requires grad {LINE}"),
    "buffer_of_another_shape": (lambda m, x: (setattr(m, "table", m.table[:2] + 1), x + 1)[1], (X,), False,
                                r"buffer 'table' is torch.float32\[3\] and is assigned a tensor of torch.float32\[2\]"),
    "parameter_assigned": (lambda m, x: (setattr(m, "p", nn.Parameter(m.p * 2)), x + 1)[1], (X,), False,
                           "the parameter 'p' is assigned anew in the forward; change it in place"),
    "attribute": (lambda m, x: (setattr(m, "last", x * 2), x + 1)[1], (X,), False,
                  r"the attribute 'last' of the module is assigned a tensor in the forward; register it as a buffer"),
    "attribute_in_a_list": (lambda m, x: (m.seen.append({"x": x * 2}), x + 1)[1], (X,), False, "the attribute 'seen' of the module"),
    "same_tensor_written": (lambda m, x, y: x.mul_(2) + y, (X, X), False,
                            rf"input args\[0\] is written {LINE} and shares memory with input args\[1\]; pass a clone of one"),
    "vector_loss": (lambda m, x: m.p * x, (X,), True,
                    rf"output 0, the loss, has the shape \[3\] {LINE}; reduce it to a scalar with mean\(\) or sum\(\)"),
    "integer_loss": (lambda m, x: x.long().sum(), (X,), True, rf"output 0, the loss, has the dtype torch.int64 {LINE}; only floating"),
    "complex_loss": (lambda m, x: (m.p * x).to(torch.complex64).sum(), (X,), True, "the loss, has the dtype torch.complex64"),
    "number_as_loss": (lambda m, x: (3.0, m.p * x), (X,), True, "output 0, the loss, is a float; it must be a tensor of one real"),
    "loss_without_grad": (lambda m, x: x.sum(), (X,), True, rf"output 0, the loss, does not require grad {LINE}"),
    "second_output_with_grad": (lambda m, x: (scalar(m, x), m.p * 2), (X,), True,
                                rf"output 1 requires grad {LINE} and is not the loss \(output 0\); return it detached"),
    "unused_input": (lambda m, x: scalar(m, X), (XG,), True, r"input args\[0\] requires grad, but the loss does not depend on it"),
    "held_with_grad": (lambda m, x: scalar(m, XG * x), (X,), True, rf"the program holds a tensor of shape \[3\] that requires grad {LINE}"),
    "held_written": (lambda m, x: X.mul_(1) + x, (torch.ones(3),), False, rf"the program writes to a tensor of shape \[3\] that it holds {LINE}"),
    "told_to_require_grad": (lambda m, x: (x.requires_grad_() * m.p).sum(), (X,), True, r"input args\[0\] is told to require grad"),
    "strange_output": (lambda m, x: (x + 1, object()), (X,), False, "output 1 is a object; return tensors, numbers and containers"),
    "branch_on_data": (
        lambda m, x: x + 1 if (x > m.count).all() else x - 1, (X,), False,
        rf"asks for a value that only its data tells {LINE}: Eq\(u0, 1\). A graph is one for all data: .* torch.where",
    ),
    "joint_branch_on_data": (lambda m, x: scalar(m, x) if x.nonzero().shape[0] > 1 else m.p.sum(), (X,), True, rf"its data tells {LINE}: u0 > 1"),
    "number_from_data": (lambda m, x: x[: int(x.sum().item())], (X,), False, rf"only its data tells {LINE}"),
    "sparse": (lambda m, x: x.to_dense() + 1, (torch.eye(3).to_sparse(),), False, r"input args\[0\] has the layout torch.sparse_coo"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_restrictions_name_what_where_and_the_way_out(case: str) -> None:
    fn, args, joint, message = REFUSED[case]
    module = Program(fn)
    state, attributes = {k: v.clone() for k, v in module.state_dict().items()}, set(vars(module))
    versions = [t._version for t in (*held(module), X, XG)]
    with pytest.raises(ExportError, match=message):
        aot_export_module(module, args, trace_joint=joint, output_loss_index=0 if joint else None)
    # A refused export leaves everything as it was.
    torch.testing.assert_close(dict(module.state_dict()), state, rtol=0, atol=0)
    assert set(vars(module)) == attributes
    assert not module.seen
    assert versions == [t._version for t in (*held(module), X, XG)]
    assert not X.requires_grad
    assert torch.is_grad_enabled()


def test_inputs_that_overlap_may_not_be_written() -> None:
    whole = torch.ones(6)
    for joint in (False, True):
        module = Program(lambda m, x, y: ((m.p * x.mul_(2) * y).sum(),))
        with pytest.raises(ExportError, match=r"input args\[0\] is written .* and shares memory with input args\[1\]"):
            aot_export_module(
                module, (whole[:3], whole[1:4]), trace_joint=joint, output_loss_index=0 if joint else None
            )
        # Apart in one storage, or not written: fine.
        args = whole[:3], whole[3:]
        graph, signature = aot_export_module(module, args, trace_joint=joint, output_loss_index=0 if joint else None)
        check_beside_eager(module, graph, signature, args, {}, 0 if joint else None)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "trace_joint=True needs output_loss_index: the position of the loss among the outputs"),
        (2, "output_loss_index is 2, but the module returns 2 values: 0 to 1 are possible"),
        (-3, "output_loss_index is -3, but the module returns 2 values"),
    ],
)
def test_the_loss_index_must_fit(index: int | None, message: str) -> None:
    module = Program(lambda m, x: (scalar(m, x), x + 1))
    with pytest.raises(ExportError, match=message):
        aot_export_module(module, (X,), trace_joint=True, output_loss_index=index)


def test_what_is_never_supported() -> None:
    for joint in (False, True):
        with pytest.raises(ExportError, match="pre_dispatch=True is not supported: graphs are recorded below autograd"):
            aot_export_module(Program(loss_of), (X,), trace_joint=joint, output_loss_index=0, pre_dispatch=True)
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(
        ExportError, match=r"input args\[0\] is a TwoTensor, a tensor subclass; export the program of its inner tensors"
    ):
        aot_export_module(Program(loss_of), (TwoTensor(X, X),), trace_joint=False)
    with pytest.raises(ExportError, match="input 0 is a TwoTensor"):
        aot_export_joint_simple(lambda x: (x + 1,), (TwoTensor(X, X),), trace_joint=False)


def test_functionalized_random_numbers_are_refused() -> None:
    """A graph that opforge traced with its own seeds holds them."""
    from opforge.runtime.dispatch.trace import trace

    traced = trace(lambda x: (F.dropout(x, 0.5),), (torch.ones(4),), random="philox").graph
    with pytest.raises(ExportError, match=r"opforge.philox_seed.* is functionalized random state"):
        aot_export_module(traced, (torch.ones(4),), trace_joint=False)


def test_errors_of_the_program_are_its_own() -> None:
    for fn, error in (
        (lambda m, x: x @ torch.ones(5, 2), RuntimeError),
        (lambda m, x: {}[1], KeyError),
        (lambda m, x: x + "a", TypeError),
    ):
        module = Program(fn)
        with pytest.raises(error) as found:
            aot_export_module(module, (X,), trace_joint=False)
        assert not isinstance(found.value, ExportError)
        assert all(type(t) in (Tensor, nn.Parameter) for t in held(module))


# --- aot_export_joint_simple


def test_joint_simple_has_torchs_form() -> None:
    def fn(x: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return x * y.sin(), (y @ y + n).exp()

    args = torch.randn(3), torch.randn(3, requires_grad=True), torch.randn(())
    for joint in (False, True):
        mine = aot_export_joint_simple(fn, args, trace_joint=joint)
        theirs = peer.aot_export_joint_simple(fn, args, trace_joint=joint)
        given = [a.detach() for a in args]
        call = (given, [torch.randn(3), torch.randn(())]) if joint else given
        torch.testing.assert_close(mine(*call), theirs(*call), rtol=0, atol=0)
        assert len(names(mine, "placeholder")) == len(names(theirs, "placeholder"))
        assert len(names(mine, "output")) == len(names(theirs, "output"))
    forward, _ = opforge.aot.default_partition(
        aot_export_joint_simple(fn, args, trace_joint=True), None, num_fwd_outputs=2
    )
    torch.testing.assert_close(list(forward(*args))[:2], list(fn(*args)))
    # Numbers, one list, nothing that needs a gradient.
    graph = aot_export_joint_simple(lambda x: [x + 1, 3, None], (args[1],), trace_joint=True)
    assert graph([torch.ones(3)], [torch.ones(3)])[0][1:] == (3, None)
    graph = aot_export_joint_simple(lambda x: (x + 1, 2.5), (args[0],), trace_joint=True)
    assert graph(torch.ones(3))[1] == 2.5


@pytest.mark.parametrize("joint", [False, True], ids=["inference", "joint"])
@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (lambda x, y: (x.view(3, 1), y * 2), (X, XG), r"output 0 shares memory \(with input 0\); return a clone"),
        (lambda x, y: (y * 2, x), (X, XG), r"output 1 shares memory \(with input 0\)"),
        (lambda x, y: (lambda z: (z, z.view(3, 1)))(x * y), (X, XG), r"output 1 shares memory \(with another output\)"),
        (
            lambda x, y: (x.mul_(2), y * 2),
            (torch.ones(3), XG),
            rf"input 0 is changed \(data\) {LINE}; write to a clone of it",
        ),
        (lambda x, y: (x.t_() * 1, y * 2), (torch.ones(2, 3), XG), r"input 0 is changed \(metadata\)"),
        (lambda x, y: x * y, (X, XG), "the outputs are no flat tuple or list of tensors and numbers"),
        (lambda x, y: {"a": x * y}, (X, XG), "the outputs are no flat tuple or list of tensors and numbers"),
        (lambda x, y: (x * y, [x + 1]), (X, XG), "the outputs are no flat tuple or list of tensors and numbers"),
        (lambda x, y: (x[0] * y,), ([X], XG), "input 0 is a list; pass its tensors one by one"),
        (lambda x, y: (x * y if y.sum() > 0 else y,), (X, XG), rf"asks for a value that only its data tells {LINE}"),
        (lambda x, y: (x * y,), (XG, XG), "input 1 is the same tensor as input 0; pass it once"),
    ],
)
def test_joint_simple_keeps_the_calling_convention(fn: Any, args: Any, message: str, joint: bool) -> None:
    with pytest.raises(ExportError, match=message):
        aot_export_joint_simple(fn, args, trace_joint=joint)


def test_the_examples_of_the_docs_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs" / "aot.md").read_text(), re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {
        "x": torch.randn(4, 3),
        "w": torch.randn(3, 2, requires_grad=True),
        "model": nn.Linear(3, 3),
    }
    for block in blocks:
        if "target" in block:
            names |= {"x": torch.randn(5, 3), "target": torch.tensor([0, 1, 1, 0, 1]), "model": BatchNorm()}
        exec(block, names)
        names |= {"x": torch.randn(4, 3), "model": nn.Linear(3, 3)}
    assert "torch.ops.aten.cos.default" in capsys.readouterr().out
