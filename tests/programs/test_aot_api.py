"""`aot_function` and its family (MISSION A, entry points): user compilers, partition functions and decompositions around our dispatch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import functorch.compile as peer
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import opforge
from opforge.aot import (
    aot_autograd,
    aot_function,
    aot_module,
    aot_module_simplified,
    default_partition,
    make_boxed_compiler,
    make_boxed_func,
    min_cut_rematerialization_partition,
    nop,
    print_compile,
)
from opforge.errors import OpforgeWarning, UnsupportedError

PARTITIONS = {
    "default": default_partition,
    "min_cut": min_cut_rematerialization_partition,
    "torch_default": peer.default_partition,
    "torch_min_cut": peer.min_cut_rematerialization_partition,
}


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    opforge.reset_stats()
    yield
    if "eager" not in request.node.name:
        assert not opforge.stats()["fallbacks"], "nothing here should run eagerly"


class Watched:
    """A compiler that keeps what it was given."""

    def __init__(self, boxed: bool = False) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.inputs: list[Sequence[Any]] = []
        self.boxed = boxed

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.inputs.append(inputs)
        return make_boxed_func(gm) if self.boxed else gm

    def operators(self, k: int = -1) -> list[str]:
        return [str(n.target) for n in self.graphs[k].graph.nodes if n.op == "call_function"]


def same(a: Any, b: Any) -> None:
    """Equal to the bit: the graphs run the eager kernels."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def leaves(*values: Tensor) -> list[Tensor]:
    return [v.detach().clone().requires_grad_(v.requires_grad) for v in values]


