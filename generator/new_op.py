"""The template entry of `opforge new-op`: valid as it stands, to be filled in."""

from __future__ import annotations

from ..errors import SpecError
from .diagnostics import Pos, did_you_mean
from .expr.ops import callable_here
from .model import Model
from .op_entries import WITHOUT_LOWERING
from .torch_schemas import TorchSchema

_BODIES = {
    "pointwise": ["expr: {tensor}"],
    "view": ["shape: shape({tensor})", "at: '{tensor}[*i]'"],
    "gather": ["shape: shape({tensor})", "at: '{tensor}[*i]'"],
    "create": ["shape: '[]'", "at: 0"],
    "reduction": ["shape: '[]'", "over: shape({tensor})", "reduce: sum", "at: '{tensor}[*r]'"],
    "scan": ["shape: shape({tensor})", "scan: sum", "dim: 0", "at: '{tensor}[*i]'"],
    "scatter": ["over: shape({tensor})", "base: '{tensor}'", "into: r", "mode: set", "at: '{tensor}[*r]'"],
    "composite": ["body: |", "  return {tensor}"],
    "extern": ["why: what speaks against a native lowering"],
    "decomposed": [],
}
KINDS = tuple(_BODIES)


def template(name: str, kind: str, model: Model) -> str:
    """An entry for torch's operator `name` (`softplus`, `aten.sum.dim_IntList`), below its schemas as comments.

    Raises `SpecError` when torch has no such operator, its name misses by a little, or there is an entry already.
    """
    if kind not in _BODIES:
        raise SpecError(f"unknown kind '{kind}' (there are {', '.join(KINDS)}){did_you_mean(kind, KINDS)}")
    full = name if "." in name else "aten." + name
    schemas = [s for s in model.torch.get(full) if not s.is_out and not s.mutates]
    if not schemas:
        packets = model.torch.packets()
        own = not any(p.startswith(full.partition(".")[0] + ".") for p in packets)
        hint = "; if it is your own, import the module that registers it (--import)" if own else ""
        raise SpecError(f"torch has no functional operator '{full}'{hint or did_you_mean(full, packets)}")
    taken: dict[str, Pos] = {}
    notes: list[str] = []
    for entry in model.entries("ops"):
        for path, other in entry.names():
            if entry.get("kind") in WITHOUT_LOWERING:
                if other == full or full.startswith(other + ".") or other.startswith(full + "."):
                    notes.append(
                        f"# In place of '{other}' there: {entry.name_pos(*path)} ({entry['kind']}: {entry['doc']})"
                    )
                continue
            if other == full or full.startswith(other + "."):
                raise SpecError(f"'{other}' has an entry already: {entry.name_pos(*path)}")
            taken[other] = entry.name_pos(*path)
    free = [s for s in schemas if s.id not in taken and (kind in WITHOUT_LOWERING or callable_here(s))]
    if not free:
        places = "\n".join(f"  {s.id}: {taken.get(s.id, 'not for this kind')}" for s in schemas)
        raise SpecError(f"each overload of '{full}' has an entry already:\n{places}")
    schemas = free
    tensor = _tensor(schemas[0])
    lines = [*(f"# {s.text}" for s in schemas), *notes]
    lines += [f"- op: {full}", "  doc: what it computes, in one line", f"  kind: {kind}"]
    lines += ["  " + line.format(tensor=tensor) for line in _BODIES[kind]]
    return "\n".join(lines) + "\n"


def _tensor(schema: TorchSchema) -> str:
    return next((a.name for a in schema.args if a.type.startswith("Tensor")), "0")
