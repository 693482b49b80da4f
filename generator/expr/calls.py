"""Calls: which helper, scalar or operator a name means, and whether its arguments fit."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from ..diagnostics import did_you_mean
from ..torch_schemas import TorchSchema
from .checker import ExpressionChecker
from .helpers import CONSTANTS, HELPERS, LAZY, Helper
from .ops import ScalarSig, argument_types, result_type, suggestions
from .parse import dotted
from .printer import As
from .types import (
    ANY,
    DTYPE,
    DTYPE_NAMES,
    ELEM,
    INT,
    STR,
    TENSOR,
    Type,
    accepts,
    describe,
    item_of,
    list_of,
    substitute,
)

_ON_TENSORS = frozenset(
    [
        "shape",
        "size",
        "rank",
        "numel",
        "dtype",
        "to",
        "is_number",
        "promoted_dtype",
        "len",
        "zip",
        "enumerate",
        "list",
        "range",
    ]
)
"""Helpers that win over operators of the same name when they are given a tensor."""
_ITERATING = frozenset(["list", "sum", "sorted", "all", "any"])
"""Helpers that go through their argument, so that an iterator will do."""


def check_call(check: ExpressionChecker, node: ast.Call, scope: Mapping[str, Type]) -> Type:
    """The type of a call; records how it prints."""
    name = dotted(node.func)
    names = check.function.names
    if name is None:
        return check.error(node.func, "only a name can be called")
    if name in LAZY or name in _ITERATING:
        check.iterated.update(node.args)
    first = check.peek(_first(node), scope) if node.args else None
    on_tensor = first is not None and first.has_tensor
    scalar = names.scalars.get(name)
    helper = HELPERS.get({"min": "least", "max": "greatest"}.get(name, name))
    if name in ("min", "max") and first is not None and first.kind == "elem":
        return check.error(node.func, f"'{name}' is for indices: use '{name}imum' for elems")
    elementwise = scalar is not None and (check.elems or (first is not None and first.kind == "elem"))
    if (
        helper is not None
        and (name in _ON_TENSORS or not on_tensor or names.candidates(name) is None)
        and not elementwise
    ):
        return _helper(check, node, scope, helper)
    if scalar is not None and not on_tensor and (check.elems or _any_elem(check, node, scope)):
        return _scalar(check, node, scope, scalar)
    candidates = names.candidates(name)
    if candidates is not None:
        if check.elems and scalar is not None:
            return _scalar(check, node, scope, scalar)
        return _op(check, node, scope, name, candidates)
    if scalar is not None:
        return _scalar(check, node, scope, scalar)
    if name in scope or name in CONSTANTS:
        return check.error(node.func, f"'{name}' is a value, not something to call")
    known = suggestions(HELPERS, names.scalars if check.elems else (), () if check.elems else names.packets())
    arguments(check, node, scope)
    return check.error(node.func, f"unknown name '{name}'{did_you_mean(name, known)}")


def _first(node: ast.Call) -> ast.expr:
    a = node.args[0]
    return a.value if isinstance(a, ast.Starred) else a


def _any_elem(check: ExpressionChecker, node: ast.Call, scope: Mapping[str, Type]) -> bool:
    return any(check.peek(a, scope).kind == "elem" for a in node.args if not isinstance(a, ast.Starred))


def arguments(check: ExpressionChecker, node: ast.Call, scope: Mapping[str, Type]) -> list[tuple[ast.expr, Type, bool]]:
    """Positional arguments: node, type (of one item when unpacked), whether unpacked."""
    out: list[tuple[ast.expr, Type, bool]] = []
    for a in node.args:
        if isinstance(a, ast.Starred):
            out.append((a.value, check.starred(a.value, scope), True))
        else:
            out.append((a, check.infer(a, scope), False))
    return out


def _helper(check: ExpressionChecker, node: ast.Call, scope: Mapping[str, Type], helper: Helper) -> Type:
    name = helper.name
    given = arguments(check, node, scope)
    _print_helper(check, node, helper)
    for keyword in node.keywords:
        check.infer(keyword.value, scope)
        check.error(keyword.value, f"'{name}' takes no keyword arguments: {helper.text}")
    bound: dict[str, Type] = {}
    parameters = list(helper.parameters)
    many = parameters[-1].many
    unpacked = any(star for _, _, star in given)
    least, most = sum(p.required and not p.many for p in parameters), len(parameters)
    if not unpacked and (len(given) < least or (len(given) > most and not many)):
        return check.error(node, f"'{name}' takes {_count(least, most, many)}, found {len(given)}: {helper.text}")
    for k, (a, t, _) in enumerate(given):
        p = parameters[min(k, most - 1)]
        if not accepts(p.type, t, bound) or p.type.kind == "dtype":
            check.require(a, t, p.type, f"{name}, '{p.name}': ")
    f_result = substitute(helper.result, bound)
    if name == "to" and f_result.numeric and f_result.kind != "any":
        return ELEM
    kinds = {x.kind for _, t, _ in given for x in (t, *t.items)}
    if name in ("least", "greatest", "clamped", "ceildiv", "prod") and kinds <= {"int", "list", "bool"}:
        return INT
    if name == "zip":
        return list_of(Type("tuple", tuple(item_of(t) or ANY for _, t, _ in given)))
    if name == "enumerate":
        return list_of(Type("tuple", (Type("int"), (item_of(given[0][1]) or ANY) if given else ANY)))
    return f_result


def _print_helper(check: ExpressionChecker, node: ast.Call, helper: Helper) -> None:
    f, name = check.function, helper.name
    if helper.origin == "builder":
        check.resolved[node] = As(f"{f.local('b')}.{name}")
    elif helper.origin == "names":
        check.resolved[node] = As(f.imported(name))
    else:
        if name in f.bound:
            check.error(node.func, f"'{name}' is hidden by the argument or let of that name")
        if name in LAZY:
            check.resolved[node] = As(name, wrap="" if node in check.iterated else "list")


def _scalar(check: ExpressionChecker, node: ast.Call, scope: Mapping[str, Type], sig: ScalarSig) -> Type:
    given = arguments(check, node, scope)
    for keyword in node.keywords:
        check.error(keyword.value, f"the scalar '{sig.name}' takes no keyword arguments")
    check.resolved[node] = As(check.function.scalar(sig.name))
    count = sig.operands + sig.takes_dtype
    if not any(star for _, _, star in given) and len(given) != count:
        return check.error(node, f"the scalar '{sig.name}' takes {_count(count, count, False)}, found {len(given)}")
    for k, (a, t, _) in enumerate(given):
        # An optional operand of a pointwise entry: eager raises where all that it is for are None.
        t = t.item if t.kind == "optional" and t.item == ELEM else t
        check.require(a, t, DTYPE if k >= sig.operands else ELEM, f"{sig.name}: ")
    return ELEM


def _count(least: int, most: int, many: bool) -> str:
    if many:
        return f"at least {least} argument{'s' if least != 1 else ''}"
    return f"{least} to {most} arguments" if least != most else f"{most} argument{'s' if most != 1 else ''}"


# -- operators ---------------------------------------------------------------------------------------------------------
def _op(
    check: ExpressionChecker, node: ast.Call, scope: Mapping[str, Type], name: str, candidates: list[TorchSchema]
) -> Type:
    names = check.function.names
    given = arguments(check, node, scope)
    keywords = [(k.arg or "", k.value, check.infer(k.value, scope)) for k in node.keywords]
    native = [s for s in candidates if s.id in names.native]
    if not native and names.incomplete:
        return ANY
    if not native:
        return check.error(
            node.func, f"'{name}' has no native lowering in the specs{did_you_mean(name, names.packets())}"
        )
    faults = {s.id: _misfit(check, s, given, keywords) for s in native}
    fitting = [s for s in native if not faults[s.id]]
    if not fitting:
        if len(native) == 1:
            where, message = faults[native[0].id][0]
            return check.error(where if where is not None else node, f"'{native[0].id}': {message}")
        texts = "; ".join(f"{s.overload}: {faults[s.id][0][1]}" for s in native)
        return check.error(node, f"no overload of '{name}' fits: {texts}")
    exact = [s for s in fitting if _exact(s, given)] or fitting
    chosen = exact[0] if len(exact) == 1 else next((s for s in exact if s.overload == "default"), None)
    if chosen is None:
        one = f"{name}.{exact[0].overload}"
        return check.error(
            node.func, f"'{name}' is ambiguous between {', '.join(s.overload for s in exact)}: name one, as in '{one}'"
        )
    check.function.calls.add(chosen.id)
    check.resolved[node] = As(f"{check.function.local('b')}.call", overload=chosen.id)
    return result_type(chosen)


Fault = tuple[ast.expr | None, str]


def _misfit(
    check: ExpressionChecker,
    schema: TorchSchema,
    given: list[tuple[ast.expr, Type, bool]],
    keywords: list[tuple[str, ast.expr, Type]],
) -> list[Fault]:
    """Why the arguments do not fit an overload; empty when they do."""
    types = argument_types(schema)
    positional = [a for a in schema.args if not a.kwarg_only]
    unpacked = any(star for _, _, star in given)
    if len(given) > len(positional):
        return [
            (
                given[len(positional)][0],
                f"takes {_count(0, len(positional), False)[5:]} by position, found {len(given)}",
            )
        ]
    taken: set[str] = set()
    for (node, t, star), a in zip(given, positional, strict=False):
        if star:
            continue
        taken.add(a.name)
        if fault := _unfit(check, node, t, types[a.name], a.name, schema):
            return [fault]
    for name, node, t in keywords:
        if name not in types:
            return [(node, f"no argument '{name}'{did_you_mean(name, types)}")]
        if name in taken:
            return [(node, f"argument '{name}' is given twice")]
        taken.add(name)
        if fault := _unfit(check, node, t, types[name], name, schema):
            return [fault]
    missing = [a.name for a in schema.args if a.default is None and a.name not in taken]
    return [(None, f"argument '{missing[0]}' is missing")] if missing and not unpacked else []


def _unfit(
    check: ExpressionChecker, node: ast.expr, have: Type, want: Type, name: str, schema: TorchSchema
) -> Fault | None:
    if accepts(want, have):
        return None
    if have == STR and isinstance(node, ast.Constant) and node.value in DTYPE_NAMES and accepts(want, DTYPE):
        return None
    if want.kind == "list" and want.item.kind in ("int", "index") and accepts(want.item, have):
        return (node, f"'{name}' needs a list, write [{check.source.of(node)}]")
    # Elementwise operators take a number for a tensor, as torch's do.
    if want == TENSOR and have.numeric and check.function.names.native[schema.id] == "pointwise":
        return None
    return (node, f"'{name}' expected {describe(want)}, found {describe(have)} '{check.source.of(node)}'")


def _exact(schema: TorchSchema, given: list[tuple[ast.expr, Type, bool]]) -> bool:
    types = argument_types(schema)
    positional = [a for a in schema.args if not a.kwarg_only]
    return all(accepts(types[a.name], t) for (_, t, star), a in zip(given, positional, strict=False) if not star)
