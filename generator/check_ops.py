"""Checks the operator entries against torch's schemas and types every expression; the result is what the emitters print.

Rules of the language are in `docs/spec-language.md`; the keys of each kind are the table `KINDS`.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

from .check_overload import Overload
from .diagnostics import Diagnostics, did_you_mean, one_of
from .entry_overloads import op_names, overloads_of
from .entry_texts import EntryTexts
from .expr.constants import Known, check_constants
from .expr.ops import Names, ScalarSig
from .expr.parse import parse_body, parse_expression
from .expr.types import DTYPE_NAMES
from .load import Document, Entry
from .model import Model
from .op_entries import WITHOUT_LOWERING, Lowering, OpEntry
from .parts import OWN, Fill, Part, parts
from .recursion import check_recursion
from .requirements import Demands, calls, check_clauses, paths, requirements
from .torch_schemas import TorchSchema

COMMON = (
    "op",
    "doc",
    "kind",
    "symbol",
    "complex",
    "require",
    "native_if",
    "let",
    "tests",
    "test_dtypes",
    "no_edges",
    "unspecified",
)
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pointwise": (("expr",), ("operands", "promoted", "promote", "compute", "dtype", "with")),
    "view": (("shape", "at"), ("dtype", "with")),
    "gather": (("shape", "at"), ("raises", "dtype", "with")),
    "create": (("shape", "at"), ("dtype", "with")),
    "reduction": (
        ("shape", "over", "reduce", "at"),
        ("dtype", "with", "finish", "why", "out", "row_bytes", "product", "any_strides"),
    ),
    "scan": (("shape", "scan", "dim", "at"), ("dtype", "with")),
    "scatter": (("base", "over", "at", "into"), ("raises", "mode", "when", "with", "finish")),
    "composite": (("body",), ("raises", "why")),
    "extern": (("why",), ("out", "row_bytes", "product", "any_strides", "opaque")),
    "decomposed": ((), ()),
}
"""Kind → keys that it needs, keys that it may have (beside `COMMON`)."""
ERRORS = ("IndexError", "RuntimeError", "nothing")
PROMOTE = ("default", "float", "bool", "first", "none")


def build(doc: Document, model: Model, diags: Diagnostics) -> tuple[OpEntry, ...]:
    """Every entry, checked. Mistakes go to `diags`; entries that have some are left out."""
    names = known_names(model)
    names.incomplete = any(m.pos.source in doc.sources for m in diags.mistakes)
    covered = overloads_of(tuple(parts(doc)), model, diags)
    for entry, schemas in covered:
        if entry.get("kind") not in WITHOUT_LOWERING:
            for s in schemas:
                names.native[s.id] = str(entry.get("kind"))
                if s.namespace not in names.namespaces:
                    names.namespaces += (s.namespace,)
        _symbol(entry, schemas, names, diags)
    out = []
    kept: list[tuple[Entry, tuple[Lowering, ...]]] = []
    for entry, schemas in covered:
        before = len(diags.mistakes)
        made = Checker(entry, schemas, names, diags).run()
        if made is not None and len(diags.mistakes) == before:
            out.append(made)
            kept.append((entry, made.lowerings))
    check_recursion(kept, (w for op in (model.base.part("ops") if model.base else ()) for w in op.lowerings), diags)
    return tuple(out)


def known_names(model: Model) -> Names:
    """Scalars and reductions of the scalar spec, and the operators of the base model when there is one."""
    entries = [*(model.base.entries("scalars") if model.base else ()), *model.entries("scalars")]
    scalars = {
        e.id: ScalarSig(e.id, len(e.get("args") or ()), e.get("result") == "attr") for e in entries if e.tag == "scalar"
    }
    names = Names(
        model.torch,
        scalars,
        frozenset(e.id for e in entries if e.tag == "reduction"),
        frozenset(e.id for e in entries if e.tag == "scan"),
    )
    for op in model.base.part("ops") if model.base else ():
        names.native |= {w.schema.id: op.kind for w in op.lowerings}
        if op.symbol:
            names.symbols[op.symbol] = symbol_overload(op.schemas)
    return names


def symbol_overload(schemas: tuple[TorchSchema, ...]) -> str:
    """The overload that an entry's `symbol` means: `Tensor`, else `default`, else the first."""
    order = {"Tensor": 0, "default": 1}
    return min(schemas, key=lambda s: (order.get(s.overload, 2), s.overload)).id


