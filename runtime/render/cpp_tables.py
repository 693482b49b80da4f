"""How scalars, reductions and conversions are spelled in C++: a thin reading of the generated tables."""

from __future__ import annotations

from dataclasses import dataclass

from ...generated.cpp_scalars import CPP, CPP_REDUCTIONS
from ...generated.languages import CPP_LANGUAGE
from ...generated.scalars import REDUCTIONS, SCANS
from ..ir.nodes import Node

CTYPE = {name: dtype.memory for name, dtype in CPP_LANGUAGE.dtypes.items()} | {
    "bool": CPP_LANGUAGE.dtypes["bool"].register
}


@dataclass(frozen=True)
class CppTables:
    """Lookups with one clear error for what a table lacks."""

    inexact: frozenset[str] = frozenset(name for name, entry in REDUCTIONS.items() if entry.cpp is not None)

    def call(self, node: Node, args: list[str], vector: bool) -> str:
        """The C++ expression of a scalar operation on argument texts (all vectors, or all scalars)."""
        return CPP[node.op].format(*args, T=CTYPE[node.dtype], A=CTYPE[node.args[0].dtype] if node.args else "")

    def total(self, kind: str, dtype: str, scan: bool = False) -> str:
        """The dtype of running totals of a reduction or scan of floats, as its entry declares; `dtype` itself where it declares none."""
        accumulation = (SCANS if scan else REDUCTIONS)[kind].cpp
        return dtype if accumulation is None or not dtype.startswith(("float", "bfloat")) else accumulation.dtype(dtype)

    def compensated(self, kind: str, dtype: str) -> bool:
        """Whether the total of a long sum keeps beside it what rounding takes from it."""
        accumulation = REDUCTIONS[kind].cpp
        return accumulation is not None and dtype in accumulation.compensated

    def identity(self, kind: str, dtype: str) -> str:
        return CPP_REDUCTIONS[kind].identity.format(T=_compute(dtype))

    def combine(self, kind: str, dtype: str, a: str, b: str, vector: bool) -> str:
        return CPP_REDUCTIONS[kind].combine.format(a, b, T=_compute(dtype))

    def horizontal(self, kind: str, acc: str) -> str:
        return CPP_REDUCTIONS[kind].horizontal.format(acc)


def _compute(dtype: str) -> str:
    return "float" if dtype in ("float16", "bfloat16") else CTYPE[dtype]
