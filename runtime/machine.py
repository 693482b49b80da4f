"""What kernels are made for: a processor or a GPU, as its spec entry has it (specs/targets), and what only the device itself tells."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..generated.targets import CPU_TARGETS, GPU_TARGETS, CpuTarget, GpuBudgets, GpuCosts, GpuLimits, GpuTarget
from ..generated.tuning import TUNING, Tuning


@dataclass(frozen=True)
class Gpu:
    """A GPU: its target, and how many multiprocessors the device has."""

    target: GpuTarget
    num_sms: int

    @property
    def limits(self) -> GpuLimits:
        return self.target.limits

    @property
    def budgets(self) -> GpuBudgets:
        return self.target.budgets

    @property
    def tuning(self) -> Tuning:
        """The table of block sizes that its kernels take."""
        return tuning_of(self.target.capability)

    @property
    def costs(self) -> GpuCosts:
        return self.target.costs


Machine = CpuTarget | Gpu

PORTABLE: Machine = CPU_TARGETS["scalar"]
"""The machine of a plan for which the caller names none."""

SOME_GPU = Gpu(max(GPU_TARGETS.values(), key=lambda target: target.capability), num_sms=1)
"""The GPU for which dumps show a processor's kernels in Triton; their text does not depend on the number of multiprocessors."""

MEASURED = SOME_GPU.target.capability
"""The capability whose table of block sizes is taken where nobody says which GPU it is for."""


@functools.cache
def tuning_of(capability: int = MEASURED) -> Tuning:
    """The table of a GPU by its compute capability (times ten), or that of the nearest one that was measured; of two, the older."""
    return TUNING[min(TUNING, key=lambda known: (abs(known - capability), known))]


def gpu_target(capability: int) -> GpuTarget:
    """The target of a GPU by its compute capability (times ten): the greatest that is not above it, else the least of all."""
    known = sorted(GPU_TARGETS.values(), key=lambda target: target.capability)
    return next((t for t in reversed(known) if t.capability <= capability), known[0])


__all__ = ["MEASURED", "PORTABLE", "SOME_GPU", "Gpu", "Machine", "gpu_target", "tuning_of"]
