"""Checks one graph rewrite: it fires on its own pattern, and the rewritten graph gives eager's answer."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from opforge.runtime.graph.patterns import Call, Items, Lit, Part, Pattern, Rule, Wild
from opforge.runtime.graph.rewrite import rewrite

RECORDED_OTHERWISE = {"detach_value"}
"""Rules whose operator newer versions of torch record as another one, for which there is a rule too."""


def sample(name: str, hint: Any, dtype: torch.dtype) -> Any:
    """A wildcard's value: a list is a shape, {"value": v} is v itself, {"value": "torch.float16"} a dtype, {"value": "mask", "shape": s} a bool
    tensor, {"value": "narrow", "shape": s} 8-bit integers that the program makes floating numbers of, {"value": "positions", "shape": s} 0 to 8.
    """
    g = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    if isinstance(hint, dict) and hint.get("value") == "narrow":
        return torch.randint(-128, 128, hint["shape"], generator=g, dtype=torch.int8)
    if isinstance(hint, dict) and hint.get("value") == "mask":
        return torch.rand(hint["shape"], generator=g) > 0.5
    if isinstance(hint, dict) and hint.get("value") == "positions":
        return torch.randint(0, 9, hint["shape"], generator=g)
    if isinstance(hint, dict) and str(hint["value"]).startswith("torch."):
        return getattr(torch, hint["value"].removeprefix("torch."))
    if isinstance(hint, dict):
        return hint["value"]
    if dtype == torch.bool:
        return torch.rand(hint, generator=g) > 0.5
    if dtype.is_floating_point:
        return torch.randn(hint, generator=g, dtype=torch.float64).to(dtype)
    return torch.randint(-9, 9, hint, generator=g, dtype=dtype)


def _has_fma() -> bool:
    """Whether this torch has the operator that Dynamo writes for products that are added; the peer's module registers it."""
    from torch._inductor import inductor_prims

    return hasattr(inductor_prims, "fma")


def evaluate(pattern: Pattern, values: dict[str, Any]) -> Any:
    """Run the pattern as a program."""
    if isinstance(pattern, Wild):
        return values[pattern.name]
    if isinstance(pattern, Lit):
        return pattern.value
    if isinstance(pattern, Items):
        return [evaluate(p, values) for p in pattern.items]
    if isinstance(pattern, Part):
        return evaluate(pattern.call, values)[
            evaluate(pattern.index, values) if isinstance(pattern.index, Wild) else pattern.index
        ]
    assert isinstance(pattern, Call)
    namespace, name, which = pattern.op.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), name), which)
    kwarg_only = {a.name for a in op._schema.arguments if a.kwarg_only}
    given = {n: evaluate(p, values) for n, p in pattern.args}
    args = [given.get(a.name, a.default_value) for a in op._schema.arguments if a.name not in kwarg_only]
    return op(*args, **{k: v for k, v in given.items() if k in kwarg_only})


def check_rule(rule: Rule, hints: dict[str, Any]) -> None:
    """The rule fires on its own pattern. There, and wherever it fires for other dtypes (also of one tensor alone) and for odd elements, the values
    are eager's.
    """
    if rule.match.op == "prims.fma.default" and not _has_fma():
        pytest.skip("this torch has no prims.fma (C1)")
    _check(rule, hints, must_fire=True)
    own = hints.get("dtype", "float32")
    for dtype in OTHER_DTYPES:
        if dtype != own:
            _check(rule, {**hints, "dtype": dtype})
    if getattr(torch, own).is_floating_point:
        _check(rule, hints, odd=True)
    for other in _other_hints(hints):
        _check(rule, other)
    tensors = [name for name, hint in hints.items() if isinstance(hint, list)]
    for name in tensors if len(tensors) > 1 else ():
        _check(rule, hints, apart=name)
        if rule.each is None:
            _check(rule, {**hints, name: {"value": 0.5}})


