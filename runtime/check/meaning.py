"""Whether a kernel stores what the program defines: its registers, tiles and new buffers become definitions, its stores are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from ..ir.facts import flat, is_injective
from ..ir.index import Expr, Val, Var, expr, of
from ..ir.nodes import Buffer, LoadAt, Node, const, contiguous_strides, identity_mapping, indirect, load, rebuild
from ..kernels.plan import Accumulate, Kernel, Reduce, Scan, Statement, Store
from .access import keep, mapped, short, show, vars_of
from .loops import invert, loop_matches
from .memory import Memory
from .values import Definition, Values


class Meaning:
    """The values that one kernel stores, each as an expression of the program's own. `local`: the names of definitions that registers and scratch
    tiles have become.
    """

    def __init__(
        self,
        kernel: Kernel,
        values: Values,
        memory: Memory,
        buffers: Mapping[str, Buffer],
        fail: Callable[[str], NoReturn],
    ) -> None:
        self.kernel, self.values, self.memory, self.buffers, self.fail = kernel, values, memory, buffers, fail
        self.scratch = {b.name: b for b in kernel.scratch}
        self.outer = tuple(of(v) for v in kernel.outer)
        self.local: dict[str, str] = {}
        self.memo: dict[Node, Node] = {}

    def run(self) -> None:
        """Registers, tiles and new buffers become definitions; what is stored under a name of the program must be that buffer's value."""
        for p, phase in enumerate(self.kernel.phases):
            for st in phase.body:
                self._statement(st, phase.inner, p)

    def _statement(self, st: Statement, inner: tuple[Var, ...], phase: int) -> None:
        if isinstance(st, Reduce):
            body = self._renamed(st.value)
            self.local[st.name] = f"{self.kernel.name} {st.name}"
            self._define(
                st.name, Definition("reduce", self.values.next_order(), self.outer, body, st.kind, inner, st.dtype)
            )
            return
        if isinstance(st, Scan) and len(inner) > 1:
            self.fail(f"buffer {st.buffer!r}: the scan runs on from row to row, over {len(inner)} loops")
        value = self._renamed(st.value)
        if isinstance(st, Accumulate):
            value = self._accumulated(st, value, inner)
        index = tuple(e.subst({}, lambda v: indirect(self._renamed(v.node), v.lo, v.hi)) for e in st.index)
        if st.buffer in self.buffers:
            self._store(st, index, value, inner, phase)
            return
        tile = self.scratch.get(st.buffer)
        loops = inner if tile is not None else (*self.kernel.outer, *inner)
        shape = tile.shape if tile is not None else self.memory.layout(st.buffer).shape
        found = invert(index, shape, loops)
        if found is None or (isinstance(st, Store) and (st.mode != "set" or st.mask is not None)):
            self.fail(
                f"buffer {st.buffer!r} is not in the program, and its store at [{show(st.index)}] cannot be read as a definition"
            )
        coords, loops_at = found
        if tile is not None:
            self.local[st.buffer] = f"{self.kernel.name} {st.buffer}"
            coords = (*self.outer, *coords)
        order = self.values.next_order()
        if isinstance(st, Scan):
            along = expr(loops_at[inner[-1]]).var if inner else None
            if along is None:
                self.fail(f"the scan into {st.buffer!r} has no loop to run along")
            body = rebuild(value, keep, loops_at)
            self._define(st.buffer, Definition("scan", order, coords, body, st.kind, (along,), value.dtype))
        else:
            body = rebuild(value, keep, loops_at)
            self._define(st.buffer, Definition("plain", order, coords, body, dtype=value.dtype))

    def _accumulated(self, st: Accumulate, value: Node, inner: tuple[Var, ...]) -> Node:
        """What is stored: a reduction over the grid loop, at a point of the other loops."""
        coords = (*self.outer[: -len(self.kernel.grid_loop)], *(of(v) for v in inner))
        name = f"{self.kernel.name} {st.buffer}, accumulated"
        order = self.values.next_order()
        self._define(name, Definition("reduce", order, coords, value, st.kind, self.kernel.grid_loop, value.dtype))
        return load(name, coords, value.dtype)

    def _renamed(self, n: Node) -> Node:
        """The expression with loads of registers and scratch tiles made loads of definitions over all loops of the kernel."""
        return rebuild(n, self._qualified, {}, self.memo)

    def _qualified(self, ld: Node) -> Node | None:
        name = self.local.get(ld.attr.buffer)
        return None if name is None else Node("load", ld.args, ld.dtype, LoadAt(name, (*self.outer, *ld.attr.index)))

    def _define(self, name: str, d: Definition) -> None:
        self.values.add(self.local.get(name, name), d)

    def _store(
        self, st: Store | Scan, index: tuple[Expr, ...], value: Node, inner: tuple[Var, ...], phase: int
    ) -> None:
        name = st.buffer
        b = self.buffers[name]
        if value.dtype != b.dtype:
            self.fail(f"buffer {name!r} is {b.dtype}, but {value.dtype} is stored")
        nest = self.values.nests.get(name)
        if nest is None:
            self.fail(f"buffer {name!r} is stored by a kernel, but the program does not define it by a nest")
        if nest.scatter is not None:
            if not (isinstance(st, Store) and self.is_base(name, nest.scatter.base, st)):
                self._update(st, index, value, inner)
            return
        if isinstance(st, Scan):
            self._scan(st, index, value, inner)
            return
        if st.mode == "set" and not self.values.same(value, load(name, index, b.dtype), None):
            self.fail(
                f"buffer {name!r}: phase {phase} stores another value than the program defines ({self._difference()})"
            )

    def _difference(self) -> str:
        if self.values.why is None:
            return "no common form"
        a, b = (short(n) for n in self.values.why)
        return f"{a} instead of {b}"

    def _scan(self, st: Scan, index: tuple[Expr, ...], value: Node, inner: tuple[Var, ...]) -> None:
        nest = self.values.nests[st.buffer]
        if nest.scan != st.kind or not inner:
            self.fail(f"buffer {st.buffer!r} is not the {st.kind} scan that the program defines")
        along = inner[-1]
        if index[nest.scan_dim].var is not along or any(
            along in vars_of(e) for k, e in enumerate(index) if k != nest.scan_dim
        ):
            self.fail(f"buffer {st.buffer!r}: the scan does not run along dimension {nest.scan_dim}")
        body = self.values.table[st.buffer].body
        assert body is not None
        if not self.values.same(value, rebuild(body, keep, identity_mapping(nest.vars, index))):
            self.fail(
                f"buffer {st.buffer!r}: the scan runs over another value than the program's ({self._difference()})"
            )

    def _update(self, st: Statement, index: tuple[Expr, ...], value: Node, inner: tuple[Var, ...]) -> None:
        """An indexed update must be the program's, and safe where two points of the loops write one element."""
        assert not isinstance(st, Reduce)
        scatter = self.values.nests[st.buffer].scatter
        assert scatter is not None
        if isinstance(st, Scan) or st.mode != scatter.mode:
            self.fail(f"buffer {st.buffer!r} is not updated by {scatter.mode!r}, as the program says")
        loops = (*self.kernel.outer, *inner)
        always = const(True, "bool")
        mask = always if st.mask is None else self._renamed(st.mask)
        ordered = scatter.mode == "set" and not scatter.unordered
        ok = False
        for ma, mb in loop_matches(loops, scatter.domain, ordered=ordered):
            left, right = (lambda n, m=ma: rebuild(n, keep, m)), (lambda n, m=mb: rebuild(n, keep, m))
            wanted_mask = always if scatter.mask is None else right(scatter.mask)
            if not self.values.same(left(mask), wanted_mask) or not self.values.same(
                left(value), right(self.values.nests[st.buffer].body)
            ):
                continue
            ours = [mapped(e, ma) for e in index]
            theirs = [mapped(e, mb) for e in scatter.index]
            if all(self.values.same_index(x, y) for x, y in zip(ours, theirs, strict=True)):
                ok = True
                break
        if not ok:
            self.fail(f"buffer {st.buffer!r}: its indexed update is not the program's ({self._difference()})")
        shape = self.memory.layout(st.buffer).shape
        if (
            self.kernel.serial
            or is_injective(flat(st.index, contiguous_strides(shape)), loops)
            or all(v.extent == 1 for v in self.kernel.outer)
        ):
            return
        if not st.atomic or ordered:
            self.fail(
                f"buffer {st.buffer!r} may be updated twice in one element by loops that run side by side (neither atomic nor serial)"
            )

    def is_base(self, name: str, base: str, st: Store) -> bool:
        """The store is the copy of the base that an indexed update starts from."""
        if (
            type(st) is not Store
            or st.mode != "set"
            or st.mask is not None
            or any(isinstance(a, Val) for e in st.index for a in e.atoms())
        ):
            return False
        return self.values.same(self._renamed(st.value), load(base, st.index, self.buffers[base].dtype))
