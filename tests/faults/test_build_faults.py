"""What goes wrong around building: no compiler, failing compilers, damaged, foreign, full or shared caches.

Every case ends with the right result or a `BuildError` that says what to do; never a wrong kernel, never a traceback of
something else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from opforge.errors import BuildError, CacheError, OpforgeWarning
from opforge.runtime.build import cache as cache_module
from opforge.runtime.build import compiler as compiler_module
from opforge.runtime.build import manifest as manifest_module
from opforge.runtime.build import scratch
from opforge.runtime.build.cache import Cache, key
from opforge.runtime.build.compiler import Source, compile_cpp, compile_many
from opforge.runtime.config import Config
from opforge.runtime.execute.load import build_library, load_library

SOURCE = 'extern "C" __attribute__((visibility("default"))) int number() { return 7; }\n'
KEY = key({"a": "1"})


@pytest.fixture
def cfg(tmp_path):
    return Config(cache_dir=str(tmp_path / "cache"), opt_level="0")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    """Kept sources and this process's cache go under the test's folder, and every warning can be seen again."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(scratch, "_dirs", {})
    monkeypatch.setattr(scratch, "_warned", set())
    monkeypatch.setattr(cache_module, "_opened", {})
    monkeypatch.setattr(compiler_module, "_hung", {})


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def one_warning(match):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert len(seen) == 1, [str(w.message) for w in seen]
    assert seen[0].category is OpforgeWarning
    assert re.search(match, str(seen[0].message)), str(seen[0].message)


def fake_compiler(folder, body):
    """A compiler that tells its version and otherwise runs `body`, shell text."""
    path = folder / "fake-g++"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "fake $$"; exit 0; fi\n{body}\n')
    path.chmod(0o755)
    return str(path)


def number(cfg, name="k"):
    return load_library(compile_cpp(SOURCE, name=name, cfg=cfg)).number()


# --- The compiler


def test_no_compiler(cfg, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError) as caught:
        compile_cpp(SOURCE, name="k", cfg=cfg)
    assert str(caught.value) == (
        "no C++ compiler found (tried g++, clang++, c++); install g++, or name one by $CXX or the setting cxx"
    )


def test_compiler_setting_that_does_not_exist(cfg):
    with pytest.raises(BuildError, match=r"the setting cxx names 'g\+\+-99', which is not on PATH"):
        compile_cpp(SOURCE, name="k", cfg=dataclasses.replace(cfg, cxx="g++-99"))


def test_compiler_that_is_no_program(cfg, tmp_path):
    (tmp_path / "cxx").write_bytes(b"\x7fno program")
    (tmp_path / "cxx").chmod(0o755)
    with pytest.raises(BuildError, match=r"cxx does not run: .*Exec format error"):
        compile_cpp(SOURCE, name="k", cfg=dataclasses.replace(cfg, cxx=str(tmp_path / "cxx")))


def test_compiler_that_cannot_tell_its_version(cfg, tmp_path):
    (tmp_path / "cxx").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "cxx").chmod(0o755)
    with pytest.raises(BuildError, match=r"cxx --version exits with 1: no output"):
        compile_cpp(SOURCE, name="k", cfg=dataclasses.replace(cfg, cxx=str(tmp_path / "cxx")))


def test_flags_that_are_no_shell_words(cfg):
    with pytest.raises(BuildError, match=r"the setting cxx_flags cannot be read as shell words: \"-D'x\""):
        compile_cpp(SOURCE, name="k", cfg=dataclasses.replace(cfg, cxx_flags="-D'x"))


