"""The schemas are JSON Schemas, and our checker gives the same verdict on them as the jsonschema package."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from opforge.generator.diagnostics import Diagnostics
from opforge.generator.load import load_spec
from opforge.generator.run import SPECS, SPECS_DIR
from opforge.generator.schema import KEYWORDS, SchemaFile

FILES = sorted((SPECS_DIR / "schema").glob("*.schema.json"))


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema within a schema."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key in ("properties", "$defs"):
        for name, sub in schema.get(key, {}).items():
            # `$defs/keys` is a folder of schemas.
            yield from (s for k in sub.values() for s in schemas_in(k)) if name == "keys" else schemas_in(sub)
    for key in ("items", "additionalProperties", "propertyNames"):
        yield from schemas_in(schema.get(key))
    for sub in schema.get("oneOf", []):
        yield from schemas_in(sub)


def test_every_kind_has_a_schema() -> None:
    assert {p.name.removesuffix(".schema.json") for p in FILES} == {k.name for k in SPECS}
    for kind in SPECS:
        assert SchemaFile.read(SPECS_DIR / "schema" / f"{kind.name}.schema.json").tags()[:-1] == kind.tags


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_schemas_are_valid_and_use_known_keywords(path: Path) -> None:
    root = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(root)
    assert root["$id"] == path.name
    for schema in schemas_in(root):
        assert set(schema) <= KEYWORDS, schema


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_key_is_described(path: Path) -> None:
    schema = SchemaFile.read(path)
    for tag in schema.tags():
        definition = schema.definition(tag)
        for branch in definition.get("oneOf", [definition]):
            for key, value in schema.resolve(branch)["properties"].items():
                assert schema.resolve(value).get("description"), f"{tag}.{key}"


def spoilt(data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """`data` with one random change somewhere."""
    data = copy.deepcopy(data)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], (dict, list)):
                walk(value[key])

    walk(data)
    parent, key = rng.choice(places)
    what = rng.randrange(4)
    if what == 0 and isinstance(parent, dict) and len(parent) > 1 and key != next(iter(data)):
        del parent[key]
    elif what == 1 and isinstance(parent, dict):
        parent["extra key"] = 1
    else:
        parent[key] = rng.choice(
            ["", "text", "two\nlines", -1, 0, 3, 2.5, True, None, [], ["x"], ["x", "x"], {}, {"a": 1}]
        )
    return data


@pytest.mark.parametrize("kind", [k.name for k in SPECS])
def test_same_verdict_as_jsonschema(kind: str) -> None:
    root = json.loads((SPECS_DIR / "schema" / f"{kind}.schema.json").read_text())
    ours = SchemaFile(root)
    rng = random.Random(kind)
    entries = list(load_spec(SPECS_DIR / f"{kind}.yaml", Diagnostics()))
    rejected = 0
    for entry in rng.sample(entries, min(len(entries), 25)):
        peer = jsonschema.Draft202012Validator(
            {**root, "type": "object", "items": True, "$ref": f"#/$defs/{entry.tag}"}
        )
        for data in [entry.data, *(spoilt(entry.data, rng) for _ in range(12))]:
            if next(iter(data), None) != entry.tag:
                continue
            faults = [f for f in ours.faults(data, entry.tag) if "must stand before" not in f.message]
            expected = [e.message for e in peer.iter_errors(data)]
            assert bool(faults) == bool(expected), (data, faults, expected)
            rejected += bool(faults)
    assert rejected > 5


def test_order_of_keys() -> None:
    schema = SchemaFile.read(SPECS_DIR / "schema" / "polynomials.schema.json")
    faults = schema.faults({"polynomial": "p", "error": 0, "doc": "x", "coefficients": [1]}, "polynomial")
    assert [(f.path, f.on_key) for f in faults] == [(("doc",), True)]
    assert "must stand before 'error'" in faults[0].message
