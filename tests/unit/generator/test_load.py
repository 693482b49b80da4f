"""Loading: values, positions (every character of a text is found again in the file), and text that is no YAML."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opforge.generator.diagnostics import Diagnostics, did_you_mean, one_of
from opforge.generator.load import Document, load_spec, load_text, resolve_plain


def load(text: str) -> Document:
    diags = Diagnostics()
    doc = load_text(text, "x.yaml", diags)
    assert not diags, diags.render()
    return doc


FORMS = """\
- op: aten.relu
  plain: a + b
  plain_folded: first second
    third

    fourth
  single: 'it''s "quoted"'
  single_folded: 'one
    two'
  double: "tab\\there \\u00e9 \\x41 \\"q\\" end"
  literal: |
    m = amax(self)

      e = exp(self - m)
    return e
  folded: >-
    one
    two

    three
  kept: |2
      indented
    less
  nested: [{if: a, is: bcd}, {is: "x\\ty"}]
"""


def test_every_character_has_its_place() -> None:
    entry = load(FORMS).entries[0]
    lines = FORMS.split("\n")
    paths = [(k,) for k in entry.data if k != "nested"] + [("nested", 0, "is"), ("nested", 1, "is")]
    escapes = {"\t": "\\", "é": "\\", '"': '\\"', "A": "\\A"}
    for path in paths:
        value = entry.data
        for part in path:
            value = value[part]
        for at, char in enumerate(value):
            pos = entry.pos(*path, at=at)
            found = lines[pos.line - 1][pos.col - 1 : pos.col]
            if char.isspace() and not found.strip():
                continue  # a fold or a line's end
            assert found == char or found in escapes.get(char, ""), (path, at, char, found, str(pos))


def test_place_of_keys_values_and_items() -> None:
    entry = load("- op: aten.relu\n  expr:\n    - if: c\n      is: value\n    - is: 3\n").entries[0]
    assert str(entry.pos("expr", 1, "is")) == "x.yaml:5:11"
    assert str(entry.key_pos("expr", 0, "is")) == "x.yaml:4:7"
    assert str(entry.key_pos("expr")) == "x.yaml:2:3"
    assert str(entry.pos("expr", 7, "is")) == "x.yaml:3:5", "the nearest that exists"
    assert entry.pos("expr", 0, "is").length == len("value")


words = st.text(alphabet=st.sampled_from("ab+ ('\"é:#"), min_size=1, max_size=12).filter(lambda t: t.strip())


@given(st.lists(words.map(str.strip), min_size=1, max_size=4))
def test_places_in_literal_blocks(lines: list[str]) -> None:
    text = "- op: x\n  body: |\n" + "".join(f"     {line}\n" for line in lines)
    entry = load(text).entries[0]
    shown = text.split("\n")
    for at, char in enumerate(entry["body"]):
        pos = entry.pos("body", at=at)
        assert (shown[pos.line - 1] + "\n")[pos.col - 1] == char


@given(words.map(lambda t: t.replace('"', "")))
def test_places_in_single_quotes(value: str) -> None:
    text = "- op: '" + value.replace("'", "''") + "'\n"
    entry = load(text).entries[0]
    assert entry["op"] == value
    for at, char in enumerate(value):
        assert text[entry.pos("op", at=at).col - 1] == char


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("on", "on"),
        ("1e-5", 1e-5),
        ("1_000", "1_000"),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("-3", -3),
        (".inf", float("inf")),
        ("null", None),
        ("~", None),
        ("true", True),
        ("True", True),
        ("1.", 1.0),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
    ],
)
def test_plain_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = resolve_plain(text)
    assert found == value
    assert type(found) is type(value)


def test_quoted_numbers_stay_text() -> None:
    assert load("- op: \"3\"\n  a: '3'\n  b: 3\n").entries[0].data == {"op": "3", "a": "3", "b": 3}


def test_includes_come_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    for name in ("b", "a"):
        (tmp_path / "ops" / f"{name}.yaml").write_text(f"- op: {name}\n")
    (tmp_path / "ops.yaml").write_text("- op: first\n- include: ops/*.yaml\n- op: last\n")
    diags = Diagnostics()
    doc = load_spec(tmp_path / "ops.yaml", diags, name="specs/ops.yaml")
    assert [e.id for e in doc] == ["first", "a", "b", "last"]
    assert [str(e.pos("op")) for e in doc][1] == "specs/ops/a.yaml:1:7"
    assert [e.family for e in doc] == ["ops", "a", "b", "ops"]
    assert not diags


def test_carriage_returns_and_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xef\xbb\xbf- op: a\r\n  doc: b\r\n")
    diags = Diagnostics()
    doc = load_spec(tmp_path / "x.yaml", diags, name="x.yaml")
    assert not diags
    assert doc.entries[0].data == {"op": "a", "doc": "b"}
    assert str(doc.entries[0].pos("doc")) == "x.yaml:2:8"


@pytest.mark.parametrize(
    "text",
    [
        "- a: " + "[" * 100_000,
        "- " * 50_000 + "a",
        "\n".join(" " * i + "a:" for i in range(3000)),
        "- a: &x [*x]",
        "\0",
    ],
    ids=["brackets", "dashes", "mappings", "recursive alias", "nul"],
)
def test_hostile_text_is_an_error(text: str) -> None:
    diags = Diagnostics()
    load_text(text, "x.yaml", diags)
    assert diags
    assert len(diags.render()) < 2000


@given(st.binary(max_size=60), st.integers(0, len(FORMS)))
def test_broken_files_give_errors_not_tracebacks(noise: bytes, at: int) -> None:
    diags = Diagnostics()
    load_text(FORMS[:at] + noise.decode("latin-1") + FORMS[at:], "x.yaml", diags)
    diags.render()


def test_all_mistakes_are_shown_in_source_order_once() -> None:
    diags = Diagnostics()
    doc = load_text("- op: aa\n  b: c\n", "x.yaml", diags)
    entry = doc.entries[0]
    for _ in range(2):
        diags.error(entry.pos("b"), "second", also=[(entry.pos("op"), "because of this")])
        diags.error(entry.key_pos("op"), "first")
    assert diags.render() == (
        "x.yaml:1:3: error: first\n    1 | - op: aa\n      |   ^^\n"
        "x.yaml:2:6: error: second\n    2 |   b: c\n      |      ^\n"
        "x.yaml:1:7: note: because of this\n    1 | - op: aa\n      |       ^^\n2 errors"
    )


def test_long_lines_are_cut_around_the_place() -> None:
    diags = Diagnostics()
    doc = load_text("- op: " + "x" * 500 + " here " + "y" * 500 + "\n", "x.yaml", diags)
    shown = doc.entries[0].pos("op", at=501).excerpt().split("\n")
    assert len(shown[0]) < 200
    assert shown[0][shown[1].index("^") :].startswith("here")


def test_names_in_messages() -> None:
    assert did_you_mean("pointwize", ["pointwise", "view"]) == "; did you mean 'pointwise'?"
    assert did_you_mean("zzz", ["pointwise"]) == ""
    assert one_of(["a", "b", "c"]) == "'a', 'b' or 'c'"
    assert one_of(["a"]) == "'a'"
    assert one_of(str(i) for i in range(30)).endswith("… (6 more)")
