"""The same faults as in test_build_faults.py through `torch.compile`: one clear warning and eager's result, or an error with `strict`."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import opforge
from opforge.errors import BuildError, OpforgeWarning
from opforge.runtime import fallback
from opforge.runtime.build import cache as cache_module
from opforge.runtime.build import manifest as manifest_module
from opforge.runtime.build import scratch
from opforge.runtime.build.cache import Entry
from opforge.runtime.targets import cpu

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept sources and this process's cache go under the test's folder, and every warning can be seen again."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(scratch, "_dirs", {})
    monkeypatch.setattr(scratch, "_warned", set())
    monkeypatch.setattr(cache_module, "_opened", {})
    monkeypatch.setattr(fallback, "_warned", set())


def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y.add_(1)
    return torch.softmax(x * y, -1) + 0.25


def run(tmp_path: Path, **options: Any) -> tuple[list[str], dict[str, Any]]:
    """Compile and call, twice; every result and written input is eager's. Returns opforge's warnings and counts."""
    options = {"cache_dir": tmp_path / "cache", **options}
    opforge.reset_stats()
    with warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(2):
            torch._dynamo.reset()
            compiled = torch.compile(program, backend="opforge", fullgraph=True, options=options)
            for seed in (0, 1):
                x = torch.randn(5, 33, generator=torch.Generator().manual_seed(seed))
                ours, eager = torch.ones(33), torch.ones(33)
                torch.testing.assert_close(compiled(x, ours), program(x, eager))
                assert torch.equal(ours, eager)
    return [str(w.message) for w in seen if issubclass(w.category, OpforgeWarning)], opforge.stats()


def strictly(tmp_path: Path, **options: Any) -> BuildError:
    """The error of a strict compile: from `compile_fx` as it is, from `torch.compile` inside Dynamo's own."""
    options = {"cache_dir": str(tmp_path / "cache"), "strict": True, **options}
    x, y = torch.randn(5, 33), torch.ones(33)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(BackendCompilerFailed) as outer:
        torch.compile(program, backend="opforge", options=options)(x, y)
    assert type(outer.value.inner_exception) is BuildError
    with torch.no_grad(), pytest.raises(BuildError) as direct:
        opforge.compile_fx(torch.fx.symbolic_trace(program), [x, y], options=options)
    assert torch.equal(y, torch.ones(33))  # nothing was written before it was known
    text = str(outer.value)
    assert str(outer.value.inner_exception).splitlines()[0] in text
    return direct.value


def compiler(folder: Path, body: str) -> str:
    """A compiler that tells its version and otherwise runs `body`, shell text."""
    path = folder / "fake-g++"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "fake 1"; exit 0; fi\n{body}\n')
    path.chmod(0o755)
    return str(path)


# --- The compiler


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found, stats = run(tmp_path)
    assert found == [
        "opforge: no C++ compiler found (tried g++, clang++, c++); install g++, or name one by $CXX or the setting cxx; "
        "the graph runs eagerly (strict=True raises instead)"
    ]
    assert (stats["graphs"], sum(stats["fallbacks"].values())) == (0, 2)
    assert str(strictly(tmp_path)).startswith("no C++ compiler found")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'kernels.cpp:1:1: error: not today' >&2; exit 1", "the C++ compiler failed with exit status 1"),
        ("kill -9 $$", "the C++ compiler was killed by signal SIGKILL"),
        ("exit 0", "the C++ compiler reported success but wrote no kernels.o"),
    ],
)
def test_failing_compiler(tmp_path: Path, body: str, message: str) -> None:
    cxx = compiler(tmp_path, body)
    (only,), stats = run(tmp_path, cxx=cxx)
    head, *below = only.splitlines()
    assert head == f"opforge: {message} on kernel 'kernels'; the graph runs eagerly (strict=True raises instead)"
    assert below[:-1] == (["  kernels.cpp:1:1: error: not today"] if "not today" in body else [])
    assert Path(below[-1].removeprefix("  source kept in: ")).is_file()
    assert stats["graphs"] == 0
    error = str(strictly(tmp_path, cxx=cxx))
    assert error.startswith(message)
    assert ("error: not today" in error) == ("not today" in body)
    kept = re.search(r"source kept in: (.*)\n", error)
    assert kept is not None
    assert "v_add(" in Path(kept[1]).read_text()


