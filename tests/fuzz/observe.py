"""What a call of a program does, as its caller sees it, and how two such calls differ."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opforge.runtime.torch_compat import FakeTensorMode

from .program import Functions, Program, on


@dataclass
class Sight:
    """Facts that have to be equal, tensors whose values are judged, and the exceptions at each stage. `lows`: of a run that is more exact
    than float64, what its values are short of.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    raised: dict[str, Exception] = field(default_factory=dict)
    lows: dict[str, torch.Tensor] = field(default_factory=dict)


def see(
    program: Program,
    functions: Functions,
    size: tuple[int, int],
    call: Callable[..., Any] | None = None,
    around: Callable[[], Any] = contextlib.nullcontext,
    only_strides: bool = False,
    number: int = 0,
) -> Sight:
    """Call `call` (or the program itself) on fresh inputs, do the steps after it, and take gradients; `around` is entered meanwhile.
    `only_strides` looks at the strides of the results only. `number` is that of the call, by which the program's `state` is set.
    """
    torch.manual_seed(program.seed)
    sight = Sight()
    with on(program.place):
        args, leaves = functions.make(*size)
        functions.before(number)
    modules = [a for a in args if isinstance(a, torch.nn.Module)]
    leaves = [*leaves, *(p for module in modules for p in module.parameters())]
    versions = [version_of(t) for t in args]
    with warnings.catch_warnings(), on(program.place), around():
        warnings.simplefilter("ignore")
        try:
            with getattr(torch, program.mode)():
                results = list((call or functions.program)(*args))
        except Exception as error:  # noqa: BLE001 - which exception it is, is what is compared
            sight.raised["call"] = error
            return sight
        if only_strides:
            for k, t in enumerate(results):
                if isinstance(t, torch.Tensor):
                    sight.facts[f"result {k}: strides"] = strides(t)
            return sight
        with torch.no_grad():
            look(sight, "", args, results, versions)
            _look_at_objects(sight, modules, functions.state)
        distinct = list({id(a): a for a in args}.values())
        for k, step in enumerate(functions.after(*_by_name(program, args), *results)):
            try:
                step()
            except Exception as error:  # noqa: BLE001
                sight.raised[f"step {k} after the call"] = error
                return sight
        if program.after:
            with torch.no_grad():
                look(sight, "afterwards ", args, results, versions)
        tensors = [t for t in (*results, *distinct) if isinstance(t, torch.Tensor)]
        _gradients(sight, program, tensors, leaves)
    return sight


