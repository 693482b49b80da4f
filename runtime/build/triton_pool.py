"""The processes of this one that compile Triton kernels, and the cache of single kernels, so that two graphs with one kernel compile it once.

Workers start while the graph is scheduled, stay for the next graph, and end with this process or after a while without work. Where Triton is
loaded already, a few kernels are compiled in this process. A process that finds all kernels in the cache never loads Triton.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...errors import BuildError, CacheError
from ..config import Config
from ..observe import counters
from .cache import Cache, key
from .compiler import job_count
from .manifest import Entry
from .scratch import keep_source, scratch_dir
from .triton_job import Binary, Job, compile_job

__all__ = [
    "compile_fitting",
    "compile_kernels",
    "compiler_identity",
    "has_triton",
    "job_key",
    "job_name",
    "start_workers",
]

MOST = 16  # workers, unless `build_jobs` says more: each holds some 150 MB
FEW = 2  # kernels for which no process is started where Triton is loaded already
_PACKAGE = Path(__file__).resolve().parents[2]
_SHAPING = (
    *sorted((_PACKAGE / "generated" / "kernels").glob("triton_*.py")),
    *(Path(__file__).with_name(name) for name in ("triton_job.py", "ptx.py")),
)
"""What kernels import, and what compiles them."""
_ENDED = "ended"  # what is said of a worker that ended by itself, without an answer

Run = Callable[[Job, Config, "Busy"], Binary | BuildError]


def compile_kernels(
    jobs: Sequence[Job], cfg: Config, on_done: Callable[[], None] = lambda: None
) -> list[Binary | BuildError]:
    """The binaries of kernels, in their order, out of the cache or compiled, several at once; for one that fails the error, with its source.

    on_done  is called after each, from the thread that waited for it.
    Raises `BuildError` where no folder takes what was compiled.
    """
    digests = [job_key(job) for job in jobs]
    try:
        store = Cache.current(cfg)
        made: dict[str, Binary | BuildError] = {}
        for digest in dict.fromkeys(digests):
            if (entry := store.get(digest)) is not None:
                made[digest] = _read(entry)
                on_done()
        missing = {d: job for d, job in zip(digests, jobs, strict=True) if d not in made}
        run = _how(len(missing))
        busy = Busy()

        def one(item: tuple[str, Job]) -> tuple[str, Binary | BuildError]:
            digest, job = item
            with store.lock(digest):
                # Whoever held the lock before has probably made it.
                if (entry := store.get(digest)) is not None:
                    found: Binary | BuildError = _read(entry)
                else:
                    found = run(job, cfg, busy)
                    if isinstance(found, Binary):
                        files = {"kernel.cubin": found.cubin, "kernel.py": job.source.encode()}
                        store.put(digest, files, found.meta)
            on_done()
            return digest, found

        made |= _each(one, list(missing.items()), 1 if run is _here else _workers(cfg), busy)
    except (OSError, CacheError) as error:
        raise BuildError(f"no folder takes the compiled kernels: {error}") from error
    return [made[d] for d in digests]


def compile_fitting(
    choices: Sequence[Sequence[Job]],
    shared: int,
    cfg: Config,
    on_done: Callable[[], None] = lambda: None,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[int, Binary]]:
    """For each kernel, of its configurations in order of preference, the first that compiles, needs no more than `shared` bytes of shared
    memory and is none of those that the device has `refused` (their `job_name`, and why): its number and its binary. Each that does not compile or
    fit is counted.

    Raises the `BuildError` of the first kernel with none, after all were tried; else as `compile_kernels`.
    """
    made: dict[int, tuple[int, Binary]] = {}
    failed: dict[int, BuildError] = {}
    number, left = 0, list(range(len(choices)))
    if refused:
        keys = [[job_name(job) for job in some] for some in choices]
        failed = {k: BuildError(refused[key]) for k, some in enumerate(keys) for key in some if key in refused}
        taken = [[n for n, key in enumerate(some) if key not in refused] for some in keys]
    else:
        taken = [[*range(len(some))] for some in choices]
    left = [k for k in left if taken[k]]
    while left:
        jobs = [choices[k][taken[k][number]] for k in left]
        for k, job, binary in zip(left, jobs, compile_kernels(jobs, cfg, on_done), strict=True):
            if isinstance(binary, Binary) and (needs := binary.meta["shared"]) > shared:
                binary = _failure(job, cfg, f"{job.name} needs {needs} bytes of shared memory, of {shared}")
            if isinstance(binary, Binary):
                made[k] = (taken[k][number], binary)
            else:
                failed[k] = binary
                counters.count_retry(str(binary).splitlines()[0])
        number += 1
        left = [k for k in left if k not in made and number < len(taken[k])]
    for k in range(len(choices)):
        if k not in made:
            raise failed[k]
    return [made[k] for k in range(len(choices))]


def start_workers(count: int, cfg: Config) -> None:
    """Start processes for some `count` kernels that are about to come, so that they are ready then."""
    if count > FEW or "triton" not in sys.modules:
        _pool().start(min(count, _workers(cfg)))


def has_triton() -> bool:
    """Whether there is what compiles the kernels. Does not load it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def compiler_identity() -> dict[str, str]:
    """What compiles the kernels, beside their source: parts of a cache key. Does not load Triton."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # installed under another name
        version = importlib.import_module("triton").__version__
    return {
        "compiler": f"triton {version}",
        "environment": "\n".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if _shapes(name)),
        "prelude": hashlib.sha256(b"".join(p.read_bytes() for p in _SHAPING)).hexdigest(),
    }


def _shapes(name: str) -> bool:
    """Whether a variable of the environment may change what Triton makes: its assembler, its libraries, its switches."""
    return name.startswith("TRITON_") and name not in ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET")


def job_name(job: Job) -> str:
    """What tells a kernel's configuration from all others; quicker than `job_key`."""
    return hashlib.sha256(repr(job).encode()).hexdigest()[:32]


