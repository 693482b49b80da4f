"""The digest of opforge's own code in the keys of the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import opforge
from opforge.runtime.realize import code_digest

PACKAGE = Path(opforge.__file__).parent
FILES = [
    "runtime/lower/split/windows.py",
    "runtime/realize.py",
    "runtime/build/compiler.py",
    "runtime/targets/cpu.py",
    "generated/config.py",
    "generated/kernels/prelude.h",
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("package")
    for name in ("runtime", "generated"):
        shutil.copytree(PACKAGE / name, root / name)
    return root


def test_a_copy_has_the_same_digest(copy: Path) -> None:
    assert code_digest.__wrapped__(copy) == code_digest()


@pytest.mark.parametrize(
    "name", [*FILES, next((PACKAGE / "generated" / "ops").glob("*.py")).relative_to(PACKAGE).as_posix()]
)
def test_every_file_counts(copy: Path, name: str) -> None:
    """Files that ran after the key was taken were in no key, so that a changed opforge met its old artifacts."""
    file, text = copy / name, (copy / name).read_bytes()
    file.write_bytes(text + b"\n")
    try:
        assert code_digest.__wrapped__(copy) != code_digest()
    finally:
        file.write_bytes(text)


def test_names_count_and_bytecode_does_not(copy: Path) -> None:
    file = copy / "runtime" / "lower" / "split" / "windows.py"
    (copy / "runtime" / "lower" / "__pycache__").mkdir(exist_ok=True)
    (copy / "runtime" / "lower" / "__pycache__" / "other.pyc").write_bytes(b"")
    assert code_digest.__wrapped__(copy) == code_digest()
    moved = file.rename(copy / "runtime" / "windows.py")
    try:
        assert code_digest.__wrapped__(copy) != code_digest()
    finally:
        moved.rename(file)
