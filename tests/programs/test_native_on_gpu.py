"""The targets that docs/operators.md names are those for which an entry's functions answer, lowered as for a GPU."""

from __future__ import annotations

import pytest
import torch

from opforge.generator.devices import GPU, native_on
from opforge.generator.run import load_model
from tests.generated.test_ops import OPS
from tests.support.gpu_lowering import native_overloads

FAMILIES = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(FAMILIES))
def test_what_is_said_to_be_native_on_a_gpu_is(part: int) -> None:
    torch.manual_seed(0)
    said = native_on(GPU, load_model().part("ops"))
    told = {op.id: sorted(said & set(op.overloads)) for op in OPS[part::FAMILIES]}
    assert {op.id: sorted(native_overloads(op)) for op in OPS[part::FAMILIES]} == told
