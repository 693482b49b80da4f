"""The summary of an explanation: what a person reads in ten seconds. And the texts of its graphs."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .units import bytes_text, count_text, percent_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .explanation import Explanation

__all__ = ["details_text", "print_summary", "summary_text"]

WIDTH = 110
SHOWN = 5  # steps that take longest, library operators, reasons
NOTHING = (
    "nothing was compiled: the call ran no operator on tensors that Dynamo could capture (nn.LSTM, nn.GRU and nn.RNN are left to "
    "eager unless torch._dynamo.config.allow_rnn is set)"
)


def summary_text(facts: dict[str, Any]) -> str:
    """Without colours."""
    from rich.console import Console

    file = io.StringIO()
    print_summary(facts, Console(file=file, width=WIDTH, color_system=None, force_terminal=False, highlight=False))
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def print_summary(facts: dict[str, Any], console: Console) -> None:
    from rich.text import Text

    graphs = facts["graphs"]
    eager = sum(e["count"] for e in facts["eager"])
    head = Text()
    head.append("opforge", style="bold")
    kernels, library = (
        sum(g["kernels"] for g in graphs if _is_whole(g)),
        sum(g["library"] for g in graphs if _is_whole(g)),
    )
    head.append(
        f": {count_text(facts['programs'], 'graph')}, {count_text(kernels, 'kernel')}, {count_text(library, 'library call')}; "
    )
    head.append(
        f"{count_text(eager, 'graph')} ran eagerly" if eager else "no graph ran eagerly",
        style="yellow" if eager else "",
    )
    console.print(head)
    if facts["error"]:
        console.print(Text(f"the program raised {facts['error']}", style="red"))
    if not graphs and not eager:
        console.print(NOTHING)
    for text in _eager(facts):
        console.print(Text(text), soft_wrap=False)
    if graphs:
        console.print()
        console.print(_graphs(graphs))
    if slow := _slowest(graphs):
        console.print()
        console.print(_steps(slow, sum(one["seconds"] for g in graphs for one in g["timeline"])))
    for text in (*_library(graphs), *_notes(graphs)):
        console.print(Text(text))


def _is_whole(graph: dict[str, Any]) -> bool:
    """Whether no other graph's counts include this one's."""
    return "," not in graph["name"] or graph["name"].endswith((", forward", ", backward"))


def _table() -> Table:
    from rich.table import Table

    return Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))


def _graphs(graphs: list[dict[str, Any]]) -> Table:
    table = _table()
    table.add_column("", no_wrap=True, overflow="ellipsis", min_width=17)
    for name in ("kernels", "library", "measured", "roofline", "reached", "moved", "least"):
        table.add_column(name, justify="right", no_wrap=True, min_width=8 if name in ("measured", "roofline") else None)
    timed = [g for g in graphs if g["measured"]]
    for g in graphs:
        seconds = g["measured"]["seconds"] if g["measured"] else None
        share = None if seconds is None or g["predicted"] is None else g["predicted"] / seconds
        table.add_row(
            g["name"],
            str(g["kernels"]),
            str(g["library"]),
            seconds_text(seconds),
            _at_least(g["predicted"], g.get("unpredicted", 0)),
            percent_text(share),
            bytes_text(g["moved"]),
            bytes_text(g["least"]),
        )
    if len(timed) > 1 and len(timed) == len(graphs) and all(map(_is_whole, graphs)):
        seconds = sum(g["measured"]["seconds"] for g in timed)
        predicted = sum(g["predicted"] or 0 for g in timed)
        moved = None if any(g["moved"] is None for g in timed) else sum(g["moved"] for g in timed)
        table.add_section()
        counts = [str(sum(g[what] for g in graphs)) for what in ("kernels", "library")]
        table.add_row(
            "all",
            *counts,
            seconds_text(seconds),
            seconds_text(predicted),
            percent_text(predicted / seconds),
            bytes_text(moved),
            "",
        )
    return table


def _at_least(seconds: float | None, unknown: int) -> str:
    """The sum of what is known of the steps, `unknown` of which are not."""
    if unknown and not seconds:
        return seconds_text(None)
    return f"≥ {seconds_text(seconds)}" if unknown else seconds_text(seconds)


def _slowest(graphs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = [s for g in graphs for s in g["steps"] if s["measured"] is not None]
    return sorted(steps, key=lambda s: -s["measured"])[:SHOWN]


def _steps(slow: list[dict[str, Any]], whole: float) -> Table:
    """The slowest steps; `whole` is the seconds of all steps of all graphs, of which each has its share."""
    table = _table()
    table.add_column("where the time goes", no_wrap=True, overflow="ellipsis", max_width=34)
    for name in ("measured", "share", "roofline"):
        table.add_column(name, justify="right", no_wrap=True, min_width=8)
    table.add_column("limit", no_wrap=True, min_width=10)
    table.add_column("line", no_wrap=True, overflow="ellipsis", max_width=34)
    for s in slow:
        table.add_row(
            s["name"],
            seconds_text(s["measured"]),
            percent_text(s["measured"] / whole if whole else None),
            seconds_text(s["predicted"]),
            s["bound"] or "unknown",
            _short(s["lines"]),
        )
    return table


def _short(lines: list[str]) -> str:
    """`file.py:12: code` of the first line."""
    if not lines:
        return "unknown"
    place, code = ([*lines[0].partition(": ")[::2]]) if ": " in lines[0] else (lines[0], "")
    return f"{place.partition(' in ')[0]}: {code}" if code else place


def _eager(facts: dict[str, Any]) -> Iterator[str]:
    for e in facts["eager"]:
        yield f"# {count_text(e['count'], 'graph')} ran eagerly: {e['why']}"
    breaks = sum(b["count"] for b in facts["breaks"])
    if breaks:
        yield f"Python ran between graphs, {count_text(breaks, 'graph break')}:"
        yield from (f"  {b['why']}" for b in facts["breaks"][:SHOWN])


def _library(graphs: list[dict[str, Any]]) -> Iterator[str]:
    """Operators that are library calls, and why."""
    counts: Counter[str] = Counter()
    why: dict[str, str] = {}
    for g in filter(_is_whole, graphs):
        counts.update(g["externs"])
    for g in graphs:
        for s in g["steps"]:
            for text in s["why_library"]:
                why.setdefault(s["name"], text)
    if counts:
        yield ""
        yield "library calls:"
        for op, n in counts.most_common(SHOWN):
            yield f"  {op} × {n}" + (f": {why[op]}" if op in why else "")
        if len(counts) > SHOWN:
            yield f"  and {len(counts) - SHOWN} more operators"


def _notes(graphs: list[dict[str, Any]]) -> Iterator[str]:
    unmeasured = {g["name"]: g["unmeasured"] for g in graphs if g["steps"] and not g["measured"] and g["unmeasured"]}
    if unmeasured:
        yield ""
        yield from (f"{name} was not timed: {why}" for name, why in unmeasured.items())
    if recorded := [g["name"] for g in graphs if g["recorded"] and g["measured"]]:
        yield ""
        yield f"timed without the CUDA graphs that they run as: {', '.join(recorded)}"
    if any(g["measured"] for g in graphs):
        yield ""
        yield "measured: the fastest call of each graph. roofline: an estimate, from copies and matrix products timed here."
        yield "Texts of the graphs: .details() or --details. A page with pictures: .html(FILE) or --html FILE."


def details_text(said: Explanation) -> str:
    """The texts of each graph: loop IR, kernels, wrapper, and the functions that run branches and loops."""
    parts = [f"# {n} graph(s) ran eagerly: {reason}" for reason, n in said.fallbacks.items()]
    if not said.graphs and not parts:
        parts = [f"# {NOTHING}"]
    for k, artifacts in enumerate(said.graphs):
        for what, a in ((f"graph {k}", artifacts), (f"graph {k}, backward", artifacts.backward)):
            if a is not None:
                parts += _details(what, a)
    return "\n".join(parts)


def _details(what: str, a: Any) -> list[str]:
    from ..runtime.ir.text import dump

    calls = ", ".join(f"{op} × {n}" for op, n in a.externs.items())
    head = [
        count_text(a.kernels, "kernel"),
        count_text(sum(a.externs.values()), "library call") + (f" ({calls})" if calls else ""),
        f"arena of {a.arena_bytes} bytes",
        "from the cache" if a.cached else "compiled now",
    ]
    parts = [f"# {what}: {', '.join(head)}"]
    if a.program is not None:
        parts += ["## loop IR", dump(a.program)]
    # On a GPU the text of the kernels is Python.
    kernels = "## Triton" if "\nimport triton\n" in f"\n{a.cpp}" else "## C++"
    parts += [kernels, a.cpp, "## wrapper", a.wrapper]
    for name, source in a.controls.items():
        parts += [f"## {name}", source]
    for name, graph in a.inside.items():
        parts += _details(f"{what}, {name}", graph)
    return parts
