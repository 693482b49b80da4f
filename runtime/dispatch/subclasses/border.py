"""Where tensor subclasses meet the graph: inputs that wrap others enter as what is inside of them, results are wrapped again.

Below the border there are dense tensors only, one flat input or output for each tensor inside of a wrapper. What autograd knows it knows of
wrappers: their edges, version counters and views are told here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ....errors import UnsupportedError
from ....generated.dispatch_tables import wrapper_steps
from ....generated.schemas import MutationType, OutputType
from ....generated.wrapper_steps import STEPS
from ...torch_compat import pytree
from ..metadata.outcome import Found
from ..record.recorder import Recorder
from ..storage.inputs import Inputs, computed, fake_mode_of, to_fake, version_of
from ..symbols.sizes import Symbols
from .wrappers import Names, Wrapped, is_wrapper, number


@dataclass
class Argument:
    """A flat input that is a wrapper: how it is made, its first dense input; while it is traced the wrapper, its version, what is inside and
    the edge where its gradient arrives; afterwards whether its version moved.
    """

    made: Wrapped
    first: int
    traced: Any = None
    version: int | None = None
    edge: Any = None
    same_as: int | None = None
    moved: bool = False
    inside: list[torch.Tensor] = field(default_factory=list)

    @property
    def dense(self) -> range:
        """Its dense inputs."""
        return range(self.first, self.first + self.made.count)


@dataclass
class Result:
    """One output of the program, or a wrapper that is written back.

    dense     flat outputs below the border: its own, or those of what is inside.
    made      how a wrapper is made, None for a dense output.
    kind      what a wrapper is: NON_ALIAS, IS_INPUT, SAME_AS_OUTPUT, ALIAS_OF_INPUT or ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT.
    source    the flat input or the earlier result that it is, or is a view of.
    views     calls that make it of its source.
    followed  whether autograd knows how a fresh one was computed; the autograd function makes it then, as its result `position`.
    """

    dense: tuple[int, ...]
    made: Wrapped | None = None
    kind: OutputType = OutputType.NON_ALIAS
    source: int | None = None
    views: tuple[tuple[Any, tuple[Any, ...], dict[str, Any], int | None], ...] = ()
    followed: bool = False
    detached: bool = False
    position: int | None = None
    traced: Any = None


class Border:
    """The flat inputs of one program, wrappers taken apart."""

    def __init__(self, flat: Sequence[Any]) -> None:
        self.flat = list(flat)
        self.given: list[Any] = []
        self.first: list[int] = []
        self.arguments: dict[int, Argument] = {}
        self.results: list[Result] = []
        self.symbols: tuple[tuple[str, str, str], ...] = ()
        fake_mode = fake_mode_of(flat)
        for i, value in enumerate(flat):
            self.first.append(len(self.given))
            if not is_wrapper(value):
                self.given.append(value)
                continue
            fake = to_fake(value, fake_mode)
            made = Wrapped.of(fake)
            self.arguments[i] = Argument(made, len(self.given))
            self.given += [t.detach() if t.requires_grad else t for t in made.take(fake)]

    @property
    def any(self) -> bool:
        """Whether there is a wrapper at all."""
        return bool(self.arguments) or any(r.made is not None for r in self.results)

    # --- while tracing

    def enter(self, inputs: Inputs, recorder: Recorder) -> list[Any]:
        """The flat inputs of the program: traced tensors, wrappers around them."""
        values: list[Any] = []
        objects: dict[int, int] = {}
        for i, given in enumerate(self.flat):
            argument = self.arguments.get(i)
            if argument is None:
                values.append(inputs.fakes[self.first[i]])
                continue
            earlier = objects.setdefault(id(given), i)
            if earlier != i:
                argument.same_as = earlier
                argument.traced = self.arguments[earlier].traced
            else:
                self._enter(argument, given, inputs, recorder)
            values.append(argument.traced)
        return values

    @staticmethod
    def _enter(argument: Argument, given: Any, inputs: Inputs, recorder: Recorder) -> None:
        t = argument.made.put(iter([inputs.fakes[k] for k in argument.dense]))
        if given.requires_grad and not t.requires_grad:
            t.requires_grad_()
        if inputs.training and given.requires_grad:
            if not given.is_leaf:
                with recorder:
                    t = computed(t)
            argument.edge = get_gradient_edge(t)
        argument.traced, argument.version, argument.inside = t, version_of(t), argument.made.take(t)

    def leave(self, flat_result: list[Any], inputs: Inputs, recorder: Recorder) -> list[Any]:
        """The program's flat result with wrappers taken apart. Raises `UnsupportedError` for what is done to a wrapper beyond its elements."""
        dense: list[Any] = []
        first: dict[int, int] = {}
        objects = {id(a.traced): i for i, a in reversed(self.arguments.items())}
        for t in flat_result:
            k = len(self.results)
            if not is_wrapper(t):
                self.results.append(Result((len(dense),)))
                dense.append(t)
            elif id(t) in objects:
                self.results.append(
                    Result((), self.arguments[objects[id(t)]].made, OutputType.IS_INPUT, objects[id(t)])
                )
            elif id(t) in first:
                self.results.append(
                    Result((), self.results[first[id(t)]].made, OutputType.SAME_AS_OUTPUT, first[id(t)])
                )
            else:
                first[id(t)] = k
                self.results.append(self._result(t, dense, inputs, recorder))
        for i, argument in self.arguments.items():
            self._check(i, argument, dense, inputs)
        return dense

    def _result(self, t: Any, dense: list[Any], inputs: Inputs, recorder: Recorder) -> Result:
        made = Wrapped.of(t)
        followed = t.grad_fn is not None
        if t.requires_grad and not followed and not t._is_view():
            raise UnsupportedError(
                "an output is a leaf that the program itself made (requires_grad_()); make it outside"
            )
        found = self._view_of(t, inputs, recorder)
        if found is not None:
            return found
        inside = tuple(range(len(dense), len(dense) + made.count))
        dense += made.take(t)
        return Result(inside, made, followed=followed, traced=t)

    def _view_of(self, t: Any, inputs: Inputs, recorder: Recorder) -> Result | None:
        """`t` as a view of an input or of an earlier output; None when it is neither."""
        steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], int | None]] = []
        sources = {id(a.traced): (OutputType.ALIAS_OF_INPUT, i) for i, a in reversed(self.arguments.items())}
        for k, r in enumerate(self.results):
            if r.traced is not None:
                sources.setdefault(id(r.traced), (OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT, k))
        near = t
        while id(near) not in sources:
            step = recorder.wrapper_views.get(id(near))
            if step is None:
                return None
            near, *call = step
            steps.insert(0, tuple(call))  # type: ignore[arg-type]
        kind, source = sources[id(near)]
        if t.requires_grad and not t._is_view():
            raise UnsupportedError(
                "an output requires grad, but its gradient does not flow by way of what it is an alias of"
            )
        if inputs.training and t.requires_grad != near.requires_grad and t._is_view():
            raise UnsupportedError("an output is a view that was made while grad mode was off")
        # What autograd's own bookkeeping calls on a new view is no step of the program.
        steps = [s for s in steps if not recorder.is_detach(s[0])]
        return Result((), Wrapped.of(t), kind, source, tuple(steps), detached=not t._is_view(), traced=t)

    def _check(self, i: int, argument: Argument, dense: list[Any], inputs: Inputs) -> None:
        if argument.same_as is not None:
            return
        t, made = argument.traced, argument.made
        name = f"input {i} (a {type(t).__name__})"
        if not made.fits(t) or any(a is not b for a, b in zip(made.take(t), argument.inside, strict=True)):
            raise UnsupportedError(f"{name} is made of other tensors, or with other metadata, afterwards")
        if (tuple(t.shape), tuple(t.stride())) != (made.size, made.stride):
            raise UnsupportedError(f"{name} is given another layout")
        argument.moved = version_of(t) != argument.version
        before = argument.edge is not None
        if inputs.training and (
            t.requires_grad != before or (before and t.grad_fn is not None and t.grad_fn is not argument.edge.node)
        ):
            raise UnsupportedError(f"{name} is written and autograd follows that")

    # --- afterwards

    def settle(self, inputs: Inputs, found: Found, known: Symbols) -> None:
        """Decide, of the dense metadata, which wrappers the autograd function makes. Raises `UnsupportedError`."""
        position = found.meta.num_outputs
        for r in self.results:
            if not r.followed:
                continue
            info = [found.meta.output_info[k] for k in r.dense]
            if any(o.output_type is not OutputType.NON_ALIAS for o in info):
                raise UnsupportedError("an output that requires grad wraps memory of an input or of another output")
            r.position, position = position, position + 1
        fresh = [r.made for r in self.results if r.made is not None and r.dense and r.position is None]
        viewed = {s for r in self.results for _, args, kwargs, _ in r.views for s in _symbols_in((args, kwargs))}
        self.symbols = read_symbols(viewed.union(*(w.symbols() for w in fresh)), known)
        moved = [i for i, a in self.arguments.items() for k in a.dense if _other_layout(found, k)]
        if moved:
            raise UnsupportedError(f"the tensors inside of input {moved[0]} are given another layout or storage")

    def paths(self, paths: Sequence[str]) -> list[str]:
        """Source text of every dense input, from that of every flat one."""
        out: list[str] = []
        for i, path in enumerate(paths):
            out += self.arguments[i].made.paths(path) if i in self.arguments else [path]
        return out

    def distinct(self) -> list[int]:
        """Flat inputs that are wrappers, each object once: the autograd function's further arguments."""
        return [i for i, a in self.arguments.items() if a.same_as is None]

    def same(self) -> list[tuple[int, int]]:
        """Wrappers that are an earlier input's object."""
        return [(i, a.same_as) for i, a in self.arguments.items() if a.same_as is not None]

    def inside_function(self) -> set[int]:
        """Flat outputs that are inside of wrappers which the autograd function makes."""
        return {k for r in self.results if r.position is not None for k in r.dense}

    def emit(self, names: Names, wrapper: Callable[[int], str]) -> tuple[list[str], list[str]]:
        """Lines that bump versions and make the outputs that are wrappers, and the names of all outputs; `wrapper(i)` names an input."""
        lines = [
            STEPS["bump_version"].code.format(input=wrapper(i))
            for i, a in self.arguments.items()
            if a.moved and a.same_as is None
        ]
        results: list[str] = []
        for k, r in enumerate(self.results):
            if r.made is None:
                results.append(f"r{r.dense[0]}")
                continue
            results.append(f"w{k}")
            values = {"result": f"w{k}", "value": f"out[{r.position}]"}
            if r.source is not None:
                of_input = r.kind in (OutputType.IS_INPUT, OutputType.ALIAS_OF_INPUT)
                values["input"] = values["earlier"] = values["source"] = (
                    wrapper(r.source) if of_input else results[r.source]
                )
            for step in wrapper_steps(output=r.kind, followed=r.position is not None, detached=r.detached):
                if step == "wrap_subclass":
                    lines += names.wrap(f"w{k}", r.made, iter([f"r{d}" for d in r.dense]))
                elif step == "replay_view":
                    lines += _replay(r, values)
                else:
                    lines.append(STEPS[step].code.format(**values))
        return lines, results