def check(fn: Callable[..., Any], *args: Tensor, compile: Callable[..., Any] = aot_function, **options: Any) -> Any:
    """Results, written inputs and gradients of `fn` compiled and by eager."""
    options.setdefault("fw_compiler", nop)
    given, mine = leaves(*args), leaves(*args)
    expected, found = fn(*[g * 1 if g.requires_grad else g for g in given]), None
    compiled = compile(fn, **options)
    found = compiled(*[m * 1 if m.requires_grad else m for m in mine])
    same(found, expected)
    for e, f in ((expected, found), (given, mine)):
        same(f, e)
    tensors = [
        [t for t in torch.utils._pytree.tree_leaves(r) if isinstance(t, Tensor) and t.requires_grad]
        for r in (expected, found)
    ]
    assert len(tensors[0]) == len(tensors[1])
    for group, result in zip((given, mine), tensors, strict=True):
        if result:
            sum((t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum() for t in result).backward()
        del group
    same([m.grad for m in mine], [g.grad for g in given])
    return compiled


# --- aot_function


def written_and_aliased(x: Tensor, y: Tensor) -> Any:
    x.mul_(2)
    return {"a": x * y, "b": (y.sin(), x.view(-1), x.detach(), 3, None)}


@pytest.mark.parametrize("partition", PARTITIONS)
def test_partition_functions_of_both_kinds(partition: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.transpose(-1, -2) / 4).softmax(-1)
        return F.layer_norm(weights @ v, (8,)).relu()

    part = PARTITIONS[partition]
    q = torch.randn(2, 5, 8, requires_grad=True)
    check(attention, q, q.detach().clone().requires_grad_(), torch.randn(2, 5, 8), partition_fn=part)
    check(written_and_aliased, torch.randn(2, 3), torch.randn(2, 3, requires_grad=True), partition_fn=part)
    check(lambda x, y: (x[:, :2] * y).sin() @ y.t(), torch.randn(4, 4), torch.randn(4, 2, requires_grad=True).detach(),
          partition_fn=part)  # fmt: skip
    check(lambda x: x.sum(0).expand(3, 4).exp(), torch.randn(5, 4, requires_grad=True), partition_fn=part)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_an_input_overwritten_after_the_forward_is_not_kept_as_it_is(partition: str) -> None:
    """The backward for `y` needs the old `x`."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        old = x.clone()
        x.add_(1)
        return old.view(-1)[:4] * y

    check(fn, torch.randn(2, 2), torch.randn(4, requires_grad=True), partition_fn=PARTITIONS[partition])


def test_the_joint_module_has_torchs_form() -> None:
    seen = {}

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any) -> Any:
        seen["names"] = [n.name for n in joint.graph.nodes if n.op == "placeholder"]
        seen["inputs"] = inputs
        seen["outputs"] = num_fwd_outputs
        # It runs on real tensors, and gives what autograd gives.
        x, y, t = torch.randn(3), torch.randn(3), torch.randn(3)
        (out,), (none, grad) = joint([x, y], [t])
        assert none is None
        same(out, x * y.sin())
        torch.testing.assert_close(grad, t * x * y.cos())
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)

    aot_function(lambda x, y: x * y.sin(), nop, partition_fn=partition)(
        torch.ones(3), torch.ones(3, requires_grad=True)
    )
    assert seen["names"] == ["primals_1", "primals_2", "tangents_1"]
    assert [len(part) for part in seen["inputs"]] == [2, 1]
    assert seen["outputs"] == 1
    assert not any(t.requires_grad for part in seen["inputs"] for t in part)


@pytest.mark.parametrize(
    ("partition", "error", "message"),
    [
        (
            lambda *a, **k: None,
            TypeError,
            "partition_fn returned a NoneType; a forward and a backward graph are expected",
        ),
        (lambda *a, **k: (1, 2), TypeError, "partition_fn returned a int where a torch.fx.GraphModule is expected"),
        (lambda j, i, **k: (j, j), ValueError, "partition_fn: the number of inputs of the forward is 3, it must be 2"),
        (
            lambda j, i, **k: (default_partition(j, i, **k)[0], j),
            ValueError,
            "inputs of the backward is 3, it must be 2",
        ),
    ],
)
def test_a_wrong_partition_is_an_error(partition: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        aot_function(lambda x, y: x * y, nop, partition_fn=partition)(torch.ones(2), torch.ones(2, requires_grad=True))


def _tensors_first(joint: fx.GraphModule, inputs: Any, **others: Any) -> Any:
    """A backward that takes what is saved in the order in which the forward returns it."""
    forward, backward = default_partition(joint, inputs, **others)
    taken = [n for n in backward.graph.nodes if n.op == "placeholder"]
    sizes = [n for n in taken if not isinstance(n.meta["val"], Tensor)]
    assert sizes
    for n in sizes:
        taken[-1].prepend(n)
    backward.recompile()
    return forward, backward


def test_a_backward_that_takes_its_inputs_in_another_order_is_an_error() -> None:
    compiled = aot_function(lambda x, w: x.sum((0, 1)) * w.exp().sum(), nop, partition_fn=_tensors_first, dynamic=True)
    with pytest.raises(ValueError, match=r"of the backward is a torch.float32 tensor .* where it is given a number"):
        compiled(torch.rand(4, 5, 3, requires_grad=True), torch.rand(6, 3, requires_grad=True))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_saved_input_whose_data_is_replaced_is_laid_out_as_compiled(partition: str, dynamic: bool) -> None:
    """A compiler may count on the strides of its fake inputs."""
    given = []

    def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            given.append([a.stride() for a in args if isinstance(a, Tensor)])
            return gm(*args)

        return run

    compiled = aot_function(
        lambda x, w: x.sin() * w, nop, compiler, partition_fn=PARTITIONS[partition], dynamic=dynamic
    )
    x, w = (torch.rand(3, 3, requires_grad=True) for _ in range(2))
    y = compiled(x, w)
    x.data = x.detach().t().contiguous().t()
    y.sum().backward()
    assert all(stride == (3, 1) for stride in given[-1][:-1])
    same([x.grad, w.grad], list(torch.autograd.grad((x.sin() * w).sum(), (x, w))))
    y = compiled(x, w)
    x.data = torch.rand(4, 3)
    with pytest.raises(RuntimeError, match="before the backward its data was replaced"):
        y.sum().backward()


def test_compilers_get_fake_inputs_and_may_box() -> None:
    for boxed in (False, True):
        forward, backward, inference = (Watched(boxed) for _ in range(3))
        check(lambda x, y: x.exp() * y, torch.randn(3), torch.randn(3, requires_grad=True),
              fw_compiler=forward, bw_compiler=backward, inference_compiler=inference)  # fmt: skip
        assert (len(forward.graphs), len(backward.graphs), len(inference.graphs)) == (1, 1, 0)
        for inputs in (*forward.inputs, *backward.inputs):
            assert all(hasattr(t, "fake_mode") and not t.requires_grad for t in inputs)
        check(lambda x, y: x.exp() * y, torch.randn(3), torch.randn(3),
              fw_compiler=forward, bw_compiler=backward, inference_compiler=inference)  # fmt: skip
        assert (len(forward.graphs), len(backward.graphs), len(inference.graphs)) == (1, 1, 1)


def test_backward_and_inference_fall_to_the_forward_compiler() -> None:
    one = Watched()
    fn = aot_function(lambda x: x.sin(), one)
    fn(torch.ones(2, requires_grad=True)).sum().backward()
    fn(torch.ones(2))
    assert [ops[0] for ops in map(one.operators, range(3))] == [
        "aten.sin.default",
        "aten.cos.default",
        "aten.sin.default",
    ]


def test_a_compiler_may_return_lists_single_tensors_or_be_opforge_itself() -> None:
    check(lambda x: x.sin(), torch.randn(3, requires_grad=True), fw_compiler=lambda g, i: lambda *a: list(g(*a)))
    check(lambda x: x.sin(), torch.randn(3), fw_compiler=lambda g, i: lambda *a: g(*a)[0])
    check(lambda x: x + 1, torch.randn(3, requires_grad=True), fw_compiler=opforge.compile_fx)
    check(lambda x: x + 1, torch.randn(3, requires_grad=True), fw_compiler=make_boxed_compiler(nop))


def test_what_a_compiler_raises_or_returns_wrongly_is_seen() -> None:
    def broken(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        aot_function(lambda x: x + 1, broken)(torch.ones(2))
    with pytest.raises(
        TypeError, match="inference_compiler or fw_compiler returned a NoneType; it must return a callable"
    ):
        aot_function(lambda x: x + 1, lambda g, i: None)(torch.ones(2))  # type: ignore[arg-type,return-value]


def test_print_compile_prints(capsys: pytest.CaptureFixture[str]) -> None:
    aot_function(lambda x: x + 1, print_compile)(torch.ones(2))
    assert "torch.ops.aten.add.Tensor(arg0, 1)" in capsys.readouterr().out


def test_another_kind_of_argument_is_traced_again() -> None:
    compiler = Watched()
    fn = aot_function(lambda x, n=2, *, flag=False: x * n + flag, compiler)
    for args, kwargs, count in [
        ((torch.ones(2),), {}, 1), ((torch.zeros(2),), {}, 1), ((torch.ones(3),), {}, 2), ((torch.ones(2), 3), {}, 3),
        ((torch.ones(2),), {"flag": True}, 4), ((torch.ones(2).double(),), {}, 5), ((torch.ones(2), True), {}, 6), ((torch.ones(2), 1), {}, 7),
    ]:  # fmt: skip
        n = args[1] if len(args) > 1 else 2
        same(fn(*args, **kwargs), args[0] * n + kwargs.get("flag", False))
        assert len(compiler.graphs) == count
    with torch.no_grad():
        fn(torch.ones(2))
    assert len(compiler.graphs) == 8


DYNAMIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, y: (x.mean(0) * y.std(0)).relu(),
    "view": lambda x, y: (x.view(-1) * y.sum()).sin(),
    "slice": lambda x, y: x[: x.shape[0] // 2].exp() * y[0] / y.numel(),
    "running sums": lambda x, y: torch.cat([x, y]).cumsum(0),
}


@pytest.mark.parametrize("program", DYNAMIC)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_sizes_that_the_backward_reads(partition: str, program: str) -> None:
    """They stood between nodes of the backward and said that they were the forward's: torch's `default_partition` took all before them for it."""
    watched = Watched()
    fn = DYNAMIC[program]
    compiled = aot_function(fn, watched, partition_fn=PARTITIONS[partition], dynamic=True)
    for n in (4, 6, 7):
        inputs = [torch.randn(n, 3, requires_grad=True) for _ in range(2)]
        results = [(out := f(*inputs), *torch.autograd.grad(out.sin().sum(), inputs)) for f in (compiled, fn)]
        torch.testing.assert_close(*results)
    assert len(watched.graphs) == 2


def test_dynamic_sizes_share_a_graph_and_its_guards_are_checked() -> None:
    compiler = Watched()

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.sum(0) * x.shape[0] if x.shape[0] < 8 else x.sum(0) @ y

    compiled = aot_function(fn, compiler, dynamic=True)
    for n, count in ((3, 1), (5, 1), (7, 1), (9, 2), (10, 2), (4, 2), (1, 3)):
        x, y = torch.randn(n, 4), torch.randn(4, 6)
        same(compiled(x, y), fn(x, y))
        assert len(compiler.graphs) == count
    w = torch.randn(5, 3, requires_grad=True)
    grad = aot_function(lambda w: (w.view(-1) * w.numel()).sin(), nop, dynamic=True)
    for n in (5, 6, 9):
        w = torch.randn(n, 3, requires_grad=True)
        (expected,) = torch.autograd.grad((w.view(-1) * w.numel()).sin().sum(), w)
        (found,) = torch.autograd.grad(grad(w).sum(), w)
        same(found, expected)


def test_mutations_stay_in_the_graph_when_asked() -> None:
    compiler = Watched()

    def swap(x: Tensor, y: Tensor) -> Tensor:
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        return x * 2

    check(swap, torch.randn(3), torch.randn(3), fw_compiler=compiler, keep_inference_input_mutations=True)
    assert compiler.operators().count("aten.copy_.default") == 2
    (output,) = (n for n in compiler.graphs[-1].graph.nodes if n.op == "output")
    assert len(output.args[0]) == 1
    check(swap, torch.randn(3), torch.randn(3), fw_compiler=compiler)
    assert "aten.copy_.default" not in compiler.operators()
    check(lambda x: x.t_().add_(1), torch.randn(2, 3), fw_compiler=compiler, keep_inference_input_mutations=True)
    check(lambda x, y: x.view(-1).mul_(2) + y, torch.randn(3), torch.randn(3, requires_grad=True),
          fw_compiler=compiler, keep_inference_input_mutations=True)  # fmt: skip


def test_random_operators_are_eagers() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).sin()

    x = torch.randn(100, requires_grad=True)
    torch.manual_seed(1)
    expected = fn(x)
    (grad,) = torch.autograd.grad(expected.sum(), x)
    for partition in PARTITIONS.values():
        compiled = aot_function(fn, nop, partition_fn=partition)
        compiled(x)
        torch.manual_seed(1)
        found = compiled(x)
        same(found, expected)
        same(torch.autograd.grad(found.sum(), x)[0], grad)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_checkpointed_regions_are_computed_again(partition: str, dropout: float) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda a: F.dropout((a @ w).sigmoid(), dropout).exp() @ w, x, use_reentrant=False).sin()

    forward, backward = Watched(), Watched()
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    torch.manual_seed(0)
    expected = fn(x, w)
    gradients = torch.autograd.grad(expected.sum(), (x, w))
    compiled = torch.compile(
        fn, backend=aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=PARTITIONS[partition])
    )
    compiled(x, w)
    torch.manual_seed(0)
    found = compiled(x, w)
    same(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), (x, w)), gradients)
    assert "aten.sigmoid.default" in backward.operators()


@pytest.mark.parametrize("partition", PARTITIONS)
def test_tensor_subclasses_reach_compilers_as_their_inner_tensors(partition: str) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * y).sin() + x, y * 2

    def inputs() -> list[Tensor]:
        torch.manual_seed(0)
        return [TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_(), torch.randn(3, requires_grad=True)]

    compiler = Watched()
    compiled = aot_function(fn, compiler, partition_fn=PARTITIONS[partition])
    (x, y), (x2, y2) = inputs(), inputs()
    found, expected = compiled(x, y), fn(x2, y2)
    assert all(type(t) is not TwoTensor for given in compiler.inputs for t in given)
    for results in (found, expected):
        torch.autograd.backward([r.sum() for r in results])
    for mine, theirs in [(found[0], expected[0]), (x.grad, x2.grad), (y.grad, y2.grad)]:
        assert type(mine) is TwoTensor
        same([mine.a.detach(), mine.b.detach()], [theirs.a.detach(), theirs.b.detach()])
    with torch.no_grad():
        same(compiled(x, y)[0].b, fn(x, y)[0].b)


# --- decompositions


def test_a_decomposition_reaches_forward_backward_and_what_bodies_call() -> None:
    aten = torch.ops.aten
    table = {
        aten.addcmul.default: lambda a, b, c, *, value=1: a + value * (b * c),
        aten.sigmoid.default: lambda x: 1 / (1 + aten.exp(aten.neg(x))),
        aten.neg.default: lambda x: x * -1.0,
        aten.sigmoid_backward.default: lambda g, y: g * (y * (1 - y)),
    }

    def fn(a: Tensor, b: Tensor) -> Tensor:
        return torch.addcmul(a, b, b).sigmoid()

    forward, backward = Watched(), Watched()
    a, b = torch.randn(4), torch.randn(4, requires_grad=True)
    compiled = aot_function(fn, forward, backward, decompositions=table)
    found, expected = compiled(a, b), fn(a, b)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), b), torch.autograd.grad(expected.sum(), b))
    names = {*forward.operators(), *backward.operators()}
    assert not {str(op) for op in table} & names
    assert "aten.exp.default" in names


def test_torchs_own_decompositions_and_inner_writes() -> None:
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    table = get_decompositions([aten.native_layer_norm, aten.native_layer_norm_backward, aten.gelu, aten.gelu_backward])
    compiler = Watched()

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x, (8,), w)).var(-1)

    x, w = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    compiled = aot_function(fn, compiler, decompositions=table)
    found, expected = compiled(x, w), fn(x, w)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), w), torch.autograd.grad(expected.sum(), w))
    assert not {str(op) for op in table} & {*compiler.operators(0), *compiler.operators(1)}

    def written(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.copy_(x).mul_(2)
        out.view(-1)[0] = 1.0
        return out

    check(lambda x: x.cos(), torch.zeros(2, 2), decompositions={torch.ops.aten.cos.default: lambda x: x + 1})
    functional = Watched()
    same(aot_function(lambda x: x.cos(), functional, decompositions={torch.ops.aten.cos.default: written})(torch.ones(2, 2)),
         torch.tensor([[1.0, 2.0], [2.0, 2.0]]))  # fmt: skip
    assert not any(name.endswith("_.default") or "_.Tensor" in name for name in functional.operators())


def test_a_decomposition_may_decline_and_none_means_none() -> None:
    compiler = Watched()
    cos = torch.ops.aten.cos.default
    for table in (None, {}, {cos: lambda x: NotImplemented}):
        check(lambda x: x.cos(), torch.randn(3), fw_compiler=compiler, decompositions=table)
        assert compiler.operators() == ["aten.cos.default"]


def test_a_decomposition_that_fails_names_its_operator() -> None:
    cos = torch.ops.aten.cos.default

    def fails(x: Tensor) -> Tensor:
        raise ValueError("mine")

    with opforge.config.patch(strict=True):
        with pytest.raises(UnsupportedError, match=r"ValueError in the decomposition of aten.cos.default .*: mine"):
            aot_function(lambda x: x.cos(), nop, decompositions={cos: fails})(torch.ones(2))
        with pytest.raises(
            UnsupportedError, match=r"the decompositions of aten.cos.default call each other without end"
        ):
            aot_function(lambda x: x.cos(), nop, decompositions={cos: lambda x: cos(x)})(torch.ones(2))


# --- what the program holds


def test_tensors_that_the_function_holds_are_constants() -> None:
    held = torch.randn(3)
    check(lambda x: x * held + held.sum() + torch.tensor([1.0, 2.0, 3.0]), torch.randn(3, requires_grad=True))


@pytest.mark.parametrize("kind", ["written", "requires_grad"])
def test_what_cannot_be_a_constant_runs_eagerly_and_is_told(kind: str) -> None:
    held = torch.ones(3, requires_grad=kind == "requires_grad")

    def fn(x: Tensor) -> Tensor:
        return x * (held if kind == "requires_grad" else held.add_(1))

    with pytest.warns(OpforgeWarning, match=r"the program (writes to|holds) a tensor of shape \[3\].*test_aot_api.py"):
        found = aot_function(fn, nop)(torch.ones(3))
    same(found.detach(), torch.ones(3) * (1 if kind == "requires_grad" else 2))
    if kind == "requires_grad":
        found.sum().backward()
        same(held.grad, torch.ones(3))
    assert sum(opforge.stats()["fallbacks"].values()) == 1
    with opforge.config.patch(strict=True), pytest.raises(UnsupportedError, match="pass it as an input"):
        aot_function(fn, nop)(torch.ones(3))


# --- modules


class Net(nn.Module):
    """Batch norm (buffers), tied weights, keyword arguments, nested arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.mask = torch.tensor([1.0, 0.0, 2.0, 1.0])  # a plain attribute
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: dict[str, Tensor], *, scale: float = 1.0, extra: Any = None) -> dict[str, Any]:
        self.calls.add_(1)
        hidden = self.norm(self.embed(batch["ids"])) * self.mask * scale
        if extra is not None:
            hidden = hidden + extra[0]
        return {"logits": self.out(hidden), "hidden": (hidden.detach(), batch["ids"])}


