"""C++ from kernels: one function per kernel, vectorized over one loop, parallel over the outer ones.

The text relies on the generated prelude for vectors, conversions and mathematics; everything here is loops, addresses and scopes.
A value is computed in the outermost scope where all that it depends on is known (so rows' constants leave the inner loop).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...generated.cpp_scalars import CPP_KIND
from ...generated.languages import CPP_LANGUAGE
from ...generated.scalars import REDUCTIONS
from ...generated.targets import CpuTarget
from ..ir.index import Atom, Expr, Monomial, Quotient, Sym, Val, Var, expr, of, proves_nonnegative
from ..ir.nodes import ITEMSIZE, Buffer, Node
from ..kernels.plan import Kernel, Reduce, Scan, Store
from ..kernels.statements import kernel_checks
from ..tile.loops import FlatKernel, FlatPhase, FlatStatement, Lanes, best_inner, choose_lanes, flatten
from .cpp_pieces import START
from .cpp_sizes import by_loops, is_size, needs_name, quotient_text, sum_text, without_common
from .cpp_tables import CppTables

MEMORY = {name: dtype.memory for name, dtype in CPP_LANGUAGE.dtypes.items()}
COMPUTE = {name: dtype.register for name, dtype in CPP_LANGUAGE.dtypes.items()}
FAULT = "opf_fault"  # the variable of a kernel that remembers a position out of range
# Partial sums are flushed after this many additions, as the specs declare (one number for all: the generator looks). Eager adds as many one after
# another (`SumKernel.cpp`), and then pairwise in the same dtype: with equal blocks and wider totals the error is at most eager's. A block of 32
# lost twice as much.
BLOCK = next(entry.cpp.block for entry in REDUCTIONS.values() if entry.cpp is not None)


@dataclass
class Scope:
    """Open braces: what is written, which loop variables are bound, which values are already computed."""

    lines: list[str]
    indent: int
    bound: set[Var]
    names: dict[Node, tuple[str, bool]] = field(default_factory=dict)
    pragma: str = ""  # for the next block opened here
    sealed: bool = False  # a loop that is collapsed with the next one: nothing may stand between them
    after_writes: bool = False  # values that depend on what this kernel wrote may be read from here on


class Writer:
    """Emits the body of one kernel."""

    def __init__(
        self,
        fk: FlatKernel,
        layouts: Mapping[str, Buffer],
        tables: CppTables,
        target: CpuTarget,
        threads_hint: int,
        threshold: int,
    ):
        self.fk, self.layouts, self.tables, self.target, self.lanes = fk, layouts, tables, target, target.lanes
        self.threads, self.threshold = threads_hint, threshold
        self.choice = choose_lanes(fk, self.lanes) if self.lanes > 1 else Lanes("none")
        self.scopes: list[Scope] = [Scope([], 1, set())]
        self.counter = 0
        self.written = set(fk.kernel.writes) | {b.name for b in fk.kernel.scratch}
        self.tile_shapes = {b.name: b for b in fk.kernel.scratch}
        self.lane_var: Var | None = None  # the variable that runs over the lanes here
        self.count: str | None = None  # how many lanes are live (None: all)
        self.tile_start: str | None = None  # outer mode: first element of the tile
        self.tile = target.budgets.column  # outer elements handled together when a column is reduced
        self.register_lane = False  # registers are small arrays of vectors, indexed by q
        self.depends: dict[Node, bool] = {}
        self.checks = kernel_checks(fk.kernel)
        self.sizes = frozenset((*fk.kernel.symbols, START))
        self.size_names: dict[Expr, str] = {}

    # -- text ----------------------------------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        scope = self.scopes[-1]
        if text.startswith("#pragma"):
            # Values may still be hoisted in front of the loop: the pragma is written with its head.
            scope.pragma = text
            return
        scope.lines.append("    " * scope.indent + text)

    @contextmanager
    def block(self, head: str, *bound: Var, after_writes: bool = False, sealed: bool = False) -> Iterator[Scope]:
        outer = self.scopes[-1]
        pragma, outer.pragma = outer.pragma, ""
        scope = Scope([], outer.indent + 1, outer.bound | set(bound), sealed=sealed)
        scope.after_writes = after_writes or outer.after_writes
        self.scopes.append(scope)
        yield scope
        self.scopes.pop()
        pad = "    " * outer.indent
        if pragma:
            outer.lines.append(f"{pad}{pragma}")
        outer.lines.append(f"{pad}{head} {{" if head else f"{pad}{{")
        outer.lines += scope.lines
        outer.lines.append(f"{pad}}}")

    def fresh(self, stem: str = "t") -> str:
        self.counter += 1
        return f"{stem}{self.counter}"

    # -- values --------------------------------------------------------------------------------------------------------
    def local(self, node: Node) -> bool:
        """Whether the value depends on what this kernel computed or wrote before."""
        for n in node.walk(self.depends.__contains__):
            own = n.op == "load" and (not n.attr.index or n.attr.buffer in self.written)
            self.depends[n] = own or any(self.depends[c] for c in n.children())
        return self.depends[node]

    def per_lane(self, node: Node) -> bool:
        """Whether lanes differ: through the lane variable, or through a per-lane register of outer mode."""
        if self.lane_var is None:
            return False
        if self.lane_var in node.vars():
            return True
        if self.choice.mode != "outer" or not self.local(node):
            return False
        return any(n.op == "load" and (not n.attr.index or n.attr.buffer in self.tile_shapes) for n in node.loads())

    def value(self, node: Node) -> tuple[str, bool]:
        """Name of the C++ value of a node, and whether it is a vector."""
        for scope in reversed(self.scopes):
            if node in scope.names:
                return scope.names[node]
        for n in node.walk(lambda n: any(n in s.names for s in self.scopes)):
            self._emit(n)
        return self.value(node)

    def _home(self, node: Node) -> Scope:
        needs = node.vars()
        local = self.local(node)
        vector = self.per_lane(node)
        for scope in self.scopes:
            if (
                not scope.sealed
                and needs <= scope.bound
                and (not local or scope.after_writes)
                and (not vector or self.lane_var in scope.bound)
            ):
                return scope
        return self.scopes[-1]

    def _find(self, node: Node) -> tuple[str, bool]:
        for scope in reversed(self.scopes):
            if node in scope.names:
                return scope.names[node]
        raise KeyError(node.text)

    def _emit(self, node: Node) -> None:
        vector = self.per_lane(node)
        home = self._home(node)
        if node.op == "const":
            home.names[node] = (literal(node.attr, node.dtype), False)
            return
        text = self._text(node, vector)
        name = self.fresh()
        home.lines.append("    " * home.indent + f"const auto {name} = {text};")
        home.names[node] = (name, vector)

    def _text(self, node: Node, vector: bool) -> str:
        if node.op == "index":
            return self.index_vector(node.attr) if vector else f"(int64_t)({self.address(node.attr)})"
        if node.op == "load":
            return self._load(node, vector)
        if vector and (row := self._counting(node)) is not None:
            return row
        args = []
        for a in node.args:
            text, is_vector = self._find(a)
            args.append(f"splat<{COMPUTE[a.dtype]}>({text})" if vector and not is_vector else text)
        if node.op == "bounded":
            if vector and self.count is not None:  # lanes past the end hold anything
                args[2] = f"({args[2]} & lane_mask({self.count}))"
            return f"bounded({', '.join(args)}, &{FAULT}, {self.checks[node.attr]})"
        return self.tables.call(node, args, vector)

    def _counting(self, node: Node) -> str | None:
        """The scalar's spelling for lanes that differ only in a last argument which counts up by one; None where they do not."""
        spelled = CPP_KIND.get((node.op, "row"))
        if spelled is None or node.args[-1].op != "index" or self.step(node.args[-1].attr) != 1:
            return None
        others = [self._find(a) for a in node.args[:-1]]
        if any(is_vector for _, is_vector in others):
            return None
        return spelled.format(*(text for text, _ in others), f"(int64_t)({self.address(node.args[-1].attr)})")

    def _load(self, node: Node, vector: bool) -> str:
        name = node.attr.buffer
        if not node.attr.index:
            if self.register_lane:
                return f"{name}[q]"
            if self.tile_start is None:
                return name
            return f"loadu({name} + ({self.lane_text()} - {self.tile_start}))"
        e = node.attr.index[0]
        pointer = name
        unit = self.lane_var
        if name in self.tile_shapes and self.choice.mode == "outer":
            # A scratch tile here holds all lanes for each of its elements.
            width, first = (
                (self.lanes, "0")
                if self.tile_start is None
                else (self.tile, f"({self.lane_text()} - {self.tile_start})")
            )
            mask = self._find(node.args[0]) if node.args else None
            live = f"lane_mask({self.count})" if self.count is not None else ""
            if mask is not None:
                holds = mask[0] if mask[1] else f"splat<bool>({mask[0]})"
                live = f"({live or 'all_lanes()'} & {holds})"
            if self.step(e) != 0:  # each lane reads its own element
                own = f"{self.index_vector(e)} * splat<int64_t>({width}) + iota<int64_t>()"
                return f"gather({name} + {first}, {own}, {live or 'all_lanes()'})"
            at = f"{name} + ({self.address(e)}) * {width} + {first}"
            if mask is None:
                return f"loadu({at})"
            # Where the condition does not hold the element may lie outside of the tile: its address is not read at all.
            return (
                f"load_where({at}, {live})"
                if mask[1]
                else f"({mask[0]} ? loadu({at}) : splat<{COMPUTE[node.dtype]}>(0))"
            )
        mask = self._find(node.args[0]) if node.args else None
        if not vector:
            at = f"{pointer}[{self.address(e)}]"
            if mask is not None:
                return f"{mask[0]} ? cast<{COMPUTE[node.dtype]}>({at}) : {COMPUTE[node.dtype]}(0)"
            return f"cast<{COMPUTE[node.dtype]}>({at})" if MEMORY[node.dtype] != COMPUTE[node.dtype] else at
        assert unit is not None
        c = self.step(e)
        if mask is not None and (mask[1] or c is None or not (c == 1 or c == 0)):
            lanes_mask = mask[0] if mask[1] else f"splat<bool>({mask[0]})"
            if self.count is not None:
                lanes_mask = f"({lanes_mask} & lane_mask({self.count}))"
            if c is not None and c == 1:
                return f"load_where({pointer} + {self.address(e)}, {lanes_mask})"
            return f"gather({pointer}, {self.index_vector(e)}, {lanes_mask})"
        if c is not None and c == 0:
            # Only the mask differs between lanes or the load is inside a per-lane expression: one load for all lanes.
            at = f"cast<{COMPUTE[node.dtype]}>({pointer}[{self.address(e)}])"
            one = f"({mask[0]} ? {at} : {COMPUTE[node.dtype]}(0))" if mask is not None else at
            return f"splat<{COMPUTE[node.dtype]}>({one})"
        if c is not None and c == 1:
            n = f", {self.count}" if self.count is not None else ""
            text = f"loadu({pointer} + {self.address(e)}{n})"
        elif c is not None:
            n = self.count or str(self.lanes)
            text = f"load_strided({pointer} + {self.address(e)}, {self.address(c)}, {n})"
        else:
            live = f"lane_mask({self.count})" if self.count is not None else "all_lanes()"
            text = f"gather({pointer}, {self.index_vector(e)}, {live})"
        if mask is not None:
            text = f"({mask[0]} ? {text} : splat<{COMPUTE[node.dtype]}>(0))"
        return text

    # -- addresses -----------------------------------------------------------------------------------------------------
    def address(self, e: Expr) -> str:
        """An index expression as C++ (with the lane variable at the first lane)."""
        if parts := by_loops(e, self.sizes):
            return " + ".join(self._part(loops, factor) for loops, factor in parts)
        return sum_text(e, self._atom)

    def _part(self, loops: Monomial, factor: Expr) -> str:
        """A term of an address: a sum of sizes, times loop variables."""
        factors = [self._atom(a) for a in loops]
        if needs_name(factor):
            times, rest = without_common(factor)
            factors = [self._named(rest, lambda: sum_text(rest, self._atom)), *factors]
            factors += [str(times)] if times != 1 else []
        elif factor != 1 or not loops:
            text = sum_text(factor, self._atom)
            factors.append(f"({text})" if loops and text.startswith("-") else text)
        return " * ".join(factors)

    def _named(self, e: Expr, text: Callable[[], str]) -> str:
        """The name of a value that only sizes decide: it is computed where the kernel begins."""
        if e in self.size_names:
            return self.size_names[e]
        value = text()
        if e not in self.size_names:  # a sum of one quotient has the quotient's own name by now
            self.size_names[e] = f"factor{len(self.size_names) + 1}"
            self.scopes[0].lines.append(f"    const int64_t {self.size_names[e]} = {value};")
        return self.size_names[e]

    def _atom(self, a: Atom) -> str:
        if isinstance(a, (Var, Sym)):
            return a.name
        if isinstance(a, Val):
            text, is_vector = self._find(a.node) if any(a.node in s.names for s in self.scopes) else self.value(a.node)
            assert not is_vector, "an indirect index that differs between lanes is a vector"
            return f"(int64_t){text}"
        assert isinstance(a, Quotient)
        if is_size(a, self.sizes):
            return self._named(of(a), lambda: quotient_text(a, lambda e: sum_text(e, self._atom)))
        return quotient_text(a, self.address)

    def lane_text(self) -> str:
        assert self.lane_var is not None
        return self.lane_var.name

    def step(self, e: Expr) -> Expr | None:
        """What an index grows by from one lane to the next; None where that is not one number."""
        assert self.lane_var is not None
        # A register of outer mode has one value per lane without mentioning the lane variable.
        if any(isinstance(a, Val) and self.per_lane(a.node) for a in e.atoms()):
            return None
        return e.coefficient(self.lane_var)

    def index_vector(self, e: Expr) -> str:
        """An index expression with one value per lane, as a vector of int64."""
        assert self.lane_var is not None
        c = self.step(e)
        if c is not None:
            base = f"splat<int64_t>({self.address(e)})"
            return base if c == 0 else f"({base} + iota<int64_t>() * splat<int64_t>({self.address(c)}))"
        parts: list[str] = []
        for monomial, k in e.terms:
            factors = [self._atom_vector(a) for a in monomial]
            if k != 1 or not factors:
                factors.append(f"splat<int64_t>({k}L)")
            parts.append(" * ".join(factors))
        return f"({' + '.join(parts)})"

    def _atom_vector(self, a: Atom) -> str:
        if a is self.lane_var:
            return f"(splat<int64_t>({self.lane_text()}) + iota<int64_t>())"
        if isinstance(a, Val):
            text, is_vector = self.value(a.node)
            return f"cast<int64_t>({text})" if is_vector else f"splat<int64_t>((int64_t){text})"
        if (
            isinstance(a, Quotient)
            and self.lane_var is not None
            and any(c is None or c != 0 for c in (self.step(a.num), self.step(a.den)))
        ):
            name = "floordiv" if a.kind == "//" else "floormod"
            if proves_nonnegative(a.num):
                return f"({self.index_vector(a.num)} {'/' if a.kind == '//' else '%'} {self.index_vector(a.den)})"
            return f"{name}({self.index_vector(a.num)}, {self.index_vector(a.den)})"
        return f"splat<int64_t>({self._atom(a)})"


def literal(value: int | float | bool, dtype: str) -> str:
    if dtype == "bool":
        return "true" if value else "false"
    ctype = COMPUTE[dtype]
    if dtype in ("float16", "bfloat16", "float32", "float64"):
        number = float(value)
        if number != number:
            return f"nan_of<{ctype}>()"
        if number in (float("inf"), float("-inf")):
            return f"{'-' if number < 0 else ''}inf_of<{ctype}>()"
        return f"{ctype}({number.hex()})"
    if dtype == "int64" and value == -(2**63):
        return "INT64_MIN"
    return f"{ctype}({value}L)"


__all__ = [
    "BLOCK",
    "COMPUTE",
    "ITEMSIZE",
    "MEMORY",
    "FlatPhase",
    "FlatStatement",
    "Kernel",
    "Reduce",
    "Scan",
    "Store",
    "Writer",
    "best_inner",
    "expr",
    "flatten",
    "literal",
    "of",
]  # fmt: skip
