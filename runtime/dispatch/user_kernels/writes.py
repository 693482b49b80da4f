"""Which arguments a Triton kernel of the program writes to, read off its source: a pointer is followed through the names that hold it.

Nothing is compiled for that, so it works without a GPU. What a statement might do is assumed; a kernel whose source is not there, or that hands
a pointer to something unknown, writes to every argument that it could reach.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ....errors import UnsupportedError

_NOTHING: frozenset[str] = frozenset()
_PLAIN = ("dtype", "shape", "type", "block_shape", "element_ty")
"""Attributes of a pointer that hold no address."""
_PASSED_OVER = (ast.Pass, ast.Break, ast.Continue, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom)
_WRITES = ("store", "scatter", "atomic", "copy", "reduce_add")
"""Parts of the names of functions and methods of the language that write to what they are given."""
_ROUNDS = 50


@dataclass(frozen=True)
class Writes:
    """`names` of the parameters that a kernel may write to; `effect`: it does something else besides (it prints, or runs instructions of its own)."""

    names: frozenset[str]
    effect: bool


def writes_of(kernel: Any, pointers: Iterable[str], constants: Mapping[str, Any]) -> Writes:
    """What a kernel (as `triton.jit` or `triton.autotune` gives it) may write to, of its parameters `pointers`. `constants`: values of others.
    Raises `UnsupportedError` for one that writes through an address which no argument is.
    """
    pointers = frozenset(pointers)
    names = frozenset(name for key in ("reset_to_zero", "restore_value") for name in getattr(kernel, key, None) or ())
    function = python_function(kernel)
    if function is None:
        return Writes(pointers, True)
    try:
        walk = _Walk({}, function, constants)
    except (OSError, TypeError, SyntaxError):  # its source is not there
        return Writes(pointers, True)
    walk.env.update({p: frozenset({p}) for p in pointers})
    walk.run()
    if walk.anywhere:
        raise UnsupportedError(f"the kernel {function.__name__} writes to an address that none of its arguments is")
    return Writes(pointers & (walk.written | names), walk.effect)


def python_function(kernel: Any) -> Any:
    """The function that a decorated kernel was made of, or None."""
    for _ in range(16):
        if kernel is None or isinstance(kernel, types.FunctionType):
            break
        kernel = getattr(kernel, "fn", None)
    return kernel


@lru_cache(maxsize=256)
def _definition(function: Any) -> ast.FunctionDef:
    """The source of a function. Raises OSError, TypeError or SyntaxError where it is not there."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError("not a function")
    return tree


