"""The benchmark programs: real architectures and small ones, each with its inputs.

`PROGRAMS` maps a name to a `Program`, models first, in a fixed order.
"""

from .base import Program, build, to_float64
from .micro import MICRO
from .models import MODELS

PROGRAMS: dict[str, Program] = {p.name: p for p in (*MODELS, *MICRO)}

#: The two or three programs that `--quick` runs: one small, one memory-bound, one with a reduction.
QUICK = ("add_relu_8", "softmax_rows", "layernorm")

__all__ = ["PROGRAMS", "QUICK", "Program", "build", "to_float64"]