def test_source_is_kept_though_the_dump_folder_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = {"cxx": compiler(tmp_path, "echo broken; exit 1"), "dump_dir": str(tmp_path / "file" / "dump")}
    with pytest.warns(OpforgeWarning, match=r"cannot (keep a source in|write the stages)"):
        error = str(strictly(tmp_path, **options))
    assert error.endswith("broken\n")
    assert Path(re.search(r"source kept in: (.*)\n", error)[1]).is_file()  # type: ignore[index]


def test_no_temporary_folder_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    (only,), stats = run(tmp_path)
    assert re.search(r"no folder takes the compiled .*No space left on device; the graph runs eagerly", only)
    assert stats["graphs"] == 0
    assert "No space left" in str(strictly(tmp_path))


# --- The cache


def _replaced(path: Path, data: bytes) -> None:
    """New contents in a new file: the old one may be mapped into this process."""
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o600)


def _entries(tmp_path: Path, name: str) -> list[Path]:
    return sorted((tmp_path / "cache").rglob(name))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "library cut off": lambda e: _replaced(e / "kernels.so", (e / "kernels.so").read_bytes()[:1000]),
    "wrapper changed": lambda e: _replaced(e / "wrapper.py", b"def call(*args): return args\n"),
    "no wrapper": lambda e: (e / "wrapper.py").unlink(),
    "manifest is garbage": lambda e: _replaced(e / "manifest.json", b"\xff{"),
    "folder writable by all": lambda e: e.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_graph_is_made_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    assert run(tmp_path)[0] == []
    (wrapper,) = _entries(tmp_path, "wrapper.py")
    good = wrapper.read_bytes()
    damage(wrapper.parent)
    (only,), stats = run(tmp_path)
    assert only.startswith("a damaged entry of opforge's cache is made again: ")
    assert (stats["graphs"], stats["cache_hits"], stats["fallbacks"]) == (2, 1, {})
    assert wrapper.read_bytes() == good


def test_library_that_does_not_load_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a folder that is mounted noexec."""
    load = cpu.load_file

    def refused(entry: Entry, file: str) -> Any:
        if entry.path.is_relative_to(tmp_path / "cache"):
            raise BuildError(f"the compiled kernel {entry.path} cannot be loaded: failed to map segment")
        return load(entry, file)

    monkeypatch.setattr(cpu, "load_file", refused)
    (only,), stats = run(tmp_path)
    assert "failed to map segment; it is compiled again, for this process only" in only
    assert (stats["graphs"], stats["fallbacks"]) == (2, {})


@pytest.mark.parametrize("file", ["kernels.so", "wrapper.py"])
def test_what_is_changed_after_the_check_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Another file takes the place of one of an entry that has been verified already."""
    find = cache_module.Cache.get
    changed: list[Path] = []

    def found(self: cache_module.Cache, key: str) -> Entry | None:
        entry = find(self, key)
        if (
            entry is not None
            and "wrapper.py" in entry.files
            and not changed
            and self.root.is_relative_to(tmp_path / "cache")
        ):
            changed.append(entry.file(file))
            _replaced(changed[0], b"import os; os._exit(3)\n")
        return entry

    monkeypatch.setattr(cache_module.Cache, "get", found)
    messages, stats = run(tmp_path)
    assert len(changed) == 1
    assert all("compiled again" in m or "made again" in m for m in messages)
    assert (stats["graphs"], stats["fallbacks"]) == (2, {})


def test_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (only,), stats = run(tmp_path, cache_dir=tmp_path / "file" / "cache")
    assert re.search(
        r"cannot use \S*file/cache as opforge's cache: .*; compiled code is kept for this process only", only
    )
    assert (stats["graphs"], stats["cache_hits"], stats["fallbacks"]) == (2, 1, {})


