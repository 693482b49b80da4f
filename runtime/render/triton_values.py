"""Scalar expressions and coordinates in Triton's language: one assignment a node, blocks of two kinds.

A value that depends on the outer loops only is a block `[XBLOCK, 1]`; one that depends on the loops of a phase is `[XBLOCK, RBLOCK]` (in a
kernel without inner loops, both are `[XBLOCK]`). float16 and bfloat16 are held in float32, rounded after each operation of that dtype.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...generated.languages import TRITON_LANGUAGE
from ...generated.scalars import REDUCTIONS, SCALARS, SCANS
from ...generated.triton_scalars import TRITON, TRITON_KIND
from ..ir.index import Atom, Expr, Quotient, Sym, Val, Var, bounds, of, product
from ..ir.nodes import FLOATS, Buffer, Node
from ..ir.quote import python_string
from ..kernels.operands import HALF
from ..kernels.plan import Reduce, Scan
from ..kernels.steps import flat_index
from ..tile.resident import ResidentRow
from ..tile.runs import runs

IMPORTS = (
    "import triton",
    "import triton.language as tl",
    "",
    "import opforge.generated.kernels.triton_prelude as tp",
    "",
    "",
)
TYPES = {name: dtype.value for name, dtype in TRITON_LANGUAGE.dtypes.items()}
LIMITS = {
    "uint8": (0, 255),
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
}
LIMITS["int64"] = (-(2**63), 2**63 - 1)
BARRIER = TRITON_LANGUAGE.barrier
APPROXIMATE = ("div", "erf", "exp", "reciprocal", "sigmoid", "tanh")  # scalars with a cheaper approximation
WIDE = (
    "pow",
)  # those of which float32 is some units in the last place off: a single value (a bias correction) can have them all
MANY = 256  # steps of a tile in a loop, or more
_INT32 = 2**31 - 1  # the largest that coordinates of 32 bits have
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def held(dtype: str) -> str:
    """The Triton type in which values of a dtype are held."""
    return "tl.float32" if dtype in HALF else TYPES[dtype]


def literal(value: float | int | bool) -> str:
    """A number as Triton's compiler reads it."""
    return (
        f'float("{value!r}")'
        if isinstance(value, float) and (value != value or abs(value) == float("inf"))
        else repr(value)
    )


def _short(n: Node) -> bool:
    """Whether a coordinate, or a number that it is compared with, fits 32 bits."""
    if n.op == "const":
        return n.dtype == "int64" and abs(n.attr) <= _INT32
    if n.op != "index" or not any(isinstance(a, Var) for a in n.attr.atoms()):
        return False
    lo, hi = bounds(n.attr)
    return lo is not None and hi is not None and lo >= -_INT32 and hi <= _INT32


def _exact_inverse(n: Node) -> float | None:
    """What a division by a power of two multiplies by: both round the same number. None for other divisors."""
    divisor = n.args[1].attr if n.args[1].op == "const" else 0.0
    if n.dtype not in ("float32", "float64") or not isinstance(divisor, float) or abs(math.frexp(divisor)[0]) != 0.5:
        return None
    return 1.0 / divisor if 2.0**-100 <= abs(divisor) <= 2.0**100 else None


def kind_of(dtype: str) -> str:
    return "float" if dtype in FLOATS else "bool" if dtype == "bool" else "int"


def settle(lines: list[str]) -> None:
    """Before a store over what is read: threads that hold the same element have each read it."""
    for line in reversed(lines):
        if line == BARRIER:
            return
        if "tl.load(" in line:
            break
    lines.append(BARRIER)


def paren(text: str) -> str:
    return text if text.isalnum() else f"({text})"


def identity_of(kind: str, dtype: str, scan: bool = False) -> str:
    """The literal that changes no result of a reduction, or of a scan."""
    value = (SCANS if scan else REDUCTIONS)[kind].identity[kind_of(dtype)]
    if isinstance(value, str):
        value = LIMITS[dtype][0 if value == "lowest" else 1]
    if kind_of(dtype) == "float":
        value = float(value)
    return literal(value)