def _replay(r: Result, values: dict[str, str]) -> list[str]:
    lines = []
    source = values["source"]
    for op, args, kwargs, index in r.views or ((None, (), {}, None),):
        if op is None:
            lines.append(STEPS["return_input"].code.format(result=values["result"], input=source))
            continue
        shown = [source, *(_text(a) for a in args), *(f"{n}={_text(a)}" for n, a in kwargs.items())]
        text = STEPS["replay_view"].code.format(result=values["result"], op=f"torch.ops.{op}", args=", ".join(shown))
        lines.append(text if index is None else f"{text}[{index}]")
        source = values["result"]
    return lines


def _symbols_in(a: Any) -> set[Any]:
    return {s for n in pytree.tree_leaves(a) if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}


def _text(a: Any) -> str:
    if isinstance(a, (list, tuple)):
        return f"[{', '.join(_text(x) for x in a)}]"
    if a is None or isinstance(a, (bool, int, float, str, torch.dtype)):
        return repr(a)
    if isinstance(a, torch.SymInt):
        return number(a)
    raise UnsupportedError(f"a view of a wrapper takes {a!r}")


def _other_layout(found: Found, k: int) -> bool:
    return found.meta.input_info[k].mutation_type not in (
        MutationType.NOT_MUTATED,
        MutationType.DATA,
        MutationType.VERSION,
    )


