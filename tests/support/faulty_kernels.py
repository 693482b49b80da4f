"""`python -m tests.support.faulty_kernels`: kernels that were made wrong on purpose, each in a child of this process, which memory is watched for.

Prints a line of each: its name, `well` or `reported`, and whether that is a READ or a WRITE.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import opforge
from opforge.runtime.targets import cpu

FAULTS: dict[str, tuple[str, str]] = {
    "right": ("", ""),
    "a vector too many": ("o0 < 32; o0", "o0 < 64; o0"),
    "a lane too many is written": ("t4, live)", "t4, live + 1)"),
    "a lane too many is read": ("arg0 + o0, live)", "arg0 + o0, live + 1)"),
    "an element before is read": ("loadu(arg0 + o0)", "loadu(arg0 + o0 - 1)"),
    "beyond an intermediate value": ("storeu(sin_default + o0, t4, live)", "storeu(sin_default + o0 + VL, t4, live)"),
}
"""What is replaced in the first kernel's source, by what."""


def _program(x: torch.Tensor) -> torch.Tensor:
    """What eager's kernel of `sort` reads is an intermediate value."""
    return torch.sort(x.sin()).values.cos()


def _run(find: str, replacement: str) -> None:
    compile_library: Callable[..., bytes] = cpu.compile_library

    def faulty(source: str, **kwargs: object) -> bytes:
        assert find in source, source[-3000:]
        return compile_library(source.replace(find, replacement, 1) if find else source, **kwargs)

    cpu.compile_library = faulty  # type: ignore[assignment]
    x = torch.randn(37)
    with opforge.config.patch({"strict": True, "opt_level": "0", "target": "avx2", "cache": False}):
        found = torch.compile(_program, backend="opforge")(x)
    torch.testing.assert_close(found, _program(x))


def main() -> None:
    """One child for each fault: the first report ends a process."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (find, replacement) in FAULTS.items():
            log = Path(folder) / "report"
            if not (child := os.fork()):
                os.dup2(os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 2)
                try:
                    _run(find, replacement)
                except BaseException:  # noqa: BLE001 - the child ends here
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            said = log.read_text()
            kind = re.search(r"ERROR: AddressSanitizer: .*\n(READ|WRITE) of size", said)
            if status and not kind:
                sys.exit(f"{name}: {said[:3000]}")
            print(f"{name}: {'well' if not status else 'reported'}", *(kind.groups() if kind else ()), flush=True)


if __name__ == "__main__":
    main()
