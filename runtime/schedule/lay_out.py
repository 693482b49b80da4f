"""The pass that gives each buffer its layout, and finds which values are views of another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..fuse.arguments import bases, same_strides, stored_strides
from ..fuse.layouts import propagated_strides
from ..fuse.padding import pad_rows
from ..fuse.updates import updated_inputs
from ..ir.index import product
from ..ir.nodes import Buffer, Extern, Nest, Size, contiguous_strides, refs
from ..ir.work import in_any_order, is_pointwise, is_view
from ..kernels.plan import ViewOf
from ..kernels.steps import strided_view
from ..memory.in_place import computed_last
from .draft import Draft

__all__ = ["lay_out"]


def lay_out(draft: Draft) -> None:
    """Takes items and bodies. Leaves layouts, the values that are views, bases of indexed updates that need no kernel, and the items that become
    groups: those behind all that may raise apart.
    """
    program, gpu = draft.program, draft.gpu
    strides = _Strides(draft)
    last = computed_last(program, draft.items)
    moved = set(map(id, last))
    draft.fills = _fills(draft) if gpu else {}
    views = _Views(draft)
    inside = updated_inputs(program)
    left: list[Nest | Extern] = []
    for it in [*(it for it in draft.items if id(it) not in moved), *last]:
        if isinstance(it, Extern):
            for b in it.outs:
                stride = b.stride if b.stride is not None else contiguous_strides(b.shape)
                draft.layouts[b.name] = Buffer(b.name, b.shape, b.dtype, strides.wide.get(b.name, stride))
        elif (view := views.of(it)) is not None:
            draft.as_views[it.name] = view
            continue
        else:
            stride = strides.of(it)
            if it.name in inside:
                stride = draft.layouts[inside[it.name]].stride or stride
            draft.layouts[it.name] = Buffer(it.name, it.shape, it.dtype, stride)
            if it.name in draft.fills:
                continue
        left.append(it)
    draft.items = [it for it in left if id(it) not in moved]
    draft.last = [it for it in left if isinstance(it, Nest) and id(it) in moved]


class _Strides:
    """The strides of what kernels compute; inputs have theirs."""

    def __init__(self, draft: Draft) -> None:
        program, gpu, items, bodies = draft.program, draft.gpu, draft.items, draft.bodies
        for b in program.inputs:
            stride = b.stride if b.stride is not None else contiguous_strides(b.shape)
            draft.layouts[b.name] = Buffer(b.name, b.shape, b.dtype, stride, b.offset)
        self.exact = draft.exact
        self.hints = _hints(draft)
        for base in bases(items, bodies, draft.gaps):
            self.hints.setdefault(base.name, base.stride or contiguous_strides(base.shape))
        self.wide = pad_rows(program, items, bodies, draft.options.row_bytes, gpu) if gpu else {}
        stored = [it for it in items if not (isinstance(it, Nest) and it.name in bodies)]
        self.propagated = propagated_strides(program, stored, self.hints, gpu.costs.layout) if gpu else {}

    def of(self, nest: Nest) -> tuple[Size, ...]:
        wanted = self.hints.get(nest.name, self.propagated.get(nest.name, nest.stride))
        stride = stored_strides(nest.shape, wanted, self.exact.get(nest.name))
        return self.wide.get(nest.name, stride) if stride == contiguous_strides(nest.shape) else stride


class _Views:
    """Which values need no memory, since strides over a stored buffer say them."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        program = draft.program
        self.wanted = {o.buffer for o in program.outputs if o.buffer is not None} | {s for _, s in program.mutations}
        for it in draft.items:
            if isinstance(it, Extern):
                self.wanted.update(r.buffer for r in refs((it.args, tuple(v for _, v in it.kwargs))))
        self.inputs = {b.name for b in program.inputs}
        self.sources = {source for _, source in program.mutations}
        self.returned = draft.returned
        self.taken: set[str] = set()  # memory that is returned through a view

    def of(self, nest: Nest) -> ViewOf | None:
        draft = self.draft
        if nest.name not in draft.bodies or nest.name not in self.wanted or not is_view(nest) or nest.body.op != "load":
            return None
        view = strided_view(nest.vars, nest.shape, nest.body, draft.layouts[nest.body.attr.buffer])
        exact = draft.exact.get(nest.name)
        if view is None or not (exact is None or same_strides(view.shape, view.stride, exact)):
            return None
        if not self._may_share(nest.name, view):
            return None
        # They may differ where a size is 1.
        return replace(view, stride=view.stride if exact is None else exact)

    def _may_share(self, name: str, view: ViewOf) -> bool:
        """An extern may read any view. An output may be a view only of memory that is its alone, with just the strides it must have."""
        if name in self.sources:
            return False
        if name not in self.returned:
            return True
        wanted = next(o.stride for o in self.draft.program.outputs if o.buffer == name)
        if view.buffer in self.inputs or view.buffer in self.returned or view.buffer in self.taken:
            return False
        same_size = product(self.draft.layouts[view.buffer].shape) == product(view.shape)
        if self.returned[name] > 1 or not same_size or view.buffer in self.sources:
            return False
        if wanted is not None and not same_strides(view.shape, view.stride, wanted):
            return False
        self.taken.add(view.buffer)
        return True


def _fills(draft: Draft) -> dict[str, Nest]:
    """Bases of indexed updates that nothing else reads and that are made of nothing: they are written where the update is."""
    program, items = draft.program, draft.items
    read = Counter(name for it in items for name in it.reads())
    updated = {
        it.scatter.base
        for it in items
        if isinstance(it, Nest) and it.scatter is not None and in_any_order(it.scatter) and read[it.scatter.base] == 1
    }
    updated -= {o.buffer for o in program.outputs} | {source for _, source in program.mutations}
    return {
        it.name: it
        for it in items
        if isinstance(it, Nest) and it.name in updated and is_pointwise(it) and not it.reads()
    }


def _hints(draft: Draft) -> dict[str, tuple[Size, ...]]:
    """Strides asked of a buffer from outside: outputs first, then what extern calls were traced with."""
    program = draft.program
    hints: dict[str, tuple[Size, ...]] = {}
    for it in draft.items:
        if isinstance(it, Extern):
            for r in refs((it.args, tuple(v for _, v in it.kwargs))):
                if r.stride is not None:
                    hints.setdefault(r.buffer, r.stride)
    strides: Mapping[str, tuple[Size, ...] | None] = {b.name: b.stride for b in program.inputs}
    hints.update((source, stride) for target, source in program.mutations if (stride := strides[target]) is not None)
    for o in program.outputs:
        if o.buffer is not None and o.stride is not None:
            hints[o.buffer] = o.stride
    return hints
