"""Checks an operator entry: every overload on every case, compiled into one graph, against eager and a float64 run of eager."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import opforge
import opforge.runtime.philox  # registers the seeded operators
from opforge.generated.ops import EXTERN
from opforge.runtime.dispatch.trace import trace
from tests.fuzz.judge import MANY_RUNS, NOISY_RUNS
from tests.fuzz.noise import Noise
from tests.support.parameters import other_parameters

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTS, torch.bool)
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


Made = tuple[str, list[Any], dict[str, Any]]
"""A label, positional and keyword arguments."""


@dataclass
class Case:
    """One call: the overload, its arguments, and what eager answers."""

    overload: str
    label: str
    args: list[Any]
    kwargs: dict[str, Any]
    eager: list[Any]
    values: bool = True

    def call(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return _target(self.overload)(*args, **kwargs)


def check_op(op: Op) -> None:
    """Compile all cases of `op` as one graph; raise AssertionError that names each case with a wrong result or an eager kernel."""
    torch.manual_seed(0)
    missing = [overload for overload in op.overloads if not _exists(overload)]
    if missing:  # the specs follow the newest supported torch (D3)
        pytest.skip(f"torch {torch.__version__} has no {', '.join(missing)}")
    cases = [c for overload in op.overloads for c in _cases(op, overload)]
    for overload in op.overloads:
        assert any(c.overload == overload for c in cases), f"no case for {overload}: eager rejects every one"
    opforge.reset_stats()
    fresh = op.kind == "view" or op.kind == "composite"
    results = _compiled(cases, fresh)
    faults = [f for case, result in zip(cases, results, strict=True) for f in _differences(case, result)]
    # Torch takes some operators apart before a graph records them, but not in inference mode.
    apart = [o for o in op.overloads if not any(map(_recorded, _of(cases, o)))]
    with torch.inference_mode() if apart else contextlib.nullcontext():
        unmet = [o for o in apart if not any(map(_recorded, _of(cases, o)))]
        again = [c for o in apart for c in _of(cases, o)]
        results = _compiled(again, fresh) if again else []
    faults += [f for case, result in zip(again, results, strict=True) for f in _differences(case, result)]
    faults += [f"no graph holds {overload}: its lowering is never used" for overload in unmet]
    stats = opforge.stats()
    faults += _externs(op, cases, stats["reasons"])
    faults += [f"the whole graph ran eagerly: {reason}" for reason in stats["fallbacks"]]
    assert not faults, f"{op.id}\n" + "\n".join(faults[:12])


def _of(cases: list[Case], overload: str) -> list[Case]:
    return [c for c in cases if c.overload == overload]


def _recorded(case: Case) -> bool:
    """Whether the graph of the call holds its overload, and not what torch makes of it."""

    def program(args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        return [v.clone() if isinstance(v, torch.Tensor) else v for v in _leaves(case.call(args, kwargs))]

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
def _exists(overload: str) -> bool:
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
            values = _leaves(case.call(args, kwargs))
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
    made: Iterator[Made]
    if op.tests:
        made = itertools.chain.from_iterable(
            _from_text(text, dtypes if k == 0 else dtypes[:1]) for k, text in enumerate(op.tests)
        )
        made = itertools.chain(made, _other_parameters_of_text(schema, op.tests[0], dtypes[0]))
    else:
        made = _by_default(schema, dtypes)
    for label, args, kwargs in made:
        try:
            eager = _leaves(_target(overload)(*args, **kwargs))
            if " {" in label:
                _traced(overload, args, kwargs)
        except _REJECTED:
            continue
        if any(isinstance(v, torch.Tensor) and v.dtype not in known for v in eager):
            continue
        eager = [v.clone() if isinstance(v, torch.Tensor) else v for v in eager]
        yield Case(overload, label, args, kwargs, eager, op.values)


def _traced(overload: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Runs a call whose parameters were drawn on fake tensors. Raises what these raise: Dynamo refuses such a call before a backend is asked."""
    with FakeTensorMode() as mode:

        def fake(v: Any) -> Any:
            return (
                [fake(x) for x in v]
                if isinstance(v, list)
                else mode.from_tensor(v)
                if isinstance(v, torch.Tensor)
                else v
            )

        _target(overload)(*fake(args), **{k: fake(v) for k, v in kwargs.items()})


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    if dtype in INTS:
        return torch.randint(0 if dtype == torch.uint8 else -9, 10, shape, dtype=dtype)
    return torch.randn(shape, dtype=dtype) * 2 if dtype.is_complex else (torch.randn(shape) * 2).to(dtype)


