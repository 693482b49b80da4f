"""What a generated wrapper needs while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...errors import MetadataError
from .. import config
from ..build.scratch import warn_once
from ..ir.routines import OWN_MEMORY
from ..philox import KERNELS
from ..torch_compat import below_autograd, is_wrapper_type, is_zerotensor
from ..torch_compat import empty_strided_cpu as empty_strided
from ..torch_compat import profiler_enabled as profiled
from ..torch_compat import reinterpret_tensor as reinterpret

Place = tuple[torch.device, int]
"""A device, and the stream on it in whose order the memory is used."""
CPU: Place = (torch.device("cpu"), 0)
_ERRORS: dict[str, type[Exception]] = {
    "IndexError": IndexError,
    "LinAlgError": torch.linalg.LinAlgError,
    "RuntimeError": RuntimeError,
}


class Arena:
    """A block of memory for intermediate values. Whoever runs a graph has it for that long, alone."""

    __slots__ = ("__weakref__", "memory", "place")

    def __init__(self, size: int, place: Place) -> None:
        self.place = place
        self.memory = torch.empty(size, dtype=torch.uint8, device=place[0])


class _Pool(threading.local):
    """The arena that waits at each place for a thread's next run of any graph: a forward, its backward and all others take turns with it."""

    def __init__(self) -> None:
        self.arenas: dict[Place, Arena] = {}


_pool = _Pool()


class Workspaces:
    """Hands out the memory for one graph's intermediate values, and takes it back for the thread's next run, of this graph or another.

    One arena waits in each thread (and stream, on a GPU), as large as the largest that was needed there, so that a steady loop allocates
    nothing; a run inside of another one makes its own. `make` cuts an arena of `size` bytes into the graph's buffers, once for each arena.
    """

    __slots__ = ("keep", "make", "size", "spaces")

    def __init__(self, make: Callable[[torch.Tensor], Any], size: int) -> None:
        self.make, self.size = make, size
        # An arena that a larger one has replaced must not be kept alive by the graphs that ran in it.
        self.spaces: WeakKeyDictionary[Arena, Any] = WeakKeyDictionary()
        self.keep = config.current().reuse_workspace

    def place(self) -> Place:
        """Where the graph runs."""
        return CPU

    def take(self) -> tuple[Arena, Any]:
        """An arena, which goes back by `give`, and this graph's buffers in it."""
        place = self.place()
        arena = _pool.arenas.pop(place, None)
        if arena is None or arena.memory.numel() < self.size:
            del arena  # the smaller one is freed before the larger one is made
            with torch.inference_mode(False):  # or no later run outside of inference mode could write to it
                arena = Arena(self.size, place)
        space = self.spaces.get(arena)
        if space is None:
            with torch.inference_mode(False):
                space = self.spaces[arena] = self.make(arena.memory)
        return arena, space

    def give(self, arena: Arena) -> None:
        waiting = _pool.arenas.get(arena.place)
        if self.keep and (waiting is None or waiting.memory.numel() < arena.memory.numel()):
            _pool.arenas[arena.place] = arena


def waiting_arena(place: Place) -> Arena | None:
    """The arena that the next run of a graph at `place` takes: who has recorded its addresses keeps it."""
    return _pool.arenas.get(place)


def swap_arena(place: Place, arena: Arena | None) -> Arena | None:
    """Let this arena wait at `place`, or none, for the next run of a graph. The one that did."""
    waiting = _pool.arenas.pop(place, None)
    if arena is not None:
        _pool.arenas[place] = arena
    return waiting


def overload(name: str) -> Any:
    """The operator overload called `namespace.name.overload`; of a seeded operator the kernel, without the way through the dispatcher. What
    it returns has memory of its own: generated code reads addresses.
    """
    namespace, op, which = name.split(".")
    if namespace == "opforge" and op in KERNELS:
        return KERNELS[op][0]
    found = getattr(getattr(getattr(torch.ops, namespace), op), which)
    if namespace in OWN_MEMORY:
        return found

    def call(*args: Any, **kwargs: Any) -> Any:
        out = found(*args, **kwargs)
        if type(out) is torch.Tensor or out is None:
            return out
        return type(out)(dense(t, name) for t in out) if type(out) in (tuple, list) else dense(out, name)

    return call


