"""Fake results that are remembered: as torch's fake kernels give them, from the second call on without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opforge.runtime.dispatch.operators.fake_memo import FakeMemo
from opforge.runtime.torch_compat import FakeTensorMode, ShapeEnv

aten = torch.ops.aten

CALLS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "pointwise": (aten.add.Tensor, lambda x: (x, x), {"alpha": 2}),
    "dtype": (aten.gt.Scalar, lambda x: (x, 1), {}),
    "reduction": (aten.sum.dim_IntList, lambda x: (x, [1], True), {}),
    "several": (aten.max.dim, lambda x: (x, 0), {}),
    "product": (aten.mm.default, lambda x: (x, aten.t.default(x)), {}),
    "view": (aten.t.default, lambda x: (x,), {}),
    "views": (aten.split.Tensor, lambda x: (x, 2), {}),
    "part": (aten.slice.Tensor, lambda x: (x, 1, 1, 3), {}),
    "expanded": (aten.unsqueeze.default, lambda x: (x, 0), {}),
    "list": (aten.cat.default, lambda x: ([x, x], 1), {}),
    "fresh": (aten.full.default, lambda _: ([2, 3], 1.0), {"dtype": torch.float16, "device": "cpu"}),
}


def described(found: Any, x: Tensor) -> list[Any]:
    """What can be told of fake results."""
    results = [found] if isinstance(found, Tensor) else list(found)
    place = x.untyped_storage()._cdata
    return [
        (t.dtype, str(t.shape), str(t.stride()), str(t.storage_offset()), t.device, t.requires_grad, _storage(t, place))
        for t in results
    ]


def _storage(t: Tensor, place: int) -> tuple[bool, str]:
    """Whether it lies at `place`, and how large it is."""
    return t.untyped_storage()._cdata == place, str(t.untyped_storage().nbytes())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_results_made_again(name: str, dynamic: bool) -> None:
    """Layout, dtype, device and storage are those of the first call, for other tensors of the same layout."""
    op, arguments, kwargs = CALLS[name]
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    memo = FakeMemo(fake_mode)
    ran, first = 0, None
    x, y = (fake_mode.from_tensor(torch.randn(4, 6), static_shapes=not dynamic) for _ in range(2))
    with fake_mode:
        calls = [(t, arguments(t)) for t in (x, y, x)]
    for t, args in calls:

        def run(args: Any = args) -> Any:
            nonlocal ran
            ran += 1
            return fake_mode.dispatch(op, (type(x),), args, kwargs)

        guards = len(fake_mode.shape_env.guards)
        found = memo.results(op, args, kwargs, run, False)
        told = described(found, t)
        assert ran == 1
        assert first is None or len(fake_mode.shape_env.guards) == guards
        first = first or told
        assert told == first


def test_what_decides_results_is_compared() -> None:
    """Layouts, dtypes and numbers with their types: 1, 1.0 and True are three, and so are the places of views."""
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    memo = FakeMemo(fake_mode)
    x = fake_mode.from_tensor(torch.ones(4, 6, dtype=torch.int32), static_shapes=True)

    def of(op: Any, *args: Any) -> Any:
        return memo.results(op, args, {}, lambda: fake_mode.dispatch(op, (type(x),), args, {}), False)

    assert [of(aten.add.Tensor, x, n).dtype for n in (1, 1.0, True)] == [torch.int32, torch.float32, torch.int32]
    assert of(aten.t.default, x).stride() == (1, 6)
    row = of(aten.select.int, x, 0, 2)
    assert row.storage_offset() == 12
    assert of(aten.slice.Tensor, row, 0, 1).storage_offset() == 13
    assert of(aten.slice.Tensor, of(aten.select.int, x, 0, 1), 0, 1).storage_offset() == 7


def test_torchs_cache_is_off_for_symbolic_sizes_only() -> None:
    """With symbolic sizes it costs more than it saves. It is switched on again afterwards, after an error too."""
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    memo = FakeMemo(fake_mode)
    fixed, symbolic = (fake_mode.from_tensor(torch.randn(4, 6), static_shapes=static) for static in (True, False))
    seen: list[bool] = []

    def run(fails: bool = False) -> Tensor:
        seen.append(fake_mode.cache_enabled)
        if fails:
            raise ValueError("no such kernel")
        return fake_mode.dispatch(aten.neg.default, (type(fixed),), (fixed,), {})

    memo.results(aten.neg.default, (fixed,), {}, run, False)
    memo.results(aten.neg.default, (symbolic,), {}, run, False)
    memo.results(aten.mul.Tensor, (fixed, symbolic.shape[0]), {}, run, False)
    with pytest.raises(ValueError, match="no such kernel"):
        memo.results(aten.abs.default, (symbolic,), {}, lambda: run(True), False)
    assert seen == [True, False, False, False]
    assert fake_mode.cache_enabled