def _other_hints(hints: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Variants of the hints: one number replaced by another or by a 0-dimensional tensor; for a rule about a single tensor, that tensor with one
    column or with another dimension.
    """
    alone = sum(isinstance(h, list) or (isinstance(h, dict) and "shape" in h) for h in hints.values()) == 1
    for name, hint in hints.items():
        value = hint.get("value") if isinstance(hint, dict) else None
        if type(value) in (int, float) and abs(value) < 2**31:
            yield {**hints, name: {"value": value + 1}}
        if type(value) is float:
            yield {**hints, name: []}
        if alone and isinstance(hint, list) and hint and hint[-1] != 1:
            yield {**hints, name: [*hint[:-1], 1]}
        if alone and isinstance(hint, list) and len(hint) == 1:
            yield {**hints, name: [2, *hint]}


OTHER_DTYPES = ("float16", "int64", "bool")
ODD = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0)


def _odd(t: torch.Tensor) -> torch.Tensor:
    """`t` with odd numbers as its first elements."""
    if not t.is_floating_point() or t.numel() < len(ODD):
        return t
    t.view(-1)[: len(ODD)] = torch.tensor(ODD, dtype=t.dtype)
    return t


def _check(rule: Rule, hints: dict[str, Any], must_fire: bool = False, odd: bool = False, apart: str = "") -> None:
    """`apart`: the tensor that has another dtype than the others."""
    dtype = getattr(torch, hints.get("dtype", "float32"))
    other = torch.float64 if dtype == torch.float32 else torch.float32
    values = {k: sample(k, h, other if k == apart else dtype) for k, h in hints.items() if k not in ("dtype", "result")}
    values = {k: _odd(v) if odd and isinstance(v, torch.Tensor) else v for k, v in values.items()}
    tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
    names = list(tensors)
    narrow = {k for k, h in hints.items() if isinstance(h, dict) and h.get("value") == "narrow"}

    def program(*args: torch.Tensor) -> Any:
        wide = next(t.dtype for t in args if t.dtype.is_floating_point or not narrow)
        args = tuple(t.to(wide) if k in narrow else t for k, t in zip(names, args, strict=True))
        given = {**values, **dict(zip(names, args, strict=True))}
        if rule.each is not None:
            index, count = rule.each
            return torch.stack([evaluate(rule.match, {**given, index: i}) for i in range(count(given))])
        out = evaluate(rule.match, given)
        return out[hints["result"]["value"]] if "result" in hints else out

    try:
        with torch.no_grad():
            expected = program(*tensors.values())
            exact = program(*(t.double() if t.is_floating_point() else t for t in tensors.values()))
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in tensors.values()]
        with mode:  # tensors that the pattern makes of nothing are fake too
            gm = make_fx(program, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    except (RuntimeError, NotImplementedError, StopIteration, IndexError, TypeError, ValueError):
        assert not must_fire
        return  # eager has no such call at this dtype
    before = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    if must_fire and rule.match.op not in before and rule.name in RECORDED_OTHERWISE:
        raise unittest.SkipTest(f"torch {torch.__version__} traces {rule.match.op} as another operator (D3)")
    report = rewrite(gm, {rule.match.op: (rule,)}, device=rule.device or None)
    gm.recompile()
    after = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    if rule.name not in [r for r, _ in report.applied]:
        assert not must_fire, f"{rule.name} did not fire on its own pattern: {before}, refused {report.refused}"
        return
    assert after != before
    with torch.no_grad():
        actual = gm(*tensors.values())
    _compare(actual, expected, exact)


def _compare(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    if not expected.is_floating_point():
        assert torch.equal(actual, expected)
        return
    finite = expected.isfinite() & exact.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert bool((same | finite).all()), (actual, expected)
    if not finite.any():
        return
    eps = torch.finfo(expected.dtype).eps
    actual, expected, exact = (torch.where(finite, t.double(), 0.0) for t in (actual, expected, exact))
    eager_error, our_error = (expected - exact).abs().max(), (actual - exact).abs().max()
    assert our_error <= 2 * eager_error + eps * exact.abs().max(), (our_error, eager_error)
