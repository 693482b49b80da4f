"""Calls that eager refuses, from the operator specs: clauses of `require` with calls that break them, and positions out of range."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from opforge.errors import UnsupportedError
from opforge.generated.decompositions import FUNCTIONS
from opforge.generated.ops import LOWERINGS
from opforge.runtime.ir.guards import checks
from opforge.runtime.ir.nodes import Nest
from opforge.runtime.lower.language.builder import Builder
from opforge.runtime.lower.language.tensor import Tensor
from opforge.testing.arguments import value_of
from opforge.testing.op_check import _leaves, _target, exists

ERRORS = {"IndexError": IndexError, "LinAlgError": torch.linalg.LinAlgError, "RuntimeError": RuntimeError}
MISFIT = "Declaration: "
"""Stands in what torch says of arguments that the schema of an overload does not take."""


@dataclass(frozen=True)
class Clause:
    """A clause of `require`: the condition, or what the exception says where it is checked at run time; `bad` are calls that break it."""

    op: str
    overloads: tuple[str, ...]
    text: str
    bad: tuple[str, ...]
    raises: str = ""
    """The type of the exception, of a condition on values; of others eager's kernel decides."""


@dataclass(frozen=True)
class Positions:
    """An entry that takes positions, and calls with tensors of them (`I`, `S`)."""

    op: str
    overloads: tuple[str, ...]
    tests: tuple[str, ...]


@dataclass
class Outcome:
    """What a call raises, and whether it left its arguments as they were."""

    error: Exception | None
    whole: bool

    @property
    def kind(self) -> type[Exception] | None:
        return type(self.error) if self.error is not None else None


Call = tuple[list[Any], dict[str, Any]]


def check_clause(clause: Clause) -> None:
    """Each call that breaks the clause: eager raises, the lowering knows why, and the compiled program raises the same type."""
    overloads = _known(clause.overloads)
    torch.manual_seed(0)
    for text in clause.bad:
        tried = [overload for overload in overloads if _refused(clause, overload, text)]
        assert tried, f"no overload takes ({text})"


def _refused(clause: Clause, overload: str, text: str) -> bool:
    """Whether the overload takes such arguments; if it does, its errors are checked."""
    args, kwargs = call = _made(text)
    where = f"{overload}({text})"
    eager = _outcome(_target(overload), call)
    assert eager.error is not None, f"{where}: eager raises nothing"
    if MISFIT in str(eager.error):
        return False
    if clause.raises:
        assert eager.kind is ERRORS[clause.raises], f"{where}: eager raises {eager.error!r}"
        assert clause.text in _said(overload, args, kwargs), f"{where}: nothing is checked"
        assert not _said(overload, args, kwargs, checked=False), f"{where}: checked in spite of the setting"
    else:
        assert _reason(overload, args, kwargs) == f"eager raises unless {clause.text}", where
    torch._dynamo.reset()
    compiled = torch.compile(_program(overload), backend="opforge", dynamic=False)
    error = _compare(where, overload, _alone(compiled), call, eager)
    assert not clause.raises or clause.text in str(error), f"{where}: {error}"
    return True


def check_positions(positions: Positions) -> None:
    """Every tensor of positions with one out of range, at either end: the compiled program raises what eager raises, if it does. Where eager
    takes every position (it skips them, or reads what is there) the compiled program must have refused one. All calls of an overload are one graph.
    """
    raised = refused = 0
    for overload in _known(positions.overloads):
        torch.manual_seed(0)
        lines = [text for text in positions.tests if _outcome(_target(overload), _made(text)).error is None]
        valid = [_made(text) for text in lines]
        torch._dynamo.reset()
        compiled = torch.compile(_program(overload), backend="opforge", dynamic=False)
        for k, text in enumerate(lines):

            def ours(*args: Any, k: int = k, f: Callable[..., Any] = compiled, **kwargs: Any) -> Any:
                return f([*valid[:k], (list(args), kwargs), *valid[k + 1 :]])  # noqa: B023

            for label, call in _out_of_range(text):
                eager = _outcome(_target(overload), call)
                if eager.error is None:
                    refused += _outcome(ours, call).error is not None
                else:
                    raised += 1
                    _compare(f"{overload}({label})", overload, ours, call, eager)
    assert raised or refused, f"{positions.op}: no position out of range is refused"


def _compare(where: str, overload: str, compiled: Callable[..., Any], call: Call, eager: Outcome) -> Exception:
    """What the compiled program raises, which must be of eager's type."""
    ours = _outcome(compiled, call)
    assert ours.error is not None, f"{where}: eager's {eager.kind} is lost"
    if ours.kind is not eager.kind:
        # Where tracing itself raises no backend has been asked.
        torch._dynamo.reset()
        other = _outcome(_alone(torch.compile(_program(overload), backend="eager")), call)
        assert ours.kind is other.kind, f"{where}: {ours.error!r}, eager {eager.error!r}"
    assert ours.whole, f"{where}: an argument is written"
    return ours.error


