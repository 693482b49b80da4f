"""The host program of a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from ...errors import UnsupportedError
from ...generated.languages import CPP_LANGUAGE, TRITON_LANGUAGE
from ...generated.ops import OPAQUE
from ..ir.index import Expr, Sym, expr, sym
from ..ir.nodes import Buffer, Extern, Output, Ref, Size, contiguous_strides, refs
from ..ir.pairs import outside
from ..ir.quote import comment_text
from ..kernels.plan import CopyStep, ExternStep, Kernel, KernelStep, Plan, Step, ViewOf
from ..kernels.routines import Routine, routine_call
from ..kernels.statements import kernel_checks
from ..kernels.steps import allocation_root, arena_offset, nbytes, step_reads, step_writes
from ..render.cpp_routines import cpp_routine
from .names import source_lines
from .program import (
    Address,
    Allocate,
    AsComplex,
    AsReal,
    Check,
    Conform,
    Copy,
    Detach,
    Formula,
    Free,
    GiveArena,
    HostProgram,
    How,
    Instruction,
    LaidOut,
    LaunchKernel,
    Layout,
    Learn,
    LibraryCall,
    List,
    ReadSize,
    Return,
    Slot,
    TakeArena,
    Tensor,
    TorchConstant,
    Value,
    View,
    When,
)

__all__ = ["host_program"]


def host_program(
    plan: Plan,
    parameters: list[str],
    out_targets: Mapping[str, str],
    *,
    boxed: bool = False,
    programs: Mapping[str, Size] = MappingProxyType({}),
    groups: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    pointer_tables: Collection[str] = (),
) -> HostProgram:
    """The host program of a plan whose placeholders are `parameters` (names of buffers or symbols, in call order); it returns the outputs.

    out_targets  for operators whose results the plan gives memory, the overload that takes it.
    boxed        the call takes one list of its parameters, which it empties, and frees each after its last use.
    programs     numbers of programs of functions that are launched on a GPU, by name.
    groups       kernels that are called as one function, by its name; `pointer_tables`: the functions that get their addresses in a table.

    Raises `UnsupportedError` if an argument cannot be written as source, or a kernel takes too many.
    """
    return _Builder(plan, parameters, out_targets, boxed, programs, groups, pointer_tables).build()


class _Builder:
    def __init__(
        self,
        plan: Plan,
        parameters: list[str],
        out_targets: Mapping[str, str],
        boxed: bool,
        programs: Mapping[str, Size],
        groups: Mapping[str, tuple[str, ...]],
        pointer_tables: Collection[str],
    ):
        self.plan, self.parameters, self.out_targets, self.boxed = plan, parameters, out_targets, boxed
        self.programs, self.pointer_tables = programs, pointer_tables
        self.kernels = {k.name: k for k in plan.kernels()}
        self.groups = {members[0]: (name, members) for name, members in groups.items()}
        self.followers = {name for members in groups.values() for name in members[1:]}
        self.body: list[Instruction] = []
        self.arena: dict[str, Slot] = {}
        self.handled: set[str] = set()  # inputs that are needed as tensors, not only as addresses
        self.allocated: set[str] = set()
        self.read = {n for step in plan.steps for n in step_reads(step)}
        self.read |= {o.buffer for o in plan.outputs if o.buffer is not None}

    def build(self) -> HostProgram:
        plan = self.plan
        used_last = self._arguments_used_last()
        for k, step in enumerate(plan.steps):
            self._step(step)
            self._free((*plan.frees.get(k, ()), *used_last.get(k, ())))
        result = Return(tuple(self._result(o) for o in plan.outputs))
        body, self.body = self.body, list(self._sizes())
        self.body += [AsReal(b.name) for b in plan.inputs if b.paired and b.name in self.handled]
        self._free(tuple(used_last.get(-1, ())))
        arena = bool(plan.arena_bytes)
        self.body += [*[TakeArena()][:arena], *body, *[GiveArena()][:arena], result]
        constants = tuple(b.name for b in plan.inputs if b.name not in self.parameters)
        return HostProgram(
            tuple(self.parameters),
            tuple(self.body),
            plan.arena_bytes,
            self.arena,
            self.boxed,
            constants=constants,
        )

    def _free(self, names: tuple[str, ...]) -> None:
        if names:
            self.body.append(Free(names))

    def _arguments_used_last(self) -> dict[int, list[str]]:
        """Of a boxed call, which owns its arguments: for each step the tensors that no later one reads or writes, so that they are freed there;
        under -1 those that none does.
        """
        if not self.boxed:
            return {}
        held = {allocation_root(self.plan, o.buffer) for o in self.plan.outputs if o.buffer is not None}
        last = {b.name: -1 for b in self.plan.inputs if b.name in self.parameters and b.name not in held}
        for k, step in enumerate(self.plan.steps):
            # What is computed for an argument is written straight into its memory, which may be long after the argument was read.
            written = (step.target,) if isinstance(step, CopyStep) else step_writes(step)
            roots = (allocation_root(self.plan, name) for name in (*step_reads(step), *written))
            last.update((name, k) for name in roots if name in last)
        found: dict[int, list[str]] = {}
        for name, k in last.items():
            found.setdefault(k, []).append(name)
        return found

    def _sizes(self) -> Iterator[ReadSize]:
        """Reads the size symbols that no argument is from the arguments that have them as a size or stride. Raises `UnsupportedError`."""
        learned = {s.symbol for step in self.plan.steps if isinstance(step, ExternStep) for s in step.call.learns}
        for symbol in self.plan.symbols:
            if symbol in self.parameters or symbol in learned:
                continue
            found = (place for b in map(outside, self.plan.inputs) for place in _places(b, symbol))
            place = next(found, None)
            if place is None:
                raise UnsupportedError(f"no argument of the graph has the size {symbol}")
            yield place

    def _kind(self, name: str) -> str:
        return self.plan.allocations[name].kind

    def _located(self, name: str) -> str:
        """The name under which the memory of a buffer is known: its own in the arena, else that of its allocation root."""
        of = allocation_root(self.plan, name)
        if self._kind(of) != "arena":
            return of
        if name not in self.arena:
            b = self.plan.layouts[name]
            total = nbytes(b)
            assert total is not None, name
            self.arena[name] = Slot(arena_offset(self.plan, name), total, _layout(b))
        return name

    # -- steps ---------------------------------------------------------------------------------------------------------
    def _step(self, step: Step) -> None:
        if isinstance(step, KernelStep):
            self._kernel(step.kernel)
        elif isinstance(step, ExternStep):
            routine = routine_call(step, self.plan.layouts)
            if routine is None:
                self._extern(step)
            else:
                self._routine(routine)
        else:
            assert isinstance(step, CopyStep)
            self.handled.add(step.target)
            self.body.append(Copy(step.target, self._tensor(step.source), input=True))

    def _kernel(self, kernel: Kernel) -> None:
        """The call of a kernel, or of the function that runs it with others, in the place of the first."""
        if kernel.name in self.followers:
            return
        called, members = self.groups.get(kernel.name, (kernel.name, (kernel.name,)))
        pointer_table = called in self.pointer_tables
        arguments: list[Address | Size] = []
        for one in (self.kernels[name] for name in members):
            self._allocate(one.writes)
            arguments += [self._address(n) for n in (*one.reads, *one.writes)]
            arguments += [] if pointer_table else [sym(s) for s in one.symbols]
        grid = self.programs.get(called)
        most = (CPP_LANGUAGE if grid is None else TRITON_LANGUAGE).arguments
        if (count := len(arguments) + (grid is not None)) > most and not pointer_table:
            raise UnsupportedError(f"kernel {called} takes {count} arguments, more than {most}")
        faults = tuple(kernel_checks(kernel)) if grid is None else ()  # a kernel on a GPU ends by an assertion
        about = source_lines(o for n in members for o in self.kernels[n].origins)
        self.body.append(LaunchKernel(called, tuple(arguments), grid, pointer_table, faults, comment_text(about)))

    def _routine(self, routine: Routine) -> None:
        self._allocate(routine.writes)
        addresses = [self._address(n) for n in (*routine.reads, *routine.writes)]
        grid = self.programs.get(routine.name)
        sizes: tuple[Size, ...] = tuple(sym(s) for s in routine.symbols)
        if grid is None:
            sizes = tuple(cpp_routine(routine, self.plan.layouts).sizes)
        about = comment_text(source_lines([routine.origin]))
        self.body.append(LaunchKernel(routine.name, (*addresses, *sizes), grid, about=about))

    def _allocate(self, names: tuple[str, ...]) -> None:
        for name in names:
            # Once: an indexed update writes to what the kernel before has copied.
            if self._kind(name) == "dedicated" and name not in self.allocated:
                self.allocated.add(name)
                self.body.append(Allocate(name, _layout(self.plan.layouts[name])))

    def _extern(self, step: ExternStep) -> None:
        call, about = step.call, comment_text(step.call.origin)
        if call.writes:
            self._writing(step, about)
            return
        if not call.target:
            self._learn(call)
            return
        arguments = tuple(self._argument(a) for a in step.args)
        keywords = tuple((k, self._argument(v)) for k, v in step.kwargs)
        if step.out:
            self._allocate(step.out)
            keywords = (*keywords, ("out", self._tensor(step.out[0])))
            self.body.append(LibraryCall(self.out_targets[call.target], "overload", arguments, keywords, about=about))
            self._learn(call)
            return
        opaque = self._opaque(call)
        how: How = "keeping_workspace" if opaque else "unviewed" if call.whole else "overload"
        how = "function" if call.compiled else how
        results, rest = _results(call)
        single = call.single and len(results) == 1
        self.body.append(LibraryCall(call.target, how, arguments, keywords, results, single, rest, about))
        self._learn(call)
        for b in call.outs:
            self._conform(call, b, opaque)

    def _conform(self, call: Extern, b: Buffer, opaque: Collection[str]) -> None:
        """A result of a call is laid out as traced."""
        if b.name not in self.read:
            return
        if b.stride is None:
            if _keeps_arguments(call):
                self.body.append(Detach(b.name))
            return
        if b.name not in self.plan.layouts:
            return
        # Of several results one may be None where tracing has a tensor.
        when: When = "none" if b.name in opaque else "unfit" if call.single else "none or unfit"
        # Of results whose sizes data makes fake kernels often know no strides; the caller sees eager's.
        exact = bool(call.learns) and any(o.buffer == b.name for o in self.plan.outputs)
        self.body.append(Conform(b.name, _layout(outside(b)), call.target, when, exact))
        if b.paired:
            self.body.append(AsReal(b.name))

    def _opaque(self, call: Extern) -> set[str]:
        """Results that are read and of which tracing does not know the sizes."""
        places = call.places or range(len(call.outs))
        hidden = OPAQUE.get(call.target, ())
        return {b.name for b, k in zip(call.outs, places, strict=True) if k in hidden and b.name in self.read}

    def _writing(self, step: ExternStep, about: str) -> None:
        """A call that writes into its arguments: into memory of their results, with the contents from before where these are elsewhere."""
        call, arguments = step.call, []
        for name, before in zip(step.out, step.args, strict=False):
            self._allocate((name,))
            arguments.append(self._tensor(name))
            if before is not None and allocation_root(self.plan, before.buffer) != allocation_root(self.plan, name):
                self.body.append(Copy(arguments[-1].name, self._argument(before)))
        given = (*arguments, *(self._argument(a) for a in step.args[call.writes :]))
        self.body.append(LibraryCall(call.target, "function", given, about=about))

    def _learn(self, call: Extern) -> None:
        """The sizes that a call brings, and what is demanded of them."""
        for s in call.learns:
            if s.source:
                self.body.append(Learn(s.symbol, Formula(s.source)))
            elif s.buffer:
                self.body.append(ReadSize(s.symbol, self._tensor(s.buffer).name, s.dim))
        self.body += [Check(Formula(source), message) for source, message in call.demands]

    # -- values --------------------------------------------------------------------------------------------------------
    def _address(self, name: str) -> Address:
        return Address(self._located(name))

    def _tensor(self, name: str) -> Tensor:
        located = self._located(name)
        if located not in self.arena:
            self.handled.add(located)
        return Tensor(located)

    def _view(self, v: ViewOf) -> Tensor | View:
        b = self.plan.layouts[v.buffer]
        tensor = self._tensor(v.buffer)
        whole = v.shape == b.shape and v.stride == (b.stride or contiguous_strides(b.shape)) and v.offset == b.offset
        return tensor if whole else View(tensor.name, v.shape, v.stride, v.offset)

    def _argument(self, x: object) -> Value:
        if isinstance(x, ViewOf):
            return self._outside(x)
        if isinstance(x, Ref):
            return AsComplex(self._tensor(x.buffer), "any") if x.paired else self._tensor(x.buffer)
        if isinstance(x, list):
            return List(tuple(self._argument(y) for y in x))
        if isinstance(x, tuple):
            return tuple(self._argument(y) for y in x)  # type: ignore[return-value]
        if x is None or isinstance(x, (Expr, bool, int, float, complex, str)):
            return x
        # torch's own constants: dtypes, layouts, memory formats print as their names.
        text = str(x)
        if text.startswith("torch."):
            return TorchConstant(text.removeprefix("torch."))
        if type(x).__name__ != "device":
            raise UnsupportedError(f"a {type(x).__name__} is an argument of an operator")
        return TorchConstant(f"device:{text}")

    def _outside(self, v: ViewOf) -> Value:
        """A tensor as eager kernels know it. Memory of the graph's own begins where parts may lie beside each other."""
        view = self._view(v)
        of = view if v.laid is None else LaidOut(view, self.plan.layouts[v.buffer].dtype, v.laid)
        if not v.paired:
            return of
        beside = v.laid is None and self._kind(allocation_root(self.plan, v.buffer)) == "dedicated" and _is_beside(v)
        return AsComplex(of, "view" if beside else "any")

    def _result(self, o: Output | ViewOf) -> Value:
        if isinstance(o, ViewOf):
            return AsComplex(self._view(o), "result") if o.paired else self._view(o)
        return o.value