def _by_name(program: Program, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(dict(zip(program.args, args, strict=True)).values())


def look(sight: Sight, when: str, args: Sequence[Any], results: Sequence[Any], versions: Sequence[int]) -> None:
    named = [(f"{when}argument {k}", t) for k, t in enumerate(args)]
    named += [(f"{when}result {k}", t) for k, t in enumerate(results)]
    tensors = [(name, t) for name, t in named if isinstance(t, torch.Tensor)]
    sight.facts[f"{when}plain results"] = [r for r in results if not isinstance(r, torch.Tensor)]
    for name, t in tensors:
        sight.facts[f"{name}: dtype, size"] = (t.dtype, tuple(t.shape), t.device.type)
        sight.facts[f"{name}: strides"] = strides(t)
        sight.facts[f"{name}: requires_grad, is_leaf, has grad_fn"] = (t.requires_grad, *_history(t))
        sight.facts[f"{name}: inference, conj, neg"] = (t.is_inference(), t.is_conj(), t.is_neg())
        sight.values[name] = _value(t)
    sight.facts[f"{when}written arguments"] = [version_of(t) > old for t, old in zip(args, versions, strict=True)]
    same, shared, bases = [], [], []
    for i, (a, t) in enumerate(tensors):
        for b, u in tensors[:i]:
            if t is u:
                same.append((a, b))
            if t.untyped_storage()._cdata == u.untyped_storage()._cdata:
                distance = t.storage_offset() * t.element_size() - u.storage_offset() * u.element_size()
                shared.append((a, b, distance if t.numel() and u.numel() else 0))
            # What a view is a view of matters to autograd alone, and results may stand for hidden bases.
            if "argument" in b and t.requires_grad and t._is_view() and t._base is u:
                bases.append((a, b))
    sight.facts[f"{when}same objects"] = same
    sight.facts[f"{when}shared memory"] = shared
    sight.facts[f"{when}views of each other"] = bases


def _value(t: torch.Tensor) -> torch.Tensor:
    """A copy, where it can be compared with that of a run on another device."""
    return t.detach().clone().cpu()


def _look_at_objects(sight: Sight, modules: Sequence[torch.nn.Module], state: Any) -> None:
    """What a call leaves in the buffers of modules, and in the attributes of the program's `state`."""
    named = [(f"buffer {k}.{name}", b) for k, module in enumerate(modules) for name, b in module.named_buffers()]
    named += [(f"state.{name}", value) for name, value in vars(state).items()] if state is not None else []
    for name, value in named:
        if isinstance(value, torch.Tensor):
            sight.facts[f"{name}: dtype, size"] = (value.dtype, tuple(value.shape))
            sight.values[name] = _value(value)
        elif isinstance(value, (bool, int, float, str)):
            sight.facts[f"{name}: value"] = value


def strides(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1 and t.numel())


def _history(t: torch.Tensor) -> tuple[Any, ...]:
    try:
        return t.is_leaf, t.grad_fn is not None
    except RuntimeError as error:  # a view that autograd has given up
        return (type(error).__name__,)


def version_of(t: Any) -> int:
    return t._version if isinstance(t, torch.Tensor) and not t.is_inference() else 0


def _gradients(sight: Sight, program: Program, tensors: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """Of all that requires grad at once, with fixed random cotangents."""
    generator = torch.Generator().manual_seed(program.seed)
    gradients(sight, tensors, leaves, lambda t: _cotangent(t, generator))


def _cotangent(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return (torch.randint(-16, 17, t.shape, generator=generator, device="cpu") / 8).to(t.device, t.dtype)


def gradients(
    sight: Sight,
    tensors: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    cotangent: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Look at the gradients of all of `tensors` that require grad, at once."""
    wanted = [t for t in {id(t): t for t in tensors}.values() if t.requires_grad]
    if not wanted or not leaves:
        return
    cotangents = [cotangent(t) for t in wanted]
    try:
        found = torch.autograd.grad(wanted, leaves, cotangents, allow_unused=True)
    except Exception as error:  # noqa: BLE001
        sight.raised["backward"] = error
        return
    for k, (g, leaf) in enumerate(zip(found, leaves, strict=True)):
        sight.facts[f"gradient {k} is there"] = g is not None
        if g is not None:
            sight.facts[f"gradient {k}: dtype, size"] = (g.dtype, tuple(g.shape), leaf.shape == g.shape, g.layout)
            sight.values[f"gradient {k}"] = _value(g.to_dense() if g.layout != torch.strided else g)


def on_fakes(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program on torch's own fake tensors, for what these say of strides: where torch's kernels give others, compiled code has those of
    the fakes.
    """
    fakes = FakeTensorMode()

    def foretold(*args: torch.Tensor) -> Any:
        known = {id(a): fakes.from_tensor(a) for a in args}
        with fakes:
            return program(*(known[id(a)] for a in args))

    return foretold


def is_foretold(name: str, ours: Sight, told: Sight) -> bool:
    """Whether the strides called `name`, of a result, are those that the fakes have."""
    first = name.replace("afterwards ", "")
    return first.startswith("result") and first in told.facts and told.facts[first] == ours.facts.get(name)


@contextlib.contextmanager
def default_dtype(dtype: str) -> Iterator[None]:
    """`dtype` is what new tensors have; "" changes nothing."""
    old = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype) if dtype else old)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


class Direct(torch.nn.Module):
    """A function as the module that `compile_fx` takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)
