"""Every dtype that eager refuses for an operator entry is left to the eager kernel, which raises: no loops are made for it."""

from __future__ import annotations

import pytest
import torch

from tests.generated.test_ops import OPS
from tests.support.op_dtypes import lost_errors

FAMILIES = 8


@pytest.mark.parametrize("part", range(FAMILIES))
def test_no_error_is_lost(part: int) -> None:
    torch.manual_seed(0)
    assert [line for op in OPS[part::FAMILIES] for line in lost_errors(op)] == []
