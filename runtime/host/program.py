"""The host program of a graph: what the processor does, in order, to run a plan. Data: verified, printed as JSON and read back, written as Python.

Names are those of tensors and size symbols. A tensor in the arena is there as long as the arena is held; any other is defined by one instruction,
and freed at most once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ..ir.nodes import Size


@dataclass(frozen=True)
class Layout:
    """A torch dtype by its name without `torch.`, sizes and strides in elements."""

    dtype: str
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]


@dataclass(frozen=True)
class Slot:
    """A tensor in the arena: `offset` and `bytes` from its first to its last element."""

    offset: int
    bytes: int
    layout: Layout


# -- values ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tensor:
    """A tensor, as it is."""

    name: str


@dataclass(frozen=True)
class View:
    """A view of the memory that the tensor `of` is in; sizes, strides and offset in elements."""

    of: str
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size


@dataclass(frozen=True)
class LaidOut:
    """A copy with strides that no view of the memory has (gaps, or one element in several places)."""

    of: Tensor | View
    dtype: str
    stride: tuple[Size, ...]


@dataclass(frozen=True)
class AsComplex:
    """The complex tensor whose parts are pairs. how: "view" of the same memory; "any", a copy where the parts do not lie in pairs; "result", of
    the graph: a tensor that is no view.
    """

    of: Tensor | View | LaidOut
    how: Literal["view", "any", "result"]


@dataclass(frozen=True)
class TorchConstant:
    """A dtype, a layout or a memory format by its name in `torch`; a device as `device:cuda:0`."""

    name: str


@dataclass(frozen=True)
class List:
    """A Python list."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class Clone:
    """A copy of a tensor."""

    of: str


@dataclass(frozen=True)
class Stack:
    """What `ForEach` gathered under a name, as one tensor."""

    of: str


Value = (
    Tensor
    | View
    | LaidOut
    | AsComplex
    | TorchConstant
    | List
    | Clone
    | Stack
    | Size
    | bool
    | float
    | complex
    | str
    | None
)
"""What an operator takes: also tuples of values, which Python's types cannot say here."""


@dataclass(frozen=True)
class Address:
    """Where a tensor's memory begins: what a kernel takes."""

    of: str


# -- conditions --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Formula:
    """Python source over sizes and numbers."""

    source: str


@dataclass(frozen=True)
class Item:
    """The one element of a tensor."""

    of: str


@dataclass(frozen=True)
class Asked:
    """The one element of the first result of a graph."""

    graph: str
    arguments: tuple[str, ...]


Condition = Formula | Item | Asked


# -- instructions ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ReadSize:
    """A symbol is size `dim` of a tensor, or its stride there."""

    symbol: str
    of: str
    dim: int
    stride: bool = False


@dataclass(frozen=True)
class Learn:
    """A symbol is what a formula says."""

    symbol: str
    formula: Formula


@dataclass(frozen=True)
class Check:
    """A RuntimeError with the message unless the condition holds."""

    condition: Formula
    message: str


@dataclass(frozen=True)
class TakeArena:
    """Take memory for the tensors in the arena, until `GiveArena`."""


@dataclass(frozen=True)
class GiveArena:
    """Give the arena's memory back."""


@dataclass(frozen=True)
class Allocate:
    """Memory that the tensor owns."""

    name: str
    layout: Layout


