"""Host programs for control flow (branches, loops, scans and maps over compiled graphs): one for each such call in a graph."""

from __future__ import annotations

from collections.abc import Callable

from ..lower.control import Control
from .program import (
    Asked,
    CallGraph,
    Clone,
    Condition,
    ForEach,
    Formula,
    HostProgram,
    If,
    Instruction,
    Item,
    Restride,
    Return,
    Stack,
    Tensor,
    Value,
    While,
)

__all__ = ["control_program", "roles"]

Body = tuple[Instruction, ...]

_ROLES = {"branch": ("then", "otherwise"), "loop": ("test", "step"), "scan": ("step",), "map": ("step",)}


def roles(control: Control) -> tuple[str, ...]:
    """The names by which the program calls its graphs, in their order."""
    return _ROLES[control.runs]


def control_program(control: Control) -> HostProgram:
    """The function that a graph's wrapper calls under its name. Its graphs take operands one by one and return a tuple of tensors that are memory of
    their own; they read their operands by the strides that they were traced with.
    """
    operands = tuple(f"a{k}" for k in range(len(control.layouts)))
    parameters = ("predicate", *operands) if control.runs == "branch" else operands
    layouts = zip(operands, control.layouts, strict=True)
    laid_out = (Restride(a, layout) for a, layout in layouts if layout is not None)
    body = _BODIES[control.runs](control, operands)
    return HostProgram(parameters, (*laid_out, *body), name=control.name)


def _branch(control: Control, operands: tuple[str, ...]) -> Body:
    then, otherwise = (CallGraph(role, operands) for role in roles(control))
    return (If(Item("predicate"), (then,), (otherwise,)),)


def _loop(control: Control, operands: tuple[str, ...]) -> Body:
    carried = operands[: control.carried]
    condition: Condition = Formula(control.test) if control.test else Asked("test", operands)
    # What is returned is never an operand.
    copies = tuple(Clone(a) if tensor else Tensor(a) for a, tensor in zip(carried, control.tensors, strict=True))
    step = CallGraph("step", operands, carried)
    return (
        If(condition, (Return(copies),), negated=True),
        step,
        While(condition, (step,)),
        Return(tuple(map(Tensor, carried))),
    )


def _scan(control: Control, operands: tuple[str, ...]) -> Body:
    carried = operands[: control.carried]
    sliced = operands[control.carried : control.carried + control.sliced]
    rows = tuple(f"{a}_row" for a in sliced)
    step_operands = (*carried, *rows, *operands[control.carried + control.sliced :])
    stacked = [(f"y{k}", tensor) for k, tensor in enumerate(control.tensors[control.carried :])]
    step = CallGraph("step", step_operands, (*carried, *(y for y, _ in stacked)))
    results: list[Value] = [Tensor(a) for a in carried]
    results += [Stack(y) if tensor else None for y, tensor in stacked]
    gathered = tuple(y for y, tensor in stacked if tensor)
    return ForEach(tuple(zip(rows, sliced, strict=True)), gathered, (step,)), Return(tuple(results))


_BODIES: dict[str, Callable[[Control, tuple[str, ...]], Body]] = {
    "branch": _branch,
    "loop": _loop,
    "scan": _scan,
    "map": _scan,
}
