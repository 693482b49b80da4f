"""The autograd function of one training graph: straight-line Python source that calls the compiled forward and backward.

Autograd sees one node. Its forward keeps what the backward asks for with `save_for_backward`, so that writes to saved inputs and results
are noticed as eager notices them; its backward gets gradients of any layout and gives the compiled graph those that it was made for.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from ...errors import UnsupportedError
from ...generated.wrapper_steps import STEPS
from ..dispatch.autograd.joint import Gradients, written_since
from ..dispatch.storage.regions import Layout
from ..dispatch.subclasses.wrappers import Names, coerced, dense_tangent
from ..torch_compat import in_transform, is_zerotensor, no_modes, saving_is_hooked, tangents_may_be
from .batched import backward_by_rows
from .delivery import in_order, redirected
from .duals import backward_of_duals, kept_arguments
from .given import Described, as_described, as_given, as_kept, described
from .in_place import over_saved
from .support import LAZY, restride

Compiled = Callable[..., Any]
_version = attrgetter("_version")


@dataclass(frozen=True)
class Halves:
    """What the source is made for.

    arguments   the forward's placeholders.
    results     graph results that the program returns; the forward's further results are what is saved.
    constant    those of them that are tensors which autograd does not follow.
    saved       for each of the backward's first placeholders where the forward has it: ("input", k), ("output", k) among all of the
                forward's results.
    saved_is_tensor  whether each is a tensor (else a size).
    tangents    strides that the backward expects of each tangent, None for row-major.
    gradients   what `Gradients` says.
    partial     whether the backward is told which of the results got no gradient.
    symbolic    whether sizes are known only when the forward has run.
    saved_for   for each of `saved` the tangents from which and it something of the backward is computed, as bits; () counts as all.
    given       for each of `saved` what the backward was compiled for where it is an input: a caller can give that other memory, of another
                layout, between forward and backward (`x.data = y`). None for all others, and where a size is a symbol; () where all are.
    lasting     arguments that are parameters and buffers: their modules hold them anyway.
    into        positions in `saved` of tensors that gradients may be written over → of these gradients.
    scaled      whether all gradients are these tensors times the only tangent.
    """

    arguments: int
    results: int
    constant: tuple[int, ...]
    saved: tuple[tuple[str, int], ...]
    saved_is_tensor: tuple[bool, ...]
    tangents: tuple[tuple[int, ...] | None, ...]
    gradients: Gradients
    partial: bool = False
    symbolic: bool = False
    saved_for: tuple[int, ...] = ()
    given: tuple[Described | None, ...] = ()
    lasting: frozenset[int] = frozenset()
    into: Mapping[int, int] = field(default_factory=dict)
    scaled: bool = False

    @cached_property
    def guarded(self) -> dict[tuple[str, int], int]:
        """Arguments and results of the program that are saved, and that only some tangents need: these, as bits."""
        if not self.partial:
            return {}
        whole = (1 << len(self.tangents)) - 1
        found = {}
        for place, ours in zip(self.saved, self.saved_for, strict=False):
            where, k = place
            needed = (self.gradients.read_for.get(place, -1) | ours) & whole
            if needed != whole and (where == "input" or k < self.results):
                found[place] = needed
        return found

    @cached_property
    def given_later(self) -> list[int]:
        """Positions of saved inputs of which only the forward knows sizes and strides."""
        if not self.symbolic:
            return []
        inputs = enumerate(zip(self.saved, self.saved_is_tensor, strict=True))
        known = self.given or (None,) * len(self.saved)
        return [n for n, ((where, _), tensor) in inputs if where == "input" and tensor and known[n] is None]

    @cached_property
    def watched(self) -> list[tuple[str, str, int]]:
        """Tensors that eager's backward needs and autograd does not watch for ours: their variables in the forward, what is added to their
        version because the wrapper is about to write them, and the tangents for which they are needed, as bits.
        """
        saved = {*self.saved}
        inputs = [k for k in self.gradients.watched_inputs if ("input", k) not in saved and k not in self.lasting]
        results = [k for k in self.gradients.watched_results if ("output", k) not in saved]
        made = self.gradients.wrapped_results
        wrappers = [(f"v{k}", f" + {n}" if n else "") for k, n in self.gradients.watched_wrappers]
        wrappers += [(f"w{k}", "") for k, r in enumerate(made) if r.watched]
        places = [("input", k) for k in inputs] + [("output", k) for k in results]
        read_for = self.gradients.read_for if self.partial else {}
        dense = [(_variable(*place), self.bump(place), read_for.get(place, -1)) for place in places]
        return dense + [(variable, after, -1) for variable, after in wrappers]

    @cached_property
    def watched_lasting(self) -> list[tuple[str, str, int]]:
        """As `watched`, of arguments that last."""
        places = [("input", k) for k in self.gradients.watched_inputs if k in self.lasting]
        read_for = self.gradients.read_for if self.partial else {}
        return [(_variable(*p), self.bump(p), read_for.get(p, -1)) for p in places if p not in self.saved]

    def bump(self, place: tuple[str, int]) -> str:
        """What is added to the version of an argument that the wrapper is about to write."""
        where, k = place
        return " + 1" if where == "input" and k in self.gradients.bumped else ""


@dataclass(frozen=True)
class Partial:
    """Backwards for calls in which not all results got a gradient.

    ready   the compiled backward for such a call; the bits of its argument are the positions of the tangents that are missing.
    zeros   makes what stands in the place of the tangent at a position; of the shape that is given where sizes are symbolic.
    """

    ready: Callable[[int], Compiled]
    zeros: Callable[..., torch.Tensor]


class Backward:
    """A compiled backward that takes one list of arguments, which it empties: `call`, or what `make` gives when it is first needed.

    Where `make` raises, so does the backward of the program, before anything saved for it is given up.
    """

    __slots__ = ("_lock", "_make", "call")

    def __init__(self, make: Callable[[], Compiled] | None = None, call: Compiled | None = None) -> None:
        self._make, self.call, self._lock = make, call, threading.Lock()

    def ready(self) -> Compiled:
        """The compiled backward."""
        call = self.call
        return self._made() if call is None else call

    def _made(self) -> Compiled:
        with self._lock, no_modes():
            if self.call is None:
                assert self._make is not None
                self.call, self._make = self._make(), None
            return self.call


def bind_halves(
    halves: Halves,
    forward: Compiled,
    backward: Compiled | Backward,
    partial: Partial | None = None,
    eager_backward: Callable[[int], Compiled] | None = None,
    in_place: Backward | None = None,
) -> Compiled:
    """What takes the place of the compiled graph: same arguments, a tuple of the program's results. `backward` takes its arguments one by
    one if it is no `Backward`. Without `partial`, results that got no gradient count as if they had got zeros. `eager_backward`: as
    `Partial.ready`, for gradients that are no strided tensors, which are refused without it. `in_place`: a
    backward that writes gradients over saved tensors (`Halves.into`), and returns None for them.
    """
    if partial is None:
        halves = replace(halves, partial=False)
    if in_place is None:
        halves = replace(halves, into={})
    if not isinstance(backward, Backward):
        plain = backward
        backward = Backward(call=lambda arguments: plain(*arguments))
    namespace: dict[str, Any] = {
        "Function": torch.autograd.Function,
        "forward_graph": forward,
        "as_described": as_described,
        "as_given": as_given,
        "backward_by_rows": backward_by_rows,
        "again": halves.gradients.again,
        "backward_of_duals": backward_of_duals,
        "kept_arguments": kept_arguments,
        "backward_ready": backward.ready,
        "in_transform": in_transform,
        "is_zerotensor": is_zerotensor,
        "is_grad_enabled": torch.is_grad_enabled,
        "nothing": torch.empty(0),
        _over(halves): over_saved(in_place.ready, halves.into, halves.scaled) if in_place is not None else None,
        "restride": restride,
        "saving_is_hooked": saving_is_hooked,
        "tangents_may_be": tangents_may_be,
        "Tensor": torch.Tensor,
        "math": math,
        "coerced": coerced,
        "as_kept": as_kept,
        "counter_of": counter_of,
        "given": tuple((k, d) for k, d in enumerate(halves.given) if d is not None),
        "dense_tangent": dense_tangent,
        "eager_backward": eager_backward or refuse_sparse,
        "described": described,
        "partial": partial,
        "ref": weakref.ref,
        "strided": torch.strided,
        "refuse_double_backward": refuse_double_backward,
        "refuse_moved": refuse_moved,
        "refuse_written": refuse_written,
    }
    names = Names()
    source = _source(halves, names)
    namespace["redirected"] = redirected
    namespace |= names.values
    exec(compile(source, "<opforge autograd function>", "exec"), namespace)
    function = namespace["Compiled"]
    if "torch._dynamo" in sys.modules:
        # The backward may run inside of a compiled function that calls `backward()`: Dynamo would trace it.
        function.backward = staticmethod(torch.compiler.disable(function.backward))
    apply: Compiled = function.apply
    return in_order(apply, halves.gradients.leaves) if halves.gradients.leaves else apply


def emit_function(halves: Halves) -> str:
    """Source of the class `Compiled`, a `torch.autograd.Function`."""
    return _source(halves, Names())


def _source(halves: Halves, names: Names) -> str:
    return "\n".join(["class Compiled(Function):", *_forward(halves, names), "", *_backward(halves, names)]) + "\n"


def _forward(halves: Halves, values: Names) -> list[str]:
    names = [f"x{k}" for k in range(halves.arguments)]
    lines = [f"ctx.arguments = kept_arguments(again, {_tuple(names)})"] if halves.gradients.again is not None else []
    lines.append(f"out = forward_graph({', '.join(names)})")
    names += [f"v{k}" for k in range(halves.gradients.wrappers)]
    if halves.gradients.leaves:
        names.append("*ways")
        lines.append("ctx.ways = bool(ways)")
    if halves.partial:
        lines.append("ctx.set_materialize_grads(False)")
        if halves.symbolic:
            lines.append(f"ctx.shapes = {_tuple([f'out[{k}].shape' for k in halves.gradients.tangents])}")
    wrapped = halves.gradients.wrapped_results
    inside = {k for r in wrapped for k in r.dense}
    symbols = halves.gradients.symbols
    lines += [f"{symbol} = x{k}{call}" for symbol, k, call in symbols]
    if symbols:
        lines.append(f"ctx.symbols = ({', '.join(s for s, _, _ in symbols)},)")
    for k, r in enumerate(wrapped):
        lines += values.wrap(f"w{k}", r.made, iter([f"out[{d}]" for d in r.dense]))
    tensors: list[str] = []
    sizes: list[str] = []
    for place, tensor in zip(halves.saved, halves.saved_is_tensor, strict=True):
        (tensors if tensor else sizes).append(_variable(*place))
    if tensors or halves.gradients.once:
        lines.append(f"ctx.save_for_backward({', '.join(tensors or ['nothing'])})")
    if tensors:
        lines.append(f"ctx.hooked = described(({', '.join(tensors)},)) if saving_is_hooked() else None")
    if halves.guarded:
        # Whether a write to what only some tangents need matters is known in the backward.
        versions = [
            f"({t}._version{halves.bump(p)}, {halves.guarded.get(p, -1)})"
            for t, p in zip(tensors, halves.saved, strict=False)
        ]
        lines.append(f"ctx.versions = ({', '.join(versions)},)")
    if later := halves.given_later:
        known = [f"({n}, described(({_variable(*halves.saved[n])},))[0])" for n in later]
        lines.append(f"ctx.given = ({', '.join(known)},)")
    if sizes:
        lines.append(f"ctx.sizes = ({', '.join(sizes)},)")
    if watched := halves.watched:
        # The program may drop a tensor whose memory a view still changes; a wrapper subclass has no counter to share.
        texts = [
            f"({'counter_of' if t[0] in 'xo' else 'ref'}({t}), {t}._version{after}, {n})" for t, after, n in watched
        ]
        # Autograd does not check what hooks have packed.
        lines.append(f"ctx.watched = () if saving_is_hooked() else ({', '.join(texts)},)")
    if lasting := halves.watched_lasting:
        held, versions = [t for t, _, _ in lasting], [f"{t}._version{after}" for t, after, _ in lasting]
        lines.append(f"ctx.lasting = () if saving_is_hooked() else ({_tuple(held)}, [{', '.join(versions)}])")
    if halves.constant:
        lines.append(f"ctx.mark_non_differentiable({', '.join(f'out[{k}]' for k in halves.constant)})")
    results = ["None" if k in inside else f"out[{k}]" for k in range(halves.results)]
    lines.append(f"return {_tuple([*results, *(f'w{k}' for k in range(len(wrapped)))])}")
    return [
        "    @staticmethod",
        f"    def forward({', '.join(['ctx', *names])}):",
        *(f"        {line}" for line in lines),
    ]


def _variable(where: str, k: int) -> str:
    return f"x{k}" if where == "input" else f"out[{k}]"


def _backward(halves: Halves, values: Names) -> list[str]:
    wrapped = halves.gradients.wrapped_results
    gradients = [f"g{k}" for k in range(halves.results)] + [f"h{k}" for k in range(len(wrapped))]
    lines = ["if is_grad_enabled():", "    refuse_double_backward()"]
    lines += ["if in_transform():", f"    return backward_by_rows(Compiled.backward, ctx, {_tuple(gradients)})"]
    own = f"{_tuple(gradients)}, again, {halves.partial}"
    lines += ["if tangents_may_be():", f"    return backward_of_duals(Compiled.backward, ctx, {own})"]
    missing = ", ~missing" if halves.partial else ""
    checks = [f"refuse_written(ctx.watched{missing})"] if halves.watched else []
    if lasting := halves.watched_lasting:
        checks.append(f"refuse_moved(ctx.lasting, {_tuple([str(n) for _, _, n in lasting])}{missing})")
    if not halves.partial:
        lines += checks
    arguments_in_all = range(halves.arguments + halves.gradients.wrappers)
    if halves.partial:
        lines.append("missing = 0")
        for n, k in enumerate(halves.gradients.tangents):
            shape = f", ctx.shapes[{n}]" if halves.symbolic else ""
            lines += [f"if g{k} is None:", f"    missing |= {1 << n}", f"    g{k} = partial.zeros({n}{shape})"]
        lines += [f"if missing == {(1 << len(halves.tangents)) - 1}:"]
        nothing = _tuple(["None"] * len(arguments_in_all))
        lines += [f"    return {_redirected(nothing, halves)}"]
        lines += checks
        lines.append("backward_graph = partial.ready(missing) if missing else backward_ready()")
    else:
        lines.append("backward_graph = backward_ready()")
    # Nothing but the list holds what was saved (tensors, then sizes), so that the graph can free it while it runs; what it frees is gone
    # for autograd too, unless the caller retains the graph.
    tensors = any(halves.saved_is_tensor)
    saved = ["*ctx.saved_tensors"] if tensors else []
    if halves.guarded:
        saved = ["*(as_kept(ctx, ~missing) if ctx.hooked is None else ctx.saved_tensors)"]
    saved += ["*ctx.sizes"] if not all(halves.saved_is_tensor) else []
    if halves.gradients.once and not tensors:
        lines.append("ctx.saved_tensors")  # raises where autograd has freed the graph
    lines.append(f"arguments = [{', '.join(saved)}]")
    if tensors:
        count = sum(halves.saved_is_tensor)
        lines += [
            "if ctx.hooked is not None:",
            f"    arguments[:{count}] = as_described(arguments[:{count}], ctx.hooked)",
        ]
        otherwise = ["as_given(arguments, given)"] if any(halves.given) else []
        otherwise += ["as_given(arguments, ctx.given)"] if halves.given_later else []
        lines += ["else:", *(f"    {line}" for line in otherwise)] if otherwise else []
    if tensors or halves.gradients.once:
        lines.append("ctx.maybe_clear_saved_tensors()")
    if halves.gradients.symbols:
        lines.append(f"{_tuple([s for s, _, _ in halves.gradients.symbols])} = ctx.symbols")
    inside: list[str] = []
    for k in halves.gradients.tangents:
        lines += [f"if type(g{k}) is not Tensor:", f"    g{k} = dense_tangent(g{k}, 'result {k} of a compiled graph')"]
    for k, r in enumerate(wrapped):
        place = f"'result {halves.results + k} of a compiled graph'"
        expected = values.of(r.tangent, "tangent")
        lines.append(STEPS["coerce_tangent"].code.format(gradient=f"h{k}", expected=expected, place=place))
        for n, path in enumerate(r.tangent.paths(f"h{k}")):
            lines.append(f"h{k}_{n} = {path}")
            inside.append(f"h{k}_{n}")
    tangents = [*(f"g{k}" for k in halves.gradients.tangents), *inside]
    lines.append(f"if {' or '.join(f'{name}.layout is not strided' for name in tangents)}:")
    missing = "missing" if halves.partial else "0"
    lines += [f"    out = eager_backward({missing})([*arguments, {', '.join(tangents)}])", "else:"]
    for name, stride in zip(tangents, halves.tangents, strict=True):
        lazy = LAZY.format(t=name)
        if stride is None:
            lines += [f"    {name} = {name}.contiguous()", f"    if {lazy}:"]
            lines.append(f"        {name} = restride({name}, {name}.stride())")
        else:
            lines.append(f"    if {name}.stride() != {stride} or {lazy}:")
            lines.append(f"        {name} = restride({name}, {stride})")
    lines.append(f"    arguments += [{', '.join(tangents)}]")
    call = "backward_graph(arguments)"
    lines.append(f"    out = {_over(halves)}(arguments) or {call}" if halves.into else f"    out = {call}")
    position = {k: n for n, k in enumerate(halves.gradients.inputs)}
    returned = [f"out[{position[k]}]" if k in position else "None" for k in arguments_in_all]
    for g in halves.gradients.wrapped_gradients:
        returned[g.argument] = f"d{g.argument}"
        lines += values.wrap(f"d{g.argument}", g.made, iter([f"out[{d}]" for d in g.dense]))
    lines.append(f"return {_redirected(_tuple(returned), halves)}")
    return [
        "    @staticmethod",
        f"    def backward({', '.join(['ctx', *gradients])}):",
        *(f"        {line}" for line in lines),
    ]


def _over(halves: Halves) -> str:
    return "scaled" if halves.scaled else "over_saved"


def _redirected(gradients: str, halves: Halves) -> str:
    leaves = halves.gradients.leaves
    return f"redirected({gradients}, {leaves}) if ctx.ways else {gradients}" if leaves else gradients


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def tangent_strides(tangent: torch.Tensor) -> tuple[int, ...] | None:
    """Strides that the backward was compiled for; None where it was compiled for row-major sizes known only later."""
    return tuple(tangent.stride()) if Layout.of(tangent).plain else None


def counter_of(t: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A tensor with the version counter and the sizes of `t`, and without its memory: nobody else may hold this object, but views of it."""
    counter = t.detach()
    counter.data = t.new_empty(()).expand(t.shape)
    return lambda: counter


