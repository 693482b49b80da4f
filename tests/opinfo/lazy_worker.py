"""A worker for the harness's own tests: the interpreter leaves out the last program of each launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opforge.runtime.render.triton_unit import TritonKernel
from tests.support import interpreted

from .worker import main

_launch = interpreted._launch


def _lazy(kernel: TritonKernel, programs: int, arguments: list[Any], more: Mapping[str, int]) -> None:
    _launch(kernel, programs - 1, arguments, more)


if __name__ == "__main__":
    interpreted._launch = _lazy
    main()
