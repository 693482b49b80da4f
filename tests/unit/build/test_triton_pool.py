"""Triton kernels compiled in other processes: the same binaries, once each, and a clear error whatever happens to a worker. Needs no GPU."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from opforge.errors import BuildError
from opforge.runtime.build import triton_pool
from opforge.runtime.build.triton_job import Binary, Job
from opforge.runtime.build.triton_pool import Pool, Worker, compile_kernels
from opforge.runtime.config import Config

SOURCE = """\
import triton
import triton.language as tl

import opforge.generated.kernels.triton_prelude as tp


@triton.jit
def {name}({x}, {y}, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    # model.py:{line}
    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store({y} + at, {body}, at < 1000)
"""


def job(name: str = "k", x: str = "x", y: str = "y", line: int = 1, body: str = "tl.load({x} + at) + 1") -> Job:
    source = SOURCE.format(name=name, x=x, y=y, line=line, body=body.format(x=x))
    return Job(name, source, ("fp32", "fp32"), 0, 256, 1, 1, 90)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Workers of this test alone, and used also for few kernels."""
    made = Pool()
    monkeypatch.setattr(triton_pool, "_pool", lambda: made)
    monkeypatch.setattr(triton_pool, "FEW", 0)
    yield made
    made.close()


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return Config(cache_dir=str(tmp_path / "cache"), dump_dir=str(tmp_path / "dump"), build_jobs=2)


def binaries(found: list[Binary | BuildError]) -> list[Binary]:
    assert all(isinstance(b, Binary) for b in found), found
    return [b for b in found if isinstance(b, Binary)]


def test_compiled_once_by_content(pool: Pool, cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []
    ask = Worker.ask
    monkeypatch.setattr(Worker, "ask", lambda worker, job, s: asked.append(job) or ask(worker, job, s))
    done: list[int] = []
    two = job(body="tl.load({x} + at) * 2")
    same, other = binaries(compile_kernels([job(), two], cfg, lambda: done.append(1)))
    assert same.cubin[:4] == b"\x7fELF"
    assert same.cubin != other.cubin
    assert same.meta == {"name": "k", "shared": 0, "warps": 1}
    assert (len(asked), len(done), len(pool.waiting)) == (2, 2, 2)
    # Other names and another place in the model: the same kernel, also of another graph and after a restart.
    renamed = job("another", "buffer_7", "out", line=12)
    assert binaries(compile_kernels([renamed, two, renamed], cfg)) == [same, other, same]
    assert len(asked) == 2
    # Block sizes, warps, capability and alignment shape the binary.
    changes = [{"xblock": 512}, {"warps": 2}, {"capability": 80}, {"aligned": False}]
    binaries(compile_kernels([dataclasses.replace(two, **change) for change in changes], cfg))
    assert len(asked) == 6


def test_same_binary_here_and_there(pool: Pool, cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    there = binaries(compile_kernels([job()], cfg))
    pool.close()
    monkeypatch.setattr(triton_pool, "FEW", 2)
    monkeypatch.setitem(sys.modules, "triton", __import__("triton"))
    here = binaries(compile_kernels([job()], dataclasses.replace(cfg, cache=False)))
    assert pool.waiting == []
    assert here[0].meta == there[0].meta
    assert len(here[0].cubin) == len(there[0].cubin)  # the path of the source is in it


def test_error_has_the_source_and_its_place(pool: Pool, cfg: Config) -> None:
    wrong = job("wrong", body="tl.load({x} + att)")
    found = compile_kernels([wrong, job()], cfg)
    assert isinstance(found[0], BuildError)
    text = str(found[0])
    assert text.startswith("Triton does not compile wrong: CompilationError: at 4:")
    assert "NameError('att is not defined')" in text
    assert "XBLOCK=256 RBLOCK=1 warps=1 sm_90; source kept in: " in text
    assert text.endswith(wrong.source)
    (kept,) = Path(cfg.dump_dir).iterdir()
    assert kept.read_text() == wrong.source
    assert isinstance(found[1], Binary)
    assert len(pool.waiting) == 2  # it goes on working


def died(worker: Worker, how: str) -> None:
    """Make a worker do something else than to answer."""
    worker.close()
    code = (
        f"import os, signal, sys, time; sys.stdin.readline(); print('last words', file=sys.stderr, flush=True); {how}"
    )
    with worker.errors.open("wb") as errors:
        worker.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process was killed by signal SIGSEGV\nlast words\n"),
        ("sys.exit(3)", "its process failed with exit status 3\nlast words\n"),
        ("time.sleep(100)", "its process was stopped after 0.5 s\nlast words\n"),
        ("print('{', end='', flush=True); sys.exit(3)", "its process failed with exit status 3\nlast words\n"),
    ],
)
def test_worker_that_dies(pool: Pool, cfg: Config, how: str, told: str) -> None:
    pool.start(1)
    died(pool.waiting[0], how)
    (found,) = compile_kernels([job()], dataclasses.replace(cfg, build_timeout_s=0.5))
    assert isinstance(found, BuildError)
    assert told in str(found)
    *said, how = found.short
    assert said == ["last words"]
    assert how.startswith("XBLOCK=256 RBLOCK=1 warps=1 sm_90; source kept in: ")
    assert pool.waiting == []
    binaries(compile_kernels([job()], cfg))  # the next one is another


def test_worker_that_went_for_want_of_work(pool: Pool, cfg: Config) -> None:
    pool.start(1)
    died(pool.waiting[0], "sys.exit(0)")
    binaries(compile_kernels([job()], cfg))
    (worker,) = pool.waiting
    worker.close()
    binaries(compile_kernels([job(body="tl.load({x} + at) * 2")], cfg))


def test_no_process_can_be_started(pool: Pool, cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    pool.start(1)
    with pytest.raises(BuildError, match="/no/such/python"):
        compile_kernels([job()], cfg)
    monkeypatch.setattr(sys, "executable", "")  # Python inside another program
    binaries(compile_kernels([job()], cfg))


def test_interrupt_ends_what_runs(pool: Pool, cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.start(3)
    for worker in pool.waiting:
        died(worker, "time.sleep(100)")
    processes = [worker.process for worker in pool.waiting]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_kernels([job(), job(body="tl.load({x} + at) * 2")], cfg)
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 10
    assert pool.waiting == []
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 3, "also the one that waited"


def test_worker_that_is_taken_while_the_others_are_ended(pool: Pool, cfg: Config) -> None:
    pool.start(1)
    (worker,) = pool.waiting
    busy = triton_pool.Busy()
    busy.stop()
    found = triton_pool._elsewhere(job(), cfg, busy)
    assert isinstance(found, BuildError)
    assert "was killed by signal SIGKILL" in str(found)
    assert worker.process.returncode == -signal.SIGKILL


PARENT = """
import sys
sys.path.insert(0, {parent!r})
from opforge.runtime.build.triton_job import Job
from opforge.runtime.build.triton_pool import _pool, compile_kernels, start_workers
from opforge.runtime.config import Config
start_workers(1, cfg := Config(cache_dir={cache!r}))
print(_pool().waiting[0].process.pid, flush=True)
job = Job("k", {source!r}, ("fp32", "fp32"), 0, 256, 1, 1, 90)
print([len(b.cubin) > 1000 for b in compile_kernels([job], cfg)], "triton" in sys.modules, flush=True)
{last}
"""


def parent(tmp_path: Path, last: str = "") -> str:
    text = PARENT.format(
        parent=str(Path(triton_pool.__file__).parents[3]), cache=str(tmp_path), source=job().source, last=last
    )
    return textwrap.dedent(text)


def gone(pid: int) -> bool:
    """Within a few seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("way", ["stdin", "-c"])
def test_any_parent_will_do(tmp_path: Path, way: str) -> None:
    """No file, no guard of the main module; and the parent does not load Triton."""
    code = parent(tmp_path)
    command = [sys.executable, "-c", code] if way == "-c" else [sys.executable, "-"]
    done = subprocess.run(
        command, input="" if way == "-c" else code, capture_output=True, text=True, cwd="/", check=False
    )
    assert done.stderr == ""
    pid, result = done.stdout.splitlines()
    assert result == "[True] False"
    assert gone(int(pid))


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    """Also where a forked child keeps the pipes open, and while the worker works."""
    last = "import os, time\nchild = os.fork()\nprint(child, flush=True) if child else None\ntime.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", parent(tmp_path, last)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    assert process.stdout.readline() == "[True] False\n"
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(worker)
    os.kill(child, signal.SIGKILL)
