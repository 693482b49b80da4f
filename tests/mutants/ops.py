"""Runs an operator entry's generated tests on wrong variants of it: the loop programs of all cases by the reference interpreter, against eager. Cases
with a routine, which it does not know, are compiled.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import opforge.runtime.philox  # noqa: F401 - registers the seeded operators
from opforge import config
from opforge.errors import OpforgeError
from opforge.generated import ops as tables
from opforge.generated.rewrites import RULES
from opforge.generator.diagnostics import Diagnostics
from opforge.generator.emit.invalid_tests import _clauses, _positions, taking_positions
from opforge.generator.emit.lowerings import function_name, module_text
from opforge.generator.emit.op_tests import _op
from opforge.generator.load import Document, Entry
from opforge.generator.model import Model
from opforge.generator.op_entries import OpEntry
from opforge.generator.run import build_model
from opforge.runtime.config import current
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.ir.nodes import Extern, Program
from opforge.runtime.ir.text import dump
from opforge.runtime.ir.verify import verify
from opforge.runtime.lower.graph import lower
from opforge.runtime.observe import counters
from opforge.testing import op_check
from opforge.testing.op_check import Case, Op
from tests.support import edge_check, invalid_calls
from tests.support.invalid_calls import Clause, Positions
from tests.support.ir_interpreter import interpret

MOST_COMPILED = 24
"""Cases that are compiled for one mutant."""
COMPILED_LIMIT_S = 240


class NotCompilable(Exception):
    """The generator refuses the variant."""


@dataclass
class Graph:
    """A case's functional graph, and the tensors that it takes. `baseline`: the program of the right entry."""

    case: Case
    edge: bool
    module: Any
    inputs: list[torch.Tensor]
    inference: bool
    baseline: str = ""


@dataclass
class Built:
    """What the generator makes of an entry: a lowering for each overload, the module's text, and the entries."""

    text: str
    lowerings: Mapping[str, Callable[..., Any]]
    entries: tuple[OpEntry, ...]
    extern: Mapping[str, str]


def build(entry: Entry, base: Model) -> Built:
    """Generate one entry on top of opforge's own specs. Raises NotCompilable where the generator refuses it."""
    diags = Diagnostics()
    # A symbol belongs to one entry; that of the base is this one's.
    data = {k: v for k, v in entry.data.items() if k != "symbol"}
    document = Document(entry.source.name, entry.source, (replace(entry, data=data),), (entry.source,))
    try:
        model = build_model(base.specs, {"ops": document}, base.torch, diags, base)
        if diags.mistakes:
            raise NotCompilable(diags.mistakes[0].message)
        entries: tuple[OpEntry, ...] = model.part("ops")
        text = module_text(entries, "opforge.runtime.lower.language")
        namespace: dict[str, Any] = {"__name__": "opforge_mutant"}
        exec(compile(text, "<mutant>", "exec"), namespace)
    except NotCompilable:
        raise
    except Exception as error:
        raise NotCompilable(f"{type(error).__name__}: {error}") from error
    lowerings = {w.schema.id: namespace[function_name(w.schema)] for e in entries for w in e.lowerings}
    return Built(text, lowerings, entries, {s.id: e.why for e in entries if e.why for s in e.schemas})


@contextlib.contextmanager
def installed(built: Built) -> Iterator[None]:
    """The entry's lowerings stand in the table."""
    found = tables.LOWERINGS._found
    before = dict(found)
    for overload, function in built.lowerings.items():
        tables.LOWERINGS.add(overload, function)
    try:
        yield
    finally:
        found.clear()
        found.update(before)


