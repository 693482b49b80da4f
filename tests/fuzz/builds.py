"""Kernels of several programs in one C++ unit: starting a compiler and a linker costs more than a small program's kernels."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import opforge
from opforge.errors import BuildError
from opforge.runtime.build.cache import Entry
from opforge.runtime.config import Config
from opforge.runtime.execute.load import build_library
from opforge.runtime.render import cpp_unit as unit_text
from opforge.runtime.render.cpp_unit import KERNELS
from opforge.runtime.targets import cpu as engine

_SYMBOL = re.compile(r'extern "C" [^(]*\(\([^)]*\)\)\) \w+ (\w+)\(')


@dataclass
class _Unit:
    """The kernels of one graph: their source, and the library that has them under other names once one of them is called."""

    source: str
    cfg: Config
    prefix: str
    library: ctypes.CDLL | None = None
    error: BuildError | None = None

    def routines(self) -> list[str]:
        """The texts of the routines that it calls; several units may have them."""
        texts = [path.read_text() for path in sorted(KERNELS.glob("routine_*.h"))]
        return [text for text in texts if text in self.source]

    def text(self, head: str) -> str:
        """Its source without the prelude and routines, with names of its own."""
        body = self.source.removeprefix(head)
        for text in self.routines():
            body = body.replace(text, "")
        for symbol in _SYMBOL.findall(body):
            body = re.sub(rf"\b{symbol}\b", self.prefix + symbol, body)
        return f"namespace {self.prefix}all {{\n{body}\n}}\n"


@dataclass
class _Function:
    """A kernel that is compiled when it is called."""

    batch: Batch
    unit: _Unit
    symbol: str
    argtypes: Any = None
    restype: Any = None
    ready: Any = None

    def __call__(self, *args: Any) -> Any:
        if self.ready is None:
            if self.unit.library is None and self.unit.error is None:
                self.batch.build()
            if self.unit.error is not None:
                raise self.unit.error
            self.ready = self.unit.library[self.unit.prefix + self.symbol]  # type: ignore[index]
            self.ready.argtypes, self.ready.restype = self.argtypes, self.restype
        return self.ready(*args)


@dataclass
class Batch:
    """Stands for the engine's `compile_library` and `load_file`: what is kept as a library names a unit, and its kernels are lazy."""

    units: list[_Unit] = field(default_factory=list)
    waiting: list[_Unit] = field(default_factory=list)

    def compile_library(self, source: str, *, name: str, cfg: Config) -> bytes:
        """The name of the unit; `build` compiles it."""
        unit = _Unit(source, cfg, f"u{len(self.units)}_")
        self.units.append(unit)
        self.waiting.append(unit)
        return str(len(self.units) - 1).encode()

    def load_file(self, entry: Entry, file: str) -> dict[str, _Function]:
        """The kernels by name of the unit that an entry of the cache names."""
        return self.kernels(entry.read(file))

    def kernels(self, unit_name: bytes) -> dict[str, _Function]:
        """The unit's kernels by name."""
        unit = self.units[int(unit_name)]
        return {symbol: _Function(self, unit, symbol) for symbol in _SYMBOL.findall(unit.source)}

    def build(self) -> None:
        """Compile what waits, as one unit; one by one where that fails, so that the one at fault is known."""
        units, self.waiting = self.waiting, []
        head = unit_text.PRELUDE.read_text()
        try:
            self._build(units, head)
        except BuildError:
            for unit in units:
                try:
                    self._build([unit], head)
                except BuildError as error:
                    unit.error = error

    def _build(self, units: list[_Unit], head: str) -> None:
        routines = "".join(dict.fromkeys(text for u in units for text in u.routines()))
        source = head + routines + "".join(u.text(head) for u in units)
        library = build_library(source, name="kernels", cfg=units[0].cfg)
        for unit in units:
            unit.library = library


_compile_library, _load_file = engine.compile_library, engine.load_file


@contextlib.contextmanager
def together(folder: Path) -> Iterator[None]:
    """Kernels are compiled when the first of them is called, with all others that wait."""
    folder.mkdir(exist_ok=True)
    batch = Batch()
    engine.compile_library, engine.load_file = batch.compile_library, batch.load_file  # type: ignore[assignment]
    try:
        # A cache of its own: files that name units mean nothing to others.
        with opforge.config.patch({"cache_dir": str(folder / "cache")}):
            yield
    finally:
        engine.compile_library, engine.load_file = _compile_library, _load_file
