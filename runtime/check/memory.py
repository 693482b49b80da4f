"""Which buffer's value every byte holds, step by step: the half of the plan checker that knows of memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..ir.facts import flat, is_injective
from ..ir.index import Expr, Var, expr, of
from ..ir.nodes import ITEMSIZE, Buffer, Size, contiguous_strides
from ..kernels.plan import Allocation, Plan

UNKNOWN_END = 1 << 62  # the end of a storage whose size is known at run time only


@dataclass
class State:
    """What is in the memory of one buffer. status: "unwritten", "partial", "complete", "lost" (`why` says how), or "base": the copy of
    what an indexed update starts from (`why` names it).
    """

    status: str = "unwritten"
    why: str = ""


@dataclass(frozen=True)
class Region:
    """Bytes `lo` to `hi` of one storage; `start` is where element 0 of the layout's storage offset 0 would be."""

    storage: str
    start: int
    lo: int
    hi: int

    def overlaps(self, other: Region) -> bool:
        return self.storage == other.storage and self.lo < other.hi and other.lo < self.hi


class Memory:
    """Every stored buffer's region, and what it holds now. `fail(message)` raises with the step's name."""

    def __init__(self, plan: Plan, fail: Callable[[str], None]) -> None:
        self.plan, self.fail = plan, fail
        self.states: dict[str, State] = {}
        self.regions: dict[str, Region] = {}
        self.arena: tuple[list[int], list[str]] = ([], [])  # non-overlapping, sorted by first byte
        self.elsewhere: dict[str, list[str]] = {}
        self.freed: dict[str, str] = {}
        self.passed: set[str] = set()  # what the parts of a kernel pass on to each other
        for b in plan.inputs:
            self.states[b.name] = State("complete")
            self._hold(b.name, self.region(b.name))

    # -- places --------------------------------------------------------------------------------------------------------
    def layout(self, name: str) -> Buffer:
        found = self.plan.layouts.get(name)
        if found is None or found.stride is None:
            self.fail(f"buffer {name!r} has no layout")
        return found  # type: ignore[return-value]

    def region(self, name: str) -> Region:
        found = self.regions.get(name)
        if found is None:
            found = self.regions[name] = self._place(name)
        return found

    def _place(self, name: str) -> Region:
        b = self.layout(name)
        assert b.stride is not None
        storage, start = self._base(name, ())
        width = ITEMSIZE.get(b.dtype, 16)
        reach: Size = b.offset
        for n, s in zip(b.shape, b.stride, strict=True):
            if n == 0:
                return Region(storage, start, start, start)
            reach = reach + (n - 1) * s
            if isinstance(s, int) and s < 0:
                self.fail(f"buffer {name!r} has a negative stride")
        first = b.offset if isinstance(b.offset, int) else 0
        if isinstance(reach, Expr) and reach.is_const:
            reach = int(reach)
        if isinstance(reach, Expr) or isinstance(b.offset, Expr):
            if storage == "arena":
                self.fail(f"buffer {name!r} of a size known at run time only is in the arena")
            return Region(storage, start, start, UNKNOWN_END)
        region = Region(storage, start, start + first * width, start + (reach + 1) * width)
        if storage == "arena":
            if region.lo < 0 or region.hi > self.plan.arena_bytes:
                self.fail(
                    f"buffer {name!r} takes bytes {region.lo}..{region.hi} of an arena of {self.plan.arena_bytes}"
                )
            if start % width:
                self.fail(f"buffer {name!r} is at byte {start}, which is not a multiple of its element size {width}")
        return region

    def _base(self, name: str, chain: tuple[str, ...]) -> tuple[str, int]:
        place = self.plan.allocations.get(name)
        if place is None:
            if any(b.name == name for b in self.plan.inputs):
                place = Allocation("input")
            else:
                self.fail(f"buffer {name!r} has no allocation")
        assert place is not None
        if name in chain:
            self.fail(f"buffer {name!r} is an alias of itself")
        if place.kind == "arena":
            return "arena", place.offset
        if place.kind == "alias":
            storage, start = self._base(place.of, (*chain, name))
            return storage, start + place.offset
        if place.kind == "elided" and name not in self.passed:
            self.fail(f"buffer {name!r} is never stored, but a step reads or writes it")
        return f"{place.kind} {name}", 0

    def position(self, name: str, index: Iterable[Expr]) -> Expr:
        """Byte in the storage of the element at `index`."""
        b = self.layout(name)
        assert b.stride is not None
        return flat(tuple(index), b.stride, b.offset) * ITEMSIZE.get(b.dtype, 16) + self.region(name).start

    def distinct_elements(self, name: str) -> bool:
        """True if no two elements of the layout share memory."""
        b = self.layout(name)
        assert b.stride is not None
        if tuple(b.stride) == contiguous_strides(b.shape):
            return True
        dims = sorted(((s, n) for s, n in zip(b.stride, b.shape, strict=True) if n != 1), key=lambda p: str(p[0]))
        if any(n == 0 for _, n in dims):
            return True
        loops = tuple(Var(f"@{k}", n) for k, (_, n) in enumerate(dims))
        where = expr(0)
        for v, (s, _) in zip(loops, dims, strict=True):
            where = where + of(v) * s
        return is_injective(where, loops)

    # -- contents ------------------------------------------------------------------------------------------------------
    def state(self, name: str) -> State:
        return self.states.setdefault(name, State())

    def require(self, name: str) -> None:
        """The buffer's memory must hold all of its value now."""
        region = self.region(name)
        if region.storage in self.freed:
            self.fail(f"buffer {name!r} is read after its memory was freed by {self.freed[region.storage]}")
        s = self.state(name)
        if s.status == "unwritten":
            self.fail(f"buffer {name!r} is read before anything is written to it")
        if s.status == "partial":
            self.fail(f"buffer {name!r} is read, but only a part of it is written ({s.why})")
        if s.status == "base":
            self.fail(f"buffer {name!r} is read, but holds only the copy of {s.why!r}; its indexed update is missing")
        if s.status == "lost":
            self.fail(f"buffer {name!r} is read after its memory was overwritten by {s.why}")

    def write(self, name: str, step: str, status: str = "complete", why: str = "") -> None:
        """The memory of `name` now holds it; every other buffer there is lost."""
        region = self.region(name)
        if region.storage in self.freed:
            self.fail(f"buffer {name!r} is written after its memory was freed by {self.freed[region.storage]}")
        for other in self._overlapping(region):
            if other != name:
                self._drop(other)
                self.states[other] = State("lost", f"{name!r} in {step}")
        self.states[name] = State(status, why)
        self._hold(name, region)

    def overwritten(self, name: str, step: str) -> None:
        """The memory of `name` got other contents."""
        for other in self._overlapping(self.region(name)):
            self._drop(other)
            self.states[other] = State("lost", step)

    def enter(self, names: Iterable[str]) -> None:
        """The parts of a kernel begin, which pass these on to each other: each is in a storage of its own until they are done."""
        self.passed = set(names)

    def leave(self, step: str) -> None:
        """They are done: nobody can read what they have passed on."""
        for name in sorted(self.passed & self.regions.keys()):
            self._drop(name)
            del self.regions[name]
        self.states.update((name, State("lost", f"the end of {step}")) for name in self.passed)
        self.passed = set()

    def share(self, name: str, other: str) -> None:
        """Give `other`, a name of the checker's own, the bytes of `name`."""
        self.regions[other] = self.region(name)

    def free(self, name: str, step: str) -> None:
        region = self.region(name)
        if region.storage == "arena" or region.storage.startswith("input "):
            self.fail(f"buffer {name!r} is freed, but it is in the {region.storage}")
        if region.storage in self.freed:
            self.fail(f"buffer {name!r} is freed again (first by {self.freed[region.storage]})")
        self.freed[region.storage] = step

    def _overlapping(self, region: Region) -> list[str]:
        if region.hi <= region.lo:
            return []
        if region.storage != "arena":
            return [n for n in self.elsewhere.get(region.storage, ()) if self.regions[n].overlaps(region)]
        starts, names = self.arena
        at = bisect_left(starts, region.lo)
        if at and self.regions[names[at - 1]].overlaps(region):
            at -= 1
        found = []
        while at < len(names) and starts[at] < region.hi:
            found.append(names[at])
            at += 1
        return found

    def _hold(self, name: str, region: Region) -> None:
        if region.hi <= region.lo:
            return
        if region.storage != "arena":
            held = self.elsewhere.setdefault(region.storage, [])
            if name not in held:
                held.append(name)
            return
        starts, names = self.arena
        at = bisect_left(starts, region.lo)
        if at < len(names) and names[at] == name:
            return
        starts.insert(at, region.lo)
        names.insert(at, name)

    def _drop(self, name: str) -> None:
        region = self.regions[name]
        if region.storage != "arena":
            self.elsewhere[region.storage].remove(name)
            return
        starts, names = self.arena
        at = bisect_left(starts, region.lo)
        starts.pop(at)
        names.pop(at)