def twins() -> tuple[Net, Net]:
    torch.manual_seed(0)
    net = Net()
    return net, copy.deepcopy(net)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_module_trains_as_eager_does(partition: str) -> None:
    eager, net = twins()
    compiled = aot_module(net, nop, partition_fn=PARTITIONS[partition])
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (eager, compiled)]
    for step in range(4):
        ids = torch.randint(0, 7, (6,))
        extra = [torch.randn(4)] if step % 2 else None
        losses = []
        for module, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            out = module({"ids": ids}, scale=2.0, extra=extra)
            losses.append(F.cross_entropy(out["logits"], ids))
            losses[-1].backward()
            optimizer.step()
        same(losses[1], losses[0])
    same(dict(net.state_dict()), dict(eager.state_dict()))
    for module in (eager, compiled):
        module.eval()
    ids = torch.randint(0, 7, (6,))
    same(compiled({"ids": ids}), eager({"ids": ids}))
    with torch.no_grad():
        same(compiled({"ids": ids}), eager({"ids": ids}))


def test_a_modules_tensors_come_first_and_may_be_exchanged() -> None:
    compiler = Watched()
    net = nn.Linear(3, 2)
    compiled = aot_module(net, compiler)
    assert compiled.orig_module is net
    compiled(torch.ones(1, 3))
    assert [tuple(t.shape) for t in compiler.inputs[0]] == [(2, 3), (2,), (1, 3)]
    net.weight = nn.Parameter(torch.zeros(2, 3))
    same(compiled(torch.ones(1, 3)), net(torch.ones(1, 3)))


class Assigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, kind: str) -> Tensor:
        if kind == "buffer":
            self.count = self.count + x
        elif kind == "attribute":
            self.last = x * 2
        else:
            self.seen.append(x * 2)
        return x + self.count


@pytest.mark.parametrize("kind", ["buffer", "attribute", "list"])
def test_what_a_module_assigns_to_itself_is_right_or_eager(kind: str) -> None:
    net, eager = Assigns(), Assigns()
    message = "the buffer 'count' is assigned anew" if kind == "buffer" else "the attribute '(last|seen)' of the module"
    with pytest.warns(OpforgeWarning, match=message):
        found = aot_module(net, nop)(torch.ones(2), kind)
    same(found, eager(torch.ones(2), kind))
    same(net.count, eager.count)
    same(getattr(net, "last", None), getattr(eager, "last", None))
    same(net.seen, eager.seen)


def test_simplified_takes_flat_arguments_and_holds_the_modules_tensors() -> None:
    compiler = Watched()
    eager, net = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    compiled = aot_module_simplified(net, (x,), compiler)
    assert [tuple(t.shape) for t in compiler.inputs[0]] == [(3,), (3,), (3,), (3,), (), (4, 3)]
    same(compiled(x), eager(x))
    same(dict(net.state_dict()), dict(eager.state_dict()))
    compiled(x).sum().backward()
    assert net.weight.grad is not None
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    same(aot_module_simplified(gm, (x,), nop)(x), gm(x))


