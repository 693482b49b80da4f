"""Is a host program one that can run? Every name is there when it is read, the arena is held where its tensors are used, and every path returns."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from ...errors import HostProgramError
from ..ir.index import Expr, Quotient, Sym, bounds, expr
from ..ir.learned import names_in
from ..ir.nodes import ITEMSIZE, Size
from ..kernels.plan import CopyStep, ExternStep, Plan
from ..kernels.routines import routine_call
from ..kernels.steps import allocation_root, arena_offset
from .program import (
    Address,
    Allocate,
    Asked,
    AsReal,
    CallGraph,
    Clone,
    Conform,
    Copy,
    Detach,
    ForEach,
    Formula,
    Free,
    GiveArena,
    HostProgram,
    If,
    Instruction,
    Item,
    LaidOut,
    LaunchKernel,
    Layout,
    Learn,
    LibraryCall,
    ReadSize,
    Restride,
    Return,
    Slot,
    Stack,
    TakeArena,
    Tensor,
    View,
    While,
)

__all__ = ["describe", "follows", "verify"]


def describe(one: Instruction) -> str:
    """An instruction in a few words: what it is and what it is about."""
    names = ("kernel", "operator", "graph", "symbol", "name", "target", "names")
    about = next((str(getattr(one, n)) for n in names if hasattr(one, n)), "")
    return f"{type(one).__name__} {about}".strip()


def verify(program: HostProgram) -> None:
    """Check that the program can run. Raises `HostProgramError`, which names the instruction and the reason."""
    given = (*program.parameters, *program.constants)
    for name in (program.name, *given, *program.arena):
        if reason := _no_name(name):
            raise HostProgramError(f"{program.name}: {reason}")
    if len(set(given)) != len(given):
        raise HostProgramError(f"{program.name}: two parameters or constants have one name")
    for name, slot in program.arena.items():
        if reason := _misplaced(name, slot, program):
            raise HostProgramError(f"{program.name}: {name!r} in the arena {reason}")
    state = _State(program, set(given))
    if not _run(program.instructions, state, program.name):
        raise HostProgramError(f"{program.name}: the last instruction does not return")
    if state.held:
        raise HostProgramError(f"{program.name}: the arena is not given back")


def _no_name(name: str) -> str:
    """Why there can be nothing of that name in Python, or nothing."""
    return "" if name.isidentifier() and not keyword.iskeyword(name) else f"{name!r} is no name"


def _misplaced(name: str, slot: Slot, program: HostProgram) -> str:
    if slot.offset < 0 or slot.bytes < 0 or slot.offset + slot.bytes > program.arena_bytes:
        return f"is at {slot.offset} to {slot.offset + slot.bytes}, the arena has {program.arena_bytes} bytes"
    if slot.layout.dtype not in ITEMSIZE:
        return f"has the unknown dtype {slot.layout.dtype!r}"
    if name in program.parameters or name in program.constants:
        return "is a parameter or constant"
    if len(slot.layout.shape) != len(slot.layout.stride):
        return "has other numbers of sizes and strides"
    if reason := next((r for part in _parts(slot.layout) for r in _impossible(part)), ""):
        return f"is impossible: {reason}"
    ends = _extent(slot.layout.shape, slot.layout.stride, 0) * ITEMSIZE[slot.layout.dtype]
    return f"has {slot.bytes} bytes for a layout of {ends}" if ends > slot.bytes else ""


def _extent(shape: Sequence[Any], stride: Sequence[Any], offset: Any) -> int:
    """Elements from the start to the end of a layout; 0 where that is not known before the program runs."""
    if len(shape) != len(stride) or any(not isinstance(n, int) for n in (*shape, *stride, offset)) or 0 in shape:
        return 0
    return int(offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1)


@dataclass
class _State:
    """known: names that can be read. held: whether the arena is. gathered: what `Stack` may take."""

    program: HostProgram
    known: set[str]
    held: bool = False
    taken: bool = False
    freed: set[str] = field(default_factory=set)
    gathered: set[str] = field(default_factory=set)

    def copy(self) -> _State:
        return _State(self.program, set(self.known), self.held, self.taken, set(self.freed), set(self.gathered))


def _run(instructions: Iterable[Instruction], state: _State, where: str) -> bool:
    """Whether the instructions return. Raises `HostProgramError`."""
    returned = False
    for k, one in enumerate(instructions):
        here = f"{where}, instruction {k} ({describe(one)})"
        if returned:
            raise HostProgramError(f"{here}: nothing reaches it")
        for reason in _wrong(one, state):
            raise HostProgramError(f"{here}: {reason}")
        match one:
            case If():
                returned = _choice(one, state, here)
            case While():
                inside = state.copy()
                _repeats(one.body, inside, state, here)
                if added := inside.known - state.known:
                    raise HostProgramError(f"{here}: {_listed(added)} would be there only where the body has run")
            case ForEach():
                inside = state.copy()
                inside.known |= {name for name, _ in one.slices}
                _repeats(one.body, inside, state, here)
                if missing := set(one.gathered) - inside.known:
                    raise HostProgramError(f"{here}: its body does not define {_listed(missing)}")
                state.gathered |= set(one.gathered)
                state.known |= inside.known & {*_carried(one.body)}
            case _:
                returned = isinstance(one, Return) or (isinstance(one, CallGraph) and one.results is None)
                _apply(one, state)
    return returned


def _repeats(body: Iterable[Instruction], inside: _State, before: _State, here: str) -> None:
    """The body of a loop, which must leave what it takes to run once more."""
    if _run(body, inside, here):
        return
    if gone := before.known - inside.known:
        raise HostProgramError(f"{here}: its body frees {_listed(gone)}, which is there only once")
    if inside.held != before.held:
        raise HostProgramError(f"{here}: its body takes or gives back the arena")


def _choice(one: If, state: _State, here: str) -> bool:
    arms = [state.copy(), state.copy()]
    ends = [_run(block, arm, here) for block, arm in zip((one.then, one.otherwise), arms, strict=True)]
    if not any(ends) and (apart := arms[0].known ^ arms[1].known):
        raise HostProgramError(f"{here}: only one of its arms defines {_listed(apart)}")
    if not any(ends) and arms[0].held != arms[1].held:
        raise HostProgramError(f"{here}: only one of its arms takes or gives back the arena")
    for arm, end in zip(arms, ends, strict=True):
        if not end:
            state.known, state.freed, state.held, state.taken = arm.known, arm.freed, arm.held, arm.taken
    return all(ends)


def _carried(body: Iterable[Instruction]) -> Iterator[str]:
    """What a loop's body defines that was there before."""
    for one in body:
        if isinstance(one, CallGraph):
            yield from one.results or ()


