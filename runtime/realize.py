"""From a lowered graph to a function that runs it: out of the cache, or scheduled, generated, compiled, and put there."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BuildError, ResourceError
from ..generated.ops import ANY_STRIDES
from . import config
from .build.cache import Cache, Entry, key
from .build.scratch import warn_once
from .config import Config
from .execute.load import load_wrapper
from .execute.ranges import Ranges
from .ir.index import Expr, Sym
from .ir.nodes import Extern, Program
from .ir.text import dump
from .lower.graph import Lowered
from .observe.watch import Watch
from .targets.base import Target

if TYPE_CHECKING:  # a warm start does not load the scheduler
    from .kernels.plan import Plan

Compiled = Callable[..., Any]

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class EagerProgram:
    """A program by eager kernels."""

    run: Compiled

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


@dataclass
class Artifacts:
    """What was made for one graph, for readers: texts of every stage and counts."""

    cpp: str = ""
    wrapper: str = ""
    epilogue: str = ""
    kernels: int = 0
    externs: dict[str, int] = field(default_factory=dict)
    arena_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    cached: bool = False
    checks_results: bool = False
    """Whether it raises `MetadataError` where an eager kernel returns what is unlike its trace."""
    program: Any = None
    plan: Any = None
    function: str = ""
    backward: Artifacts | None = None
    inside: dict[str, Artifacts] = field(default_factory=dict)
    """Of the graphs that this one runs (branches, a loop's body); `kernels` and `externs` count theirs."""
    controls: dict[str, str] = field(default_factory=dict)
    """Source of the functions that run them, by name."""
    entry: str = ""
    """The key of its entry of the cache."""
    symbols: dict[str, Any] = field(default_factory=dict)
    """What the target loads, by the names of the functions that the wrapper calls."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Names of the kernels that one function runs together, by its name."""
    replan: Callable[[], Any] | None = None
    """Schedules the program again, where it came out of the cache: nobody but a reader needs the plan then."""

    def planned(self) -> Any:
        """The plan; None where there is none to be had."""
        if self.plan is None and self.replan is not None:
            self.plan = self.replan()
        return self.plan


def realize(
    lowered: Lowered,
    target: Target,
    cfg: Config,
    watch: Watch,
    *,
    boxed: bool = False,
    minimize_memory: bool = False,
    functions: Mapping[str, Compiled] = MappingProxyType({}),
) -> tuple[Compiled, Artifacts]:
    """The compiled graph out of the cache, or made and put there. `boxed`, `minimize_memory`: as for `compile_graph`; `functions`: the graph's
    `controls`, by name.
    """
    with watch.stage("cache"):
        digest = key(cache_parts(lowered, cfg, target) | {"boxed": str(boxed), "minimize_memory": str(minimize_memory)})
        cache = Cache.current(cfg)
        entry = cache.get(digest)
        artifacts = _stored(entry, target) if entry is not None else None
    if entry is None or artifacts is None:
        from .cold import make

        made = make(
            lowered.program, parameters(lowered), target, cfg, watch, boxed=boxed, minimize_memory=minimize_memory
        )
        artifacts = _artifacts(made.source, made.wrapper, made.meta)
        artifacts.plan = made.plan
        with watch.stage("cache"):
            entry = cache.put(digest, made.files, made.meta)
    else:
        program = lowered.program
        artifacts.cached, artifacts.replan = True, lambda: _planned_again(program, target, minimize_memory)
        if watch.wanted:
            _tell_code(artifacts, watch)
    artifacts.program, artifacts.entry = lowered.program, digest
    with watch.stage("load"):
        try:
            wrapper = entry.read("wrapper.py")
            module = load_wrapper(entry.file("wrapper.py"), name=f"opforge_{digest[:16]}", contents=wrapper)
            kernels = target.load(entry)
        except ResourceError:
            # The target knows by now which configuration of a kernel it does not take, and makes the graph with the next one.
            gone = cache.drop(digest)
            if not gone and not cfg.cache:
                raise
            again = cfg if gone else replace(cfg, cache=False)
            return realize(
                lowered, target, again, watch, boxed=boxed, minimize_memory=minimize_memory, functions=functions
            )
        except (BuildError, OSError) as error:
            # A folder mounted noexec, a library that this one was linked with is gone, or the entry itself.
            if not cfg.cache:
                raise
            warn_once("load", entry.path, f"{error}; it is compiled again, for this process only")
            again = replace(cfg, cache=False)
            return realize(
                lowered, target, again, watch, boxed=boxed, minimize_memory=minimize_memory, functions=functions
            )
        for name, value in {**dict(lowered.constants), **kernels, **functions}.items():
            setattr(module, name, value)
        called = (*kernels, *functions)
        module.in_ranges = Ranges(module, wrapper.decode(), called, watch.title)  # type: ignore[attr-defined]
    return module.call, artifacts


def _stored(entry: Entry, target: Target) -> Artifacts | None:
    """What readers see of an entry of the cache; None where another process has removed or changed it meanwhile."""
    try:
        cpp, wrapper = (entry.read(name).decode() for name in (f"kernels.{target.suffix}", "wrapper.py"))
    except OSError:
        return None
    return _artifacts(cpp, wrapper, entry.meta)


def _artifacts(source: str, wrapper: str, meta: Mapping[str, Any]) -> Artifacts:
    made = Artifacts(source, wrapper, "", meta["kernels"], meta["externs"], meta["arena_bytes"])
    made.symbols, made.groups, made.checks_results = meta["symbols"], meta["groups"], meta["checks_results"]
    return made


def _planned_again(program: Program, target: Target, minimize_memory: bool) -> Plan:
    from .cold import plan_again  # only for a reader

    return plan_again(program, target, minimize_memory)


def _tell_code(artifacts: Artifacts, watch: Watch) -> None:
    from .cold import tell_code  # only for a reader

    tell_code(artifacts.planned(), artifacts.cpp, artifacts.wrapper, watch)


def parameters(lowered: Lowered) -> list[str]:
    """Names of the wrapper's arguments: a buffer, a size symbol, or a name nobody reads."""
    names: list[str] = []
    for k, p in enumerate(lowered.placeholders):
        symbol = p.atom if isinstance(p, Expr) else None
        name = p if isinstance(p, str) else symbol.name if isinstance(symbol, Sym) else ""
        # Two placeholders are one symbol where Dynamo passes a size that two inputs have in common twice.
        names.append(name if name and name not in names else f"_{k}")
    return names


@functools.cache
def code_digest(package: Path = _PACKAGE) -> str:
    """Digest of all of the engine's code and generated files: a changed compiler never meets old artifacts."""
    folders = (package / "runtime", package / "generated")
    files = [p for folder in folders for p in folder.rglob("*") if p.is_file() and p.parent.name != "__pycache__"]
    return key({p.relative_to(package).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files})


def cache_parts(lowered: Lowered, cfg: Config, target: Target) -> dict[str, str]:
    calls = {it.target for it in lowered.program.items if isinstance(it, Extern)}
    return {
        "program": dump(lowered.program) + repr(parameters(lowered)),
        "config": config.key(cfg),
        "opforge": code_digest(),
        # A user's own spec file may say so of operators, too, which is no part of the code.
        "any_strides": repr(sorted(calls & ANY_STRIDES)),
        "torch": torch.__version__,
        **target.parts(),
    }
