"""Calls of a case, compiled and run beside eager."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import opforge
from opforge.testing.noise import NoiseOfStatistics
from tests.fuzz.exact import exactly
from tests.fuzz.judge import differences
from tests.fuzz.observe import Direct, Sight, is_foretold, on_fakes
from tests.support.first_of_equals import FirstOfEquals
from tests.support.matrix import symbolic

from .database import Call, Case
from .listed import BY_DYNAMO, RANDOM, UNSPECIFIED, UNSPECIFIED_RESULTS, UNTOLD, is_in, strays
from .observe import arguments, program_of, see

FEW_DRAWS, MANY_DRAWS = 9, 100  # one normal number in 50 is outside of what nine others span, and half of it
ORDER = ("crash", "hang", "wrong", "error", "eager", "raises", "native")
"""Outcomes from bad to good; a case comes out as the worst of its calls.

native  every operator of the graph is ours (or the call only makes views).
raises  eager rejects the input, and so do we, with the same exception type.
eager   right, but some operator, or the whole graph, ran by eager kernels.
error   we raise where eager works, or another exception type than eager.
wrong   another value, gradient, dtype, size, stride or aliasing than eager's.
crash, hang  the process ended, or gave no sign of life.
"""


@dataclass
class Result:
    """How one call came out. `different`: (kind, text); `why`: why operators or the graph ran by eager kernels, each with its count."""

    number: int
    label: str
    outcome: str = ""
    different: list[tuple[str, str]] = field(default_factory=list)
    why: dict[str, int] = field(default_factory=dict)
    kernels: int = 0
    note: str = ""


@dataclass
class Prepared:
    """A compiled call that has not run yet; `refused` is what compiling it raised."""

    call: Call
    result: Result
    program: Callable[..., Any]
    run: Callable[..., Any] | None = None
    refused: Exception | None = None


def prepare(call: Call) -> Prepared:
    """Compile the call's program for its arguments, without Dynamo; with symbols for all sizes where the case is dynamic."""
    program, where = program_of(call)
    prepared = Prepared(call, Result(call.number, call.label), program)
    if is_in(BY_DYNAMO, call.case):
        prepared.run = torch.compile(program, backend="opforge", dynamic=call.case.dynamic)
        return prepared
    with _noted(prepared.result):
        try:
            tensors = arguments(call, where)
            examples = symbolic(tensors)[0] if call.case.dynamic else tensors
            # Of most calls the backward is compiled with the forward, so that their kernels are built together with those of others.
            with opforge.config.patch({"lazy_backward": call.number % 8 == 7}):
                prepared.run = opforge.compile_fx(Direct(program), examples)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - judged against eager's
            prepared.refused = error
    return prepared


def finish(prepared: Prepared) -> Result:
    """Run it and compare with eager."""
    call, result = prepared.call, prepared.result
    with _noted(result):
        eager = see(call)
        ours = _seen(prepared)
        result.different = _compare(call, prepared.program, eager, ours)
        if result.different and prepared.refused is not None and not eager.raised:
            _through_dynamo(prepared, eager)
    fallbacks = [reason for reason in result.why if reason.startswith("graph: BuildError")]
    if fallbacks:
        result.different.append(("build error", fallbacks[0]))
    result.outcome = _outcome(result, bool(eager.raised))
    return result


def check(call: Call) -> Result:
    """Compile and run one call."""
    return finish(prepare(call))


def worst(results: Iterable[Result]) -> str:
    """The outcome of a case."""
    found = {r.outcome for r in results}
    if found - {"raises"}:  # what eager rejects says nothing of the operator, where other samples do
        found -= {"raises"}
    return next(o for o in ORDER if o in found)


def _outcome(result: Result, refused: bool) -> str:
    kinds = {kind for kind, _ in result.different}
    if kinds:
        return "error" if all(k.startswith(("exception", "build error")) for k in kinds) else "wrong"
    if refused:
        return "raises"
    return "eager" if result.why else "native"


def _seen(prepared: Prepared) -> Sight:
    if prepared.refused is None:
        return see(prepared.call, prepared.run)
    return Sight(raised={"call": prepared.refused})


def _through_dynamo(prepared: Prepared, eager: Sight) -> None:
    """What the tracer cannot follow (Python that asks for values) is what Dynamo keeps from it: is it right that way?"""
    call, result = prepared.call, prepared.result
    torch._dynamo.reset()
    compiled = torch.compile(prepared.program, backend="opforge", dynamic=call.case.dynamic)
    found = _compare(call, prepared.program, eager, see(call, compiled))
    if found:
        torch._dynamo.reset()
        captured = torch.compile(prepared.program, backend="eager", dynamic=call.case.dynamic)
        same = {kind for kind, _ in _compare(call, prepared.program, eager, see(call, captured))}
        found = [f for f in found if f[0] not in same]
    if not found:
        refused = prepared.refused
        result.why[f"graph: only by Dynamo: {type(refused).__name__}: {first_line(refused)}"] = 1
        result.different = []


