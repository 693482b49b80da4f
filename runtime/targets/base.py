"""What a target does for the rest: it names itself for the cache, compiles the kernels of a plan, and loads them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..build.manifest import Entry
from ..ir.nodes import Program, Size
from ..observe.watch import Watch

if TYPE_CHECKING:
    from ..graphs.recording import Recorder
    from ..kernels.plan import Plan


@dataclass(frozen=True)
class Built:
    """Compiled kernels of a plan.

    source   the kernels as text, for readers.
    files    for the cache entry: contents, or paths to copy, by file name.
    symbols  for each function that the wrapper calls what `Target.load` needs to know (JSON values).
    programs numbers of programs of kernels that are launched otherwise than `Target.render` said.
    """

    source: str
    files: Mapping[str, bytes | Path]
    symbols: Mapping[str, Any]
    programs: Mapping[str, Size] = field(default_factory=dict)


class Target(Protocol):
    """A processor or GPU."""

    device: str  # "cpu" or "cuda": only tensors there are in generated loops
    suffix: str  # of files with the source of kernels
    support: str  # the module of `execute` that wrappers import from

    def parts(self) -> dict[str, str]:
        """All that shapes the compiled kernels beside the program: parts of the cache key."""
        ...

    def prepare(self, program: Program) -> Program:
        """The program in the form that suits the target, before it is scheduled."""
        ...

    def schedule(self, program: Program, minimize_memory: bool, watch: Watch) -> Plan:
        """The plan of a prepared program; `minimize_memory` as for `schedule`."""
        ...

    def render(self, plan: Plan, boxed: bool) -> Any:
        """The plan's kernels, in a form of the target's own, which `compile` takes. It has `source`, their text; `groups`, the functions that run
        several of them, with their names; `pointer_tables`, those of these functions that take tensors for a pointer table; and `programs`, how many
        programs each function is launched with. `boxed`: the call frees each argument after its last use.
        """
        ...

    def compile(self, plan: Plan, rendered: Any, watch: Watch) -> Built:
        """Raises `BuildError` where the compiler fails."""
        ...

    def recorder(self) -> Recorder | None:
        """What records and replays calls on the device as a whole; None where there is no such thing."""
        ...

    def load(self, entry: Entry) -> Mapping[str, Callable[..., Any]]:
        """Functions by the names that the wrapper calls, which take what the wrapper passes. Raises `BuildError` where the files cannot be loaded."""
        ...