# --- Dynamo backends


def test_a_backend_of_ones_own() -> None:
    forward, backward = Watched(), Watched()
    made: list[int] = []

    def table() -> dict[Any, Any]:
        made.append(1)
        return {torch.ops.aten.cos.default: lambda x: torch.sin(x + torch.pi / 2)}

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, decompositions=table,
                           partition_fn=min_cut_rematerialization_partition)  # fmt: skip
    eager, net = twins()
    compiled = torch.compile(net, backend=backend)
    assert not made
    ids = torch.tensor([1, 2, 3, 3])
    for module in (eager, compiled):
        F.cross_entropy(module({"ids": ids})["logits"].sin(), ids).backward()
    same(dict(net.state_dict()), dict(eager.state_dict()))
    same([p.grad for p in net.parameters()], [p.grad for p in eager.parameters()])
    assert made == [1]
    assert forward.graphs
    assert backward.graphs
    place = [n.meta["source"] for n in forward.graphs[0].graph.nodes if n.op == "call_function"]
    assert any("test_aot_api.py" in p and "self.calls.add_(1)" in p for p in place)


def test_a_backend_meets_dynamic_sizes_containers_and_inference() -> None:
    inference = Watched()
    backend = aot_autograd(fw_compiler=nop, inference_compiler=inference)

    @torch.compile(backend=backend, dynamic=True)
    def fn(xs: list[Tensor]) -> list[Tensor]:
        return [x.sum(0) * x.shape[0] for x in xs]

    for n in (4, 5, 8):
        xs = [torch.randn(n, 6), torch.randn(n, 7)]
        same(fn(xs), [x.sum(0) * n for x in xs])
    assert len(inference.graphs) == 1


