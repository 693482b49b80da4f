"""The Python that runs compiled graphs as a predicate says, in a loop, or for each slice: one function for each such call of a graph."""

from __future__ import annotations

from ..lower.control import Control

_ROLES = {"branch": ("then", "otherwise"), "loop": ("test", "step"), "scan": ("step",), "map": ("step",)}


def roles(control: Control) -> tuple[str, ...]:
    """The names by which the function calls its graphs, in their order."""
    return _ROLES[control.runs]


def render_control(control: Control) -> str:
    """Source of a module with the function, which the graph's wrapper calls under its name. The compiled graphs are put into the module by the
    loader, each under its role; they take operands one by one and return a tuple of tensors that are memory of their own.
    """
    operands = [f"a{k}" for k in range(len(control.layouts))]
    parameters = ["predicate", *operands] if control.runs == "branch" else operands
    lines = [
        '"""Runs compiled graphs. Written by opforge; changes are lost."""',
        "",
        "from opforge.runtime.execute.support import restride",
        "import torch",
        "",
        "",
        f"def {control.name}({', '.join(parameters)}):",
    ]
    body = [line for a, layout in zip(operands, control.layouts, strict=True) if (line := _laid_out(a, layout))]
    body += _RENDER[control.runs](control, operands)
    return "\n".join([*lines, *(f"    {line}" for line in body)]) + "\n"


def _laid_out(name: str, layout: tuple[int, ...] | None) -> str:
    """The graphs read their operands by the strides that they were traced with."""
    if layout is None:
        return ""
    if not layout:
        return f"{name} = {name}.contiguous()"
    return f"if {name}.stride() != {layout}: {name} = restride({name}, {layout})"


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _branch(control: Control, operands: list[str]) -> list[str]:
    given = ", ".join(operands)
    return ["if predicate.item():", f"    return then({given})", f"return otherwise({given})"]


def _loop(control: Control, operands: list[str]) -> list[str]:
    given = ", ".join(operands)
    carried = operands[: control.carried]
    test = control.test or f"test({given})[0].item()"
    # What is returned is never an operand.
    copies = [f"{a}.clone()" if tensor else a for a, tensor in zip(carried, control.tensors, strict=True)]
    step = f"{_tuple(carried)} = step({given})"
    return [
        f"if not ({test}):",
        f"    return {_tuple(copies)}",
        step,
        f"while {test}:",
        f"    {step}",
        f"return {_tuple(carried)}",
    ]


def _scan(control: Control, operands: list[str]) -> list[str]:
    carried = operands[: control.carried]
    sliced = operands[control.carried : control.carried + control.sliced]
    slices = [f"{a}_row" for a in sliced]
    given = ", ".join([*carried, *slices, *operands[control.carried + control.sliced :]])
    stacked = [(f"y{k}", tensor) for k, tensor in enumerate(control.tensors[control.carried :])]
    rows = ", ".join(f"{a}.unbind(0)" for a in sliced)
    return [
        *(f"{y}_rows = []" for y, tensor in stacked if tensor),
        f"for {_tuple(slices)} in zip({rows}):",
        f"    {_tuple([*carried, *(y for y, _ in stacked)])} = step({given})",
        *(f"    {y}_rows.append({y})" for y, tensor in stacked if tensor),
        f"return {_tuple([*carried, *(f'torch.stack({y}_rows)' if tensor else 'None' for y, tensor in stacked)])}",
    ]


_RENDER = {"branch": _branch, "loop": _loop, "scan": _scan, "map": _scan}