# -- calls -------------------------------------------------------------------------------------------------------------
def _known(overloads: tuple[str, ...]) -> list[str]:
    found = [overload for overload in overloads if exists(overload)]
    if not found:  # the specs follow the newest supported torch
        pytest.skip(f"torch {torch.__version__} has no {', '.join(overloads)}")
    return found


def _parsed(text: str) -> ast.Call:
    tree = ast.parse(f"f({text}\n)", mode="eval").body
    assert isinstance(tree, ast.Call)
    return tree


def _made(text: str | ast.Call) -> Call:
    tree = _parsed(text) if isinstance(text, str) else text
    args = [value_of(a, torch.float32) for a in tree.args]
    return args, {str(k.arg): value_of(k.value, torch.float32) for k in tree.keywords}


def _program(overload: str) -> Callable[..., Any]:
    """A program of several calls of the overload."""
    # Torch takes an operator apart that is called by its own name, where the function of programs is replaced in graphs.
    target = next((f for f, made in FUNCTIONS.items() if made.__name__ == overload.split(".")[1]), _target(overload))

    def program(calls: list[Call]) -> list[Any]:
        return [target(*args, **kwargs) for args, kwargs in calls]

    return program


def _alone(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program of one call."""
    return lambda *args, **kwargs: program([(list(args), kwargs)])


def _outcome(f: Callable[..., Any], call: Call) -> Outcome:
    leaves = [v for v in _leaves([*call[0], *call[1].values()]) if isinstance(v, torch.Tensor)]
    before = [t.clone() for t in leaves]
    error = None
    try:
        f(*call[0], **call[1])
    except Exception as found:  # noqa: BLE001  # its type is what is tested
        error = found
    return Outcome(error, all(map(_same, leaves, before)))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a, b) if not a.is_floating_point() else ((a == b) | (a.isnan() & b.isnan())).all())


def _out_of_range(text: str) -> Iterator[tuple[str, Call]]:
    """The calls with one position of one tensor out of range: the first beyond either end, and the last counted from the end."""
    for k in range(sum(isinstance(n, ast.Call) and _is_positions(n) for n in ast.walk(_parsed(text)))):
        for end in ("n", "-n - 1", "-1"):
            change = _Change(k, end)
            torch.manual_seed(0)
            call = _made(change.visit(_parsed(text)))
            if change.made is not None and change.made.numel():
                yield f"{text}; {end} in the tensor of positions {k}", call


def _is_positions(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in ("I", "S")


class _Change(ast.NodeTransformer):
    """Puts the tensor itself in the place of what makes the tensor of positions `k`, its last element out of the range of `n`."""

    def __init__(self, k: int, end: str) -> None:
        self.left, self.end, self.made = k, end, None

    made: torch.Tensor | None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not _is_positions(node):
            return self.generic_visit(node)
        self.left -= 1
        if self.left != -1:
            return node
        self.made = value_of(node, torch.float32)
        n = int(ast.literal_eval(node.args[0]))
        self.made.view(-1)[-1:] = {"n": n, "-n - 1": -n - 1, "-1": -1}[self.end]
        return ast.copy_location(ast.Constant(self.made), node)


# -- lowerings ---------------------------------------------------------------------------------------------------------
def _lowered(overload: str, args: list[Any], kwargs: dict[str, Any], checked: bool = True) -> Builder:
    """The builder after the overload's lowering; raises what that raises."""
    b = Builder(checks=checked, products=10**9)
    b.begin("call", overload)

    def argument(v: Any) -> Any:
        if isinstance(v, list):
            return [argument(x) for x in v]
        if isinstance(v, torch.dtype):
            return str(v).removeprefix("torch.")
        if not isinstance(v, torch.Tensor):
            return v
        return Tensor(b.fresh("given"), tuple(v.shape), str(v.dtype).removeprefix("torch."), b)

    LOWERINGS[overload](b, *map(argument, args), **{k: argument(v) for k, v in kwargs.items()})
    return b


def _reason(overload: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    """Why the eager kernel runs."""
    try:
        _lowered(overload, args, kwargs)
    except UnsupportedError as error:
        return str(error)
    return "loops are made"


def _said(overload: str, args: list[Any], kwargs: dict[str, Any], checked: bool = True) -> str:
    """What is checked while the program runs, in words."""
    b = _lowered(overload, args, kwargs, checked)
    return "; ".join(says for _, says in checks(item.body for item in b.items if isinstance(item, Nest)))


__all__ = ["Clause", "Positions", "check_clause", "check_positions"]
