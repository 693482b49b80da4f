"""Draw the rooms of the runtime and what they import from each other, out of the code, into docs/architecture.md.

    python tools/flow.py           writes the part between the marks of the page
    python tools/flow.py --check   only says whether that part is up to date; exits with 1 where it is not

A room is a package of `runtime/`, described by the first sentence of its docstring. The modules beside the packages are one more room, `driver`
(they compose the others), but for those that import no room: these, and `torch_compat` and `observe`, are open to all and have no arrows. The
names of the scheduling passes are those of `PASSES`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import networkx as nx
import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- flow: written by `python tools/flow.py`. Do not edit. -->\n"
END = "<!-- flow: end -->\n"
OPEN = ("torch_compat", "observe")
DRIVER = "driver"

console = Console()


def imports(path: Path, runtime: Path) -> Iterator[str]:
    """The rooms and top modules that a module of the runtime imports, also inside functions and for type checking."""
    here = path.relative_to(runtime).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (name[2] for name in names if name[:2] == ["opforge", "runtime"] and len(name) > 2)
        elif isinstance(node, ast.ImportFrom) and 0 < node.level <= len(here) + 1:
            base = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
            named = [part for part in base if part]
            yield from named[:1] or (alias.name for alias in node.names)


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring; "" where it has none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = text.split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.) (?=[A-Z`])", first)[0]


def import_graph(runtime: Path) -> nx.DiGraph:
    """An edge from each package or top module to those that import it."""
    parts = {p.stem: p for p in runtime.glob("*.py") if p.stem != "__init__"}
    parts |= {p.parent.name: p for p in runtime.glob("*/__init__.py")}
    graph = nx.DiGraph()
    for name, path in sorted(parts.items()):
        files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
        graph.add_node(name, doc=sentence(path), package=path.name == "__init__.py")
        found = {other for file in files for other in imports(file, runtime)}
        graph.add_edges_from((other, name) for other in sorted(found & parts.keys() - {name}))
    return graph


def rooms_of(modules: nx.DiGraph, driver: str) -> nx.DiGraph:
    """The graph of the rooms, with the top modules that import rooms as one, described by `driver`. What is open to all is left out."""
    packages = {name for name, package in modules.nodes(data="package") if package} - set(OPEN)
    tops = {name for name in modules if name not in packages and name not in OPEN}
    above = {name for name in tops if any(nx.has_path(modules, package, name) for package in packages)}
    room = {name: name for name in packages} | dict.fromkeys(above, DRIVER)
    graph = nx.DiGraph()
    graph.add_nodes_from((name, {"doc": modules.nodes[name]["doc"]}) for name in sorted(packages))
    graph.add_node(DRIVER, doc=driver)
    edges = {(room[a], room[b]) for a, b in modules.edges if a in room and b in room}
    graph.add_edges_from(sorted((a, b) for a, b in edges if a != b))
    return graph


def in_order(graph: nx.DiGraph) -> list[str]:
    """The rooms in the order of the flow: each as late as those allow that import it."""
    level: dict[str, int] = {}
    for name in reversed(list(nx.lexicographical_topological_sort(graph))):
        level[name] = min((level[after] for after in graph.successors(name)), default=0) - 1
    return sorted(level, key=lambda name: (level[name], name))


def passes(pipeline: Path) -> list[str]:
    """The names in the tuple `PASSES` of the module."""
    for node in ast.parse(pipeline.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "PASSES"
            and isinstance(node.value, ast.Tuple)
        ):
            return [ast.unparse(name) for name in node.value.elts]
    raise ValueError(f"{pipeline} defines no tuple PASSES")


def drawn(runtime: Path) -> str:
    """The part of the page: the arrows that follow from no others as a picture, a table of all, and the passes."""
    modules = import_graph(runtime)
    graph = rooms_of(modules, sentence(runtime / "__init__.py"))
    order = in_order(graph)
    arrows = nx.transitive_reduction(graph)
    picture = [f"  {name} --> {' & '.join(after)}" for name in order if (after := sorted(arrows.successors(name)))]
    rows = []
    for name in order:
        used = ", ".join(other for other in order if graph.has_edge(other, name))
        where = "`driver`: `runtime/*.py`" if name == DRIVER else f"[`{name}`](../runtime/{name}/)"
        rows.append(f"| {where} | {graph.nodes[name]['doc']} | {used} |")
    free = [name for name in sorted(modules) if name in OPEN or _is_open(modules, graph, name)]
    said = "".join(f"- `{name}`: {modules.nodes[name]['doc']}\n" for name in free)
    return (
        "```mermaid\nflowchart TD\n" + "\n".join(picture) + "\n```\n\n"
        "| room | what it holds | imports |\n|---|---|---|\n" + "\n".join(rows) + "\n\n"
        f"The passes of `schedule/pipeline.py`: {', '.join(passes(runtime / 'schedule' / 'pipeline.py'))}.\n\n"
        "Open to all rooms:\n\n" + said
    )


def _is_open(modules: nx.DiGraph, graph: nx.DiGraph, name: str) -> bool:
    """Whether it is a top module that imports no room."""
    return name not in graph and not any(nx.has_path(modules, room, name) for room in graph if room in modules)


def updated(page: str, part: str) -> str:
    """The page with the part between its marks. Raises `ValueError` where a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{part}\n{END}{after}"


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 where the page is out of date.")
    ] = False,
) -> None:
    """Write the rooms of the runtime and their imports into docs/architecture.md."""
    page = PAGE.read_text(encoding="utf-8")
    try:
        fresh = updated(page, drawn(ROOT / "runtime"))
    except (ValueError, nx.NetworkXException) as error:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} is not written: {error}") from None
    if fresh == page:
        console.print(f"{PAGE.relative_to(ROOT)} is up to date")
    elif check:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} is out of date: run python tools/flow.py")
    else:
        PAGE.write_text(fresh, encoding="utf-8")
        console.print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    typer.run(main)
