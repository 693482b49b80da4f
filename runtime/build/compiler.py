"""Compiles C++ sources to shared libraries, through the cache and in parallel.

One source is one translation unit without torch's headers. The compiler runs in a private folder on relative names, so
that the same source, compiler and flags give the same bytes everywhere.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...errors import BuildError, CacheError
from ..config import Config
from . import cache
from .scratch import keep_source, scratch_dir
from .toolchain import Toolchain, find_toolchain

__all__ = ["Source", "compile_cpp", "compile_many", "compiler_id", "complaints", "job_count"]

_COMPLAINT = re.compile(r"\berror\b|undefined reference|unrecognized|No space left", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """One C++ translation unit; `name` appears in file names and in profiles."""

    text: str
    name: str


def compiler_id(cfg: Config) -> str:
    """Everything about compiler, flags and machine that changes compiled code: a part of every key of such code.

    Raises `BuildError` when there is no compiler.
    """
    return "\n".join(f"{name}: {value}" for name, value in sorted(find_toolchain(cfg).identity().items()))


def compile_cpp(source: str, *, name: str, cfg: Config) -> Path:
    """The shared library of one C++ source, from the cache or freshly compiled.

    Raises `BuildError` when there is no compiler, or when it fails: with its output, the command, and the kept source.
    """
    tools = find_toolchain(cfg)
    stem = _file_stem(name)
    digest = cache.key({"kind": "cpp", "name": stem, "source": source, **tools.identity()})
    library = f"{stem}.so"
    try:
        store = cache.Cache.current(cfg)
        if (entry := store.get(digest)) is not None:
            return entry.file(library)
        with store.lock(digest):
            # Whoever held the lock before us has probably made it.
            if (entry := store.get(digest)) is None:
                entry = _build(source, stem, digest, tools, cfg, store)
        return entry.file(library)
    except (OSError, CacheError) as error:
        raise BuildError(f"no folder takes the compiled kernel {name!r}: {error}") from error


def compile_many(
    sources: Sequence[Source], *, cfg: Config, on_done: Callable[[Source], None] | None = None
) -> list[Path]:
    """The shared libraries of several sources, in their order; up to `build_jobs` compilers run at once.

    `on_done` is called after each, from the thread that compiled it. Raises the `BuildError` of the first source that
    fails, after all have ended.
    """

    def one(source: Source) -> Path:
        path = compile_cpp(source.text, name=source.name, cfg=cfg)
        if on_done is not None:
            on_done(source)
        return path

    jobs = min(job_count(cfg), len(sources))
    if jobs <= 1:
        return [one(source) for source in sources]
    # Threads suffice: the work is done by compiler processes.
    with ThreadPoolExecutor(jobs, thread_name_prefix="opforge-build") as pool:
        return [future.result() for future in [pool.submit(one, source) for source in sources]]


def job_count(cfg: Config) -> int:
    """How many compilers may run at once: `build_jobs`, or the number of CPU cores that this process may use."""
    if cfg.build_jobs:
        return cfg.build_jobs
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def complaints(output: str) -> list[str]:
    """The lines of a compiler's output that say what is wrong, at most three: its errors, or its first words where it calls nothing one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return ([line for line in lines if _COMPLAINT.search(line)] or lines)[:3]


def _file_stem(name: str) -> str:
    """`name` as a plain file name of at most 64 characters."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)[:64] or "kernel"


def _build(source: str, stem: str, digest: str, tools: Toolchain, cfg: Config, store: cache.Cache) -> cache.Entry:
    folder = Path(tempfile.mkdtemp(prefix="build-", dir=scratch_dir()))
    start = time.perf_counter()
    try:
        (folder / f"{stem}.cpp").write_text(source, encoding="utf-8")
        # Two steps: -fopenmp at the link would add the compiler's own OpenMP library.
        compile_step = [*tools.command, *tools.compile_flags, "-c", f"{stem}.cpp", "-o", f"{stem}.o"]
        link_step = [*tools.command, f"{stem}.o", *tools.link_flags, "-o", f"{stem}.so"]
        for step, product in ((compile_step, f"{stem}.o"), (link_step, f"{stem}.so")):
            status, output = _run(step, folder, tools, cfg.build_timeout_s)
            if status is None and not (folder / product).is_file():
                status = f"reported success but wrote no {product}"
            if status is not None:
                kept = f"source kept in: {keep_source(source, stem, cfg.dump_dir)}"
                raise BuildError(
                    f"the C++ compiler {status} on kernel {stem!r}\n"
                    f"  command: {shlex.join(step)}\n  {kept}\n  compiler: {tools.version}\n{output}",
                    short=(*complaints(output), kept),
                )
        files: dict[str, bytes | Path] = {name: folder / name for name in (f"{stem}.so", f"{stem}.cpp")}
        meta = {
            "compiler": tools.version,
            "compile": shlex.join(compile_step),
            "seconds": round(time.perf_counter() - start, 3),
        }
        return store.put(digest, files, meta)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], folder: Path, tools: Toolchain, timeout_s: float) -> tuple[str | None, str]:
    """Runs one compiler step; (None, output) when it went well, else (how it failed, output)."""
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}
    try:
        # Its own process group, so that a timeout also ends the processes that the compiler has started.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return f"({tools.command[0]}) cannot be run", str(error)
    try:
        output, _ = process.communicate(timeout=timeout_s or None)
    except BaseException as error:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        output, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return f"was stopped after {timeout_s:g} s", output
        raise
    if process.returncode < 0:
        return f"was killed by signal {signal.Signals(-process.returncode).name}", output
    return (f"failed with exit status {process.returncode}", output) if process.returncode else (None, output)
