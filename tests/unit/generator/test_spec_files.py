"""Wrong spec files, each with its exact message beside it, and right ones that must be accepted; found by directory.

`--snapshot-update` writes the messages anew: read the difference before committing.
"""

from pathlib import Path

import pytest

from opforge.errors import SpecError
from opforge.generator.model import Model
from opforge.generator.run import load_model, load_user_model

SPECS = Path(__file__).parent.parent.parent / "specs"


@pytest.fixture(scope="module")
def base() -> Model:
    return load_model()


@pytest.mark.parametrize("name", sorted(p.stem for p in (SPECS / "fail").glob("*.yaml")))
def test_wrong_spec(name: str, base: Model, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(SPECS / "fail")
    with pytest.raises(SpecError) as caught:
        load_user_model(Path(f"{name}.yaml"), base)
    found = str(caught.value) + "\n"
    expected = SPECS / "fail" / f"{name}.txt"
    if request.config.getoption("--snapshot-update", default=False):
        expected.write_text(found)
    assert found == expected.read_text()


@pytest.mark.parametrize("name", sorted(p.stem for p in (SPECS / "pass").glob("*.yaml")))
def test_right_spec(name: str, base: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SPECS / "pass")
    model = load_user_model(Path(f"{name}.yaml"), base)
    assert any(model.parts.values())


def test_enough_wrong_specs_with_a_message_each() -> None:
    wrong = {p.stem for p in (SPECS / "fail").glob("*.yaml")}
    assert wrong == {p.stem for p in (SPECS / "fail").glob("*.txt")}
    assert len(wrong) >= 30
