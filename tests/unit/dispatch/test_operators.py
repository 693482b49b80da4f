"""Operators are classified by their schemas; writing ones have functional overloads that compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opforge.generated.decompositions import DECOMPOSITIONS
from opforge.generated.dispatch_tables import INVERSES
from opforge.runtime.dispatch.operators.schema import functional_of, op_info, view_of
from tests.support.aliasing import iota, through_dispatch

aten = torch.ops.aten

KINDS = {
    aten.add.Tensor: "plain",
    aten.view.default: "view",
    aten.split.Tensor: "view",
    aten.add_.Tensor: "write",
    aten.max.dim_max: "write",
    aten._foreach_add_.Scalar: "write",
    aten.t_.default: "metadata",
    aten.set_.source_Tensor: "metadata",
    aten.linear.default: "composite",
    aten.native_batch_norm.default: "decompose",
    aten.lift_fresh.default: "lift",
    torch.ops.higher_order.cond: "higher_order",
}


@pytest.mark.parametrize("op", KINDS, ids=str)
def test_kind(op: Any) -> None:
    assert op_info(op).kind == KINDS[op]


FUNCTIONAL = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.__iand__.Tensor: aten.__and__.Tensor,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
    aten.add.out: aten.add.Tensor,
    aten.max.dim_max: aten.max.dim,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten._foreach_add_.List: aten._foreach_add.List,
    aten.polygamma_.default: aten.polygamma.default,
    aten._fused_adam_.default: aten._fused_adam.default,
    aten.copy_.default: aten.copy.default,
}


@pytest.mark.parametrize("op", FUNCTIONAL, ids=str)
def test_functional(op: Any) -> None:
    form = functional_of(op)
    assert form is not None
    assert form.op is FUNCTIONAL[op]


def test_views_of_metadata_operators() -> None:
    assert view_of(aten.transpose_.default) is aten.transpose.int
    assert view_of(aten.unsqueeze_.default) is aten.unsqueeze.default
    assert view_of(aten.resize_.default) is None


# Torch has no overload that returns what these write, or only one by another name: such a graph runs eagerly.
NO_FUNCTIONAL_OVERLOAD = {
    "aten._cudnn_attention_forward_no_dropout_inplace.default",
    "aten._cummax_helper.default",
    "aten._cummin_helper.default",
    "aten._fill_mem_eff_dropout_mask_.default",
    "aten._flash_attention_forward_no_dropout_inplace.default",
    "aten._slow_conv2d_backward.grad_input",
    "aten.adaptive_avg_pool3d_backward.grad_input",
    "aten.range.out_",
    "aten.record_stream.default",
    "aten.shallow_copy_data_.default",
}


def test_nearly_all_in_place_operators_have_a_functional_overload() -> None:
    without = []
    packets = {n[6:].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    for packet in (getattr(aten, name) for name in sorted(packets)):
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if overload.endswith("out") or not torch._C._dispatch_has_kernel(op.name()):
                continue  # TorchScript's own overloads on numbers and lists have no kernel
            if op_info(op).kind == "write" and functional_of(op) is None:
                without.append(str(op))
    assert set(without) <= NO_FUNCTIONAL_OVERLOAD


VIEWS = {
    "view": lambda x: x.view(2, 12),
    "reshape_alias": lambda x: torch.ops.aten._reshape_alias(x, [24], [1]),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(),
    "squeeze_dim": lambda x: x.unsqueeze(0).squeeze(0),
    "squeeze_dims": lambda x: x.unsqueeze(0).squeeze((0, 1)),
    "t": lambda x: x[0].t(),
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, -2),
    "prims_transpose": lambda x: torch.ops.prims.transpose(x, [2, 0, 1]),
    "slice": lambda x: x[:, 1:3, ::2],
    "slice_from_end": lambda x: x[-1:, :-1],
    "select": lambda x: x[:, -1],
    "diagonal": lambda x: x.diagonal(1, 1, 2),
    "split": lambda x: x.split(2, 2)[1],
    "split_uneven": lambda x: x.split([1, 2], 1)[1],
    "unbind": lambda x: x.unbind(2)[3],
    "chunk": lambda x: x.chunk(3, -1)[1],
    "view_dtype": lambda x: x.view(torch.int32),
    "view_narrower_dtype": lambda x: x.view(torch.int16)[..., ::2],
    "view_as_complex": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)),
    "unfold": lambda x: x.unfold(2, 2, 2),
    "as_strided": lambda x: x.as_strided((2, 2), (12, 5), 1),
    "expand_of_one": lambda x: x.expand(1, 2, 3, 4),
    "detach": lambda x: x.detach(),
    "movedim": lambda x: x.movedim(0, -1),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "swapaxes_mT": lambda x: x.swapaxes(0, 1).mT,
}


@pytest.mark.parametrize("name", sorted(VIEWS))
@pytest.mark.parametrize("intermediate", [False, True])
def test_writes_through_every_view(name: str, intermediate: bool) -> None:
    view = VIEWS[name]

    def program(x):
        y = x * 2 if intermediate else x
        whole = y.view(-1)
        v = view(y)
        v.mul_(2)
        whole[0] += 1
        v.add_(1)
        return v + 0, whole * 1, v, y

    through_dispatch(program, lambda: [iota(2, 3, 4)], calls=1)


@pytest.mark.parametrize(("training", "tracked"), [(False, True), (True, True), (True, False)])
def test_a_batch_norm_of_cudnn_is_that_of_the_cpu(training: bool, tracked: bool) -> None:
    """No CPU has the operator, but what it becomes runs there too."""
    torch.manual_seed(0)
    x, weight, bias, mean, var = torch.randn(4, 3, 5), *torch.randn(3, 3), torch.rand(3) + 0.5
    kept = [(mean.clone(), var.clone()) if tracked else (None, None) for _ in range(2)]
    *found, reserve = DECOMPOSITIONS[aten.cudnn_batch_norm.default](x, weight, bias, *kept[0], training, 0.3, 1e-2)
    right = aten.native_batch_norm(x, weight, bias, *kept[1], training, 0.3, 1e-2)
    torch.testing.assert_close(found, list(right))
    torch.testing.assert_close(kept[0], kept[1])
    assert (reserve.shape, reserve.dtype) == ((0,), torch.uint8)
    g = torch.randn(4, 3, 5)
    statistics = (*kept[1], right[1], right[2])
    if training:
        given = DECOMPOSITIONS[aten.cudnn_batch_norm_backward.default](x, g, weight, *statistics, 1e-2, reserve)
        wanted = aten.native_batch_norm_backward(g, x, weight, *statistics, True, 1e-2, [True] * 3)
        torch.testing.assert_close(given, wanted)


def test_every_inverse_is_of_a_view() -> None:
    for op in INVERSES:
        assert op_info(op).kind == "view" or op is aten._unsafe_view.default
