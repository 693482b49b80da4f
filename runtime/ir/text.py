"""The loop IR as text: `dump` writes a program in a stable form, which says all of it: tests read it back exactly.

    program
    symbol s0 = 16
    input x: float32[s0, 8] stride [8, 1]
    nest row: float32[s0] for (i0<s0) reduce sum over (r0<8) from "model.py:3 x.sum(1)"
      value x[i0, r0]
    extern y: float32[s0] stride [1] = ns.op.overload(&row, 2, flag=True)
    extern ns.op.without_results(&row) effect
    output y
    mutate x = …

A scalar expression is `op(args)`, followed by `:dtype` where that is not the last argument's dtype; a constant is `1.0:float32`, an index
used as a value `[i0 + 1]`, a load `x[i0, r0]` or `x[i0] if mask`, an indirect coordinate `at(node, lo, hi)`. Expressions used twice (or
deep ones) get a line of their own, `t0 = …`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import IRError
from .index import Expr, Quotient, Sym, Val, Var, of
from .learned import Learned
from .nodes import Buffer, Extern, Nest, Node, Output, Program, Ref, Size

_DEPTH = 6  # deeper expressions are cut into `t` lines


# -- writing -----------------------------------------------------------------------------------------------------------
def dump(program: Program) -> str:
    """The whole program, one statement a line. Raises IRError for what has no text (say, an unknown Python object in an extern call)."""
    buffers = {name: b.dtype for name, b in program.shapes().items()}
    hints = {
        a.name: a.hint
        for b in program.shapes().values()
        for n in b.shape
        if isinstance(n, Expr)
        for a in n.atoms()
        if isinstance(a, Sym)
    }
    lines = ["program"]
    for s in program.symbols:
        hint = hints.get(s)
        lines.append(f"symbol {s}" if hint is None else f"symbol {s} = {hint}")
    lines += [f"input {_buffer(b)}" for b in program.inputs]
    for item in program.items:
        lines += _extern(item) if isinstance(item, Extern) else dump_nest(item, buffers)
    for out in program.outputs:
        head = f"output {out.buffer}" if out.buffer is not None else f"output value {_data(out.value)}"
        lines.append(head + _stride(out.stride) + _paired(out))
    lines += [f"mutate {target} = {source}" for target, source in program.mutations]
    return "\n".join(lines) + "\n"


def dump_nest(nest: Nest, buffers: Mapping[str, str]) -> list[str]:
    """The lines of one nest; `buffers` gives the dtype of every buffer that it may read."""
    head = f"nest {nest.name}: {nest.dtype}{_sizes(nest.shape)}{_stride(nest.stride)} for {_loops(nest.vars)}"
    if nest.reduce is not None:
        head += f" reduce {nest.reduce}"
    if nest.rvars:
        head += f" over {_loops(of(v) if v.extent != 1 else v for v in nest.rvars)}"
    if nest.scan is not None:
        head += f" scan {nest.scan} dim {nest.scan_dim}"
    if nest.origin:
        head += f" from {json.dumps(nest.origin)}"
    if nest.cooperative:
        head += " cooperative"
    roots = [nest.body]
    scatter = nest.scatter
    if scatter is not None:
        roots = (
            [v.node for e in scatter.index for v in _vals(e)] + ([] if scatter.mask is None else [scatter.mask]) + roots
        )
    body = _Body(roots, buffers)
    lines = [head, *(f"  {line}" for line in body.lines)]
    if scatter is not None:
        mask = "" if scatter.mask is None else f" if {body.node(scatter.mask)}"
        index = ", ".join(body.expr(e) for e in scatter.index)
        any_ = " unordered" if scatter.unordered else ""
        lines.append(f"  into {scatter.base}[{index}] {scatter.mode}{any_} over {_loops(scatter.domain)}{mask}")
    lines.append(f"  value {body.node(nest.body)}")
    return lines


class _Body:
    """Prints the expressions of one nest with shared parts named."""

    def __init__(self, roots: Iterable[Node], buffers: Mapping[str, str]) -> None:
        self.buffers = buffers
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []
        uses: dict[Node, int] = {}
        order: dict[Node, None] = {}
        for root in roots:
            uses[root] = uses.get(root, 0) + 1
            for n in root.walk(order.__contains__):
                order[n] = None
                for c in n.children():
                    uses[c] = uses.get(c, 0) + 1
        depth: dict[Node, int] = {}
        for n in order:
            depth[n] = 1 + max((depth[c] for c in n.children()), default=0)
            if (uses[n] > 1 or depth[n] > _DEPTH) and n.op not in ("const", "index"):
                self.lines.append(f"t{len(self.names)} = {self.node(n)}")
                self.names[n] = f"t{len(self.names)}"
                depth[n] = 0

    def node(self, n: Node) -> str:
        if n in self.names:
            return self.names[n]
        if n.op == "const":
            return f"{n.attr!r}:{n.dtype}"
        if n.op == "index":
            return f"[{self.expr(n.attr)}]"
        if n.op == "load":
            suffix = "" if self.buffers.get(n.attr.buffer) == n.dtype else f":{n.dtype}"
            mask = f" if {self.node(n.args[0])}" if n.args else ""
            return f"{n.attr.buffer}[{', '.join(self.expr(e) for e in n.attr.index)}]{suffix}{mask}"
        attr = "" if n.attr is None else f"{{{_data(n.attr)}}}"
        suffix = "" if n.args and n.args[-1].dtype == n.dtype else f":{n.dtype}"
        return f"{n.op}{attr}({', '.join(self.node(a) for a in n.args)}){suffix}"

    def expr(self, e: Expr) -> str:
        out = ""
        for monomial, c in e.terms:
            factors = [self.atom(a) for a in monomial]
            if not factors or abs(c) != 1:
                factors.insert(0, str(abs(c)))
            sign = ("-" if c < 0 else "") if not out else " - " if c < 0 else " + "
            out += sign + "*".join(factors)
        return out or "0"

    def atom(self, a: Any) -> str:
        if isinstance(a, Quotient):
            return f"(({self.expr(a.num)}) {a.kind} ({self.expr(a.den)}))"
        if isinstance(a, Val):
            return f"at({self.node(a.node)}, {a.lo}, {a.hi})"
        return a.name


def _vals(e: Expr) -> list[Val]:
    return sorted((a for a in e.atoms() if isinstance(a, Val)), key=lambda v: v.text)


def _size(n: Size) -> str:
    return n.text if isinstance(n, Expr) else str(n)


def _sizes(shape: Iterable[Size]) -> str:
    return f"[{', '.join(_size(n) for n in shape)}]"


def _stride(stride: tuple[Size, ...] | None) -> str:
    return "" if stride is None else f" stride {_sizes(stride)}"


def _buffer(b: Buffer) -> str:
    offset = "" if b.offset == 0 else f" offset {_size(b.offset)}"
    return f"{b.name}: {b.dtype}{_sizes(b.shape)}{_stride(b.stride)}{offset}{_paired(b)}"


def _paired(x: Buffer | Ref | Output) -> str:
    return " paired" if x.paired else ""


def _loops(vars_: Iterable[Expr | Var]) -> str:
    parts: list[str] = []
    for v in vars_:
        loop = v.var if isinstance(v, Expr) else v
        parts.append(_size(v) if loop is None else f"{loop.name}<{_size(loop.extent)}")  # type: ignore[arg-type]
    return f"({', '.join(parts)})"


def _extern(call: Extern) -> list[str]:
    args = [_data(a) for a in call.args] + [f"{k}={_data(v)}" for k, v in call.kwargs]
    many = "" if call.single else " many" + "".join(f" {k}" for k in call.places)
    many += " effect" if call.effect else ""
    many += " compiled" if call.compiled else ""
    many += " whole" if call.whole else ""
    many += " elsewhere" if call.elsewhere else ""
    many += f" writes {call.writes}" if call.writes else ""
    many += "".join(f" learn {_learned(s)}" for s in call.learns)
    many += "".join(f" demand {json.dumps(source)} {json.dumps(message)}" for source, message in call.demands)
    origin = f" from {json.dumps(call.origin)}" if call.origin else ""
    made = f"{'; '.join(_buffer(b) for b in call.outs)} = " if call.outs else ""
    return [f"extern {made}{call.target or 'nothing'}({', '.join(args)}){many}{origin}"]


def _learned(s: Learned) -> str:
    return f"{s.symbol} = {json.dumps(s.source)}" if s.source else f"{s.symbol} = {s.buffer or 'result'} {s.dim}"


def _data(x: Any) -> str:
    if isinstance(x, Ref):
        return f"&{x.buffer}{_stride(x.stride)}{_paired(x)}"
    if x is None or isinstance(x, (bool, int, float)):
        return repr(x)
    if isinstance(x, complex):
        return f"complex({x.real!r}, {x.imag!r})"
    if isinstance(x, str):
        return json.dumps(x)
    if isinstance(x, Expr):
        return f"{{{x.text}}}"
    if isinstance(x, list):
        return f"[{', '.join(map(_data, x))}]"
    if isinstance(x, tuple):
        return f"({''.join(_data(a) + ', ' for a in x)})"
    if type(x).__module__ == "torch":
        return f"torch.device({json.dumps(str(x))})" if type(x).__name__ == "device" else str(x)
    raise IRError(f"an extern argument of type {type(x).__name__} has no text: {x!r}")
