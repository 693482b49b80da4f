"""Checks operator entries at the edges of their dtypes: NaN, infinities, zeros of both signs, ties, subnormal and largest numbers, ends of
integers. The cases of many entries are compiled as one graph and compared with eager.

Where torch itself gives two answers, one by its loops over vectors and one by its loops over single elements (`_strided` tensors take those),
either is right.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

import opforge
from opforge.testing import arguments, op_check
from opforge.testing.arguments import FLOATS, Made, filled, value_of
from opforge.testing.op_check import _REJECTED, Case, Op, _compiled, _leaves, _target, exists

THEMES = ("nan", "infinities", "zeros", "ties", "tiny", "huge")
FEW = ("nan", "zeros")
"""The themes of dtypes after the first."""
DTYPES = (*FLOATS, torch.int64, torch.int8, torch.uint8, torch.bool)
"""Of the others that are computed like one of these there are no edge tests."""
ROUNDINGS = 8
"""Units in the last place that a function of one element may be off where eager is exact."""


def check_edges(ops: Sequence[Op], either_zero: Set[str] = frozenset(), dtypes: Sequence[torch.dtype] = ()) -> None:
    """Compile all edge cases of `ops` as one graph; raise AssertionError that names each wrong result, and each overload whose cases all ran by
    eager kernels.

    either_zero  the ids of those in whose results a zero made of zeros of both signs may have either.
    dtypes       on a target that is interpreted: the only dtypes.
    """
    torch.manual_seed(0)
    there = {op.id: [o for o in op.overloads if exists(o)] for op in ops}
    cases = [c for op in ops for overload in there[op.id] for c in edge_cases(op, overload, dtypes)]
    either = {overload for op in ops if op.id in either_zero for overload in op.overloads}
    adding = {overload for op in ops if op.kind == "reduction" for overload in op.overloads}
    empty = [op.id for op in ops if there[op.id] and not any(c.overload in op.overloads for c in cases)]
    assert not empty, f"no edge case that eager takes: {', '.join(empty)}"
    opforge.reset_stats()
    with opforge.config.patch(opt_level=1):  # the compiler's time is most of the test's
        results = _compiled(cases, True)
    stats = opforge.stats()
    assert not stats["fallbacks"], stats["fallbacks"]
    faults = [
        f
        for case, result in zip(cases, results, strict=True)
        for f in faults_of(case, result, case.overload in either, case.overload in adding)
    ]
    if not dtypes:
        faults += [f for op in ops for f in op_check._externs(op, cases, stats["reasons"])]
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:40])


# -- cases -------------------------------------------------------------------------------------------------------------
def values(theme: str, dtype: torch.dtype) -> list[Any]:
    """The numbers of a theme; `all`: of every theme."""
    if theme == "all":
        return (
            list(dict.fromkeys(v for t in (*THEMES, "ends", "normal") for v in values(t, dtype) if v == v))
            + values("nan", dtype)[:1]
        )
    if dtype == torch.bool:
        return [False, True]
    if dtype.is_floating_point:
        f = torch.finfo(dtype)
        return {
            "nan": [math.nan, math.inf, -2.5, 0.0, 3.0, 0.5, -1.0],
            "infinities": [math.inf, 1.5, -math.inf, -3.0, 2.0, math.inf, 0.25],
            "zeros": [0.0, -0.0, -0.0, 0.0, -0.0],
            "ties": [2.0, 1.0, 2.0, -1.0, -1.0, 2.0],
            # Small enough to be added up without a rounding, whose sign would depend on the order.
            "tiny": [v * f.smallest_normal for v in (2**-6, -(2**-6), 3 * f.eps, -f.eps)],
            "huge": [f.max, 1.0, f.max / 2],  # of one sign: a sum overflows in any order
            "ends": [f.max, -f.max, 1.0],
            "normal": [f.smallest_normal, -f.smallest_normal],
        }[theme]
    i = torch.iinfo(dtype)
    return {
        "nan": [i.max, i.min, i.max - 1, i.min + 1, 1],
        "infinities": [7, 3, 2, 5, 1, 63] if i.min == 0 else [-7, 3, -2, 5, -1, 63],
        "zeros": [0, 1, i.max, 0],
        "ties": [2, 1, 2, 1, 0],
        "tiny": [0, 1],
        "huge": [i.max, i.max, 2, i.min],
        "ends": [i.max, i.min],
        "normal": [],
    }[theme]


def _themed(theme: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of numbers of the theme, NaN and infinities rare enough that rows without them remain."""
    choice = torch.tensor(values(theme, dtype), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(choice), shape, generator=generator)
    if theme in ("nan", "infinities") and dtype.is_floating_point:
        keep = torch.rand(shape, generator=generator) < 0.15
        ordinary = torch.randint(3, 7, shape, generator=generator)
        picked = torch.where(keep, picked, 3 + ordinary % (len(choice) - 3))
    return choice[picked]


