"""A user's own spec file: checked against the live operator schemas, printed as a Python module, and registered in the running process."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from ..errors import SpecError
from .diagnostics import Diagnostics
from .emit.lowerings import function_name, module_text
from .load import load_spec
from .model import Model
from .op_entries import OpEntry
from .render import header, literal
from .run import format_module, load_model, load_user_model
from .torch_schemas import TorchSchemas, torch_lines

_base = cache(load_model)


def generate_module(path: str | Path, schemas: TorchSchemas | None = None) -> str:
    """The Python module that a user's spec file becomes: its lowering functions and the tables `LOWERINGS`, `EXTERN`,
    `COMPLEX` and `ANY_STRIDES`.

    `schemas` are torch's with the user's own operators; by default those that are registered in this process.
    Raises `SpecError` with every mistake of the file.
    """
    path = Path(path)
    entries = _entries(path, schemas)
    lowerings = {w.schema.id: function_name(w.schema) for e in entries for w in e.lowerings}
    extern = {s.id: e.why for e in entries if e.why for s in e.schemas}
    text = header("module.py", path.name, f"opforge generate {path.name}") + module_text(
        entries, "opforge.runtime.lower.language"
    )
    text += "\n\nLOWERINGS = {" + "".join(f"\n    {literal(k)}: {v}," for k, v in sorted(lowerings.items())) + "\n}\n"
    text += f"EXTERN: dict[str, str] = {literal(dict(sorted(extern.items())))}\n"
    complex_ = sorted(w.schema.id for e in entries if e.complex for w in e.lowerings)
    any_strides = sorted(s.id for e in entries if e.any_strides for s in e.schemas)
    text += f"COMPLEX: set[str] = set({literal(complex_)})\n"
    text += f"ANY_STRIDES: set[str] = set({literal(any_strides)})\n"
    return format_module(text)


def load_user_specs(path: str | Path) -> list[str]:
    """Make the operators of a user's spec file native in this process; returns their overloads. Raises `SpecError`."""
    from ..generated import ops

    module = _imported(generate_module(path), Path(path))
    for overload, function in module.LOWERINGS.items():
        ops.LOWERINGS.add(overload, function)
    ops.EXTERN.update(module.EXTERN)
    ops.COMPLEX.difference_update(module.LOWERINGS)
    ops.COMPLEX.update(module.COMPLEX)
    ops.ANY_STRIDES.difference_update(module.LOWERINGS, module.EXTERN)
    ops.ANY_STRIDES.update(module.ANY_STRIDES)
    return sorted(module.LOWERINGS)


def _entries(path: Path, schemas: TorchSchemas | None) -> tuple[OpEntry, ...]:
    if schemas is None:
        schemas = TorchSchemas.snapshot().extended(torch_lines(_namespaces(path)))
    base: Model = replace(_base(), torch=schemas)
    entries: tuple[OpEntry, ...] = load_user_model(path, base).part("ops")
    diags = Diagnostics()
    for entry in load_spec(path, diags):
        if entry.tag != "op":
            diags.error(
                entry.key_pos(entry.tag),
                f"a spec file of your own holds operators ('- op: namespace.name'); a '{entry.tag}' belongs into opforge's own specs",
            )
    diags.raise_if_any()
    if not entries:
        raise SpecError(f"{path}: no operator entry ('- op: namespace.name')")
    seen: dict[str, str] = {}
    for w in (w for e in entries for w in e.lowerings):
        other = seen.setdefault(function_name(w.schema), w.schema.id)
        if other != w.schema.id:
            raise SpecError(f"{path}: '{other}' and '{w.schema.id}' have the same name: put one into a file of its own")
    return entries


def _namespaces(path: Path) -> Iterable[str]:
    """The namespaces of the operators in a file, beside torch's."""
    names = {name.partition(".")[0] for entry in load_spec(path, Diagnostics()) for _, name in entry.names()}
    return sorted(names - {"aten", "prims"})


class _Printed(SourceLoader):
    """Imports a printed module from memory; tracebacks show its source."""

    def __init__(self, text: str, filename: str) -> None:
        self.text, self.filename = text, filename

    def get_data(self, path: str) -> bytes:
        return self.text.encode()

    def get_filename(self, fullname: str) -> str:
        return self.filename


def _imported(text: str, path: Path) -> ModuleType:
    name = f"opforge_user_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_loader(name, _Printed(text, f"<opforge {path.name}>"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module