def _by_default(schema: Any, dtypes: tuple[torch.dtype, ...]) -> Iterator[Made]:
    """Arguments made from the schema: shapes and layouts in the first dtype, then every dtype, then two mixed."""
    tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type) and not a.has_default_value()]
    # Eager takes a mask of numbers, but means yes and no by it.
    masks = {k for k, name in enumerate(tensors) if name == "mask" or name.endswith("_mask")}

    def made(layout: Callable[[int, torch.dtype], torch.Tensor], label: str, *dtype_of: torch.dtype) -> Made:
        """`dtype_of` are the dtypes of the first, second, … tensor; the last stands for the others too."""
        dtypes_ = [torch.bool if k in masks else dtype_of[min(k, len(dtype_of) - 1)] for k in range(len(tensors))]
        return _filled(schema, label, [layout(k, d) for k, d in enumerate(dtypes_)])

    layouts: dict[str, Callable[[int, torch.dtype], torch.Tensor]] = {
        "(3, 5)": lambda k, d: _tensor((3, 5), d),
        "broadcast, transposed": lambda k, d: (
            _tensor((5, 3), d).t() if k == 0 else _tensor((5,) if k == 1 else (3, 1), d)
        ),
        "0-dim": lambda k, d: _tensor((), d),
        "empty": lambda k, d: _tensor((0, 5), d),
    }
    for label, layout in layouts.items():
        yield made(layout, f"{label} {dtypes[0]}", dtypes[0])
    for d in dtypes[1:]:
        yield made(layouts["(3, 5)"], f"(3, 5) {d}", d)
    if len(tensors) > 1 and len(dtypes) > 1:
        yield made(layouts["(3, 5)"], "float and int32", dtypes[0], torch.int32)
        yield made(lambda k, d: _tensor(() if k else (3, 5), d), "int32 and a 0-dim float", torch.int32, torch.float64)
    for given in other_parameters(schema):
        label, args, kwargs = made(layouts["(3, 5)"], f"(3, 5) {dtypes[0]} {given}", dtypes[0])
        yield label, args, kwargs | given


def _filled(schema: Any, label: str, tensors: list[torch.Tensor]) -> Made:
    """The tensors with plain values for the other arguments that have no default."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    rest = iter(tensors)
    for a in schema.arguments:
        if a.has_default_value():
            continue
        kind = str(a.type)
        value: Any = next(rest) if "Tensor" in kind else _plain(kind)
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return label, args, kwargs


def _plain(kind: str) -> Any:
    if kind.startswith("Optional"):
        return None
    return {"bool": True, "str": "none", "float": 0.75, "number": 2, "Scalar": 2, "int": 1}.get(kind, 2)


# -- cases written in the spec -----------------------------------------------------------------------------------------
def _from_text(text: str, dtypes: tuple[torch.dtype, ...]) -> Iterator[Made]:
    """The arguments of a spec's `tests` line, once per dtype of its `F` tensors; with the first dtype also in another layout."""
    tree = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(tree, ast.Call)
    swept = (
        dtypes
        if any(isinstance(n, ast.Call) and n.func.id in ("F", "D") for n in ast.walk(tree) if n is not tree)
        else dtypes[:1]
    )  # type: ignore[attr-defined]
    for d in swept:
        yield f"{text} {d}", [_value(a, d) for a in tree.args], {str(k.arg): _value(k.value, d) for k in tree.keywords}
    if len(dtypes) > 1:
        args = [_strided(_value(a, dtypes[0])) for a in tree.args]
        yield f"{text} not contiguous", args, {str(k.arg): _value(k.value, dtypes[0]) for k in tree.keywords}


def _other_parameters_of_text(schema: Any, text: str, dtype: torch.dtype) -> Iterator[Made]:
    """The first call of a spec's `tests`, with other values for the parameters that it leaves at their defaults."""
    tree = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(tree, ast.Call)
    set_by_text = {a.name for a in schema.arguments[: len(tree.args)]} | {str(k.arg) for k in tree.keywords}
    for given in other_parameters(schema):
        if not set_by_text & given.keys():
            kwargs = {str(k.arg): _value(k.value, dtype) for k in tree.keywords}
            yield f"{text} {dtype} {given}", [_value(a, dtype) for a in tree.args], kwargs | given


def _positive_definite(shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    return x @ x.mT + torch.eye(shape[-1], dtype=torch.float64)


def _strided(v: Any) -> Any:
    if isinstance(v, list):
        return [_strided(x) for x in v]
    return v.mT.contiguous().mT if isinstance(v, torch.Tensor) and v.ndim > 1 else v


def _value(node: ast.expr, dtype: torch.dtype) -> Any:
    """A literal, a list, a dtype name, or a tensor (`F`, `P`, `U`, `I`, `S`, `B`, `D`, `N`, `C`)."""
    if isinstance(node, ast.List):
        return [_value(e, dtype) for e in node.elts]
    if isinstance(node, ast.Name):
        return getattr(torch, node.id)
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, dtype)
    if not isinstance(node, ast.Call):
        value = ast.literal_eval(node)
        return (
            getattr(torch, value)
            if isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
            else value
        )
    assert isinstance(node.func, ast.Name)
    if node.func.id == "C":
        value, *shape = (_value(a, dtype) for a in node.args)
        return torch.full(shape, value, **{str(k.arg): _value(k.value, dtype) for k in node.keywords})
    sizes = [int(ast.literal_eval(a)) for a in node.args]
    if node.func.id in ("I", "S"):
        n, *shape = sizes
        return torch.randint(-n if node.func.id == "S" else 0, n, shape)
    shape_ = tuple(sizes)
    make = {
        "F": lambda: _tensor(shape_, dtype),
        "P": lambda: (torch.rand(shape_) * 3 + 0.1).to(dtype if dtype in FLOATS else torch.float32),
        "U": lambda: torch.rand(shape_).clamp(0.01, 0.99).to(dtype if dtype in FLOATS else torch.float32),
        "B": lambda: torch.rand(shape_) > 0.5,
        "D": lambda: _positive_definite(shape_).to(dtype),
        "N": lambda: torch.arange(1, shape_[-1] + 1, dtype=torch.int32).expand(shape_).clone(),
    }
    return make[node.func.id]()
