"""A process that compiles Triton kernels: run as a script, it reads one JSON line for each kernel and writes one JSON line back.

    python -P triton_worker.py PACKAGE FOLDER SYS_PATH PARENT

PACKAGE is opforge's folder, FOLDER where sources go, SYS_PATH the parent's `sys.path` as JSON, PARENT its number (it may have ended before
this process looks). It needs nothing of the parent's main module, so the parent may be anything: a script without a guard, a notebook,
`python -c`. It ends with its input, when nothing has come for a while, and, whatever it is doing, when its parent has ended.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

IDLE_S = 120.0  # without work, after which a worker gives its memory back
_LOOK_S = 1.0  # between two looks whether the parent is there


def main(package: str, folder: str, path: str, parent: str) -> None:
    """Answer until the input ends."""
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    # What Triton and its tools print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path[:] = json.loads(path)
    _load_package(Path(package))
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.readline()):
        _answer(line, Path(folder), answers)


def _answer(line: str, folder: Path, answers: TextIO) -> None:
    from opforge.errors import BuildError
    from opforge.runtime.build.triton_job import Job, compile_job

    try:
        made = compile_job(Job(**json.loads(line)), folder)
        answer = {"cubin": base64.b64encode(made.cubin).decode(), "meta": made.meta}
    except BuildError as error:  # told to the parent; anything else ends this process, with its traceback
        answer = {"error": str(error)}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _end_with(parent: int) -> None:
    """A pipe that closes does not tell: children that the parent has forked may hold it open. Tools that Triton runs end too."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _load_package(root: Path) -> None:
    """Makes `opforge` importable from its folder, whatever that is called."""
    spec = importlib.util.spec_from_file_location(
        "opforge", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["opforge"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Triton is what takes long to load: it is there before the first kernel is.
    importlib.import_module("opforge.generated.kernels.triton_prelude")
    importlib.import_module("triton.compiler")


if __name__ == "__main__":
    main(*sys.argv[1:])
