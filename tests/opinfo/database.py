"""Torch's own tables of operators and modules as cases: one entry, dtype and variant, with the calls that its samples make."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

DEVICES = ("cpu", "cuda", "interpreter")
"""Where cases run; `interpreter`: the plans and Triton kernels of a GPU, by Triton's interpreter on the processor."""
VARIANTS = ("forward", "backward", "twice", "out", "inplace", "noncontiguous", "errors")
"""`twice`: the gradients, and those of them."""
DTYPES = {
    "fp32": "float32",
    "fp64": "float64",
    "fp16": "float16",
    "bf16": "bfloat16",
    **{name: name for name in ("int8", "int16", "int32", "int64", "uint8", "bool", "complex64", "complex128")},
}
"""Names on the command line, and torch's."""
_DIFFERENTIATED = {
    "backward": tuple(d for d in DTYPES.values() if getattr(torch, d).is_floating_point or "complex" in d),
    "twice": ("float64",),
}
"""The dtypes of variants that look at gradients; a second one is worth little in few digits."""
_ANY = "any"
"""The dtype of cases that choose it themselves (inputs that eager rejects)."""


@dataclass(frozen=True, order=True)
class Case:
    """What comes out one way. `entry` is the full name of a row: `add`, `std.unbiased`, `modules.Linear`."""

    entry: str
    dtype: str
    variant: str
    dynamic: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        rest = f"{' dynamic' if self.dynamic else ''}{'' if self.device == 'cpu' else f' {self.device}'}"
        return f"{self.entry} {self.dtype} {self.variant}{rest}"

    @property
    def memory(self) -> str:
        """The device that its tensors are on."""
        return "cuda" if self.device == "cuda" else "cpu"


@dataclass
class Call:
    """One call of a case. `function` takes `leaves` in order (tensors at the positions that are arguments of the compiled program, all else as
    it is) and returns any tree; tensors of `leaves` are never passed to it, only fresh copies.
    """

    case: Case
    number: int
    function: Callable[..., Any]
    leaves: list[Any]
    label: str = ""
    raises: Any = None
    """Of an input that eager is known to reject: the exception's type, as the table says."""


@dataclass(frozen=True)
class Entry:
    """One row of a table: what it is called, its kind, its dtypes on a processor and on a GPU, and how to make the calls of a (dtype, variant)."""

    name: str
    kind: str
    dtypes: tuple[str, ...]
    dtypes_of_gpu: tuple[str, ...]
    variants: tuple[str, ...]
    calls: Callable[[Case], Iterator[Call]] = field(repr=False)


@cache
def entries() -> dict[str, Entry]:
    """All rows of both tables, by name."""
    operators, modules = _tables()
    return {e.name: e for e in (*map(_of_operator, operators), *map(_of_module, modules))}


def cases(
    names: str = "",
    dtypes: Iterable[str] = (),
    variants: Iterable[str] = (),
    dynamic: bool = False,
    device: str = "cpu",
) -> list[Case]:
    """All cases whose entry's name the regular expression finds, in the order of the tables; no dtypes or variants are all of them."""
    wanted = {DTYPES.get(d, d) for d in dtypes} or set(DTYPES.values())
    chosen = [v for v in VARIANTS if v in set(variants)] or VARIANTS
    if bad := [*(wanted - {*DTYPES.values()}), *({*variants} - {*VARIANTS})]:
        raise ValueError(f"no such dtype or variant: {', '.join(bad)}")
    if device not in DEVICES:
        raise ValueError(f"no such device: {device}")
    found = []
    for entry in entries().values():
        if not re.search(names, entry.name):
            continue
        for variant in chosen:
            if variant not in entry.variants:
                continue
            if variant == "errors":
                found.append(Case(entry.name, _ANY, variant, dynamic, device))
                continue
            found += [
                Case(entry.name, d, variant, dynamic, device)
                for d in (entry.dtypes_of_gpu if device == "cuda" else entry.dtypes)
                if d in wanted and (variant not in _DIFFERENTIATED or d in _DIFFERENTIATED[variant])
            ]
    return found


def calls(case: Case) -> list[Call]:
    """The calls of a case, numbered. Raises what the table's own code raises (a library that is not installed)."""
    made = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for call in entries()[case.entry].calls(case):
            call.number = len(made)
            made.append(call)
    return made


@cache
def _tables() -> tuple[Any, Any]:
    """Torch's tables: of operators, of modules. Its helpers want the base class of a package that nothing here uses: where it is not
    installed, there is a stand-in.
    """
    try:
        import expecttest  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as operators
        from torch.testing._internal.common_modules import module_db
    # Random rows seed the generator inside of the call; here the seed is set before it, so that it can be another one.
    operators.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return operators.op_db, module_db


# -- operators ---------------------------------------------------------------------------------------------------------
def _of_operator(op: Any) -> Entry:
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
    variants = ["forward", "noncontiguous"]
    if op.supports_autograd:
        variants.append("backward")
        if op.supports_gradgrad:
            variants.append("twice")
    if op.supports_out:
        variants.append("out")
    if op.inplace_variant is not None:
        variants.append("inplace")
    if op.error_inputs_func is not None:
        variants.append("errors")
    dtypes, of_gpu = (_names(op.supported_dtypes(device)) for device in ("cpu", "cuda"))
    return Entry(name, type(op).__name__, dtypes, of_gpu, tuple(variants), partial(_operator_calls, op))


