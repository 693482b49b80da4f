"""A tiny spec in, exact text out."""

from opforge.generator.diagnostics import Diagnostics
from opforge.generator.emit import config, docs, targets
from opforge.generator.load import load_text
from opforge.generator.model import Model
from opforge.generator.render import header, literal
from opforge.generator.run import SPECS_DIR, format_files
from opforge.generator.torch_schemas import TorchSchemas

SPEC = """\
- setting: debug.level
  doc: How much is checked.
  type: choice
  default: "1"
  choices: ["0", "1"]
  env: OPFORGE_DEBUG_LEVEL
  affects: debug
"""
EXPECTED = """\
    # spec: debug.level
    #: How much is checked.
    debug_level: str = "1"


FIELDS: dict[str, Setting] = {
    # spec: debug.level
    "debug.level": Setting(
        name="debug.level",
        field="debug_level",
        type="choice",
        default="1",
        choices=("0", "1"),
        env="OPFORGE_DEBUG_LEVEL",
        affects="debug",
        doc="How much is checked.",
    ),
}
"""


def test_settings_become_fields_and_a_table() -> None:
    diags = Diagnostics()
    doc = load_text(SPEC, "config.yaml", diags)
    model = Model(SPECS_DIR, {"config": doc}, {}, TorchSchemas([]))
    part = config.build(doc, model, diags)
    assert not diags, diags.render()
    text = config.emit(Model(SPECS_DIR, {"config": doc}, {"config": part}, TorchSchemas([])))[config.PATH]
    formatted = format_files({config.PATH: text})[config.PATH]
    assert formatted.endswith(EXPECTED)
    assert formatted.startswith(header(config.PATH, "specs/config.yaml"))


def test_a_target_is_a_choice_of_the_processors() -> None:
    diags = Diagnostics()
    spec = SPEC.replace('  choices: ["0", "1"]\n', "").replace("choice\n", "target\n").replace('"1"', "auto")
    doc = load_text(spec, "config.yaml", diags)
    machines = targets.TargetSet({"wide": {}, "narrow": {}}, {"sm_1": {}})
    (setting,) = config.build(doc, Model(SPECS_DIR, {}, {"targets": machines}, TorchSchemas([])), diags)
    assert not diags, diags.render()
    assert (setting.type, setting.choices) == ("choice", ("auto", "narrow", "wide"))


def test_the_page_of_settings_has_a_row_for_each() -> None:
    diags = Diagnostics()
    more = (
        SPEC.replace("debug.level", "folder")
        .replace("LEVEL", "FOLDER")
        .replace("DEBUG_", "")
        .replace("choice\n", "path\n")
    )
    more = (
        more.replace('default: "1"', 'default: ""')
        .replace('  choices: ["0", "1"]\n', "")
        .replace("affects: debug", "affects: run")
    )
    doc = load_text(SPEC + more, "config.yaml", diags)
    model = Model(SPECS_DIR, {"config": doc}, {}, TorchSchemas([]))
    part = config.build(doc, model, diags)
    assert not diags, diags.render()
    text = docs.emit(Model(SPECS_DIR, {"config": doc}, {"config": part}, TorchSchemas([])))[docs.SETTINGS]
    assert text.startswith(header(docs.SETTINGS, "specs/config.yaml"))
    runs, debug = text.split("\n## ")[2:]
    assert runs.endswith('| `folder` | path | `""` | `OPFORGE_FOLDER` | How much is checked. |\n')
    assert debug.endswith("| `debug.level` | `0`, `1` | `1` | `OPFORGE_DEBUG_LEVEL` | How much is checked. |\n")


def test_no_spec_no_file() -> None:
    assert config.emit(Model(SPECS_DIR, {}, {}, TorchSchemas([]))) == {}


def test_literals_are_what_ruff_would_write() -> None:
    values = ["it's", 'say "x"', "both ' and \"", "a\nb\\", 1.5, float("inf"), None, True, (1,), [], {"a": ("b",)}]
    for value in values:
        text = literal(value)
        assert eval(text) == value
        assert format_files({"x.py": f"x = {text}\n"})["x.py"] == f"x = {text}\n"
