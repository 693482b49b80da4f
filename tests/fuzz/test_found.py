"""Programs that the fuzzer found wrong, made small: each compiles now, or is left to eager for a reason, and does what eager does."""

from __future__ import annotations

import pytest

from .check import check
from .program import Program, Step

_MATRIX = 'grid((n, m), "float32", 1)'


def _one(text: str, *, leaf: bool = False, sizes: tuple[tuple[int, int], ...] = ((2, 3),), view: str = "") -> Program:
    """A program of one step, on one input (a view of it where `view` says so)."""
    made = [Step(f"{_MATRIX}.requires_grad_()" if leaf else _MATRIX, ("p1",))]
    if view:
        made.append(Step(f"p1{view}", ("x1",)))
    arg = "x1" if view else "p1"
    return Program(
        0, tuple(made), ("p1",) if leaf else (), (arg,), (Step(text.format(x=arg), ("v1",)),), ("v1",), (), sizes
    )


_DYNAMIC = ((4, 6), (5, 9))
_CASES = {
    "gradient of a sum repeats one element": _one("{x}.sum()", leaf=True),
    "gradient of a sum over some dimensions repeats elements": _one("{x}.sum((0, 1))", leaf=True, view="[1:]"),
    "tile read in the digits of another loop": _one("F.group_norm(torch.stack([{x}, {x}]), 1, eps=0.1)"),
    "condition that stands in its own branch": _one("torch.where({x}.view(-1) > 1, {x}.view(-1) > 1, {x}.view(-1))"),
    "loss of symbolic sizes": _one("F.mse_loss({x}, {x} + 1)", leaf=True, sizes=_DYNAMIC),
    "smooth loss of symbolic sizes": _one("F.smooth_l1_loss({x}, {x} + 1)", leaf=True, sizes=_DYNAMIC),
    "positions by a symbolic step": _one("{x}.trace()", leaf=True, sizes=_DYNAMIC),
    "result with gaps between its elements": _one("{x}.slice_scatter({x}[:1] + 1, 0, 1, 2)", view=".diagonal()"),
    "position in a dimension of size one": _one("{x}[torch.arange(2), 0]", view="[:1]"),
    "position in a dimension of size one of a value": _one("({x} * 2)[torch.arange(2)]", view="[:1]"),
    "position in an expanded dimension": _one("{x}.expand(2, 2, 3)[torch.arange(3)]"),
    "storage by a view of a view": _one("{x}.select(0, -1).as_strided((2,), (1,), 1)", view="[0]"),
    "storage by a view of a view with gradient, to eager": _one(
        "{x}.select(0, -1).as_strided((2,), (1,), 1)", view="[0]", leaf=True
    ),
    "storage by a view of a value": _one("({x} * 2)[0, -1].as_strided((2,), (1,), 1)"),
    "loss of two dtypes, to eager": _one("F.mse_loss({x}, {x}.detach().double())", leaf=True),
    "cross entropy of two dtypes, to eager": _one("F.binary_cross_entropy_with_logits({x}, {x}.double().sigmoid())"),
    "bits of floats, to eager": _one("{x} | {x}"),
    "normalization of nothing": _one("F.group_norm({x}.unsqueeze(0), 1)", leaf=True, sizes=((3, 0),)),
}


@pytest.mark.parametrize("name", _CASES)
def test_found(name: str, quick: None) -> None:
    outcome = check(_CASES[name])
    assert outcome.different == []
    left = "gaps" in name or "nothing" in name or "to eager" in name
    assert bool(outcome.eager) == left, outcome.eager