def _names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    known = {str(d).removeprefix("torch.") for d in dtypes}
    return tuple(d for d in DTYPES.values() if d in known)


def _operator_calls(op: Any, case: Case) -> Iterator[Call]:
    if case.variant == "errors":
        for error in op.error_inputs(case.memory):
            call = _sample_call(op, case, error.sample_input)
            call.raises = error.error_type
            yield call
        return
    dtype = getattr(torch, case.dtype)
    backward = case.variant in _DIFFERENTIATED
    if backward and dtype not in op.supported_backward_dtypes(case.memory):
        return
    for sample in op.sample_inputs(case.memory, dtype, requires_grad=backward):
        if case.variant == "noncontiguous":
            sample = sample.noncontiguous()
        if case.variant == "out":
            yield from _out_calls(op, case, sample)
        else:
            yield _sample_call(op, case, sample)


def _sample_call(op: Any, case: Case, sample: Any) -> Call:
    function = op.inplace_variant if case.variant == "inplace" else op.op
    leaves, spec = pytree.tree_flatten([sample.input, list(sample.args), dict(sample.kwargs)])
    process = sample.output_process_fn_grad if case.variant in _DIFFERENTIATED else None

    def call(*given: Any) -> Any:
        first, args, kwargs = pytree.tree_unflatten(given, spec)
        out = function(first, *args, **kwargs)
        return out if process is None else process(out)

    return Call(case, 0, call, leaves, _label(sample))


def _out_calls(op: Any, case: Case, sample: Any) -> Iterator[Call]:
    """The result is written into tensors of the right sizes: with the strides that eager gives, and with others."""
    leaves, spec = pytree.tree_flatten([sample.input, list(sample.args), dict(sample.kwargs)])
    from .observe import fresh  # needs nothing of this module

    try:
        first, args, kwargs = pytree.tree_unflatten(fresh(leaves), spec)
        expected = op.op(first, *args, **kwargs)
    except Exception:  # noqa: BLE001 - the forward variant reports it
        return
    results, structure = pytree.tree_flatten(expected)
    if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in results):
        return

    def call(*given: Any) -> Any:
        outs = pytree.tree_unflatten(given[: len(results)], structure)
        first, args, kwargs = pytree.tree_unflatten(given[len(results) :], spec)
        op.op(first, *args, **kwargs, out=outs)
        return outs

    for label, like in (("", _same_strides), (" out with gaps", _with_gaps)):
        outs = [like(t.detach()) for t in results]
        yield Call(case, 0, call, [*outs, *leaves], _label(sample) + label)


def _same_strides(t: torch.Tensor) -> torch.Tensor:
    if _overlaps(t):
        return torch.ones_like(t)
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).fill_(1)


def _with_gaps(t: torch.Tensor) -> torch.Tensor:
    return torch.ones((*t.shape, 2), dtype=t.dtype, device=t.device)[..., 0]


def _overlaps(t: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))


def _label(sample: Any) -> str:
    def show(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            layout = "" if v.layout == torch.strided else f" {v.layout}"
            return _Text(f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}{layout}")
        return v

    parts = [repr(pytree.tree_map(show, v)) for v in (sample.input, *sample.args)]
    parts += [f"{k}={pytree.tree_map(show, v)!r}" for k, v in sample.kwargs.items()]
    return ", ".join(parts)[:300]


class _Text(str):
    def __repr__(self) -> str:
        return str(self)


# -- modules -----------------------------------------------------------------------------------------------------------
def _of_module(info: Any) -> Entry:
    dtypes, of_gpu = (_names(info.supported_dtypes(device)) for device in ("cpu", "cuda"))
    made = partial(_module_calls, info)
    return Entry(f"modules.{info.name}", "Module", dtypes, of_gpu, ("forward", "backward"), made)


def _module_calls(info: Any, case: Case) -> Iterator[Call]:
    dtype = getattr(torch, case.dtype)
    for training in (True, False) if info.train_and_eval_differ else (True,):
        backward = case.variant == "backward"
        made = info.module_inputs_func(info, device=case.memory, dtype=dtype, requires_grad=backward, training=training)
        for given in made:
            if given.forward_input is None:
                continue
            yield _module_call(info, case, given, dtype, training)


def _module_call(info: Any, case: Case, given: Any, dtype: torch.dtype, training: bool) -> Call:
    torch.manual_seed(0)
    built = given.constructor_input
    module = info.module_cls(*built.args, **built.kwargs).to(case.memory, dtype)
    module.train(training)
    if info.is_lazy:
        with torch.no_grad():
            module(*given.forward_input.args, **given.forward_input.kwargs)
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.requires_grad and case.variant == "backward")
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    leaves, spec = pytree.tree_flatten([state, list(given.forward_input.args), dict(given.forward_input.kwargs)])

    def call(*values: Any) -> Any:
        state, args, kwargs = pytree.tree_unflatten(values, spec)
        return torch.func.functional_call(module, state, tuple(args), kwargs)

    label = f"{given.desc or 'default'}{'' if training else ', eval'}"
    return Call(case, 0, call, leaves, label)


def sampled(made: list[Call], limit: int) -> list[Call]:
    """At most `limit` of them (0: all), in order, chosen by the case's name."""
    if not limit or len(made) <= limit:
        return made
    return sorted(random.Random(str(made[0].case)).sample(made, limit), key=lambda call: call.number)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that operators give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
