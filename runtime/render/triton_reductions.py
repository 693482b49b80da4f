"""Reductions of a block of values in Triton: over one tile, or by accumulators from tile to tile."""

from __future__ import annotations

from dataclasses import dataclass

from ...generated.triton_scalars import TRITON_COMBINE, TRITON_REDUCTIONS
from ..ir.index import Var
from ..kernels.operands import HALF
from ..kernels.plan import Reduce, Scan
from ..tile.launch import Launch
from .triton_gather import accumulators, combined
from .triton_values import TYPES, held, identity_of, is_position, kind_of


@dataclass(frozen=True)
class Reductions:
    """`int64_index`: whether indices have 64 bits."""

    launch: Launch
    int64_index: bool

    def masked(self, st: Reduce | Scan, value: str, group: int) -> str:
        """The value over the whole tile, the identity outside of the loops."""
        dtype = st.value.dtype
        value = self._positional(st, value)
        identity = identity_of(st.kind, dtype, isinstance(st, Scan))
        if dtype == "bool" and is_position(st):
            identity = "0" if st.kind == "argmax" else "1"
            dtype = "int8"
        return f"tl.where(xmask & rmask{group}, {value}, tl.full([XBLOCK, RBLOCK], {identity}, {held(dtype)}))"

    def _positional(self, st: Reduce | Scan, value: str) -> str:
        return f"({value}).to(tl.int8)" if is_position(st) and st.value.dtype == "bool" else value

    def reduced(self, st: Reduce, block: str, position: str, axis: int = 1) -> str:
        """The result over a block; of an argmax `position` is where its values stand."""
        kind, dtype = st.kind, st.value.dtype
        if dtype == "bool":
            kind = {"sum": "any", "max": "any", "prod": "all", "min": "all"}.get(kind, kind)
        if is_position(st):
            position = f"tl.broadcast_to({position}, [XBLOCK, RBLOCK])"
        text = TRITON_REDUCTIONS[kind].format(block, axis, position)
        text = f"{text}[:, None]" if axis else f"tl.broadcast_to({text}, [XBLOCK, 1])"
        if st.dtype in HALF:
            return f"tp.to_dtype({text}, {TYPES[st.dtype]})"
        return text if st.dtype == "bool" else f"{text}.to({TYPES[st.dtype]})"

    def start(self, st: Reduce) -> list[str]:
        """Accumulators before the loop over tiles."""
        dtype = st.value.dtype
        identity = identity_of(st.kind, dtype)
        if is_position(st) and dtype == "bool":
            identity, dtype = ("0" if st.kind == "argmax" else "1"), "int8"
        names = accumulators(self.launch, st)
        lines = [f"{names[0]} = tl.full([XBLOCK, RBLOCK], {identity}, {held(dtype)})"]
        lines += [f"{name} = {names[0]}" for name in names[1:]]
        if is_position(st):
            index = ("tl.int64", 2**63 - 1) if self.int64_index else ("tl.int32", 2**31 - 1)
            lines.append(f"{st.name}_pos = tl.full([XBLOCK, RBLOCK], {index[1]}, {index[0]})")
        return lines

    def combine(self, st: Reduce, value: str, group: int) -> list[str]:
        """The value of a tile taken into the accumulators."""
        names, mask = accumulators(self.launch, st), f"xmask & rmask{group}"
        if is_position(st):
            pos = f"{st.name}_pos"
            value = f"tl.broadcast_to({self._positional(st, value)}, [XBLOCK, RBLOCK])"
            return [f"{names[0]}, {pos} = tp.later_{st.kind}({names[0]}, {pos}, {value}, rindex{group}, {mask})"]
        kind = st.kind
        if st.value.dtype == "bool":
            kind = {"sum": "any", "max": "any", "prod": "all", "min": "all"}.get(kind, kind)
        stored = f".to({TYPES[st.value.dtype]})" if kind_of(st.value.dtype) == "int" else ""
        return combined(names, mask, lambda acc: f"{TRITON_COMBINE[kind]}({acc}, {value}){stored}")

    def scanned(self, st: Scan, value: str, loops: tuple[Var, ...], group: int) -> str:
        """The running reduction within a tile."""
        assert len(loops) <= 1, st.buffer
        return f"tl.associative_scan({self.masked(st, value, group)}, 1, {TRITON_COMBINE[st.kind]})"
