"""Rules that ask for numbers end where sizes are symbols."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opforge.generated.rewrites import RULES
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite
from tests.support.matrix import symbolic


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (lambda x: F.max_pool2d(x, 2), (4, 3, 6, 8)),
        (lambda x: F.max_pool3d(x, 2), (4, 3, 6, 8, 4)),
        (lambda x: F.adaptive_max_pool2d(x, 2), (4, 3, 6, 8)),
        (lambda x: F.adaptive_max_pool3d(x, 2), (4, 3, 6, 8, 4)),
    ],
    ids=["max_pool2d", "max_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"],
)
@pytest.mark.parametrize("batch", [True, False])
def test_positions_of_a_pool_are_made_narrow_once(
    pool: Callable[[Tensor], Tensor], shape: tuple[int, ...], batch: bool
) -> None:
    """Where only the batch is symbolic, positions still fit into 16 bits. The rule then applied to its own result without end."""
    x = torch.randn(shape, requires_grad=True)
    given = [_with_symbolic_batch(x)] if batch else symbolic([x])[0]
    traced = trace(lambda x: (pool(x),), given, training=True)
    rewrite(traced.graph, RULES, device="cuda")
    made = [n.meta["val"].dtype for n in traced.graph.graph.nodes if "to_copy" in n.name]
    assert (torch.int16 in made) is batch


def _with_symbolic_batch(x: Tensor) -> Tensor:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    from opforge.runtime.torch_compat import FakeTensorMode

    kinds = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (x.dim() - 1)
    return FakeTensorMode(shape_env=ShapeEnv()).from_tensor(
        x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds)
    )
