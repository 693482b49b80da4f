"""`verify(program)`: the rules of the loop IR, checked. Each mistake names the nest and the source line that it came from."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import IRError
from .facts import in_range, plausible, plausibly_equal
from .index import Expr, Sym, Val, Var, expr
from .learned import learned_by, names_in
from .nodes import DTYPES, FLOATS, INTS, Buffer, Extern, Nest, Node, Program, Ref, Size, refs
from .rules import check_loop, check_scalar


def verify(program: Program) -> None:
    """Raise IRError for the first rule that `program` breaks.

    Checked: single assignment, definition before use, ranks, dtypes (by the generated scalar tables), every index within its buffer
    or guarded by a mask, loop variables used only in their own nest, symbols declared, and learned before use, shapes and dtypes of mutations.
    """
    _Verifier(program).run()


class _Verifier:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.buffers: dict[str, Buffer] = {}
        self.symbols = set(program.symbols) - learned_by(program.items)
        self.where = "program"
        self.typed: set[Node] = set()
        self.sparse: set[str] = set()

    def fail(self, message: str) -> None:
        raise IRError(f"{self.where}: {message}")

    def run(self) -> None:
        known, first = self.symbols, self.program.items[:1]
        if first and isinstance(first[0], Extern) and not first[0].target:
            self.symbols = known | learned_by(first)  # what is computed of arguments' sizes may be one
        for b in self.program.inputs:
            self.where = f"input {b.name!r}"
            self.define(b, opaque=True)
        self.symbols = known
        for item in self.program.items:
            origin = f" ({item.origin})" if item.origin else ""
            if isinstance(item, Extern):
                self.where = f"extern {item.target!r}{origin}"
                self.extern(item)
            else:
                self.where = f"nest {item.name!r}{origin}"
                self.nest(item)
        self.ends()

    # -- buffers ---------------------------------------------------------------------------------------------------
    def define(self, b: Buffer, opaque: bool = False) -> None:
        """`opaque`: what only eager kernels make and read may have dtypes that no loop can (complex)."""
        if b.name in self.buffers:
            self.fail(f"{b.name!r} is defined twice")
        if b.dtype not in DTYPES and not opaque:
            self.fail(f"{b.dtype!r} is not a dtype of the loop IR")
        self.sizes(b.shape, "shape")
        if b.stride is not None:
            if len(b.stride) != len(b.shape):
                self.fail(f"{len(b.stride)} strides for {len(b.shape)} dimensions")
            self.sizes(b.stride, "stride", signed=True)
        self.sizes((b.offset,), "offset")
        self.buffers[b.name] = b

    def sizes(self, values: Iterable[Size], what: str, signed: bool = False) -> None:
        for n in values:
            if isinstance(n, int):
                if n < 0 and not signed:
                    self.fail(f"{what} {n} is negative")
                continue
            if n.is_const:
                self.fail(f"{what} {n} is a constant that was not made an int")
            for a in n.atoms():
                if isinstance(a, (Var, Val)):
                    self.fail(f"{what} {n} depends on {a}, which is not a size")
            self.declared(n)

    def declared(self, e: Expr) -> None:
        for a in e.atoms():
            if isinstance(a, Sym) and a.name not in self.symbols:
                self.fail(f"symbol {a.name!r} is not declared by the program")
            if isinstance(a, Var) and isinstance(a.extent, Expr):
                self.declared(a.extent)

    def read(self, name: str) -> Buffer:
        found = self.buffers.get(name)
        if found is None:
            later = any(name in _defines(i) for i in self.program.items)
            self.fail(f"buffer {name!r} is read before it is defined" if later else f"buffer {name!r} is not defined")
        return found  # type: ignore[return-value]

    # -- items -----------------------------------------------------------------------------------------------------
    def extern(self, call: Extern) -> None:
        for r in refs((call.args, tuple(v for _, v in call.kwargs))):
            b = self.read(r.buffer)
            if r.stride is not None and len(r.stride) != len(b.shape):
                self.fail(f"argument {r.buffer!r} has {len(r.stride)} strides for {len(b.shape)} dimensions")
        if call.single and len(call.outs) > 1:
            self.fail(f"{len(call.outs)} results of a kernel that returns one")
        if call.places and (len(call.places) != len(call.outs) or list(call.places) != sorted(set(call.places))):
            self.fail(f"{len(call.outs)} results at the places {list(call.places)}")
        if call.writes:
            self.written(call)
        self.learn(call)
        for out in call.outs:
            if out.stride is None:
                self.sparse.add(out.name)
            self.define(out, opaque=True)

    def written(self, call: Extern) -> None:
        if call.writes != len(call.outs) or call.writes > len(call.args):
            self.fail(f"it writes into {call.writes} of {len(call.args)} arguments and has {len(call.outs)} results")
        for before, out in zip(call.args, call.outs, strict=False):
            if not isinstance(before, Ref):
                if before is not None:
                    self.fail(f"it writes into {before!r}")
                continue
            b = self.read(before.buffer)
            if (b.shape, b.dtype) != (out.shape, out.dtype):
                self.fail(f"{out.name!r} is {out.dtype}{list(out.shape)}, it writes into {b.dtype}{list(b.shape)}")

    def learn(self, call: Extern) -> None:
        """Sizes that the call brings, and conditions on them."""
        shapes = {b.name: b.shape for b in call.outs}
        for s in call.learns:
            if s.symbol in self.symbols or s.symbol not in self.program.symbols:
                self.fail(f"symbol {s.symbol!r} is learned twice, or not declared by the program")
            if s.source:
                self.known(s.source)
            elif s.buffer:
                shape = shapes.get(s.buffer, ())
                atom = expr(shape[s.dim]).atom if 0 <= s.dim < len(shape) else None
                own = isinstance(atom, Sym) and atom.name == s.symbol
                if not own and not (s.dim < len(shape) and any(s.symbol in names_in(d) for d, _ in call.demands)):
                    self.fail(f"symbol {s.symbol!r} is not size {s.dim} of result {s.buffer!r}, nor checked to be it")
            elif call.outs or not call.target:
                self.fail(f"symbol {s.symbol!r} is no number that the call returns")
            self.symbols.add(s.symbol)
        for source, _ in call.demands:
            self.known(source)

    def known(self, source: str) -> None:
        if missing := names_in(source) - self.symbols:
            self.fail(f"{source!r} needs {', '.join(sorted(missing))}, which is not known here")

    def nest(self, nest: Nest) -> None:
        if len(nest.vars) != len(nest.shape):
            self.fail(f"{len(nest.vars)} coordinates for shape {list(nest.shape)}")
        for k, (v, n) in enumerate(zip(nest.vars, nest.shape, strict=True)):
            if v.var is None:
                if v != 0 or n != 1:
                    self.fail(
                        f"coordinate {k} is {v}; it must be a variable, or 0 for a dimension of size 1 (this one has size {n})"
                    )
            elif expr(v.var.extent) != expr(n):
                self.fail(f"variable {v.var.name!r} runs to {v.var.extent} over a dimension of size {n}")
        self.distinct((*nest.loop_vars, *nest.rvars))
        if nest.rvars and nest.reduce is None:
            self.fail("reduction variables without a reduction")
        kinds = sum(k is not None for k in (nest.reduce, nest.scan, nest.scatter))
        if kinds > 1:
            self.fail("only one of reduce, scan and scatter may be set")
        loops = {*nest.loop_vars, *nest.rvars}
        if nest.scan is not None and not 0 <= nest.scan_dim < len(nest.shape):
            self.fail(f"scan along dimension {nest.scan_dim} of {len(nest.shape)}")
        if nest.scatter is not None:
            loops = set(nest.scatter.domain)
            self.scatter(nest, loops)
        self.scalar(nest.body, loops)
        if nest.reduce is not None or nest.scan is not None:
            check_loop(nest.reduce or nest.scan or "", nest.body.dtype, nest.dtype, nest.scan is not None, self.fail)
        elif nest.body.dtype != nest.dtype:
            self.fail(f"the value is {nest.body.dtype}, the buffer {nest.dtype}")
        self.define(Buffer(nest.name, nest.shape, nest.dtype, nest.stride))

    def scatter(self, nest: Nest, loops: set[Var]) -> None:
        s = nest.scatter
        assert s is not None
        base = self.read(s.base)
        if (base.shape, base.dtype) != (nest.shape, nest.dtype):
            self.fail(
                f"the base {s.base!r} is {base.dtype}{list(base.shape)}, the result {nest.dtype}{list(nest.shape)}"
            )
        self.distinct(s.domain)
        if s.mode != "set":
            check_loop(s.mode, nest.dtype, nest.dtype, False, self.fail)
        if len(s.index) != len(nest.shape):
            self.fail(f"{len(s.index)} indices into shape {list(nest.shape)}")
        if s.mask is not None:
            self.scalar(s.mask, loops)
            if s.mask.dtype != "bool":
                self.fail(f"the mask of the update is {s.mask.dtype}, not bool")
        for k, (e, n) in enumerate(zip(s.index, nest.shape, strict=True)):
            self.index(e, loops)
            if not self.within(e, n) and s.mask is None:
                self.fail(f"index {k} of the update, {e}, is not within 0..{n} - 1, and no mask guards it")

    def distinct(self, vars_: Iterable[Var]) -> None:
        seen: set[str] = set()
        for v in vars_:
            if v.name in seen:
                self.fail(f"two loops are called {v.name!r}")
            seen.add(v.name)
            self.sizes((v.extent,), f"extent of {v.name!r}")

    # -- expressions -----------------------------------------------------------------------------------------------
    def index(self, e: Expr, loops: set[Var]) -> None:
        self.declared(e)
        for a in sorted(e.atoms(), key=lambda a: a.text):
            if isinstance(a, Var) and a not in loops and a.extent != 1:
                self.fail(f"{a.name!r} (< {a.extent}) is not a loop of this nest")
            if isinstance(a, Val):
                if a.node.dtype not in INTS:
                    self.fail(f"an index is {a.node.dtype}, not an integer")
                if a.lo is not None and a.hi is not None and a.lo > a.hi + 1:
                    self.fail(f"an index promises to lie in {a.lo}..{a.hi}")

    def within(self, e: Expr, n: Size) -> bool:
        return in_range(e, n) or plausible(e, n)

    def scalar(self, root: Node, loops: set[Var]) -> None:
        for n in root.walk():
            if n.dtype not in DTYPES:
                self.fail(f"{n.op!r} has dtype {n.dtype!r}")
            if n.op == "load":
                self.load(n, loops)
            elif n.op == "index":
                self.index(n.attr, loops)
                if n.dtype != "int64":
                    self.fail(f"an index used as a value is int64, not {n.dtype}")
            elif n.op == "const":
                self.constant(n)
            elif n not in self.typed:
                self.typed.add(n)
                check_scalar(n, self.fail)

    def load(self, n: Node, loops: set[Var]) -> None:
        b = self.read(n.attr.buffer)
        if b.name in self.sparse:
            self.fail(f"{n} reads an element of a tensor without strides")
        if n.dtype != b.dtype:
            self.fail(f"{n} is read as {n.dtype}, the buffer is {b.dtype}")
        if len(n.attr.index) != len(b.shape):
            self.fail(f"{n} has {len(n.attr.index)} coordinates, the buffer has shape {list(b.shape)}")
        if n.args and (len(n.args) > 1 or n.args[0].dtype != "bool"):
            self.fail(f"the mask of {n.attr} is not one bool")
        for e, size in zip(n.attr.index, b.shape, strict=True):
            self.index(e, loops)
            if not n.args and not self.within(e, size):
                self.fail(f"{n.attr}: index {e} is not within 0..{size} - 1, and no mask guards it")

    def constant(self, n: Node) -> None:
        expected = bool if n.dtype == "bool" else float if n.dtype in FLOATS else int
        if type(n.attr) is not expected:
            self.fail(f"constant {n.attr!r} of type {type(n.attr).__name__} has dtype {n.dtype}")

    # -- ends ------------------------------------------------------------------------------------------------------
    def ends(self) -> None:
        for k, out in enumerate(self.program.outputs):
            self.where = f"output {k}"
            if out.buffer is None:
                if isinstance(out.value, Expr):
                    self.declared(out.value)
                continue
            b = self.read(out.buffer)
            if out.stride is not None and len(out.stride) != len(b.shape):
                self.fail(f"{len(out.stride)} strides for {out.buffer!r} of shape {list(b.shape)}")
        inputs = {b.name for b in self.program.inputs}
        seen: set[str] = set()
        for target, source in self.program.mutations:
            self.where = f"mutation of {target!r}"
            if target not in inputs:
                self.fail("it is not an input")
            if target in seen:
                self.fail("it is mutated twice")
            seen.add(target)
            a, b = self.buffers[target], self.read(source)
            if a.dtype != b.dtype or not plausibly_equal(a.shape, b.shape):
                self.fail(f"{source!r} is {b.dtype}{list(b.shape)}, the input {a.dtype}{list(a.shape)}")


def _defines(item: Nest | Extern) -> tuple[str, ...]:
    return tuple(b.name for b in item.outs) if isinstance(item, Extern) else (item.name,)
