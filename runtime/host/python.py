"""A host program as Python: the source of a module with its function, straight-line but for what the program itself decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, assert_never

from ..ir.python_text import number, shape_text
from ..ir.quote import python_string
from .names import Names
from .program import (
    Address,
    Allocate,
    AsComplex,
    Asked,
    AsReal,
    CallGraph,
    Check,
    Clone,
    Condition,
    Conform,
    Copy,
    Detach,
    ForEach,
    Formula,
    Free,
    GiveArena,
    HostProgram,
    If,
    Instruction,
    Item,
    LaidOut,
    LaunchKernel,
    Learn,
    LibraryCall,
    List,
    ReadSize,
    Restride,
    Return,
    Stack,
    TakeArena,
    Tensor,
    TorchConstant,
    Value,
    View,
    While,
)

__all__ = ["function_source", "python_source"]

HEAD = '"""{}. Written by opforge; changes are lost."""'
COMPLEX = {"view": "torch.view_as_complex", "any": "as_complex", "result": "own_complex"}


def python_source(program: HostProgram, support: str = "support") -> str:
    """Source of a module with the program's function, which takes its parameters in order and returns a tuple. `support`: the module of `execute`
    that it imports from.

    Kernels, and functions that come with the program, are put into the module by the loader under their names.
    """
    return _Writer(program).module(support)


def function_source(program: HostProgram) -> str:
    """Source of a module with the program's function alone, which nobody profiles: graphs are put into it by the loader under their names."""
    return _Writer(program).function()


