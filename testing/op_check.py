"""Checks an operator entry: every overload on every case, compiled into one graph, against eager and a float64 run of eager."""

from __future__ import annotations

import contextlib
import itertools
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import opforge
import opforge.runtime.philox  # registers the seeded operators

from ..generated.ops import EXTERN
from ..runtime.dispatch.trace import trace
from ..runtime.torch_compat import FakeTensorMode
from .arguments import COMPLEX, DTYPES, HALVES, Made, by_default, from_text, other_parameters_of_text
from .noise import MANY_RUNS, NOISY_RUNS, Noise

_REJECTED = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""What eager raises for arguments that an overload does not take."""


@dataclass(frozen=True)
class Op:
    """An entry of the operator specs, as the generated tests name it."""

    id: str
    kind: str
    overloads: tuple[str, ...]
    tests: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    values: bool = True
    """Whether the values are specified (those of an empty tensor are not)."""
    complex_: bool = False
    """Whether it computes complex tensors too."""
    reference: Callable[..., Any] | None = None
    """What computes the right results, with the arguments of the operator; without it the operator's own eager kernel does."""


@dataclass
class Case:
    """One call: the overload, its arguments, and what eager answers."""

    overload: str
    label: str
    args: list[Any]
    kwargs: dict[str, Any]
    eager: list[Any]
    values: bool = True
    reference: Callable[..., Any] | None = None

    def call(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What is right."""
        return (self.reference or _target(self.overload))(*args, **kwargs)

    def operator(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The operator itself, which a program calls."""
        return _target(self.overload)(*args, **kwargs)


def check_op(op: Op) -> None:
    """Compile all cases of `op` as one graph; raise AssertionError that names each case with a wrong result or an eager kernel, and
    unittest.SkipTest where this torch does not have the operator.
    """
    missing = [overload for overload in op.overloads if not exists(overload)]
    if missing:  # the specs follow the newest supported torch (D3)
        raise unittest.SkipTest(f"torch {torch.__version__} has no {', '.join(missing)}")
    _, faults = check_cases(op)
    assert not faults, f"{op.id}\n" + "\n".join(faults[:12])


def check_cases(op: Op, without: frozenset[tuple[str, str]] = frozenset()) -> tuple[list[Case], list[str]]:
    """The cases of `op`, but for those named by overload and label, compiled as one graph, and a line for each wrong result or eager kernel.
    Raises AssertionError where an overload has no case that eager takes.
    """
    torch.manual_seed(0)
    cases = [c for overload in op.overloads for c in _cases(op, overload) if (overload, c.label) not in without]
    overloads = [o for o in op.overloads if _of(cases, o) or o not in {named for named, _ in without}]
    for overload in overloads:
        assert _of(cases, overload), f"no case for {overload}: eager rejects every one"
    if not cases:
        return [], []
    opforge.reset_stats()
    fresh = op.kind == "view" or op.kind == "composite"
    results = _compiled(cases, fresh)
    faults = [f for case, result in zip(cases, results, strict=True) for f in _differences(case, result)]
    # Torch takes some operators apart before a graph records them, but not in inference mode.
    apart = [o for o in overloads if not any(map(_recorded, _of(cases, o)))]
    with torch.inference_mode() if apart else contextlib.nullcontext():
        unmet = [o for o in apart if not any(map(_recorded, _of(cases, o)))]
        again = [c for o in apart for c in _of(cases, o)]
        results = _compiled(again, fresh) if again else []
    faults += [f for case, result in zip(again, results, strict=True) for f in _differences(case, result)]
    faults += [f"no graph holds {overload}: its lowering is never used" for overload in unmet]
    stats = opforge.stats()
    faults += _externs(op, cases, stats["reasons"])
    faults += [f"the whole graph ran eagerly: {reason}" for reason in stats["fallbacks"]]
    return cases, faults


def wrong_fakes(op: Op) -> tuple[list[str], frozenset[tuple[str, str]]]:
    """Cases, by overload and label, for which the fake kernel gives another dtype or other sizes than the operator itself (a graph is made by what
    it gives), and a line for the first of each overload.
    """
    faults: list[str] = []
    found: set[tuple[str, str]] = set()
    for overload in op.overloads:
        for case in _cases(op, overload):
            try:
                given = _leaves(case.operator(case.args, case.kwargs))
                traced = _traced(overload, case.args, case.kwargs)
            except _REJECTED:
                continue
            pairs = [(g, t) for g, t in zip(given, traced, strict=False) if isinstance(g, torch.Tensor)]
            wrong = next(((g, t) for g, t in pairs if (g.dtype, g.shape) != (t.dtype, t.shape)), None)
            if wrong is not None and overload not in {o for o, _ in found}:
                real, said = (f"{t.dtype}{list(t.shape)}" for t in wrong)
                faults.append(
                    f"{overload}({case.label}): the operator returns {real}, and its fake kernel says {said}; "
                    "mend the function that is registered with register_fake, or the operator"
                )
            if wrong is not None:
                found.add((overload, case.label))
    return faults, frozenset(found)


def _of(cases: list[Case], overload: str) -> list[Case]:
    return [c for c in cases if c.overload == overload]


def _recorded(case: Case) -> bool:
    """Whether the graph of the call holds its overload, and not what torch makes of it."""

    def program(args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        return [v.clone() if isinstance(v, torch.Tensor) else v for v in _leaves(case.operator(args, kwargs))]

    graph = trace(program, [case.args, case.kwargs]).graph.graph
    return any(str(node.target) == case.overload for node in graph.nodes)


def _externs(op: Op, cases: list[Case], reasons: dict[str, int]) -> Iterator[str]:
    """Cases that an eager kernel ran. Some may be outside the entry's `native_if`, but not all of an overload's."""
    for overload in op.overloads:
        why = {text.partition(": ")[2]: n for text, n in reasons.items() if text.partition(": ")[0] == overload}
        meant = [r for r in why if r.startswith("not native unless") or r == EXTERN.get(overload)]
        excused = sum(why[reason] for reason in meant)
        bad = [r for r in why if r not in meant]
        if excused >= sum(c.overload == overload for c in cases):
            bad += list(why)
        yield from (f"{overload} by an eager kernel: {reason}" for reason in bad)


# -- running -----------------------------------------------------------------------------------------------------------
def exists(overload: str) -> bool:
    """Whether this torch has the operator."""
    try:
        _target(overload)
    except AttributeError:
        return False
    return True


def _target(overload: str) -> Any:
    target: Any = torch.ops
    for part in overload.split("."):
        target = getattr(target, part)
    return target


def _compiled(cases: list[Case], fresh: bool) -> list[list[Any]]:
    """Results per case of one graph that holds all; when that cannot be compiled, the cases one by one, so that the bad one is named."""

    def program(inputs: list[tuple[list[Any], dict[str, Any]]]) -> list[list[Any]]:
        out = []
        for case, (args, kwargs) in zip(cases, inputs, strict=True):
            values = _leaves(case.operator(args, kwargs))
            # A returned view would be made by the wrapper, not by a kernel: use it.
            out.append([v.clone() if fresh and isinstance(v, torch.Tensor) else v for v in values])
        return out

    torch._dynamo.reset()
    try:
        return torch.compile(program, backend="opforge", fullgraph=True, dynamic=False)(
            [(c.args, c.kwargs) for c in cases]
        )
    except Exception as error:
        if len(cases) == 1:
            raise AssertionError(f"{cases[0].overload}({cases[0].label}) does not compile: {error}") from error
        return [_compiled([c], fresh)[0] for c in cases]


def _leaves(value: Any) -> list[Any]:
    return [leaf for v in value for leaf in _leaves(v)] if isinstance(value, (list, tuple)) else [value]


# -- comparing ---------------------------------------------------------------------------------------------------------
def _differences(case: Case, result: list[Any]) -> Iterator[str]:
    where = f"{case.overload}({case.label})"
    exact = _reference(case)
    extra = _float64_error(case)
    for k, (ours, eager) in enumerate(zip(result, case.eager, strict=True)):
        if not isinstance(eager, torch.Tensor):
            if ours != eager:
                yield f"{where}: result {k} is {ours}, eager {eager}"
        elif ours.shape != eager.shape or ours.dtype != eager.dtype:
            yield f"{where}: result {k} is {ours.dtype}{list(ours.shape)}, eager {eager.dtype}{list(eager.shape)}"
        elif case.values:
            true = exact[k] if exact is not None else None
            fault = _difference(ours, eager, true, extra[k])
            for runs in (NOISY_RUNS, MANY_RUNS):
                # Of a few sums eager's single run may have luck: its error is the worst of runs that round otherwise.
                if fault is not None and true is not None and eager.dtype.is_floating_point:
                    fault = _difference(ours, eager, true, max(extra[k], _noisy_error(case, k, true, runs)))
            if fault is not None:
                yield f"{where}: result {k} {fault}"


def _noisy_error(case: Case, k: int, exact: torch.Tensor, runs: int) -> float:
    """The largest error of eager's result `k` in runs with moved roundings."""
    worst = 0.0
    for seed in range(runs):
        with Noise(seed):
            result = _leaves(case.call(case.args, case.kwargs))[k]
        gap = (result.double() - exact.double()).abs()
        gap = gap[gap.isfinite()]
        worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
    return worst


def _difference(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None, others: float) -> str | None:
    """Integers and bools equal; floats within twice eager's own error (`others`: or that of other runs) and one unit in the last place."""
    if not (eager.dtype.is_floating_point or eager.dtype.is_complex):
        wrong = ours != eager
        return None if not wrong.any() else _show(wrong, ours, eager)
    if exact is None or exact.shape != eager.shape:
        exact = eager
    # The parts of a complex number are as exact as it is large.
    size = exact.abs().unsqueeze(-1).double() if exact.is_complex() else exact.double().abs()
    o, e, x = (_reals(t).double() for t in (ours, eager, exact))
    finite = e.isfinite() & x.isfinite()
    own = (e - x).abs()[finite]
    worst = own.max() if own.numel() else torch.zeros((), dtype=torch.float64)
    info = torch.finfo(eager.dtype)
    bound = 2 * (worst + others) + info.eps * size + info.tiny
    wrong = torch.where(finite, ~((o - x).abs() <= bound), ~((o == e) | (o.isnan() & e.isnan())))
    return None if not wrong.any() else _show(wrong, _reals(ours), _reals(eager), x)


def _reference_error(t: torch.Tensor) -> float:
    """What a result of several roundings may be off where one float64 run cannot tell: units in the last place of its largest element."""
    finite = t.detach().double().abs()
    finite = finite[finite.isfinite()]
    return 2 * torch.finfo(t.dtype).eps * float(finite.max()) if finite.numel() else 0.0


def _reals(t: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def _show(wrong: torch.Tensor, ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None = None) -> str:
    at = tuple(int(i) for i in wrong.nonzero()[0])
    text = f"differs at {list(at)} ({int(wrong.sum())} of {wrong.numel()}): {ours[at].item()!r}, eager {eager[at].item()!r}"
    return text + (f", float64 {exact[at].item()!r}" if exact is not None else "")


def _float64_error(case: Case) -> list[float]:
    """Eager's error per float64 result. There is nothing to judge it by: its float32 run's error against it, at the scale of float64."""
    none = [0.0] * len(case.eager)
    if not any(isinstance(v, torch.Tensor) and v.dtype in (torch.float64, torch.complex128) for v in case.eager):
        return none
    narrower = {torch.float64: torch.float32, torch.complex128: torch.complex64}

    def narrow(v: Any) -> Any:
        if isinstance(v, list):
            return [narrow(x) for x in v]
        if isinstance(v, torch.Tensor):
            return v.to(narrower.get(v.dtype, v.dtype))
        return narrower.get(v, v) if isinstance(v, torch.dtype) else v

    def wide(v: Any) -> Any:
        if isinstance(v, list):
            return [wide(x) for x in v]
        if isinstance(v, torch.Tensor):
            return v.to(wider.get(v.dtype, v.dtype))
        return wider.get(v, v) if isinstance(v, torch.dtype) else v

    wider = {b: a for a, b in narrower.items()}
    args, kwargs = narrow(case.args), {k: narrow(v) for k, v in case.kwargs.items()}
    try:
        low = _leaves(case.call(args, kwargs))
        high = _leaves(case.call(wide(args), {k: wide(v) for k, v in kwargs.items()}))
    except _REJECTED:
        return none
    scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    for k, (a, b) in enumerate(zip(low, high, strict=True)):
        if isinstance(a, torch.Tensor) and a.dtype in wider and a.shape == b.shape:
            gap = (_reals(a).double() - _reals(b).double()).abs()
            gap = gap[gap.isfinite()]
            none[k] = float(gap.max()) * scale if gap.numel() else 0.0
    return none


def _reference(case: Case) -> list[Any] | None:
    """Eager on float64 inputs (integers too where the op accepts it and the result is floating), or None."""
    if not any(isinstance(v, torch.Tensor) and (v.dtype.is_floating_point or v.is_complex()) for v in case.eager):
        return None

    def widened(everything: bool) -> Callable[[Any], Any]:
        def widen(v: Any) -> Any:
            if isinstance(v, torch.Tensor) and v.is_complex():
                return v.to(torch.complex128)
            if isinstance(v, torch.dtype) and v.is_complex:
                return torch.complex128
            if isinstance(v, torch.Tensor):
                return v.double() if v.dtype.is_floating_point or (everything and v.dtype != torch.bool) else v
            if isinstance(v, torch.dtype):
                return torch.float64 if v.is_floating_point else v
            return [widen(x) for x in v] if isinstance(v, list) else v

        return widen

    has_float = any(
        isinstance(v, torch.Tensor) and (v.dtype.is_floating_point or v.is_complex())
        for v in _leaves([*case.args, *case.kwargs.values()])
    )
    for everything in (False,) if has_float else (True, False):
        f = widened(everything)
        try:
            result = _leaves(case.call([f(a) for a in case.args], {k: f(v) for k, v in case.kwargs.items()}))
        except _REJECTED:
            continue
        if len(result) == len(case.eager):
            return result
    return None


# -- cases -------------------------------------------------------------------------------------------------------------
def _cases(op: Op, overload: str) -> Iterator[Case]:
    schema = _target(overload)._schema
    known = (*DTYPES, *COMPLEX) if op.complex_ else DTYPES
    dtypes = tuple(getattr(torch, d) for d in op.dtypes) or known
    right = op.reference or _target(overload)
    made: Iterator[Made]
    if op.tests:
        others = (*dtypes[:1], *_half(op.tests[0], dtypes[1:], right))
        made = itertools.chain.from_iterable(
            from_text(text, dtypes) if k == 0 else from_text(text, others, contiguous=True)
            for k, text in enumerate(op.tests)
        )
        made = itertools.chain(made, other_parameters_of_text(schema, op.tests[0], dtypes[0]))
    else:
        made = by_default(schema, dtypes)
    for label, args, kwargs, drawn in made:
        try:
            eager = _leaves(right(*args, **kwargs))
            if op.reference is not None:
                with contextlib.suppress(NotImplementedError):  # there may be no kernel at all
                    _target(overload)(*args, **kwargs)
            if drawn:
                _traced(overload, args, kwargs)
        except _REJECTED:
            continue
        if any(isinstance(v, torch.Tensor) and v.dtype not in known for v in eager):
            continue
        eager = [v.clone() if isinstance(v, torch.Tensor) else v for v in eager]
        yield Case(overload, label, args, kwargs, eager, op.values, op.reference)


def _half(text: str, dtypes: tuple[torch.dtype, ...], right: Callable[..., Any]) -> tuple[torch.dtype, ...]:
    """The first dtype of 16 bits in which the call is accepted, if any. (Of no elements some kernels accept every dtype.)"""
    for d in dtypes:
        if d in HALVES:
            with contextlib.suppress(*_REJECTED):
                first = next(from_text(text, (d,)))
                right(*first.args, **first.kwargs)
                return (d,)
    return ()


def _traced(overload: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """A call on fake tensors. Raises what these raise: Dynamo refuses such a call before a backend is asked."""
    with FakeTensorMode() as mode:

        def fake(v: Any) -> Any:
            return (
                [fake(x) for x in v]
                if isinstance(v, list)
                else mode.from_tensor(v)
                if isinstance(v, torch.Tensor)
                else v
            )

        return _leaves(_target(overload)(*fake(args), **{k: fake(v) for k, v in kwargs.items()}))