def test_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = manifest_module._write_synced

    def full(path: Path, data: bytes) -> None:
        if path.is_relative_to(tmp_path / "cache"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(manifest_module, "_write_synced", full)
    (only,), stats = run(tmp_path)
    assert "does not take new entries" in only
    assert (stats["graphs"], stats["cache_hits"], stats["fallbacks"]) == (2, 1, {})


# --- Several processes

CHILD = """
import json, sys, warnings
import torch, opforge
def program(x, y):
    return torch.softmax(x * y, -1) + 0.25
x, y = torch.linspace(-3, 3, 99).view(3, 33), torch.linspace(0, 2, 33)
torch.compile(lambda x: x + 1, backend="eager")(x)  # Dynamo is loaded before the start
warnings.simplefilter("error", opforge.errors.OpforgeWarning)
print("ready", flush=True)
sys.stdin.readline()
with torch.no_grad():
    error = (torch.compile(program, backend="opforge", fullgraph=True)(x, y) - program(x, y)).abs().max()
    stats = opforge.stats()
print(json.dumps({"error": float(error), "kernels": stats["kernels"], "fallbacks": stats["fallbacks"]}))
"""


def test_two_processes_compile_the_same_graph_at_once(tmp_path: Path) -> None:
    """Both are right, the compiler ran once, and there is one artifact of each kind."""
    cxx = compiler(tmp_path, f'echo x >> {tmp_path}/runs; sleep 0.5; exec g++ "$@"')
    own = {"OPFORGE_CXX": cxx, "OPFORGE_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "temporary")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD], env={**os.environ, **own}, cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload]
        for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n", child.stderr.read()
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        for child in children:
            out, err = child.communicate(timeout=120)
            assert child.returncode == 0, err
            found = json.loads(out)
            assert found["error"] < 1e-6
            assert (found["kernels"], found["fallbacks"]) == (1, {})
    finally:
        for child in children:
            child.kill()
    assert len((tmp_path / "runs").read_text().split()) == 2  # one compile and one link
    assert len(_entries(tmp_path, "wrapper.py")) == 1
    assert len(_entries(tmp_path, "manifest.json")) == 2  # the library, and the graph that uses it
    assert list((tmp_path / "cache").rglob("tmp-*")) == []


# --- What a machine may lack

_PROGRAM = """
import sys, warnings
{before}
import torch, opforge

def program(x):
    return torch.sin(x) * 2 + "naïve – ünïcode".count("n")

warnings.simplefilter("error")
{call}
assert torch.allclose(torch.compile(program, backend="opforge")(torch.ones(4)), program(torch.ones(4)))
assert not opforge.stats()["fallbacks"], opforge.stats()["fallbacks"]
"""


def _in_a_process(tmp_path: Path, source: str, environment: dict[str, str], *options: str) -> str:
    file = tmp_path / "program.py"
    file.write_text(source, encoding="utf-8")
    command = [sys.executable, *options, str(file)]
    ran = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stderr.decode(errors="replace")
    return ran.stderr.decode(errors="replace")


def test_an_ascii_locale(tmp_path: Path) -> None:
    """The C++ prelude was read by the locale's encoding: a UnicodeDecodeError, and every graph ran eagerly."""
    ascii_ = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "OPFORGE_CACHE_DIR": str(tmp_path / "cache"),
    }
    for _ in range(2):  # made, and found in the cache
        _in_a_process(tmp_path, _PROGRAM.format(before="", call=""), ascii_, "-X", "utf8=0")


def test_without_platformdirs(tmp_path: Path) -> None:
    """No module that is needed only for the place of the cache may stand in the way: one warning says what to install."""
    before = "sys.modules['platformdirs'] = None"
    call = "warnings.filterwarnings('default', message='.*pip install platformdirs.*')"
    environment = {"OPFORGE_CACHE_DIR": ""}
    said = _in_a_process(tmp_path, _PROGRAM.format(before=before, call=call), environment)
    assert said.count("pip install platformdirs") == 1, said