class _Writer:
    def __init__(self, program: HostProgram):
        self.program = program
        self.names = Names()
        self.imports: set[str] = set()
        self.tensors: set[str] = set()  # arena tensors that operators take
        self.pointers: set[str] = set()  # arena tensors that kernels get by address
        # Views of arena tensors, of known sizes: name → the tensor, and the source of shape, strides and offset.
        self.views: dict[str, tuple[str, str]] = {}
        self.passed: dict[str, list[str]] = {}  # arena tensors whose addresses fill a table, by function
        launches = [x for x in program.instructions if isinstance(x, LaunchKernel)]
        passed = Counter(a.of for x in launches for a in x.arguments if isinstance(a, Address))
        self.often = {name for name, count in passed.items() if count > 1}
        self.addresses: dict[str, str] = {}  # of tensors whose address is passed often: local variables
        self.taken = {*program.parameters, *program.constants, *program.arena, *_defined(program.instructions)}

    def module(self, support: str) -> str:
        program = self.program
        body = list(self.block(program.instructions))
        own = {"Workspaces", "empty_strided", "overload", "profiled", "reinterpret"}
        lines = [HEAD.format("Runs one compiled graph"), ""]
        lines += [f"from opforge.runtime.execute.{support} import {n}" for n in sorted(own | self.imports)]
        lines += ["import math"] if any("math." in line for line in body) else []
        lines += ["import torch", ""]
        lines += [f"{name} = {text}" for name, text in self.names.constants.items()]
        lines += ["", ""]
        if program.arena_bytes:
            lines += [*self._space(), "", "", f"workspaces = Workspaces(Space, {program.arena_bytes} + 64)", "", ""]
        given = "arguments" if program.boxed else ", ".join(program.parameters)
        lines += [f"def {program.name}({given}):", f"    if profiled(): return in_ranges({given})"]
        if program.boxed:
            lines += [f"    [{', '.join(program.parameters)}] = arguments", "    arguments.clear()"]
        return "\n".join([*lines, *(f"    {line}" for line in body)]) + "\n"

    def function(self) -> str:
        body = list(self.block(self.program.instructions))
        lines = [HEAD.format("Runs compiled graphs"), ""]
        lines += [f"from opforge.runtime.execute.support import {n}" for n in sorted({"restride", *self.imports})]
        lines += ["import torch", "", "", f"def {self.program.name}({', '.join(self.program.parameters)}):"]
        return "\n".join([*lines, *(f"    {line}" for line in body)]) + "\n"

    def _space(self) -> Iterator[str]:
        """The arena with the views that calls of operators need, made once and used again."""
        arena = self.program.arena
        slots = sorted(self.tensors | {f"{n}_at" for n in (*self.pointers, *self.passed)} | set(self.views))
        yield "class Space:"
        yield '    """The memory of all intermediate values of one run."""'
        yield ""
        yield f"    __slots__ = ({', '.join(repr(s) for s in ['arena', *slots])},)"
        yield ""
        yield "    def __init__(self, arena):"
        yield "        self.arena = arena"
        yield "        base = arena.data_ptr()"
        yield "        skip = -base % 64"
        for name in sorted(self.tensors):
            slot = arena[name]
            strided = f"as_strided({shape_text(slot.layout.shape)}, {shape_text(slot.layout.stride)})"
            yield (
                f"        self.{name} = arena[skip + {slot.offset}:][:{slot.bytes}].view(torch.{slot.layout.dtype}).{strided}"
            )
        for name, (of, text) in self.views.items():
            yield f"        self.{name} = reinterpret(self.{of}, {text})"
        for name in sorted(self.pointers):
            yield f"        self.{name}_at = base + skip + {arena[name].offset}"
        for name, of_all in self.passed.items():
            yield f"        self.{name}_at = [base + skip + n for n in {[arena[n].offset for n in of_all]}]"

    # -- instructions --------------------------------------------------------------------------------------------------
    def block(self, instructions: Iterable[Instruction]) -> Iterator[str]:
        for one in instructions:
            yield from self._lines(one)

    def _lines(self, one: Instruction) -> Iterator[str]:
        match one:
            case ReadSize():
                yield f"{one.symbol} = {self._name(one.of)}.{'stride' if one.stride else 'size'}({one.dim})"
            case Learn():
                yield f"{one.symbol} = {one.formula.source}"
            case Check():
                yield f"if not ({one.condition.source}): {self._call('unmet', self.names.constant('message', python_string(one.message)))}"
            case TakeArena():
                yield "arena, space = workspaces.take()"
            case GiveArena():
                yield "workspaces.give(arena)"
            case Allocate():
                layout = one.layout
                shape, stride = shape_text(layout.shape), shape_text(layout.stride)
                yield f"{one.name} = empty_strided({shape}, {stride}, {self._dtype(layout.dtype)})"
            case Free():
                yield from (f"del {name}" for name in one.names)
            case AsReal():
                yield f"{one.name} = {self._call('as_real', one.name)}"
            case Detach():
                yield f"{one.name} = {one.name}.clone()"
            case Restride():
                yield self._restride(one)
            case Conform():
                yield self._conform(one)
            case Copy():
                yield f"{self._name(one.target)}{'.data' if one.input else ''}.copy_({self._value(one.source)})"
            case LaunchKernel():
                yield self._launch(one)
            case LibraryCall():
                yield self._library_call(one)
            case CallGraph():
                call = f"{one.graph}({', '.join(one.arguments)})"
                yield f"return {call}" if one.results is None else f"{_tuple(one.results)} = {call}"
            case If() | While() | ForEach():
                yield from self._control(one)
            case Return():
                yield f"return {_tuple([self._value(v) for v in one.values])}"
            case _:
                assert_never(one)

    def _control(self, one: If | While | ForEach) -> Iterator[str]:
        match one:
            case If():
                condition = self._condition(one.condition)
                yield f"if not ({condition}):" if one.negated else f"if {condition}:"
                yield from (f"    {line}" for line in self.block(one.then))
                ends = bool(one.then) and _ends(one.then[-1])
                if one.otherwise and not ends:
                    yield "else:"
                yield from (line if ends else f"    {line}" for line in self.block(one.otherwise))
            case While():
                yield f"while {self._condition(one.condition)}:"
                yield from (f"    {line}" for line in self.block(one.body))
            case ForEach():
                yield from (f"{name}_rows = []" for name in one.gathered)
                rows = ", ".join(f"{of}.unbind(0)" for _, of in one.slices)
                yield f"for {_tuple([name for name, _ in one.slices])} in zip({rows}):"
                yield from (f"    {line}" for line in self.block(one.body))
                yield from (f"    {name}_rows.append({name})" for name in one.gathered)

    def _condition(self, condition: Condition) -> str:
        match condition:
            case Formula():
                return condition.source
            case Item():
                return f"{condition.of}.item()"
            case Asked():
                return f"{condition.graph}({', '.join(condition.arguments)})[0].item()"
            case _:
                assert_never(condition)

    def _restride(self, one: Restride) -> str:
        if not one.stride:
            return f"{one.name} = {one.name}.contiguous()"
        return (
            f"if {one.name}.stride() != {one.stride}: {one.name} = {self._call('restride', one.name, str(one.stride))}"
        )

    def _conform(self, one: Conform) -> str:
        name, shape, stride = one.name, shape_text(one.layout.shape), shape_text(one.layout.stride)
        dtype = self._dtype(one.layout.dtype)
        unfit = f"{name}.stride() != {stride} or {name}.shape != {shape} or {name}.dtype is not {dtype}"
        none = f"{name} is None"
        when = {"unfit": unfit, "none": none, "none or unfit": f"{none} or {unfit}"}[one.when]
        exact = ["True"] if one.exact else []
        return f"if {when}: {name} = {self._call('conform', name, dtype, shape, stride, repr(one.operator), *exact)}"

    def _launch(self, one: LaunchKernel) -> str:
        arguments = self._pointer_table(one) if one.pointer_table else [self._passed(a) for a in one.arguments]
        if one.grid is not None:
            arguments.insert(0, number(one.grid))
        call = f"{one.kernel}({', '.join(arguments)})"
        if one.faults:
            told = self._call("out_of_range", "opf_fault", self.names.constant("faults", repr(one.faults)))
            call = f"if opf_fault := {call}: {told}"
        return call + _comment(one.about)

    def _passed(self, a: Any) -> str:
        """An argument of a kernel."""
        if not isinstance(a, Address):
            return number(a)
        name = a.of
        if name in self.program.arena:
            self.pointers.add(name)
            return f"space.{name}_at"
        if name not in self.often:
            return f"{name}.data_ptr()"
        if name in self.addresses:
            return self.addresses[name]
        self.addresses[name] = address = f"{name}_at" if f"{name}_at" not in self.taken else f"{name}_address"
        return f"({address} := {name}.data_ptr())"

    def _pointer_table(self, one: LaunchKernel) -> list[str]:
        """The tensors whose addresses fill a table, the addresses in the arena, and for each argument which one of these all it has."""
        names = [a.of for a in one.arguments if isinstance(a, Address)]
        tensors = list(dict.fromkeys(n for n in names if n not in self.program.arena))
        arena = list(dict.fromkeys(n for n in names if n in self.program.arena))
        place = {n: k for k, n in enumerate([*tensors, *arena])}
        order = tuple(place[n] for n in names)
        if arena:
            self.passed[one.kernel] = arena
        return [
            f"[{', '.join(tensors)}]",
            f"space.{one.kernel}_at" if arena else self.names.constant("nowhere", "[]"),
            self.names.constant("order", repr(order)),
        ]

    def _library_call(self, one: LibraryCall) -> str:
        arguments = [self._value(a) for a in one.arguments] + [f"{k}={self._value(v)}" for k, v in one.keywords]
        target = one.operator
        if one.how != "function":
            target = self.names.constant("op", self._call(one.how, repr(one.operator)))
        left = one.results[0] if one.single else _targets([*one.results, *(["*_"] if one.rest else [])])
        return f"{f'{left} = ' if left else ''}{target}({', '.join(arguments)}){_comment(one.about)}"

    # -- values --------------------------------------------------------------------------------------------------------
    def _name(self, name: str) -> str:
        """A tensor, where it is."""
        if name not in self.program.arena:
            return name
        self.tensors.add(name)
        return f"space.{name}"

    def _value(self, v: Value) -> str:
        match v:
            case Tensor():
                return self._name(v.name)
            case View():
                return self._view(v)
            case LaidOut():
                dtype = self._dtype(v.dtype)
                return self._call("laid_out", self._value(v.of), dtype, shape_text(v.stride))
            case AsComplex():
                text, function = self._value(v.of), COMPLEX[v.how]
                return f"{function}({text})" if "." in function else self._call(function, text)
            case TorchConstant():
                device = v.name.removeprefix("device:")
                return f"torch.{v.name}" if device == v.name else f"torch.device({device!r})"
            case List():
                return f"[{', '.join(self._value(x) for x in v.items)}]"
            case Clone():
                return f"{v.of}.clone()"
            case Stack():
                return f"torch.stack({v.of}_rows)"
            case tuple():
                return _tuple([self._value(x) for x in v])
            case float() if v != v or v in (float("inf"), float("-inf")):
                return f"float({str(v)!r})"
            case complex():
                return f"complex({self._value(v.real)}, {self._value(v.imag)})"
            case None | bool() | int() | float() | str():
                return repr(v)
            case _:
                return number(v)

    def _view(self, v: View) -> str:
        text = f"{shape_text(v.shape)}, {shape_text(v.stride)}, {number(v.offset)}"
        if v.of not in self.program.arena or any(type(n) is not int for n in (*v.shape, *v.stride, v.offset)):
            return f"reinterpret({self._name(v.of)}, {text})"
        # The arena does not move while its workspace lives: a view of known sizes is made once.
        for name, known in self.views.items():
            if known == (v.of, text):
                return f"space.{name}"
        self.tensors.add(v.of)
        name = f"{v.of}_as{len(self.views)}"
        self.views[name] = (v.of, text)
        return f"space.{name}"

    def _dtype(self, dtype: str) -> str:
        return self.names.constant("dtype", f"torch.{dtype}")

    def _call(self, function: str, *arguments: str) -> str:
        """A call of a function of `execute`."""
        self.imports.add(function)
        return f"{function}({', '.join(arguments)})"


def _ends(one: Instruction) -> bool:
    return isinstance(one, Return) or (isinstance(one, CallGraph) and one.results is None)


def _defined(instructions: Iterable[Instruction]) -> Iterator[str]:
    for one in instructions:
        if isinstance(one, Allocate):
            yield one.name
        elif isinstance(one, LibraryCall):
            yield from one.results


def _comment(about: str) -> str:
    return f"  # {about}" if about else ""


def _targets(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _tuple(names: Iterable[str]) -> str:
    return f"({_targets(names)})"
