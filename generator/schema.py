"""Checks a value against a JSON Schema and says, for every mistake, where it is, what was expected and what was found.

Covers the keywords that the schemas in `specs/schema` use (`KEYWORDS`; a test compares the verdict with the jsonschema
package, which is too slow and too vague for every run), and one rule of the house: keys stand in the order of
`properties`. A `oneOf` is decided by a `const` property (`kind: …`), by the keys that a branch requires, or by the JSON
type, so that a mistake is reported for the branch that was meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .diagnostics import did_you_mean, nearest, one_of

Schema = Mapping[str, Any]
KeyPath = tuple[str | int, ...]
KEYWORDS = frozenset(
    {
        *("$schema", "$id", "$defs", "$ref", "title", "description"),
        *("type", "enum", "const", "pattern", "minimum", "exclusiveMinimum", "oneOf"),
        *("items", "minItems", "maxItems", "uniqueItems"),
        *("properties", "required", "additionalProperties", "propertyNames", "minProperties"),
        "x-synonyms",  # ours: other words that a reader may use for a `const`
    }
)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_NAMES = {
    "string": "text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}


@dataclass(frozen=True)
class Fault:
    """A mistake at `path`; with `on_key` it is the key itself that is wrong."""

    path: KeyPath
    message: str
    on_key: bool = False


class SchemaFile:
    """One `*.schema.json`: `$defs` by tag, checked one entry at a time."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._resolved: dict[int, Schema] = {}

    @classmethod
    def read(cls, path: Path) -> SchemaFile:
        """Read the schema at `path`."""
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def definition(self, tag: str) -> Schema:
        """The definition of the entries that begin with `tag`. Raises KeyError when there is none."""
        return self.root["$defs"][tag]

    def tags(self) -> tuple[str, ...]:
        """The tags that may stand in the file's list, in order."""
        return tuple(item["$ref"].rpartition("/")[2] for item in self.root["items"]["oneOf"])

    def faults(self, data: Mapping[str, Any], tag: str) -> list[Fault]:
        """Everything that is wrong with an entry."""
        return list(self._check(data, self.definition(tag), ()))

    def resolve(self, schema: Schema) -> Schema:
        """Follow a `$ref` within the file; keys beside it (a `description`) win."""
        if "$ref" not in schema:
            return schema
        if id(schema) not in self._resolved:  # a part of `root`, which lives as long
            self._resolved[id(schema)] = self._follow(schema)
        return self._resolved[id(schema)]

    def _follow(self, schema: Schema) -> Schema:
        target: Any = self.root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return {**self.resolve(target), **{k: v for k, v in schema.items() if k != "$ref"}}

    def _check(self, value: Any, schema: Schema, path: KeyPath) -> Iterator[Fault]:
        schema = self.resolve(schema)
        if "oneOf" in schema:
            chosen = self._branch(value, [self.resolve(s) for s in schema["oneOf"]])
            if isinstance(chosen, Fault):
                yield Fault((*path, *chosen.path), chosen.message.replace("@", _where(path)), chosen.on_key)
                return
            others = [self.resolve(s) for s in schema["oneOf"]] if isinstance(value, dict) else []
            yield from self._check_mapping(value, chosen, path, others) if others else self._check(value, chosen, path)
            return
        kinds = _listed(schema.get("type"))
        if kinds and not any(is_type(value, k) for k in kinds):
            wanted = _expected(schema, kinds)
            yield Fault(path, f"{_where(path)} needs {wanted}, found {_found(value)}{_quotes(wanted, value)}")
            return
        if "const" in schema and value != schema["const"]:
            yield Fault(path, f"{_where(path)} must be '{schema['const']}', found {_found(value)}")
        if "enum" in schema and not any(value == e and type(value) is type(e) for e in schema["enum"]):
            names = [str(e) for e in schema["enum"]]
            words = any(isinstance(e, str) for e in schema["enum"])
            wanted = one_of(names) if words else one_of(names).replace("'", "")
            hint = did_you_mean(value, names) if words else ""
            yield Fault(path, f"{_where(path)} must be {wanted}, found {_found(value)}{hint}")
        if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
            wanted = schema.get("title") or f"text that matches {schema['pattern']}"
            yield Fault(path, f"{_where(path)} needs {wanted}, found {_found(value)}")
        if is_type(value, "number"):
            if "minimum" in schema and not value >= schema["minimum"]:
                yield Fault(path, f"{_where(path)} must be at least {schema['minimum']}, found {value}")
            if "exclusiveMinimum" in schema and not value > schema["exclusiveMinimum"]:
                yield Fault(path, f"{_where(path)} must be greater than {schema['exclusiveMinimum']}, found {value}")
        if isinstance(value, list):
            yield from self._check_list(value, schema, path)
        if isinstance(value, dict):
            yield from self._check_mapping(value, schema, path)

    def _check_list(self, value: list[Any], schema: Schema, path: KeyPath) -> Iterator[Fault]:
        least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
        if not least <= len(value) <= most:
            size = (
                f"{least}"
                if least == schema.get("maxItems")
                else f"at least {least}"
                if len(value) < least
                else f"at most {most}"
            )
            yield Fault(
                path, f"{_where(path)} needs {size} item{'' if size.endswith(' 1') else 's'}, found {len(value)}"
            )
        if schema.get("uniqueItems"):
            texts = [json.dumps(v, sort_keys=True) for v in value]
            for i, text in enumerate(texts):
                if text in texts[:i]:
                    yield Fault((*path, i), f"{_where(path)} holds {_found(value[i])} twice")
        if "items" in schema:
            for i, item in enumerate(value):
                yield from self._check(item, schema["items"], (*path, i))

    def _check_mapping(
        self, value: dict[str, Any], schema: Schema, path: KeyPath, others: Sequence[Schema] = ()
    ) -> Iterator[Fault]:
        """`others` are the alternatives of `schema`, to say where an unknown key belongs."""
        known = schema.get("properties", {})
        what = f"in {_where(path)}" if path else f"in {_entry(value)}"
        for key in schema.get("required", ()):
            if key not in value:
                about = self.resolve(known.get(key, {})).get("description", "")
                yield Fault(path, f"missing key '{key}' {what}" + (f" ({about})" if about else ""))
        if len(value) < schema.get("minProperties", 0):
            yield Fault(path, f"{_where(path)} needs at least {schema['minProperties']} key, found none")
        extra = schema.get("additionalProperties", True)
        for key, item in value.items():
            if key in known:
                yield from self._check(item, known[key], (*path, key))
            elif extra is False:
                hint = _belongs(key, others)
                hint = hint or did_you_mean(key, [k for k in known if k not in value]) or f"; expected {one_of(known)}"
                yield Fault((*path, key), f"unknown key '{key}' {what}{hint}", True)
            else:
                if "propertyNames" in schema:
                    for fault in self._check(key, schema["propertyNames"], ()):
                        yield Fault((*path, key), fault.message.replace("the entry", f"the key '{key}'"), True)
                if isinstance(extra, Mapping):
                    yield from self._check(item, extra, (*path, key))
        yield from _order(list(value), list(known), path)

    def _branch(self, value: Any, branches: list[Schema]) -> Schema | Fault:
        """The branch that `value` means, or a fault (with `@` for the place) when it can be none of them."""
        fitting = [b for b in branches if any(is_type(value, k) for k in _listed(b.get("type")))]
        if not fitting:
            kinds = [_expected(b, [k]) for b in branches for k in _listed(b.get("type"))]
            wanted = " or ".join(dict.fromkeys(kinds))
            return Fault((), f"@ needs {wanted}, found {_found(value)}{_quotes(wanted, value)}")
        if len(fitting) == 1 or not isinstance(value, dict):
            return fitting[0]
        for key in fitting[0].get("properties", {}):
            options: list[Any] = [self.resolve(b["properties"].get(key, {})).get("const", "") for b in fitting]
            if "" not in options:
                if key not in value:
                    known = {k for b in fitting for k in b["properties"]}
                    for found in value:
                        if found not in known and nearest(found, known) == key:
                            return Fault(
                                (found,), f"unknown key '{found}' in {_entry(value)}; did you mean '{key}'?", True
                            )
                    return Fault((), f"missing key '{key}' in {_entry(value)} ({one_of(options)})")
                if value[key] not in options:
                    meant = (o for o, b in zip(options, fitting, strict=True) if value[key] in _synonyms(b, key))
                    hint = next((f"; did you mean '{o}'?" for o in meant), "") or did_you_mean(value[key], options)
                    return Fault((key,), f"'{key}' must be {one_of(options)}, found {_found(value[key])}{hint}")
                return fitting[options.index(value[key])]
        # Otherwise the alternative that has most of the keys, and of these the one that lacks least.
        return max(
            fitting, key=lambda b: (_overlap(value, b["properties"]), -len(set(b.get("required", ())) - set(value)))
        )


