"""What operators a spec expression may call: overloads with a lowering of their own, and scalars, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..torch_schemas import TorchSchema, TorchSchemas
from .types import TENSOR, Type, of_schema

VERBATIM = frozenset(["+", "-", "*", "/", "**", "&", "|", "<", "<=", ">", ">="])
"""Operators that the runtime's tensor handle has itself; others print as calls."""


@dataclass(frozen=True)
class ScalarSig:
    """Name, number of operands, and whether a dtype follows them."""

    name: str
    operands: int
    takes_dtype: bool = False
    doc: str = ""


@dataclass
class Names:
    """Everything beside variables and helpers that a name can mean.

    native      overload id (`aten.add.Tensor`) → kind of its entry, for overloads with a lowering
    symbols     `+` → overload id
    incomplete  a spec file could not be read: what is missing was reported already
    """

    torch: TorchSchemas
    scalars: Mapping[str, ScalarSig]
    reductions: frozenset[str]
    scans: frozenset[str]
    native: dict[str, str] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)
    namespaces: tuple[str, ...] = ("aten",)
    incomplete: bool = False

    def packets(self) -> list[str]:
        """Names of the native operators, as an expression calls them, for suggestions."""
        return sorted({o.split(".")[1] for o in self.native})

    def candidates(self, name: str) -> list[TorchSchema] | None:
        """The overloads that `amax`, `sum.dim_IntList`, `mylib.foo` or `mylib.foo.default` can mean; None if torch has no such name."""
        parts = name.split(".")
        tries = [f"{ns}.{name}" for ns in self.namespaces]
        if len(parts) >= 2:
            tries.append(name)
        for full in tries:
            found = self.torch.get(full)
            if found:
                explicit = len(full.split(".")) == 3
                return [s for s in found if explicit or callable_here(s)]
        return None


def callable_here(schema: TorchSchema) -> bool:
    """Whether an overload can have a lowering: it takes or returns tensors, writes to nothing, and has no named dimensions."""
    if schema.mutates or any("Dimname" in a.type for a in schema.args):
        return False
    return any("Tensor" in a.type for a in schema.returns)


def argument_types(schema: TorchSchema) -> dict[str, Type]:
    """The type of every argument."""
    return {a.name: of_schema(a.type) for a in schema.args}


def result_type(schema: TorchSchema) -> Type:
    """The type of the result: a tensor, a list, or a tuple."""
    types = [TENSOR if r.type == "Tensor" else of_schema(r.type) for r in schema.returns]
    return types[0] if len(types) == 1 else Type("tuple", tuple(types))


def suggestions(*groups: Iterable[str]) -> list[str]:
    """All names of several groups."""
    return sorted({n for g in groups for n in g})
