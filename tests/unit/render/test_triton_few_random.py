"""Random tensors of fewer elements than one block of Philox has words: their kernel did not compile. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets.cuda import job_of, prepared, scheduled
from tests.support.machines import H200


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_it_compiles(count: int, tmp_path: Path) -> None:
    with torch.no_grad():
        traced = trace(lambda x: torch.rand(count) + x, [torch.ones(())], random="philox")
    plan = scheduled(prepared(separate_outputs(lower(traced.graph).program), H200), Config(), H200)
    kernels = render_triton(plan).kernels.values()
    assert any("philox" in k.source for k in kernels)
    for k in kernels:
        assert compile_job(job_of(k, 90), tmp_path).cubin
