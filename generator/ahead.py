"""A user's spec file on the command line: `opforge check my_ops.yaml`, `opforge generate my_ops.yaml -o my_pkg/`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from ..errors import SpecError
from .diagnostics import Diagnostics
from .load import load_spec
from .model import Model
from .new_op import template
from .run import format_module, load_model, load_user_model
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
        "    ops.COMPLEX.difference_update(LOWERINGS)",
        "    ops.COMPLEX.update(COMPLEX)",
        "    ops.ANY_STRIDES.difference_update(LOWERINGS, EXTERN)",
        "    ops.ANY_STRIDES.update(ANY_STRIDES)",
    ]
    text = generate_module(path, user_schemas(path, imports)) + "\n".join(lines) + "\n"
    return format_module(text)


def new_entry(name: str, kind: str, out: Path | None = None, imports: Sequence[str] = ()) -> str:
    """The template entry of an operator, of torch's or one that `imports` register. See `new_op.template`."""
    model = load_model()
    if imports:
        namespace = name.partition(".")[0]
        model = replace(model, torch=_imported(imports, [out or Path("-")], {namespace}))
    return template(name, kind, model)


def user_schemas(path: Path, imports: Sequence[str]) -> TorchSchemas:
    """Torch's schemas from the snapshot, with those of the file's own operators when `imports` register them.

    `imports` are names of modules, which are imported; only then is torch loaded. They are looked for in the current
    folder and beside the file too, wherever Python itself was started from.
    """
    if not imports:
        return TorchSchemas.snapshot()
    namespaces = {
        name.partition(".")[0] for e in load_spec(path, Diagnostics()) for _, name in e.names() if "." in name
    }
    return _imported(imports, [path], namespaces)


def _imported(imports: Sequence[str], files: Sequence[Path], namespaces: Collection[str]) -> TorchSchemas:
    """The snapshot and the operators of `namespaces` that exist after `imports`."""
    folders = list(dict.fromkeys([str(Path.cwd()), *(str(f.resolve().parent) for f in files)]))
    sys.path[:0] = folders
    try:
        for name in imports:
            try:
                import_module(name)
            except ImportError as e:
                where = ", ".join(folders)
                raise SpecError(f"cannot import '{name}': {e} (looked in {where}, then where Python looks)") from e
    finally:
        for folder in folders:
            sys.path.remove(folder)
    schemas = TorchSchemas.snapshot()
    known = {packet.partition(".")[0] for packet in schemas.packets()}
    return schemas.extended(torch_lines(sorted(set(namespaces) - known)))
