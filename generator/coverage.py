"""Which entry stands for each overload that torch has: its own, or that of the functional overload that it is a variant of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from .torch_schemas import TorchSchema, TorchSchemas

NAMESPACES = ("aten", "prims")
"""What the dispatcher calls torch's own operators."""
_OF_FRESH_RESULTS = ("ScalarType?", "Layout?", "Device?", "bool?", "MemoryFormat?")


def functional_forms(schema: TorchSchema, schemas: TorchSchemas) -> Iterator[TorchSchema]:
    """The overloads that compute what `schema` writes, and return it: by torch's naming rules (`add_` and `add.out` of `add`, `__iand__`
    of `__and__`), with arguments of the same types but for those that say what a fresh result is.
    """
    name = schema.name
    if name.startswith("__i") and name.endswith("__"):
        names = [f"__{name[3:]}"]
    else:
        plain = name.removesuffix("_")
        names = [name, plain, f"{plain}_functional"]
    wanted = _types(schema)
    every = [*schemas.older, *(s for n in dict.fromkeys(names) for s in schemas.overloads(f"{schema.namespace}.{n}"))]
    for other in every:
        if (
            other.name in names
            and other.namespace == schema.namespace
            and not other.mutates
            and _types(other) == wanted
        ):
            yield other


def _types(schema: TorchSchema) -> list[str]:
    kept = [a.type for a in schema.args if not (a.writes and a.kwarg_only)]
    return sorted(t for t in kept if t not in _OF_FRESH_RESULTS)


VARIANT = "in-place or out= variant"


def row_of(schema: TorchSchema, kinds: Mapping[str, str], schemas: TorchSchemas) -> str | None:
    """The kind of the entry that stands for an overload, `VARIANT` where that is the entry of its functional form, None where there is
    none. `kinds` is the kind of the entry of each overload that one covers.

    A program with an in-place or `out=` variant is recorded in functional form.
    """
    if schema.id in kinds:
        return kinds[schema.id]
    return VARIANT if schema.mutates and any(f.id in kinds for f in functional_forms(schema, schemas)) else None


def counts(schemas: TorchSchemas, kinds: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Kind of row → namespace → how many of torch's own overloads have such a row; the most frequent kinds first."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for s in _own(schemas):
        found[row_of(s, kinds, schemas) or "none"][s.namespace] += 1
    return dict(sorted(found.items(), key=lambda item: (-item[1].total(), item[0])))


def without_row(schemas: TorchSchemas, kinds: Mapping[str, str]) -> list[TorchSchema]:
    """The overloads of torch's own namespaces that no entry stands for."""
    return [s for s in _own(schemas) if row_of(s, kinds, schemas) is None]


def _own(schemas: TorchSchemas) -> Iterator[TorchSchema]:
    for packet in schemas.packets():
        if packet.partition(".")[0] in NAMESPACES:
            yield from schemas.overloads(packet)
    yield from schemas.older


def advice(missing: list[TorchSchema]) -> str:
    """What to do about overloads without a row, one line for each of them; empty where there is none."""
    if not missing:
        return ""
    lines = [f"  {s.text}" for s in missing]
    return "\n".join(
        [
            f"{len(missing)} operator{'s' if len(missing) > 1 else ''} of the installed torch without a row in specs/ops/:",
            *lines,
            "Give each an entry (`opforge new-op NAME` prints a template), or add its name to the entry with its reason: kind `decomposed`",
            "where torch's own kernel is made of other operators, else `extern`. Then `opforge schemas --refresh` and `opforge generate`.",
        ]
    )