def _layout(b: Buffer) -> Layout:
    return Layout(b.dtype, b.shape, b.stride or ())


def _places(b: Buffer, symbol: str) -> Iterator[ReadSize]:
    """Where an input has a symbol as a size or a stride."""
    yield from (ReadSize(symbol, b.name, d) for d, n in enumerate(b.shape) if _is_symbol(n, symbol))
    yield from (ReadSize(symbol, b.name, d, stride=True) for d, n in enumerate(b.stride or ()) if _is_symbol(n, symbol))


def _is_beside(v: ViewOf) -> bool:
    """Whether each two elements along the last dimension of a view are seen to be a complex number in memory."""
    even = all(c % 2 == 0 for n in (*v.stride[:-1], v.offset) for _, c in expr(n).terms)
    return even and v.stride[-1] == 1


def _is_symbol(n: Size, symbol: str) -> bool:
    atom = n.atom if isinstance(n, Expr) else None
    return isinstance(atom, Sym) and atom.name == symbol


def _keeps_arguments(call: Extern) -> bool:
    """Whether a result without strides (sparse) is made of tensors that have them."""
    return any(r.stride is not None for r in refs((call.args, tuple(v for _, v in call.kwargs))))


def _results(call: Extern) -> tuple[tuple[str, ...], bool]:
    """Names of what a kernel returns, "_" for what is no tensor, and whether there may be more."""
    names = [b.name for b in call.outs] or [s.symbol for s in call.learns if not s.source]
    if not names or call.single or not call.places:
        return tuple(names), False
    found = iter(names)
    return tuple(next(found) if k in call.places else "_" for k in range(call.places[-1] + 1)), True