def _apply(one: Instruction, state: _State) -> None:
    """What is there after an instruction."""
    match one:
        case ReadSize() | Learn():
            state.known.add(one.symbol)
        case Allocate():
            state.known.add(one.name)
        case LibraryCall():
            state.known |= set(one.results) - {"_"}
        case CallGraph():
            state.known |= set(one.results or ())
        case TakeArena():
            state.held = state.taken = True
        case GiveArena():
            state.held = False
        case Free():
            state.known -= set(one.names)
            state.freed |= set(one.names)


def _wrong(one: Instruction, state: _State) -> Iterator[str]:
    """Why an instruction cannot run."""
    for part in _parts(one):
        yield from _impossible(part)
    for name in _reads(one):
        if name in state.program.arena:
            if not state.held:
                yield f"{name!r} lies in the arena, which is not held"
        elif name not in state.known:
            yield f"{name!r} was freed" if name in state.freed else f"{name!r} is not defined"
    for name in _defines(one):
        if name in state.known or name in state.program.arena:
            yield f"{name!r} is defined already"
        elif reason := _no_name(name):
            yield reason
    for part in _parts(one):
        if isinstance(part, View) and len(part.shape) != len(part.stride):
            yield f"a view of {part.of!r} has other numbers of sizes and strides"
        if isinstance(part, View) and part.of in state.program.arena:
            slot = state.program.arena[part.of]
            if _extent(part.shape, part.stride, part.offset) * ITEMSIZE[slot.layout.dtype] > slot.bytes:
                yield f"a view of {part.of!r} ends behind its memory"
        if isinstance(part, Stack) and part.of not in state.gathered:
            yield f"nothing gathers {part.of!r}"
    yield from _wrong_here(one, state)


