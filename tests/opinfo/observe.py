"""One call of a case as its caller sees it: results, arguments afterwards, aliasing, gradients, exceptions."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.fuzz.observe import Sight, default_dtype, gradients, look, strides, version_of

from .database import Call

Around = Callable[[], Any]


def fresh(leaves: Sequence[Any]) -> list[Any]:
    """Copies with the same strides, offsets, and memory shared between them; the same object stays the same; other values as they are."""
    storages: dict[int, Any] = {}
    known: dict[int, torch.Tensor] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        if t.layout != torch.strided or t.device.type == "meta":
            return t.detach().clone()
        if t.is_conj():
            return copy(t.conj()).conj()
        if t.is_neg():
            return torch._neg_view(copy(torch._neg_view(t)))
        storage = t.untyped_storage()
        mine = storages.setdefault(storage._cdata, storage.clone())
        return torch.empty(0, dtype=t.dtype, device=t.device).set_(mine, t.storage_offset(), t.shape, t.stride())

    with torch.no_grad():
        for t in leaves:
            if isinstance(t, torch.Tensor) and id(t) not in known:
                known[id(t)] = copy(t.detach()).requires_grad_(t.requires_grad)
    return [known[id(t)] if isinstance(t, torch.Tensor) else t for t in leaves]


def in_wide(leaves: Sequence[Any], dtype: str) -> list[Any]:
    """The leaves with every floating dtype (of tensors, and where a dtype is given) replaced by one, every complex one by its."""
    real = getattr(torch, dtype)

    def wide(d: torch.dtype) -> torch.dtype:
        return real if d.is_floating_point else real.to_complex() if d.is_complex else d

    def cast(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            new = v.detach().to(wide(v.dtype))
            return new.requires_grad_(v.requires_grad)
        return wide(v) if isinstance(v, torch.dtype) else v

    known: dict[int, Any] = {}
    for v in leaves:
        known.setdefault(id(v), cast(v))
    return [known[id(v)] for v in leaves]


def program_of(call: Call) -> tuple[Callable[..., Any], list[int]]:
    """The call as a function of its distinct tensors that returns a tuple of leaves, and where in `leaves` these tensors are first."""
    places: dict[int, int] = {}
    slots: list[int | None] = []
    where: list[int] = []
    for k, v in enumerate(call.leaves):
        if isinstance(v, torch.Tensor):
            if id(v) not in places:
                places[id(v)] = len(where)
                where.append(k)
            slots.append(places[id(v)])
        else:
            slots.append(None)

    def program(*tensors: torch.Tensor) -> tuple[Any, ...]:
        given = [v if s is None else tensors[s] for v, s in zip(call.leaves, slots, strict=True)]
        return tuple(pytree.tree_leaves(call.function(*given)))

    return program, where


def arguments(call: Call, where: Sequence[int]) -> list[torch.Tensor]:
    """Fresh tensors for one run of its program."""
    made = fresh(call.leaves)
    return [made[k] for k in where]


def see(
    call: Call,
    run: Callable[..., Any] | None = None,
    dtype: str = "",
    around: Around = contextlib.nullcontext,
    only_strides: bool = False,
    seed: int = 0,
) -> Sight:
    """Run the program (or `run`, which takes its place) on fresh arguments, and look. `dtype` replaces every floating dtype."""
    sight = Sight()
    if dtype:
        call = Call(call.case, call.number, call.function, in_wide(call.leaves, dtype))
    program, where = program_of(call)
    tensors = arguments(call, where)
    versions = [version_of(t) for t in tensors]
    torch.manual_seed(seed)
    random.seed(seed)
    with warnings.catch_warnings(), default_dtype(dtype), around():
        warnings.simplefilter("ignore")
        try:
            results = list((run or program)(*tensors))
        except Exception as error:  # noqa: BLE001 - which exception it is, is what is compared
            sight.raised["call"] = error
            return sight
        if only_strides:
            sight.facts = {
                f"result {k}: strides": strides(t) for k, t in enumerate(results) if isinstance(t, torch.Tensor)
            }
            return sight
        with torch.no_grad():
            _look(sight, tensors, results, versions)
        if call.case.variant == "backward":
            _gradients(sight, tensors, results)
        if call.case.variant == "twice":
            _gradients_twice(sight, tensors, results)
    # On the processor, for the judge; what a GPU has not told yet of a failure it tells here.
    sight.values = {name: _real(t).cpu() for name, t in sight.values.items()}
    return sight


def _look(sight: Sight, tensors: list[Any], results: list[Any], versions: list[int]) -> None:
    """Sparse tensors have neither strides nor one storage: their layout is a fact, their values are judged."""
    for kind, some in (("argument", tensors), ("result", results)):
        for k, t in enumerate(some):
            if isinstance(t, torch.Tensor):
                sight.facts[f"{kind} {k}: device"] = t.device.type
            if isinstance(t, torch.Tensor) and t.layout != torch.strided:
                sight.facts[f"{kind} {k}: layout"] = (t.layout, tuple(t.shape), t.dtype)
                sight.values[f"{kind} {k}"] = t.detach().to_dense()
    dense = [t if isinstance(t, torch.Tensor) and t.layout == torch.strided else torch.zeros(0) for t in tensors]
    plain = [None if isinstance(t, torch.Tensor) and t.layout != torch.strided else t for t in results]
    known = dict(sight.values)
    look(sight, "", dense, plain, versions)
    sight.values.update(known)


def _gradients(sight: Sight, tensors: list[Any], results: list[Any]) -> None:
    """Of all results that require grad, with fixed random cotangents, for all arguments that do."""
    generator = torch.Generator().manual_seed(1)
    followed = [r for r in results if isinstance(r, torch.Tensor)]
    gradients(sight, followed, [t for t in tensors if t.requires_grad], lambda t: _cotangent(t, generator))


def _gradients_twice(sight: Sight, tensors: list[Any], results: list[Any]) -> None:
    """As `_gradients`, which are differentiated for the arguments and the cotangents."""
    generator = torch.Generator().manual_seed(1)
    leaves = [t for t in tensors if t.requires_grad]
    followed = {id(r): r for r in results if isinstance(r, torch.Tensor) and r.requires_grad}.values()
    if not followed or not leaves:
        return
    cotangents = [_cotangent(r, generator).requires_grad_() for r in followed]
    try:
        first = torch.autograd.grad(list(followed), leaves, cotangents, allow_unused=True, create_graph=True)
        moving = [g for g in first if g is not None and g.requires_grad]
        # A gradient that does not move with anything is differentiated to zeros, or not at all.
        second = torch.autograd.grad(
            moving, [*leaves, *cotangents], [_cotangent(g, generator) for g in moving], materialize_grads=True
        )
    except Exception as error:  # noqa: BLE001
        sight.raised["backward"] = error
        return
    # Where a second gradient is refused, eager says so only when it is computed.
    for k, g in enumerate(first):
        sight.facts[f"gradient {k} is there"] = g is not None
        if g is not None:
            sight.values[f"gradient {k}"] = g.detach()
    for k, g in enumerate(second):
        sight.values[f"gradient of gradients {k}"] = g


def _cotangent(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    def grid() -> torch.Tensor:
        return torch.randint(-16, 17, t.shape, generator=generator).double() / 8

    whole = torch.complex(grid(), grid()) if t.is_complex() else grid()
    return whole.to(t.device, t.dtype)


def _real(t: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs, for a judge that knows real ones."""
    t = t.resolve_conj().resolve_neg()
    return torch.view_as_real(t) if t.is_complex() else t
