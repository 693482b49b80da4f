"""The environment of templates."""

from __future__ import annotations

from opforge.generator.render import environment


def test_no_bytecode_is_read_from_disk() -> None:
    """Jinja unmarshals kept templates whoever wrote them."""
    assert environment().bytecode_cache is None