def is_type(value: Any, kind: str) -> bool:
    """Whether `value` has the JSON type `kind` (a boolean is no number)."""
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _overlap(value: Mapping[str, Any], known: Collection[str]) -> int:
    return sum(key in known for key in value)


def _belongs(key: str, others: Sequence[Schema]) -> str:
    """`; it goes with kind 'view'`, when alternatives that differ in a `const` property know the key."""
    knowing = [o["properties"] for o in others if key in o.get("properties", ())]
    constants = [(name, sub["const"]) for known in knowing for name, sub in known.items() if "const" in sub]
    return f"; it goes with {constants[0][0]} {one_of(c for _, c in constants)}" if constants else ""


def _synonyms(branch: Schema, key: str) -> Sequence[str]:
    found: Sequence[str] = branch["properties"][key].get("x-synonyms", ())
    return found


def _listed(kinds: str | list[str] | None) -> list[str]:
    return [kinds] if isinstance(kinds, str) else list(kinds or ())


def _order(found: list[str], order: list[str], path: KeyPath) -> Iterator[Fault]:
    """The first key that stands after one that should follow it."""
    rank = {key: n for n, key in enumerate(order)}
    known = [key for key in found if key in rank]
    for before, key in pairwise(known):
        if rank[key] < rank[before]:
            later = next(k for k in known if rank[k] > rank[key])
            yield Fault(
                (*path, key), f"key '{key}' must stand before '{later}' (the order is {', '.join(order)})", True
            )
            return


def _where(path: KeyPath) -> str:
    if not path:
        return "the entry"
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return f"'{text}'"


def _entry(value: Mapping[str, Any]) -> str:
    tag = next(iter(value), "")
    name = value.get(tag)
    return f"{tag} '{name}'" if isinstance(name, str) else f"this {tag} entry"


def _expected(schema: Schema, kinds: list[str]) -> str:
    return schema.get("title") or " or ".join(_NAMES[k] for k in kinds)


def _quotes(wanted: str, value: Any) -> str:
    """What YAML reads as a list may be meant as an expression."""
    meant = isinstance(value, list) and "expression" in wanted
    return '; a list of expressions is one expression, in quotes: "[n, 1]"' if meant else ""


def _found(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return f"'{value if len(value) < 60 else value[:57] + '…'}'".replace("\n", "\\n")
    return (
        {True: "true", False: "false", None: "nothing"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )
