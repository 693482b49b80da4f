"""Reads specs/random.yaml, writes generated/random.py: which random operators are made of seeded ones while tracing, and how."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from keyword import iskeyword

from ..diagnostics import Diagnostics, did_you_mean
from ..load import Document, Entry
from ..model import Model
from ..render import header, render
from ..torch_schemas import TorchSchema

PATH = "generated/random.py"
SPEC = "specs/random.yaml"
DRAWS = ("uniform", "normal", "integers")
"""Methods of `Draws` (runtime/dispatch/randomness/streams.py)."""
PLAIN = ("shape", "dtype", "wide", "is_float", "is_int", "smallest", "largest", "fits", "half_step", "ln1p")
"""Functions of runtime/dispatch/randomness/names.py."""
_WORDS = ("out", "True", "False", "None", "pi")
_NODES = (
    ast.Expression, ast.Module, ast.Assign, ast.Return, ast.Expr, ast.Name, ast.Load, ast.Store, ast.Constant, ast.Call, ast.Attribute,
    ast.keyword, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


@dataclass(frozen=True)
class RandomSpec:
    """One overload: its parameters in schema order, the condition and the body as Python lines."""

    op: str
    spec: str
    doc: str
    function: str
    parameters: str
    when: str
    body: tuple[str, ...]


def build(doc: Document, model: Model, diags: Diagnostics) -> tuple[RandomSpec, ...]:
    """Every overload that the entries cover, checked: operators exist, names are arguments, helpers or operators."""
    out: list[RandomSpec] = []
    seen: dict[str, Entry] = {}
    for entry in doc:
        for path, name in entry.names():
            found = [s for s in model.torch.get(name) if s.functional and not s.is_out]
            if not found:
                diags.error(entry.pos(*path), f"torch has no functional operator '{name}'{_nearest(name, model)}")
            for schema in found:
                if schema.id in seen:
                    diags.error(entry.pos(*path), f"'{schema.id}' has an entry already")
                    continue
                seen[schema.id] = entry
                made = _overload(entry, schema, model, diags)
                if made is not None:
                    out.append(made)
    return tuple(sorted(out, key=lambda r: r.op))


def _nearest(name: str, model: Model) -> str:
    return did_you_mean(name, model.torch.packets())


def _overload(entry: Entry, schema: TorchSchema, model: Model, diags: Diagnostics) -> RandomSpec | None:
    taken = (*DRAWS, *PLAIN, *_WORDS)
    names = [f"{a.name}_" if iskeyword(a.name) or a.name in taken else a.name for a in schema.args]
    printer = _Printer(entry, model, diags, {*names, *_WORDS})
    before = len(diags.mistakes)
    when = printer.printed("when", str(entry["when"]), "eval")[0] if "when" in entry else ""
    body = printer.printed("body", entry["body"], "exec")
    if len(diags.mistakes) > before:
        return None
    function = re.sub(r"\W+", "_", schema.id.partition(".")[2].removesuffix(".default")).strip("_")
    return RandomSpec(schema.id, entry.id, entry["doc"], function, ", ".join(names), when, tuple(body))


class _Printer(ast.NodeTransformer):
    """Checks a text and prints it: helpers with where they come from, other calls as aten operators."""

    def __init__(self, entry: Entry, model: Model, diags: Diagnostics, names: set[str]) -> None:
        self.entry, self.model, self.diags, self.names = entry, model, diags, names
        self.key = ""
        self.lines: list[int] = [0]

    def printed(self, key: str, text: str, mode: str) -> list[str]:
        self.key = key
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self.lines = starts
        try:
            tree = ast.parse(text, mode=mode)
        except SyntaxError as error:
            at = starts[(error.lineno or 1) - 1] + (error.offset or 1) - 1
            self.diags.error(
                self.entry.pos(key, at=min(at, len(text))),
                f"expected {'statements' if mode == 'exec' else 'an expression'}: {error.msg}",
            )
            return [""]
        for node in ast.walk(tree):
            if not isinstance(node, _NODES):
                self.fault(node, f"'{type(node).__name__}' may not stand here")
        if isinstance(tree, ast.Module) and not (tree.body and isinstance(tree.body[-1], ast.Return)):
            self.diags.error(self.entry.pos(key), "expected 'return' as the last statement")
        return ast.unparse(self.visit(tree)).splitlines()

    def fault(self, node: ast.AST, message: str) -> None:
        at = self.lines[getattr(node, "lineno", 1) - 1] + getattr(node, "col_offset", 0)
        self.diags.error(self.entry.pos(self.key, at=at), message)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.names.add(target.id)
            else:
                self.fault(target, "expected a name")
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.names:
            self.fault(node, f"unknown name '{node.id}'{did_you_mean(node.id, self.names)}")
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = ast.unparse(node.func)
        node.args = [self.visit(a) for a in node.args]
        node.keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
        if name in DRAWS:
            name = f"draws.{name}"
        elif name not in PLAIN:
            if not self.model.torch.get(f"aten.{name}"):
                known = [*DRAWS, *PLAIN, *(p.removeprefix("aten.") for p in self.model.torch.packets())]
                self.fault(node, f"unknown operator '{name}'{did_you_mean(name, known)}")
            name = f"aten.{name}"
        node.func = ast.parse(name, mode="eval").body
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.fault(node, "an attribute may not stand here")
        return node


def emit(model: Model) -> dict[str, str]:
    """`generated/random.py`, or nothing when there is no such spec."""
    specs: tuple[RandomSpec, ...] = model.part("random")
    if not specs:
        return {}
    own = [s.text for p in model.torch.packets() if p.startswith("opforge.") for s in model.torch.overloads(p)]
    text = " ".join(" ".join((r.when, *r.body)) for r in specs)
    used = [n for n in (*PLAIN, "pi") if re.search(rf"(?<![.\w]){n}\b", text)]
    schemas = [s.partition("::")[2] for s in own]
    return {PATH: render("random.py.j2", header=header(PATH, SPEC), specs=specs, schemas=schemas, used=sorted(used))}
