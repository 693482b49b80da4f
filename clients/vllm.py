"""opforge as vLLM's compiler of the pieces of a model (`CompilationMode.VLLM_COMPILE`).

vLLM's entry points load `register` in each of its processes. It changes nothing unless `VLLM_PLUGINS` names it:

    VLLM_PLUGINS=opforge vllm serve …

Then vLLM's platform names `make` as its compiler. `VLLM_PLUGINS` is vLLM's list of all general plugins that it loads: name the others too.

vLLM splits a graph at its attention calls and has each piece compiled for a range of token counts, by an object with the methods of vLLM's
`CompilerInterface`. Between releases the protocol has changed: `compile_factors` was `compute_hash`, and `load` took the piece's number. `Compiler`
has both methods and takes both forms.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CacheError, ConfigError
from ..frontend_api import backend, compile_fx
from ..runtime import config
from ..runtime.build.cache import Cache
from ..runtime.compile_fx import HISTORY
from ..runtime.config import Config
from ..runtime.realize import Artifacts, code_digest
from ..runtime.targets.cpu import Cpu

__all__ = ["Compiler", "make", "register"]

_NAME = "opforge"
_one_at_a_time = threading.RLock()


class Compiler:
    """The methods of vLLM's `CompilerInterface`. The cache is a folder beside vLLM's own, so that a copy of vLLM's folder holds all there is."""

    name = _NAME

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:
        """Keep compiled code under `cache_dir` without its ending `prefix`, which tells the parts of one model apart."""
        base = cache_dir.removesuffix(prefix) if prefix else cache_dir
        self._settings = {"cache": not disable_cache, "cache_dir": str(Path(base) / "opforge_cache")}

    def compute_hash(self, vllm_config: Any) -> str:
        """A digest of what shapes the code beside the graph. vLLM has counted its own configuration already."""
        return hashlib.sha256(repr(self.compile_factors(vllm_config)).encode()).hexdigest()[:10]

    def compile_factors(self, vllm_config: Any) -> dict[str, object]:
        """By name, what shapes the code beside the graph: this package's code, its settings, torch and the machine."""
        cfg = config.from_options(self._settings)
        factors: dict[str, object] = {"opforge": code_digest(), "settings": config.key(cfg), "torch": torch.__version__}
        factors |= Cpu(cfg).parts()
        if torch.cuda.is_available():
            factors["device"] = torch.cuda.get_device_capability()
        return factors

    def compile(
        self,
        graph: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: Mapping[str, Any] | None,
        compile_range: Any = None,
        key: str | None = None,
    ) -> tuple[Callable[..., Any], dict[str, Any] | None]:
        """Compile a piece for a range of sizes, or for one; returns a call with the piece's arguments, and a handle for `load`.

        compiler_config  vLLM's configuration of Inductor. Its names that are settings of opforge count; so does `force_disable_caches`.
        compile_range    an object with `is_single_size()`; older vLLM passes the size, or None for any size.
        key              where Inductor would keep the piece; the cache finds it by what it computes.

        The handle is a literal: `keys` of the cache's entries, and the `options` that they were made with. It is None where nothing is kept:
        without a cache, and for a piece that runs by the eager kernels.
        """
        options = _ours(compiler_config or {})
        call, keys = _compiled(graph, _inputs(graph, example_inputs, compile_range), self._settings | options)
        cfg = config.from_options(self._settings | options)
        kept = bool(keys) and cfg.cache and not _missing(keys, cfg)
        return call, {"keys": keys, "options": options} if kept else None

    def load(
        self,
        handle: Any,
        graph: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *rest: Any,
        graph_index: int | None = None,
        compile_range: Any = None,
    ) -> Callable[..., Any]:
        """The piece that `compile` returned `handle` for, out of the cache: no kernel is compiled.

        rest  the piece's number, which older vLLM passes first, and `compile_range`.
        Raises `CacheError` for what is no handle, a handle whose entries the cache lacks, and another piece's handle.
        """
        options = self._settings | _options_of(handle)
        try:
            cfg = config.from_options(options)
            missing = _missing(handle["keys"], cfg)
        except (ConfigError, ValueError) as error:  # another opforge's settings, or keys that nobody has made
            raise CacheError(f"{handle!r} is no handle of this opforge's: {error}") from error
        if missing:
            raise CacheError(
                f"opforge's cache in {cfg.cache_dir} has no entry {missing[0]}; remove vLLM's cache folder, and vLLM compiles again"
            )
        inputs = _inputs(graph, example_inputs, rest[-1] if rest else compile_range)
        call, keys = _compiled(graph, inputs, options)
        if keys != list(handle["keys"]):
            raise CacheError("the handle belongs to another graph or to other settings; remove vLLM's cache folder")
        return call


