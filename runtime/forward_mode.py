"""Calls of a compiled graph while a level of `torch.autograd.forward_ad` is on: a variant for each set of inputs that come with tangents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.forward_ad import make_dual, unpack_dual

from ..errors import UnsupportedError
from .dispatch.autograd.forward_mode import DualProgram, Result, TakenApart, known_as, tangent_of
from .dispatch.autograd.needs_grad import wants_grad
from .dispatch.subclasses.wrappers import is_wrapper
from .dispatch.symbols.numbers import changing_numbers
from .torch_compat import is_zerotensor, no_modes, pytree, tangents_may_be

Compiled = Callable[..., Any]
VARIANTS = 32  # the most that one graph may have: further sets of tangents run eagerly


class UnderLevel:
    """A graph compiled for calls while a level is on. Dynamo guards on the level, and not on who has a tangent.

    compiled  compiles a `DualProgram` for flat arguments, for training or not. Raises what `compile_fx` takes for a reason to run eagerly.
    or_eager  what the first of two functions makes, or the second where it cannot be made, counted and said.
    eager     the graph by eager kernels.
    """

    def __init__(
        self,
        gm: Any,
        example_inputs: Sequence[Any],
        compiled: Callable[[DualProgram, Sequence[Any], bool], Compiled],
        or_eager: Callable[[Callable[[], Compiled], Callable[[], Compiled]], Compiled],
        eager: Callable[[], Compiled],
    ) -> None:
        self._gm, self._compiled, self._or_eager, self._eager = gm, compiled, or_eager, eager
        self._lock = threading.Lock()
        self._numbers = bool(changing_numbers(gm))
        tangents = _tangents(example_inputs)
        self._first_key: Any = None
        try:
            self._first = self._variant(example_inputs, tangents)
            self._first_key = _key(example_inputs, tangents)
        except UnsupportedError:
            # Some of torch's forward formulas ask what number a size is: then there is a variant for each set of sizes.
            if not _has_symbols(gm):
                raise
        self._others: dict[Any, Compiled] = {}

    def __call__(self, *args: Any) -> Any:
        """The graph's result."""
        tangents: list[torch.Tensor | None] = _tangents(args) if tangents_may_be() else [None] * len(args)
        key = _key(args, tangents)
        if key == self._first_key:
            return self._first(args, tangents)
        # Dynamo's guards are about what the first variant was made for; another is for these very sizes.
        key = (key, tuple(_described(a) for a in args))
        call = self._others.get(key)
        if call is None:
            with self._lock, no_modes():
                call = self._others[key] = self._or_eager(lambda: self._later(args, tangents), self._by_eager_kernels)
        return call(args, tangents)

    def _later(self, args: Sequence[Any], tangents: list[torch.Tensor | None]) -> Compiled:
        if len(self._others) >= VARIANTS:
            raise UnsupportedError(f"a graph is called with more than {VARIANTS} sets of sizes and tangents")
        if self._numbers:
            raise UnsupportedError("a graph with a number that changes is called with another set of tangents")
        return self._variant(args, tangents)

    def _by_eager_kernels(self) -> Compiled:
        run = self._eager()
        return lambda args, tangents: run(*args)

    def _variant(self, args: Sequence[Any], tangents: list[torch.Tensor | None]) -> Compiled:
        """A function of the graph's arguments and their tangents (None for those that have none)."""
        _check(args, tangents)
        given = [(i, t) for i, t in enumerate(tangents) if t is not None]
        for i, t in given:
            known_as(t, args[i])
        program = DualProgram(self._gm, len(args), {i: k for k, (i, _) in enumerate(given)})
        inputs = [*args, *(t for _, t in given)]
        run = self._compiled(program, inputs, wants_grad(self._gm, inputs))
        return _call(program, run)


def _has_symbols(gm: Any) -> bool:
    values = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    sizes = [n for v in values for n in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    return any(isinstance(n, torch.SymInt) for n in sizes)


def _call(program: DualProgram, run: Compiled) -> Compiled:
    moved, traced = program.moved, program.plan

    def call(args: Sequence[Any], tangents: list[torch.Tensor | None]) -> Any:
        values = list(args)
        for i in moved:
            values[i] = unpack_dual(args[i]).primal
        out = run(*values, *(tangents[i] for i in moved))
        plan = out.plan if type(out) is TakenApart else traced
        for i, k in plan.given:
            args[i].copy_(make_dual(args[i].detach(), out[k]))
        made: dict[int, Any] = {}
        return pytree.tree_unflatten([_result(r, args, out, made) for r in plan.results], plan.spec)

    return call


def _result(r: Result, args: Sequence[Any], out: Sequence[Any], made: dict[int, Any]) -> Any:
    """One result of the program; `made` has those that are made of a value already, by its id."""
    if r.value is None:
        return args[r.source]  # type: ignore[index]
    value = out[r.value]
    if r.tangent is None or tangent_of(value) is not None:
        return value  # a view of an input that was given a tangent has the view of that
    if id(value) not in made:
        made[id(value)] = make_dual(value, out[r.tangent])
    return made[id(value)]


def _tangents(args: Sequence[Any]) -> list[torch.Tensor | None]:
    return [None if is_wrapper(t) else tangent_of(t) for t in args]


def _check(args: Sequence[Any], tangents: Sequence[torch.Tensor | None]) -> None:
    """Raises `UnsupportedError` for what is not taken apart."""
    if any(is_wrapper(t) for t in pytree.tree_leaves(list(args))):
        raise UnsupportedError("forward-mode automatic differentiation is on, and an input is a tensor subclass")
    nested = [a for a in args if not isinstance(a, torch.Tensor)]
    if any(tangent_of(t) is not None for t in pytree.tree_leaves(nested)):
        raise UnsupportedError("a tensor in a container has a tangent of forward-mode automatic differentiation")
    for i, (a, t) in enumerate(zip(args, tangents, strict=True)):
        if t is None:
            continue
        if is_zerotensor(t):
            raise UnsupportedError(f"the tangent of input {i} is zeros without memory")
        if t.layout is not torch.strided or t.device != a.device or t.stride() != a.stride():
            raise UnsupportedError(f"the tangent of input {i} is laid out otherwise than the input")


def _key(args: Sequence[Any], tangents: Sequence[torch.Tensor | None]) -> Any:
    """Which of the arguments have tangents, and of what kind; which tangents are one object, or an argument."""
    if not any(t is not None for t in tangents):
        return ()
    first: dict[int, int] = {}
    for k, t in enumerate([*args, *tangents]):
        first.setdefault(id(t), k)
    return tuple(
        (
            i,
            t.dtype,
            t.requires_grad,
            is_zerotensor(t),
            t.stride() == args[i].stride(),
            t.layout,
            t.device,
            first[id(t)],
        )
        for i, t in enumerate(tangents)
        if t is not None
    )


def _described(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return a.shape, a.stride() if a.layout is torch.strided else a.layout, a.dtype, a.device, a.requires_grad
    return type(a), a
