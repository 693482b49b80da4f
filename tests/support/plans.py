"""Hand-made plans in a few lines of text, for tests of what reads plans."""

from __future__ import annotations

from opforge.runtime.ir.index import Val, of
from opforge.runtime.ir.nodes import Buffer, Extern, Nest, Program, contiguous_strides
from opforge.runtime.kernels.plan import (
    Allocation,
    ExternStep,
    Kernel,
    KernelStep,
    Phase,
    Plan,
    Reduce,
    Scan,
    Store,
    ViewOf,
)
from tests.support.ir_reader import Reader, tokens

from .machines import H200


def kernel(name, outer, phases, dtypes, scratch="", serial=False, symbols=None):
    """A kernel from text.

    outer   "o0<4, o1<8"; phases: pairs (inner loops, statements); a statement is `store y[o0, r0] VALUE`, `store sum y[…] VALUE [when MASK]`
            (an indexed update by sum), `reduce NAME KIND VALUE` or `scan KIND y[…] VALUE`.
    dtypes  buffer → dtype; scratch: "tile: float32[8]; …".
    """
    scope = dict(symbols or {})
    dtypes = dict(dtypes)
    tiles = []
    for text in filter(None, (t.strip() for t in scratch.split(";"))):
        tiles.append(Reader(tokens(text, 0), 0, scope, {}, {}).buffer())
        dtypes[tiles[-1].name] = tiles[-1].dtype

    def loops(text):
        found = Reader(tokens(f"({text})", 0), 0, scope, {}, {}).loops()
        scope.update((v.name, of(v)) for v in found)
        return tuple(found)

    outer_loops = loops(outer)
    locals_ = {t.name for t in tiles}
    built, reads, writes = [], {}, {}
    for inner, statements in phases:
        inner_loops = loops(inner)
        body = []
        for line in statements:
            r = Reader(tokens(line, 0), 0, scope, dtypes, {})
            kind, indirect = r.name(), []
            if kind == "reduce":
                reg, how = r.name(), r.name()
                value = r.node()
                dtypes[reg] = "int64" if how.startswith("arg") else value.dtype
                locals_.add(reg)
                body.append(Reduce(reg, how, value, dtypes[reg]))
            else:
                mode = r.name() if r.peek(1) != "[" else "set"
                target = r.name()
                index, value = r.indices(), r.node()
                mask = r.node() if r.take("when") else None
                body.append(
                    Scan(target, index, mode, value)
                    if kind == "scan"
                    else Store(target, index, value, mode, mask, mode != "set")
                )
                if target not in locals_:
                    writes[target] = None
                indirect = [a.node for e in index for a in e.atoms() if isinstance(a, Val)]
            for n in (n for root in [value, *indirect] for n in root.walk()):
                if n.op == "load" and n.attr.buffer not in locals_:
                    reads[n.attr.buffer] = None
        built.append(Phase(inner_loops, tuple(body)))
    return Kernel(
        name,
        outer_loops,
        tuple(built),
        tuple(r for r in reads if r not in writes),
        tuple(writes),
        tuple(tiles),
        serial=serial,
        machine=H200,
    )


def plan_of(program: Program, steps, allocations=None, layouts=None, arena=0, outputs=None, frees=None) -> Plan:
    """A plan with contiguous layouts and, where nothing is said, own memory for outputs and "extern" for results of calls."""
    made = {b.name: b for b in program.inputs}
    table = {
        n: Buffer(n, b.shape, b.dtype, b.stride or contiguous_strides(b.shape), b.offset)
        for n, b in program.shapes().items()
    }
    table.update(layouts or {})
    called = {b.name for i in program.items if isinstance(i, Extern) for b in i.outs}
    where = {n: Allocation("input" if n in made else "extern" if n in called else "dedicated") for n in table}
    where.update(allocations or {})
    outs = outputs
    if outs is None:
        outs = tuple(
            o
            if o.buffer is None
            else ViewOf(o.buffer, table[o.buffer].shape, table[o.buffer].stride, table[o.buffer].offset)
            for o in program.outputs
        )
    steps = [KernelStep(s) if isinstance(s, Kernel) else s for s in steps]
    return Plan(program.inputs, steps, tuple(outs), table, where, frees or {}, arena, program.symbols)


def call_of(program: Program, target: str, **views: ViewOf) -> ExternStep:
    """The step of an extern call of the program; `views` replaces its buffers by views."""
    call = next(i for i in program.items if isinstance(i, Extern) and i.target == target)
    return ExternStep(call, tuple(views.get(getattr(a, "buffer", ""), a) for a in call.args), call.kwargs)


def dtypes_of(program: Program) -> dict[str, str]:
    return {n: b.dtype for n, b in program.shapes().items()}


__all__ = ["Nest", "call_of", "dtypes_of", "kernel", "plan_of"]
