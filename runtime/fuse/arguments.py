"""Arguments of library calls: the kernel of an operator that does not take any strides gets those that the program gave each argument (law 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ...errors import UnsupportedError
from ..ir.facts import equal, flat, is_injective, is_packed
from ..ir.index import Var, expr, of
from ..ir.nodes import Buffer, Extern, Nest, Program, Ref, Size, contiguous_strides, refs
from ..kernels.plan import ExternStep, ViewOf

Strides = tuple[Size, ...]


def exact_strides(items: Iterable[Nest | Extern], any_strides: Callable[[Extern], bool]) -> dict[str, Strides]:
    """Strides of what extern calls were traced with, but for the calls that take any. A kernel may read memory in order, as the program laid
    it out for it (a contiguous copy), and the strides of its results may follow from those of its arguments. Compiled functions would copy
    what has others.
    """
    calls = [it for it in items if isinstance(it, Extern) and not any_strides(it)]
    found = (r for it in calls for r in refs((it.args, tuple(v for _, v in it.kwargs))))
    return {r.buffer: r.stride for r in found if r.stride is not None}


def with_gaps(program: Program, exact: Mapping[str, Strides]) -> set[str]:
    """Computed arguments whose strides leave gaps or repeat elements: the program made them as views of something."""
    computed = {it.name: it.shape for it in program.items if isinstance(it, Nest)}
    return {name for name, stride in exact.items() if name in computed and not is_packed(computed[name], stride)}


def only_views(program: Program, any_strides: Callable[[Extern], bool]) -> set[str]:
    """Computed arguments that an extern call takes with strides that no memory of their own can have: what reads them besides as memory, a
    caller, gets a copy.
    """
    exact = exact_strides(program.items, any_strides)
    shapes = {it.name: it.shape for it in program.items if isinstance(it, Nest)}
    return {name for name in with_gaps(program, exact) if not _is_injective(shapes[name], exact[name])}


def bases(items: Iterable[Nest | Extern], views: Mapping[str, Nest], names: Iterable[str]) -> Iterator[Nest]:
    """The nests that views among `names` load from."""
    loaded = {views[n].body.attr.buffer for n in names if n in views and views[n].body.op == "load"}
    return (it for it in items if isinstance(it, Nest) and it.name in loaded)


def stored_strides(shape: tuple[Size, ...], wanted: Strides | None, exact: Strides | None) -> Strides:
    """Strides of a value that is stored: as a library call takes it, if no two elements share memory then; else as `wanted`, if that has no
    gaps; else contiguous ones.
    """
    if exact is not None and _is_injective(shape, exact):
        return exact
    # Packed strides of an empty tensor say nothing of its memory.
    return contiguous_strides(shape) if wanted is None or not is_packed(shape, wanted) else wanted


def _is_injective(shape: Sequence[Size], stride: Sequence[Size]) -> bool:
    """Whether no two elements share memory, for all sizes."""
    if 0 in shape:
        return False
    loops = [Var(f"i{k}", n) for k, n in enumerate(shape)]
    return is_injective(flat([of(v) for v in loops], stride), loops)


def same_strides(shape: Sequence[Size], a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether elements lie alike: a dimension of size 1 may have any stride, and so may an empty tensor."""
    return 0 in shape or all(x == y or equal(expr(x), expr(y)) for n, x, y in zip(shape, a, b, strict=True) if n != 1)


def extern_step(
    call: Extern,
    as_views: Mapping[str, ViewOf],
    layouts: Mapping[str, Buffer],
    out_variants: Callable[[Extern], bool],
    any_strides: Callable[[Extern], bool],
) -> ExternStep:
    """The step of a call. Raises `UnsupportedError` where an argument cannot have the strides that the operator must get."""
    exact = not any_strides(call)

    def place(x: object) -> object:
        if isinstance(x, (list, tuple)):
            return type(x)(place(y) for y in x)
        if not isinstance(x, Ref):
            return x
        view = as_views.get(x.buffer)
        given = layouts[x.buffer] if view is None else view
        stride = given.stride if given.stride is not None else contiguous_strides(given.shape)
        if not exact or x.stride is None or tuple(stride) == tuple(x.stride):
            return x if view is None else replace(view, paired=x.paired)
        if view is None:
            view = ViewOf(x.buffer, given.shape, stride, given.offset)
        if same_strides(given.shape, stride, x.stride):
            return replace(view, stride=x.stride, paired=x.paired)
        if not (is_packed(given.shape, x.stride) or _is_injective(given.shape, x.stride)):
            raise UnsupportedError(
                f"{call.target} takes an argument with strides {list(x.stride)} over memory that no kernel lays out so"
            )
        return replace(view, paired=x.paired, laid=x.stride)

    written = call.args[: call.writes]  # these are laid out as the results
    args = (
        *(as_views.get(a.buffer, a) if isinstance(a, Ref) else a for a in written),
        *map(place, call.args[call.writes :]),
    )
    kwargs = tuple((k, place(v)) for k, v in call.kwargs)
    # Memory can be planned only for a result whose size is known before.
    planned = call.writes or (out_variants(call) and not call.learns)
    return ExternStep(call, args, kwargs, tuple(b.name for b in call.outs) if planned else ())


__all__ = ["bases", "exact_strides", "extern_step", "only_views", "same_strides", "stored_strides", "with_gaps"]
