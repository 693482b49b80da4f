"""The plan checker: proves that every load of a scheduled program reads the value that the functional program says.

It shares nothing with the scheduler but the data types, and trusts none of its decisions. It walks the steps in order and keeps, for all memory,
which buffer's value is there (`check_memory`); inside a kernel it compares every access with every write that may touch the same bytes
(`check_kernel`); and it compares what each kernel stores with the definition in the program (`check_values`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from ...errors import PlanError
from ..ir.facts import equal, flat, plausibly_equal
from ..ir.index import Expr, expr
from ..ir.learned import learned_by, symbols_of
from ..ir.nodes import ITEMSIZE, Extern, Node, Output, Program, Ref, Size, contiguous_strides, coordinates, load
from ..kernels.plan import CopyStep, ExternStep, Kernel, KernelStep, Plan, ViewOf
from .errors import ErrorOrder
from .kernel import KernelCheck
from .loops import element
from .memory import Memory
from .parts import check_parts
from .values import Values


def check(program: Program, plan: Plan) -> None:
    """Raise PlanError, naming the buffer and the step, unless `plan` computes `program`.

    Proved: every read finds its buffer completely written and not overwritten since (arena reuse, in-place updates, aliased inputs, freed
    memory); an error finds the inputs as they were, or as eager has them then; every stored value equals the program's definition; kernels
    are free of races between loop points; extern calls get the arguments that the program gives them; mutated inputs and outputs hold
    their values at the end, other inputs are as they were.
    """
    _Checker(program, plan).run()


class _Checker:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan = program, plan
        self.where = "plan"
        self.values = Values(program)
        self.memory = Memory(plan, self.fail)
        self.buffers = program.shapes()
        self.calls = [i for i in program.items if isinstance(i, Extern)]
        self.done: list[Extern] = []
        self.names: set[str] = set()
        self.unknown = learned_by(program.items)
        self.copied: dict[str, str] = {}  # input → the buffer whose value a CopyStep put there

    def fail(self, message: str) -> NoReturn:
        raise PlanError(f"{self.where}: {message}")

    def run(self) -> None:
        if tuple(b.name for b in self.plan.inputs) != tuple(b.name for b in self.program.inputs):
            self.fail("its inputs are not the program's")
        errors = ErrorOrder(self.program, self.plan, self.memory, self.fail)
        for k, step in enumerate(self.plan.steps):
            if isinstance(step, KernelStep):
                self.where = f"step {k} (kernel {step.kernel.name!r})"
                self.kernel(step.kernel)
            elif isinstance(step, ExternStep):
                self.where = f"step {k} (extern {step.call.target!r})"
                self.call(step)
            else:
                self.where = f"step {k} (copy into {step.target!r})"
                self.copy(step)
            errors.step(step)
            for name in self.plan.frees.get(k, ()):
                self.memory.free(name, self.where)
        self.where = "end"
        missing = next((c for c in self.calls if c.effect), None)
        if missing is not None:
            self.fail(f"extern {missing.target!r} has an effect, but is never called")
        effects = [c for c in self.done if c.effect]
        if effects != [i for i in self.program.items if isinstance(i, Extern) and i.effect]:
            self.fail("extern calls with effects are not in the program's order")
        self.outputs()
        self.inputs()

    # -- kernels -------------------------------------------------------------------------------------------------------
    def kernel(self, kernel: Kernel) -> None:
        if kernel.name in self.names:
            self.fail("another kernel has this name")
        self.names.add(kernel.name)
        if missing := self.unknown.intersection(kernel.symbols):
            self.fail(f"the size {min(missing)} is not known yet")
        if kernel.parts:
            self.parts(kernel)
        else:
            KernelCheck(kernel, self.values, self.memory, self.buffers, self.where, self.fail).run()
        for old, new in sorted(kernel.no_alias):
            if self.memory.region(old).overlaps(self.memory.region(new)):
                self.fail(
                    f"buffer {new!r} lies over {old!r}, of which values are computed again after {new!r} is stored"
                )

    def parts(self, kernel: Kernel) -> None:
        """Each part must be right as a step, in order. Their kernel writes what the last one makes, while others of its programs may still
        read: so no part reads that, and it lies over nothing that is read. All else that they make is in no memory.
        """
        step, made = self.where, check_parts(kernel, self.fail)
        passed = made - set(kernel.writes)
        for name in sorted(passed):
            if (place := self.plan.allocations.get(name)) is None or place.kind != "elided":
                self.fail(f"buffer {name!r} is passed on by parts of a kernel, but has a place in memory")
        for r in kernel.reads:
            for w in kernel.writes:
                if self.memory.region(r).overlaps(self.memory.region(w)):
                    self.fail(f"result {w!r} is written over {r!r}, which other programs of the kernel may still read")
        self.memory.enter(passed)
        for k, part in enumerate(kernel.parts):
            self.where = f"{step}, part {k}"
            if isinstance(part, KernelStep):
                self.kernel(part.kernel)
            else:
                self.call(part)
        self.where = step
        self.memory.leave(step)

    # -- extern calls --------------------------------------------------------------------------------------------------
    def call(self, step: ExternStep) -> None:
        call = step.call
        if call not in self.calls:
            self.fail("the program has no such call (or it is made twice)")
        if missing := self.unknown.intersection(symbols_of(call)):
            self.fail(f"the size {min(missing)} is not known yet")
        self.unknown -= {s.symbol for s in call.learns}
        self.calls.remove(call)
        self.done.append(call)
        if len(call.args) != len(step.args) or [k for k, _ in call.kwargs] != [k for k, _ in step.kwargs]:
            self.fail("its arguments are not the call's")
        for wanted, given in _pairs(
            (call.args, tuple(v for _, v in call.kwargs)), (step.args, tuple(v for _, v in step.kwargs))
        ):
            if isinstance(wanted, Ref):
                self.argument(wanted.buffer, given)
                if wanted.paired != given.paired:
                    self.fail(f"argument {given!r} should be {wanted!r}")
            elif type(wanted) is not type(given) or not (
                wanted is given or wanted == given or repr(wanted) == repr(given)
            ):
                self.fail(f"argument {given!r} should be {wanted!r}")
        outs = {b.name for b in call.outs}
        if call.writes and step.out != tuple(b.name for b in call.outs):
            self.fail("it writes into its arguments, which are not its results")
        self.apart(step)
        if not set(step.out) <= outs:
            self.fail(f"it writes to {sorted(set(step.out) - outs)}, which are not its results")
        read = [g.buffer for g in _leaves((step.args, step.kwargs)) if isinstance(g, (Ref, ViewOf))]
        for b in call.outs:
            layout = self.memory.layout(b.name)
            if layout.shape != b.shape or layout.dtype != b.dtype:
                self.fail(
                    f"result {b.name!r} is {b.dtype}{list(b.shape)}, its layout {layout.dtype}{list(layout.shape)}"
                )
            if b.name not in step.out and b.stride is not None and not _same_strides(b.shape, layout.stride, b.stride):
                self.fail(f"result {b.name!r} has strides {_show(layout.stride)}, the kernel gives {_show(b.stride)}")
            for r in read if b.name in step.out else ():
                if self.memory.region(r).overlaps(self.memory.region(b.name)) and not self.in_place(step, b.name, read):
                    self.fail(f"result {b.name!r} is written over argument {r!r}")
            if b.name not in step.out and not self.memory.region(b.name).storage.startswith("extern "):
                self.fail(
                    f"result {b.name!r} is allocated by the kernel, but has a place in {self.memory.region(b.name).storage}"
                )
            self.memory.write(b.name, self.where)

    def in_place(self, step: ExternStep, name: str, read: list[str]) -> bool:
        """Whether a call that writes into arguments does so in the very memory of what it reads there, and of nothing else that it reads."""
        if not step.call.writes:
            return False
        given = step.args[[b.name for b in step.call.outs].index(name)]
        if not isinstance(given, (Ref, ViewOf)):
            return False
        seen = self._whole(given.buffer) if isinstance(given, Ref) else given
        own, base = self.memory.layout(name), self.memory.layout(seen.buffer)
        places = [(b.shape, b.stride, b.offset) for b in (seen, own, base)]
        region = self.memory.region(name)
        overlapping = [r for r in read if self.memory.region(r).overlaps(region)]
        same = places[0] == places[1] == places[2] and self.memory.region(seen.buffer) == region
        return same and overlapping == [seen.buffer]

    def apart(self, step: ExternStep) -> None:
        """What a call writes at once must lie in different memory."""
        for k, name in enumerate(step.out):
            for other in step.out[:k]:
                if self.memory.region(name).overlaps(self.memory.region(other)):
                    self.fail(f"results {other!r} and {name!r} share memory")

    def argument(self, wanted: str, given: Any) -> None:
        if isinstance(given, Ref):
            given = self._whole(given.buffer)
        if not isinstance(given, ViewOf):
            self.fail(f"argument {given!r} should be buffer {wanted!r}")
        self.memory.require(given.buffer)
        self.view(wanted, given)

    def _whole(self, name: str, paired: bool = False) -> ViewOf:
        b = self.memory.layout(name)
        assert b.stride is not None
        return ViewOf(name, b.shape, b.stride, b.offset, paired)

    def view(self, wanted: str, given: ViewOf) -> None:
        """The strided view must show, element by element, the value of buffer `wanted`."""
        target, base = self.buffers[wanted], self.memory.layout(given.buffer)
        assert base.stride is not None
        if tuple(given.shape) != tuple(target.shape):
            self.fail(
                f"a view of {given.buffer!r} has shape {_show(given.shape)}, {wanted!r} has {_show(target.shape)}"
            )
        if base.dtype != target.dtype:
            self.fail(f"a view of {given.buffer!r} is {base.dtype}, {wanted!r} is {target.dtype}")
        coords = coordinates(target.shape)
        position = flat(coords, given.stride, given.offset)
        self._within(given)
        value = load(wanted, coords, target.dtype)
        # Follow views of the program down to the buffer that is given, and compare addresses there …
        seen: Node = value
        while seen.op == "load" and not seen.args:
            if seen.attr.buffer == given.buffer and equal(flat(seen.attr.index, base.stride, base.offset), position):
                return
            d = self.values.table.get(seen.attr.buffer)
            if d is None or d.kind != "plain":
                break
            seen = self.values.expand(seen)
        # … or else compare values at the coordinates that the addresses stand for.
        at = element(position, base.shape, base.stride, base.offset)
        if at is None or not self.values.same(load(given.buffer, at, base.dtype), value):
            self.fail(
                f"the view of {given.buffer!r} with strides {_show(given.stride)} and offset {given.offset} is not buffer {wanted!r}"
            )

    def _within(self, v: ViewOf) -> None:
        """The view must stay inside the memory of its buffer (numbers only: sizes known at run time are proved with the values)."""
        region, base = self.memory.region(v.buffer), self.memory.layout(v.buffer)
        numbers = [n for n in (*v.shape, *v.stride, v.offset) if isinstance(n, int)]
        if len(numbers) != 2 * len(v.shape) + 1 or 0 in numbers[: len(v.shape)]:
            return
        *_, offset = numbers
        strides = numbers[len(v.shape) : -1]
        width = _width(base.dtype)
        last = offset + sum((n - 1) * s for n, s in zip(numbers[: len(strides)], strides, strict=True))
        outside = region.start + offset * width < region.lo or region.start + (last + 1) * width > region.hi
        if outside or min(strides, default=0) < 0:
            self.fail(f"a view of {v.buffer!r} reaches element {last}, beyond the buffer")

    # -- mutations and the end -----------------------------------------------------------------------------------------
    def copy(self, step: CopyStep) -> None:
        target, source = self.memory.layout(step.target), self.memory.layout(step.source)
        if step.target not in {b.name for b in self.plan.inputs}:
            self.fail(f"{step.target!r} is not an input")
        if target.dtype != source.dtype or not plausibly_equal(target.shape, source.shape):
            self.fail(
                f"{step.source!r} is {source.dtype}{_show(source.shape)}, {step.target!r} is {target.dtype}{_show(target.shape)}"
            )
        self.memory.require(step.source)
        a, b = self.memory.region(step.target), self.memory.region(step.source)
        if a.overlaps(b) and (a != b or target.stride != source.stride):
            self.fail(f"{step.source!r} and {step.target!r} overlap in memory")
        self.memory.overwritten(step.target, f"the copy of {step.source!r} in {self.where}")
        # The contents stand in the table of memory under a name of their own.
        self.memory.share(step.target, _copy(step.target))
        self.memory.write(_copy(step.target), self.where)
        self.copied[step.target] = step.source

    def outputs(self) -> None:
        if len(self.plan.outputs) != len(self.program.outputs):
            self.fail(f"{len(self.plan.outputs)} outputs, the program has {len(self.program.outputs)}")
        taken: list[str] = []
        for k, (wanted, given) in enumerate(zip(self.program.outputs, self.plan.outputs, strict=True)):
            self.where = f"output {k}"
            if wanted.buffer is None:
                if not isinstance(given, Output) or given.buffer is not None or given.value != wanted.value:
                    self.fail(f"it should be {wanted.value}")
                continue
            if isinstance(given, Output):
                if given.buffer is None:
                    self.fail(f"it should be buffer {wanted.buffer!r}")
                given = self._whole(given.buffer, given.paired)
            if wanted.paired != given.paired:
                self.fail(f"{given!r} is returned for {wanted!r}")
            self.memory.require(given.buffer)
            self.view(wanted.buffer, given)
            if wanted.stride is not None and not _same_strides(given.shape, given.stride, wanted.stride):
                self.fail(
                    f"buffer {given.buffer!r} is returned with strides {_show(given.stride)}, the caller must see {_show(wanted.stride)}"
                )
            region = self.memory.region(given.buffer)
            if region.storage == "arena" or region.storage.startswith("input "):
                self.fail(f"buffer {given.buffer!r} is returned, but its memory is not its own ({region.storage})")
            for other in taken:
                if region.overlaps(self.memory.region(other)):
                    self.fail(f"buffer {given.buffer!r} shares memory with output {other!r}")
            taken.append(given.buffer)

    def inputs(self) -> None:
        mutated = dict(self.program.mutations)
        for b in self.program.inputs:
            self.where = f"input {b.name!r} at the end"
            if b.name not in mutated:
                if self.memory.state(b.name).status != "complete":
                    self.fail(
                        f"it is not mutated by the program, but its memory was overwritten by {self.memory.state(b.name).why}"
                    )
                continue
            source = mutated[b.name]
            if source == b.name and self.memory.state(b.name).status == "complete":
                continue
            if b.name in self.copied:
                self._holds(b.name, self.copied[b.name], source)
            else:
                self._in_place(b.name, source)

    def _holds(self, target: str, held: str, source: str) -> None:
        at = coordinates(self.buffers[target].shape)
        dtype = self.buffers[target].dtype
        if self.memory.state(_copy(target)).status != "complete":
            self.fail(
                f"it should hold {source!r}, but its memory was overwritten by {self.memory.state(_copy(target)).why}"
            )
        if held != source and not self.values.same(load(held, at, dtype), load(source, at, dtype)):
            self.fail(f"it should hold {source!r}, but was given {held!r}")

    def _in_place(self, target: str, source: str) -> None:
        """Some buffer in the input's very bytes must hold the value."""
        at = coordinates(self.buffers[target].shape)
        place = self.memory.position(target, at)
        for name, p in self.plan.allocations.items():
            if p.kind != "alias" or name not in self.plan.layouts or self.memory.state(name).status != "complete":
                continue
            b = self.memory.layout(name)
            if b.shape != self.buffers[target].shape or b.dtype != self.buffers[target].dtype:
                continue
            if self.memory.region(name).storage != self.memory.region(target).storage:
                continue
            if not equal(self.memory.position(name, at), place):
                continue
            if name == source or self.values.same(load(name, at, b.dtype), load(source, at, b.dtype)):
                return
        self.fail(f"it should hold {source!r}, but no step puts that value there")


def _copy(target: str) -> str:
    return f"{target}, copied"


def _pairs(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """Leaves of two argument trees side by side (trees of unlike shape give a pair that cannot match)."""
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        for x, y in zip(a, b, strict=True):
            yield from _pairs(x, y)
    else:
        yield a, b


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for x in tree:
            yield from _leaves(x)
    else:
        yield tree


def _same_strides(shape: tuple[Size, ...], a: tuple[Size, ...] | None, b: tuple[Size, ...]) -> bool:
    """Equal where they matter: a dimension of size 1, and an empty tensor, may have any stride."""
    if any(n == 0 for n in shape):
        return True
    a = contiguous_strides(shape) if a is None else a
    return all(n == 1 or equal(expr(x), expr(y)) for n, x, y in zip(shape, a, b, strict=True))


def _width(dtype: str) -> int:
    return ITEMSIZE.get(dtype, 16)


def _show(values: tuple[Size, ...] | None) -> str:
    return "()" if values is None else f"[{', '.join(v.text if isinstance(v, Expr) else str(v) for v in values)}]"