def _compare(call: Call, program: Callable[..., Any], eager: Sight, ours: Sight) -> list[tuple[str, str]]:
    if is_in(UNSPECIFIED, call.case):
        for sight in (eager, ours):
            sight.values = {k: t for k, t in sight.values.items() if not k.startswith("result")}
    left_out = UNSPECIFIED_RESULTS.get(call.case.entry, ())
    for sight in (eager, ours):
        sight.values = {k: t for k, t in sight.values.items() if k not in left_out}
        if call.case.memory == "cuda" and is_in(UNTOLD, call.case):  # of three facts only whether it is conjugated
            lazy = [k for k in sight.facts if k.endswith(": inference, conj, neg")]
            sight.facts |= {k: (sight.facts[k][0], sight.facts[k][2]) for k in lazy}
    wide = lambda dtype: in_dtype(call, dtype)  # noqa: E731
    found = differences(eager, ours, wide, lambda seed: see(call, around=lambda: NoiseOfStatistics(seed)))
    if any(kind == "strides" for kind, _ in found):
        told = see(call, on_fakes(program), only_strides=True)
        found = [f for f in found if f[0] != "strides" or not is_foretold(f[1].partition(": eager ")[0], ours, told)]
    if call.case.device != "cpu" and found and {kind for kind, _ in found} <= {"value", "gradient"}:
        ties = FirstOfEquals()  # kernels of a GPU may choose others of equal elements than eager's
        chosen = see(call, around=lambda: ties)
        if ties.changed:
            wide = lambda dtype: see(call, dtype=dtype, around=FirstOfEquals)  # noqa: E731
            found = differences(chosen, ours, wide, lambda seed: see(call, around=lambda: _noisy_first(seed)))
    if any(kind in ("value", "gradient") for kind, _ in found) and is_in(RANDOM, call.case):
        found = [f for f in found if f[0] not in ("value", "gradient")]
        runs = [eager]
        for count in FEW_DRAWS, MANY_DRAWS:
            runs += [see(call, seed=seed) for seed in range(len(runs), count)]
            stray = strays(call.case, runs, ours)
            if not stray:
                break
        found += stray
    return found


@contextlib.contextmanager
def _noisy_first(seed: int) -> Iterator[None]:
    with NoiseOfStatistics(seed), FirstOfEquals():
        yield


def in_dtype(call: Call, dtype: str) -> Sight:
    """The call with every floating dtype replaced; float64 is evaluated in more than itself where its operators allow it."""
    plain = see(call, dtype=dtype)
    # Of complex numbers, and of what a GPU computes, nothing better is known.
    if dtype != "float64" or "complex" in f"{plain.facts}" or call.case.memory != "cpu":
        return plain
    sight = exactly(lambda around: see(call, dtype=dtype, around=around))
    if sight.raised or any(_nans(t) != _nans(sight.values.get(name)) for name, t in plain.values.items()):
        return plain  # halves of infinities make NaN
    return sight


def _nans(t: torch.Tensor | None) -> int:
    return -1 if t is None else int(t.isnan().sum())


@contextlib.contextmanager
def _noted(result: Result) -> Iterator[None]:
    """What the engine counts meanwhile, kept with the call; what is raised here is a mistake of ours."""
    opforge.reset_stats()
    logging.disable(logging.ERROR)  # torch's fake tensors print the errors that inputs are meant to make
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
    stats = opforge.stats()
    result.kernels += stats["kernels"]
    for reason, count in stats["reasons"].items():
        if reason.startswith("opforge."):  # steps of the wrapper (a seed is drawn), not operators of the program
            continue
        result.why[reason] = result.why.get(reason, 0) + count
    for reason, count in stats["fallbacks"].items():
        result.why[f"graph: {reason}"] = result.why.get(f"graph: {reason}", 0) + count


def first_line(error: Exception | None) -> str:
    """The first line of what an exception says."""
    return (str(error).splitlines() or [""])[0][:200]


def generic(text: str) -> str:
    """A reason without its numbers and places, for counting."""
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r" at .*|'[^']*'", "", text))[:140]


def by_case(results: Iterable[tuple[Case, Result]]) -> dict[Case, list[Result]]:
    """Results of each case."""
    found: dict[Case, list[Result]] = {}
    for case, result in results:
        found.setdefault(case, []).append(result)
    return found
