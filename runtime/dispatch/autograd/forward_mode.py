"""Forward-mode differentiation of a recorded program: some of its inputs come with tangents (`torch.autograd.forward_ad`), and so do its results.

Such a program is traced as a function of its inputs and their tangents, which makes the pairs itself. Autograd's forward formulas run above
the recorder, as they do in eager, and what they call is recorded like any other operator; so the graph computes values and tangents, in-place
operators write both, and whatever reads the graph below need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd.forward_ad import make_dual, unpack_dual

from ....errors import UnsupportedError
from ....generated.schemas import MutationType, OutputType, ViewAndMutationMeta
from ...torch_compat import TracingContext, pytree, tangents_followed
from ..operators.effects import must_run
from ..operators.exact_zeros import register
from .again import Again

register()

_BY_WAY_OF_OTHERS = (
    OutputType.IS_INPUT,
    OutputType.ALIAS_OF_INPUT,
    OutputType.SAME_AS_OUTPUT,
    OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT,
)
"""Results whose gradients arrive by way of an input or of another result."""

_KEPT = (MutationType.NOT_MUTATED, MutationType.DATA, MutationType.VERSION)
"""What a program may do to an input with a tangent: the wrapper does it to a view of that input, whose layout is its own."""


@dataclass(frozen=True)
class Result:
    """One flat result of the program: its position among the traced results and that of its tangent there.

    value    None where it is the input `source`.
    tangent  None where it has none.
    """

    value: int | None
    tangent: int | None = None
    source: int | None = None


@dataclass(frozen=True)
class Plan:
    """What the program returned.

    results  its flat results.
    given    inputs that it gave a tangent, with the position of that among the traced results.
    spec     how its result is made of the flat ones.
    """

    results: tuple[Result, ...]
    given: tuple[tuple[int, int], ...]
    spec: Any


class TakenApart(tuple[Any, ...]):
    """What an eager run of a `DualProgram` returns, with a plan of its own."""

    plan: Plan


class DualProgram:
    """`program` as a function of a flat list of its inputs and their tangents, `(*inputs, *tangents)`, which returns a flat list too.

    inputs   how many inputs the program has.
    moved    positions of inputs with a tangent → position of that among the tangents.
    plan     after it was traced: what it returns.
    """

    def __init__(self, program: Any, inputs: int, moved: dict[int, int]) -> None:
        self.program, self.inputs, self.moved = program, inputs, moved
        self.plan = Plan((), (), None)

    def forward(self, *values: Any) -> TakenApart:
        """The program itself, eagerly."""
        values, plan = self._run(values, self.program)
        out = TakenApart(values)
        out.plan = plan
        return out

    __call__ = forward

    def trace(self, values: Sequence[Any], program: Callable[..., Any]) -> tuple[Any, ...]:
        """What is returned for `values` where `program` runs the program. Raises `UnsupportedError`."""
        values, self.plan = self._run(values, program)
        return values

    def _run(self, values: Sequence[Any], program: Callable[..., Any]) -> tuple[tuple[Any, ...], Plan]:
        primals, tangents = list(values[: self.inputs]), values[self.inputs :]
        with tangents_followed(True):
            entered = list(primals)
            for i, k in self.moved.items():
                entered[i] = make_dual(primals[i], tangents[k])
                if unpack_dual(entered[i]).tangent is not tangents[k]:
                    raise UnsupportedError(f"the tangent of input {i} is laid out otherwise than the input")
            result = program(*entered)
            return self._taken_apart(result, entered, tangents)

    def _taken_apart(
        self, result: Any, entered: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[tuple[Any, ...], Plan]:
        flat, spec = pytree.tree_flatten(result)
        returned: list[Any] = []
        beside: list[Any] = []
        results: list[tuple[int | None, int | None, int | None]] = []
        objects = {id(t): i for i, t in reversed(list(enumerate(entered))) if isinstance(t, torch.Tensor)}
        for t in flat:
            if isinstance(t, torch.Tensor) and id(t) in objects:
                results.append((None, None, objects[id(t)]))
                continue
            tangent = tangent_of(t)
            results.append((len(returned), None if tangent is None else len(beside), None))
            returned.append(t)
            beside += [] if tangent is None else [tangent]
        given = self._given(entered, tangents, beside)
        first = len(returned)
        plan = Plan(
            tuple(Result(v, None if t is None else first + t, i) for v, t, i in results),
            tuple((i, first + k) for i, k in given),
            spec,
        )
        return (*returned, *beside), plan

    def _given(self, entered: Sequence[Any], tangents: Sequence[Any], beside: list[Any]) -> list[tuple[int, int]]:
        """Inputs to which the program has given a tangent, by writing to them; their tangents are put into `beside`."""
        given = []
        seen: set[int] = set()
        for i, t in enumerate(entered):
            if not isinstance(t, torch.Tensor) or id(t) in seen:
                continue
            seen.add(id(t))
            now, before = tangent_of(t), self.moved.get(i)
            if before is None and now is not None:
                if t.requires_grad or now.requires_grad:
                    raise UnsupportedError(f"input {i} is given a tangent, and autograd follows it backward too")
                given.append((i, len(beside)))
                beside.append(now)
            elif before is not None and now is not tangents[before]:
                raise UnsupportedError(f"input {i} is given another tangent")
        return given

    def check(self, meta: ViewAndMutationMeta) -> None:
        """Raises `UnsupportedError` where the wrapper would do to an input's primal what the input itself must see."""
        for i in self.moved:
            if meta.input_info[i].mutation_type not in _KEPT:
                raise UnsupportedError(f"input {i}, which has a tangent, is given another layout or storage")

    def again(self, meta: ViewAndMutationMeta, graph: fx.GraphModule) -> Again:
        """How the program is run once more. Raises `UnsupportedError` where that would do something else."""
        if any(must_run(n.target) for n in graph.graph.nodes if n.op == "call_function"):
            raise UnsupportedError(
                "a program with forward-mode tangents and gradients draws random numbers, or has effects"
            )
        if meta.bases:
            raise UnsupportedError("a program with forward-mode tangents and gradients writes inputs that share memory")
        arguments = {i: k for k, i in enumerate(meta.graph_inputs)}
        for i, info in enumerate(meta.input_info):
            if info.mutation_type not in _KEPT:
                raise UnsupportedError("a program with forward-mode tangents and gradients lays an input out anew")
            arguments[i] = arguments[i if info.same_as is None else info.same_as]
        results = []
        for k, r in enumerate(self.plan.results):
            if r.value is None or r.tangent is None:
                continue
            of = meta.output_info[r.value]
            if of.output_type is OutputType.NON_ALIAS and of.value is not None:
                results.append((k, of.value))
            elif of.output_type not in _BY_WAY_OF_OTHERS:
                raise UnsupportedError("a program with forward-mode tangents and gradients returns views of one result")
        tangents = len(self.moved)
        return Again(
            self.program,
            tuple(arguments[i] for i in range(self.inputs)),
            {i: arguments[self.inputs + k] for i, k in self.moved.items()},
            tuple(arguments[i] for i in range(self.inputs + tangents, len(meta.input_info))),
            tuple(results),
            frozenset(arguments[i] for i, info in enumerate(meta.input_info) if info.mutates_data),
        )


def tangent_of(t: Any) -> torch.Tensor | None:
    """The tangent of a value at the level that is on; None where it has none, and for values that cannot have one."""
    if not isinstance(t, torch.Tensor) or not (t.is_floating_point() or t.is_complex()):
        return None
    return unpack_dual(t).tangent


def known_as(t: torch.Tensor, primal: torch.Tensor) -> None:
    """Give a tangent the symbolic sizes that Dynamo chose for its primal."""
    context = TracingContext.try_get()
    if context is not None and (known := context.tensor_to_context.get(primal)) is not None:
        context.tensor_to_context.setdefault(t, known)
