"""`opforge minify`: a recorded graph that fails, made smaller while it fails in the same way."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..generated.config import Config
from ..runtime.observe.folder import folder_files
from .recorded import FolderError, Recorded, read_folder
from .repro import Verdict, check

__all__ = ["Found", "calls", "failing_folder", "minified", "write_folder"]

_FIXED = Config(debug_save_inputs=True)
Told = Callable[[int, int, int], None]
"""Given the calls and elements that are left, and the number of graphs that were tried."""


@dataclass(frozen=True)
class Found:
    """The smallest graph found, what it shows, and how many graphs were tried."""

    recorded: Recorded
    verdict: Verdict
    tried: int


def calls(recorded: Recorded) -> int:
    """The calls of a graph."""
    return sum(n.op.startswith("call") for n in recorded.graph.graph.nodes)


def elements(recorded: Recorded) -> int:
    """The elements of its inputs."""
    return sum(t["extent"] for t in recorded.about["inputs"] if t["kind"] == "tensor")


def minified(
    recorded: Recorded, seconds: float = 300.0, seed: int = 0, device: str = "", told: Told | None = None
) -> Found | None:
    """The smallest graph found in that time which fails as this one does; None where it does not fail."""
    end = time.monotonic() + seconds
    first = check(recorded, seed, device)
    if not first.failed:
        return None
    best, verdict, tried = _fixed(recorded, recorded.graph, recorded.inputs(seed, device)), first, 1
    again = check(best)
    if not _alike(again, first):  # what copies of the inputs do not show
        return Found(recorded, first, tried)
    seen = {_text(best)}
    changed = True
    while changed:
        changed = False
        for smaller in _candidates(best):
            if time.monotonic() > end:
                return Found(best, verdict, tried)
            if _weight(smaller) >= _weight(best) or (text := _text(smaller)) in seen:
                continue
            seen.add(text)
            tried += 1
            if told is not None:
                told(calls(best), elements(best), tried)
            found = check(smaller)
            if _alike(found, first):
                best, verdict, changed = smaller, found, True
                break
    return Found(best, verdict, tried)


def _alike(a: Verdict, b: Verdict) -> bool:
    return a.failed and (a.kind, a.what.partition(" of ")[0]) == (b.kind, b.what.partition(" of ")[0])


def _weight(recorded: Recorded) -> tuple[int, int, int]:
    (output,) = (n for n in recorded.graph.graph.nodes if n.op == "output")
    trained = sum(t["kind"] == "tensor" and t["requires_grad"] for t in recorded.about["inputs"])
    return calls(recorded), elements(recorded), len(output.all_input_nodes) + trained + len(recorded.about["inputs"])


def _text(recorded: Recorded) -> str:
    """The same for the same graph with the same inputs."""
    sums = {}  # which tell values of the same sizes apart
    for name, tensor in recorded.tensors.items():
        content = tensor.view(torch.uint8).double()
        sums[name] = float(content @ torch.arange(1, content.numel() + 1, dtype=torch.float64))
    return f"{recorded.graph.code}{json.dumps(recorded.about['inputs'])}{sums}"


def _fixed(like: Recorded, graph: fx.GraphModule, inputs: list[Any]) -> Recorded:
    """A graph with the values of its inputs."""
    files = folder_files(graph, inputs, _FIXED)
    about = json.loads(files["graph.json"])
    if "unwritten" in about:
        raise FolderError(about["unwritten"])
    about |= {key: like.about[key] for key in ("versions", "settings", "torch", "symbolic")}
    saved = {
        t["name"]: v for t, v in zip(about["inputs"], inputs, strict=True) if t["kind"] == "tensor" and t["extent"]
    }
    flat = {t["name"]: t for t in about["inputs"]}
    values = {n: v.detach().as_strided((flat[n]["extent"],), (1,), 0).cpu().clone() for n, v in saved.items()}
    return Recorded(graph, about, values)


def write_folder(recorded: Recorded, folder: Path, notes: Mapping[str, Any]) -> None:
    """Write a graph with the values of its inputs as a folder that `opforge repro` runs."""
    files = folder_files(recorded.graph, recorded.inputs(), _FIXED)
    about = json.loads(files["graph.json"])
    about |= {key: recorded.about[key] for key in ("versions", "settings", "torch", "symbolic")} | dict(notes)
    files["graph.json"] = json.dumps(about, indent=1) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


# --- Smaller graphs


def _candidates(recorded: Recorded) -> Iterator[Recorded]:
    """Graphs that are a bit smaller, the boldest first."""
    values = _values(recorded)
    names = [n.name for n in recorded.graph.graph.nodes if n.op.startswith("call")]
    for attempt in _attempts(recorded, names, values):
        try:
            yield attempt()
        except Exception:  # noqa: BLE001 - what cannot be built is no smaller graph
            continue


def _attempts(recorded: Recorded, names: list[str], values: Mapping[str, Any]) -> Iterator[Callable[[], Recorded]]:
    order = _halves(len(names))
    tensors = [k for k in order if isinstance(values.get(names[k]), torch.Tensor)]
    for k in tensors:
        yield lambda k=k: _ending(recorded, names[k])  # type: ignore[misc]
    for k in order:
        yield lambda k=k: _starting(recorded, names[: k + 1], values)  # type: ignore[misc]
    (output,) = (n for n in recorded.graph.graph.nodes if n.op == "output")
    if len(output.all_input_nodes) > 1:
        for node in output.all_input_nodes:
            yield lambda node=node: _ending(recorded, node.name)  # type: ignore[misc]
    for k in tensors:
        yield lambda k=k: _starting(recorded, [names[k]], values)  # type: ignore[misc]
    for k in tensors:
        node = next(n for n in recorded.graph.graph.nodes if n.name == names[k])
        for other in node.all_input_nodes:
            if _same_kind(values.get(other.name), values[names[k]]):
                yield lambda node=node, other=other: _without(recorded, node.name, other.name)  # type: ignore[misc]
    for width in (len(names) // 2, len(names) // 4, 1):
        for k in range(0, len(names), width) if width else ():
            yield lambda k=k, width=width: _dropped(recorded, names[k : k + width])  # type: ignore[misc]
    yield lambda: _ungrad(recorded)
    if not recorded.symbolic:
        sizes = {s for t in recorded.about["inputs"] if t["kind"] == "tensor" for s in t["size"] if s > 1}
        for size in sorted(sizes, reverse=True):
            for smaller in dict.fromkeys((1, 2, 3, size // 4, size // 2, size - 1)):
                if 0 < smaller < size:
                    yield lambda a=size, b=smaller: _resized(recorded, a, slice(b))  # type: ignore[misc]
                    yield lambda a=size, b=smaller: _resized(recorded, a, slice(a - b, a))  # type: ignore[misc]


def _halves(count: int) -> list[int]:
    """Positions, those that halve what is between the ones before first."""
    out, step = [], count
    seen = set()
    while step:
        for k in range(step // 2, count, step):
            if k not in seen:
                seen.add(k)
                out.append(k)
        step //= 2
    return out + [k for k in range(count) if k not in seen]


class _Recorder(fx.Interpreter):
    """Keeps a copy of what each node returns."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.values[n.name] = _copy(value)
        elif isinstance(value, (bool, int, float)):
            self.values[n.name] = value
        return value


