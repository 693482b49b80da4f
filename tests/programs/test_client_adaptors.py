"""The adaptors for vLLM and SGLang, which are not installed here: driven as those programs drive them, with stand-ins for their modules."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import opforge
from opforge.clients import vllm
from opforge.errors import CacheError, InputError
from tests.support import vllm_driver

ROOT = Path(__file__).parents[2]


def drive(*words: str) -> list[dict[str, Any]]:
    """The facts that the driver prints for each range of sizes, from a process of its own."""
    command = [sys.executable, "-m", "tests.support.vllm_driver", *words]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    facts: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize("words", [(), ("ancient",)], ids=["today's arguments", "older arguments"])
def test_a_second_process_loads(tmp_path: Path, words: tuple[str, ...]) -> None:
    first, second = drive(str(tmp_path), *words), drive(str(tmp_path), *words)
    for made, found in zip(first, second, strict=True):
        assert made["loaded"] == 0
        assert made["cache_hits"] == 0
        assert found["loaded"] == found["graphs"] == found["cache_hits"] == 2
        assert made["error"] == found["error"] < 1e-5
        assert made["hash"] == found["hash"]
        assert not made["fallbacks"]
        assert not found["fallbacks"]


@pytest.fixture
def piece() -> torch.fx.GraphModule:
    """The first piece of the driver's model."""
    split, names = vllm_driver.pieces()
    graph = split.get_submodule(names[0])
    assert isinstance(graph, torch.fx.GraphModule)
    return graph


def compiler(folder: Path, disable_cache: bool = False) -> vllm.Compiler:
    made = vllm.Compiler()
    made.initialize_cache(str(folder), disable_cache)
    return made


def test_one_size_is_not_called_with_another(tmp_path: Path, piece: torch.fx.GraphModule) -> None:
    four = vllm_driver.RANGES[1]
    call, _ = compiler(tmp_path).compile(piece, vllm_driver.example_inputs(piece, four), {}, four)
    x, w, b = vllm_driver.arguments(5)
    with pytest.raises(InputError):
        call(x, 5, w, b)


def test_a_range_with_real_examples_is_compiled_for_any_size(tmp_path: Path, piece: torch.fx.GraphModule) -> None:
    sizes = vllm_driver.RANGES[0]
    call, _ = compiler(tmp_path).compile(piece, vllm_driver.example_inputs(piece, vllm_driver.Range(4, 4)), {}, sizes)
    for rows in (3, 7):
        x, w, b = vllm_driver.arguments(rows)
        torch.testing.assert_close(call(x, rows, w, b), piece(x, rows, w, b))


def test_handles_that_do_not_fit(tmp_path: Path, piece: torch.fx.GraphModule) -> None:
    sizes, one = vllm_driver.RANGES
    inputs, made = vllm_driver.example_inputs(piece, sizes), compiler(tmp_path / "a")
    _, handle = made.compile(piece, inputs, {"max_autotune": True, "combo_kernels": True}, sizes)
    assert handle is not None
    assert handle["options"] == {"max_autotune": True}
    made.load(handle, piece, inputs, sizes)
    made.load({"keys": tuple(handle["keys"]), "options": handle["options"]}, piece, inputs, sizes)
    with pytest.raises(CacheError, match="another graph"):
        made.load(handle, piece, vllm_driver.example_inputs(piece, one), one)
    with pytest.raises(CacheError, match="no entry"):
        compiler(tmp_path / "b").load(handle, piece, inputs, sizes)
    keys = handle["keys"]
    misshapen = [{"keys": k, "options": o} for k, o in ((None, {}), ("abc", {}), ([3], {}), (keys, None))]
    unknown = [{"keys": k, "options": o} for k, o in ((["zz"], {}), (["../../x"], {}), (keys, {"no_such_setting": 1}))]
    for other in (None, "text", ("key", "path"), {"keys": []}, *misshapen, *unknown):
        with pytest.raises(CacheError, match="no handle"):
            made.load(other, piece, inputs, sizes)


@pytest.mark.parametrize("config", [{}, {"force_disable_caches": True}])
def test_without_a_cache_there_is_no_handle(
    tmp_path: Path, piece: torch.fx.GraphModule, config: dict[str, Any]
) -> None:
    made = compiler(tmp_path, disable_cache=not config)
    sizes = vllm_driver.RANGES[0]
    call, handle = made.compile(piece, vllm_driver.example_inputs(piece, sizes), config, sizes)
    assert handle is None
    x, w, b = vllm_driver.arguments(3)
    torch.testing.assert_close(call(x, 3, w, b), piece(x, 3, w, b))


def test_settings_shape_the_hash() -> None:
    made = vllm.Compiler()
    before = made.compute_hash(None)
    with opforge.config.patch({"fusion": False}):
        assert made.compute_hash(None) != before
    assert made.compute_hash(None) == before


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """A module of the given name, and those around it."""
    parts = name.split(".")
    for k in range(1, len(parts) + 1):
        path = ".".join(parts[:k])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    for key, value in members.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


def entry(group: str) -> Callable[..., Any]:
    """What the entry point in pyproject.toml names."""
    text = (ROOT / "pyproject.toml").read_text()
    found: Callable[..., Any] = pkgutil.resolve_name(tomllib.loads(text)["project"]["entry-points"][group]["opforge"])
    return found


def test_vllm_finds_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    class Platform:
        @classmethod
        def get_compile_backend(cls) -> str:
            return "inductor"

    class CompilerInterface:
        pass

    platform = Platform()
    stand_in(monkeypatch, "vllm.platforms", current_platform=platform)
    stand_in(monkeypatch, "vllm.compilation.compiler_interface", CompilerInterface=CompilerInterface)
    for plugins in (None, "another"):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if plugins is not None:
            monkeypatch.setenv("VLLM_PLUGINS", plugins)
        entry("vllm.general_plugins")()
        assert platform.get_compile_backend() == "inductor"
    monkeypatch.setenv("VLLM_PLUGINS", "another,opforge")
    entry("vllm.general_plugins")()
    entry("vllm.general_plugins")()
    # As vLLM takes the name apart.
    module, _, name = platform.get_compile_backend().rpartition(".")
    make = getattr(importlib.import_module(module), name)
    assert isinstance(make(), CompilerInterface)
    assert make().name == "opforge"
    x = torch.randn(5)
    torch.testing.assert_close(torch.compile(lambda x: x.sin() * 2, backend=make)(x), x.sin() * 2)


def test_sglang_finds_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    class SRTPlatform:
        def get_compile_backend(self, mode: str | None = None) -> str:
            return "inductor"

    class CudaSRTPlatform(SRTPlatform):
        pass

    stand_in(monkeypatch, "sglang.srt.platforms.interface", SRTPlatform=SRTPlatform)
    stand_in(monkeypatch, "sglang.srt.platforms.cuda", CudaSRTPlatform=CudaSRTPlatform)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    activate = entry("sglang.srt.platforms")
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "opforge")
    importlib.import_module("opforge.clients.sglang")._platform.cache_clear()
    kind = pkgutil.resolve_name(activate())
    assert issubclass(kind, CudaSRTPlatform if torch.cuda.is_available() else SRTPlatform)
    backend = kind().get_compile_backend(mode="max-autotune-no-cudagraphs")
    x = torch.randn(4, 4)
    opforge.reset_stats()
    call = torch.compile(lambda x: x.softmax(1) + 1, backend=backend, mode="max-autotune-no-cudagraphs")
    torch.testing.assert_close(call(x), x.softmax(1) + 1)
    assert opforge.stats()["graphs"] == 1
