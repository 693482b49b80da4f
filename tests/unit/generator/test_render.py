"""The environment of templates."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from opforge.generator.render import environment


def test_translated_templates_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: str(tmp_path))
    environment.__wrapped__().get_template("tuning.py.j2")
    assert len(list((tmp_path / "templates").iterdir())) == 1


def test_without_a_folder_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: str(taken))
    made = environment.__wrapped__()
    assert made.bytecode_cache is None
    assert made.get_template("tuning.py.j2")