def _copy(t: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t.detach())
    return made.requires_grad_(t.requires_grad)


def _values(recorded: Recorded) -> dict[str, Any]:
    """What eager computes at each node, up to one that raises."""
    recorder = _Recorder(recorded.graph)
    try:
        with torch.set_grad_enabled(recorded.about["torch"]["grad"]):
            recorder.run(*recorded.inputs())
    except Exception:  # noqa: BLE001 - the values so far are kept
        pass
    return recorder.values


def _edited(recorded: Recorded) -> tuple[fx.GraphModule, dict[str, fx.Node], dict[str, Any]]:
    graph = copy.deepcopy(recorded.graph)
    names = [t["name"] for t in recorded.about["inputs"]]
    return graph, {n.name: n for n in graph.graph.nodes}, dict(zip(names, recorded.inputs(), strict=True))


def _done(recorded: Recorded, graph: fx.GraphModule, inputs: Mapping[str, Any], effects: bool = False) -> Recorded:
    """The graph without what nobody reads; with `effects` calls stay whose results nobody read before."""
    unread = {n.name for n in recorded.graph.graph.nodes if not n.users} if effects else set()
    for node in reversed(list(graph.graph.nodes)):
        if node.op not in ("output", "placeholder") and not node.users and node.name not in unread:
            graph.graph.erase_node(node)
    for node in list(graph.graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    graph.recompile()
    order = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
    return _fixed(recorded, graph, [inputs[name] for name in order])


def _ending(recorded: Recorded, name: str) -> Recorded:
    """Returns that value alone."""
    graph, nodes, inputs = _edited(recorded)
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    output.args = ((nodes[name],),)
    return _done(recorded, graph, inputs)


def _starting(recorded: Recorded, names: list[str], values: Mapping[str, Any]) -> Recorded:
    """Takes what those nodes return as inputs."""
    graph, nodes, inputs = _edited(recorded)
    first = next(iter(graph.graph.nodes))
    for name in names:
        node = nodes[name]
        if isinstance(values.get(name), torch.Tensor) and node.users:
            with graph.graph.inserting_before(first):
                given = graph.graph.placeholder(f"{name}_given")
            node.replace_all_uses_with(given)
            inputs[given.name] = values[name]
    return _done(recorded, graph, inputs)


def _without(recorded: Recorded, name: str, other: str) -> Recorded:
    """Takes an operand for a node's result."""
    graph, nodes, inputs = _edited(recorded)
    nodes[name].replace_all_uses_with(nodes[other])
    return _done(recorded, graph, inputs, effects=True)


def _dropped(recorded: Recorded, names: list[str]) -> Recorded:
    """Without calls that nobody reads, or that only each other read."""
    graph, nodes, inputs = _edited(recorded)
    for name in reversed(names):
        if not nodes[name].users:
            graph.graph.erase_node(nodes[name])
    return _done(recorded, graph, inputs, effects=True)


def _ungrad(recorded: Recorded) -> Recorded:
    """No input wants a gradient."""
    graph, _, inputs = _edited(recorded)
    return _done(
        recorded, graph, {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}, effects=True
    )


def _resized(recorded: Recorded, old: int, kept: slice) -> Recorded:
    """Every dimension of a size, and every such number in the graph, is smaller: that part of the elements is kept."""
    graph, _, inputs = _edited(recorded)
    new = len(range(old)[kept])
    for node in graph.graph.nodes:
        if node.op.startswith("call"):
            node.args, node.kwargs = fx.node.map_aggregate(
                (node.args, node.kwargs), lambda a: new if type(a) is int and a == old else a
            )
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and old in value.shape:
            cut = value.detach()[tuple(kept if s == old else slice(None) for s in value.shape)]
            made = torch.empty_permuted(cut.shape, _order(value), dtype=cut.dtype, device=cut.device).copy_(cut)
            inputs[name] = made.requires_grad_(value.requires_grad)
    return _done(recorded, graph, inputs, effects=True)


def _order(t: torch.Tensor) -> list[int]:
    return sorted(range(t.ndim), key=t.stride, reverse=True)


def _same_kind(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


# --- A program whose graphs are tried


def failing_folder(path: Path, arguments: list[str], device: str = "") -> tuple[Path, Recorded, list[str]]:
    """The folder itself, or that of the first graph of a program that fails; lines about the graphs before it.

    Raises `FolderError` where no graph of the program fails.
    """
    if path.is_dir():
        return path, read_folder(path, device), []
    root = Path(tempfile.mkdtemp(prefix="opforge-graphs-"))
    env = os.environ | {
        "OPFORGE_DEBUG_FOLDERS": "1",
        "OPFORGE_DEBUG_SAVE_INPUTS": "1",
        "OPFORGE_DUMP_DIR": str(root),
    }
    done = subprocess.run([sys.executable, "-m", "opforge", "run", str(path), *arguments], env=env, check=False)
    folders = sorted(p.parent for p in root.glob("graph_*/graph.json"))
    if not folders:
        raise FolderError(f"{path} compiled no graph (exit code {done.returncode})")
    lines = []
    for folder in folders:
        try:
            recorded = read_folder(folder, device)
            verdict = check(recorded, device=device)
        except FolderError as error:
            lines.append(str(error))
            continue
        lines.append(f"{folder}: {verdict}")
        if verdict.failed:
            return folder, recorded, lines
    raise FolderError(
        "\n".join([*lines, f"none of the {len(folders)} graphs of {path} fails alone; they are kept in {root}"])
    )
