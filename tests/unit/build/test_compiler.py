"""Finding the compiler, its flags, compiling through the cache, in parallel, and torch's OpenMP library."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from opforge.errors import BuildError, ConfigError
from opforge.generated.targets import CPU_TARGETS
from opforge.runtime.build import compiler, toolchain
from opforge.runtime.build.compiler import Source, compile_cpp, compile_many
from opforge.runtime.build.toolchain import find_toolchain
from opforge.runtime.config import Config
from opforge.runtime.execute.load import build_library, load_library
from opforge.runtime.targets.cpu import cpu_target

EXPORT = 'extern "C" __attribute__((visibility("default"))) '
THREADS = (
    "#include <omp.h>\n"
    + EXPORT
    + """int threads() {
  int count = 0;
#pragma omp parallel
#pragma omp single
  count = omp_get_num_threads();
  return count;
}
"""
)


def number(n):
    return f"{EXPORT}int number() {{ return {n}; }}\n"


@pytest.fixture
def cfg(tmp_path):
    return Config(cache_dir=str(tmp_path / "cache"), opt_level="1")


def openmp_libraries():
    return toolchain._mapped_openmp()


def test_compile_and_call(cfg):
    path = compile_cpp(number(7), name="seven", cfg=cfg)
    assert path.name == "seven.so"
    assert load_library(path).number() == 7
    assert path.with_name("seven.cpp").read_text() == number(7)


def test_second_time_comes_from_the_cache(cfg, monkeypatch):
    first = compile_cpp(number(7), name="k", cfg=cfg)
    monkeypatch.setattr(compiler, "_run", lambda *a: pytest.fail("compiled again"))
    assert compile_cpp(number(7), name="k", cfg=cfg) == first


def test_every_part_makes_another_artifact(cfg):
    base = compile_cpp(number(7), name="k", cfg=cfg)
    assert compile_cpp(number(8), name="k", cfg=cfg) != base
    assert compile_cpp(number(7), name="j", cfg=cfg) != base
    assert compile_cpp(number(7), name="k", cfg=dataclasses.replace(cfg, opt_level="0")) != base
    assert compile_cpp(number(7), name="k", cfg=dataclasses.replace(cfg, cxx_flags="-DX='a b'")) != base
    assert compile_cpp(number(7), name="k", cfg=dataclasses.replace(cfg, target="scalar")) != base


def test_names_are_made_plain(cfg):
    assert compile_cpp(number(1), name="a/../b c" + "x" * 99, cfg=cfg).name.startswith("a____b_cxxx")


def test_same_bytes_everywhere(cfg, tmp_path):
    one = compile_cpp(THREADS, name="k", cfg=cfg)
    two = compile_cpp(THREADS, name="k", cfg=dataclasses.replace(cfg, cache_dir=str(tmp_path / "other")))
    assert one != two
    assert one.read_bytes() == two.read_bytes()


def test_kernels_use_torchs_openmp(cfg):
    before = openmp_libraries()
    library = load_library(compile_cpp(THREADS, name="threads", cfg=cfg))
    assert openmp_libraries() == before
    old = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert library.threads() == count
    finally:
        torch.set_num_threads(old)


def test_only_torchs_openmp_is_needed(cfg):
    path = compile_cpp(THREADS, name="threads", cfg=cfg)
    listed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    needed = [line for line in listed.splitlines() if "NEEDED" in line and "omp" in line]
    soname = toolchain.openmp_library().name
    assert len(needed) == 1
    assert soname in needed[0]
    assert "RUNPATH" not in listed


def test_only_marked_functions_are_visible(cfg):
    library = load_library(compile_cpp('extern "C" int hidden() { return 1; }' + number(2), name="k", cfg=cfg))
    assert library.number() == 2
    with pytest.raises(AttributeError):
        _ = library.hidden


def test_arithmetic_is_neither_fused_nor_reordered(cfg):
    # Contracted to one fused multiply-add, a*b - c would be the rounding error of a*b, not 0.
    source = EXPORT + "float f(float a, float b, float c) { return a * b - c; }"
    function = load_library(compile_cpp(source, name="fma", cfg=dataclasses.replace(cfg, opt_level="3"))).f
    function.argtypes, function.restype = [ctypes.c_float] * 3, ctypes.c_float
    a = 1.0 + 2.0**-12
    assert function(a, a, torch.tensor(a).square().item()) == 0.0


def test_what_a_warning_shows_of_a_failed_build(cfg):
    with pytest.raises(BuildError) as caught:
        compile_cpp("int f() { return first; }\nint g() { return second; }\n", name="k", cfg=cfg)
    *complaints, kept = caught.value.short
    assert [c.partition(": error: ")[0] for c in complaints] == ["k.cpp:1:18", "k.cpp:2:18"]
    assert "first" in complaints[0]
    assert kept.startswith("source kept in: ")
    assert all(line in str(caught.value) for line in caught.value.short)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).short == caught.value.short


def test_complaints_are_the_errors_or_the_first_words():
    noise = "In file included from a\n\n  a.cpp:1: warning: odd\n"
    assert compiler.complaints(noise + "a.cpp:2: error: one\nb\nfatal error: two\nerror: 3\nerror: 4\n") == [
        "a.cpp:2: error: one",
        "fatal error: two",
        "error: 3",
    ]
    assert compiler.complaints("ld: undefined reference to `f'\nhelp\n") == ["ld: undefined reference to `f'"]
    assert compiler.complaints(noise) == ["In file included from a", "a.cpp:1: warning: odd"]
    assert compiler.complaints("") == []


def test_compile_many_keeps_order_and_reports(cfg):
    sources = [Source(number(n), f"k{n}") for n in range(4)]
    done = []
    paths = compile_many(sources, cfg=dataclasses.replace(cfg, build_jobs=2), on_done=done.append)
    assert [load_library(p).number() for p in paths] == [0, 1, 2, 3]
    assert sorted(s.name for s in done) == ["k0", "k1", "k2", "k3"]
    assert compile_many([], cfg=cfg) == []


def test_compile_many_respects_build_jobs(cfg, monkeypatch):
    running, most, lock, run = 0, 0, threading.Lock(), compiler._run

    def counted(*args):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return run(*args)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(compiler, "_run", counted)
    compile_many([Source(number(n), f"k{n}") for n in range(4)], cfg=dataclasses.replace(cfg, build_jobs=2))
    assert most == 2


def test_job_count():
    assert compiler.job_count(Config(build_jobs=5)) == 5
    assert compiler.job_count(Config()) == len(os.sched_getaffinity(0))


def test_two_threads_make_one_artifact(cfg, monkeypatch):
    runs, run = [], compiler._run
    monkeypatch.setattr(compiler, "_run", lambda *args: (runs.append(args), run(*args))[1])
    threads = [threading.Thread(target=compile_cpp, args=(number(1),), kwargs={"name": "k", "cfg": cfg}) for _ in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 2  # one compile and one link


@pytest.mark.parametrize(
    ("environment", "setting", "expected"),
    [
        ("", "", "g++"),
        ("clang-of-mine", "", "clang-of-mine"),
        ("absent", "", "g++"),
        ("clang-of-mine", "other", "other"),
    ],
)
def test_which_compiler(tmp_path, monkeypatch, environment, setting, expected):
    for name in ("g++", "clang-of-mine", "other"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{name} 1.0'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("CXX", environment)
    tools = find_toolchain(Config(cxx=setting))
    assert tools.command == (str(tmp_path / expected),)
    assert tools.version == f"{expected} 1.0"


def test_compiler_with_a_prefix(tmp_path, monkeypatch):
    wrapper = tmp_path / "my cache"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}' g++")
    assert find_toolchain(Config()).command == (str(wrapper), "g++")
    monkeypatch.setenv("CXX", str(wrapper))
    with pytest.raises(BuildError):  # a path with a space is one program; alone, it cannot tell its version
        find_toolchain(Config())


def test_clang_without_its_openmp_stays_single_threaded(tmp_path, monkeypatch):
    clang = tmp_path / "clang++"
    clang.write_text("#!/bin/sh\necho 'clang version 17.0'\n")
    clang.chmod(0o755)
    monkeypatch.setattr(toolchain, "openmp_library", lambda: Path("/x/libgomp.so.1"))
    tools = find_toolchain(Config(cxx=str(clang)))
    assert "-fopenmp-simd" in tools.compile_flags
    assert "-fopenmp" not in tools.compile_flags
    assert not any("gomp" in flag for flag in tools.link_flags)
    monkeypatch.setattr(toolchain, "openmp_library", lambda: Path("/x/libomp.so"))
    tools = find_toolchain(Config(cxx=str(clang)))
    assert "-fopenmp" in tools.compile_flags
    assert tools.link_flags[-1] == "/x/libomp.so"


def test_no_fast_math_for_any_target():
    for target in ("auto", *CPU_TARGETS):
        flags = find_toolchain(Config(target=target)).compile_flags
        assert "-ffp-contract=off" in flags
        assert not any("fast" in flag or "unsafe" in flag for flag in flags)


def test_identity_is_of_the_machine_only_where_the_code_is():
    auto, fixed = (find_toolchain(Config(target=t)).identity() for t in ("auto", "avx2"))
    assert len(auto["machine"].split()) == 2
    assert len(fixed["machine"].split()) == 1
    assert "/" not in auto["link"]
    assert compiler.compiler_id(Config(target="avx2")) != compiler.compiler_id(Config())


def test_words_of_the_compiler_are_in_every_key():
    """The library that `g++ -ffast-math` had made was loaded for plain g++: its tests for NaN were gone."""
    plain, fast = (Config(cxx=words) for words in ("g++", "g++ -ffast-math"))
    assert compiler.compiler_id(plain) != compiler.compiler_id(fast)
    source = 'extern "C" __attribute__((visibility("default"))) int number() { return __FAST_MATH__ + 0; }\n'
    source = "#ifndef __FAST_MATH__\n#define __FAST_MATH__ 0\n#endif\n" + source
    assert build_library(source, name="words", cfg=fast).number() == 1
    assert build_library(source, name="words", cfg=plain).number() == 0


def test_environment_of_the_compiler_is_in_every_key(tmp_path, monkeypatch, cfg):
    """A header that CPATH named was still in the library when it named another one."""
    source = '#include <answer.h>\nextern "C" __attribute__((visibility("default"))) int number() { return ANSWER; }\n'
    plain = compiler.compiler_id(cfg)
    for folder, answer in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "answer.h").write_text(f"#define ANSWER {answer}\n")
        monkeypatch.setenv("CPATH", str(tmp_path / folder))
        assert build_library(source, name="k", cfg=cfg).number() == answer
    monkeypatch.delenv("CPATH")
    assert compiler.compiler_id(cfg) == plain
    with pytest.raises(BuildError, match=r"answer\.h"):
        build_library(source, name="k", cfg=cfg)


def test_flags_that_choose_instructions_make_code_for_this_machine_alone():
    named = find_toolchain(Config(target="scalar"))
    flagged = find_toolchain(Config(target="scalar", cxx_flags="-march=native"))
    assert named.identity()["machine"] != flagged.identity()["machine"]
    assert find_toolchain(Config(target="scalar", cxx_flags="-g")).identity()["machine"] == named.identity()["machine"]


def test_host_target_is_one_that_config_knows():
    from opforge.runtime import config

    assert toolchain.host_target() in config.FIELDS["target"].choices


def test_another_process_finds_the_artifact(cfg):
    path = compile_cpp(number(3), name="k", cfg=cfg)
    code = (
        "from opforge.runtime.build import compiler\n"
        "from opforge.runtime.config import Config\n"
        "compiler._run = None\n"
        f"print(compiler.compile_cpp({number(3)!r}, name='k', cfg={cfg!r}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.stderr) == (str(path), "")


def test_every_target_of_the_setting_is_in_the_targets_spec():
    from opforge.runtime import config

    assert {*CPU_TARGETS, "auto"} == set(config.FIELDS["target"].choices)


@pytest.mark.parametrize("missing", ["avx512f", "avx2"])
def test_a_target_that_this_machine_cannot_run_is_refused(missing, monkeypatch):
    flags = sorted(CPU_TARGETS["avx512"].features - {missing})
    monkeypatch.setattr(toolchain.Path, "read_text", lambda self, **_: "flags\t\t: " + " ".join(flags))
    monkeypatch.setattr(toolchain, "host_target", lambda: "scalar")
    toolchain.runs_here.cache_clear()
    try:
        assert toolchain.runs_here("scalar")
        assert toolchain.runs_here("avx2") is (missing != "avx2")
        with pytest.raises(ConfigError) as caught:
            cpu_target(Config(target="avx512"))
        runnable = ", ".join(
            repr(name) for name in ("auto", *CPU_TARGETS) if name == "auto" or toolchain.runs_here(name)
        )
        assert str(caught.value) == (
            f"the setting target is 'avx512', but this machine cannot run such code: its processor lacks {missing}; "
            f"targets that run here: {runnable}"
        )
        assert "'scalar'" in runnable
        assert "'avx512'" not in runnable
        with pytest.raises(
            ConfigError,
            match="'neon', but this machine cannot run such code: it is for arm64, and this processor is x86_64",
        ):
            cpu_target(Config(target="neon"))
        assert not toolchain.runs_here("neon")
    finally:
        toolchain.runs_here.cache_clear()