def test_the_public_names_are_at_the_top() -> None:
    import inspect

    names = ("aot_function", "aot_module", "aot_module_simplified", "aot_export_module", "aot_export_joint_simple")
    from torch._functorch import aot_autograd as torchs

    for name in names:
        mine = inspect.signature(getattr(opforge, name)).parameters
        theirs = inspect.signature(getattr(torchs, name)).parameters
        assert [p for p in mine if p in theirs] == list(mine)
        assert list(mine)[: len(mine)] == [p for p in theirs if p in mine]
        for p in mine:
            assert mine[p].kind is theirs[p].kind, (name, p)
            if not callable(theirs[p].default):
                assert mine[p].default == theirs[p].default, (name, p)
    assert callable(opforge.aot_autograd)


@pytest.mark.parametrize(
    ("program", "first", "then"),
    [
        (lambda x: x * x.shape[0], (1,), (3,)),
        (lambda x: x * 3 if x.shape[0] == 5 else x * 2, (5,), (7,)),
        (lambda x: x.sin().mean(0), (1, 2), (3, 2)),
        (lambda x: x.view(-1, x.shape[0]).sum(0), (1, 4), (2, 2)),
        (lambda x: x.sum(0), (0, 2), (2, 2)),
    ],
)
def test_a_size_that_the_trace_decided_is_asked_for(
    program: Callable[[Tensor], Tensor], first: tuple[int, ...], then: tuple[int, ...]
) -> None:
    f = opforge.aot_function(program, fw_compiler=opforge.aot.nop, dynamic=True)
    for sizes in (first, then, first):
        x = torch.ones(sizes)
        torch.testing.assert_close(f(x), program(x))


