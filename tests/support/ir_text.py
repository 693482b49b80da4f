"""Reads programs of the loop IR out of the text that `dump` writes: tests are written in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opforge.errors import IRError
from opforge.runtime.ir.index import Expr, Sym, Var, expr, of
from opforge.runtime.ir.learned import Learned
from opforge.runtime.ir.nodes import Buffer, Extern, Nest, Node, Output, Program, Scatter
from tests.support.ir_reader import Reader, tokens


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
        self.fields["cooperative"] = bool(r.take("cooperative"))

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
    outs = [r.buffer()] if r.peek(1) == ":" else []
    while r.take(";"):
        outs.append(r.buffer())
    if outs:
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