@dataclass(frozen=True)
class Known:
    """Ids of entries: those with tests of edges, those whose zeros may have either sign, those that take positions."""

    edges: frozenset[str]
    either_zero: frozenset[str]
    positions: frozenset[str]

    @classmethod
    def of(cls, base: Model) -> Known:
        from tests.generated.test_edges import EITHER_ZERO, ENTRIES, GROUPS

        edges = frozenset(name for ids in GROUPS.values() for name in ids)
        native = tuple(e for e in base.part("ops") if e.lowerings)
        return cls(edges & ENTRIES.keys(), frozenset(EITHER_ZERO), frozenset(e.id for e in taking_positions(native)))


@dataclass
class OpTests:
    """The generated tests of one entry, prepared: what does not depend on the lowering is computed once."""

    entry: Entry
    base: Model
    known: Known
    graphs: list[Graph] = field(default_factory=list)
    routines: list[Graph] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    built: Built | None = None

    def prepare(self) -> None:
        """Trace all cases; those that neither the interpreter nor compiled code can judge (other roundings) are left out and counted."""
        self.built = build(self.entry, self.base)
        for e in self.built.entries:
            if e.lowerings:
                self.graphs += self._traced(_parsed(_op(e)))
        with installed(self.built):
            kept = []
            for graph in self.graphs:
                program = _program(graph)
                why = ""
                if isinstance(program, str):
                    graph.baseline = program
                elif any(_routine(i) for i in program.items):
                    graph.baseline = dump(program)
                    self.routines.append(graph)
                    continue
                else:
                    graph.baseline = dump(program)
                    why = next(self._faults(graph, program), "")
                if why:
                    self.left_out.append(why)
                else:
                    kept.append(graph)
            if self.routines and (fault := in_a_child(lambda: self._compiled_fault(self.routines[:MOST_COMPILED]))):
                self.left_out += [f"compiled: {fault}"] * len(self.routines)
                self.routines = []
        self.graphs = kept

    def _traced(self, op: Op) -> list[Graph]:
        graphs = []
        torch.manual_seed(0)
        for overload in op.overloads:
            if not op_check.exists(overload):
                continue
            cases = [(c, False) for c in op_check._cases(op, overload)]
            if op.id in self.known.edges:
                cases += [(c, True) for c in edge_check.edge_cases(op, overload)]
            apart = not any(op_check._recorded(c) for c, _ in cases)
            for case, edge in cases:
                graph = _graph(case, edge, op.kind in ("view", "composite"), apart)
                if graph is not None:
                    graphs.append(graph)
        return graphs

    def killed_by(self, mutant: Entry) -> str | None:
        """What the first failing test says, None where all pass. Raises NotCompilable."""
        built = build(mutant, self.base)
        assert self.built is not None
        if built.text == self.built.text:
            raise NotCompilable("the generated function is the same")
        with installed(built):
            for graph in self.graphs:
                program = _program(graph)
                text = program if isinstance(program, str) else dump(program)
                if text == graph.baseline:
                    continue
                if isinstance(program, str):
                    return f"{graph.case.label}: {program}"
                fault = next(self._faults(graph, program), None)
                if fault is not None:
                    return fault
            changed = mutant.get("require") != self.entry.get("require")
            return self._invalid(built, changed) or self._killed_by_routines()

    def _killed_by_routines(self) -> str | None:
        """What the first case with a routine says whose program is another; those are compiled, in a process that may crash."""
        changed = []
        for graph in self.routines:
            program = _program(graph)
            if isinstance(program, str):
                return f"{graph.case.label}: {program}"
            if dump(program) != graph.baseline:
                changed.append(graph)
        chosen = changed[:: max(1, math.ceil(len(changed) / MOST_COMPILED))]
        return in_a_child(lambda: self._compiled_fault(chosen)) if chosen else None

    def _compiled_fault(self, graphs: Sequence[Graph]) -> str | None:
        cases = [g.case for g in graphs]
        fresh = str(self.entry.get("kind")) in ("view", "composite")
        inference = all(g.inference for g in graphs)
        settings = config.patch({"cache": False, "opt_level": "1", "progress": "off"})
        counters.reset()
        with settings, torch.inference_mode() if inference else contextlib.nullcontext():
            results = op_check._compiled(cases, fresh)
        if left := counters.snapshot()["fallbacks"]:
            return f"the whole graph ran eagerly: {next(iter(left))}"
        return next((f for c, r in zip(cases, results, strict=True) for f in op_check._differences(c, r)), None)

    def _faults(self, graph: Graph, program: Program) -> Iterator[str]:
        try:
            with torch.no_grad():
                verify(program)
                found = interpret(program, graph.inputs)
        except Exception as error:  # noqa: BLE001 - whatever it is, a test fails by it
            yield f"{graph.case.label}: {type(error).__name__}: {error}"
            return
        if len(found) != len(graph.case.eager):
            yield f"{graph.case.label}: {len(found)} results"
        elif graph.edge:
            yield from edge_check.faults_of(
                graph.case, found, self.entry.id in self.known.either_zero, "reduc" in str(self.entry.get("kind"))
            )
        else:
            yield from op_check._differences(graph.case, found)

    def _invalid(self, built: Built, changed: bool) -> str | None:
        """The tests of `require` and of positions, without a compiler; with one where the variant has another check of values."""
        for e in built.entries:
            for clause in map(_parsed, _clauses(e)):
                try:
                    _check_clause(clause)
                except AssertionError as error:
                    return f"invalid call: {error}"
                if not clause.raises:
                    continue
                compiled = functools.partial(_compiled_clause, clause)
                if fault := in_a_child(compiled) if changed or self.routines else _interpreted_clause(clause):
                    return f"invalid call: {fault}"
            if e.id in self.known.positions and (text := _positions(e)):
                try:
                    _check_positions(_parsed(text))
                except AssertionError as error:
                    return f"position out of range: {error}"
        return None


