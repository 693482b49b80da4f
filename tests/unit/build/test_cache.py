"""The content-addressed cache: keys, entries, reuse, eviction, locks. Bad entries are in tests/faults."""

from __future__ import annotations

import json
import os
import stat
import threading
import time

import pytest

from opforge.runtime.build import cache as cache_module
from opforge.runtime.build.cache import Cache, key
from opforge.runtime.config import Config

KEY = key({"a": "1"})


def test_key_is_stable_and_ignores_order():
    assert key({"a": "1", "b": "2"}) == key({"b": "2", "a": "1"})
    assert key({}) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": "1"}, {"a": "2"}),
        ({"a": "1"}, {"b": "1"}),
        ({"ab": "c"}, {"a": "bc"}),
        ({"a": "1", "b": ""}, {"a": "1"}),
        ({"a": "1:b"}, {"a": "1", "b": ""}),
    ],
)
def test_key_tells_parts_apart(left, right):
    assert key(left) != key(right)


def test_put_then_get(tmp_path):
    (tmp_path / "file").write_bytes(b"from a file")
    cache = Cache(tmp_path / "c")
    assert cache.get(KEY) is None
    put = cache.put(KEY, {"x.so": b"\x00bytes", "y.py": tmp_path / "file"}, {"n": [1, 2], "s": "text"})
    got = Cache(tmp_path / "c").get(KEY)
    assert got == put
    assert got.file("x.so").read_bytes() == b"\x00bytes"
    assert got.file("y.py").read_bytes() == b"from a file"
    assert got.meta == {"n": [1, 2], "s": "text"}
    assert got.path == tmp_path / "c" / "v1" / KEY[:2] / KEY
    with pytest.raises(KeyError, match=r"has no file 'z'; it has x\.so, y\.py"):
        got.file("z")


def test_manifest_lists_versions_and_digests(tmp_path):
    entry = Cache(tmp_path).put(KEY, {"x": b"abc"}, {})
    manifest = json.loads((entry.path / "manifest.json").read_text())
    assert set(manifest) == {"format", "key", "files", "versions", "meta", "sha256"}
    assert manifest["files"]["x"] == {
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    assert set(manifest["versions"]) == {"python", "torch"}


def test_entries_are_private_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        entry = Cache(tmp_path / "a" / "b" / "c").put(KEY, {"x": b"abc"}, {})
    finally:
        os.umask(old)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) == 7
    for path in folders:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    for path in entry.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_first_entry_stays(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, {"x": b"first"}, {})
    assert cache.put(KEY, {"x": b"second"}, {}).file("x").read_bytes() == b"first"
    assert [p.name for p in cache.root.iterdir() if p.name.startswith("tmp-")] == []


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "manifest.json", "x" * 200])
def test_wrong_file_name(tmp_path, name):
    cache = Cache(tmp_path)
    with pytest.raises(ValueError, match="cannot be the name of a file in the cache"):
        cache.put(KEY, {name: b""}, {})
    assert cache.get(KEY) is None


@pytest.mark.parametrize("wrong", ["../../etc", "", "ABC", "0" * 63])
def test_wrong_key(tmp_path, wrong):
    with pytest.raises(ValueError, match="is no cache key"):
        Cache(tmp_path).get(wrong)


def test_meta_must_be_json(tmp_path):
    with pytest.raises(TypeError):
        Cache(tmp_path).put(KEY, {}, {"x": object()})


def _fill(cache, count, size=1000):
    keys = [key({"n": str(n)}) for n in range(count)]
    for n, k in enumerate(keys):
        cache.put(k, {"x": bytes(size)}, {})
        os.utime(cache.folder(k) / "manifest.json", (1e9 + n, 1e9 + n))
    return keys


def test_sweep_removes_the_least_recently_used(tmp_path):
    keys = _fill(Cache(tmp_path), 10)
    cache = Cache(tmp_path, size_limit=8000)
    assert cache.get(keys[0]) is not None  # used now: the youngest, and in use
    removed = cache.sweep()
    left = [n for n, k in enumerate(keys) if cache.folder(k).exists()]
    assert 0 < removed < 9
    assert left == [0, *range(removed + 1, 10)]
    size = sum(f.stat().st_size for n in left for f in cache.folder(keys[n]).iterdir())
    assert size <= 7200


def test_put_sweeps_when_over_the_limit(tmp_path):
    _fill(Cache(tmp_path), 20)
    cache = Cache(tmp_path, size_limit=10_000)
    cache.put(KEY, {"x": bytes(1000)}, {})
    assert cache.get(KEY) is not None
    assert sum(f.stat().st_size for f in cache.root.rglob("*") if f.is_file()) <= 10_000


def test_entries_in_use_are_never_removed(tmp_path):
    cache = Cache(tmp_path, size_limit=10)
    keys = _fill(cache, 3)
    cache.sweep()
    assert all(cache.get(k) for k in keys)


def test_no_limit_never_sweeps(tmp_path):
    cache = Cache(tmp_path)
    _fill(cache, 3)
    assert not (cache.root / "swept").exists()


def test_sweep_removes_what_a_crash_left(tmp_path):
    cache = Cache(tmp_path)
    old, young = cache.root / "tmp-old", cache.root / "tmp-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "x").write_bytes(b"half")
    os.utime(old, (time.time() - 1e6,) * 2)
    cache.sweep()
    assert not old.exists()
    assert young.exists()


def test_lock_excludes_and_times_out(tmp_path):
    cache = Cache(tmp_path)
    order = []

    def second():
        with Cache(tmp_path).lock(KEY, timeout_s=0.1) as held:
            order.append(held)
        with Cache(tmp_path).lock(KEY) as held:
            order.append(held)

    with cache.lock(KEY) as held:
        assert held
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.4)
        assert order == [False]
    thread.join()
    assert order == [False, True]


def test_default_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_module.default_dir().name == "opforge"
    assert Cache.current(Config()).root == cache_module.default_dir() / "v1"


def test_cache_off_stays_in_this_process(tmp_path):
    cfg = Config(cache=False, cache_dir=str(tmp_path / "never"))
    Cache.current(cfg).put(KEY, {"x": b"1"}, {})
    assert Cache.current(cfg).get(KEY) is not None
    assert not (tmp_path / "never").exists()