def is_position(st: Reduce | Scan) -> bool:
    """Whether the result is a place, not a value."""
    return st.kind in ("argmax", "argmin")


def steps(int64_index: bool, start: str = "") -> str:
    """The inner index of a tile."""
    numbers = "tl.arange(0, RBLOCK)[None, :]"
    text = f"{start} + {numbers}" if start else numbers
    return f"({text}).to(tl.int64)" if int64_index else text


def steps_there(group: int, count: str, whole: bool, tiles: str = "RBLOCK") -> str:
    """Which steps of a tile there are: all of them where whole tiles make up the loop. `whole`: one tile holds the loop. `tiles`: the steps
    that the loop goes through at once.
    """
    some = f"rindex{group} < {count}"
    n = int(count) if count.isdigit() else 3
    if n == 0 or (n % MANY if not whole else n & (n - 1)):
        return some  # tiles are powers of two, and none of them fills a loop of no steps
    return f"tl.full([1, RBLOCK], True, tl.int1) if {count} % {tiles} == 0 else {some}"


def slow_digits(loops: tuple[Var, ...]) -> dict[Var, tuple[int, str]]:
    """For loops with others inside of them, how many places of the common index have one digit, and that of a tile's first place."""
    slow: dict[Var, tuple[int, str]] = {}
    step = product(v.extent for v in loops)
    for v in loops[:-1]:
        if not isinstance(step, int) or not isinstance(v.extent, int):
            break
        step //= v.extent
        slow[v] = step, f"roffset // {step}" if v is loops[0] else f"(roffset // {step}) % {v.extent}"
    return slow


@dataclass
class Scope:
    """Where code goes. `names` are the values already computed, by node."""

    lines: list[str]
    names: dict[Node, str] = field(default_factory=dict)


