"""What wrappers of graphs on a GPU need while they run: memory of the current stream. (`launch` launches the kernels.)"""

from __future__ import annotations

import torch

from ..torch_compat import cuda_stream, empty_strided_cuda
from . import support
from .support import as_complex, as_real, conform, out_of_range, overload, reinterpret, unmet

empty_strided = empty_strided_cuda


class Workspaces(support.Workspaces):
    """Of the current device and stream: work of one stream runs in order."""

    __slots__ = ()

    def place(self) -> support.Place:
        index = torch.cuda.current_device()
        return torch.device("cuda", index), cuda_stream(index)


__all__ = [
    "Workspaces",
    "as_complex",
    "as_real",
    "conform",
    "empty_strided",
    "out_of_range",
    "overload",
    "reinterpret",
    "unmet",
]
