"""A slow reference interpreter of loop programs over torch tensors: the oracle of the tests. Nothing here is clever on purpose.

Every nest is evaluated on the full grid of its loop variables with broadcasting; an indexed update runs point by point, in order.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Mapping, Sequence
from itertools import product as points_of
from typing import Any

import torch

from opforge.errors import IRError
from opforge.generated.scalars import REDUCTIONS, SCALARS, SCANS
from opforge.runtime.ir.index import Atom, Expr, Quotient, Sym, Val, Var, expr
from opforge.runtime.ir.nodes import FLOATS, Extern, Nest, Node, Program, Ref, Size
from opforge.runtime.philox import philox

Tensor = torch.Tensor


def interpret(
    program: Program,
    inputs: Sequence[Tensor],
    symbols: Mapping[str, int] | None = None,
    exact: bool = False,
    check: bool = True,
) -> list[Any]:
    """The program's outputs for `inputs` (one tensor per `program.inputs`, the constants included).

    symbols     values of size symbols that no input shape shows by itself.
    exact       compute everything floating in float64, without rounding in between.
    check       every load must be in range (raises IRError).
    Raises what a position out of range raises (IndexError or RuntimeError).
    """
    return _Interpreter(program, inputs, dict(symbols or {}), exact, check).run()


class _Interpreter:
    def __init__(
        self, program: Program, inputs: Sequence[Tensor], symbols: dict[str, int], exact: bool, check: bool
    ) -> None:
        if len(inputs) != len(program.inputs):
            raise IRError(f"{len(inputs)} tensors for {len(program.inputs)} inputs")
        self.program, self.symbols, self.exact, self.check = program, symbols, exact, check
        self.env: dict[str, Tensor] = {}
        for b, given in zip(program.inputs, inputs, strict=True):
            t = torch.view_as_real(given) if b.paired and given.is_complex() else given
            for n, actual in zip(b.shape, t.shape, strict=True):
                if isinstance(n, Expr) and isinstance(n.atom, Sym):
                    self.symbols.setdefault(n.atom.name, actual)
            self.env[b.name] = t.to(self.dtype(b.dtype)) if b.dtype in FLOATS else t
        self.grid: dict[Atom, Tensor] = {}
        self.memo: dict[Node, Tensor] = {}

    def run(self) -> list[Any]:
        for item in self.program.items:
            if isinstance(item, Extern):
                self.extern(item)
            else:
                self.env[item.name] = self.nest(item)
        return [o.value if o.buffer is None else self.outside(o.buffer, o.paired) for o in self.program.outputs]

    def outside(self, buffer: str, paired: bool) -> Tensor:
        t = self.env[buffer]
        return torch.view_as_complex(t.contiguous()) if paired else t

    def dtype(self, name: str) -> torch.dtype:
        return torch.float64 if self.exact and name in FLOATS else getattr(torch, name)

    # -- items ---------------------------------------------------------------------------------------------------------
    def nest(self, nest: Nest) -> Tensor:
        loops = (*nest.loop_vars, *nest.rvars)
        shape = [self.size(n) for n in nest.shape]
        if nest.scatter is not None:
            return self.scatter(nest)
        self.open(loops)
        value = self.value(nest.body)
        extents = [self.size(v.extent) for v in nest.loop_vars]
        if nest.reduce is not None:
            inner = math.prod(self.size(v.extent) for v in nest.rvars)
            full = value.expand([self.size(v.extent) for v in loops]).reshape([*extents, inner])
            value = self.reduce(nest.reduce, full, nest.dtype)
        value = value.expand(extents).reshape(shape).contiguous()
        if nest.scan is not None:
            entry = SCANS[nest.scan]
            result = _function(str(entry.torch))(value, nest.scan_dim)
            value = result if isinstance(result, Tensor) else result[0]
        want = self.dtype(nest.dtype)
        if value.dtype != want and not (nest.reduce is not None or nest.scan is not None):
            raise IRError(f"{nest.name}: value is {value.dtype}, buffer {want}")
        return value.to(want).clone()

    def reduce(self, kind: str, value: Tensor, dtype: str) -> Tensor:
        if value.shape[-1] == 0 and kind not in ("argmax", "argmin"):
            identity = REDUCTIONS[kind].identity
            start = identity.get(
                "float" if value.is_floating_point() else "bool" if value.dtype == torch.bool else "int"
            )
            return torch.full(value.shape[:-1], start, dtype=self.dtype(dtype))  # type: ignore[arg-type]
        return _function(str(REDUCTIONS[kind].torch))(value, -1)

    def scatter(self, nest: Nest) -> Tensor:
        s = nest.scatter
        assert s is not None
        result = self.env[s.base].clone()
        self.open(s.domain)
        extents = [self.size(v.extent) for v in s.domain]
        value = self.value(nest.body).expand(extents)
        index = [self.index(e).expand(extents) for e in s.index]
        mask = self.value(s.mask).expand(extents) if s.mask is not None else None
        combine = None if s.mode == "set" else _function(str(SCALARS[str(REDUCTIONS[s.mode].combine)].torch))
        for point in points_of(*map(range, extents)):
            if mask is not None and not mask[point]:
                continue
            place = tuple(int(i[point]) for i in index)
            if any(not 0 <= k < n for k, n in zip(place, result.shape, strict=True)):
                raise IRError(f"{nest.name}: update at {place} of shape {list(result.shape)}")
            result[place] = value[point] if combine is None else combine(result[place], value[point])
        return result

    def extern(self, call: Extern) -> None:
        result: Any = ()
        if call.target:
            namespace, name, overload = call.target.split(".")
            function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
            result = function(*self.argument(call.args), **{k: self.argument(v) for k, v in call.kwargs})
        tensors = [result] if call.single else [t for t in result if isinstance(t, Tensor)]
        for b, t in zip(call.outs, tensors, strict=bool(call.outs)):
            self.env[b.name] = torch.view_as_real(t.resolve_conj()) if b.paired else t
        for s in call.learns:
            from_source = eval(s.source, {"math": math}, dict(self.symbols)) if s.source else result
            self.symbols[s.symbol] = self.env[s.buffer].shape[s.dim] if s.buffer else from_source
        for source, message in call.demands:
            if not eval(source, {"math": math}, dict(self.symbols)):
                raise RuntimeError(message)

    def argument(self, a: Any) -> Any:
        if isinstance(a, Ref):
            return self.outside(a.buffer, a.paired)
        if isinstance(a, (list, tuple)):
            return type(a)(self.argument(x) for x in a)
        return self.size(a) if isinstance(a, Expr) else a

    # -- expressions ---------------------------------------------------------------------------------------------------
    def open(self, loops: Sequence[Var]) -> None:
        """Start a nest: one axis of the grid per variable."""
        self.memo = {}
        self.grid = {}
        for k, v in enumerate(loops):
            self.grid[v] = torch.arange(self.size(v.extent)).reshape([-1 if j == k else 1 for j in range(len(loops))])

    def size(self, n: Size) -> int:
        if not isinstance(n, Expr):
            return n
        saved, self.grid = self.grid, {}
        value = int(self.index(n))
        self.grid = saved
        return value

    def index(self, e: Expr) -> Tensor:
        total = torch.tensor(0)
        for monomial, c in e.terms:
            term = torch.tensor(c)
            for a in monomial:
                term = term * self.atom(a)
            total = total + term
        return total

    def atom(self, a: Atom) -> Tensor:
        if isinstance(a, Sym):
            return torch.tensor(self.symbols[a.name])
        if isinstance(a, Quotient):
            num, den = self.index(a.num), self.index(a.den)
            return torch.div(num, den, rounding_mode="floor") if a.kind == "//" else torch.remainder(num, den)
        if isinstance(a, Val):
            return self.value(a.node).to(torch.int64)
        return self.grid[a]

    def value(self, root: Node) -> Tensor:
        for n in root.walk():
            if n not in self.memo:
                self.memo[n] = self.node(n)
        return self.memo[root]

    def node(self, n: Node) -> Tensor:
        if n.op == "const":
            return torch.tensor(n.attr, dtype=self.dtype(n.dtype))
        if n.op == "index":
            return self.index(expr(n.attr))
        if n.op == "load":
            return self.load(n)
        args = [self.memo[a] for a in n.args]
        if n.op == "bounded":
            value, size, live = args
            good = (value >= 0) & (value < size)
            if bool((live & ~good).any()):
                raise getattr(builtins, n.attr[0])(n.attr[1])
            return torch.where(good, value, 0)
        if n.op == "to_dtype":
            return args[0].to(self.dtype(n.dtype))
        if n.op == "bitcast":
            return args[0].contiguous().view(self.dtype(n.dtype))
        if n.op == "fma":
            return args[0] * args[1] + args[2]
        if n.op == "philox":
            return philox(*args)
        if n.op == "truncdiv":
            return torch.div(args[0], args[1], rounding_mode="trunc")
        if n.op == "trigamma":
            return torch.polygamma(1, args[0])
        return _function(str(SCALARS[n.op].torch))(*args)

    def load(self, n: Node) -> Tensor:
        t = self.env[n.attr.buffer]
        if len(n.attr.index) != t.ndim:
            raise IRError(f"{n}: {len(n.attr.index)} coordinates for a buffer of shape {list(t.shape)}")
        mask = self.memo[n.args[0]] if n.args else None
        index = [self.index(e) for e in n.attr.index]
        shape = torch.broadcast_shapes(*(i.shape for i in index), *([mask.shape] if mask is not None else []))
        if t.numel() == 0 or math.prod(shape) == 0:
            if mask is not None and bool(mask.any()):
                raise IRError(f"{n}: reads an empty buffer")
            return torch.zeros(shape, dtype=t.dtype)
        live = mask.expand(shape) if mask is not None else torch.ones(shape, dtype=torch.bool)
        for k, i in enumerate(index):
            if self.check and bool((((i < 0) | (i >= t.shape[k])) & live).any()):
                raise IRError(f"{n}: coordinate {k} leaves 0..{t.shape[k] - 1}")
            index[k] = torch.where(live, i, 0)
        value = t[tuple(index)] if index else t
        return torch.where(live, value, torch.zeros((), dtype=t.dtype)) if mask is not None else value


_FUNCTIONS: dict[str, Any] = {}


def _function(path: str) -> Any:
    """The torch function that a table names."""
    found = _FUNCTIONS.get(path)
    if found is None:
        found = torch
        for part in path.split(".")[1:]:
            found = getattr(found, part)
        _FUNCTIONS[path] = found
    return found