def _impossible(part: Any) -> Iterator[str]:
    """What no sizes at run time make possible: numbers below 0 that count elements or programs, and divisions by 0."""
    match part:
        case Expr() if any(isinstance(a, Quotient) and a.den == 0 for a in part.atoms()):
            yield f"{part} divides by 0"
        case Formula():
            try:
                parsed = ast.parse(part.source, mode="eval")
            except SyntaxError as error:
                yield f"{part.source!r} is no formula: {error.msg}"
                return
            if any(_divides_by_zero(n) for n in ast.walk(parsed)):
                yield f"{part.source!r} divides by 0"
        case Layout() | View():
            yield from _negative("size", part.shape)
            yield from _negative("stride", part.stride)
            yield from _negative("offset", [part.offset] if isinstance(part, View) else [])
        case LaidOut() | Restride():
            yield from _negative("stride", part.stride)
        case LaunchKernel(grid=grid) if grid is not None:
            yield from _negative("number of programs", [grid])


def _negative(what: str, numbers: Iterable[Size]) -> Iterator[str]:
    for n in numbers:
        e = expr(n)
        # The bounds of what divides by 0 mean nothing; it is refused for that.
        if not any(isinstance(a, Quotient) and a.den == 0 for a in e.atoms()) and (bounds(e)[1] or 0) < 0:
            yield f"the {what} {n} is negative"


def _divides_by_zero(n: ast.AST) -> bool:
    return (
        isinstance(n, ast.BinOp)
        and isinstance(n.op, (ast.Div, ast.FloorDiv, ast.Mod))
        and isinstance(n.right, ast.Constant)
        and n.right.value == 0
    )


def _wrong_here(one: Instruction, state: _State) -> Iterator[str]:
    match one:
        case TakeArena() if state.taken:
            yield "the arena is taken twice"
        case TakeArena() if not state.program.arena_bytes:
            yield "the program has no arena"
        case GiveArena() if not state.held:
            yield "the arena is not held"
        case Return() if state.held:
            yield "the arena is not given back"
        case Free() if len(set(one.names)) != len(one.names):
            yield "it frees a tensor twice"
        case Free() if lasting := [n for n in one.names if n in state.program.arena or n in state.program.constants]:
            yield f"{_listed(lasting)} cannot be freed"
        case Allocate() if len(one.layout.shape) != len(one.layout.stride):
            yield "it has other numbers of sizes and strides"
        case Allocate() if not isinstance(getattr(torch, one.layout.dtype, None), torch.dtype):
            yield f"it has the unknown dtype {one.layout.dtype!r}"
        case LaunchKernel(kernel=name) | CallGraph(graph=name) if reason := _no_name(name):
            yield reason
        case LibraryCall(how="function") if reason := _no_name(one.operator):
            yield reason
        case LibraryCall() if one.single and len(one.results) != 1:
            yield f"one result has {len(one.results)} names"
        case LaunchKernel() if one.pointer_table and any(not isinstance(a, Address) for a in one.arguments):
            yield "a table holds addresses alone"


def _defines(one: Instruction) -> Iterator[str]:
    """Names that must not be there yet."""
    match one:
        case ReadSize() | Learn():
            yield one.symbol
        case Allocate():
            yield one.name
        case LibraryCall():
            yield from (name for name in one.results if name != "_")


