"""What entries say of torch's operators: overloads, their parameters, expressions whose calls are operators."""

from __future__ import annotations

import ast
import re

from ..diagnostics import Diagnostics, did_you_mean, one_of
from ..load import Entry
from ..model import Model
from ..render import literal
from ..torch_schemas import TorchSchema


def overload_of(entry: Entry, key: str, model: Model, diags: Diagnostics) -> TorchSchema | None:
    """The one overload that an entry names; `prim` operators are not in torch's registry of schemas."""
    name = entry[key]
    if name.startswith("prim."):
        return None
    found = model.torch.get(name)
    if len(found) != 1 or name.count(".") != 2:
        packet = ".".join(name.split(".")[:2])
        near = [s.id for s in model.torch.overloads(packet)] or list(model.torch.packets())
        diags.error(
            entry.pos(key),
            f"expected an overload of torch, 'namespace.name.overload', found '{name}'{did_you_mean(name, near)}",
        )
        return None
    return found[0]


def parameters_of(schema: TorchSchema, taken: tuple[str, ...] = ()) -> tuple[str, dict[str, str]]:
    """Python parameters of an overload with their defaults, and the Python name of each argument (`index_` where
    `index` is taken).
    """
    names = {a.name: a.name + "_" if a.name in taken else a.name for a in schema.args}
    parts, star = [], False
    for a in schema.args:
        if a.kwarg_only and not star:
            parts.append("*")
            star = True
        parts.append(names[a.name] + (f"={_default(a.default)}" if a.default is not None else ""))
    return ", ".join(parts), names


def _default(text: str) -> str:
    if text in ("None", "True", "False") or re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?|\[.*\]", text):
        return text.replace("[", "(").replace("]", ",)").replace("(,)", "()") if text.startswith("[") else text
    return "None"


DTYPES = ("bool", "uint8", "int32", "int64", "float32", "float64")  # that an expression may name


def function_name(op: str) -> str:
    """The name of what is generated for an overload; with the namespace for those of another than ATen, which may have names of ATen's."""
    namespace, _, name = op.partition(".")
    name = name.removesuffix(".default").replace(".", "_").strip("_")
    return name if namespace == "aten" else f"{namespace}_{name}"


class Printer:
    """Prints an expression whose calls are aten operators; `operator` says how a call of one is written."""

    def __init__(
        self,
        model: Model,
        names: set[str],
        operator: str,
        helpers: tuple[str, ...] = (),
        of_recorder: tuple[str, ...] = ("reshape",),
    ) -> None:
        self.model, self.names, self.operator, self.helpers = model, names, operator, helpers
        self.of_recorder = of_recorder  # helpers that take the recorder first

    def show(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                if name in DTYPES and name not in self.names:
                    return f"torch.{name}"
                if name not in self.names:
                    raise _Fault(f"unknown name '{name}'{did_you_mean(name, self.names)}", node.col_offset)
                return name
            case ast.Constant():
                return literal(node.value)
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Mod(), left=left, right=right):
                sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Mod: "%"}[type(node.op)]
                return f"({self.show(left)} {sign} {self.show(right)})"
            case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper, step=None)):
                first, last = ("" if bound is None else self.show(bound) for bound in (lower, upper))
                return f"{self.show(value)}[{first}:{last}]"
            case ast.Subscript(value=value, slice=index):
                return f"{self.show(value)}[{self.show(index)}]"
            case ast.List(elts=elts):
                return f"[{', '.join(map(self.show, elts))}]"
            case ast.Tuple(elts=elts):
                return f"({', '.join(map(self.show, elts))},)"
            case ast.Starred(value=value):
                return f"*{self.show(value)}"
            case ast.Call(func=func, args=args, keywords=keywords):
                return self.call(ast.unparse(func), func.col_offset, args, keywords)
            case ast.BoolOp(values=values):
                word = "and" if isinstance(node.op, ast.And) else "or"
                return f" {word} ".join(map(self.inner, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"not {self.inner(operand)}"
            case ast.Compare() | ast.UnaryOp():
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name) and inner.id not in self.helpers:
                        self.show(inner)
                return ast.unparse(node)
        raise _Fault(f"'{ast.unparse(node)}' may not stand here", node.col_offset)

    def inner(self, node: ast.expr) -> str:
        """An operand of `and`, `or` and `not`."""
        shown = self.show(node)
        return f"({shown})" if isinstance(node, ast.BoolOp) else shown

    def call(self, name: str, offset: int, args: list[ast.expr], keywords: list[ast.keyword]) -> str:
        shown = [self.show(a) for a in args]
        if name in self.helpers:
            return f"{name}({', '.join(['b', *shown] if name in self.of_recorder else shown)})"
        packet, _, overload = name.partition(".")
        found = self.model.torch.get(f"aten.{packet}.{overload or 'default'}")
        if not found:
            near = [n.removeprefix("aten.") for n in self.model.torch.packets()]
            overloads = [s.id.removeprefix("aten.") for s in self.model.torch.overloads(f"aten.{packet}")]
            hint = f"; expected {one_of(overloads)}" if overloads else did_you_mean(name, [*near, *self.helpers])
            raise _Fault(f"unknown operator '{name}'{hint}", offset)
        if keywords and "{args}" not in self.operator:
            raise _Fault(f"'{name}' takes no keyword arguments here", offset)
        named = [f"{k.arg}={self.show(k.value)}" for k in keywords]
        return self.operator.format(
            op=f"torch.ops.{found[0].id}", args=", ".join([*shown, *named]), tuple=", ".join(shown) + ","
        )


class _Fault(Exception):
    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


def printed(entry: Entry, path: tuple[str | int, ...], text: str, printer: Printer, diags: Diagnostics) -> str | None:
    """The expression at `path` of an entry as Python; None, and an error, where it is none."""
    try:
        return printer.show(ast.parse(text, mode="eval").body)
    except SyntaxError as e:
        diags.error(entry.pos(*path, at=max(0, (e.offset or 1) - 1)), f"expected an expression: {e.msg}")
    except _Fault as fault:
        diags.error(entry.pos(*path, at=fault.offset), str(fault))
    return None
