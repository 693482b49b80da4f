"""What a user may want to know of a GPU: matrix units that are switched off, a dtype that it has no arithmetic for. Each is said once."""

from __future__ import annotations

import torch

from ..build.scratch import warn_once
from ..ir.nodes import Extern, Program
from ..kernels.calls import row_bytes
from ..machine import gpu_target


def advise(program: Program, capability: int) -> None:
    """Warns of what slows the program down on a device of this capability (times ten)."""
    # Not `get_float32_matmul_precision`: that raises once somebody has set the precision of this backend, or of all, by its name.
    for text in advice(program, capability, tf32=torch.backends.cuda.matmul.fp32_precision == "tf32"):
        warn_once("advice", text, f"opforge: {text}")


def advice(program: Program, capability: int, *, tf32: bool) -> list[str]:
    """What there is to say; `tf32`: products of float32 may use these units."""
    made = [b.dtype for item in program.items if isinstance(item, Extern) and row_bytes(item) for b in item.outs]
    buffers = program.shapes().values()
    features = gpu_target(capability).features
    said = []
    if "tf32" in features and not tf32 and "float32" in made:
        said.append(
            "matrix products of float32 do not use this GPU's TensorFloat32 units, which are faster and round their operands to 10 bits; "
            'torch.set_float32_matmul_precision("high") allows them'
        )
    if "bfloat16" not in features and any(b.dtype == "bfloat16" for b in buffers):
        said.append(
            f"this GPU (compute capability {capability // 10}.{capability % 10}) has no arithmetic of bfloat16 and emulates it; float16 is faster"
        )
    return said


__all__ = ["advice", "advise"]
