"""The Python that runs one planned graph: straight-line source, no loops, no branches that this graph cannot take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

from ...errors import UnsupportedError
from ...generated.ops import OPAQUE
from ..ir.index import Expr, Sym, expr
from ..ir.nodes import Buffer, Extern, Output, Ref, Size, contiguous_strides, refs
from ..ir.pairs import outside
from ..ir.python_text import number, shape_text
from ..ir.quote import comment_text, python_string
from ..kernels.plan import CopyStep, ExternStep, Kernel, KernelStep, Plan, Step, ViewOf
from ..kernels.routines import Routine, routine_call, routines_of
from ..kernels.statements import kernel_checks
from ..kernels.steps import arena_offset, home, nbytes, step_reads
from ..render.cpp_routines import cpp_routine
from .names import Names, source_lines

NO_PROGRAMS: Mapping[str, Size] = MappingProxyType({})
NO_GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType({})
MAX_ARGUMENTS = 1024
"""What ctypes passes on."""


class WrapperWriter:
    """Writes `call(…)` for a plan whose placeholders are `parameters` (buffer or symbol names, in call order)."""

    def __init__(
        self,
        plan: Plan,
        parameters: list[str],
        out_targets: Mapping[str, str],
        *,
        boxed: bool = False,
        support: str = "support",
        programs: Mapping[str, Size] = NO_PROGRAMS,
        groups: Mapping[str, tuple[str, ...]] = NO_GROUPS,
        tables: Collection[str] = (),
    ):
        self.plan, self.parameters, self.out_targets, self.boxed = plan, parameters, out_targets, boxed
        self.support, self.programs, self.tables = support, programs, tables
        self.kernels = {k.name: k for k in plan.kernels()}
        self.groups = {members[0]: (name, members) for name, members in groups.items()}
        self.followers = {name for members in groups.values() for name in members[1:]}
        self.names = Names()
        self.body: list[str] = []
        self.tensors: set[str] = set()  # arena buffers that are needed as tensors
        self.views: dict[
            str, tuple[str, str]
        ] = {}  # strided views of arena buffers: name → (buffer, shape, stride, offset)
        self.handled: set[str] = set()  # inputs that are needed as tensors, not only as addresses
        self.imports: list[str] = []  # what only some wrappers need
        self.pointers: set[str] = set()  # arena buffers passed to kernels as addresses
        self.passed: dict[str, list[str]] = {}  # arena buffers whose addresses are passed together, by the function
        users = [*((k.reads, k.writes) for k in plan.kernels()), *((r.reads, r.writes) for r in routines_of(plan))]
        passed = Counter(home(plan, n) for reads, writes in users for n in (*reads, *writes))
        self.often = {n for n, count in passed.items() if count > 1}
        self.allocated: set[str] = set()
        self.addresses: dict[str, str] = {}  # of buffers that are passed often: local variables
        self.read = {n for step in plan.steps for n in step_reads(step)}
        self.read |= {o.buffer for o in plan.outputs if o.buffer is not None}

    def render(self) -> str:
        plan = self.plan
        read_last = self._arguments_read_last()
        for k, step in enumerate(plan.steps):
            self._step(step)
            self.body += [f"del {name}" for name in (*plan.frees.get(k, ()), *read_last.get(k, ()))]
        results = [self._result(o) for o in plan.outputs]
        parts = [self._as_real(b.name) for b in plan.inputs if b.paired and b.name in self.handled]
        lines = ['"""Runs one compiled graph. Written by opforge; changes are lost."""', ""]
        lines += [
            f"from opforge.runtime.execute.{self.support} import {n}"
            for n in sorted({"Workspaces", "empty_strided", "overload", "profiled", "reinterpret", *self.imports})
        ]
        lines += ["import math"] if any("math." in line for line in self.body) else []
        lines += ["import torch", ""]
        for name, text in self.names.constants.items():
            lines.append(f"{name} = {text}")
        lines += ["", ""]
        if plan.arena_bytes:
            lines += self._workspace()
        if self.boxed:
            lines += [
                "def call(arguments):",
                "    if profiled(): return in_ranges(arguments)",
                f"    [{', '.join(self.parameters)}] = arguments",
                "    arguments.clear()",
            ]
        else:
            passed = ", ".join(self.parameters)
            lines += [f"def call({passed}):", f"    if profiled(): return in_ranges({passed})"]
        lines += [f"    {line}" for line in [*self._sizes(), *parts]]
        lines += [f"    del {name}" for name in read_last.get(-1, ())]
        if plan.arena_bytes:
            lines.append("    arena, space = workspaces.take()")
        lines += [f"    {line}" for line in self.body]
        if plan.arena_bytes:
            lines.append("    workspaces.give(arena)")
        lines.append(f"    return ({', '.join(results)}{',' if len(results) == 1 else ''})")
        return "\n".join(lines) + "\n"

    def _arguments_read_last(self) -> dict[int, list[str]]:
        """Of a boxed call, which owns its arguments: for each step the tensors that no later one reads, so that they are freed there; under
        -1 those that none reads.
        """
        if not self.boxed:
            return {}
        held = {o.buffer for o in self.plan.outputs if o.buffer is not None}
        last = {b.name: -1 for b in self.plan.inputs if b.name in self.parameters and b.name not in held}
        for k, step in enumerate(self.plan.steps):
            written = [step.target] if isinstance(step, CopyStep) else []
            last.update((name, k) for name in (*step_reads(step), *written) if name in last)
        found: dict[int, list[str]] = {}
        for name, k in last.items():
            found.setdefault(k, []).append(name)
        return found

    def _sizes(self) -> list[str]:
        """Reads the size symbols that no argument is from the arguments that have them as a size or stride. Raises `UnsupportedError`."""
        lines = []
        learned = {s.symbol for step in self.plan.steps if isinstance(step, ExternStep) for s in step.call.learns}
        for symbol in self.plan.symbols:
            if symbol in self.parameters or symbol in learned:
                continue
            for b in map(outside, self.plan.inputs):
                places = [f"{b.name}.size({d})" for d, n in enumerate(b.shape) if _is_symbol(n, symbol)]
                places += [f"{b.name}.stride({d})" for d, n in enumerate(b.stride or ()) if _is_symbol(n, symbol)]
                if places:
                    lines.append(f"{symbol} = {places[0]}")
                    break
            else:
                raise UnsupportedError(f"no argument of the graph has the size {symbol}")
        return lines

    def _workspace(self) -> list[str]:
        """The arena with the views that extern calls need, made once and used again."""
        lines = ["class Space:", '    """The memory of all intermediate values of one run."""', ""]
        pointers = {f"{n}_at" for n in (*self.pointers, *self.passed)}
        slots = sorted(self.tensors | pointers | set(self.views))
        lines.append(f"    __slots__ = ({', '.join(repr(s) for s in ['arena', *slots])},)")
        lines += [
            "",
            "    def __init__(self, arena):",
            "        self.arena = arena",
        ]
        lines += ["        base = arena.data_ptr()", "        skip = -base % 64"]
        for name in sorted(self.tensors):
            b = self.plan.layouts[name]
            lines.append(
                f"        self.{name} = arena[skip + {self._offset(name)}:][:{self._bytes(b)}].view(torch.{b.dtype})"
                f".as_strided({shape_text(b.shape)}, {shape_text(b.stride or ())})"
            )
        for name, (buffer, text) in self.views.items():
            lines.append(f"        self.{name} = reinterpret(self.{buffer}, {text})")
        for name in sorted(self.pointers):
            lines.append(f"        self.{name}_at = base + skip + {self._offset(name)}")
        for name, buffers in self.passed.items():
            lines.append(f"        self.{name}_at = [base + skip + n for n in {[self._offset(b) for b in buffers]}]")
        return [*lines, "", "", f"workspaces = Workspaces(Space, {self.plan.arena_bytes} + 64)", "", ""]

    def _bytes(self, b: Buffer) -> int:
        total = nbytes(b)
        assert total is not None
        return total

    def _offset(self, name: str) -> int:
        return arena_offset(self.plan, name)

    def _kind(self, name: str) -> str:
        return self.plan.places[name].kind

    def _in_arena(self, name: str) -> bool:
        return self._kind(home(self.plan, name)) == "arena"

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
            # Without a word to autograd: who calls the graph tells it of the write, however it was done.
            self.handled.add(step.target)
            self.body.append(f"{step.target}.data.copy_({self._tensor(step.source)})")

    def _kernel(self, kernel: Kernel) -> None:
        """The call of a kernel, or of the function that runs it with others, in the place of the first."""
        if kernel.name in self.followers:
            return
        called, members = self.groups.get(kernel.name, (kernel.name, (kernel.name,)))
        args: list[str] = []
        buffers: list[str] = []
        for name in members:
            one = self.kernels[name]
            for written in one.writes:
                if self._kind(written) == "own":
                    self._allocate(written)
            buffers += [*one.reads, *one.writes]
            if called not in self.tables:
                args += [*(self._pointer(n) for n in (*one.reads, *one.writes)), *one.symbols]
        if called in self.tables:
            args = self._table(called, buffers)
        launched = called in self.programs
        if launched:
            args.insert(0, number(expr(self.programs[called])))
        if len(args) > MAX_ARGUMENTS:
            raise UnsupportedError(f"kernel {called} takes {len(args)} arguments, more than {MAX_ARGUMENTS}")
        call = f"{called}({', '.join(args)})"
        if (faults := kernel_checks(kernel)) and not launched:  # a kernel on a GPU ends by an assertion
            call = (
                f"if opf_fault := {call}: out_of_range(opf_fault, {self.names.constant('faults', repr(tuple(faults)))})"
            )
            self.imports.append("out_of_range")
        self.body.append(call + _comment(source_lines(o for n in members for o in self.kernels[n].origins)))

    def _table(self, called: str, buffers: list[str]) -> list[str]:
        """The tensors whose addresses fill a table, the addresses in the arena, and for each of `buffers` which one of these all it has."""
        homes = [home(self.plan, n) for n in buffers]
        tensors = list(dict.fromkeys(n for n in homes if self._kind(n) != "arena"))
        arena = list(dict.fromkeys(n for n, of in zip(buffers, homes, strict=True) if self._kind(of) == "arena"))
        place = {n: k for k, n in enumerate([*tensors, *arena])}
        order = tuple(place[of if self._kind(of) != "arena" else n] for n, of in zip(buffers, homes, strict=True))
        if arena:
            self.passed[called] = arena
        return [
            f"[{', '.join(tensors)}]",
            f"space.{called}_at" if arena else self.names.constant("nowhere", "[]"),
            self.names.constant("order", repr(order)),
        ]

    def _allocate(self, name: str) -> None:
        if name in self.allocated:
            return  # an indexed update of what the kernel before has copied
        self.allocated.add(name)
        b = self.plan.layouts[name]
        self.body.append(
            f"{name} = empty_strided({shape_text(b.shape)}, {shape_text(b.stride or ())}, {self.names.constant('dtype', f'torch.{b.dtype}')})"
        )

    def _pointer(self, name: str) -> str:
        if self._in_arena(name):
            self.pointers.add(name)
            return f"space.{name}_at"
        of = home(self.plan, name)
        if of not in self.often:
            return f"{of}.data_ptr()"
        if of in self.addresses:
            return self.addresses[of]
        self.addresses[of] = address = f"{of}_at" if f"{of}_at" not in self.plan.layouts else f"{of}_address"
        return f"({address} := {of}.data_ptr())"

    def _tensor(self, name: str) -> str:
        if self._in_arena(name):
            self.tensors.add(name)
            return f"space.{name}"
        self.handled.add(home(self.plan, name))
        return home(self.plan, name)

    def _view(self, v: ViewOf) -> str:
        b = self.plan.layouts[v.buffer]
        if self._in_arena(v.buffer) and all(type(n) is int for n in (*v.shape, *v.stride, v.offset)):
            # The arena does not move while its workspace lives: a view of known sizes is made once.
            text = f"{shape_text(v.shape)}, {shape_text(v.stride)}, {number(v.offset)}"
            for name, known in self.views.items():
                if known == (v.buffer, text):
                    return f"space.{name}"
            if v.shape != b.shape or v.stride != b.stride or v.offset != b.offset:
                self.tensors.add(v.buffer)
                name = f"{v.buffer}_as{len(self.views)}"
                self.views[name] = (v.buffer, text)
                return f"space.{name}"
        whole = v.shape == b.shape and v.stride == (b.stride or contiguous_strides(b.shape)) and v.offset == b.offset
        if whole:
            return self._tensor(v.buffer)
        return (
            f"reinterpret({self._tensor(v.buffer)}, {shape_text(v.shape)}, {shape_text(v.stride)}, {number(v.offset)})"
        )

    def _routine(self, routine: Routine) -> None:
        for name in routine.writes:
            if self._kind(name) == "own":
                self._allocate(name)
        args = [self._pointer(n) for n in (*routine.reads, *routine.writes)]
        if routine.name in self.programs:
            args = [number(expr(self.programs[routine.name])), *args, *routine.symbols]
        else:
            args += map(number, cpp_routine(routine, self.plan.layouts).sizes)
        self.body.append(f"{routine.name}({', '.join(args)}){_comment(source_lines([routine.origin]))}")

    def _extern(self, step: ExternStep) -> None:
        call = step.call
        if call.writes:
            self._writing(step)
            return
        if not call.target:
            self._learn(call)
            return
        args = [self._argument(a) for a in step.args] + [f"{k}={self._argument(v)}" for k, v in step.kwargs]
        if step.out:
            target = self.names.constant("op", f"overload({self.out_targets[call.target]!r})")
            for name in step.out:
                if self._kind(name) == "own":
                    self._allocate(name)
            args.append(f"out={self._tensor(step.out[0])}")
            self.body.append(f"{target}({', '.join(args)}){_comment(call.origin)}")
            self._learn(call)
            return
        opaque = self._opaque(call)
        how = "keeping_workspace" if opaque else "unviewed" if call.whole else "overload"
        self.imports += [how, *(["conform"] if call.whole else [])]
        target = call.target if call.compiled else self.names.constant("op", f"{how}({call.target!r})")
        names = [b.name for b in call.outs] or [s.symbol for s in call.learns if not s.source]
        left = f"{names[0]}" if call.single and names else _unpacked(call)
        result = f"{left} = " if names else ""
        self.body.append(f"{result}{target}({', '.join(args)}){_comment(call.origin)}")
        self._learn(call)
        for b in call.outs:
            if b.stride is None and b.name in self.read and _keeps_arguments(call):
                # A sparse tensor keeps the tensors that it is made of, and memory of the arena is used again.
                self.body.append(f"{b.name} = {b.name}.clone()")
            # Of several results one may be None where tracing has a tensor.
            if b.stride is not None and b.name in self.plan.layouts and b.name in self.read:
                seen = outside(b)
                shape, stride = shape_text(seen.shape), shape_text(seen.stride or ())
                dtype = self.names.constant("dtype", f"torch.{seen.dtype}")
                self.imports.append("conform")
                # Of results whose sizes data makes fake kernels often know no strides; the caller sees eager's.
                exact = ", True" if call.learns and any(o.buffer == b.name for o in self.plan.outputs) else ""
                missing = "" if call.single else f"{b.name} is None or "
                told = f"{b.name}.stride() != {stride} or {b.name}.shape != {shape} or {b.name}.dtype is not {dtype}"
                unfit = f"{b.name} is None" if b.name in opaque else f"{missing}{told}"
                self.body.append(
                    f"if {unfit}: {b.name} = conform({b.name}, {dtype}, {shape}, {stride}, {call.target!r}{exact})"
                )
                if b.paired:
                    self.body.append(self._as_real(b.name))

    def _opaque(self, call: Extern) -> set[str]:
        """Results that are read and of which tracing does not know the sizes."""
        places = call.places or range(len(call.outs))
        hidden = OPAQUE.get(call.target, ())
        return {b.name for b, k in zip(call.outs, places, strict=True) if k in hidden and b.name in self.read}

    def _as_real(self, name: str) -> str:
        self.imports.append("as_real")
        return f"{name} = as_real({name})"

    def _outside(self, text: str, x: ViewOf | Ref) -> str:
        """A tensor as eager kernels and callers know it. Memory of the graph's own begins where parts may lie beside each other."""
        if not x.paired:
            return text
        if (
            isinstance(x, ViewOf)
            and x.laid is None
            and self._kind(home(self.plan, x.buffer)) == "own"
            and _is_beside(x)
        ):
            return f"torch.view_as_complex({text})"
        self.imports.append("as_complex")
        return f"as_complex({text})"

    def _laid(self, x: ViewOf, stride: tuple[Size, ...]) -> str:
        self.imports.append("laid_out")
        dtype = self.names.constant("dtype", f"torch.{self.plan.layouts[x.buffer].dtype}")
        return f"laid_out({self._view(x)}, {dtype}, {shape_text(stride)})"

    def _writing(self, step: ExternStep) -> None:
        """A call that writes into its arguments: into memory of their results, with the contents from before where these are elsewhere."""
        call, args = step.call, []
        for name, before in zip(step.out, step.args, strict=False):
            if self._kind(name) == "own":
                self._allocate(name)
            args.append(self._tensor(name))
            if before is not None and home(self.plan, before.buffer) != home(self.plan, name):
                self.body.append(f"{args[-1]}.copy_({self._argument(before)})")
        args += [self._argument(a) for a in step.args[call.writes :]]
        self.body.append(f"{call.target}({', '.join(args)}){_comment(call.origin)}")

    def _learn(self, call: Extern) -> None:
        """The sizes that a call brings, and what is demanded of them."""
        for s in call.learns:
            if s.source:
                self.body.append(f"{s.symbol} = {s.source}")
            elif s.buffer:
                self.body.append(f"{s.symbol} = {self._tensor(s.buffer)}.shape[{s.dim}]")
        for source, message in call.demands:
            self.imports.append("unmet")
            self.body.append(f"if not ({source}): unmet({self.names.constant('message', python_string(message))})")

    def _argument(self, x: object) -> str:
        if isinstance(x, ViewOf):
            return self._outside(self._view(x) if x.laid is None else self._laid(x, x.laid), x)
        if isinstance(x, Ref):
            return self._outside(self._tensor(x.buffer), x)
        if isinstance(x, Expr):
            return number(x)
        if isinstance(x, list):
            return f"[{', '.join(self._argument(y) for y in x)}]"
        if isinstance(x, tuple):
            return f"({', '.join(self._argument(y) for y in x)}{',' if len(x) == 1 else ''})"
        if isinstance(x, float) and (x != x or x in (float("inf"), float("-inf"))):
            return f"float({str(x)!r})"
        if isinstance(x, complex):
            return f"complex({self._argument(x.real)}, {self._argument(x.imag)})"
        if x is None or isinstance(x, (bool, int, float, str)):
            return repr(x)
        # torch's own constants: dtypes, layouts, devices, memory formats print as the expressions that make them.
        text = str(x)
        if text.startswith("torch."):
            return text
        if type(x).__name__ != "device":
            raise UnsupportedError(f"a {type(x).__name__} is an argument of an operator")
        return f"torch.device({text!r})"

    def _result(self, o: Output | ViewOf) -> str:
        if isinstance(o, ViewOf):
            if o.paired:
                self.imports.append("own_complex")
                return f"own_complex({self._view(o)})"
            return self._view(o)
        if isinstance(o.value, Expr):
            return number(o.value)
        return repr(o.value)


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


