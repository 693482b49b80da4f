"""Times a call of a compiled graph, step by step: the wrapper's own code runs with its functions wrapped, its source is not changed."""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.dispatch.operators.effects import TORCHS, has_effect
from ..runtime.ir.nodes import Extern
from ..runtime.kernels.plan import CopyStep, ExternStep, Plan
from ..runtime.kernels.steps import allocation_root
from ..runtime.torch_compat import no_modes
from .collect import Call, copied

__all__ = ["Event", "Measured", "measure"]

BUDGET = 0.3  # seconds for the calls of one graph
LEAST, MOST = 5, 40  # calls
OURS = ("opforge",)  # namespaces beside torch's whose operators compute their results and do nothing else
AHEAD, FILLS = (
    128 << 20,
    4,
)  # bytes that a GPU writes, and how often at least, while the launches of a call are prepared


@dataclass(frozen=True)
class Event:
    """One call of a function by the wrapper: seconds from the start of the graph's call."""

    name: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Measured:
    """seconds: of the fastest of `calls` calls of the graph: others may have used the machine meanwhile. events: of the fastest call with its
    functions timed, which took `timed_seconds`.
    """

    seconds: float
    calls: int
    events: tuple[Event, ...]
    timed_seconds: float


def why_not(call: Call, plan: Plan | None) -> str:
    """Why a graph is not called again; "" where it may be."""
    if call.given is None:
        return call.why
    if plan is None:
        return "there is no plan of it"
    for step in _calls(call.half.artifacts, plan):
        if step.target.partition(".")[0] not in (*TORCHS, *OURS):
            return f"it calls {step.target.removesuffix('.default')}, which is not torch's own and may do more than compute its results"
        if step.effect and has_effect(functools.reduce(getattr, step.target.split("."), torch.ops)):
            return "it calls operators for what they do, which must not be done again"
    return ""


def _calls(artifacts: Any, plan: Plan) -> Iterator[Extern]:
    """The calls of operators of a graph, and of those inside of it."""
    for step in plan.steps:
        if isinstance(step, ExternStep) and step.call.target and not step.call.compiled:
            yield step.call
    for inner in artifacts.inside.values():
        if (planned := inner.planned()) is not None:
            yield from _calls(inner, planned)


def measure(call: Call, plan: Plan, device: str) -> Measured:
    """Calls the graph again with the arguments of its first call; what it writes to is copied before each."""
    assert call.given is not None
    names, timed = _written(plan), _Timed(call, device)
    devices = [torch.device(device)] if timed.gpu else []

    def arguments() -> list[Any]:
        return [
            copied(a) if n in names and isinstance(a, torch.Tensor) else a
            for n, a in zip(call.half.names, call.given or (), strict=True)
        ]

    with torch.no_grad(), no_modes(), torch.random.fork_rng(devices):
        plain: list[float] = []
        runs: list[tuple[float, tuple[Event, ...]]] = []
        began = time.perf_counter()
        while len(runs) < LEAST or (time.perf_counter() - began < BUDGET and len(runs) < MOST):
            plain.append(timed.whole(arguments()))
            runs.append(timed.steps(arguments()))
    seconds, events = min(runs, key=lambda run: run[0])
    return Measured(min(plain), len(plain), events, seconds)


def _written(plan: Plan) -> set[str]:
    """Inputs that the graph writes to."""
    found = {s.target for s in plan.steps if isinstance(s, CopyStep)}
    return found | {
        h
        for n, p in plan.allocations.items()
        if p.kind == "alias" and plan.allocations[h := allocation_root(plan, n)].kind == "input"
    }


class _Timed:
    """The wrapper's function beside a copy of it whose globals are wrapped."""

    def __init__(self, call: Call, device: str) -> None:
        self.call, self.device, self.gpu = call.half.call, device, torch.device(device).type == "cuda"
        self.boxed = call.half.boxed
        self.log: list[tuple[str, Any, Any]] = []
        functions = {*call.half.artifacts.symbols, *call.half.artifacts.controls}
        known: dict[str, Any] = self.call.__globals__  # type: ignore[attr-defined]
        wrapped = {
            name: f if not callable(f) or not (name in functions or name.startswith("op_")) else self._wrapped(name, f)
            for name, f in known.items()
        }
        self.timed = types.FunctionType(self.call.__code__, wrapped, "call", self.call.__defaults__)  # type: ignore[attr-defined]
        self.ahead = torch.empty(AHEAD, dtype=torch.uint8, device=device) if self.gpu else None

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        log, clock = self.log, self._event if self.gpu else time.perf_counter

        def run(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = function(*args, **kwargs)
            log.append((name, start, clock()))
            return result

        return run

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _run(self, function: Callable[..., Any], arguments: Sequence[Any], ahead: int) -> tuple[Any, Any]:
        if self.gpu:
            torch.cuda.synchronize(self.device)
            assert self.ahead is not None
            for _ in range(ahead):
                self.ahead.zero_()  # else a small kernel's time would be that of its launch
        start = self._event() if self.gpu else time.perf_counter()
        results = function(list(arguments)) if self.boxed else function(*arguments)
        end = self._event() if self.gpu else time.perf_counter()
        del results
        if self.gpu:
            torch.cuda.synchronize(self.device)
        return start, end

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self.gpu else end - start

    def whole(self, arguments: Sequence[Any]) -> float:
        return self._between(*self._run(self.call, arguments, FILLS + len(self.log) // 4))

    def steps(self, arguments: Sequence[Any]) -> tuple[float, tuple[Event, ...]]:
        before = [*self.log]
        self.log.clear()
        start, end = self._run(self.timed, arguments, FILLS + len(before) // 2)
        events = tuple(Event(name, self._between(start, a), self._between(a, b)) for name, a, b in self.log)
        return self._between(start, end), events
