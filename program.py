"""Runs a program in this process as `python program.py` does: for `opforge run` and `opforge explain`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

__all__ = ["run_program", "shown"]


def run_program(script: Path, args: Sequence[str]) -> BaseException | None:
    """Run it to its end; returns what ended it early, `SystemExit` too."""
    path = os.path.abspath(script)
    sys.argv[:] = [str(script), *args]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    gc.enable()
    try:
        loader = SourceFileLoader("__main__", path)
        module = ModuleType("__main__")
        module.__file__, module.__loader__ = path, loader
        sys.modules["__main__"] = module  # and stays: threads of the program may still run
        exec(loader.source_to_code(loader.get_data(path), path), module.__dict__)
    except BaseException as error:  # noqa: BLE001 - the program's own, shown as Python shows it
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next
        return error.with_traceback(trace)
    return None


def shown(ended: BaseException | None) -> int:
    """The exit code that Python has for a program that ended so, after showing what Python shows."""
    sys.stdout.flush()
    if ended is None:
        return 0
    if not isinstance(ended, SystemExit):
        sys.excepthook(type(ended), ended, ended.__traceback__)
        return 130 if isinstance(ended, KeyboardInterrupt) else 1
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1