def read_symbols(symbols: set[Any], known: Symbols) -> tuple[tuple[str, str, str], ...]:
    """Each of `symbols` as (its name, the placeholder that has it, `.size(0)` or the like). Raises `UnsupportedError`."""
    out = []
    for symbol in sorted(symbols, key=str):
        node = known.nodes.get(symbol)
        source, how, dim = known.sources.get(symbol, (None, "", 0))
        if node is not None and node.op == "placeholder":
            out.append((str(symbol), node.name, ""))
        elif source is not None and source.op == "placeholder":
            call = {"size": f".size({dim})", "stride": f".stride({dim})", "offset": ".storage_offset()"}[how]
            out.append((str(symbol), source.name, call))
        else:
            raise UnsupportedError(f"the size {symbol} of a tensor subclass is that of no input; mark it static")
    return tuple(out)


@dataclass(frozen=True)
class WrappedResult:
    """A result of the autograd function that is a wrapper: how it is made of graph results, and how its gradient is."""

    made: Wrapped
    dense: tuple[int, ...]
    tangent: Wrapped
    watched: bool


@dataclass(frozen=True)
class WrappedGradient:
    """The gradient of one of the autograd function's arguments that is a wrapper, and how it is made of the backward's results."""

    argument: int
    dense: tuple[int, ...]
    made: Wrapped