def _symbol(entry: Entry, schemas: tuple[TorchSchema, ...], names: Names, diags: Diagnostics) -> None:
    symbol = entry.get("symbol")
    if symbol is None or not schemas:
        return
    if symbol in names.symbols:
        diags.error(entry.pos("symbol"), f"the symbol '{symbol}' means '{names.symbols[symbol]}' already")
    names.symbols.setdefault(str(symbol), symbol_overload(schemas))


# -- one entry ---------------------------------------------------------------------------------------------------------
class Checker(EntryTexts):
    def run(self) -> OpEntry | None:
        """The entry, or None after mistakes that leave nothing to check."""
        entry, before = self.entry, len(self.diags.mistakes)
        if not self.keys():
            return None
        self.parse_all()
        if not self.check_values():
            return None
        self.constants()
        lowerings: list[Lowering] = []
        if self.kind not in WITHOUT_LOWERING:
            for schema in self.schemas:
                lowerings.append(Overload(self, schema).check())
        if len(self.diags.mistakes) == before:
            self.check_use()
        return OpEntry(
            id=", ".join(op_names(entry)),
            doc=str(entry.get("doc")),
            kind=self.kind,
            family=entry.family,
            symbol=str(entry.get("symbol") or ""),
            schemas=self.schemas,
            lowerings=tuple(lowerings),
            tests=tuple(map(str, entry.get("tests") or ())),
            test_dtypes=tuple(map(str, entry.get("test_dtypes") or ())),
            unspecified=bool(entry.get("unspecified")),
            no_edges=str(entry.get("no_edges") or ""),
            why=str(entry.get("why") or ""),
            out=self.out_variants(),
            complex=bool(entry.get("complex", self.kind == "view")),
            row_bytes=int(entry.get("row_bytes") or 0),
            product=self.factors(),
            any_strides=bool(entry.get("any_strides")),
            opaque=self.opaque(),
            require=requirements(entry),
        )

    def factors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """For the overloads that are products: the positions of both matrices, and of what is added, among the arguments."""
        found: list[tuple[str, tuple[int, ...]]] = []
        wanted = [str(name) for name in self.entry.get("product") or ()]
        for schema in self.schemas if wanted else ():
            names = [a.name for a in schema.args]
            for k, name in enumerate(wanted):
                if name not in names:
                    self.error(("product", k), f"'{schema.id}' has no argument '{name}'; there is {one_of(names)}")
            if set(wanted) <= set(names):
                found.append((schema.id, tuple(map(names.index, wanted))))
        return tuple(found)

    def opaque(self) -> tuple[int, ...]:
        """Positions of the results that only the operator's own gradient can read."""
        found = tuple(int(n) for n in self.entry.get("opaque") or ())
        for schema in self.schemas:
            for k, n in enumerate(found):
                if n >= len(schema.returns):
                    self.error(("opaque", k), f"'{schema.id}' has no result {n}, but {len(schema.returns)} results")
        return found

    def out_variants(self) -> tuple[tuple[str, str], ...]:
        """For the overloads whose eager kernel has an `out` that names one that writes its result into a given tensor: that one."""
        if "out" not in self.entry.data:
            return ()
        found: list[tuple[str, str]] = []
        for schema in self.schemas:
            name = f"{schema.namespace}.{schema.name}.{self.entry['out']}"
            there = [s for s in self.names.torch.get(f"{schema.namespace}.{schema.name}") if s.is_out]
            fit = [
                s for s in there if len(s.args) == len(schema.args) + 1 and s.args[-1].writes and len(s.returns) == 1
            ]
            if name not in [s.id for s in fit]:
                known = one_of([s.overload for s in fit]) if fit else "none that writes its one result"
                self.error(
                    ("out",),
                    f"'{schema.id}' has no overload '{self.entry['out']}' with its arguments and 'out'; there is {known}",
                )
            found.append((schema.id, name))
        return tuple(found)

    def keys(self) -> bool:
        """Whether the keys are those of the kind."""
        entry = self.entry
        if self.kind not in KINDS:
            if "kind" in entry:
                self.error(
                    ("kind",), f"unknown kind '{self.kind}'{did_you_mean(self.kind, KINDS)}; expected {one_of(KINDS)}"
                )
            else:
                self.diags.error(entry.pos("op"), f"'{entry.id}' has no 'kind': expected {one_of(KINDS)}")
            return False
        needed, may = KINDS[self.kind]
        before = len(self.diags.mistakes)
        for key in entry.data:
            if key not in (*COMMON, *needed, *may):
                elsewhere = [k for k, (n, m) in KINDS.items() if key in (*n, *m)]
                hint = (
                    f" (it belongs to {one_of(elsewhere)})"
                    if elsewhere
                    else did_you_mean(key, (*COMMON, *needed, *may))
                )
                self.diags.error(entry.key_pos(key), f"unknown key '{key}' for kind '{self.kind}'{hint}")
        for key in ("doc", *needed):
            if entry.get(key) is None:
                self.diags.error(entry.pos("op"), f"'{entry.id}' has no '{key}', which kind '{self.kind}' needs")
        for key, allowed in (("promote", PROMOTE), ("compute", ("same", *DTYPE_NAMES))):
            if key in entry and entry[key] not in allowed:
                self.error(
                    (key,), f"expected {one_of(allowed)}, found '{entry[key]}'{did_you_mean(entry[key], allowed)}"
                )
        for key, table in (("reduce", self.names.reductions), ("scan", self.names.scans)):
            if key in entry and key in needed and entry[key] not in table:
                self.error(
                    (key,),
                    f"no {'reduction' if key == 'reduce' else 'scan'} '{entry[key]}'"
                    f"{did_you_mean(entry[key], table)}; there are {one_of(sorted(table))}",
                )
        for k, name in enumerate(entry.get("test_dtypes") or ()):
            if name not in DTYPE_NAMES:
                self.error(("test_dtypes", k), f"expected a dtype, found '{name}'{did_you_mean(name, DTYPE_NAMES)}")
        return len(self.diags.mistakes) == before

    # -- parsing -------------------------------------------------------------------------------------------------------
    def parse_all(self) -> None:
        """Parse every expression of the entry once."""
        entry = self.entry
        for key in (
            "native_if",
            "shape",
            "over",
            "dim",
            "dtype",
            "into",
            "when",
            "at",
            "finish",
            "base",
            "mode",
            "raises",
        ):
            if key in entry:
                self.parse((key,), word=key in ("dtype", "mode", "raises"))
        for key in ("let", "with"):
            lets = entry.get(key)
            if lets is not None and not isinstance(lets, dict):
                self.error((key,), "expected names with their expressions ('n: size(self, dim)'), found something else")
            for name in lets if isinstance(lets, dict) else ():
                if not name.isidentifier():
                    self.diags.error(entry.key_pos(key, name), f"expected a name, found '{name}'")
                self.parse((key, name))
        for path in paths(entry):
            self.parse(path)
        check_clauses(self)
        if "body" in entry:
            self.parse(("body",), body=True)
            if self.trees[("body",)]:
                self.trees[("body",)] = Demands(self, ("body",)).fill(self.trees[("body",)])
        expr = entry.get("expr")
        if isinstance(expr, list):
            self.parse_cases(expr)
        elif expr is not None:
            self.parse(("expr",))

    def parse_cases(self, cases: list[Any]) -> None:
        for k, case in enumerate(cases):
            if not isinstance(case, dict) or not set(case) <= {"if", "is"} or "is" not in case:
                self.error(("expr", k), "expected {if: condition, is: expression}, the last without 'if'")
                continue
            last = k == len(cases) - 1
            if ("if" in case) == last:
                self.error(
                    ("expr", k),
                    "the last case has no 'if': it is what remains" if last else "only the last case may lack 'if'",
                )
            if "if" in case:
                self.parse(("expr", k, "if"))
            self.parse(("expr", k, "is"))

    def parse(self, path: tuple[str | int, ...], *, body: bool = False, word: bool = False) -> None:
        source = self.text(path)
        if source is None:
            return
        if word and source.text in (*DTYPE_NAMES, *ERRORS, "set", *self.names.reductions):
            self.trees[path] = ast.Constant(
                value=source.text, lineno=1, col_offset=0, end_lineno=1, end_col_offset=len(source.text)
            )
        else:
            tree = parse_body(source) if body else parse_expression(source)
            self.sources[path] = source
            self.trees[path] = self.with_values(path, tree)

    def with_values(self, path: tuple[str | int, ...], tree: Any) -> Any:
        """The tree with the entry's values in place of their names."""
        text = self.sources[path].text
        if tree is None or not any(name in text for name in self.values):
            return tree
        fill = Fill(self.values)
        made = [fill.visit(t) for t in tree] if isinstance(tree, list) else fill.visit(tree)
        if fill.used:
            self.filled[path] = fill.used
        return made

    def check_values(self) -> bool:
        """Whether the operator has the values that the others have, under names that mean nothing else."""
        if not isinstance(self.entry, Part):
            return True
        before = len(self.diags.mistakes)
        for name in self.entry.missing:
            self.error(("op",), f"'{self.entry.id}' has no '{name}', which the operators beside it have")
        bound = self.stored | {name for key in ("let", "with") for name in self.entry.get(key) or ()}
        arguments = {a.name for s in self.schemas for a in s.args}
        for name in self.values:
            if name in arguments or name in bound:
                what = "an argument" if name in arguments else "a name in the expressions"
                self.diags.error(self.entry.value_pos(name), f"'{name}' is {what} of '{self.entry.id}' already")
        return len(self.diags.mistakes) == before

    def check_use(self) -> None:
        """Refuse values that no expression names."""
        used = {name for names in self.filled.values() for name in names}
        for name in self.values:
            if name not in used and isinstance(self.entry, Part):
                hint = did_you_mean(name, OWN)
                self.diags.error(self.entry.value_pos(name), f"no expression names the value '{name}'{hint}")

    def constants(self) -> None:
        """Refuse what needs no operand to be known as wrong, and tests that are no Python."""
        env: dict[str, Known] = {}
        lets = [path for path in self.sources if path[0] == "let"]
        for path in (*lets, *(p for p in self.sources if p[0] != "let")):
            if self.trees[path] is not None:
                value = check_constants(self.sources[path], self.trees[path], env)
                if path[0] == "let":
                    env[str(path[1])] = value
        tests = [(("tests", k), str(text)) for k, text in enumerate(self.entry.get("tests") or ())]
        for place, test in (*tests, *calls(self.entry)):
            if fault := _fault_of_call(test):
                self.error(place, f"expected the arguments of a call in Python: {fault}")


@cache
def _fault_of_call(arguments: str) -> str:
    """What is wrong with the Python text of a call's arguments; empty where nothing is. Operators of one entry share their tests."""
    try:
        ast.parse(f"f({arguments}\n)", mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return (error.msg if isinstance(error, SyntaxError) else str(error)) or "it is nested too deeply"
    return ""