@dataclass
class Values:
    """Emits nodes: what depends on the loops of the current phase (`inner`) in `inner_scope`, all else in `outer_scope`.

    layouts      shape, strides and dtype of each global buffer; `local` the variable of each register and tile.
    int64_index  whether coordinates need 64 bits.
    approximate  values that may be approximations.
    eviction     Triton's eviction policy for rows of a buffer.
    resident     loads of rows of which a part stays in registers.
    loops        the inner loops, and last their common index.
    slow         loops whose digit of the inner index is one for a whole tile if RBLOCK divides a number: that number, and a name for that digit.
    uniform      loops that a program is at one point of: what depends on nothing else is one element.
    across       the loops along the first dimension of a block, and `along` those along its last; `each` neighbours are loaded by a thread at once.
    """

    layouts: Mapping[str, Buffer]
    outer_scope: Scope
    inner_scope: Scope
    two_dim: bool
    int64_index: bool
    inner: frozenset[Var] = frozenset()
    uniform: frozenset[Var] = frozenset()
    loops: tuple[Var, ...] = ()
    local: dict[str, str] = field(default_factory=dict)
    loop_names: dict[Atom, str] = field(default_factory=dict)
    inner_mask: str = ""
    across: tuple[Var, ...] = ()
    along: tuple[Var, ...] = ()
    each: int = 4
    inner_tiles: set[str] = field(default_factory=set)
    approximate: frozenset[Node] = frozenset()
    eviction: dict[str, str] = field(default_factory=dict)
    resident: Mapping[Node, ResidentRow] = field(default_factory=dict)
    slow: dict[Var, tuple[int, str]] = field(default_factory=dict)
    counter: int = 0
    constants: list[str] = field(default_factory=list)
    constant_names: dict[tuple[str, str], str] = field(default_factory=dict)

    def fresh(self) -> str:
        self.counter += 1
        return f"v{self.counter - 1}"

    def is_inner(self, n: Node) -> bool:
        return not self.inner.isdisjoint(n.vars()) or any(ld.attr.buffer in self.inner_tiles for ld in n.loads())

    # -- scalars ---------------------------------------------------------------------------------------------------
    def node(self, root: Node) -> str:
        """Emit what is missing of an expression; returns the variable (or constant) that holds it."""
        for n in root.walk(lambda n: n in self.outer_scope.names or n in self.inner_scope.names):
            if n.op == "const":
                self.outer_scope.names[n] = self.constant(n.attr, n.dtype)
                continue
            if n.op == "load" and n.attr.buffer in self.local:
                scope = self.inner_scope if n.attr.buffer in self.inner_tiles else self.outer_scope
                scope.names[n] = self.local[n.attr.buffer]
                continue
            scope = self.inner_scope if self.is_inner(n) else self.outer_scope
            name = self.fresh()
            scope.lines.append(f"{name} = {self.load(n) if n.op == 'load' else self.scalar(n)}")
            scope.names[n] = name
            if (row := self.resident.get(n)) is not None and row.first:
                scope.lines.append(f"{row.tiles} = {row.tiles} + ({name},) if roffset < {row.steps} else {row.tiles}")
        return self.named(root)

    def named(self, n: Node) -> str:
        return self.inner_scope.names[n] if n in self.inner_scope.names else self.outer_scope.names[n]

    def constant(self, value: float | int | bool, dtype: str) -> str:
        """Typed constants, so that every scalar function knows its argument's type. Defined at the top of the kernel."""
        key = (literal(value), held(dtype))
        if key not in self.constant_names:
            self.constant_names[key] = f"c{len(self.constant_names)}"
            shape = "[1, 1]" if self.two_dim else "[1]"
            full = f"tl.full({shape}, {key[0]}, {key[1]})"
            if key[0] == "-0.0":  # Triton fills with 0.0 for every zero
                full = f"tl.full({shape}, 0.0, {key[1]}) * -1.0"
            self.constants.append(f"{self.constant_names[key]} = {full}")
        return self.constant_names[key]

    def constants_in(self, lines: Sequence[str]) -> list[str]:
        """The definitions of the constants that the lines use."""
        used = set(re.findall(r"\bc\d+\b", "\n".join(lines)))
        return [line for line in self.constants if line.partition(" ")[0] in used]

    def scalar(self, n: Node) -> str:
        if n.op == "index":
            lo, hi = bounds(n.attr)
            int64_index = self.int64_index or lo is None or hi is None or lo < -_INT32 or hi > _INT32
            text = self.expr(n.attr, int64_index)
            return text if int64_index else f"({text}).to(tl.int64)"
        if n.op in _COMPARE and all(map(_short, n.args)):
            a, b = (self.expr(x.attr) if x.op == "index" else repr(x.attr) for x in n.args)
            return f"({a}) {_COMPARE[n.op]} ({b})"
        args = [self.named(a) for a in n.args]
        if n.op == "bitcast":
            return self.bitcast(n, args[0])
        if n.op == "bounded":
            return self.bounded(n, args)
        if n.op == "div" and (inverse := _exact_inverse(n)) is not None:
            return f"({args[0]} * {self.constant(inverse, n.dtype)})"
        if n.op in APPROXIMATE and n in self.approximate:
            return f"tp.coarse_{n.op}({', '.join(args)})"
        if (n.op, "row") in TRITON_KIND and (row := self.row(n, args)) is not None:
            return row
        spelled = TRITON_KIND.get((n.op, kind_of(n.args[0].dtype))) if n.args else None
        spelled = spelled or TRITON[n.op]
        if n.op in WIDE and n.dtype == "float32" and not n.vars():
            doubles = (f"({a}).to(tl.float64)" for a in args)
            return f"({spelled.format(*doubles, T='tl.float64')}).to(tl.float32)"
        text = spelled.format(*args, T=TYPES[n.dtype])
        if n.dtype in HALF and n.op not in ("to_dtype", "where") and SCALARS[n.op].ulp != 0:
            return f"tp.to_dtype({text}, {TYPES[n.dtype]})"
        return text

    def row(self, n: Node, args: list[str]) -> str | None:
        """The scalar at once for neighbours, if they have consecutive values of the last argument, and one value of each other."""
        *others, last = n.args
        if last.op != "index" or any(self.depends(a) != (False, False) for a in others):
            return None
        spelled = TRITON_KIND[n.op, "row"]
        if runs(last.attr, self.along):
            return spelled.format(*args, T=TYPES[n.dtype], L=self.each)
        if self.two_dim and runs(last.attr, self.across):
            turned = spelled.format(*args[:-1], f"tl.trans({args[-1]})", T=TYPES[n.dtype], L=self.each)
            return f"tl.trans({turned})"
        return None

    def bounded(self, n: Node, args: list[str]) -> str:
        """A position that data brings: where it counts and is out of range the kernel ends by a device-side assertion."""
        live = ["xmask"] + ([self.inner_mask] if self.is_inner(n) else [])
        if not (n.args[2].op == "const" and n.args[2].attr):
            live.append(args[2])
        error, message = n.attr
        return f"tp.bounded({args[0]}, {args[1]}, {' & '.join(live)}, {python_string(f'{error}: {message}')})"

    def bitcast(self, n: Node, arg: str) -> str:
        source, target = n.args[0].dtype, n.dtype
        stored = f"({arg}).to({TYPES[source]})" if source in HALF else arg
        text = f"tp.bitcast({stored}, {TYPES[target]})"
        return f"({text}).to(tl.float32)" if target in HALF else text

    # -- memory ----------------------------------------------------------------------------------------------------
    def load(self, n: Node) -> str:
        """A load; one element for the whole tile where the tile ends before the coordinates of any change."""
        block, moving = self._load(n), n.vars() & self.inner
        if (row := self.resident.get(n)) is not None:
            return block if row.first else f"{row.tiles}[roffset // RBLOCK] if roffset < {row.steps} else {block}"
        if n.args or not moving or not moving <= self.slow.keys():
            return block
        if any(isinstance(a, Val) for e in n.attr.index for a in e.atoms()):
            return block
        inner, names = self.inner, self.loop_names
        lead = "" if n.vars() - moving else "xindex * 0 + "  # a block like its mask
        self.inner, self.loop_names = inner - moving, names | {v: f"({lead}{self.slow[v][1]})" for v in moving}
        one = self._load(n)
        self.inner, self.loop_names = inner, names
        return f"({one}) if {min(self.slow[v][0] for v in moving)} % RBLOCK == 0 else ({block})"

    def _load(self, n: Node) -> str:
        where = flat_index(n.attr.index, self.layouts[n.attr.buffer])
        depends = self.depends(n)
        if depends == (False, False):
            # One element, which every program has a use for.
            text = f"tl.load({n.attr.buffer} + {self.place(where, depends)})"
            text = f"tl.broadcast_to({text}, {'[1, 1]' if self.two_dim else '[1]'})"
            return f"{text}.to(tl.float32)" if n.dtype in HALF else f"({text} != 0)" if n.dtype == "bool" else text
        policy = self.eviction.get(n.attr.buffer) if depends[1] else None
        hint = "" if policy is None else f', eviction_policy="{policy}"'
        if (row := self.resident.get(n)) is not None and row.first:
            hint = f', eviction_policy="evict_first" if roffset < {row.steps} else "{policy}"'
        text = f"tl.load({n.attr.buffer} + {self.place(where, depends)}, {self.mask(n)}, other=0{hint})"
        if n.dtype in HALF:
            return f"{text}.to(tl.float32)"
        return f"({text} != 0)" if n.dtype == "bool" else text

    def mask(self, n: Node) -> str:
        """Where a load happens: inside the loops that it depends on, and where its own mask says so."""
        x, r = self.depends(n)
        parts = (
            (["xmask"] if x else []) + ([self.inner_mask] if r else []) + ([self.named(n.args[0])] if n.args else [])
        )
        return " & ".join(parts)

    def depends(self, n: Node) -> tuple[bool, bool]:
        """Whether the value's block has the outer (and the inner) dimension. A load under a mask always has one: masks are blocks."""
        tiles = any(ld.attr.buffer in self.inner_tiles for ld in n.loads())
        r = tiles or not self.inner.isdisjoint(n.vars())
        x = (
            tiles
            or not (self.inner | self.uniform >= n.vars())
            or any(ld.attr.buffer in self.local for ld in n.loads())
        )
        return (x or not r, r) if any(ld.args for ld in n.loads()) else (x, r)

    def place(self, where: Expr, depends: tuple[bool, bool]) -> str:
        """An offset as a block of the dimensions in `depends`, which may be more than its own."""
        where = self.by_common_index(where)
        x = r = False
        for a in where.atoms():
            if isinstance(a, Var):
                x, r = x or not (a in self.inner or a in self.uniform), r or a in self.inner
            elif isinstance(a, Val):
                vx, vr = self.depends(a.node)
                x, r = x or vx, r or vr
        text = self.expr(where)
        if (x, r) == depends:
            return f"({text})"
        if not self.two_dim:
            return f"(xindex * 0 + {text})"
        x, r = depends
        none = "xindex * 0" if x else "tl.full([1, 1], 0, tl.int32)"
        return f"tl.broadcast_to({none} + {text}, [{'XBLOCK' if x else '1'}, {'RBLOCK' if r else '1'}])"

    def by_common_index(self, where: Expr) -> Expr:
        """The place by the common index of the inner loops, where it counts them in order."""
        *loops, whole = self.loops or (None,)
        step = where.coefficient(loops[-1]) if len(loops) > 1 else None
        if whole is None or step is None or not step.is_const or step == 0:
            return where
        rest, weight = where, step
        for v in reversed(loops):
            if where.coefficient(v) != weight:
                return where
            rest, weight = rest - of(v) * weight, weight * v.extent
        return rest + of(whole) * step

    # -- coordinates -----------------------------------------------------------------------------------------------
    def expr(self, e: Expr, int64_index: bool | None = None) -> str:
        """An index expression as Triton arithmetic. Division is C's there, so floors of what may be negative are spelled out."""
        int64_index = self.int64_index if int64_index is None else int64_index
        out = ""
        for monomial, c in e.terms:
            factors = [self.atom(a, int64_index) for a in monomial]
            if not factors or abs(c) != 1:
                factors.append(str(abs(c)))
            text = " * ".join(factors)
            out += f" - {text}" if c < 0 and out else f"-{text}" if c < 0 else f" + {text}" if out else text
        return out or "0"

    @staticmethod
    def bound(count: str) -> str:
        """The end of a loop. A number that 32 bits hold unsigned Triton takes for such a one, and the loop compares signed ones."""
        return f"tl.full([], {count}, tl.int64)" if count.isdigit() and int(count) >= 1 << 31 else count

    def atom(self, a: Atom, int64_index: bool) -> str:
        if isinstance(a, Val):
            return self.named(a.node)
        if isinstance(a, Sym):
            return a.name
        if isinstance(a, Var):
            name = self.loop_names[a]
            return f"{name}.to(tl.int64)" if int64_index and not self.int64_index else name
        assert isinstance(a, Quotient)
        num, den = f"({self.expr(a.num, int64_index)})", self.expr(a.den, int64_index)
        den = den if a.den.is_const or a.den.atom is not None else f"({den})"
        lo = bounds(a.num)[0]
        if lo is not None and lo >= 0:
            return f"({num} {a.kind} {den})"
        remainder = f"(({num} % {den} + {den}) % {den})"
        return remainder if a.kind == "%" else f"(({num} - {remainder}) // {den})"