def unviewed(name: str) -> Any:
    """As `overload`, of an operator of the user whose results the program writes to. Raises `MetadataError` where one is a view: eager's autograd
    refuses such a write, or what is computed of the result after it.
    """
    found = overload(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        out = found(*args, **kwargs)
        if any(
            isinstance(t, torch.Tensor) and t._is_view() for t in (out if isinstance(out, (tuple, list)) else (out,))
        ):
            raise MetadataError(
                f"{name} returned a view of another tensor, and the program writes to that memory; let it return a copy"
            )
        return out

    return call


def keeping_workspace(name: str) -> Any:
    """As `overload`, in grad mode: only there the kernel returns what its own gradient reads."""
    found = overload(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with below_autograd(), torch.enable_grad():
            return found(*args, **kwargs)

    return call


def dense(t: Any, op: str) -> Any:
    """A result of `op` without a wrapper around it: one that is still under way is waited for. Raises `MetadataError` for other tensor
    subclasses that wrap tensors: they have no memory whose address generated code could read.
    """
    if isinstance(t, (tuple, list)):
        return type(t)(dense(inside, op) for inside in t)
    if not isinstance(t, torch.Tensor) or not is_wrapper_type(type(t)):
        return t
    wait = getattr(t, "trigger_wait", None)
    if wait is None:
        raise MetadataError(
            f"{op} returned a {type(t).__name__}, which wraps other tensors, where tracing has an ordinary tensor; "
            "keep the call out of compiled code (torch.compiler.disable)"
        )
    return dense(wait(), op)


LAZY = "{t}.is_neg() or {t}.is_conj() or is_zerotensor({t})"
"""Whether the elements of a tensor are not what its memory holds: it is lazily negated or conjugated, or zeros without memory. The text is for
generated wrappers, of which each backward asks it: a call takes longer than the answer.
"""
is_lazy: Callable[[torch.Tensor], bool] = eval(f"lambda t: {LAZY.format(t='t')}", {"is_zerotensor": is_zerotensor})


def restride(t: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The same values with the strides that the graph was traced with (an eager kernel may choose others)."""
    out = torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device)
    return out.copy_(t)


def laid_out(t: torch.Tensor, dtype: torch.dtype, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy in a dtype and with these strides. Along a dimension of stride zero all elements are the same: one of them is copied."""
    once = t[tuple(slice(None) if s else slice(1) for s in stride)]
    return torch.empty_strided(once.shape, stride, dtype=dtype, device=t.device).copy_(once).expand(t.shape)


def conform(
    t: torch.Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    op: str,
    exact: bool = False,
) -> torch.Tensor:
    """What the eager kernel of `op` returned, with the strides and the dtype that the graph was traced with. Other strides are the kernel's
    choice; another dtype is a mistake of its fake kernel (`specs/decompositions.yaml` corrects those that are known), told once. Raises
    `MetadataError` for other sizes, for quantized numbers, and for none at all: the code that was made for the traced ones would read other
    memory; where they are to be `exact`, also for other strides and dtypes.
    """
    if t is None or t.shape != shape or t.is_quantized:
        found = "no tensor" if t is None else f"{t.dtype}" if t.is_quantized else f"sizes {list(t.shape)}"
        raise MetadataError(
            f"{op} returned {found} where tracing says {list(shape)}: its fake kernel is wrong{_whose(op)}; "
            "meanwhile keep the call out of compiled code (torch.compiler.disable)"
        )
    if exact and t.numel() and any(n > 1 and a != b for n, a, b in zip(shape, t.stride(), stride, strict=True)):
        raise MetadataError(f"{op} returned strides {list(t.stride())} where tracing says {list(stride)}")
    if exact and t.dtype is not dtype:
        raise MetadataError(f"{op} returned {t.dtype} where tracing says {dtype}")
    if t.dtype is not dtype:
        warn_once(
            "result",
            op,
            f"opforge: {op} returned {t.dtype} where tracing says {dtype}; it is converted{_whose(op)}",
        )
    return laid_out(t, dtype, stride)


def _whose(op: str) -> str:
    """What to do about the fake kernel of an operator."""
    if op.partition(".")[0] in OWN_MEMORY:
        return ", please report it"
    return f", mend the function that is registered for it (torch.library.register_fake) or {op} itself"


def as_real(t: torch.Tensor) -> torch.Tensor:
    """A complex tensor as a real one with a last dimension of real and imaginary part: its own memory, unless it is lazily conjugated."""
    return torch.view_as_real(t if not t.is_conj() else restride(t.resolve_conj(), t.stride()))


def as_complex(t: torch.Tensor) -> torch.Tensor:
    """The complex tensor whose real and imaginary parts are the last dimension: the same memory where they lie beside each other."""
    beside = t.stride(-1) == 1 and t.storage_offset() % 2 == 0 and all(s % 2 == 0 for s in t.stride()[:-1])
    return torch.view_as_complex(t if beside else t.clone(memory_format=torch.contiguous_format))


def own_complex(t: torch.Tensor) -> torch.Tensor:
    """As `as_complex`, but nobody's view: autograd lets no caller write to views that its functions return."""
    c = as_complex(t)
    return torch.empty((0,), dtype=c.dtype, device=c.device).set_(
        c.untyped_storage(), c.storage_offset(), c.shape, c.stride()
    )


def out_of_range(number: int, faults: Sequence[tuple[str, str]]) -> None:
    """Raise what the check `number` (from 1) of a kernel says: an exception type and its message."""
    error, message = faults[number - 1]
    raise _ERRORS[error](message)


def unmet(message: str) -> None:
    """Raise what a condition on sizes from data says that does not hold."""
    raise RuntimeError(message)


__all__ = [
    "Workspaces",
    "as_complex",
    "as_real",
    "conform",
    "empty_strided",
    "keeping_workspace",
    "laid_out",
    "out_of_range",
    "overload",
    "own_complex",
    "profiled",
    "reinterpret",
    "restride",
    "unmet",
    "unviewed",
]