def _parts(one: object) -> Iterator[Any]:
    """An instruction with all that it is made of, but for the instructions inside of it."""
    yield one
    if isinstance(one, tuple):
        for part in one:
            yield from _parts(part)
    elif is_dataclass(one):
        for f in fields(one):
            if f.name not in ("then", "otherwise", "body"):
                yield from _parts(getattr(one, f.name))


def _reads(one: Instruction) -> Iterator[str]:
    """Names of tensors and symbols that an instruction needs."""
    for part in _parts(one):
        match part:
            case Expr():
                yield from (a.name for a in part.atoms() if isinstance(a, Sym))
            case Tensor() | AsReal() | Restride() | Conform() | Detach():
                yield part.name
            case View() | Address() | Clone() | Item() | ReadSize():
                yield part.of
            case Copy():
                yield part.target
            case Formula():
                yield from names_in(part.source)
            case Asked() | CallGraph():
                yield from part.arguments
            case Free():
                yield from part.names
            case ForEach():
                yield from (of for _, of in part.slices)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(n) for n in sorted(names))


# -- against the plan --------------------------------------------------------------------------------------------------
def follows(
    program: HostProgram, plan: Plan, out_targets: Mapping[str, str], groups: Mapping[str, Sequence[str]]
) -> None:
    """Raises `HostProgramError` unless the program's calls are the steps of the plan, one for one and in order, with their arguments.

    out_targets  overloads that take memory for their results, by operator. groups: kernels that are called as one, by the name of that.
    """
    calls = [
        x
        for x in program.instructions
        if isinstance(x, (LaunchKernel, LibraryCall)) or (isinstance(x, Copy) and x.input)
    ]
    expected = list(_expected(plan, out_targets, groups))
    if len(calls) != len(expected):
        raise HostProgramError(f"{program.name}: {len(calls)} calls for {len(expected)} steps of the plan")
    for k, (call, (what, fits)) in enumerate(zip(calls, expected, strict=True)):
        if reason := fits(call):
            raise HostProgramError(f"{program.name}, call {k} ({describe(call)}): {reason}, the plan has {what} here")


Fits = Callable[[Instruction], str]


def _expected(
    plan: Plan, out_targets: Mapping[str, str], groups: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Fits]]:
    """For each call that the plan asks for, what it is, and what is wrong with an instruction that should be it."""
    first = {members[0]: (name, members) for name, members in groups.items()}
    followers = {name for members in groups.values() for name in members[1:]}
    kernels = {k.name: k for k in plan.kernels()}
    for step in plan.steps:
        if isinstance(step, CopyStep):
            yield f"a copy to {step.target}", _named("target", step.target)
        elif isinstance(step, ExternStep):
            routine = routine_call(step, plan.layouts)
            if routine is not None:
                where = [_location(plan, n) for n in (*routine.reads, *routine.writes)]
                yield routine.name, _launched(routine.name, where, plan)
            elif step.call.target:
                target = step.call.target
                yield target, _named("operator", out_targets[target] if step.out and not step.call.writes else target)
        elif step.kernel.name not in followers:
            called, members = first.get(step.kernel.name, (step.kernel.name, (step.kernel.name,)))
            where = [_location(plan, n) for m in members for n in (*kernels[m].reads, *kernels[m].writes)]
            yield called, _launched(called, where, plan)


def _location(plan: Plan, name: str) -> str | int:
    """Where a buffer is: the offset in the arena, or the tensor that owns its memory."""
    of = allocation_root(plan, name)
    return arena_offset(plan, name) if plan.allocations[of].kind == "arena" else of


def _named(key: str, name: str) -> Fits:
    return lambda one: "" if getattr(one, key, None) == name else "it is another call"


def _launched(called: str, where: Sequence[str | int], plan: Plan) -> Fits:
    def wrong(one: Instruction) -> str:
        if not isinstance(one, LaunchKernel) or one.kernel != called:
            return "it is another call"
        given = [_location(plan, a.of) for a in one.arguments if isinstance(a, Address)]
        return "" if given == list(where) else f"its buffers are at {given}, not {list(where)}"

    return wrong
