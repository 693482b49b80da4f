"""Everything that a caller can see of a call: what its tensors hold, how they lie, what autograd knows of them, and what follows.

Two calls are equal when all of it is, bit for bit where it is numbers, with four exceptions, each for a reason:

- A sum of gradients has its terms in another order here than in eager. Where bits differ, both are judged by a third run, in float64.
- A version counter moves or it does not; by how much is the business of how often eager writes, and nothing asks for it.
- A compiled graph is one node of autograd: where eager refuses a part of the backward of all, the whole is refused here.
- After a write to a result that autograd is not told of (`.data`), eager's gradients are wrong, in ways that hang on what it has saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass
class World:
    """What a caller holds when the program begins: its arguments, the leaves behind them, and other tensors that it looks at later."""

    arguments: list[Any]
    leaves: list[torch.Tensor] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    first: list[Any] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        """Arguments, leaves and held tensors."""
        return [*_tensors(self.arguments), *self.leaves, *self.held]

    def begin(self) -> World:
        """Remember the version counters and the values."""
        self.versions = [_version(t) for t in self.tensors()]
        self.first = [_values(t) for t in self.tensors()]
        return self


Make = Callable[[], World]
Program = Callable[..., Any]


@dataclass
class Sight:
    """One call, as seen afterwards; two are equal when every line is."""

    lines: list[tuple[str, Any]] = field(default_factory=list)
    raised: str = ""
    left: list[Any] = field(default_factory=list)
    untouched: bool = True

    def add(self, name: str, value: Any) -> None:
        """Note one fact."""
        self.lines.append((name, value))


def see(program: Program, make: Make, follow: int | None) -> tuple[Sight, int]:
    """Call `program` on fresh arguments, look, then do what a caller may do next: take gradients (`follow` None), or write to result
    number `follow` in place, look again and take gradients. Returns also how many results are tensors.
    """
    torch.default_generator.manual_seed(7)
    world = make().begin()
    sight = Sight()
    try:
        result = program(*world.arguments)
    except Exception as error:  # noqa: BLE001 - which exception it is, is what is compared
        sight.raised = type(error).__name__
        sight.left = [_values(t) for t in world.tensors()]
        sight.untouched = sight.left == world.first
        return sight, 0
    leaves, spec = pytree.tree_flatten(result)
    sight.add("structure", str(spec))
    sight.add("plain results", [v for v in leaves if not isinstance(v, torch.Tensor)])
    results = [v for v in leaves if isinstance(v, torch.Tensor)]
    look(sight, "", world, results)
    if follow is not None:
        with torch.no_grad():
            before = [_version(t) for t in (*world.tensors(), *results)]
        try:
            results[follow].mul_(2)
        except Exception as error:  # noqa: BLE001
            sight.add(f"writing to result {follow}", type(error).__name__)
            return sight, len(results)
        look(sight, f"after writing to result {follow}: ", world, results)
        after = [_version(t) for t in (*world.tensors(), *results)]
        moved = [a != b for a, b in zip(before, after, strict=True)]
        sight.add(f"versions that a write to result {follow} moves", moved)
        near = [t for t in (*world.tensors(), *results) if t is not results[follow] and _shares(t, results[follow])]
        if near and sum(moved) == 1:
            return sight, len(results)  # behind the back of autograd (`.data`), whose gradients may be anything then
    take_gradients(sight, world, results)
    return sight, len(results)


def look(sight: Sight, when: str, world: World, results: Sequence[torch.Tensor]) -> None:
    """Note values, layouts, autograd's view, and the relations between all tensors."""
    known = [(f"input {k}", t) for k, t in enumerate(world.tensors())] + [
        (f"result {k}", t) for k, t in enumerate(results)
    ]
    for name, t in known:
        facts = (t.dtype, tuple(t.shape), t.stride(), t.requires_grad, *_history(t))
        sight.add(f"{when}{name}: dtype, size, stride, requires_grad, is_leaf, has grad_fn", facts)
        sight.add(f"{when}{name}: conj, neg, inference", (t.is_conj(), t.is_neg(), t.is_inference()))
        sight.add(f"{when}{name}: values", _values(t))
    sight.add(f"{when}bytes of the inputs' storages", [t.untyped_storage().nbytes() for t in world.tensors()])
    moved = [new > old for new, old in zip((_version(t) for t in world.tensors()), world.versions, strict=True)]
    sight.add(f"{when}which inputs' versions moved", moved)
    pairs = [(a, b) for i, (_, a) in enumerate(known) for _, b in known[:i]]
    names = [f"{m}, {n}" for i, (m, _) in enumerate(known) for n, _ in known[:i]]
    sight.add(f"{when}same objects", [n for n, (a, b) in zip(names, pairs, strict=True) if a is b])
    near = [(n, _distance(a, b)) for n, (a, b) in zip(names, pairs, strict=True) if _shares(a, b)]
    sight.add(f"{when}shared storages and distances in bytes", near)
    views = [(m, a) for m, a in known if a._is_view()]
    sight.add(f"{when}bases", [(m, n) for m, a in views for n, b in known if a._base is b])
    related = [(m, n) for i, (m, a) in enumerate(views) for n, b in views[:i] if a is not b and a._base is b._base]
    sight.add(f"{when}views of one base", related)