def refuse_written(watched: Sequence[tuple[Callable[[], torch.Tensor | None], int, int]], given: int = -1) -> None:
    """Raises RuntimeError, as eager does, when a tensor was written to since the forward and one of the tangents `given` (bits) needs it."""
    for reference, version, needed in watched:
        t = reference()
        if t is not None and needed & given and t._version != version:
            raise written_since(t, version)


def refuse_moved(lasting: Sequence[Any], needed: Sequence[int], given: int = -1) -> None:
    """As `refuse_written`, of tensors that are held themselves: `lasting` has them and their versions, or is empty."""
    if not lasting:
        return
    tensors, versions = lasting
    if list(map(_version, tensors)) != versions:
        each = zip(tensors, versions, needed, strict=True)
        refuse_written([(lambda t=t: t, version, n) for t, version, n in each], given)  # type: ignore[misc]


def refuse_sparse(missing: int) -> Compiled:
    """Raises: a gradient is no strided tensor."""
    raise UnsupportedError(
        "a gradient that is no strided tensor (sparse) arrives at a compiled backward; to_dense() it"
    )


def refuse_double_backward() -> None:
    """Raises: gradients of gradients were asked for."""
    raise RuntimeError(
        "a compiled graph has no gradient of its gradient (create_graph=True); run this part without torch.compile"
    )
