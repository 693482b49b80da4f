"""A tiny spec in, exact text out."""

from opforge.generator.diagnostics import Diagnostics
from opforge.generator.emit import languages
from opforge.generator.load import load_text
from opforge.generator.model import Model
from opforge.generator.render import header
from opforge.generator.run import SPECS_DIR, format_files
from opforge.generator.torch_schemas import TorchSchemas

SPEC = """\
- language: cpp
  doc: "C."
  arguments: 3
  operands: 2
  dtypes:
    float16: {memory: half, register: float}
- language: triton
  doc: "T."
  arguments: 5
  operands: 4
  capability: 75
  aligned: 8
  barrier: meet()
  atomics:
    sum: {operation: add, dtypes: [float16]}
  published: [float16]
  dtypes:
    float16: {value: tl.float16, pointer: fp16}
"""
EXPECTED = """\
# spec: cpp
CPP_LANGUAGE = Cpp(
    arguments=3,
    operands=2,
    dtypes={
        "float16": CppDtype("half", "float"),
    },
)

# spec: triton
TRITON_LANGUAGE = Triton(
    arguments=5,
    operands=4,
    capability=75,
    aligned=8,
    barrier="meet()",
    atomics={
        "sum": Atomic("add", ("float16",)),
    },
    published=("float16",),
    dtypes={
        "float16": TritonDtype("tl.float16", "fp16"),
    },
)
"""


def emitted(spec: str) -> dict[str, str]:
    diags = Diagnostics()
    doc = load_text(spec, "languages.yaml", diags)
    part = languages.build(doc, Model(SPECS_DIR, {}, {}, TorchSchemas([])), diags)
    assert not diags, diags.render()
    return languages.emit(Model(SPECS_DIR, {"languages": doc}, {"languages": part}, TorchSchemas([])))


def test_languages_become_their_tables() -> None:
    formatted = format_files(emitted(SPEC))[languages.PATH]
    assert formatted.endswith(EXPECTED)
    assert formatted.startswith(header(languages.PATH, "specs/languages/*.yaml"))


def test_one_language_alone_makes_no_file() -> None:
    assert emitted(SPEC[: SPEC.index("- language: triton")]) == {}
