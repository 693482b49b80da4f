"""What scheduling produces: kernels made of phases, steps in order, and a memory table. Plain data, printable.

Inside a kernel every value is a `Node`. A load in it names one of:
- a global buffer (input, output of an earlier step, or written by an earlier phase of this kernel), with logical coordinates;
- a register: the result of a `Reduce` of an earlier phase, loaded with no coordinates (valid for the current outer point);
- a scratch tile of the kernel, written by an earlier phase for the current outer point, with inner coordinates only.
Values shared inside one phase are shared nodes, not names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.index import Expr, Var
from ..ir.nodes import Buffer, Extern, Node, Output, Size
from ..machine import PORTABLE, Gpu, Machine

REDUCED = "reg_"  # begins the names of registers


@dataclass(frozen=True)
class Store:
    """Write `value` to `buffer[index]` for each point of the loops; `mode` is "set" or a reduction name (an indexed update)."""

    buffer: str
    index: tuple[Expr, ...]
    value: Node
    mode: str = "set"
    mask: Node | None = None
    atomic: bool = False  # two points of the loops may write the same element


@dataclass(frozen=True)
class Reduce:
    """Reduce `value` over the phase's inner variables into register `name` (one scalar for each outer point).

    `kind` is a name in `scalars.yaml: reductions`; `argmax`/`argmin` give the row-major position over the inner variables (int64).
    """

    name: str
    kind: str
    value: Node
    dtype: str


@dataclass(frozen=True)
class Scan:
    """Running `kind` of `value` along the phase's last inner variable, stored to `buffer[index]` (buffer may be scratch)."""

    buffer: str
    index: tuple[Expr, ...]
    kind: str
    value: Node


@dataclass(frozen=True)
class Accumulate(Store):
    """A fused outer reduction: write the reduction by `kind` of `value` over the kernel's `grid_loop` to `buffer[index]`, for each point of the other
    loops.
    """

    kind: str = "sum"


Statement = Store | Reduce | Scan


@dataclass(frozen=True)
class Phase:
    """One loop nest inside a kernel: all statements run for every point of `inner` (once if it is empty)."""

    inner: tuple[Var, ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Tile:
    """How a kernel goes through a product of matrices.

    block_m, block_n, block_k  rows and columns of a block of the result, and steps of the sums at a time.
    num_warps    of a program.
    num_stages   of the software pipeline: steps whose operands are being loaded.
    group_m      blocks of rows of which those of one column run side by side (a swizzle), so that the columns that they read are in the cache.
    descriptors  operands that lie in memory as matrices are loaded by tensor descriptors (TMA).
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    descriptors: bool = False


@dataclass(frozen=True)
class Kernel:
    """Loops over `outer` (independent of each other unless `serial`); for each outer point the phases run in order."""

    name: str
    outer: tuple[Var, ...]
    phases: tuple[Phase, ...]
    reads: tuple[str, ...]  # global buffers read, in argument order
    writes: tuple[str, ...]  # global buffers written
    scratch: tuple[Buffer, ...] = ()  # tiles private to an outer point; shape over inner coordinates
    defines: tuple[str, ...] = ()  # nests of the program computed here (provenance)
    origins: tuple[str, ...] = ()
    serial: bool = False  # outer points must run one after the other (indexed updates that may collide)
    symbols: tuple[str, ...] = ()
    grid_loop: tuple[Var, ...] = ()
    """The last of `outer`, a serial grid loop: one program goes through their points one by one, and `Accumulate` reduces over them."""
    parts: tuple[
        KernelStep | ExternStep, ...
    ] = ()  # the steps that it runs as one, and nothing else: what they pass on has no memory
    tile: Tile | None = None  # of parts that are a product of matrices with what is beside it
    splits: int = (
        1  # programs that share the inner loops of an outer point (cooperative reductions), and wait for each other
    )
    machine: Machine = PORTABLE  # that it is for
    no_alias: frozenset[tuple[str, str]] = frozenset()  # (read, written): buffers that must not share memory

    @property
    def gpu(self) -> Gpu:
        """Its machine, where that is a GPU."""
        assert isinstance(self.machine, Gpu), self.name
        return self.machine


@dataclass(frozen=True)
class KernelStep:
    kernel: Kernel


@dataclass(frozen=True)
class ViewOf:
    """An argument of an extern: a strided view of a buffer (elements), `paired` where the kernel takes it as a complex tensor. `laid`: the
    kernel gets a copy of it with these strides, which no view of the buffer has (gaps, or one element in several places)."""

    buffer: str
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size
    paired: bool = False
    laid: tuple[Size, ...] | None = None


@dataclass(frozen=True)
class ExternStep:
    """`call.args` with each `Ref` replaced by a `ViewOf` or left a `Ref` (the whole buffer). `out` = results written to planned memory: all
    of a call that writes into its arguments."""

    call: Extern
    args: tuple
    kwargs: tuple[tuple[str, object], ...]
    out: tuple[str, ...] = ()  # empty: the kernel allocates


@dataclass(frozen=True)
class CopyStep:
    """The contents of input `target` become those of `source` (a mutation kept to the end of the graph)."""

    target: str
    source: str


Step = KernelStep | ExternStep | CopyStep


@dataclass(frozen=True)
class Allocation:
    """Where a buffer lives, by `kind`:

    input      in the memory of an input.
    arena      at byte `offset` of the graph's arena.
    dedicated  in memory of its own, e.g. an output.
    extern     in memory that an eager kernel allocates.
    alias      `offset` bytes into the allocation of the buffer `of`: an in-place update.
    elided     nowhere: a kernel's parts pass it on.
    """

    kind: str
    offset: int = 0
    of: str = ""


@dataclass(frozen=True)
class Refusal:
    """The nest `item` began a kernel of its own, and why it did not join the one that computes the buffer `other` ("": any). For readers."""

    item: str
    other: str
    why: str


@dataclass
class Plan:
    """A scheduled program with its memory. `layouts` gives every stored buffer its shape, dtype and strides in elements."""

    inputs: tuple[Buffer, ...]
    steps: list[Step]
    outputs: tuple[
        Output | ViewOf, ...
    ]  # a tensor is a view of its buffer (of all of it, mostly); other results are Outputs
    layouts: dict[str, Buffer] = field(default_factory=dict)
    allocations: dict[str, Allocation] = field(default_factory=dict)
    frees: dict[int, tuple[str, ...]] = field(
        default_factory=dict
    )  # step number → extern and dedicated buffers dead after it
    arena_bytes: int = 0
    symbols: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()

    def kernels(self) -> list[Kernel]:
        return [s.kernel for s in self.steps if isinstance(s, KernelStep)]
