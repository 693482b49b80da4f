"""A user's spec file on the command line: `opforge check my_ops.yaml`, `opforge generate my_ops.yaml -o my_pkg/`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from ..errors import SpecError
from .diagnostics import Diagnostics
from .load import load_spec
from .model import Model
from .run import format_files, load_model, load_user_model
from .torch_schemas import TorchSchemas, torch_lines
from .user import generate_module


def check_user_file(path: Path, imports: Sequence[str] = ()) -> Model:
    """The checked model of one user file over opforge's own specs. Raises `SpecError` with every mistake."""
    return load_user_model(path, replace(load_model(), torch=user_schemas(path, imports)))


def user_module(path: Path, imports: Sequence[str] = ()) -> str:
    """The Python module of a user's operators: lowerings, tables, and `register()`, which makes them native.

    Raises `SpecError` with every mistake of the file.
    """
    lines = [
        "",
        "",
        "def register() -> None:",
        '    """Make these operators native in this process."""',
        "    from opforge.generated import ops",
        "",
        "    for overload, function in LOWERINGS.items():",
        "        ops.LOWERINGS.add(overload, function)",
        "    ops.EXTERN.update(EXTERN)",
    ]
    text = generate_module(path, user_schemas(path, imports)) + "\n".join(lines) + "\n"
    return format_files({"module.py": text})["module.py"]


def user_schemas(path: Path, imports: Sequence[str]) -> TorchSchemas:
    """Torch's schemas from the snapshot, with those of the file's own operators when `imports` register them.

    `imports` are names of modules, which are imported; only then is torch loaded.
    """
    schemas = TorchSchemas.snapshot()
    if not imports:
        return schemas
    for name in imports:
        try:
            import_module(name)
        except ImportError as e:
            raise SpecError(f"cannot import '{name}': {e}") from e
    known = {packet.partition(".")[0] for packet in schemas.packets()}
    own = {name.partition(".")[0] for e in load_spec(path, Diagnostics()) for _, name in e.names() if "." in name}
    return schemas.extended(torch_lines(sorted(own - known)))