def _options_of(handle: Any) -> dict[str, Any]:
    """The options of a handle. Raises `CacheError` for what is none."""
    if isinstance(handle, Mapping) and set(handle) == {"keys", "options"}:
        keys, options = handle["keys"], handle["options"]
        texts = isinstance(keys, (list, tuple)) and all(isinstance(key, str) for key in keys)
        if texts and isinstance(options, Mapping):
            return dict(options)
    raise CacheError(f"{handle!r} is no handle of opforge's")


def _compiled(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], list[str]]:
    """The call of a piece, which refuses sizes that it was not compiled for, and the keys of what was made for it."""
    with _one_at_a_time:
        before = len(HISTORY)
        call = compile_fx(graph, inputs, options=options)
        return call, [key for artifacts in HISTORY[before:] for key in _keys(artifacts)]


def _inputs(graph: torch.fx.GraphModule, examples: Sequence[Any], compile_range: Any) -> list[Any]:
    """Where any size of a range may come, the inputs that Dynamo has traced with, whose sizes are symbols; else the given ones."""
    single = compile_range.is_single_size() if hasattr(compile_range, "is_single_size") else compile_range is not None
    if single or any(isinstance(x, torch.SymInt) for x in examples):
        return list(examples)
    traced = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    return list(examples) if any(x is None for x in traced) else traced


def _ours(compiler_config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the settings of Inductor those that are settings here."""
    names = {setting.name for setting in config.FIELDS.values()}
    ours = {name: value for name, value in compiler_config.items() if name in names}
    return ours | ({"cache": False} if compiler_config.get("force_disable_caches") else {})


def _keys(artifacts: Artifacts) -> list[str]:
    """The keys of a graph's entries, and of those of the graphs inside of it."""
    return [artifacts.entry, *(key for part in artifacts.inside.values() for key in _keys(part))]


def _missing(keys: Sequence[str], cfg: Config) -> list[str]:
    """Of the keys those that a later process would not find."""
    cache = Cache.current(cfg)
    kept = not cfg.cache_dir or cache.root.parent == Path(os.path.abspath(cfg.cache_dir))
    return [key for key in keys if not kept or cache.get(key) is None]


def make(*graph_and_inputs: Any, **options: Any) -> Any:
    """What the name in vLLM's platform stands for. Called without arguments, a `Compiler` that is an instance of vLLM's `CompilerInterface`. The
    modes in which vLLM leaves all to `torch.compile` call it as a backend, with a graph and its inputs.
    """
    if graph_and_inputs:
        return backend(*graph_and_inputs, **options)
    from vllm.compilation.compiler_interface import CompilerInterface

    return type("Compiler", (Compiler, CompilerInterface), {})()


def register() -> None:
    """Make opforge the compiler of this process's vLLM, if `VLLM_PLUGINS` names it. Called again, it changes nothing more."""
    if _NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    from vllm.platforms import current_platform

    name = f"{__name__}.{make.__name__}"
    type(current_platform).get_compile_backend = classmethod(lambda cls: name)