def job_key(job: Job) -> str:
    """A digest of what shapes the binary. Comments and names do not: kernels of two graphs rarely have the same."""
    what = asdict(job) | {"kind": "triton", "source": _plain(job), "name": ""}
    return key({name: str(value) for name, value in what.items()} | compiler_identity())


def _plain(job: Job) -> str:
    """The source without comments, its function and arguments called by their positions."""
    head = re.search(rf"def {job.name}\((.*?)\)", job.source)
    assert head is not None
    names = [a.strip().partition(":")[0] for a in head[1].split(",")]
    table = {job.name: "_function"} | {name: f"_argument{k}" for k, name in enumerate(names) if not name.isupper()}
    text = re.sub(r"(?m)^[ \t]*#[^\n]*\n", "", job.source)
    return re.sub(r"\w+", lambda m: table.get(m.group(), m.group()), text)


def _read(entry: Entry) -> Binary:
    return Binary(entry.read("kernel.cubin"), dict(entry.meta))


def _workers(cfg: Config) -> int:
    return job_count(cfg) if cfg.build_jobs else min(job_count(cfg), MOST)


def _how(count: int) -> Run:
    """Who compiles `count` kernels. Starting a process costs as much as a kernel: it is not done for a few where Triton is loaded here."""
    few = count <= FEW and "triton" in sys.modules and not any(w.warm for w in _pool().waiting)
    return _here if few or not sys.executable else _elsewhere


def _each(
    f: Callable[[Any], tuple[str, Binary | BuildError]], items: list[Any], threads: int, busy: Busy
) -> dict[str, Binary | BuildError]:
    try:
        if len(items) <= 1 or threads <= 1:
            return dict(map(f, items))
        # Threads suffice: they wait for the processes that do the work.
        with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="opforge-triton") as executor:
            futures = [executor.submit(f, item) for item in items]
            try:
                return dict(future.result() for future in futures)
            except BaseException:  # nobody waits for what is being compiled
                executor.shutdown(wait=False, cancel_futures=True)
                busy.stop()
                raise
    except Exception:
        raise
    except BaseException:  # Ctrl-C: the workers that wait have nothing to wait for either
        _pool().close()
        raise


def _here(job: Job, cfg: Config, _: Busy) -> Binary | BuildError:
    try:
        return compile_job(job, _folder())
    except BuildError as error:
        return _failure(job, cfg, f"Triton does not compile {job.name}: {error}")


def _elsewhere(job: Job, cfg: Config, busy: Busy) -> Binary | BuildError:
    pool = _pool()
    worker = pool.take()
    answer = _asked(worker, job, cfg, busy)
    if answer == _ENDED:  # it had waited too long, and went as the question came
        worker = Worker()
        answer = _asked(worker, job, cfg, busy)
    if not isinstance(answer, dict):
        return _failure(job, cfg, f"Triton does not compile {job.name}: its process {answer}\n{worker.said()}")
    pool.give(worker)
    if "error" in answer:
        return _failure(job, cfg, f"Triton does not compile {job.name}: {answer['error']}")
    return Binary(base64.b64decode(answer["cubin"]), answer["meta"])


def _asked(worker: Worker, job: Job, cfg: Config, busy: Busy) -> dict[str, Any] | str:
    """The worker's answer, or what has happened to it instead: then it has ended."""
    busy.add(worker)
    answer: dict[str, Any] | str = "was stopped"
    try:
        answer = worker.ask(job, cfg.build_timeout_s)
    finally:
        busy.discard(worker)
        if not isinstance(answer, dict):
            worker.close()
    return answer


