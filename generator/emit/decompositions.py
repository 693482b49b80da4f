"""Reads specs/decompositions.yaml, writes generated/decompositions.py."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from ..diagnostics import Diagnostics, did_you_mean
from ..load import Document, Entry
from ..model import Model
from ..render import header, literal, render
from .operators import Printer, function_name, overload_of, parameters_of, printed

SPEC = "specs/decompositions.yaml"
LAYOUTS = ("elementwise", "is_empty", "is_row_major", "row_major", "size", "suggested")
OF_RECORDER = ("is_all_true", "is_lower_triangle", "draws_anew")
CONDITIONS = ("enlarges_scores", "has_symbolic_sizes", "is_exact_scale", "is_followed", "is_torch_before")
"""Helpers of conditions on the calls of a function."""
HELPERS = (
    "bound", "is_from_end", "block_sizes", "interleaved_sizes", "given", "is_cube", "is_row_major", "diagonal_layout", "last_product", "size",
    "is_single_or_double", "last_dims", "epsilon", "masks_scores", "suggested_format", "wide_dtype", *OF_RECORDER,
)  # fmt: skip


@dataclass(frozen=True)
class DecompositionSpec:
    """A replacement while tracing: parameters, and lines of the body."""

    op: str
    doc: str
    function: str
    parameters: str
    when: str
    cases: tuple[tuple[str, str], ...]
    called: str = ""  # the function that programs call, where that is what is replaced
    followed: bool = False  # autograd follows what replaces it
    composite: bool = False  # torch itself runs the body
    number: tuple[str, int] | None = (
        None  # the argument, by name and position, that is a symbol where torch runs the body
    )


@dataclass(frozen=True)
class CorrectionSpec:
    """What a fake kernel says wrongly, as arguments of a `Correction` for each result, and the functions that make tensors laid out as
    results: name, parameters, and cases of a condition and such a tensor.
    """

    op: str
    doc: str
    rules: tuple[tuple[tuple[str, str], ...], ...]
    functions: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = ()


@dataclass(frozen=True)
class RefusalSpec:
    """Calls that a fake kernel accepts by mistake: `rules` holds positions of arguments under the names that the specs give them, `fills` is
    the view whose sizes the second argument must have, `wide` takes float32 beside a first argument of half precision, `always` stands for
    every call. Calls of the functions `called` are refused `when` a condition over its `parameters` holds.
    """

    op: str
    doc: str
    rules: tuple[tuple[str, tuple[int, ...]], ...]
    fills: str = ""
    wide: bool = False
    called: tuple[str, ...] = ()
    function: str = ""
    parameters: str = ""
    when: str = ""
    always: bool = False


@dataclass(frozen=True)
class ControlSpec:
    """A higher-order operator whose functions are compiled: how it runs them, and where they and their operands are, as source."""

    name: str
    doc: str
    arguments: str


@dataclass(frozen=True)
class Specs:
    """What the file holds. Names of higher-order operators, each with its line: `unfolded`, and whether autograd follows it; `inlined`, with the
    positions of the function and of the first value that it takes; `launches`, and whether the kernel writes to copies;
    `choices`, with the positions of the number, the functions and what they take, and the operator that chooses one of two.
    `custom_gradients`, with the position of the backward.
    `spared`: names of autograd's nodes, each with its line and the number of which it asks.
    """

    decompositions: tuple[DecompositionSpec, ...] = ()
    corrections: tuple[CorrectionSpec, ...] = ()
    refusals: tuple[RefusalSpec, ...] = ()
    unfolded: tuple[tuple[str, str, bool], ...] = ()
    inlined: tuple[tuple[str, str, tuple[int, int]], ...] = ()
    launches: tuple[tuple[str, str, bool], ...] = ()
    controls: tuple[ControlSpec, ...] = ()
    choices: tuple[tuple[str, str, tuple[int, int, int, str]], ...] = ()
    custom_gradients: tuple[tuple[str, str, int], ...] = ()
    spared: tuple[tuple[str, str, int], ...] = ()


def build(doc: Document, model: Model, diags: Diagnostics) -> Specs:
    """The entries, checked: operators exist, names are arguments."""
    corrections = [c for e in doc.tagged("correction") if (c := _correction(e, model, diags)) is not None]
    refusals = [r for e in doc.tagged("refusal") if (r := _refusal(e, model, diags)) is not None]
    unfolded = tuple((e.id, e["doc"], bool(e.get("gradient", True))) for e in doc.tagged("unfold"))
    inlined = [at for e in doc.tagged("inline") if (at := _inlined(e, diags)) is not None]
    launches = tuple((e.id, e["doc"], bool(e.get("copies", False))) for e in doc.tagged("launch"))
    controls = [found for e in doc.tagged("control") if (found := _control(e, diags)) is not None]
    branches = {e.id for e in doc.tagged("control") if e["runs"] == "branch"}
    choices = [chosen for e in doc.tagged("choose") if (chosen := _choice(e, branches, diags)) is not None]
    return Specs(
        _decompositions(doc.tagged("decomposition"), model, diags),
        tuple(corrections),
        tuple(refusals),
        unfolded,
        tuple(inlined),
        launches,
        tuple(controls),
        tuple(choices),
        tuple((e.id, e["doc"], e["backward"]) for e in doc.tagged("custom_gradient")),
        tuple((e.id, e["doc"], e.get("where", 1)) for e in doc.tagged("spare")),
    )


def _inlined(entry: Entry, diags: Diagnostics) -> tuple[str, str, tuple[int, int]] | None:
    if entry["given"] <= entry["function"]:
        diags.error(entry.pos("given"), f"the function of {entry.id} must stand before what it takes")
        return None
    return entry.id, entry["doc"], (entry["function"], entry["given"])


_CONTROL: dict[str, tuple[int, tuple[str, ...]]] = {
    "branch": (2, ("predicate",)),
    "loop": (2, ("carried",)),
    "scan": (1, ("carried", "sliced")),
    "map": (1, ("sliced",)),
}
"""For each way to run functions: how many there are, and the keys that it needs besides."""


def _control(entry: Entry, diags: Diagnostics) -> ControlSpec | None:
    count, needed = _CONTROL[entry["runs"]]
    if len(entry["functions"]) != count:
        diags.error(entry.pos("functions"), f"a {entry['runs']} has {count} functions, found {len(entry['functions'])}")
        return None
    found = tuple(key for key in ("predicate", "carried", "sliced") if key in entry)
    if found != needed:
        names = " and ".join(f"'{key}'" for key in needed)
        diags.error(entry.pos("runs"), f"a {entry['runs']} has {names} besides functions and 'given', and no more")
        return None
    places = [*entry["functions"], entry["given"], *(entry[key] for key in needed)]
    if len(set(places)) != len(places):
        diags.error(entry.pos("functions"), f"two arguments of {entry.id} have the same position")
        return None
    named = "".join(f", {key}={entry[key]}" for key in needed)
    return ControlSpec(
        entry.id, entry["doc"], f"{entry['runs']!r}, {tuple(entry['functions'])}, {entry['given']}{named}"
    )


def _choice(entry: Entry, branches: Set[str], diags: Diagnostics) -> tuple[str, str, tuple[int, int, int, str]] | None:
    if entry["by"] not in branches:
        known = ", ".join(sorted(branches)) or "none"
        diags.error(entry.pos("by"), f"{entry['by']} is no branch under 'control'; there are: {known}")
        return None
    places = (entry["number"], entry["functions"], entry["given"])
    if len(set(places)) != len(places):
        diags.error(entry.pos("number"), f"two arguments of {entry.id} have the same position")
        return None
    return entry.id, entry["doc"], (*places, entry["by"])


def _refusal(entry: Entry, model: Model, diags: Diagnostics) -> RefusalSpec | None:
    schema = overload_of(entry, "refusal", model, diags)
    if schema is None:
        return None
    names = [a.name for a in schema.args]
    keys = (
        "same_dtype",
        "not_floating",
        "not_bool",
        "bool_with_bools",
        "most_dims",
        "viewed",
        "not_empty",
        "not_negative",
    )
    for path, name in [((key, k), n) for key in keys for k, n in enumerate(entry.get(key, ()))]:
        if not _known_argument(entry, path, name, names, diags):
            return None
    for key in ("most_dims", "viewed"):
        if len(named := entry.get(key, ())) not in (0, 2):
            diags.error(entry.pos(key), f"expected two arguments of {entry.id}, found {len(named)}")
            return None
    if "fills" in entry and overload_of(entry, "fills", model, diags) is None:
        return None
    rules = tuple((key, tuple(names.index(n) for n in entry[key])) for key in keys if key in entry)
    if ("function" in entry) != ("when" in entry):
        diags.error(
            entry.pos("function" if "function" in entry else "when"), "expected both 'function' and 'when', or none"
        )
        return None
    if "parameters" in entry and "function" not in entry:
        diags.error(entry.pos("parameters"), "expected 'function' beside 'parameters'")
        return None
    parameters, arguments = parameters_of(schema)
    taken = set(arguments.values())
    if "parameters" in entry:
        parameters, taken = _own_parameters(entry), set(entry["parameters"])
    when = ""
    if "when" in entry:
        printer = Printer(model, taken, "{op}({args})", CONDITIONS)
        when = printed(entry, ("when",), str(entry["when"]), printer, diags) or ""
    return RefusalSpec(
        entry.id,
        entry["doc"],
        rules,
        entry.get("fills", ""),
        entry.get("wide", False),
        (called,) if isinstance(called := entry.get("function", ()), str) else tuple(called),
        "refuses_" + function_name(entry.id),
        parameters,
        when,
        entry.get("always", False),
    )


def _own_parameters(entry: Entry) -> str:
    """The parameters of a function, which are not those of the overload."""
    return ", ".join(f"{name}=None" for name in entry["parameters"])


def _known_argument(entry: Entry, path: tuple[str | int, ...], name: str, names: list[str], diags: Diagnostics) -> bool:
    if name not in names:
        message = f"expected an argument of {entry.id}, found '{name}'{did_you_mean(name, names)}"
        diags.error(entry.pos(*path), message)
    return name in names


def _correction(entry: Entry, model: Model, diags: Diagnostics) -> CorrectionSpec | None:
    schema = overload_of(entry, "correction", model, diags)
    if schema is None:
        return None
    names = [a.name for a in schema.args]
    rules: list[tuple[tuple[str, str], ...]] = []
    functions: list[tuple[str, str, tuple[tuple[str, str], ...]]] = []
    for k, rule in enumerate(entry["results"]):
        named: list[tuple[tuple[str | int, ...], str]] = [
            ((key, j), n) for key in ("dtype_of", "elementwise_of") for j, n in enumerate(rule.get(key, ()))
        ]
        named += [((key,), rule[key]) for key in ("layout_of", "preserved_of", "given") if key in rule]
        for path, name in named:
            if not _known_argument(entry, ("results", k, *path), name, names, diags):
                return None
        values: dict[str, object] = {"result": rule["result"]}
        if "dtype_of" in rule:
            values["dtype_of"] = tuple(names.index(n) for n in rule["dtype_of"])
        for key, layout in _LAYOUT_OF.items():
            if key in rule:
                laid = rule[key] if isinstance(rule[key], list) else [rule[key]] if isinstance(rule[key], str) else []
                values |= {"layout": layout, "laid": tuple(names.index(n) for n in laid)}
        values |= {key: rule[key] for key in ("wide", "given", "positions", "everywhere", "instead") if rule.get(key)}
        shown = {key: literal(v) for key, v in values.items()}
        if "like" in rule:
            function = f"laid_out_{function_name(entry.id)}_{rule['result']}"
            parameters, arguments = parameters_of(schema)
            printer = Printer(model, set(arguments.values()), "{op}({args})", LAYOUTS)
            functions.append(
                (function, parameters, _cases(entry, ("results", k, "like"), rule["like"], printer, diags))
            )
            shown["like"] = function
        rules.append(tuple(shown.items()))
    return CorrectionSpec(entry.id, entry["doc"], tuple(rules), tuple(functions))


_LAYOUT_OF = {
    "layout_of": "suggested",
    "elementwise_of": "elementwise",
    "preserved_of": "preserved",
    "contiguous": "contiguous",
}
"""Keys of a corrected result that say its layout, and what a `Correction` calls it."""


def _cases(
    entry: Entry, path: tuple[str | int, ...], body: Any, printer: Printer, diags: Diagnostics
) -> tuple[tuple[str, str], ...]:
    """Conditions ("" where there is none) and values of a body, as source."""
    cases = []
    for k, case in enumerate(body if isinstance(body, list) else [{"is": body}]):
        at = (*path, k) if isinstance(body, list) else ()
        condition = printed(entry, (*at, "if"), str(case["if"]), printer, diags) if "if" in case else ""
        value = printed(entry, (*at, "is") if at else path, case["is"], printer, diags)
        cases.append((condition or "", value or ""))
    return tuple(cases)


def _decompositions(entries: tuple[Entry, ...], model: Model, diags: Diagnostics) -> tuple[DecompositionSpec, ...]:
    out = []
    for entry in entries:
        schema = overload_of(entry, "decomposition", model, diags)
        if schema is None:
            continue
        parameters, names = parameters_of(schema)
        if entry.get("followed") and "function" not in entry:
            diags.error(entry.pos("followed"), "'followed' is about calls of a 'function', which is missing")
            continue
        if entry.get("composite") and (other := next((k for k in ("function", "when") if k in entry), "")):
            diags.error(entry.pos(other), f"'{other}' says where the body is taken, which 'composite' does everywhere")
            continue
        number = None
        if "number" in entry:
            if other := next((k for k in ("function", "composite") if k in entry), ""):
                diags.error(entry.pos(other), f"'{other}' and 'number' say in two ways where the body is taken")
                continue
            arguments = [a.name for a in schema.args]
            if not _known_argument(entry, ("number",), entry["number"], arguments, diags):
                continue
            number = (names[entry["number"]], arguments.index(entry["number"]))
        if "parameters" in entry:
            if "function" not in entry or entry.get("followed"):
                diags.error(entry.pos("parameters"), "'parameters' are those of a 'function' that replaces no overload")
                continue
            parameters, names = _own_parameters(entry), {name: name for name in entry["parameters"]}
        printer = Printer(model, set(names.values()), "{op}({args})", HELPERS, OF_RECORDER)
        when = printed(entry, ("when",), str(entry.get("when", "True")), printer, diags)
        cases = _cases(entry, ("body",), entry["body"], printer, diags)
        out.append(
            DecompositionSpec(
                entry.id,
                entry["doc"],
                function_name(entry.id),
                parameters,
                when or "True",
                cases,
                entry.get("function", ""),
                bool(entry.get("followed", False)),
                bool(entry.get("composite", False)),
                number,
            )
        )
    return tuple(out)


def emit(model: Model) -> dict[str, str]:
    """`generated/decompositions.py`."""
    path = "generated/decompositions.py"
    specs = model.part("decompositions", None)
    if not specs:
        return {}
    values = {
        "header": header(path, SPEC),
        "specs": specs.decompositions,
        "corrections": specs.corrections,
        "refusals": specs.refusals,
        "unfolded": specs.unfolded,
        "inlined": specs.inlined,
        "custom_gradients": specs.custom_gradients,
        "launches": specs.launches,
        "controls": specs.controls,
        "choices": specs.choices,
        "spared": specs.spared,
    }
    return {path: render("decompositions.py.j2", **values)}
