"""Compiles C++ sources to shared libraries, through the cache and in parallel.

One source is one translation unit without torch's headers. The compiler runs in a private folder on relative names, so
that the same source, compiler and flags give the same bytes everywhere.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...errors import BuildError, CacheError
from ..config import Config
from . import cache
from .command import Finished, end_all, run_command
from .scratch import keep_source, scratch_dir
from .toolchain import Toolchain, find_toolchain

__all__ = ["Source", "compile_cpp", "compile_library", "compile_many", "compiler_id", "complaints", "job_count"]

_COMPLAINT = re.compile(r"\berror\b|undefined reference|unrecognized|No space left", re.IGNORECASE)


#: Seconds that a compiler which ran out of time has for an empty source, at most.
_PROBE_S = 10.0

#: Compilers that hung, also on an empty source, and the seconds that they had.
_hung: dict[tuple[str, ...], float] = {}


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
    """The path of the shared library of one C++ source, from the cache or freshly compiled.

    Raises `BuildError` when there is no compiler, or when it fails: with its output, the command, and the kept source.
    """
    entry, library = compiled(source, name=name, cfg=cfg)
    return entry.file(library)


def compile_library(source: str, *, name: str, cfg: Config) -> bytes:
    """As `compile_cpp`, the contents of the library, verified."""
    entry, library = compiled(source, name=name, cfg=cfg)
    try:
        return entry.read(library)
    except OSError as error:
        raise BuildError(f"the compiled kernel {name!r} cannot be read: {error}") from error


def compiled(source: str, *, name: str, cfg: Config) -> tuple[cache.Entry, str]:
    """As `compile_cpp`, the entry of the cache that has the library, and its name there."""
    tools = find_toolchain(cfg)
    stem = _file_stem(name)
    digest = cache.key({"kind": "cpp", "name": stem, "source": source, **tools.identity()})
    library = f"{stem}.so"
    try:
        store = cache.Cache.current(cfg)
        if (entry := store.get(digest)) is not None:
            return entry, library
        with store.lock(digest):
            # Whoever held the lock before us has probably made it.
            if (entry := store.get(digest)) is None:
                entry = _build(source, stem, digest, tools, cfg, store)
        return entry, library
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
        futures = [pool.submit(one, source) for source in sources]
        try:
            return [future.result() for future in futures]
        except Exception:
            raise
        except BaseException:  # Ctrl-C: nobody waits for what is being compiled
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


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


def _check_answers(tools: Toolchain, timeout_s: float) -> None:
    """Raises `BuildError` for a compiler that has hung in this process, unless it is given more time now."""
    had = _hung.get(tools.command)
    if had is not None and 0 < timeout_s <= had:
        name = shlex.join(tools.command)
        raise BuildError(f"the C++ compiler {name} hangs: it was stopped after {had:g} s, with an empty source too")


def _build(source: str, stem: str, digest: str, tools: Toolchain, cfg: Config, store: cache.Cache) -> cache.Entry:
    _check_answers(tools, cfg.build_timeout_s)
    folder = Path(tempfile.mkdtemp(prefix="build-", dir=scratch_dir()))
    start = time.perf_counter()
    try:
        (folder / f"{stem}.cpp").write_text(source, encoding="utf-8")
        # Two steps: -fopenmp at the link would add the compiler's own OpenMP library.
        compile_step = [*tools.command, *tools.compile_flags, "-c", f"{stem}.cpp", "-o", f"{stem}.o"]
        link_step = [*tools.command, f"{stem}.o", *tools.link_flags, "-o", f"{stem}.so"]
        for step, product in ((compile_step, f"{stem}.o"), (link_step, f"{stem}.so")):
            ran = _run(step, folder, tools, cfg.build_timeout_s)
            if ran.hung:
                _check_answers(tools, cfg.build_timeout_s)
            failure = ran.failure
            if failure is None and not (folder / product).is_file():
                failure = f"reported success but wrote no {product}"
            if failure is not None:
                kept = f"source kept in: {keep_source(source, stem, cfg.dump_dir)}"
                raise BuildError(
                    f"the C++ compiler {failure} on kernel {stem!r}\n"
                    f"  command: {shlex.join(step)}\n  {kept}\n  compiler: {tools.version}\n{ran.output}",
                    short=(*complaints(ran.output), kept),
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


def _run(command: list[str], folder: Path, tools: Toolchain, timeout_s: float) -> Finished:
    """Runs one compiler step."""
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}
    ran = run_command(command, timeout_s, folder=folder, environment=environment)
    if ran.hung and _hangs(tools, folder, timeout_s):
        _hung[tools.command] = timeout_s
    return ran


def _hangs(tools: Toolchain, folder: Path, timeout_s: float) -> bool:
    """Whether a compiler that ran out of time does so with an empty source too, and not only with a long one."""
    (folder / "empty.cpp").write_text("", encoding="utf-8")
    command = [*tools.command, "-c", "empty.cpp", "-o", "empty.o"]
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}
    return run_command(command, min(timeout_s, _PROBE_S), folder=folder, environment=environment).hung
