"""What generated wrappers import, for a processor and for a GPU."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

from opforge.runtime.execute import cuda, support
from opforge.runtime.host import python
from opforge.runtime.host.program import How


def test_both_modules_have_what_wrappers_import() -> None:
    """Functions of `execute` that the writer calls by their names, as literals."""
    calls = [n for n in ast.walk(ast.parse(Path(python.__file__).read_text())) if isinstance(n, ast.Call)]
    called = [c.args[0] for c in calls if ast.unparse(c.func) == "self._call"]
    names = {str(a.value) for a in called if isinstance(a, ast.Constant)}
    names |= {name for name in python.COMPLEX.values() if "." not in name}
    names |= {"Workspaces", "empty_strided", "profiled", "reinterpret"}
    names |= {*get_args(How)} - {"function"}
    assert {"as_complex", "conform", "own_complex"} <= names
    for module in support, cuda:
        assert names <= set(module.__all__)
        assert all(hasattr(module, name) for name in names)