@dataclass(frozen=True)
class Free:
    """No later instruction reads the tensors."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class AsReal:
    """A complex tensor becomes its parts, in the same memory."""

    name: str


@dataclass(frozen=True)
class Restride:
    """The tensor has these strides afterwards, by a copy where it had others; (): row-major."""

    name: str
    stride: tuple[int, ...]


When = Literal["unfit", "none", "none or unfit"]


@dataclass(frozen=True)
class Conform:
    """The result of a call is laid out as traced afterwards; else an error that names the operator. when: "unfit"; "none", where tracing
    knows no sizes and it may be missing; "none or unfit". exact: the strides are eager's, which the fake kernel did not know.
    """

    name: str
    layout: Layout
    operator: str
    when: When = "unfit"
    exact: bool = False


@dataclass(frozen=True)
class Detach:
    """The tensor is a copy of itself afterwards: a sparse one keeps the tensors that it was made of, whose memory is used again."""

    name: str


@dataclass(frozen=True)
class Copy:
    """The contents of `target` become those of `source`. `input`: autograd does not hear of it, who calls the graph tells it."""

    target: str
    source: Value
    input: bool = False


@dataclass(frozen=True)
class LaunchKernel:
    """Call a kernel, or a function that runs several.

    arguments      addresses and sizes, in the order of its parameters.
    grid           number of programs, on a GPU.
    pointer_table  whether it gets its addresses in a table.
    faults         for each number that it may return, which check failed: the operator, and where the program calls it.
    about          the program's lines.
    """

    kernel: str
    arguments: tuple[Address | Size, ...]
    grid: Size | None = None
    pointer_table: bool = False
    faults: tuple[tuple[str, ...], ...] = ()
    about: str = ""


How = Literal["overload", "unviewed", "keeping_workspace", "function"]


@dataclass(frozen=True)
class LibraryCall:
    """Call an operator, or a function that comes with the program.

    operator  `namespace.name.overload`, or the function's name.
    how       "overload"; "unviewed": it may return no view; "keeping_workspace": it returns memory that it reads again; "function".
    results   names of its results, tensors and sizes, in order; "_" for one that nobody reads.
    single    it returns one result, no tuple.
    rest      it may return more.
    """

    operator: str
    how: How
    arguments: tuple[Value, ...]
    keywords: tuple[tuple[str, Value], ...] = ()
    results: tuple[str, ...] = ()
    single: bool = False
    rest: bool = False
    about: str = ""


@dataclass(frozen=True)
class CallGraph:
    """Call a compiled graph of the program's; `results` None: they are this program's own, which ends here."""

    graph: str
    arguments: tuple[str, ...]
    results: tuple[str, ...] | None = None


@dataclass(frozen=True)
class If:
    """Run `then` or `otherwise`."""

    condition: Condition
    then: tuple[Instruction, ...]
    otherwise: tuple[Instruction, ...] = ()
    negated: bool = False


@dataclass(frozen=True)
class While:
    """Run `body` as long as the condition holds."""

    condition: Condition
    body: tuple[Instruction, ...]


@dataclass(frozen=True)
class ForEach:
    """Run `body` for each slice along the first dimension. slices: names in the body, and the tensors. gathered: tensors of the body, of which
    `Stack` has those of all slices.
    """

    slices: tuple[tuple[str, str], ...]
    gathered: tuple[str, ...]
    body: tuple[Instruction, ...]


@dataclass(frozen=True)
class Return:
    """What the graph gives back."""

    values: tuple[Value, ...]


Instruction = (
    ReadSize
    | Learn
    | Check
    | TakeArena
    | GiveArena
    | Allocate
    | Free
    | AsReal
    | Restride
    | Conform
    | Detach
    | Copy
    | LaunchKernel
    | LibraryCall
    | CallGraph
    | If
    | While
    | ForEach
    | Return
)


@dataclass(frozen=True)
class HostProgram:
    """name: of the function. boxed: it takes its parameters in one list, which it empties. arena: the tensors there, by name. constants: tensors that
    come with the program.
    """

    parameters: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    arena_bytes: int = 0
    arena: Mapping[str, Slot] = field(default_factory=dict)
    boxed: bool = False
    name: str = "call"
    constants: tuple[str, ...] = ()

    @property
    def checks_results(self) -> bool:
        """Whether it looks at what calls return, and raises `MetadataError` for what is unlike its trace."""
        return any(
            isinstance(x, Conform) or (isinstance(x, LibraryCall) and x.how == "unviewed") for x in self.instructions
        )

    def with_grids(self, grids: Mapping[str, Size]) -> HostProgram:
        """The same program with other grids (numbers of programs on a GPU), by kernel."""
        changed = (
            replace(x, grid=grids[x.kernel]) if isinstance(x, LaunchKernel) and x.kernel in grids else x
            for x in self.instructions
        )
        return replace(self, instructions=tuple(changed))