class _Walk:
    """One function. `env`: names to the kernel's pointers that they may hold; `written`: pointers that may be written to; `returned`: what the
    result may hold; `anywhere`: it writes to an address that comes from none. `calls`: the functions that the kernel calls, by what their
    parameters may point into; None while they are looked at.
    """

    def __init__(self, calls: dict[Any, _Walk | None], function: Any, constants: Mapping[str, Any]) -> None:
        self.calls, self.constants = calls, constants
        self.tree = tree = _definition(function)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.outside = {**vars(builtins), **function.__globals__, **{name: _content(c) for name, c in cells}}
        self.stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.locals = self.stored | set(self.parameters())
        self.env: dict[str, frozenset[str]] = {}
        self.written: set[str] = set()
        self.returned: set[str] = set()
        self.effect = self.anywhere = False

    def parameters(self) -> list[str]:
        a = self.tree.args
        return [p.arg for p in (*a.posonlyargs, *a.args, *([a.vararg] if a.vararg else []), *a.kwonlyargs)]

    def run(self) -> None:
        """Until nothing new is found: a name may be read, in a loop, before the line that gives it its value."""
        before: Any = None
        for _ in range(_ROUNDS):
            now = (dict(self.env), set(self.written), set(self.returned))
            if now == before:
                return
            before = now
            self.anywhere = False
            self.block(self.tree.body)
        raise AssertionError("the pointers of a kernel are followed without end")

    # -- statements ----------------------------------------------------------------------------------------------------
    def block(self, body: Sequence[ast.stmt]) -> None:
        for s in body:
            self.statement(s)

    def statement(self, s: ast.stmt) -> None:
        match s:
            case ast.Assign(targets=targets, value=value):
                for t in targets:
                    self.assign(t, value)
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self.assign(target, value)
            case ast.AugAssign(target=target, value=value):
                self.bind(target, self.of(value))
            case ast.For(target=target, iter=it, body=body, orelse=orelse):
                self.bind(target, self.of(it))
                self.block([*body, *orelse])
            case ast.While(test=test, body=body, orelse=orelse) | ast.If(test=test, body=body, orelse=orelse):
                self.of(test)
                self.block([*body, *orelse])
            case ast.With(items=items, body=body):
                for item in items:
                    held = self.of(item.context_expr)
                    if item.optional_vars is not None:
                        self.bind(item.optional_vars, held)
                self.block(body)
            case ast.Return(value=value):
                self.returned |= _NOTHING if value is None else self.of(value)
            case ast.Expr(value=value):
                self.of(value)
            case ast.Assert(test=test):
                self.of(test)
                self.effect = True
            case _ if isinstance(s, _PASSED_OVER):
                pass
            case _:
                self.unknown(frozenset().union(*self.env.values()))

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        pairs = isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List))
        if pairs and len(target.elts) == len(value.elts) and not _starred([*target.elts, *value.elts]):  # type: ignore[attr-defined]
            for t, v in zip(target.elts, value.elts, strict=True):  # type: ignore[attr-defined]
                self.assign(t, v)
            return
        self.bind(target, self.of(value))

    def bind(self, target: ast.expr, held: frozenset[str]) -> None:
        match target:
            case ast.Name(id=name):
                self.env[name] = self.env.get(name, _NOTHING) | held
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                for t in elts:
                    self.bind(t, held)
            case ast.Starred(value=value) | ast.Subscript(value=value) | ast.Attribute(value=value):
                self.bind(value, held)
            case _:
                self.unknown(held)

    def unknown(self, held: frozenset[str]) -> None:
        """Something may write to what `held` points into."""
        self.written |= held
        self.effect = True

    # -- expressions ---------------------------------------------------------------------------------------------------
    def of(self, e: ast.expr) -> frozenset[str]:
        """The pointers that the value of an expression may hold."""
        match e:
            case ast.Name(id=name):
                return self.env.get(name, _NOTHING)
            case ast.Constant() | ast.JoinedStr():
                return _NOTHING
            case ast.Attribute(value=value, attr=attr):
                held = self.of(value)
                return _NOTHING if attr in _PLAIN else held
            case ast.Compare(left=left, comparators=rest):
                for x in (left, *rest):
                    self.of(x)
                return _NOTHING
            case ast.NamedExpr(target=target, value=value):
                self.assign(target, value)
                return self.of(value)
            case ast.Call():
                return self.call(e)
            case ast.ListComp(elt=elt, generators=generators) | ast.GeneratorExp(elt=elt, generators=generators):
                for g in generators:
                    self.bind(g.target, self.of(g.iter))
                    for x in g.ifs:
                        self.of(x)
                return self.of(elt)
        return frozenset().union(*(self.of(x) for x in ast.iter_child_nodes(e) if isinstance(x, ast.expr)))

    def call(self, e: ast.Call) -> frozenset[str]:
        args = [self.of(a) for a in e.args]
        named = {k.arg: self.of(k.value) for k in e.keywords}
        held = frozenset().union(*args, *named.values())
        function, known = self.resolve(e.func)
        if not known:
            if isinstance(e.func, ast.Attribute):  # a method of a value
                own = self.of(e.func.value)
                held |= own
                if not held or _is_method(e.func.attr):
                    return self.builtin(e.func.attr, own, held)
            self.unknown(held)
            return held
        body = None if isinstance(function, types.FunctionType) else python_function(function)
        module = str(getattr(function if body is None else body, "__module__", ""))
        language = module.split(".", 1)[0] == "triton"  # of that, only functions that say so in their names write
        if body is not None and not language:
            spread = _starred(e.args) or None in named
            return self.inside(body, args, named, held, spread)
        # A function that is handed over (the combine function of a scan) is called with values of any of the others.
        for a in (*e.args, *(k.value for k in e.keywords)):
            inner = python_function(self.resolve(a)[0]) if isinstance(a, (ast.Name, ast.Attribute)) else None
            if inner is not None and held:
                self.inside(inner, [], {}, held, True)
        if language:
            first = args[0] if args else next(iter(named.values()), _NOTHING)
            return self.builtin(str(getattr(function, "__name__", "")), first, held)
        if module != "builtins" and not (isinstance(function, type) and issubclass(function, tuple)):
            self.unknown(held)
        return held

    def builtin(self, name: str, address: frozenset[str], held: frozenset[str]) -> frozenset[str]:
        """A function of the language, or a method of one of its values, by its name."""
        if any(part in name for part in _WRITES):
            self.anywhere |= not address
            self.written |= held
            return _NOTHING
        if "load" in name or name == "gather":
            return _NOTHING
        if "asm" in name:
            self.unknown(held)
        if name.startswith("device_"):
            self.effect = True
        return held

    def inside(
        self,
        function: Any,
        args: Sequence[frozenset[str]],
        named: Mapping[Any, frozenset[str]],
        held: frozenset[str],
        spread: bool,
    ) -> frozenset[str]:
        """A call of another function of the program; `spread`: its parameters may be any of the arguments."""
        try:
            walk = _Walk(self.calls, function, {})
        except (OSError, TypeError, SyntaxError):
            self.unknown(held)
            return held
        names = walk.parameters()
        if spread or len(args) > len(names) or walk.tree.args.vararg is not None:
            walk.env.update(dict.fromkeys(names, held))
        else:
            walk.env.update({**dict(zip(names, args, strict=False)), **named})
        key = (function, tuple(walk.env.get(n, _NOTHING) for n in names))
        if key not in self.calls:
            self.calls[key] = None
            walk.run()
            self.calls[key] = walk
        found = self.calls[key]
        if found is None:  # it calls itself
            self.unknown(held)
            return held
        self.written |= found.written
        self.effect |= found.effect
        self.anywhere |= found.anywhere
        return frozenset(found.returned)

    def resolve(self, e: ast.expr) -> tuple[Any, bool]:
        """What a name from outside of the function stands for (`tl.load`), and whether that is known."""
        if isinstance(e, ast.Name):
            if e.id in self.constants and e.id in self.locals - self.stored:
                return self.constants[e.id], True
            return (self.outside[e.id], True) if e.id in self.outside and e.id not in self.locals else (None, False)
        if isinstance(e, ast.Attribute):
            value, known = self.resolve(e.value)
            if known and hasattr(value, e.attr):
                return getattr(value, e.attr), True
        return None, False


def _is_method(name: str) -> bool:
    """Whether values of the language have such a method; classes of the program have others."""
    import triton.language as tl

    return hasattr(tl.tensor, name) or hasattr(tl.tensor_descriptor, name)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is not bound yet
        return None


def _starred(elements: Iterable[ast.expr]) -> bool:
    return any(isinstance(x, ast.Starred) for x in elements)
