"""The loop IR as text: `dump` writes a program in a stable form, `parse` reads it back exactly.

    program
    symbol s0 = 16
    input x: float32[s0, 8] stride [8, 1]
    nest row: float32[s0] for (i0<s0) reduce sum over (r0<8) from "model.py:3 x.sum(1)"
      value x[i0, r0]
    extern y: float32[s0] stride [1] = ns.op.overload(&row, 2, flag=True)
    output y
    mutate x = …

A scalar expression is `op(args)`, followed by `:dtype` where that is not the last argument's dtype; a constant is `1.0:float32`, an index
used as a value `[i0 + 1]`, a load `x[i0, r0]` or `x[i0] if mask`, an indirect coordinate `at(node, lo, hi)`. Expressions used twice (or
deep ones) get a line of their own, `t0 = …`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...errors import IRError
from .index import Expr, Quotient, Sym, Val, Var, expr, of
from .learned import Learned
from .nodes import Buffer, Extern, Nest, Node, Output, Program, Ref, Scatter, Size
from .reader import Reader, tokens

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
    if nest.team:
        head += " together"
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
    return [
        f"extern {'; '.join(_buffer(b) for b in call.outs)} = {call.target or 'nothing'}({', '.join(args)}){many}{origin}"
    ]


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


# -- reading -----------------------------------------------------------------------------------------------------------
def parse(text: str) -> Program:
    """Read what `dump` wrote (blank lines and `#` comments are allowed). Raises IRError with the line number."""
    program = Program(())
    inputs: list[Buffer] = []
    outputs: list[Output] = []
    mutations: list[tuple[str, str]] = []
    symbols: dict[str, Expr] = {}
    buffers: dict[str, str] = {}
    nest: _NestReader | None = None

    for number, line in enumerate(text.splitlines(), 1):
        words = tokens(line, number)
        if not words:
            continue
        if line[0].isspace():
            if nest is None:
                raise IRError(f"line {number}: an indented line must follow a nest")
            done = nest.line(Reader(words, number, nest.scope, buffers, nest.named))
            if done is not None:
                program.items.append(done)
                buffers[done.name] = done.dtype
                nest = None
            continue
        if nest is not None:
            raise IRError(f"line {number}: nest {nest.fields['name']!r} has no value")
        r = Reader(words, number, symbols, buffers, {})
        kind = r.name()
        if kind == "symbol":
            name = r.name()
            symbol = Sym(name)
            symbol.hint = r.integer() if r.take("=") else None
            symbols[name] = of(symbol)
        elif kind == "input":
            inputs.append(r.buffer())
            buffers[inputs[-1].name] = inputs[-1].dtype
        elif kind == "nest":
            nest = _NestReader(r, symbols)
        elif kind == "extern":
            call = _read_extern(r)
            program.items.append(call)
            buffers.update((b.name, b.dtype) for b in call.outs)
        elif kind == "output":
            if r.peek() == "value" and r.peek(1):
                r.expect("value")
                outputs.append(Output(None, None, r.data()))
            else:
                output = Output(r.name(), r.sizes() if r.take("stride") else None)
                outputs.append(replace(output, paired=r.take("paired")))
        elif kind == "mutate":
            target = r.name()
            r.expect("=")
            mutations.append((target, r.name()))
        elif kind != "program":
            raise r.error("program, symbol, input, nest, extern, output or mutate", kind)
        r.end()
    if nest is not None:
        raise IRError(f"nest {nest.fields['name']!r} has no value")
    program.inputs, program.outputs = tuple(inputs), tuple(outputs)
    program.mutations, program.symbols = tuple(mutations), tuple(symbols)
    return program


class _NestReader:
    """Collects the lines of one nest."""

    def __init__(self, r: Reader, symbols: Mapping[str, Expr]) -> None:
        self.fields: dict[str, Any] = {"name": r.name()}
        self.scope: dict[str, Expr] = dict(symbols)
        self.named: dict[str, Node] = {}
        r.expect(":")
        self.fields["dtype"] = r.name()
        self.fields["shape"] = r.sizes()
        self.fields["stride"] = r.sizes() if r.take("stride") else None
        r.expect("for")
        self.fields["vars"] = tuple(expr(v) if isinstance(v, int) else of(v) for v in self._loops(r))
        if r.take("reduce"):
            self.fields["reduce"] = r.name()
        if r.take("over"):
            self.fields["rvars"] = tuple(self._loops(r))
        if r.take("scan"):
            self.fields["scan"] = r.name()
            r.expect("dim")
            self.fields["scan_dim"] = r.integer()
        if r.take("from"):
            self.fields["origin"] = r.string()
        self.fields["team"] = bool(r.take("together"))

    def _loops(self, r: Reader) -> list[Any]:
        found = r.loops()
        self.scope.update((v.name, of(v)) for v in found if isinstance(v, Var))
        return found

    def line(self, r: Reader) -> Nest | None:
        if r.peek() == "into" and r.peek(1) != "=":
            r.expect("into")
            base = r.name()
            start = r.position
            # The index uses the loops declared after it: read those first.
            r.skip_brackets()
            mode = r.name()
            unordered = bool(r.take("unordered"))
            r.expect("over")
            domain = tuple(self._loops(r))
            after = r.position
            r.position = start
            index = r.indices()
            r.position = after
            mask = r.node() if r.take("if") else None
            self.fields["scatter"] = Scatter(base, index, mode, domain, mask, unordered)
        elif r.peek() == "value" and r.peek(1) != "=":
            r.expect("value")
            body = r.node()
            r.end()
            return Nest(body=body, **self.fields)
        else:
            name = r.name()
            r.expect("=")
            self.named[name] = r.node()
        r.end()
        return None


def _read_extern(r: Reader) -> Extern:
    outs = [r.buffer()] if r.peek() != "=" else []
    while r.take(";"):
        outs.append(r.buffer())
    r.expect("=")
    target = r.name()
    args: list[Any] = []
    kwargs: list[tuple[str, Any]] = []
    r.expect("(")
    while not r.take(")"):
        if r.peek(1) == "=":
            key = r.name()
            r.expect("=")
            kwargs.append((key, r.data()))
        else:
            args.append(r.data())
        if r.peek() != ")":
            r.expect(",")
    single, places = not r.take("many"), []
    while not single and r.peek().isdigit():
        places.append(r.integer())
    effect, compiled, whole, elsewhere = (r.take(word) for word in ("effect", "compiled", "whole", "elsewhere"))
    writes = r.integer() if r.take("writes") else 0
    learns: list[Learned] = []
    demands: list[tuple[str, str]] = []
    while r.take("learn"):
        symbol = r.name()
        r.expect("=")
        if r.peek().startswith('"'):
            learns.append(Learned(symbol, source=r.string()))
        else:
            buffer = r.name()
            learns.append(Learned(symbol, "" if buffer == "result" else buffer, r.integer()))
    while r.take("demand"):
        demands.append((r.string(), r.string()))
    origin = r.string() if r.take("from") else ""
    return Extern(
        tuple(outs),
        "" if target == "nothing" else target,
        tuple(args),
        tuple(kwargs),
        single,
        effect,
        origin,
        tuple(places),
        compiled,
        writes,
        tuple(learns),
        tuple(demands),
        whole,
        elsewhere,
    )
