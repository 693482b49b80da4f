"""Entries of opforge's cache among torch's cache artifacts: another process starts warm from the bytes; broken ones are refused."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import opforge
from opforge.errors import CacheError, OpforgeWarning
from opforge.runtime.build.artifacts import EntryArtifact, packed, unpacked
from opforge.runtime.build.cache import Cache

PROGRAM = """
import json, sys
import torch, opforge
if len(sys.argv) > 1:
    loaded = opforge.load_cache_artifacts(open(sys.argv[1], "rb").read())
    assert loaded.artifacts["opforge"], loaded
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.5)
out = torch.compile(model, backend="opforge")(torch.ones(2, 8) * torch.arange(8))
out.sum().backward()
made = opforge.last_artifacts()
if len(sys.argv) == 1:
    sys.stdout.buffer.write(torch.compiler.save_cache_artifacts()[0])
else:
    print(json.dumps([made.cached, made.backward.cached, opforge.stats()["graphs"], out.tolist()]))
"""


def ran(folder: Path, *args: str) -> bytes:
    env = {**os.environ, "OPFORGE_CACHE_DIR": str(folder)}
    return subprocess.run([sys.executable, "-c", PROGRAM, *args], env=env, capture_output=True, check=True).stdout


def test_another_process_starts_warm(tmp_path: Path) -> None:
    saved = tmp_path / "artifacts"
    saved.write_bytes(ran(tmp_path / "first"))
    forward, backward, graphs, out = json.loads(ran(tmp_path / "second", str(saved)).splitlines()[-1])
    assert (forward, backward, graphs) == (True, True, 1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
        torch.testing.assert_close(torch.tensor(out), model(torch.ones(2, 8) * torch.arange(8)))


KEY = "ab" * 32


@pytest.fixture
def data(tmp_path: Path) -> Iterator[bytes]:
    """A packed entry; the cache in force is another one, and empty."""
    entry = Cache(tmp_path / "made").put(KEY, {"a.py": b"x = 1\n", "b": bytes(range(256))}, {"kernels": 2})
    with opforge.config.patch(cache_dir=str(tmp_path / "here")):
        yield packed(entry)


def kept() -> dict[str, bytes] | None:
    entry = Cache.current(opforge.config.current()).get(KEY)
    return None if entry is None else {name: entry.read(name) for name in entry.files}


def test_an_entry_comes_back_as_it_was(data: bytes) -> None:
    assert kept() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EntryArtifact(KEY, data).populate_cache()
    assert kept() == {"a.py": b"x = 1\n", "b": bytes(range(256))}
    assert unpacked(data)[2] == {"kernels": 2}


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda d: b"", "no entry of opforge's cache"),
        (lambda d: b"x" + d, "no entry of opforge's cache"),
        (lambda d: d[:-1], "b is not what was saved"),
        (lambda d: d + b"x", "they have"),
        (lambda d: d[:-1] + b"\0", "b is not what was saved"),
        (lambda d: d[:10] + b"\xff" + d[11:], "header is damaged"),
        (lambda d: d.replace(b'"a.py"', b'"../a"'), "cannot be the name of a file"),
        (lambda d: d.replace(KEY.encode(), ("cd" * 32).encode()), "another entry"),
        (lambda d: d.replace(KEY.encode(), b"../" + b"a" * 61), "another entry"),
    ],
)
def test_broken_bytes_are_refused_with_the_reason(data: bytes, broken: object, why: str) -> None:
    with pytest.warns(OpforgeWarning, match=f"the artifact abababababab is not loaded: .*{why}"):
        EntryArtifact(KEY, broken(data)).populate_cache()  # type: ignore[operator]
    assert kept() is None


def test_a_wrong_key_is_no_path(data: bytes, tmp_path: Path) -> None:
    key = "../" + "a" * 61
    with pytest.warns(OpforgeWarning, match="is no cache key"):
        EntryArtifact(key, data.replace(KEY.encode(), key.encode())).populate_cache()
    assert not list((tmp_path / "here").rglob("a.py"))


def test_unpacking_says_what_is_wrong(data: bytes) -> None:
    with pytest.raises(CacheError, match="header is damaged"):
        unpacked(data[:30])


def test_an_entry_that_is_gone_is_left_out(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    artifact = EntryArtifact(KEY, cache.put(KEY, {"a": b"1"}, {}))
    cache.drop(KEY)
    with pytest.warns(OpforgeWarning, match="is not saved: it is gone from the cache"):
        assert artifact.content == b""


def test_a_cache_that_is_off_gives_nothing() -> None:
    code = (
        "import torch\n"
        "torch.compile(lambda x: x.sin() + 1, backend='opforge', options={'cache': False})(torch.ones(3))\n"
        "saved = torch.compiler.save_cache_artifacts()\n"
        "print(saved is None or not saved[1].artifacts['opforge'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "True"
