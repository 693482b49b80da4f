"""Machines of the tests that need not be there."""

from __future__ import annotations

from dataclasses import replace

from opforge.generated.targets import CPU_TARGETS, GPU_TARGETS
from opforge.runtime.kernels.plan import KernelStep, Plan
from opforge.runtime.machine import Gpu

AVX2 = CPU_TARGETS["avx2"]
H200 = Gpu(GPU_TARGETS["sm_90"], num_sms=132)


def launched_on(plan: Plan, gpu: Gpu) -> Plan:
    """A plan that was made for a processor, whose kernels a test renders for a GPU too."""
    steps = plan.steps
    plan.steps = [replace(s, kernel=replace(s.kernel, machine=gpu)) if isinstance(s, KernelStep) else s for s in steps]
    return plan


def with_split(gpu: Gpu, **split: int) -> Gpu:
    """The GPU with other limits of what is cut into parts."""
    costs = replace(gpu.costs, split=replace(gpu.costs.split, **split))
    return replace(gpu, target=replace(gpu.target, costs=costs))


__all__ = ["AVX2", "H200", "launched_on", "with_split"]
