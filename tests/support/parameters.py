"""Other values for the parameters of an operator that have a default, so that a generated test sees a wrong use of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NUMBERS = (0.7, 1.6, -0.6)
"""At the scale of the tests' data, so that a threshold or a bound falls among the elements."""


def other_parameters(schema: Any) -> Iterator[dict[str, Any]]:
    """Keyword arguments for the operator of `schema`: each number and flag alone, then all numbers at once, each with a value of its own.

    Values that eager rejects are no cases. Strings, dtypes and dimensions have no values that suit every operator: entries name them in `tests:`.
    """
    numbers: dict[str, float] = {}
    for a in schema.arguments:
        if not a.has_default_value():
            continue
        kind = str(a.type)
        if kind == "bool":
            yield {a.name: not a.default_value}
        elif kind in ("float", "number"):
            yield from ({a.name: value} for value in NUMBERS if value != a.default_value)
            numbers[a.name] = NUMBERS[len(numbers) % len(NUMBERS)]
    if len(numbers) > 1:
        yield numbers
