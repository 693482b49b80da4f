"""What the summary and the page show, as plain data for JSON. Seconds, bytes, operations (weighted: an addition is 1). None: unknown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import first_line
from ..runtime.ir.nodes import Buffer
from ..runtime.ir.text import dump
from ..runtime.kernels.plan import ExternStep, KernelStep, Plan, Step
from ..runtime.kernels.steps import allocation_root, arena_offset, step_reads, step_writes
from ..runtime.kernels.text import plan_text
from ..runtime.kernels.work import Sizes, Work, nbytes, step_name, total, work_of
from .apart import Apart
from .ceilings import Ceilings, ceilings
from .collect import NOT_CALLED, Call
from .measure import Event, Measured, measure, why_not
from .sources import source_of_kernel

__all__ = ["halves_of", "report"]

VERSION = 1


def report(explanation: Any, *, title: str = "", times: bool = True) -> dict[str, Any]:
    """Everything about an `Explanation`. `times`: graphs are called again, to time them."""
    calls = {id(c.half.artifacts): c for c in explanation.calls}
    reasons: dict[str, list[str]] = {}
    for text in explanation.reasons:
        op, _, why = text.partition(": ")
        reasons.setdefault(op, []).append(why)
    graphs = [_graph(name, a, calls.get(id(a)), reasons, times) for name, a in halves_of(explanation.graphs)]
    return {
        "version": VERSION,
        "title": title or "opforge explain",
        "error": explanation.error,
        "torch": torch.__version__,
        "programs": len(explanation.graphs),
        "eager": [{"why": why, "count": n} for why, n in explanation.fallbacks.items()],
        "breaks": [{"why": why, "count": n} for why, n in explanation.breaks.items()],
        "graphs": graphs,
    }


def halves_of(graphs: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every functional graph with its name: programs, their backwards, and the graphs that run inside of them."""

    def inner(name: str, a: Any) -> Iterator[tuple[str, Any]]:
        yield name, a
        for role, graph in a.inside.items():
            yield from inner(f"{name}, {role}", graph)

    for k, a in enumerate(graphs):
        yield from inner(f"graph {k}" if a.backward is None else f"graph {k}, forward", a)
        if a.backward is not None:
            yield from inner(f"graph {k}, backward", a.backward)


def _graph(name: str, a: Any, call: Call | None, reasons: dict[str, list[str]], times: bool) -> dict[str, Any]:
    plan = a.planned()
    facts: dict[str, Any] = {
        "name": name,
        "kernels": a.kernels,
        "library": sum(a.externs.values()),
        "externs": dict(a.externs),
        "arena": a.arena_bytes,
        "cached": a.cached,
        "compile_seconds": sum(a.seconds.values()) if a.seconds else None,
        "texts": {"loop IR": dump(a.program) if a.program is not None else "", "wrapper": a.wrapper, "kernels": a.cpp},
        "steps": [],
        "buffers": {},
        "edges": [],
        "memory": None,
        "timeline": [],
        "measured": None,
        "unmeasured": "the graph was not watched" if call is None else call.why,
        "predicted": None,
        "moved": None,
        "least": None,
        "operations": None,
        "device": "",
        "ceilings": None,
        "recorded": False,
    }
    if plan is None:
        return facts
    facts["recorded"] = call is not None and call.half.recorded
    facts["texts"]["plan"] = plan_text(plan)
    device = _device(call)
    roof = ceilings(device) if times else None
    measured = None
    if times and call is not None:
        facts["unmeasured"] = why_not(call, plan)
        if facts["unmeasured"] == NOT_CALLED and name.endswith(", backward"):
            facts["unmeasured"] = "nothing called backward() on the result while it was explained"
        if not facts["unmeasured"]:
            try:
                measured = measure(call, plan, device)
            except Exception as error:  # noqa: BLE001 - what the graph may raise is shown, and all else about it too
                facts["unmeasured"] = f"calling it again raised {type(error).__name__}: {first_line(error)}"
    sizes = Sizes(plan, call.half.names if call is not None else (), call.given if call is not None else None)
    return facts | _Graph(a, plan, call, sizes, roof, measured, reasons).facts() | {"device": _called(device)}


