"""What generated wrappers import, for a processor and for a GPU."""

from __future__ import annotations

import ast
from pathlib import Path

from opforge.runtime.execute import cuda, support
from opforge.runtime.host import wrapper


def test_both_modules_have_what_wrappers_import() -> None:
    """Names that the writer adds to a wrapper's imports where it needs them, as literals."""
    calls = [n for n in ast.walk(ast.parse(Path(wrapper.__file__).read_text())) if isinstance(n, ast.Call)]
    added = [c for c in calls if ast.unparse(c.func) == "self.imports.append"]
    names = {str(ast.literal_eval(c.args[0])) for c in added} | {
        "Workspaces",
        "empty_strided",
        "overload",
        "reinterpret",
    }
    assert {"as_complex", "conform", "own_complex"} <= names
    for module in support, cuda:
        assert names <= set(module.__all__)
        assert all(hasattr(module, name) for name in names)
