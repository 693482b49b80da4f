"""One target decides how wide vectors are: in the kernels' text, in the compiler's flags, and on the processor."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from opforge.errors import BuildError
from opforge.generated.targets import CPU_TARGETS
from opforge.runtime.build import toolchain
from opforge.runtime.build.toolchain import chosen_target, find_toolchain, host_target, runs_here
from opforge.runtime.config import Config
from opforge.runtime.targets.cpu import cpu_target

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")

_PROGRAM = """
import torch, opforge
programs = [
    lambda x: torch.softmax(x, -1),
    lambda x: x.amax(0),
    lambda x: x.abs().to(torch.uint8).sum(-1),
    lambda x: (x.sum(0), x.t().contiguous() + 1),
]
for program in programs:
    for n in (7, 33):
        x = torch.randn(n, n) * 5
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(program, backend="opforge")(x), program(x))
print(opforge.stats())
"""


def compiled(source_of_flags: dict[str, str], cache: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OPFORGE_CACHE_DIR": cache, **source_of_flags}
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=300
    )


@needs_x86
def test_values_are_right_whatever_width_torch_or_the_flags_choose(tmp_path):
    """Torch's capability once chose the lanes and the compiler the vectors: writes past buffers, and wrong sums. One cache for all."""
    for settings in (
        {},
        {"ATEN_CPU_CAPABILITY": "avx2"},
        {"ATEN_CPU_CAPABILITY": "default"},
        {"OPFORGE_CXX_FLAGS": "-march=x86-64"},
        {"OPFORGE_CXX_FLAGS": "-DOPFORGE_SCALAR"},
    ):
        ran = compiled({"OPFORGE_STRICT": "1", **settings}, str(tmp_path))
        assert ran.returncode == 0, (settings, ran.stderr[-2000:])


@needs_x86
@pytest.mark.parametrize("settings", [{"OPFORGE_CXX_FLAGS": "-DOPFORGE_LANES=8", "OPFORGE_TARGET": "scalar"}])
def test_a_width_that_is_not_the_planned_one_is_a_compile_error(settings, tmp_path):
    ran = compiled({**settings, "OPFORGE_STRICT": "1"}, str(tmp_path))
    assert ran.returncode != 0
    assert "BuildError" in ran.stderr
    assert "written for vectors of 4 elements" in ran.stderr
    ran = compiled(settings, str(tmp_path))
    assert ran.returncode == 0, ran.stderr[-2000:]  # the eager result, with a warning


@needs_x86
def test_the_target_follows_the_flags():
    assert chosen_target(Config()) == host_target()
    assert cpu_target(Config(cxx_flags="-march=x86-64")).name == "scalar"
    assert cpu_target(Config(cxx_flags="-DOPFORGE_SCALAR")).name == "scalar"
    assert cpu_target(Config(cxx_flags="-g")).name == host_target()
    assert cpu_target(Config(target="scalar", cxx_flags="-g")).name == "scalar"
    if runs_here("avx2"):
        assert cpu_target(Config(cxx_flags="-march=x86-64-v3")).lanes == CPU_TARGETS["avx2"].lanes


@needs_x86
def test_words_of_the_compiler_count_as_flags(monkeypatch):
    command = find_toolchain(Config()).command
    monkeypatch.setenv("CXX", f"{command[0]} -mno-avx2 -mno-avx512f")
    assert chosen_target(Config(cxx_flags="-march=x86-64")) == "scalar"


@needs_x86
def test_the_host_target_is_the_processors_and_not_torchs(monkeypatch):
    host_target.cache_clear()
    try:
        expected = host_target()
        host_target.cache_clear()
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert host_target() == expected
    finally:
        host_target.cache_clear()


@needs_x86
def test_flags_for_a_processor_that_this_is_not_are_refused(monkeypatch):
    monkeypatch.setattr(toolchain, "runs_here", lambda target: target == "scalar")
    monkeypatch.setattr(toolchain, "host_target", lambda: "scalar")
    toolchain._target_of.cache_clear()
    try:
        with pytest.raises(BuildError, match=r"makes code for avx512, .* cannot run: change the setting cxx_flags"):
            chosen_target(Config(cxx_flags="-march=x86-64-v4"))
    finally:
        toolchain._target_of.cache_clear()


@needs_x86
def test_flags_that_the_compiler_refuses_are_a_build_error():
    with pytest.raises(BuildError, match="refuses its flags"):
        chosen_target(Config(cxx_flags="-march=no-such-processor"))
