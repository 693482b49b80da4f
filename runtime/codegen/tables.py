"""How scalars, reductions and conversions are spelled in C++: a thin reading of the generated tables."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UnsupportedError
from ...generated.cpp_scalars import CPP, CPP_REDUCTIONS
from ..ir.nodes import Node

CTYPE = {
    "float32": "float", "float64": "double", "float16": "f16", "bfloat16": "bf16", "int8": "int8_t", "int16": "int16_t",
    "int32": "int32_t", "int64": "int64_t", "uint8": "uint8_t", "bool": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class CppTables:
    """Lookups with one clear error for what a table lacks."""

    inexact: frozenset[str] = frozenset({"sum", "prod"})

    def call(self, node: Node, args: list[str], vector: bool) -> str:
        """The C++ expression of a scalar operation on argument texts (all vectors, or all scalars)."""
        spelled = CPP.get(node.op)
        if spelled is None:
            raise UnsupportedError(f"scalar {node.op!r} has no C++ spelling in specs/scalars.yaml")
        return spelled.format(*args, T=CTYPE[node.dtype], A=CTYPE[node.args[0].dtype] if node.args else "")

    def identity(self, kind: str, dtype: str) -> str:
        return CPP_REDUCTIONS[kind].identity.format(T=_compute(dtype))

    def combine(self, kind: str, dtype: str, a: str, b: str, vector: bool) -> str:
        return CPP_REDUCTIONS[kind].combine.format(a, b, T=_compute(dtype))

    def horizontal(self, kind: str, acc: str) -> str:
        return CPP_REDUCTIONS[kind].horizontal.format(acc)


def _compute(dtype: str) -> str:
    return "float" if dtype in ("float16", "bfloat16") else CTYPE[dtype]