def _grid(number: int, dtype: torch.dtype) -> torch.Tensor:
    """All edge values down (of the first tensor) or across (of the second); of more tensors shifted ones."""
    edges = torch.tensor(values("all", dtype), dtype=dtype)
    n = len(edges)
    if number == 0:
        return edges[:, None].expand(n, n).contiguous()
    if number == 1:
        return edges[None, :].expand(n, n).contiguous()
    shift = (torch.arange(n)[:, None] * 3 + torch.arange(n) * (number + 2)) % n
    return edges[shift]


def edge_cases(op: Op, overload: str, only: Sequence[torch.dtype] = ()) -> Iterator[Case]:
    """Calls of an overload whose tensors hold edge values (of the dtypes `only`, if given); what eager refuses is left out."""
    dtypes = tuple(d for d in (getattr(torch, n) for n in op.dtypes) if not d.is_complex) or DTYPES
    dtypes = tuple(d for d in dtypes if d in only) if only else dtypes
    schema = _target(overload)._schema
    made: Iterator[Made]
    if op.kind == "pointwise":
        made = _grids(op, schema, dtypes)
    else:
        made = _rows(op, schema, dtypes)
    for label, args, kwargs, _ in made:
        try:
            eager = _leaves(_target(overload)(*args, **kwargs))
        except _REJECTED:
            continue
        if any(isinstance(v, torch.Tensor) and v.dtype not in arguments.DTYPES for v in eager):
            continue
        eager = [v.clone() if isinstance(v, torch.Tensor) else v for v in eager]
        yield Case(overload, label, args, kwargs, eager, op.values)


def _grids(op: Op, schema: Any, dtypes: tuple[torch.dtype, ...]) -> Iterator[Made]:
    for dtype in dtypes:
        n = len(values("all", dtype))
        if not op.tests:
            tensors = [a for a in schema.arguments if "Tensor" in str(a.type) and not a.has_default_value()]
            masks = [a.name == "mask" or a.name.endswith("_mask") for a in tensors]
            made = [_grid(k, dtype) > 0 if mask else _grid(k, dtype) for k, mask in enumerate(masks)]
            yield filled(schema, f"all {dtype}", made)
            continue
        for text in filter(_has_elements, op.tests):
            yield _from_text(text, dtype, lambda k, shape, d: _grid(k, d), (n, n), f"all {dtype}")


def _rows(op: Op, schema: Any, dtypes: tuple[torch.dtype, ...]) -> Iterator[Made]:
    """Every theme in the first dtype, some in the others; the first `tests` line, and of the others few themes."""
    for at, dtype in enumerate(dtypes):
        # What is empty has no edges.
        lines = [text for text in op.tests if "(0" not in text and ", 0)" not in text and _has_elements(text)]
        for k, text in enumerate(lines[:1] if at else lines):
            # Rows longer than a vector, where nothing else depends on the shape.
            factor = 7 if op.kind in ("reduction", "scan") and text.count("(") == 1 else 1
            for theme in THEMES if k == at == 0 else FEW:
                fill = functools.partial(_longer, theme, factor)
                yield _from_text(text, dtype, fill, None, f"{theme} x {factor} {dtype}")


def _has_elements(text: str) -> bool:
    """Whether a `tests` line has a tensor that edge values may fill."""
    return any(f"{maker}(" in text for maker in "FPUISBD")