def test_source_that_does_not_compile(cfg):
    bad = "int f() { return undeclared_name; }\n"
    with pytest.raises(BuildError) as caught:
        compile_cpp(bad, name="my kernel", cfg=cfg)
    text = str(caught.value)
    assert "failed with exit status 1 on kernel 'my_kernel'" in text
    assert "undeclared_name" in text
    assert re.search(r"command: \S*g\+\+ -std=c\+\+20 -O0 .* -c my_kernel\.cpp -o my_kernel\.o\n", text)
    kept = Path(re.search(r"source kept in: (.*)\n", text)[1])
    assert kept.read_text() == bad
    assert kept.parent.name.startswith("opforge-failed-")
    assert list(Path(cfg.cache_dir).rglob("manifest.json")) == []
    assert number(cfg) == 7  # the lock is free and the cache in order


def test_source_is_kept_in_the_dump_folder(cfg, tmp_path):
    cfg = dataclasses.replace(cfg, dump_dir=str(tmp_path / "dump" / "here"))
    for _ in range(2):
        with pytest.raises(BuildError, match=re.escape(str(tmp_path / "dump" / "here"))):
            compile_cpp("wrong", name="k", cfg=cfg)
    assert len(list((tmp_path / "dump" / "here").iterdir())) == 1


def test_missing_symbol_is_found_at_the_link(cfg):
    with pytest.raises(BuildError, match=r"undefined reference to `absent'"):
        compile_cpp('extern "C" int absent(); int f() { return absent(); }', name="k", cfg=cfg)


def test_unsupported_flag(cfg):
    with pytest.raises(BuildError, match="no-such-option"):
        compile_cpp(SOURCE, name="k", cfg=dataclasses.replace(cfg, cxx_flags="-fno-such-option-at-all"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("exit 3", "failed with exit status 3"),
        ("exit 0", r"reported success but wrote no k\.o"),
        ("kill -9 $$", "was killed by signal SIGKILL"),
        (r"printf '\377\376'; exit 1", "failed with exit status 1"),
    ],
)
def test_compiler_that_misbehaves(cfg, tmp_path, body, message):
    with pytest.raises(BuildError, match=message):
        compile_cpp(SOURCE, name="k", cfg=dataclasses.replace(cfg, cxx=fake_compiler(tmp_path, body)))


def test_compiler_that_hangs_is_stopped_with_its_children(cfg, tmp_path):
    cxx = fake_compiler(tmp_path, f"sleep 600 & echo $! > {tmp_path}/child; wait")
    start = time.monotonic()
    with pytest.raises(BuildError, match=r"was stopped after 0\.5 s"):
        compile_cpp(SOURCE, name="k", cfg=dataclasses.replace(cfg, cxx=cxx, build_timeout_s=0.5))
    assert time.monotonic() - start < 30
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().split(")")[1].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("the compiler's child still runs")


def test_compiler_that_vanishes(cfg, tmp_path):
    cxx = fake_compiler(tmp_path, 'exec g++ "$@"')
    words = dataclasses.replace(cfg, cxx=f"env {cxx}")  # `env` stays, what it runs goes
    assert number(words) == 7
    os.unlink(cxx)
    with pytest.raises(BuildError, match="failed with exit status 127"):
        compile_cpp(SOURCE, name="other", cfg=words)


def test_one_failure_among_many(cfg):
    sources = [Source(SOURCE, "a"), Source("wrong", "b"), Source(SOURCE, "c")]
    with pytest.raises(BuildError, match="on kernel 'b'"):
        compile_many(sources, cfg=dataclasses.replace(cfg, build_jobs=2))
    with no_warning():
        assert [number(cfg, n) for n in "ac"] == [7, 7]


