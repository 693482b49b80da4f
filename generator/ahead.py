"""A user's spec file ahead of time: `opforge generate my_ops.yaml -o my_pkg/` writes `my_pkg/my_ops.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from ..errors import SpecError
from .diagnostics import Diagnostics
from .emit.lowerings import module_text, tables
from .load import load_spec
from .model import Model
from .render import header, literal
from .run import load_model, load_user_model
from .torch_schemas import torch_lines


def user_model(path: Path, imports: Sequence[str] = ()) -> Model:
    """The checked model of one user file over opforge's own specs.

    `imports` are modules that register the file's own operators with torch: they are imported, torch gives the schemas.
    Raises `SpecError` with every mistake.
    """
    base = load_model()
    if imports:
        for name in imports:
            try:
                import_module(name)
            except ImportError as e:
                raise SpecError(f"cannot import '{name}': {e}") from e
        known = {packet.partition(".")[0] for packet in base.torch.packets()}
        namespaces = sorted(namespaces_of(path) - known)
        base = replace(base, torch=base.torch.extended(torch_lines(namespaces)))
    return load_user_model(path, base)


def namespaces_of(path: Path) -> set[str]:
    """The operator namespaces that a file's entries name."""
    entries = load_spec(path, Diagnostics()).entries
    return {name.partition(".")[0] for e in entries for _, name in e.names() if "." in name}


def user_module(path: Path, model: Model, command: str) -> str:
    """The Python module of a user's operators: their lowerings, and `register()` to add them to the process."""
    entries = model.part("ops")
    if not entries:
        raise SpecError(f"{path}: no 'op' entry, so there is nothing to generate")
    made = tables(entries)["lowerings"]
    names = {overload: where.partition(":")[2] for overload, where in made.items()}
    lines = [
        "",
        "",
        "def register() -> None:",
        '    """Make these operators native in this process."""',
        "    from opforge.generated.ops import LOWERINGS",
        "",
        *(f"    LOWERINGS.add({literal(o)}, {name})" for o, name in sorted(names.items())),
    ]
    module = path.with_suffix(".py").name
    return header(module, path.name, command) + module_text(entries, "opforge.runtime.lower") + "\n".join(lines) + "\n"
