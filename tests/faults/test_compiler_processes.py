"""Compilers that hang, leave processes behind or are interrupted: each ends in its time, and no process is left.

Every compiler here is a shell script; `starts` lists its calls.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from opforge.errors import BuildError
from opforge.runtime.build import compiler, toolchain
from opforge.runtime.build.command import run_command
from opforge.runtime.build.compiler import Source, compile_cpp
from opforge.runtime.build.toolchain import find_toolchain
from opforge.runtime.compile_fx import compile_fx
from opforge.runtime.config import Config
from opforge.runtime.execute.load import load_library

SOURCE = 'extern "C" __attribute__((visibility("default"))) int number() { return 7; }\n'
VERSION = 'case "$*" in *--version*) exec g++ "$@";; esac\n'


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "_hung", {})
    return Config(cache_dir=str(tmp_path / "cache"), opt_level="0")


def script(folder, body):
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\necho $$ >> {folder}/starts\n{body}\n")
    path.chmod(0o755)
    return str(path)


def starts(folder):
    return [int(line) for line in (folder / "starts").read_text().split()]


def runs(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(pids):
    end = time.monotonic() + 10
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < end, f"these processes still run: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize("session", ["setsid ", ""])
def test_a_child_that_holds_the_output_is_not_waited_for(cfg, tmp_path, session):
    cxx = script(tmp_path, f'{VERSION}{session}sleep 60 & echo $! >> {tmp_path}/children\nexec g++ "$@"')
    start = time.monotonic()
    try:
        library = compile_cpp(SOURCE, name="k", cfg=dataclasses.replace(cfg, cxx=cxx, build_timeout_s=50))
        assert time.monotonic() - start < 40
        assert load_library(library).number() == 7
    finally:
        for pid in (tmp_path / "children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def test_a_hung_compiler_whose_child_has_left_ends_in_time(tmp_path):
    cxx = script(tmp_path, f"setsid sleep 60 & echo $! > {tmp_path}/child\necho said; sleep 60")
    start = time.monotonic()
    ran = run_command([cxx], 1.0)
    assert time.monotonic() - start < 30
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert (ran.failure, ran.output, ran.hung, ran.status) == ("was stopped after 1 s", "said\n", True, None)
    assert_gone(starts(tmp_path))


def test_all_of_a_long_output_is_read(tmp_path):
    cxx = script(tmp_path, "seq 100000; seq 100000 >&2; exit 4")
    ran = run_command([cxx], 60.0, errors_apart=True)
    expected = "".join(f"{k}\n" for k in range(1, 100001))
    assert (ran.failure, ran.status) == ("failed with exit status 4", 4)
    assert (ran.output, ran.errors) == (expected, expected)


def test_a_closed_output_is_not_the_end(tmp_path):
    cxx = script(tmp_path, "echo said; exec >&- 2>&-; sleep 0.3; exit 3")
    assert run_command([cxx], 0).failure == "failed with exit status 3"
    cxx = script(tmp_path, "exec >&- 2>&-; sleep 60")
    assert run_command([cxx], 0.5).failure == "was stopped after 0.5 s"
    assert_gone(starts(tmp_path))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sleep 60", r"cxx does not tell its version: it was stopped after 0\.5 s"),
        ("echo wrong >&2; exit 2", "cxx --version exits with 2: wrong"),
    ],
)
def test_a_compiler_without_a_version_is_remembered(cfg, tmp_path, body, message):
    cfg = dataclasses.replace(cfg, cxx=script(tmp_path, body), build_timeout_s=0.5)
    for name in "ab":
        with pytest.raises(BuildError, match=message):
            compile_cpp(SOURCE, name=name, cfg=cfg)
    assert len(starts(tmp_path)) == 1
    assert_gone(starts(tmp_path))
    with pytest.raises(BuildError):  # given more time it is asked again
        find_toolchain(dataclasses.replace(cfg, build_timeout_s=0.6))
    assert len(starts(tmp_path)) == 2


@pytest.mark.parametrize("version", ["", VERSION])
def test_a_hung_compiler_costs_its_time_once_and_warns_once(cfg, tmp_path, version):
    options = {"cxx": script(tmp_path, version + "sleep 60"), "build_timeout_s": 1.0, "cache_dir": cfg.cache_dir}
    calls = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for function in (torch.sin, torch.cos, torch.exp):
            graph, x = torch.fx.Graph(), torch.ones(4)
            graph.output(graph.call_function(function, (graph.placeholder("x"),)))
            gm = torch.fx.GraphModule(torch.nn.Module(), graph)
            assert torch.equal(compile_fx(gm, [x], options=options)(x), function(x))
            calls.append(len(starts(tmp_path)))
    assert calls[0] == calls[1] == calls[2]
    assert len(seen) == 1, [str(w.message) for w in seen]
    assert "was stopped after 1 s" in str(seen[0].message)
    assert_gone(starts(tmp_path))


def test_a_long_source_does_not_make_a_compiler_hang(cfg, tmp_path):
    cxx = script(tmp_path, f'{VERSION}case "$*" in *long.cpp*) sleep 60;; esac\nexec g++ "$@"')
    cfg = dataclasses.replace(cfg, cxx=cxx, build_timeout_s=8.0)
    with pytest.raises(BuildError, match=r"was stopped after 8 s on kernel 'long'"):
        compile_cpp(SOURCE, name="long", cfg=cfg)
    assert load_library(compile_cpp(SOURCE, name="k", cfg=cfg)).number() == 7


@pytest.mark.parametrize("where", ["version", "compile", "many"])
@pytest.mark.parametrize("ends", ["at once", "never"])
def test_an_interrupt_comes_out_and_leaves_no_process(cfg, tmp_path, where, ends):
    wait = f"touch {tmp_path}/started; for k in $(seq 600); do [ -e {tmp_path}/go ] && break; sleep 0.05; done; exit 1"
    cxx = script(tmp_path, wait if where == "version" else VERSION + wait)
    cfg = dataclasses.replace(cfg, cxx=cxx, build_jobs=2)
    many = [Source(SOURCE, f"k{k}") for k in range(8)]
    call = f"compile_many({many!r}, cfg=cfg)" if where == "many" else f"compile_cpp({SOURCE!r}, name='k', cfg=cfg)"
    code = (
        "from opforge.runtime.build.compiler import Source, compile_cpp, compile_many\n"
        f"from opforge.runtime.config import Config\ncfg = {cfg!r}\n{call}\n"
    )
    # A suite that a shell started in the background hands down an ignored interrupt.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    program = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    until = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.2)
    program.send_signal(signal.SIGINT)
    if ends == "at once":
        (tmp_path / "go").touch()
    _, errors = program.communicate(timeout=20)
    assert errors.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert_gone(starts(tmp_path))


def test_versions_are_remembered(cfg, tmp_path):
    cfg = dataclasses.replace(cfg, cxx=script(tmp_path, VERSION))
    assert find_toolchain(cfg) == find_toolchain(dataclasses.replace(cfg, build_timeout_s=3.0))
    assert len(starts(tmp_path)) == 1
    assert toolchain._versions[(cfg.cxx,)].startswith("g++")
