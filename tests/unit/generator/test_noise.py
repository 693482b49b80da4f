"""Noise in real spec files is answered by mistakes with a place, never by a traceback."""

import random
from contextlib import suppress
from pathlib import Path

import pytest

from opforge.errors import SpecError
from opforge.generator.diagnostics import Diagnostics
from opforge.generator.load import load_spec
from opforge.generator.model import Model
from opforge.generator.run import SPECS_DIR, load_model, load_user_model

SEED = 1
FILES = sorted(p for p in SPECS_DIR.rglob("*.yaml") if p.name != "polynomials.yaml")
NOISE = [
    "",
    " ",
    "\n",
    "(",
    ")",
    "[",
    "]",
    ",",
    ":",
    ": ",
    "-",
    "'",
    '"',
    "*",
    "x",
    "0",
    ".",
    "é",
    "\t",
    "#",
    "None",
    "lambda: ",
    "**",
    "==",
]


@pytest.fixture(scope="module")
def base() -> Model:
    return load_model()


def entries_of(path: Path) -> list[str]:
    """The text of each entry of a file."""
    lines = path.read_text().splitlines(keepends=True)
    starts = [e.pos().line - 1 for e in load_spec(path, Diagnostics()) if e.source.name == path.as_posix()]
    return ["".join(lines[a:b]) for a, b in zip(starts, [*starts[1:], len(lines)], strict=False)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(SPECS_DIR).as_posix())
def test_noise(path: Path, base: Model, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    texts = entries_of(path)
    target = tmp_path / "noise.yaml"
    for _ in range(40 if texts else 0):
        text = rng.choice(texts)
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(NOISE) + text[at + rng.randint(0, 4) :]
        target.write_text(text)
        with suppress(SpecError):
            load_user_model(target, base)
