"""Decision tables: predicates in, one result out, proved total and unambiguous by trying every combination (D7).

Reads a `table:` entry; conditions are a small subset of Python, checked and evaluated here, never by `eval`.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .diagnostics import Diagnostics, did_you_mean, one_of
from .load import Entry

Combination = dict[str, Any]
MAX_COMBINATIONS = 1 << 16


@dataclass(frozen=True)
class Condition:
    """A checked condition: its tree, and its Python text with enum members qualified (`MutationType.DATA`)."""

    tree: ast.expr
    text: str

    def holds(self, combination: Combination) -> bool:
        """Its truth for one combination (predicate → bool or member name)."""
        return bool(_value(self.tree, combination))


@dataclass(frozen=True)
class Rule:
    """One row: where `when` holds, the result is `then` (a member's name, or names of steps)."""

    when: Condition
    then: str | tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A proved table. `over` maps each predicate to its enum's name, or to `bool`; `gives` is an enum's name or
    `steps`.
    """

    name: str
    doc: str
    over: Mapping[str, str]
    gives: str
    impossible: tuple[tuple[Condition, str], ...]
    rules: tuple[Rule, ...]


def build_table(
    entry: Entry, enums: Mapping[str, tuple[str, ...]], steps: tuple[str, ...], diags: Diagnostics
) -> Table | None:
    """The table of an entry, or None after reporting: unknown names, and combinations that no rule or two rules
    cover.
    """
    before = len(diags.mistakes)
    domains: dict[str, tuple[Any, ...]] = {}
    for name, kind in entry["over"].items():
        if kind != "bool" and kind not in enums:
            diags.error(
                entry.pos("over", name),
                f"expected 'bool' or an enum, found '{kind}'{did_you_mean(kind, ['bool', *enums])}",
            )
        domains[name] = (False, True) if kind == "bool" else enums.get(kind, ())
    qualified = {m: f"{kind}.{m}" for kind in entry["over"].values() if kind in enums for m in enums[kind]}
    gives = entry["gives"]
    if gives != "steps" and gives not in enums:
        diags.error(
            entry.pos("gives"), f"expected 'steps' or an enum, found '{gives}'{did_you_mean(gives, ['steps', *enums])}"
        )
    results = steps if gives == "steps" else enums.get(gives, ())
    impossible, rules = [], []
    for k, item in enumerate(entry.get("impossible") or ()):
        condition = parse_condition(entry, ("impossible", k, "when"), item["when"], domains, qualified, diags)
        if condition is not None:
            impossible.append((condition, str(item["why"])))
    for k, item in enumerate(entry["rules"]):
        condition = parse_condition(entry, ("rules", k, "when"), item["when"], domains, qualified, diags)
        then = item["then"]
        for name in then if isinstance(then, list) else [then]:
            if results and name not in results:
                diags.error(
                    entry.pos("rules", k, "then"),
                    f"expected {one_of(results)}, found '{name}'{did_you_mean(name, results)}",
                )
        if condition is not None:
            rules.append(Rule(condition, tuple(then) if isinstance(then, list) else str(then)))
    table = Table(entry.id, entry["doc"], dict(entry["over"]), gives, tuple(impossible), tuple(rules))
    if len(diags.mistakes) == before:
        _prove(entry, table, domains, diags)
    return table if len(diags.mistakes) == before else None


def combinations(table_over: Mapping[str, tuple[Any, ...]]) -> Iterator[Combination]:
    """Every combination of predicate values, in a fixed order."""
    for values in itertools.product(*table_over.values()):
        yield dict(zip(table_over, values, strict=True))


def _prove(entry: Entry, table: Table, domains: Mapping[str, tuple[Any, ...]], diags: Diagnostics) -> None:
    """Report every rule pair that meets, every uncovered combination (the first eight), and rules and exclusions that
    never hold.
    """
    count = 1
    for values in domains.values():
        count *= len(values)
    if count > MAX_COMBINATIONS:
        diags.error(
            entry.pos("over"),
            f"table '{table.name}' has {count} combinations; at most {MAX_COMBINATIONS} are tried: split it",
        )
        return
    used = [False] * len(table.rules)
    excluded = [False] * len(table.impossible)
    met: set[tuple[int, int]] = set()
    uncovered = []
    for combination in combinations(domains):
        gone = [k for k, (c, _) in enumerate(table.impossible) if c.holds(combination)]
        for k in gone:
            excluded[k] = True
        if gone:
            continue
        hits = [k for k, rule in enumerate(table.rules) if rule.when.holds(combination)]
        for k in hits:
            used[k] = True
        if not hits:
            uncovered.append(combination)
        for a, b in itertools.combinations(hits, 2):
            if (a, b) not in met:
                met.add((a, b))
                also = [(entry.pos("rules", a, "when"), "the other rule is here")]
                diags.error(
                    entry.pos("rules", b, "when"),
                    f"table '{table.name}': two rules hold for {describe(combination)}",
                    also=also,
                )
    for combination in uncovered[:8]:
        more = f" (and {len(uncovered) - 8} more)" if combination is uncovered[7:8] and len(uncovered) > 8 else ""
        diags.error(entry.pos("rules"), f"table '{table.name}': no rule holds for {describe(combination)}{more}")
    for k, hit in enumerate(used):
        if not hit:
            diags.error(entry.pos("rules", k, "when"), f"table '{table.name}': this rule never holds")
    for k, hit in enumerate(excluded):
        if not hit:
            diags.error(entry.pos("impossible", k, "when"), f"table '{table.name}': this exclusion never holds")


def describe(combination: Combination) -> str:
    """`data, not metadata, mutation=DATA` for messages."""
    parts = [f"{n}={v}" if isinstance(v, str) else n if v else f"not {n}" for n, v in combination.items()]
    return ", ".join(parts)


class _Fault(Exception):
    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def parse_condition(
    entry: Entry,
    path: tuple[str | int, ...],
    text: Any,
    domains: Mapping[str, tuple[Any, ...]],
    qualified: Mapping[str, str],
    diags: Diagnostics,
) -> Condition | None:
    """The condition of an entry, or None after reporting. `domains` are the values of each predicate, `qualified` how members print."""
    try:
        tree = ast.parse(str(text), mode="eval").body
    except SyntaxError as e:
        diags.error(entry.pos(*path, at=max(0, (e.offset or 1) - 1)), f"expected a condition: {e.msg}")
        return None
    try:
        return Condition(tree, _print(tree, domains, qualified))
    except _Fault as fault:
        diags.error(entry.pos(*path, at=fault.offset), str(fault))
        return None


def _print(node: ast.expr, domains: Mapping[str, tuple[Any, ...]], qualified: Mapping[str, str]) -> str:
    """Check and print; precedence is kept by parentheses around every inner `and`, `or` and comparison."""
    match node:
        case ast.BoolOp(op=op, values=values):
            word = " and " if isinstance(op, ast.And) else " or "
            return word.join(f"({t})" if " " in (t := _print(v, domains, qualified)) else t for v in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            text = _print(operand, domains, qualified)
            return f"not ({text})" if " " in text else f"not {text}"
        case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[right]):
            if name not in domains or domains[name] == (False, True):
                known = [n for n, d in domains.items() if d != (False, True)]
                raise _Fault(
                    f"expected a predicate that is an enum, found '{name}'{did_you_mean(name, known)}", node.col_offset
                )
            words: dict[type, str] = {ast.Eq: "==", ast.NotEq: "!=", ast.In: "in", ast.NotIn: "not in"}
            relation = words.get(type(op), "")
            if not relation or (relation in ("in", "not in")) != isinstance(right, (ast.List, ast.Tuple)):
                raise _Fault("expected ==, != with a member, or `in`, `not in` with a list of members", node.col_offset)
            members = right.elts if isinstance(right, (ast.List, ast.Tuple)) else [right]
            texts = [_member(m, domains[name], qualified) for m in members]
            listed = isinstance(right, (ast.List, ast.Tuple))
            return f"{name} {relation} ({', '.join(texts)},)" if listed else f"{name} {relation} {texts[0]}"
        case ast.Name(id=name):
            if domains.get(name) != (False, True):
                known = [n for n, d in domains.items() if d == (False, True)]
                raise _Fault(
                    f"expected a predicate that is a bool, found '{name}'{did_you_mean(name, known)}", node.col_offset
                )
            return name
    raise _Fault(f"expected and, or, not, a predicate or a comparison, found '{ast.unparse(node)}'", node.col_offset)


def _member(node: ast.expr, members: tuple[Any, ...], qualified: Mapping[str, str]) -> str:
    if not isinstance(node, ast.Name) or node.id not in members:
        text = ast.unparse(node)
        raise _Fault(f"expected {one_of(members)}, found '{text}'{did_you_mean(text, members)}", node.col_offset)
    return qualified[node.id]


def _value(node: ast.expr, combination: Combination) -> Any:
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(v, combination) for v in values)
        case ast.BoolOp(values=values):
            return any(_value(v, combination) for v in values)
        case ast.UnaryOp(operand=operand):
            return not _value(operand, combination)
        case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[right]):
            members = right.elts if isinstance(right, (ast.List, ast.Tuple)) else [right]
            found = any(combination[name] == m.id for m in members if isinstance(m, ast.Name))
            return found if isinstance(op, (ast.Eq, ast.In)) else not found
        case ast.Name(id=name):
            return combination[name]
    raise AssertionError(ast.dump(node))