def take_gradients(sight: Sight, world: World, results: Sequence[torch.Tensor]) -> None:
    """Gradients of the leaves: of each tensor that has some alone (None counts as zero), then of all together."""
    targets: list[tuple[str, torch.Tensor]] = []
    for name, t in [
        *((f"input {k}", t) for k, t in enumerate(world.tensors())),
        *((f"result {k}", t) for k, t in enumerate(results)),
    ]:
        if t.requires_grad and not any(t is other for _, other in targets):
            targets.append((name, t))
    leaves = [t for t in world.leaves if t.requires_grad]
    if not leaves or not targets:
        return
    with torch.inference_mode(False), torch.enable_grad():
        losses = []
        for name, t in targets:
            try:
                losses.append(_loss(t))
                found = torch.autograd.grad(losses[-1], leaves, retain_graph=True, allow_unused=True)
            except RuntimeError as error:
                sight.add(f"gradients of {name}", type(error).__name__)
                continue
            sight.add(
                f"gradients of {name}",
                [_values(torch.zeros_like(x) if g is None else g) for g, x in zip(found, leaves, strict=True)],
            )
        try:
            found = torch.autograd.grad(losses, leaves, allow_unused=True)
        except RuntimeError as error:
            sight.add("gradients of all", type(error).__name__)
            return
        sight.add("gradients of all", [None if g is None else _values(g) for g in found])


def differences(expected: Sight, actual: Sight, exact: Callable[[], Sight], *, kernels: bool = False) -> list[str]:
    """What differs, one line each. `exact` runs the program in float64, to judge gradients that differ in bits; values too where other
    `kernels` than eager's computed them.
    """
    if expected.raised or actual.raised:
        if expected.raised == actual.raised:
            changed = actual.left != expected.left and not actual.untouched
            return ["what a refused call leaves in its inputs: neither what eager leaves nor what was there"] * changed
        return [f"raises: {expected.raised or 'nothing'} in eager, {actual.raised or 'nothing'} here"]
    a, b = dict(expected.lines), dict(actual.lines)
    if a.get("gradients of all") == b.get("gradients of all") == "RuntimeError":
        # A compiled graph is one node of autograd: it refuses its backward as a whole, eager a part of it.
        a |= {k: "RuntimeError" for k, v in b.items() if k.startswith("gradients") and v == "RuntimeError"}
    different = [k for k in {**a, **b} if a.get(k) != b.get(k)]
    numbers = [k for k in different if k.startswith("gradients") or (kernels and k.endswith("values"))]
    if numbers:
        c = dict(exact().lines)
        different = [k for k in different if k not in numbers or not _as_good(a.get(k), b.get(k), c.get(k))]
    return [f"{k}: {a.get(k, 'not reached')} in eager, {b.get(k, 'not reached')} here" for k in different]


def _as_good(eager: Any, ours: Any, exact: Any) -> bool:
    """Whether numbers (a list of tensors' values, or one's) are off by at most twice as much as eager's, or one ulp of the largest of
    each tensor.
    """
    if not all(isinstance(g, (list, float)) for g in (eager, ours, exact)):
        return False
    tensors = [
        g if isinstance(g, list) and all(isinstance(v, (list, type(None))) for v in g) else [g]
        for g in (eager, ours, exact)
    ]
    if len({len(g) for g in tensors}) != 1:
        return False
    for e, o, x in zip(*tensors, strict=True):
        if None in (e, o, x):
            if (e, o, x) != (None, None, None):
                return False
            continue
        e, o, x = (torch.tensor(v, dtype=torch.float64) for v in (e, o, x))
        if not e.shape == o.shape == x.shape:
            return False
        floor = x.abs().max() * torch.finfo(torch.float32).eps
        if not bool(((o - x).abs() <= 2 * (e - x).abs() + floor).all()):
            return False
    return True


def _history(t: torch.Tensor) -> tuple[Any, ...]:
    try:
        return t.is_leaf, t.grad_fn is not None
    except RuntimeError as error:  # a view that autograd has given up
        return (type(error).__name__,)


def _loss(t: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, t.numel() + 1, dtype=torch.float64).reshape(t.shape)
    return (t.double() * weights).sum()


def _values(t: torch.Tensor) -> Any:
    with torch.no_grad():
        return (
            t.detach()
            .to(torch.float64, copy=True)
            .nan_to_num(nan=-9.87e307, posinf=math.inf, neginf=-math.inf)
            .tolist()
        )


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor)]


def _version(t: torch.Tensor) -> int:
    try:
        return t._version
    except RuntimeError:  # an inference tensor, or one whose `.data` is one
        return 0


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _distance(a: torch.Tensor, b: torch.Tensor) -> int:
    return a.storage_offset() * a.element_size() - b.storage_offset() * b.element_size()