def test_the_default_dtype_is_asked_for() -> None:
    f = opforge.aot_function(lambda x: x * torch.ones(3), fw_compiler=opforge.aot.nop)
    x = torch.ones(3, dtype=torch.int64)
    assert f(x).dtype == torch.float32
    try:
        torch.set_default_dtype(torch.float64)
        assert f(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["fw_compiler", "bw_compiler", "inference_compiler", "partition_fn"])
def test_a_compiler_that_is_no_function_is_refused_at_once(name: str) -> None:
    """`aot_function(f, 3)` was taken, and failed at the first call."""
    wrong = {"fw_compiler": nop, name: "inductor"}
    makers: list[Callable[[], Any]] = [
        lambda: aot_function(torch.sin, **wrong),
        lambda: aot_module(nn.Linear(2, 2), **wrong),
        lambda: aot_module_simplified(nn.Linear(2, 2), (torch.ones(2, 2),), **wrong),
        lambda: aot_autograd(**wrong),
    ]
    for make in makers:
        with pytest.raises(TypeError, match=rf"^{name} must be a function, \(.* → .*; got 'inductor', a str$"):
            make()
    with pytest.raises(TypeError, match=r"^fn must be a function, the program to compile; got 3, a int$"):
        aot_function(3, nop)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^fw_compiler must be a function, .* got None"):
        aot_function(torch.sin, None)  # type: ignore[arg-type]


def test_an_argument_without_a_hash_is_named() -> None:
    """`unhashable type` was all that was said."""
    fn = aot_function(lambda x, names, **more: x * len(names), nop)
    x = torch.ones(3)
    with pytest.raises(
        TypeError,
        match=r"^argument 1 \(.*\) is a set, which has no hash: .* Pass tensors, numbers and strings in tuples",
    ):
        fn(x, {"a", "b"})
    with pytest.raises(TypeError, match=r"^argument 2 \(.*\) is a bytearray, which has no hash"):
        fn(x, slice(1, 2), k=bytearray(b"1"))
    assert torch.equal(fn(x, frozenset({"a", "b"})), x * 2)
    assert torch.equal(fn(x, ["a", "b", "c"]), x * 3)


def test_another_number_of_gradients_names_the_compiler() -> None:
    def compiler(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        return lambda *args: list(gm(*args))[:-1]

    x, y = (torch.rand(3, requires_grad=True) for _ in range(2))
    out = opforge.aot_function(lambda x, y: x * y, fw_compiler=opforge.aot.nop, bw_compiler=compiler)(x, y)
    with pytest.raises(ValueError, match=r"bw_compiler returned gave 1 results; its graph returns 2"):
        out.sum().backward()
