"""Runs one command of the compiler, with a time limit that also holds where a process of it stays behind with its output open."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["Finished", "end_all", "run_command"]

#: Seconds between two looks at whether the command has ended while another process holds its output open.
_LOOK_EVERY_S = 0.05

_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Finished:
    """How a command ended: in words, or None when it went well; its exit status, None where it did not start or was stopped."""

    failure: str | None
    output: str
    errors: str = ""
    status: int | None = None
    hung: bool = False


def run_command(
    command: Sequence[str],
    timeout_s: float,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    errors_apart: bool = False,
) -> Finished:
    """Runs a command, for at most `timeout_s` seconds (0: without a limit).

    When time runs out, or an exception such as `KeyboardInterrupt` arrives, the command ends with every process of its
    group. A process that it leaves behind when it ends by itself is not waited for: a compiler cache may start its server so.
    """
    try:
        # Its own process group, so that a timeout also ends the processes that the compiler has started.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if errors_apart else subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return Finished("cannot be run", str(error))
    pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
    texts = {pipe: bytearray() for pipe in pipes}
    failure = None
    _running.add(process)
    try:
        _read(process, texts, time.monotonic() + timeout_s if timeout_s else None)
    except subprocess.TimeoutExpired:
        failure = f"was stopped after {timeout_s:g} s"
    finally:
        _running.discard(process)
        if process.returncode is None:
            _end(process)
            process.wait()
        for pipe in pipes:
            pipe.close()
    output, errors = (*(text.decode(errors="replace") for text in texts.values()), "")[:2]
    if failure is not None:
        return Finished(failure, output, errors, hung=True)
    if process.returncode < 0:
        failure = f"was killed by signal {signal.Signals(-process.returncode).name}"
    elif process.returncode:
        failure = f"failed with exit status {process.returncode}"
    return Finished(failure, output, errors, status=process.returncode)


def end_all() -> None:
    """Ends the commands that run now in other threads: they return as killed."""
    for process in list(_running):
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with its group. It may have ended meanwhile."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)


def _read(process: subprocess.Popen[bytes], texts: Mapping[IO[bytes], bytearray], deadline: float | None) -> None:
    """Reads until the command has ended, whoever else may hold its output. Raises `subprocess.TimeoutExpired`."""
    with selectors.DefaultSelector() as selector:
        for pipe in texts:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            # In this order: what it wrote before it ended is in the pipe by now, and one read takes it.
            ended = process.poll() is not None
            left = _LOOK_EVERY_S if deadline is None else deadline - time.monotonic()
            if not ended and left <= 0:
                raise subprocess.TimeoutExpired(process.args, 0)
            for found, _ in selector.select(0 if ended else min(left, _LOOK_EVERY_S)):
                part = os.read(found.fd, 1 << 20)
                texts[found.fileobj].extend(part)  # type: ignore[index]
                if not part:
                    selector.unregister(found.fileobj)
            if ended:
                return
    process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
