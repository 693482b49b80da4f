"""One kernel under the checker: what it reads and writes, in which phase, at which index; and whether what it stores is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

from ..ir.facts import covers, equal, flat, in_range, is_injective, plausible
from ..ir.index import Expr, Val, Var, expr, size
from ..ir.nodes import (
    ITEMSIZE,
    Buffer,
    Size,
    contiguous_strides,
)
from ..kernels.plan import Accumulate, Kernel, Reduce, Scan, Statement, Store
from .access import Access, roots, same_index, show, stride_of, vars_of
from .accumulations import check_accumulations
from .coverage import covered
from .meaning import Meaning
from .memory import Memory
from .values import Values


class KernelCheck:
    def __init__(
        self,
        kernel: Kernel,
        values: Values,
        memory: Memory,
        buffers: Mapping[str, Buffer],
        step: str,
        fail: Callable[[str], NoReturn],
    ) -> None:
        self.kernel, self.values, self.memory, self.buffers = kernel, values, memory, buffers
        self.step, self.fail = step, fail
        self.scratch = {b.name: b for b in kernel.scratch}
        self.registers: dict[str, tuple[int, Reduce]] = {}
        self.loads: list[Access] = []
        self.stores: list[Access] = []
        self.meaning = Meaning(kernel, values, memory, buffers, fail)

    def run(self) -> None:
        check_accumulations(self.kernel, self.buffers, self.fail)
        self._collect()
        self._locals()
        self._in_bounds()
        for r in dict.fromkeys(a.buffer for a in self.loads if self._is_global(a.buffer)):
            self._read(r)
        self._overlaps()
        self.meaning.run()
        for w in dict.fromkeys(a.buffer for a in self.stores if self._is_global(a.buffer)):
            self._written(w)

    # -- collecting ----------------------------------------------------------------------------------------------------
    def statements(self) -> Iterator[tuple[int, int, Statement]]:
        for p, phase in enumerate(self.kernel.phases):
            for k, st in enumerate(phase.body):
                yield p, k, st

    def _stored(self, st: Store | Scan, p: int, k: int) -> Access:
        outer = self.kernel.outer[: -len(self.kernel.grid_loop)] if isinstance(st, Accumulate) else self.kernel.outer
        loops = (*outer, *self.kernel.phases[p].inner)
        return Access(st.buffer, st.index, p, k, isinstance(st, Store) and st.mask is not None, loops)

    def _is_global(self, name: str) -> bool:
        return name not in self.scratch and name not in self.registers

    def _collect(self) -> None:
        for p, k, st in self.statements():
            if isinstance(st, Reduce):
                if st.name in self.registers or st.name in self.scratch or st.name in self.buffers:
                    self.fail(f"register {st.name!r} is defined twice")
                self.registers[st.name] = (p, st)
            loops = {*self.kernel.outer, *self.kernel.phases[p].inner}
            for n in dict.fromkeys(n for root in roots(st) for n in root.walk()):
                if n.op == "load":
                    self.loads.append(Access(n.attr.buffer, n.attr.index, p, k, bool(n.args)))
                    self._scoped(n.attr.index, loops, n.attr.buffer)
                elif n.op == "index":
                    self._scoped((n.attr,), loops, "an index")
            if not isinstance(st, Reduce):
                self.stores.append(self._stored(st, p, k))
                self._scoped(st.index, loops, st.buffer)
        names = [v.name for v in self.kernel.outer]
        for phase in self.kernel.phases:
            mine = names + [v.name for v in phase.inner]
            if len(set(mine)) != len(mine):
                self.fail("two loops have one name")
        for a in self.loads:
            if self._is_global(a.buffer) and a.buffer not in self.kernel.reads and a.buffer not in self.kernel.writes:
                self.fail(f"buffer {a.buffer!r} is read, but is not an argument")
        for a in self.stores:
            if self._is_global(a.buffer) and a.buffer not in self.kernel.writes:
                self.fail(f"buffer {a.buffer!r} is stored, but is not among the kernel's results")
        stored = {a.buffer for a in self.stores}
        for w in self.kernel.writes:
            if w not in stored:
                self.fail(f"buffer {w!r} is to be written, but no statement stores it")

    def _scoped(self, index: Sequence[Expr], loops: set[Var], what: str) -> None:
        for e in index:
            for a in e.atoms():
                if isinstance(a, Var) and a not in loops and a.extent != 1:
                    self.fail(f"{what!r}: {a.name!r} is not a loop of this phase")

    # -- registers and scratch tiles -----------------------------------------------------------------------------------
    def _locals(self) -> None:
        for a in self.loads:
            if a.buffer in self.registers and self.registers[a.buffer][0] >= a.phase:
                self.fail(
                    f"register {a.buffer!r} is read in phase {a.phase}, before its reduction in phase {self.registers[a.buffer][0]} is done"
                )
            if a.buffer in self.registers and a.index:
                self.fail(f"register {a.buffer!r} is read with coordinates")
        for name, tile in self.scratch.items():
            writes = [s for s in self.stores if s.buffer == name]
            if len(writes) != 1:
                self.fail(f"scratch tile {name!r} is written {len(writes)} times")
            w = writes[0]
            inner = self.kernel.phases[w.phase].inner
            if not covers(w.index, tile.shape, inner):
                self.fail(f"scratch tile {name!r} of shape {list(tile.shape)} is not fully written in phase {w.phase}")
            for a in self.loads:
                if a.buffer == name and a.phase <= w.phase:
                    self.fail(
                        f"scratch tile {name!r} is read in phase {a.phase}, before phase {w.phase} has written it"
                    )

    # -- bounds --------------------------------------------------------------------------------------------------------
    def _in_bounds(self) -> None:
        for a in (*self.loads, *self.stores):
            if a.buffer in self.registers:
                continue
            shape = self.scratch[a.buffer].shape if a.buffer in self.scratch else self.memory.layout(a.buffer).shape
            if len(a.index) != len(shape):
                self.fail(f"buffer {a.buffer!r} of rank {len(shape)} is accessed with {len(a.index)} coordinates")
            for e, n in zip(a.index, shape, strict=True):
                if not a.guarded and not in_range(e, n) and not plausible(e, n):
                    self.fail(f"buffer {a.buffer!r} is accessed at {e}, which is not within 0..{n} - 1")
        for ld in dict.fromkeys(ld for _, _, st in self.statements() for root in roots(st) for ld in root.loads()):
            name = ld.attr.buffer
            if name in self.registers:
                dtype = self.registers[name][1].dtype
            else:
                dtype = (self.scratch[name] if name in self.scratch else self.memory.layout(name)).dtype
            if ld.dtype != dtype:
                self.fail(f"buffer {name!r} is {dtype}, but read as {ld.dtype}")

    # -- reads ---------------------------------------------------------------------------------------------------------
    def _read(self, name: str) -> None:
        """Each load of a global buffer finds it written: by an earlier step, or for this outer point by an earlier phase."""
        writes = [s for s in self.stores if s.buffer == name]
        if not writes:
            self.memory.require(name)
            return
        last = max(writes, key=lambda w: (w.phase, w.at))
        for a in (a for a in self.loads if a.buffer == name):
            if a.phase > last.phase:
                if not all(self._same_outer(a, w) for w in writes):
                    self.fail(
                        f"buffer {name!r} is read in phase {a.phase} at [{show(a.index)}], which another outer iteration writes"
                    )
            elif (a.phase, a.at) > (last.phase, last.at) and all(same_index(a.index, w.index) for w in writes):
                continue
            else:
                self.fail(
                    f"buffer {name!r} is read in phase {a.phase} before this kernel has written it (phase {last.phase})"
                )

    def _same_outer(self, a: Access, b: Access) -> bool:
        """Whatever element the two accesses share, they touch it in the same iteration of the outer loops."""
        if all(v.extent == 1 for v in self.kernel.outer):
            return True
        outer = set(self.kernel.outer)
        parts: list[tuple[Expr, Size]] = []
        shape = self.memory.layout(a.buffer).shape
        for x, y, n in zip(a.index, b.index, shape, strict=True):
            if any(isinstance(t, Val) for t in (*x.atoms(), *y.atoms())):
                continue
            if vars_of(x) <= outer and equal(x, y):
                parts.append((x, n))
            elif (
                (block := stride_of(x, self.kernel.outer)) is not None
                and (other := stride_of(y, self.kernel.outer)) is not None
                and block == other
            ):
                parts.append((block[0], size((expr(n) + (block[1] - 1)) // block[1])))
        index, dims = tuple(p[0] for p in parts), tuple(p[1] for p in parts)
        return is_injective(flat(index, contiguous_strides(dims)), self.kernel.outer)

    # -- two buffers in the same bytes ---------------------------------------------------------------------------------
    def _overlaps(self) -> None:
        written = list(dict.fromkeys(s.buffer for s in self.stores if self._is_global(s.buffer)))
        read = list(dict.fromkeys(a.buffer for a in self.loads if self._is_global(a.buffer)))
        by_storage: dict[str, list[str]] = {}
        for w in written:
            by_storage.setdefault(self.memory.region(w).storage, []).append(w)
        for k, w in enumerate(written):
            for other in by_storage[self.memory.region(w).storage]:
                if other in written[:k] and self.memory.region(w).overlaps(self.memory.region(other)):
                    self.fail(f"buffers {other!r} and {w!r}, both written here, overlap in memory")
        for r in read:
            for w in by_storage.get(self.memory.region(r).storage, ()):
                if r != w and self.memory.region(r).overlaps(self.memory.region(w)):
                    self._in_place(r, w)

    def _in_place(self, old: str, new: str) -> None:
        """`new` is written where `old` is read: no read may come after the write of the same bytes."""
        a, b = self.memory.layout(old), self.memory.layout(new)
        for r in (x for x in self.loads if x.buffer == old):
            for w in (x for x in self.stores if x.buffer == new):
                what = f"buffer {old!r} is read at [{show(r.index)}] in phase {r.phase}, but {new!r} is written over it in phase {w.phase}"
                if r.phase > w.phase:
                    self.fail(f"{what}, which comes first")
                if ITEMSIZE.get(a.dtype) != ITEMSIZE.get(b.dtype):
                    self.fail(f"{what} with elements of another size")
                if r.phase == w.phase:
                    if r.at > w.at:
                        self.fail(f"{what} by an earlier statement")
                    places = self.memory.position(old, r.index), self.memory.position(new, w.index)
                    if not equal(*places) or not self._injective(w):
                        self.fail(f"{what} at [{show(w.index)}], which is not the same element")
                elif (a.shape, a.stride, a.offset) != (b.shape, b.stride, b.offset) or self.memory.region(
                    old
                ).start != self.memory.region(new).start:
                    self.fail(f"{what} with another layout")
                elif not self._same_outer(r, w):
                    self.fail(f"{what} by another outer iteration")

    def _injective(self, w: Access) -> bool:
        shape = self.memory.layout(w.buffer).shape
        loops = (*self.kernel.outer, *self.kernel.phases[w.phase].inner)
        return is_injective(flat(w.index, contiguous_strides(shape)), loops)

    # -- what is written -----------------------------------------------------------------------------------------------
    def _written(self, name: str) -> None:
        layout = self.memory.layout(name)
        if not self.memory.distinct_elements(name):
            self.fail(f"buffer {name!r} is written, but elements of its layout share memory")
        before = self.memory.state(name)
        scatter = self.values.nests[name].scatter if name in self.values.nests else None
        plain: list[Access] = []
        updated = False
        for p, k, st in self.statements():
            if isinstance(st, Reduce) or st.buffer != name:
                continue
            if scatter is not None and not (
                isinstance(st, Store) and not plain and not updated and self.meaning.is_base(name, scatter.base, st)
            ):
                if updated:
                    self.fail(f"buffer {name!r} is updated twice")
                if not plain and before.status != "base":
                    self._starts_as(name, scatter.base)
                updated = True
                continue
            if updated:
                self.fail(f"buffer {name!r} is overwritten after its indexed update")
            if isinstance(st, Store) and st.mode != "set":
                self.fail(f"buffer {name!r} is combined by {st.mode}, but the program defines it otherwise")
            plain.append(self._stored(st, p, k))
        if plain and updated and not all(self._same_outer(w, plain[0]) for w in self.stores if w.buffer == name):
            self.fail(f"buffer {name!r} is updated by outer iterations other than those that copy its base")
        if scatter is not None and not updated and before.status == "complete":
            self.fail(f"buffer {name!r} gets only the copy of {scatter.base!r}; its indexed update is missing")
        if before.status == "complete":
            self.fail(f"buffer {name!r} is written again")
        if plain or not updated:
            done = covered(name, layout.shape, plain, before.why if before.status == "partial" else "", self.fail)
            if done is not None:
                if updated:
                    self.fail(f"buffer {name!r} is updated, but its copy of the base covers only a part ({done})")
                self.memory.write(name, self.step, "partial", done)
                return
        if scatter is not None and not updated:
            self.memory.write(name, self.step, "base", scatter.base)
            return
        self.memory.write(name, self.step)

    def _starts_as(self, name: str, base: str) -> None:
        """Without a copy, the memory must be the base's own, still holding it."""
        a, b = self.memory.layout(name), self.memory.layout(base)
        same = self.memory.region(name) == self.memory.region(base) and a.stride == b.stride
        if not same:
            self.fail(f"buffer {name!r} is updated, but never starts as a copy of {base!r}")
        self.memory.require(base)
