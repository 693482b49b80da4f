"""Higher-order operators that are recorded as the operators that they call: attention with functions of the program's own, scans, maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_slices
from torch._higher_order_ops.out_dtype import out_dtype
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import opforge
from opforge.generated.decompositions import UNFOLDED
from opforge.runtime.torch_compat import by_operators

HEADS, STEPS, WIDTH = 4, 48, 16


def _soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _slopes(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.exp2(-(h + 1.0)) * (k - q)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, documents: Tensor, kind: str) -> Any:
    match kind:
        case "plain":
            return flex_attention(q, k, v)
        case "scaled":
            return flex_attention(q, k, v, scale=0.3)
        case "soft cap":
            return flex_attention(q, k, v, score_mod=_soft_cap)
        case "slopes":
            return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + _slopes(h, i, j))
        case "bias of a parameter":
            return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, i, j])
        case "documents":
            return flex_attention(
                q,
                k,
                v,
                score_mod=lambda s, b, h, i, j: torch.where(documents[i] == documents[j], s, -float("inf")),
            )
        case "grouped queries":
            return flex_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
        case "sums beside":
            return flex_attention(q, k, v, score_mod=_soft_cap, return_lse=True)
        case "causal blocks":
            mask = create_block_mask(_causal, None, None, STEPS, STEPS, device=q.device.type, BLOCK_SIZE=16)
            return flex_attention(q, k, v, block_mask=mask)
    raise AssertionError(kind)


KINDS = [
    "plain", "scaled", "soft cap", "slopes", "bias of a parameter", "documents", "grouped queries", "sums beside", "causal blocks",
]  # fmt: skip


def _inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, STEPS, WIDTH, generator=generator).to(dtype) for _ in range(3))
    bias = torch.randn(HEADS, STEPS, STEPS, generator=generator).to(dtype)
    return [q, k, v, bias, torch.arange(STEPS) // 11]


def _flat(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _assert_as_accurate(found: Any, eager: Any, exact: Any) -> None:
    for ours, theirs, truth in zip(_flat(found), _flat(eager), _flat(exact), strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        scale = truth.abs().max()
        assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max() + 1e-7 * scale


@pytest.mark.filterwarnings("ignore:return_lse", "ignore:flex_attention called")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str, dynamic: bool) -> None:
    if dynamic and kind == "causal blocks":
        pytest.skip("C10: Dynamo makes no block mask of symbolic sizes")
    inputs = _inputs()
    with torch.no_grad(), opforge.config.patch(strict=True):
        compiled = torch.compile(_attend, backend="opforge", dynamic=dynamic)
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        _assert_as_accurate(compiled(*inputs, kind), _attend(*inputs, kind), _attend(*wide, kind))


@pytest.mark.parametrize("kind", ["plain", "soft cap", "bias of a parameter", "documents"])
def test_gradients_of_attention(kind: str) -> None:
    """On a CPU torch refuses them at the door; behind it, on the graph that Dynamo captures, its own backward is there to compare with."""
    inputs = _inputs()
    graphs: list[Any] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(_attend, backend=keep)(*inputs, kind)
    (gm,) = graphs
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    by_name = {"q": inputs[0], "k": inputs[1], "v": inputs[2], "bias": inputs[3], "documents": inputs[4]}
    given = [next(t for key, t in by_name.items() if f"l_{key}_" in name.lower()) for name in names]

    def run(function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in given]
        out = _flat(function(*leaves))[0]
        wanted = [t for t in leaves if t.requires_grad]
        return list(torch.autograd.grad((out * out.detach().cos()).sum(), wanted))

    example = [t.clone().requires_grad_() if t.is_floating_point() else t for t in given]
    with opforge.config.patch(strict=True):
        compiled = opforge.compile_fx(gm, example)
    exact = run(gm, torch.float64)
    for ours, theirs, truth in zip(run(compiled, torch.float32), run(gm, torch.float32), exact, strict=True):
        assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max() + 1e-6 * truth.abs().max()


def _products(x: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic")


def _mapped(x: Tensor) -> Tensor:
    return map_slices(lambda row, y: (row * y).sin(), x, x.sum(0))


@pytest.mark.parametrize("program", [_products, _mapped], ids=["associative_scan", "map"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_scans_and_maps(program: Callable[[Tensor], Tensor], grad: bool) -> None:
    x = torch.rand(5, 7, requires_grad=grad)
    with opforge.config.patch(strict=True):
        found = torch.compile(program, backend="opforge")(x)
    torch.testing.assert_close(found, program(x))
    if grad:
        ours, theirs = (torch.autograd.grad(t.sin().sum(), x)[0] for t in (found, program(x)))
        torch.testing.assert_close(ours, theirs)


def _pairs(x: Tensor) -> Any:
    """Two values, of which a combination is no sum of one."""

    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    return associative_scan(combine, (x, x.sin()), 0, combine_mode="generic")


def _reversed(x: Tensor) -> Any:
    return associative_scan(lambda a, b: a + b * a, x, 1, reverse=True, combine_mode="generic")


def _mapped_results(x: Tensor) -> Any:
    """Two results, of operands that lie otherwise, and a function in the function."""

    def row(r: Tensor, w: Tensor) -> Any:
        return torch.cond(r.sum() > 3, lambda r: r.sin(), lambda r: r * 2, (r,)) + w, r.sum()

    return map_slices(row, x.t(), x[:, 0] * 1.5)


@pytest.mark.parametrize("program", [_pairs, _reversed, _mapped_results])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_several_values(program: Callable[[Tensor], Any], grad: bool) -> None:
    x = torch.rand(6, 7, requires_grad=grad)
    torch._dynamo.reset()
    with opforge.config.patch(strict=True):
        found = _flat(torch.compile(program, backend="opforge", fullgraph=True)(x))
    expected = _flat(program(x))
    torch.testing.assert_close(found, expected)
    if grad:
        ours, theirs = (torch.autograd.grad(sum(t.sin().sum() for t in out), x) for out in (found, expected))  # type: ignore[arg-type]
        torch.testing.assert_close(ours, theirs)


def test_the_function_of_a_map_is_compiled_once() -> None:
    """It was written out for each slice."""
    torch._dynamo.reset()
    with opforge.config.patch(strict=True), torch.no_grad():
        compiled = torch.compile(lambda x: map_slices(lambda r: r.softmax(0), x), backend="opforge", dynamic=True)
        graphs = opforge.stats()["graphs"]
        for rows in (300, 5, 2):
            x = torch.rand(rows, 4)
            torch.testing.assert_close(compiled(x), x.softmax(1))
    assert opforge.stats()["graphs"] == graphs + 1
    assert opforge.last_artifacts().kernels == 1


@torch.compiler.nested_compile_region
def _region(x: Tensor, y: Tensor) -> Any:
    return (x * y).sin() @ y.t(), x + 1


def _regions(x: Tensor, y: Tensor) -> Any:
    a, b = _region(x, y)
    return a.sum(0), _region(b, y)[0]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_regions_of_the_program(dynamic: bool, grad: bool) -> None:
    torch._dynamo.reset()
    with opforge.config.patch(strict=True):
        compiled = torch.compile(_regions, backend="opforge", fullgraph=True, dynamic=dynamic)
        for rows in (5, 6) if dynamic else (5,):
            leaves = [torch.rand(rows, 7, requires_grad=grad) for _ in range(2)]
            found, expected = compiled(*leaves), _regions(*leaves)
            torch.testing.assert_close(found, expected)
            if grad:
                ours, theirs = (
                    torch.autograd.grad(sum(t.sin().sum() for t in out), leaves) for out in (found, expected)
                )
                torch.testing.assert_close(ours, theirs)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    return out_dtype(torch.ops.aten.mm.default, torch.int32, a, b) + 1


def test_results_of_another_dtype() -> None:
    """Products of 8-bit integers do not wrap."""
    a, b = (torch.full(size, 100, dtype=torch.int8) for size in ((4, 6), (6, 5)))
    with opforge.config.patch(strict=True):
        found = torch.compile(_wide_product, backend="opforge")(a, b)
    assert found.dtype is torch.int32
    assert torch.equal(found, torch.full((4, 5), 60001, dtype=torch.int32))


def test_a_gradient_that_autograd_refuses_is_left_to_it() -> None:
    x = torch.rand(4, 4).bfloat16().requires_grad_()

    def program(x: Tensor) -> Tensor:
        return out_dtype(torch.ops.aten.mm.default, torch.float32, x, x)

    torch._dynamo.reset()
    out = torch.compile(program, backend="opforge")(x)
    with pytest.raises(RuntimeError, match="Autograd not implemented"):
        out.sum().backward()


def test_the_spec_names_operators_that_torch_implements() -> None:
    operators = {op.name(): op for op in torch._ops._higher_order_ops.values()}
    for name in UNFOLDED:
        assert callable(by_operators(operators[name]))
