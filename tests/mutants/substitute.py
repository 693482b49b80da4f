"""`substitute FOLDER TEST...`: pytest in a process that imports the modules of a folder in the place of those of `opforge.generated`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = "opforge.generated."


class Substitutes(MetaPathFinder):
    """Finds modules of `opforge.generated` in a folder first."""

    def __init__(self, folder: Path) -> None:
        self.files = {PACKAGE + path.stem: path for path in folder.glob("*.py")}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of the folder, None for all others."""
        file = self.files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def main() -> int:
    """Pytest's exit status; stops at the first failure."""
    sys.meta_path.insert(0, Substitutes(Path(sys.argv[1])))
    words = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--tb=line", "-r", "fE"]
    return int(pytest.main([*words, *sys.argv[2:]]))


if __name__ == "__main__":
    sys.exit(main())
