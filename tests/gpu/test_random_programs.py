"""Random programs on a CUDA device beside eager: those that once differed, and the first of each family. `python -m tests.fuzz --device cuda` runs
more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.check import check, quick_builds
from tests.fuzz.families import FAMILIES, program_of

pytestmark = pytest.mark.gpu

FIRST = 25
FOUND = {
    # The gradient of `rms_norm` took addresses of sizes for sizes; of 100603 a maximum was not found among values that were summed up again.
    "norms": (5, 100006, 100160, 100198, 100212, 100258, 100603, 100681, 100910, 100968, 101048),
    # A product and what it was subtracted from were one rounding.
    "numbers": (100116,),
    # ptxas dropped a constant of a row's place (a loss over the rows of a tensor of four dimensions); a rule of positions in pools saw no end
    # beside a symbolic batch.
    "modules": (100020, 100305, 100484, 100541, 100543, 100598, 100714, 100297, 100490, 100499, 100554, 100567, 100616),
}
"""Seeds by family."""
PROGRAMS = [(f.name, seed) for f in FAMILIES.values() if f.on_gpus for seed in (*range(FIRST), *FOUND.get(f.name, ()))]


@pytest.fixture(autouse=True)
def quick(tmp_path: Path) -> Iterator[None]:
    with quick_builds(tmp_path):
        yield


@pytest.mark.parametrize(("family", "seed"), PROGRAMS)
def test_as_eager(family: str, seed: int) -> None:
    found = check(program_of(family, seed, "cuda"))
    assert found.different == []
