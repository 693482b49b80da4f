"""Which overloads of torch's operators each entry covers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .diagnostics import Diagnostics, did_you_mean, one_of
from .expr.ops import callable_here
from .load import Entry
from .model import Model
from .op_entries import WITHOUT_LOWERING
from .torch_schemas import TorchSchema


def op_names(entry: Entry) -> list[str]:
    """What `op:` names: one operator or a list."""
    value = entry.get("op")
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def overloads_of(doc: Sequence[Entry], model: Model, diags: Diagnostics) -> list[tuple[Entry, tuple[TorchSchema, ...]]]:
    """Each entry with its overloads. Mistakes go to `diags`."""
    owner: dict[str, Entry] = {}
    packets: dict[str, Entry] = {}
    for entry in doc:
        for k, name in enumerate(op_names(entry)):
            table = packets if name.count(".") == 1 else owner
            first = table.setdefault(name, entry)
            if first is not entry or op_names(entry).index(name) != k:
                diags.error(
                    _op_pos(entry, k), f"'{name}' is covered twice", also=[(first.pos("op"), "the first one is here")]
                )
    out = []
    for entry in doc:
        schemas: list[TorchSchema] = []
        for k, name in enumerate(op_names(entry)):
            found = model.torch.get(name)
            if not found:
                _unknown_op(entry, k, name, model, diags)
                continue
            # A row without a function may name what no graph can hold; a variant has the row of its functional form.
            exact = name.count(".") == 2
            bare = entry.get("kind") in WITHOUT_LOWERING
            fit = [s for s in found if callable_here(s) or (bare and (exact or not s.is_out))]
            if not fit:
                diags.error(
                    _op_pos(entry, k),
                    f"'{name}' has no overload that a graph can hold: each writes to an argument or returns no tensor",
                )
            left = [s for s in fit if name.count(".") == 2 or s.id not in owner]
            if fit and not left:
                also = [(_op_pos(owner[s.id], op_names(owner[s.id]).index(s.id)), "an overload's entry") for s in fit]
                diags.error(
                    _op_pos(entry, k), f"'{name}' covers nothing: each of its overloads has an entry", also=also
                )
            # Its expressions are checked all the same, so that one run shows every mistake.
            schemas += left or fit
        out.append((entry, tuple(sorted(schemas, key=lambda s: s.id))))
    return out


def _op_pos(entry: Entry, k: int) -> Any:
    return entry.pos("op", k) if isinstance(entry.get("op"), list) else entry.pos("op")


def _unknown_op(entry: Entry, k: int, name: str, model: Model, diags: Diagnostics) -> None:
    parts = name.split(".")
    if len(parts) not in (2, 3):
        diags.error(
            _op_pos(entry, k), f"expected an operator, 'namespace.name' or 'namespace.name.overload', found '{name}'"
        )
        return
    packet = ".".join(parts[:2])
    overloads = [s.overload for s in model.torch.get(packet)]
    if overloads:
        text = f"'{packet}' has no overload '{parts[2]}'{did_you_mean(parts[2], overloads)}; it has {one_of(overloads)}"
        diags.error(_op_pos(entry, k), text)
    else:
        hint = did_you_mean(packet, model.torch.packets())
        if not any(p.startswith(parts[0] + ".") for p in model.torch.packets()):
            hint = f"; if it is your own, import the module that registers it (--import){hint}"
        diags.error(_op_pos(entry, k), f"torch has no operator '{packet}'{hint}")
