"""Checks one graph rewrite: it fires on its own pattern, and the rewritten graph gives eager's answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from opforge.runtime.graph.patterns import Call, Items, Lit, Part, Pattern, Rule, Wild
from opforge.runtime.graph.rewrite import rewrite


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
    if rule.match.op == "prims.fma.default" and not _has_fma():
        pytest.skip("this torch has no prims.fma (C1)")
    dtype = getattr(torch, hints.get("dtype", "float32"))
    values = {k: sample(k, h, dtype) for k, h in hints.items() if k not in ("dtype", "result")}
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

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors.values()]
    with mode:  # tensors that the pattern makes of nothing are fake too
        gm = make_fx(program, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    before = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    report = rewrite(gm, {rule.match.op: (rule,)}, device=rule.device or None)
    gm.recompile()
    after = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert rule.name in [r for r, _ in report.applied], (
        f"{rule.name} did not fire on its own pattern: {before}, refused {report.refused}"
    )
    assert after != before
    with torch.no_grad():
        expected = program(*tensors.values())
        actual = gm(*tensors.values())
        exact = program(*(t.double() if t.is_floating_point() else t for t in tensors.values()))
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    if not expected.is_floating_point():
        assert torch.equal(actual, expected)
        return
    eager_error = (expected.double() - exact).abs().max()
    our_error = (actual.double() - exact).abs().max()
    assert our_error <= 2 * eager_error + torch.finfo(dtype).eps * exact.abs().max(), (our_error, eager_error)