def _comment(origin: str) -> str:
    return f"  # {comment_text(origin)}" if origin else ""


def _unpacked(call: Extern) -> str:
    """Targets for the results of a kernel that returns several: only tensors get names."""
    names = iter([b.name for b in call.outs])
    if not call.places:
        return ", ".join(names) + ("," if len(call.outs) == 1 else "")
    targets = [next(names) if k in call.places else "_" for k in range(call.places[-1] + 1)]
    return ", ".join([*targets, "*_"])


def render_wrapper(
    plan: Plan,
    parameters: list[str],
    out_targets: Mapping[str, str],
    *,
    boxed: bool = False,
    support: str = "support",
    programs: Mapping[str, Size] = NO_PROGRAMS,
    groups: Mapping[str, tuple[str, ...]] = NO_GROUPS,
    tables: Collection[str] = (),
) -> str:
    """Python source of a module with `call(…)`, which takes the placeholders in order and returns a tuple. `boxed`: it takes one list of
    them, which it empties, and frees each after its last use. `support`: the module of `execute` that it imports from. `programs`: numbers
    of programs of functions that are launched on a GPU, by name. `groups`: kernels that are called as one function, by its name. `tables`: those
    of them that take tensors, and addresses in the arena, for a table of their own.

    Kernel functions are put into the module by the loader under their names.
    """
    return WrapperWriter(
        plan,
        parameters,
        out_targets,
        boxed=boxed,
        support=support,
        programs=programs,
        groups=groups,
        tables=tables,
    ).render()
