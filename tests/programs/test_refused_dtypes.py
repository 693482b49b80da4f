"""Every dtype that eager refuses for an operator entry is left to the eager kernel, which raises: no loops are made for it."""

from __future__ import annotations

import pytest
import torch

from opforge.runtime.torch_compat import minor_version
from tests.generated.test_ops import OPS
from tests.support.op_dtypes import lost_errors

FAMILIES = 8
#: What eager computes in half precision since torch 2.13 only: opforge computes it with each.
COMPUTED = ("aten.trace.default",) if minor_version() in ("2.11", "2.12") else ()


@pytest.mark.parametrize("part", range(FAMILIES))
def test_no_error_is_lost(part: int) -> None:
    torch.manual_seed(0)
    lost = [line for op in OPS[part::FAMILIES] for line in lost_errors(op)]
    assert [line for line in lost if not line.startswith(COMPUTED)] == []