def _device(call: Call | None) -> str:
    values = [n.meta.get("val") for n in call.half.graph.graph.nodes] if call is not None else []
    return next((str(v.device) for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda"), "cpu")


def _called(device: str) -> str:
    if device == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name(device)} ({device})"


class _Graph:
    """The facts of one plan."""

    def __init__(
        self,
        artifacts: Any,
        plan: Plan,
        call: Call | None,
        sizes: Sizes,
        roof: Ceilings | None,
        measured: Measured | None,
        reasons: dict[str, list[str]],
    ) -> None:
        self.a, self.plan, self.sizes, self.roof, self.measured, self.reasons = (
            artifacts,
            plan,
            sizes,
            roof,
            measured,
            reasons,
        )
        self.lines = call.lines if call is not None else {}
        self.works = [work_of(step, plan, sizes) for step in plan.steps]
        self.made = {n: k for k, step in enumerate(plan.steps) for n in step_writes(step)}
        self.symbols = {name: how[0] for name, how in artifacts.symbols.items()}
        self.functions = {member: name for name, members in artifacts.groups.items() for member in members}

    def facts(self) -> dict[str, Any]:
        timeline = self._timeline()
        steps = [self._step(k, step, self.works[k]) for k, step in enumerate(self.plan.steps)]
        for event in timeline:
            if event["step"] is not None:
                steps[event["step"]]["measured"] = event["seconds"]
        number = {s["name"]: k for k, s in enumerate(steps)}
        for members in self.a.groups.values():
            for member in members[1:]:
                if member in number and members[0] in number:
                    steps[number[member]]["with"] = number[members[0]]
        predictions = [s["predicted"] for s in steps]
        counts = [w.operations for w in self.works]
        facts: dict[str, Any] = {
            "steps": steps,
            "buffers": self._buffers(),
            "edges": self._edges(),
            "memory": self._memory(),
            "timeline": timeline,
            "predicted": sum(p for p in predictions if p is not None) if steps and self.roof else None,
            "unpredicted": sum(p is None for p in predictions),
            "moved": total(w.moved for w in self.works),
            "least": self._least(),
            "operations": sum(n for n in counts if n is not None),
            "uncounted": sum(n is None for n in counts),
        }
        if self.roof is not None:
            roof = self.roof
            facts["ceilings"] = {
                "copies": [list(c) for c in roof.copies],
                "operations": roof.operations,
                "products": {w.product: roof.rate(w.product) for w in self.works if w.product},
                "bandwidth": roof.bandwidth,
                "best": roof.best,
            }
        if self.measured is not None:
            m = self.measured
            facts["measured"] = {"seconds": m.seconds, "calls": m.calls, "timed_seconds": m.timed_seconds}
        return facts

    def _step(self, k: int, step: Step, work: Work) -> dict[str, Any]:
        kernel = step.kernel if isinstance(step, KernelStep) else None
        origins = (
            list(kernel.origins) if kernel is not None else [step.call.origin] if isinstance(step, ExternStep) else []
        )
        function = self.functions.get(kernel.name, kernel.name) if kernel is not None else ""
        predicted = self.roof.seconds(work.moved, work.operations, work.product) if self.roof is not None else None
        facts = {
            "name": step_name(step),
            "kind": _kind(step),
            "operators": list(dict.fromkeys(o.partition(": ")[0] for o in origins if o)),
            "lines": self._lines(origins),
            "reads": [[n, b] for n, b in work.reads.items()],
            "writes": [[n, b] for n, b in work.writes.items()],
            "moved": work.moved,
            "operations": work.operations,
            "product": work.product,
            "predicted": predicted,
            "bound": self._bound(work),
            "measured": None,
            "with": None,
            "function": function if kernel is not None and function != kernel.name else "",
            "code": source_of_kernel(self.a.cpp, self.symbols.get(function, function)) if kernel is not None else "",
            "why_library": [],
        }
        if isinstance(step, ExternStep) and step.call.target:
            facts["why_library"] = self.reasons.get(step.call.target, [])
        return facts

    def _lines(self, origins: Sequence[str]) -> list[str]:
        """`file.py:12 in forward: code` where it is known, else the code alone."""
        found: dict[str, None] = {}
        for origin in origins:
            code = origin.partition(": ")[2]
            known = self.lines.get(origin) or self.lines.get(code)
            found.update(dict.fromkeys(known or ([code] if code else [])))
        return list(found)

    def _bound(self, work: Work) -> str:
        if self.roof is None or work.moved is None:
            return ""
        copy = self.roof.copy_seconds(work.moved)
        if (work.operations or 0) / self.roof.rate(work.product) > copy:
            return "arithmetic"
        return "call" if work.moved <= self.roof.copies[0][0] else "memory"

    def _buffers(self) -> dict[str, dict[str, Any]]:
        """What each value is, and where it lives."""
        inputs = {b.name for b in self.plan.inputs}
        returned = {o.buffer for o in self.plan.outputs}
        layouts = {b.name: b for b in self._outs()} | self.plan.layouts
        found: dict[str, dict[str, Any]] = {}
        for name, b in layouts.items():
            role = "input" if name in inputs else "result" if name in returned else ""
            found[name] = {
                "text": f"{b.dtype}[{', '.join(map(str, b.shape))}]",
                "role": role,
                "step": self.made.get(name),
            }
        return found

    def _edges(self) -> list[list[Any]]:
        """[maker, reader, buffer, bytes, why they are not one kernel]"""
        apart = Apart(self.plan, self.made, self.a.program)
        found: list[list[Any]] = []
        pairs: set[tuple[int, int]] = set()
        for k, step in enumerate(self.plan.steps):
            for name in step_reads(step):
                maker = self.made.get(name)
                if maker is not None and maker < k:
                    pairs.add((maker, k))
                    found.append([maker, k, name, self.works[k].reads.get(name), apart.why(maker, k)])
        # Those that were compared since they read the same.
        found += [[a, b, "", 0, why] for (a, b), why in apart.pairs.items() if (a, b) not in pairs]
        return found

    def _least(self) -> int | None:
        """Bytes of the inputs that are read and of the results: what one perfect kernel would move."""
        inputs = {b.name for b in self.plan.inputs}
        read: dict[str, int | None] = {}
        written: dict[str, int | None] = {}
        for work in self.works:
            for n, size in work.reads.items():
                if n in inputs:
                    before = read.get(n, 0)
                    read[n] = None if size is None or before is None else max(size, before)
            for n, size in work.writes.items():
                if n in inputs or allocation_root(self.plan, n) in inputs:
                    written[n] = size
        for o in self.plan.outputs:
            if o.buffer is not None and o.buffer not in inputs:
                written[o.buffer] = self._bytes(o.buffer)
        return total([*read.values(), *written.values()])

    def _bytes(self, name: str) -> int | None:
        layout = self.plan.layouts.get(name) or next((b for b in self._outs() if b.name == name), None)
        return nbytes(layout, self.sizes)

    def _outs(self) -> Iterator[Buffer]:
        for step in self.plan.steps:
            if isinstance(step, ExternStep):
                yield from step.call.outs

    def _memory(self) -> dict[str, Any]:
        """Every value that has memory beside inputs: from the step that makes it to the last that reads it."""
        end = len(self.plan.steps)
        returned = {
            allocation_root(self.plan, o.buffer) for o in self.plan.outputs if o.buffer in self.plan.allocations
        }
        blocks: dict[str, dict[str, Any]] = {}
        for k, step in enumerate(self.plan.steps):
            for name in (*step_writes(step), *step_reads(step)):
                if name not in self.plan.allocations:
                    continue
                at = allocation_root(self.plan, name)
                kind = self.plan.allocations[at].kind
                if kind in ("input", "elided"):
                    continue
                if at not in blocks:
                    offset = arena_offset(self.plan, at) if kind == "arena" else None
                    blocks[at] = {
                        "name": at,
                        "kind": kind,
                        "offset": offset,
                        "bytes": self._bytes(at),
                        "first": k,
                        "last": k,
                        "values": [],
                    }
                block = blocks[at]
                block["last"] = k
                if name not in block["values"]:
                    block["values"].append(name)
        for at in returned & blocks.keys():
            blocks[at]["last"], blocks[at]["returned"] = end, True
        return {"arena": self.plan.arena_bytes, "blocks": list(blocks.values())}

    def _timeline(self) -> list[dict[str, Any]]:
        """What the wrapper called, in order, with the steps that the calls are."""
        events: Sequence[Event] = self.measured.events if self.measured is not None else ()
        kernels = {step_name(s): k for k, s in enumerate(self.plan.steps) if isinstance(s, KernelStep)}
        first = {name: members[0] for name, members in self.a.groups.items()}
        from ..runtime.kernels.routines import routine_call

        calls: list[int] = []
        for k, step in enumerate(self.plan.steps):
            if isinstance(step, ExternStep) and step.call.target:
                routine = routine_call(step, self.plan.layouts)
                if routine is None:
                    calls.append(k)
                else:
                    kernels[routine.name] = k
        others = [e for e in events if first.get(e.name, e.name) not in kernels]
        known = iter(calls if len(others) == len(calls) else ())
        found = []
        for event in events:
            own = kernels.get(first.get(event.name, event.name))
            step_number = own if own is not None else next(known, None)
            found.append({"step": step_number, "name": event.name, "start": event.start, "seconds": event.seconds})
        return found


def _kind(step: Step) -> str:
    if isinstance(step, ExternStep):
        return "library" if step.call.target else "sizes"
    return "kernel" if isinstance(step, KernelStep) else "copy"
