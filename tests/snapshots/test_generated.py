"""What `generated/` offers, name by name: a reviewer sees at one glance what a change of the specs added or took away.

That its bytes are what the specs say is checked elsewhere (`opforge generate --check`); this is the part people read. The
functions of operators are left out: docs/operators.md lists them, and adding an operator must not need an accepted text.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

GENERATED = Path(__file__).parent.parent.parent / "generated"

CPP_NAME = re.compile(
    r"^(?:template <[^\n]*?> )?(?:OPF_INLINE [\w<>:, ]*?[ &*](\w+)\(|(?:struct|union) (\w+)\b|#define (\w+)|typedef .*?(\w+);)",
    re.M,
)


class TextFile(SingleFileSnapshotExtension):
    """One text file."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"


def names(path: Path) -> Iterator[str]:
    """The public names that a generated file defines, in its order."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from dict.fromkeys(next(filter(None, m.groups())) for m in CPP_NAME.finditer(text))
        return
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            yield f"{node.name}({', '.join(a.arg for a in (*node.args.args, *node.args.kwonlyargs))})"
        elif isinstance(node, ast.ClassDef):
            fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            fields += [
                t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
            ]
            yield f"class {node.name}({', '.join(fields)})"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            count = f"[{len(node.value.keys)}]" if isinstance(node.value, ast.Dict) else ""
            yield from (t.id + count for t in targets if isinstance(t, ast.Name))


def test_names(snapshot: SnapshotAssertion) -> None:
    files = sorted(p for p in GENERATED.rglob("*") if p.is_file() and not {"__pycache__", "ops"} & set(p.parts))
    lines: list[str] = []
    for path in files:
        public = [n for n in names(path) if not n.startswith("_")]
        lines += ["", f"{path.relative_to(GENERATED).as_posix()}: {len(public)}"]
        lines += [f"    {row}" for name in public for row in textwrap.wrap(name, 140, subsequent_indent="    ")]
    assert "\n".join(lines[1:]) + "\n" == snapshot(extension_class=TextFile)
