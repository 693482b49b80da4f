"""Reads specs/kernels.yaml and its templates, writes generated/kernels/: what generated kernels include or import."""

from __future__ import annotations

from typing import Any

from ..check import schema_of
from ..model import Model
from ..render import environment, header, literal

FOLDER = "generated/kernels"
MAX_THREADS = 1024
"""Upper bound of the threads of one parallel loop (the size of their arrays of partial results)."""


_PREFIX = "triton.routine_"
_INIT = '''"""What every generated kernel includes or imports, and which routines there are for a GPU: `file.function`."""

'''


def gpu_routines(model: Model) -> frozenset[str]:
    """The routines that have a Triton template: `file.function`."""
    entries = [e for e in model.entries("kernels") if e.id.startswith(_PREFIX)]
    return frozenset(f"{e.id.removeprefix(_PREFIX)}.{name}" for e in entries for name in e.data.get("routines", ()))


def emit(model: Model) -> dict[str, str]:
    """Every template of `kernels.yaml` that has an output, rendered with the scalars and targets."""
    entries = model.entries("kernels")
    scalars, targets = model.part("scalars", None), model.part("targets", None)
    if not entries or scalars is None or targets is None:
        return {}
    # Of targets with one guard, which have vectors of one size, the first stands for all.
    guarded: dict[str, Any] = {}
    for target in targets.cpu.values():
        if target["guard"]:
            guarded.setdefault(target["guard"], target)
    values: dict[str, Any] = {
        "scalars": scalars.scalars,
        # Wider vectors first: a compiler that has them defines the macros of the narrower ones too.
        "targets": sorted(guarded.values(), key=lambda t: -t["lanes"]),
        "vector_lanes": schema_of("targets").definition("cpu")["properties"]["lanes"]["enum"],
        "portable": next(t for t in targets.cpu.values() if not t["guard"]),
        "max_threads": MAX_THREADS,
        "polynomials": {e.id: e.data for e in model.entries("polynomials")},
        "literal": literal,
    }
    init = f"{FOLDER}/__init__.py"
    names = "".join(f'    "{name}",\n' for name in sorted(gpu_routines(model)))
    out = {init: f"{header(init, 'specs/kernels.yaml')}{_INIT}GPU_ROUTINES = frozenset(({names and chr(10)}{names}))\n"}
    for entry in entries:
        path = f"{FOLDER}/{entry['output']}"
        template = environment(model.specs / "kernels").get_template(entry["template"])
        out[path] = template.render(header=header(path, f"specs/kernels/{entry['template']}").rstrip(), **values)
    return out