def _failure(job: Job, cfg: Config, what: str) -> BuildError:
    try:
        kept = f"source kept in: {keep_source(job.source, job.name[:64], cfg.dump_dir, 'py')}"
    except OSError as error:
        kept = f"source not kept: {error}"
    said = [line.strip() for line in what.strip().splitlines()[1:]]  # Triton's own message ends with what is wrong
    how = f"XBLOCK={job.xblock} RBLOCK={job.rblock} warps={job.warps} sm_{job.capability}"
    return BuildError(f"{what}\n  {how}; {kept}\n{job.source}", short=(*said[-3:], f"{how}; {kept}"))


def _folder() -> Path:
    folder = scratch_dir() / "triton"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class Busy:
    """The workers that compile for one call; after `stop` there are none."""

    def __init__(self) -> None:
        self.workers: set[Worker] = set()
        self.stopped = False
        self.lock = threading.Lock()

    def add(self, worker: Worker) -> None:
        """It is about to compile. After `stop` it is ended at once: a thread may have taken it while the others were being ended."""
        with self.lock:
            self.workers.add(worker)
            if self.stopped:
                worker.end()

    def discard(self, worker: Worker) -> None:
        """It has answered."""
        with self.lock:
            self.workers.discard(worker)

    def stop(self) -> None:
        """End them, and every one that is still to come."""
        with self.lock:
            self.stopped = True
            for worker in self.workers:
                worker.end()


class Worker:
    """One process that compiles, and the thread's end of its pipes."""

    warm = False  # it has answered before

    def __init__(self) -> None:
        """Raises `OSError` where no process can be started."""
        folder = _folder()
        self.errors = Path(tempfile.mkstemp(prefix="worker-", suffix=".txt", dir=folder)[1])
        # Its kernels are kept by opforge's cache, not by Triton's too.
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
        environment.pop("TRITON_INTERPRET", None)
        script, path = Path(__file__).with_name("triton_worker.py"), json.dumps([str(p) for p in sys.path])
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(_PACKAGE), str(folder), path, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # Ctrl-C is the parent's; and the tools that it runs end with it
            )

    def ask(self, job: Job, timeout_s: float) -> dict[str, Any] | str:
        """The answer, or what has happened to the process instead."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:  # it has ended
            return self._end()
        line = self._line(time.monotonic() + timeout_s if timeout_s else None)
        if line is None:
            return f"was stopped after {timeout_s:g} s"
        answer = json.loads(line) if line.endswith(b"\n") else self._end()
        assert isinstance(answer, dict | str)
        self.warm = True
        return answer

    def _line(self, deadline: float | None) -> bytes | None:
        """All up to the end of a line, or of the output; None when it is too late."""
        assert self.process.stdout is not None
        data = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not data.endswith(b"\n"):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not selector.select(left):
                    return None
                part = os.read(self.process.stdout.fileno(), 1 << 20)
                if not part:
                    break
                data += part
        return data

    def _end(self) -> str:
        try:
            status = self.process.wait(10)
        except subprocess.TimeoutExpired:
            return "closed its output"
        if status < 0:
            return f"was killed by signal {signal.Signals(-status).name}"
        return f"failed with exit status {status}" if status else _ENDED

    def said(self) -> str:
        """The end of what it wrote to its error output."""
        with contextlib.suppress(OSError):
            return self.errors.read_text(encoding="utf-8", errors="replace")[-4000:]
        return ""

    def end(self) -> None:
        """End it, with the tools that it runs."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it and let go of its pipes; for the thread that has it."""
        self.end()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what could not be written
                if pipe is not None:
                    pipe.close()


class Pool:
    """The workers of one process that wait for work."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.waiting: list[Worker] = []
        self.lock = threading.Lock()
        atexit.register(self.close)

    def start(self, count: int) -> None:
        """As many as `count` wait, or are starting. Where no process can be started nothing is said: that is told when it is needed."""
        with self.lock, contextlib.suppress(OSError):
            while len(self.waiting) < count:
                self.waiting.append(Worker())

    def take(self) -> Worker:
        """One that waits, or a new one. Raises `OSError` where no process can be started."""
        with self.lock:
            while self.waiting:
                worker = self.waiting.pop()
                if worker.process.poll() is None:
                    return worker
                worker.close()
        return Worker()

    def give(self, worker: Worker) -> None:
        """It waits for more."""
        with self.lock:
            self.waiting.append(worker)

    def close(self) -> None:
        """End the workers that wait."""
        if os.getpid() == self.owner:  # a forked child has no workers
            with self.lock:
                for worker in self.waiting:
                    worker.close()
                self.waiting.clear()


_pools: dict[int, Pool] = {}
_pools_lock = threading.Lock()


def _pool() -> Pool:
    with _pools_lock:
        if os.getpid() not in _pools:
            _pools[os.getpid()] = Pool()
        return _pools[os.getpid()]
