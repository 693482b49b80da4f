"""Other values for the parameters of an operator, so that a generated test sees a wrong use of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_NUMBERS = ("float", "number", "Optional[float]", "Optional[number]")
NUMBERS = (0.7, 1.6, -0.6)
"""At the scale of the tests' data, so that a threshold or a bound falls among the elements."""


PLAIN = {"bool": True, "str": "none", "float": 0.75, "number": 2, "int": 1}
"""The value that a parameter without a default has in other calls, by its type."""


def other_parameters(schema: Any) -> Iterator[dict[str, Any]]:
    """Keyword arguments for the operator of `schema`: each number and flag alone, then all numbers at once, each with a value of its own.

    Values that eager rejects are no cases. Strings, dtypes and dimensions have no values that suit every operator: entries name them in `tests:`.
    """
    numbers: dict[str, float] = {}
    for a in schema.arguments:
        kind = str(a.type)
        if kind == "bool":
            yield {a.name: not (a.default_value if a.has_default_value() else PLAIN["bool"])}
        elif kind in _NUMBERS:
            yield from ({a.name: value} for value in NUMBERS if value != a.default_value)
            numbers[a.name] = NUMBERS[len(numbers) % len(NUMBERS)]
    if len(numbers) > 1:
        yield numbers


def numbers_of(schema: Any) -> list[float]:
    """The numbers that the operator of `schema` takes where its parameters are not given."""
    return [
        a.default_value for a in schema.arguments if str(a.type) in ("float", "number") and _is_number(a.default_value)
    ]


def put_numbers(tensors: Iterable[Any], numbers: Iterable[Any]) -> None:
    """Write each of the numbers, with both signs, into the first elements of each floating tensor of eight or more elements: a comparison
    with a parameter is decided where both sides are equal.
    """
    values = [float(n) for n in dict.fromkeys(n for n in numbers if _is_number(n))][:2]
    for t in tensors:
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel() >= 8 and values:
            flat = torch.tensor([v for n in values for v in (n, -n)], dtype=torch.float64)
            where = t.flatten().clone()
            where[: len(flat)] = flat.to(t.dtype)
            t.copy_(where.view(t.shape))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 100