def _longer(theme: str, factor: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _themed(theme, tuple(n * factor if n > 1 and len(shape) < 3 else n for n in shape), dtype, number)


def _from_text(text: str, dtype: torch.dtype, fill: Any, other: tuple[int, ...] | None, label: str) -> Made:
    """The arguments of a spec's `tests` line with the `F` tensors filled by `fill(number, shape, dtype)`; `other`: the shape of the others."""
    tree = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(tree, ast.Call)
    count = 0

    def value(node: ast.expr) -> Any:
        nonlocal count
        if isinstance(node, ast.List):
            return [value(e) for e in node.elts]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id != "C":
            sizes = [int(ast.literal_eval(a)) for a in node.args]
            if node.func.id in ("F", "P", "U"):
                count += 1
                return fill(count - 1, tuple(sizes), dtype)
            if other is not None:
                first = sizes[:1] if node.func.id in ("I", "S") else []
                node = ast.parse(f"{node.func.id}({', '.join(map(str, (*first, *other)))})", mode="eval").body
        return value_of(node, dtype)

    args = [value(a) for a in tree.args]
    return Made(f"{text} {label}", args, {str(k.arg): value(k.value) for k in tree.keywords})


# -- judging -----------------------------------------------------------------------------------------------------------
def faults_of(case: Case, result: list[Any], either_zero: bool = False, adds: bool = False) -> Iterator[str]:
    where = f"{case.overload}({case.label})"
    others = _strided_run(case)
    exact = op_check._reference(case)
    gaps = _float64_gaps(case)
    given = _leaves([*case.args, *case.kwargs.values()])
    mixed, tiny = any(map(_mixed_zeros, given)), any(map(_underflowing, given))
    for k, (ours, eager) in enumerate(zip(result, case.eager, strict=True)):
        if not isinstance(eager, torch.Tensor):
            if ours != eager:
                yield f"{where}: result {k} is {ours}, eager {eager}"
            continue
        if ours.shape != eager.shape or ours.dtype != eager.dtype:
            yield f"{where}: result {k} is {ours.dtype}{list(ours.shape)}, eager {eager.dtype}{list(eager.shape)}"
            continue
        if not case.values:
            continue
        other = others[k] if others is not None else eager
        true = exact[k] if exact is not None and exact[k].shape == eager.shape else eager
        wrong = ~(same(ours, eager) | same(ours, other) | _near(ours, eager, true, gaps[k]))
        zeros = (ours == 0) & (eager == 0)
        if either_zero and mixed:
            wrong &= ~zeros
        if (
            adds and tiny
        ):  # a sum that underflows: fused multiplications keep its sign, and which kernels have them depends on the processor
            wrong &= ~zeros
        if wrong.any():
            yield f"{where}: result {k} {op_check._show(wrong, ours, eager, true)}" + _inputs(case, wrong)


def _inputs(case: Case, wrong: torch.Tensor) -> str:
    at = tuple(int(i) for i in wrong.nonzero()[0])
    found = [
        repr(a[at].item())
        if isinstance(a, torch.Tensor) and a.shape == wrong.shape
        else "…"
        if isinstance(a, torch.Tensor)
        else repr(a)
        for a in case.args
    ]
    return f" of ({', '.join(found)})"


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements are the same number, zeros by their sign too; all NaN are the same."""
    if not a.dtype.is_floating_point:
        return a == b
    return (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())


def _underflowing(a: Any) -> bool:
    """Whether products of two of the elements may vanish."""
    if not isinstance(a, torch.Tensor) or not a.is_floating_point():
        return False
    return bool(((a != 0) & (a.double().abs() <= torch.finfo(a.dtype).tiny)).any())


def _mixed_zeros(v: Any) -> bool:
    if not isinstance(v, torch.Tensor) or not v.dtype.is_floating_point:
        return False
    signs = v.signbit()[v == 0]
    return bool(signs.any() and not signs.all())


def _float64_gaps(case: Case) -> list[torch.Tensor | None]:
    """How far eager's results of float64 may be off, relative to them. There is nothing to judge them by: what float32 is off, at the scale
    of float64.
    """
    none: list[torch.Tensor | None] = [None] * len(case.eager)
    if not any(isinstance(v, torch.Tensor) and v.dtype == torch.float64 for v in case.eager):
        return none

    def narrow(v: Any) -> Any:
        if isinstance(v, list):
            return [narrow(x) for x in v]
        return v.float() if isinstance(v, torch.Tensor) and v.dtype == torch.float64 else v

    def wide(v: Any) -> Any:
        if isinstance(v, list):
            return [wide(x) for x in v]
        return v.double() if isinstance(v, torch.Tensor) and v.dtype == torch.float32 else v

    args, kwargs = narrow(case.args), {k: narrow(v) for k, v in case.kwargs.items()}
    try:
        low = _leaves(case.call(args, kwargs))
        high = _leaves(case.call(wide(args), {k: wide(v) for k, v in kwargs.items()}))
    except _REJECTED:
        return none
    scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    for k, (a, b) in enumerate(zip(low, high, strict=True)):
        if isinstance(a, torch.Tensor) and a.dtype == torch.float32 and a.shape == b.shape == case.eager[k].shape:
            gap = ((a.double() - b.double()).abs() / b.double().abs()).nan_to_num(0, 0, 0)
            none[k] = 2 * scale * gap.max() if gap.numel() else None
    return none


def _near(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, gap: torch.Tensor | None) -> torch.Tensor:
    """Which elements are finite as eager's are, and as close to the float64 run as those and ROUNDINGS (and `gap`); a zero has eager's sign."""
    o, e, x = ours, eager, exact
    if not e.dtype.is_floating_point:
        return o == e
    info = torch.finfo(e.dtype)
    # What is too small for a number may have the sign that it has in float64.
    zero = (o == 0) & (e == 0) & ((x == 0) | (x.signbit() != o.signbit()))
    o, e, x = o.double(), e.double(), x.double()
    relative = ROUNDINGS * info.eps + (gap if gap is not None else 0)
    bound = 2 * (e - x).abs() + relative * x.abs() + info.smallest_normal * info.eps
    return (o.isfinite() & e.isfinite()) & ~zero & ((o - x).abs() <= bound)


def _strided_run(case: Case) -> list[Any] | None:
    """Eager's results on the same tensors with gaps between the elements."""

    def spread(v: Any) -> Any:
        if isinstance(v, list):
            return [spread(x) for x in v]
        if isinstance(v, torch.Tensor) and v.ndim:
            wide = torch.zeros((*v.shape[:-1], v.shape[-1] * 2), dtype=v.dtype)
            wide[..., ::2] = v
            return wide[..., ::2]
        return v

    try:
        found = _leaves(
            replace(case).call([spread(a) for a in case.args], {k: spread(v) for k, v in case.kwargs.items()})
        )
    except _REJECTED:
        return None
    return found if len(found) == len(case.eager) else None


__all__ = ["check_edges", "edge_cases", "faults_of", "same"]