def test_no_temporary_folder_at_all(cfg, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(BuildError, match=r"no folder takes the compiled kernel 'k': .*No space left"):
        compile_cpp(SOURCE, name="k", cfg=cfg)


# --- Entries of the cache


def _truncate(entry):
    with open(entry / "k.so", "r+b") as file:
        file.truncate(1000)


def _flip(entry):
    data = bytearray((entry / "k.so").read_bytes())
    data[len(data) // 2] ^= 1
    (entry / "k.so").write_bytes(data)


def _edit(entry, change):
    manifest = json.loads((entry / "manifest.json").read_text())
    change(manifest)
    manifest.pop("sha256")
    (entry / "manifest.json").write_text(json.dumps({**manifest, "sha256": manifest_module._digest(manifest)}))


def _edit_without_digest(entry):
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["meta"]["seconds"] = -1
    (entry / "manifest.json").write_text(json.dumps(manifest))


def _outside(manifest):
    manifest["files"]["../../../x"] = manifest["files"].pop("k.so")


def _link(entry):
    os.rename(entry / "k.so", entry.parent / "moved.so")
    os.symlink(entry.parent / "moved.so", entry / "k.so")


def _link_folder(entry):
    os.rename(entry, entry.parent / "moved")
    os.symlink(entry.parent / "moved", entry)


def _plain_file(entry):
    shutil.rmtree(entry)
    entry.write_bytes(b"")


def _folder_for_file(entry):
    os.unlink(entry / "k.so")
    (entry / "k.so").mkdir()


DAMAGE = {
    "truncated library": _truncate,
    "one bit of the library": _flip,
    "empty library": lambda e: (e / "k.so").write_bytes(b""),
    "no library": lambda e: (e / "k.so").unlink(),
    "library is a link": _link,
    "library is a folder": _folder_for_file,
    "library writable by all": lambda e: (e / "k.so").chmod(0o666),
    "manifest writable by group": lambda e: (e / "manifest.json").chmod(0o660),
    "folder writable by all": lambda e: e.chmod(0o777),
    "no manifest": lambda e: (e / "manifest.json").unlink(),
    "empty manifest": lambda e: (e / "manifest.json").write_text(""),
    "manifest garbage": lambda e: (e / "manifest.json").write_bytes(b"\xff\x00garbage"),
    "manifest is a list": lambda e: (e / "manifest.json").write_text("[1, 2]"),
    "manifest is nested deeply": lambda e: (e / "manifest.json").write_text("[" * 200_000),
    "manifest edited": _edit_without_digest,
    "manifest of another key": lambda e: _edit(e, lambda m: m.update(key="0" * 64)),
    "manifest of another format": lambda e: _edit(e, lambda m: m.update(format=99)),
    "manifest without files": lambda e: _edit(e, lambda m: m.pop("files")),
    "manifest with wrong files": lambda e: _edit(e, lambda m: m.update(files={"k.so": 3})),
    "manifest that points outside": lambda e: _edit(e, _outside),
    "entry is a link": _link_folder,
    "entry is a file": _plain_file,
    "entry is empty": lambda e: (shutil.rmtree(e), e.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_entry_is_made_again_with_one_warning(cfg, damage):
    path = compile_cpp(SOURCE, name="k", cfg=cfg)
    good = path.read_bytes()
    damage(path.parent)
    with one_warning("a damaged entry of opforge's cache is made again"):
        again = compile_cpp(SOURCE, name="k", cfg=cfg)
        assert compile_cpp(SOURCE, name="k", cfg=cfg) == again
    assert again == path
    assert again.read_bytes() == good
    assert [p.name for p in Path(cfg.cache_dir, "v1").iterdir() if p.name.startswith("tmp-")] == []
    assert load_library(again).number() == 7


def test_entry_of_another_user(cfg, monkeypatch):
    path = compile_cpp(SOURCE, name="k", cfg=cfg)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with one_warning(r"k\.so belongs to user 12345, not to user 0"):
            assert number(cfg) == 7
        assert path.stat().st_uid == 0
    else:
        cache = Cache.current(cfg)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with one_warning("not to user 12345"):
            assert cache.get(path.parent.name) is None


def test_library_that_passes_its_digest_but_does_not_load(cfg):
    path = compile_cpp(SOURCE, name="k", cfg=cfg)
    (path.parent / "k.so").write_bytes(b"not ELF")

    def listed(manifest):
        manifest["files"]["k.so"] = {"bytes": 7, "sha256": hashlib.sha256(b"not ELF").hexdigest()}

    _edit(path.parent, listed)
    with one_warning("cannot be loaded: .*; it is compiled again, for this process only"):
        assert build_library(SOURCE, name="k", cfg=cfg).number() == 7


# --- The folder of the cache


def test_cache_folder_that_cannot_be_made(tmp_path, cfg):
    (tmp_path / "file").write_bytes(b"")
    cfg = dataclasses.replace(cfg, cache_dir=str(tmp_path / "file" / "cache"))
    with one_warning(r"cannot use \S*file/cache as opforge's cache: .*kept for this process only"):
        path = compile_cpp(SOURCE, name="k", cfg=cfg)
        assert compile_cpp(SOURCE, name="k", cfg=cfg) == path  # made once all the same
        assert number(cfg, "other") == 7
    assert path.is_relative_to(scratch.scratch_dir())
    with pytest.raises(CacheError):
        Cache(Path(cfg.cache_dir))


@pytest.mark.skipif(os.geteuid() == 0, reason="C15: root writes everywhere")
def test_cache_folder_that_is_read_only(tmp_path, cfg):
    (tmp_path / "cache").mkdir(mode=0o500)
    with one_warning("Permission denied"):
        assert number(cfg) == 7


def test_cache_folder_that_others_can_write(cfg):
    compile_cpp(SOURCE, name="k", cfg=cfg)
    Path(cfg.cache_dir, "v1").chmod(0o777)
    cache_module._opened.clear()
    with one_warning(r"can be written by other users \(mode 0777\)"):
        path = compile_cpp(SOURCE, name="k", cfg=cfg)
    assert path.is_relative_to(scratch.scratch_dir())


@pytest.mark.parametrize("open_folder", ["", "..", "../..", "v1/locks"])
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_folder_of_the_cache_that_others_can_write(cfg, tmp_path, open_folder, mode):
    cfg = dataclasses.replace(cfg, cache_dir=str(tmp_path / "a" / "b" / "cache"))
    compile_cpp(SOURCE, name="k", cfg=cfg)
    Path(os.path.normpath(Path(cfg.cache_dir, open_folder))).chmod(mode)
    cache_module._opened.clear()
    with one_warning(
        rf"can be written by other users \(mode {mode:04o}\); compiled code is kept for this process only"
    ):
        path = compile_cpp(SOURCE, name="k", cfg=cfg)
        assert number(cfg, "other") == 7
    assert path.is_relative_to(scratch.scratch_dir())


def test_folder_of_entries_that_others_can_write(cfg):
    shared = compile_cpp(SOURCE, name="k", cfg=cfg).parents[1]
    shared.chmod(0o777)
    with one_warning(r"can be written by other users \(mode 0777\); compiled code is kept for this process only"):
        path = compile_cpp(SOURCE, name="k", cfg=cfg)
        assert compile_cpp(SOURCE, name="k", cfg=cfg) == path
    assert path.is_relative_to(scratch.scratch_dir())


def test_cache_behind_a_link_in_a_folder_that_others_can_write(cfg, tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(tmp_path / "private")
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "first").symlink_to("open/link")
    with one_warning(r"/open can be written by other users \(mode 0777\)"):
        assert number(dataclasses.replace(cfg, cache_dir=str(tmp_path / "first" / "cache"))) == 7
    assert list((tmp_path / "private").iterdir()) == []


def test_parent_of_another_user(cfg, monkeypatch, tmp_path):
    look = os.lstat

    def foreign(path, **options):
        info = look(path, **options)
        values = list(info)
        values[4] = os.geteuid() + 1
        return os.stat_result(values) if Path(path) == tmp_path else info

    monkeypatch.setattr(os, "lstat", foreign)
    with one_warning(r"belongs to user \d+, neither to user \d+ nor to root"):
        assert number(cfg) == 7


def test_sticky_parent_is_trusted(cfg, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    cfg = dataclasses.replace(cfg, cache_dir=str(tmp_path / "shared" / "cache"))
    with no_warning():
        assert compile_cpp(SOURCE, name="k", cfg=cfg).is_relative_to(cfg.cache_dir)


def test_temporary_folder_that_everybody_can_write_keeps_code_for_the_process(cfg, tmp_path):
    (tmp_path / "temporary").chmod(0o777)
    with no_warning():
        assert number(dataclasses.replace(cfg, cache=False)) == 7


def test_disk_that_is_full(cfg, monkeypatch):
    write = manifest_module._write_synced

    def full(path, data):
        if path.is_relative_to(cfg.cache_dir):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(manifest_module, "_write_synced", full)
    with one_warning("does not take new entries: .*No space left on device"):
        path = compile_cpp(SOURCE, name="k", cfg=cfg)
        assert compile_cpp(SOURCE, name="k", cfg=cfg) == path
        assert number(cfg, "other") == 7
    assert list(Path(cfg.cache_dir).rglob("tmp-*")) == []


def test_cache_that_is_emptied_meanwhile(cfg):
    path = compile_cpp(SOURCE, name="k", cfg=cfg)
    shutil.rmtree(cfg.cache_dir)
    with no_warning():
        assert compile_cpp(SOURCE, name="k", cfg=cfg) == path
    assert load_library(path).number() == 7


def test_file_system_without_locks(cfg, monkeypatch):
    def refused(self, *args, **kwargs):
        raise NotImplementedError

    monkeypatch.setattr("filelock.FileLock.acquire", refused)
    with no_warning():
        assert number(cfg) == 7


# --- Several processes

CHILD = """
import sys
from opforge.runtime.build.compiler import compile_cpp
from opforge.runtime.config import Config
from opforge.runtime.execute.load import load_library
print("ready", flush=True)
sys.stdin.readline()
path = compile_cpp(sys.argv[1], name="k", cfg=Config(cache_dir=sys.argv[2], cxx=sys.argv[3], opt_level="0"))
print(path, load_library(path).number())
"""


def start_child(cfg):
    arguments = [sys.executable, "-c", CHILD, SOURCE, cfg.cache_dir, cfg.cxx]
    return subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


def test_two_processes_at_once_make_one_artifact(cfg, tmp_path):
    cfg = dataclasses.replace(cfg, cxx=fake_compiler(tmp_path, f'echo x >> {tmp_path}/runs; sleep 0.3; exec g++ "$@"'))
    # The fake version line has a process id, so that each would have its own key: make it the same for both.
    Path(cfg.cxx).write_text(Path(cfg.cxx).read_text().replace("fake $$", "fake 1"))
    children = [start_child(cfg), start_child(cfg)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    results = [child.communicate(timeout=60) for child in children]
    assert results[0] == results[1]
    assert results[0][0].endswith("k.so 7\n")
    assert results[0][1] == ""
    assert len((tmp_path / "runs").read_text().split()) == 2  # one compile and one link
    assert len(list(Path(cfg.cache_dir).rglob("k.so"))) == 1


def test_both_make_it_when_the_lock_does_not_come(cfg, monkeypatch):
    monkeypatch.setattr(cache_module, "LOCK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(cache_module.Cache, "get", lambda self, key: None)  # nobody sees what the other made
    with no_warning():
        path = compile_cpp(SOURCE, name="k", cfg=cfg)
        store = Cache(Path(cfg.cache_dir))
        with store.lock(path.parent.name) as held:
            assert held
            assert compile_cpp(SOURCE, name="k", cfg=cfg) == path
    assert load_library(path).number() == 7


def test_process_killed_while_compiling_blocks_nobody(cfg, tmp_path):
    slow = fake_compiler(tmp_path, f'echo $$ >> {tmp_path}/runs; [ -e {tmp_path}/fast ] || sleep 60; exec g++ "$@"')
    Path(slow).write_text(Path(slow).read_text().replace("fake $$", "fake 1"))
    cfg = dataclasses.replace(cfg, cxx=slow)
    child = start_child(cfg)
    assert child.stdout.readline() == "ready\n"
    child.stdin.write("go\n")
    child.stdin.flush()
    for _ in range(600):
        if (tmp_path / "runs").exists() and (tmp_path / "runs").read_text():
            break
        time.sleep(0.05)
    child.kill()
    child.communicate()
    os.killpg(int((tmp_path / "runs").read_text().split()[0]), signal.SIGKILL)  # what the child had started
    (tmp_path / "fast").write_bytes(b"")
    start = time.monotonic()
    with no_warning():
        assert number(cfg) == 7
    assert time.monotonic() - start < 20


def _use_scratch(queue):
    queue.put(str(scratch.scratch_dir()))


def test_forked_process_leaves_its_parents_scratch_alone():
    mine = scratch.scratch_dir()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_use_scratch, args=(queue,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    assert queue.get(timeout=30) != str(mine)
    child.join()
    assert mine.is_dir()


def test_scratch_is_removed_at_exit():
    code = "from opforge.runtime.build.scratch import scratch_dir; print(scratch_dir())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not Path(ran.stdout.strip()).exists()


def test_scratch_of_a_killed_process_is_removed_by_a_later_one(tmp_path):
    """`kill -9` leaves the folder; its lock is free then, and a folder whose process lives is kept."""
    code = "from opforge.runtime.build.scratch import scratch_dir; print(scratch_dir(), flush=True)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    waiting = f"{code}; import time; time.sleep(600)"
    folders, processes = [], []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", waiting], env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        processes.append(process)
        folders.append(Path(process.stdout.readline().strip()))
    try:
        processes[0].kill()
        processes[0].wait()
        assert folders[0].is_dir()
        for folder in folders:
            os.utime(folder / "alive.lock", (1e9, 1e9))
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.DEVNULL)
        assert not folders[0].exists()
        assert folders[1].is_dir()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


# --- Entries that others remove, and folders that take nothing


def test_cache_that_takes_nothing_is_read(cfg, monkeypatch):
    """A read-only disk: what is there is used without a word; what is new gives one warning."""
    path = compile_cpp(SOURCE, name="k", cfg=cfg)

    def refused(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache_module, "_opened", {})
    monkeypatch.setattr(cache_module.tempfile, "mkdtemp", refused)
    monkeypatch.setattr(cache_module.os, "utime", refused)
    with no_warning():
        assert compile_cpp(SOURCE, name="k", cfg=cfg) == path


def test_entry_that_is_removed_while_it_is_read(cfg, monkeypatch):
    compile_cpp(SOURCE, name="k", cfg=cfg)
    read = cache_module.read_entry

    def removed(folder, key):
        shutil.rmtree(folder)
        return read(folder, key) or (_ for _ in ()).throw(FileNotFoundError(errno.ENOENT, "gone", str(folder)))

    monkeypatch.setattr(cache_module, "read_entry", removed)
    cache = Cache(Path(cfg.cache_dir))
    key = next(cache.root.glob("[0-9a-f][0-9a-f]/*")).name
    with no_warning():
        assert cache.get(key) is None


def test_limit_holds_within_one_process(tmp_path, monkeypatch):
    """Entries that the process made stayed for as long as it lived, whatever the limit was."""
    now = time.time()
    monkeypatch.setattr(cache_module.time, "time", lambda: now)
    cache = Cache(tmp_path / "cache", size_limit=20_000)
    for n in range(40):
        now += 61
        cache.put(cache_module.key({"n": str(n)}), {"x": bytes(1000)}, {})
    assert sum(f.stat().st_size for f in cache.root.rglob("*") if f.is_file()) <= 22_000
