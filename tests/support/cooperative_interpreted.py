"""Kernels whose programs wait for each other, by Triton's interpreter: each program is a thread, and one of them runs at a time.

A program hands on at each atomic operation, which is how programs meet; the next in turn goes on from where it was.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from opforge.runtime.render.triton_cooperative import BARRIER_CALL

LIMIT = 600  # seconds for which a program waits for its turn


def launch_once(module: ModuleType, name: str, programs: int, *arguments: Any, **more: Any) -> None:
    """Launches a kernel, whether its programs wait for each other or not."""
    function = getattr(module, name)
    if BARRIER_CALL in inspect.getsource(function.fn):
        run_together(module, name, programs, *arguments, **more)
    else:
        function[(programs,)](*arguments, **more)


def run_together(module: ModuleType, name: str, programs: int, *arguments: Any, **more: Any) -> None:
    """Launches the kernel `name` of a module. Raises what a program raises."""
    from triton.runtime import interpreter

    function = getattr(module, name)
    launch = interpreter.GridExecutor(function.rewrite(), function.arg_names, (1,))
    launch.fn = _in_globals(module, functools.partial(_all_programs, launch.fn, programs, interpreter), launch.fn)
    launch(*arguments, **more)


def _all_programs(kernel: Callable[..., None], programs: int, interpreter: Any, **arguments: Any) -> None:
    builder = interpreter.interpreter_builder
    turns = [threading.Semaphore(0) for _ in range(programs)]
    left = list(range(programs))
    errors: list[BaseException] = []
    ended = threading.Event()

    def hand_on(mine: int) -> None:
        """Let the next program run, then wait for the turn of this one."""
        turns[left[(left.index(mine) + 1) % len(left)]].release()
        if not turns[mine].acquire(timeout=LIMIT) or errors:
            raise RuntimeError("another program has ended the kernel")
        builder.set_grid_idx(mine, 0, 0)

    def atomic(self: Any, *given: Any) -> Any:
        found = kept(self, *given)
        hand_on(int(threading.current_thread().name))
        return found

    def run(mine: int) -> None:
        turns[mine].acquire()
        try:
            builder.set_grid_idx(mine, 0, 0)
            if not errors:
                kernel(**arguments)
        except BaseException as error:  # noqa: BLE001  # told by the thread that waits for all
            errors.append(error)
        after = left[(left.index(mine) + 1) % len(left)]
        left.remove(mine)
        if left:
            turns[after].release()
        else:
            ended.set()

    kind = interpreter.InterpreterBuilder
    kept, kind.create_atomic_rmw = kind.create_atomic_rmw, atomic
    try:
        builder.set_grid_dim(programs, 1, 1)
        threads = [threading.Thread(target=run, args=(k,), name=str(k), daemon=True) for k in range(programs)]
        for thread in threads:
            thread.start()
        turns[0].release()
        if not ended.wait(LIMIT):
            raise RuntimeError("programs wait for each other for ever")
    finally:
        kind.create_atomic_rmw = kept
    if errors:
        raise errors[0]


def _in_globals(module: ModuleType, run: Callable[..., None], kernel: Callable[..., None]) -> Callable[..., None]:
    """A function with the kernel's signature whose globals are the module's: there the interpreter puts its own functions in."""
    space: dict[str, Any] = {}
    exec("def made(_run):\n    def kernel(**given):\n        _run(**given)\n    return kernel", module.__dict__, space)
    made: Callable[..., None] = space["made"](run)
    made.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
    return made


__all__ = ["launch_once"]
