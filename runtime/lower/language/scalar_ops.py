"""The scalar operations as functions: `exp(x)`, `add(x, 1)`, `where(c, x, 0.0)` build `Node`s, one function per entry of `scalars.yaml`.

Arguments that must agree (`same` in the table) are brought to one dtype: Python numbers become constants of the others' dtype, indices
count as int64, and elems of different dtypes are promoted. A call on Python numbers alone gives a Python number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ....errors import UnsupportedError
from ....generated.complex_scalars import COMPLEX
from ....generated.scalars import REDUCTIONS, SCALARS, Reduction, Scalar
from ...ir.index import Expr
from ...ir.nodes import DTYPES, FLOATS, INTS, ITEMSIZE, Node, const, index_node
from ...ir.pairs import PART, pair, parts
from .dtypes import float_of, opmath, promote_types
from .number import Number, Truth
from .scalar_fold import ON_NUMBERS, as_dtype, fold

_ACCEPTED = {
    "float": frozenset(FLOATS), "int": frozenset(INTS), "bool": frozenset(["bool"]), "number": frozenset((*FLOATS, *INTS)),
    "integral": frozenset((*INTS, "bool")), "any": frozenset(DTYPES), "int64": frozenset(["int64"]),
}  # fmt: skip


def constant(value: Any, dtype: str) -> Node:
    """A Python number, or an index, as an elem of `dtype`, rounded to it. Raises `UnsupportedError` for an integer out of range."""
    if isinstance(value, (Node, Number)):
        return to_dtype(value.node if isinstance(value, Number) else value, dtype)
    if isinstance(value, Expr):
        return to_dtype(index_node(value), dtype)
    if dtype in PART:
        value = complex(value)
        return pair(*(const(as_dtype(x, PART[dtype]), PART[dtype]) for x in (value.real, value.imag)))
    if dtype not in DTYPES or isinstance(value, complex):
        raise UnsupportedError(f"dtype {dtype} has no loop code")
    return const(as_dtype(value, dtype), dtype)


def coerced(value: Any, like: Node) -> Node:
    """`value` in the dtype of `like`."""
    return constant(value, like.dtype)


def to_dtype(x: Any, dtype: str) -> Node:
    """Conversion; `x` itself when it has the dtype, or is a widened value going back to where it came from."""
    if not isinstance(x, Node):
        return constant(x, dtype)
    if x.dtype == dtype:
        return x
    if x.op == "pair" or dtype in PART:
        return _to_or_from_pair(x, dtype)
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype {dtype} has no loop code")
    holds_any = dtype in FLOATS or dtype == "bool"
    if x.op == "const" and (holds_any or (x.dtype not in FLOATS and _fits(x.attr, dtype))):
        return const(as_dtype(x.attr, dtype), dtype)
    if x.op == "to_dtype" and x.args[0].dtype == dtype and _widens(dtype, x.dtype):
        return x.args[0]
    return Node("to_dtype", (x,), dtype)


def _to_or_from_pair(x: Node, dtype: str) -> Node:
    """Of what is no complex dtype the imaginary part is 0; what goes there loses it."""
    real, imag = parts(x)
    if dtype in PART:
        return pair(to_dtype(real, PART[dtype]), to_dtype(imag, PART[dtype]))
    if dtype == "bool":
        return Node("logical_or", (to_dtype(real, dtype), to_dtype(imag, dtype)), dtype)
    return to_dtype(real, dtype)


def _fits(value: Any, dtype: str) -> bool:
    try:
        as_dtype(value, dtype)
    except UnsupportedError:
        return False
    return True


def _widens(narrow: str, wide: str) -> bool:
    """Whether every value of `narrow` is one of `wide`."""
    if narrow == "bool":
        return True
    if narrow in FLOATS:
        return wide in FLOATS and ITEMSIZE[wide] > ITEMSIZE[narrow]
    return wide in INTS and ITEMSIZE[wide] > ITEMSIZE[narrow] and wide != "uint8"


def bitcast(x: Node, dtype: str) -> Node:
    """The same bits as a dtype of equal size."""
    if not {x.dtype, dtype} <= ITEMSIZE.keys() or ITEMSIZE[x.dtype] != ITEMSIZE[dtype]:
        raise UnsupportedError(f"the bits of {x.dtype} as {dtype}")
    return x if x.dtype == dtype else Node("bitcast", (x,), dtype)


# -- building ----------------------------------------------------------------------------------------------------------
def _unified(entry: Scalar, accepts: str, values: list[Any]) -> list[Node]:
    """Arguments that must have one dtype, in it."""
    dtype: str | None = None
    for v in values:
        d = v.dtype if isinstance(v, Node) else "int64" if isinstance(v, Expr) else None
        if d is not None and d != dtype:
            # An index beside a float, or beside a narrower integer, only adds its value.
            dtype = d if dtype is None else promote_types(dtype, d)
    for v in values:
        if type(v) in (float, Number) and (dtype is None or dtype not in FLOATS):
            dtype = "float32"
        elif type(v) is int and (dtype is None or dtype == "bool"):
            dtype = "int64"
        elif type(v) in (bool, Truth) and dtype is None:
            dtype = "bool"
    assert dtype is not None
    if dtype not in _ACCEPTED[accepts]:
        if accepts == "float":
            dtype = float_of(dtype)
        elif accepts == "bool":
            values = [ne(v, 0) if isinstance(v, Node) else bool(v) for v in values]
            dtype = "bool"
        else:
            raise UnsupportedError(f"{entry.name} of {dtype}")
    return [v if isinstance(v, Node) and v.dtype == dtype else constant(v, dtype) for v in values]


def _maker(entry: Scalar) -> Callable[..., Any]:
    name, classes, result = entry.name, entry.args, entry.result
    simplify = _IDENTITIES.get(name)
    groups: list[tuple[str, int, int]] = []
    for k, c in enumerate(classes):
        if c == "same":
            groups[-1] = (groups[-1][0], groups[-1][1], k + 1)
        else:
            groups.append((c, k, k + 1))

    def build(*args: Any) -> Any:
        if len(args) != len(classes):
            raise TypeError(f"{name} takes {len(classes)} arguments, not {len(args)}")
        if not any(isinstance(a, (Node, Expr)) for a in args):
            if any(isinstance(a, Number) for a in args):
                if not any(type(a) in (float, Number) for a in args):
                    raise UnsupportedError(f"{name} of a bool that changes between calls")  # no integer of that kind
                return Number(to_dtype(build(*(a.node if isinstance(a, Number) else a for a in args)), "float64"))
            return _on_numbers(name, args)
        if any(isinstance(a, complex) or (isinstance(a, Node) and a.op == "pair") for a in args):
            return _on_pairs(entry, [(accepts, list(args[start:stop])) for accepts, start, stop in groups])
        nodes: list[Node] = []
        for accepts, start, stop in groups:
            nodes += _unified(entry, accepts, list(args[start:stop]))
        dtype = result if result in DTYPES else nodes[1].dtype if result == "arg1" else nodes[0].dtype
        if entry.fold and all(n.op == "const" for n in nodes):
            value = fold(name, tuple(n.attr for n in nodes), dtype)
            if value is not None:
                return const(value, dtype)
        if simplify is not None:
            found = simplify(*nodes)
            if found is not None:
                return found
        return Node(name, tuple(nodes), dtype)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"`{name}` of `scalars.yaml` ({', '.join(classes)} → {result})."
    return build


def _on_pairs(entry: Scalar, groups: list[tuple[str, list[Any]]]) -> Node:
    """An operation of which an argument is complex, by what the table says of the parts of all."""
    function = COMPLEX.get(entry.name)
    if function is None:
        raise UnsupportedError(f"{entry.name} of complex numbers")
    given: list[Node] = []
    for accepts, values in groups:
        dtypes = [v.dtype for v in values if isinstance(v, Node)]
        whole = next(
            (d for d in dtypes if d in PART), "complex64" if any(isinstance(v, complex) for v in values) else None
        )
        if whole is None:
            given += [x for v in _unified(entry, accepts, values) for x in parts(v)]
            continue
        for d in dtypes:
            whole = promote_types(whole, d)
        given += [x for v in values for x in parts(constant(v, whole))]
    result = function(sys.modules[__name__], *given)
    return pair(*result) if isinstance(result, tuple) else result


def _on_numbers(name: str, args: tuple[Any, ...]) -> Any:
    if name == "where":
        return args[1] if args[0] else args[2]
    function = ON_NUMBERS.get(name)
    value = function(*args) if function is not None else None
    if value is None:
        raise UnsupportedError(f"{name}{args} is not evaluated on plain numbers")
    return value


# -- identities --------------------------------------------------------------------------------------------------------
def _is(node: Node, value: float) -> bool:
    return node.op == "const" and node.attr == value and (value != 0 or str(float(node.attr)) == str(float(value)))


def _add(a: Node, b: Node) -> Node | None:
    if a.dtype in INTS:  # a float -0.0 + 0.0 is +0.0; only -0.0 is neutral
        return a if _is(b, 0) else b if _is(a, 0) else None
    return a if _is(b, -0.0) else b if _is(a, -0.0) else None


def _sub(a: Node, b: Node) -> Node | None:
    return a if _is(b, 0.0) else None


def _mul(a: Node, b: Node) -> Node | None:
    return a if _is(b, 1) else b if _is(a, 1) else None


def _div(a: Node, b: Node) -> Node | None:
    return a if _is(b, 1) else None


def _neg(a: Node) -> Node | None:
    return a.args[0] if a.op == "neg" else None


def _where(c: Node, a: Node, b: Node) -> Node | None:
    if c.op == "const":
        return a if c.attr else b
    return a if a is b else None


def _both(a: Node, b: Node) -> Node | None:
    if a.dtype != "bool":
        return None
    if a.op == "const":
        return b if a.attr else a
    return (a if b.attr else b) if b.op == "const" else a if a is b else None


def _either(a: Node, b: Node) -> Node | None:
    if a.dtype != "bool":
        return None
    if a.op == "const":
        return a if a.attr else b
    return (b if b.attr else a) if b.op == "const" else a if a is b else None


_IDENTITIES: dict[str, Callable[..., Node | None]] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "neg": _neg, "where": _where, "logical_and": _both, "bitwise_and": _both,
    "logical_or": _either, "bitwise_or": _either,
}  # fmt: skip

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: _maker(entry) for name, entry in SCALARS.items() if name not in ("to_dtype", "bitcast")
}
ne = _FUNCTIONS["ne"]
_BY_SYMBOL = {entry.symbol: _FUNCTIONS[name] for name, entry in SCALARS.items() if entry.symbol and entry.arity == 2}
Node._binary = staticmethod(lambda symbol, a, b: _BY_SYMBOL[symbol](a, b))  # type: ignore[assignment]
Node._unary = staticmethod(lambda symbol, a: _FUNCTIONS["neg" if symbol == "-" else "bitwise_not"](a))  # type: ignore[assignment]

globals().update(_FUNCTIONS)  # an attribute of the module each: generated lowerings call `s.exp(x)`


def __getattr__(name: str) -> Any:
    try:
        return _FUNCTIONS[name]
    except KeyError:
        raise AttributeError(f"specs/scalars.yaml has no scalar {name!r}") from None


# -- reductions --------------------------------------------------------------------------------------------------------
def reduction(kind: str, dtype: str, before: str) -> tuple[str, str]:
    """(dtype of what is reduced, dtype of the reduced value) for elems of `before` and a result of `dtype`."""
    entry = REDUCTIONS[kind]
    if entry.result != "same":
        accumulates = "bool" if entry.args == ("bool",) else opmath(before)
        return accumulates, entry.result
    return opmath(dtype), opmath(dtype)


def reduction_of_one(kind: str, value: Node) -> Node:
    """The reduction of a single element."""
    return const(0, "int64") if REDUCTIONS[kind].combine is None else started(REDUCTIONS[kind], value)


def started(entry: Reduction, value: Node) -> Node:
    """`value` combined with what the reduction starts from, where that may change it: a float sum starts from 0, so that no sum is -0."""
    if value.dtype not in FLOATS or entry.combine is None or entry.identity.get("float") != 0:
        return value
    combined: Node = _FUNCTIONS[entry.combine](value, const(0.0, value.dtype))
    return combined