def in_a_child(run: Callable[[], str | None]) -> str | None:
    """What `run` returns or raises, in a process of its own; one that crashes or takes too long says so."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(COMPILED_LIMIT_S)
        try:
            found = run() or ""
        except BaseException as error:  # noqa: BLE001
            found = f"{type(error).__name__}: {error}"
        os.write(writing, found.encode()[:2000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "takes too long" if os.WTERMSIG(status) == signal.SIGALRM else f"ends by signal {os.WTERMSIG(status)}"
    return found or None


def _parsed(text: str) -> Any:
    return eval(text, {"Op": Op, "Clause": Clause, "Positions": Positions})


def _routine(item: Any) -> bool:
    return isinstance(item, Extern) and item.compiled


def _graph(case: Case, edge: bool, fresh: bool, inference: bool) -> Graph | None:
    """Trace one call; None where torch takes it apart or cannot trace it."""
    tensors = [v for v in op_check._leaves([*case.args, *case.kwargs.values()]) if isinstance(v, torch.Tensor)]

    def program(*given: torch.Tensor) -> list[Any]:
        rest = iter(given)

        def put(v: Any) -> Any:
            return [put(x) for x in v] if isinstance(v, list) else next(rest) if isinstance(v, torch.Tensor) else v

        args = [put(a) for a in case.args]
        values = op_check._leaves(case.call(args, {k: put(v) for k, v in case.kwargs.items()}))
        return [v.clone() if fresh and isinstance(v, torch.Tensor) else v for v in values]

    try:
        with torch.inference_mode() if inference else contextlib.nullcontext():
            traced = trace(program, tensors)
    except (OpforgeError, *op_check._REJECTED):
        return None
    rewrite(traced.graph, RULES)
    outputs = next(n for n in traced.graph.graph.nodes if n.op == "output").args[0]
    if len(outputs) != len(case.eager):
        return None
    return Graph(case, edge, traced.graph, tensors, inference)


def _program(graph: Graph) -> Program | str:
    """The loop program, or what its lowering raises, or the reason why its eager kernel runs."""
    counters.reset()
    try:
        program = lower(graph.module, products=current().loop_products).program
    except Exception as error:  # noqa: BLE001 - an expression may raise anything
        return f"{type(error).__name__}: {error}"
    mine = [r for r in counters.snapshot()["reasons"] if r.startswith(graph.case.overload + ":")]
    return f"by the eager kernel: {mine[0]}" if mine else program


def _check_clause(clause: Clause) -> None:
    torch.manual_seed(0)
    for text in clause.bad:
        tried = 0
        for overload in clause.overloads:
            args, kwargs = call = invalid_calls._made(text)
            error = invalid_calls._outcome(op_check._target(overload), call).error
            assert error is not None, f"{overload}({text}): eager raises nothing"
            if invalid_calls.MISFIT in str(error):
                continue
            tried += 1
            if clause.raises:
                assert clause.text in _attempt(invalid_calls._said, overload, args, kwargs), text
            else:
                reason = _attempt(invalid_calls._reason, overload, args, kwargs)
                assert reason == f"eager raises unless {clause.text}", f"{overload}({text}): {reason}"
        assert tried, f"no overload takes ({text})"


def _interpreted_clause(clause: Clause) -> str | None:
    """What is wrong with the exceptions of calls whose values break the clause, by the interpreter."""
    torch.manual_seed(0)
    for text in clause.bad:
        for overload in clause.overloads:
            args, kwargs = call = invalid_calls._made(text)
            if invalid_calls.MISFIT in str(invalid_calls._outcome(op_check._target(overload), call).error):
                continue
            error = _interpreted(overload, args, kwargs)
            if type(error) is not invalid_calls.ERRORS[clause.raises]:
                return f"{overload}({text}): {error!r}, eager raises {clause.raises}"
    return None


def _compiled_clause(clause: Clause) -> None:
    with config.patch({"cache": False, "opt_level": "1", "progress": "off"}):
        invalid_calls.check_clause(clause)


def _attempt(f: Callable[..., str], *args: Any) -> str:
    try:
        return f(*args)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def _check_positions(positions: Positions) -> None:
    """Calls with one position out of range, by the interpreter."""
    raised = refused = 0
    for overload in positions.overloads:
        for text in positions.tests:
            torch.manual_seed(0)
            if invalid_calls._outcome(op_check._target(overload), invalid_calls._made(text)).error is not None:
                continue
            for label, (args, kwargs) in invalid_calls._out_of_range(text):
                eager = invalid_calls._outcome(op_check._target(overload), (args, kwargs)).error
                ours = _interpreted(overload, args, kwargs)
                if eager is None:
                    refused += ours is not None
                else:
                    raised += 1
                    assert type(ours) is type(eager), f"{label}: {ours!r}, eager {eager!r}"
    assert raised or refused, f"{positions.op}: no position out of range is refused"


def _interpreted(overload: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    case = Case(overload, "", list(args), dict(kwargs), [])
    try:
        with torch.no_grad():
            graph = _graph_of_call(case)
            program = _program(graph)
            if isinstance(program, str):
                case.call(case.args, case.kwargs)
            else:
                interpret(program, graph.inputs)
    except Exception as error:  # noqa: BLE001
        return error
    return None


def _graph_of_call(case: Case) -> Graph:
    """The graph of a call whose values eager refuses."""
    tensors = [v for v in op_check._leaves([*case.args, *case.kwargs.values()]) if isinstance(v, torch.Tensor)]

    def program(*given: torch.Tensor) -> list[Any]:
        rest = iter(given)

        def put(v: Any) -> Any:
            return [put(x) for x in v] if isinstance(v, list) else next(rest) if isinstance(v, torch.Tensor) else v

        args = [put(a) for a in case.args]
        return op_check._leaves(case.call(args, {k: put(v) for k, v in case.kwargs.items()}))

    traced = trace(program, tensors)
    rewrite(traced.graph, RULES)
    return Graph(case, False, traced.graph, tensors, False)
