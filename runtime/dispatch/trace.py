"""Tracing: a torch-level graph (or any callable) and example inputs in, a functional ATen graph and its metadata out,
in one run.

Accepts FX graphs from Dynamo, export and `torch.fx`, and plain callables; strided tensors, numbers and size symbols
as inputs. Leaves a graph of functional ATen operators and views whose nodes carry `meta["val"]` (fake tensor or
symbolic number), `stack_trace`, `nn_module_stack` and a short `source`. Nothing real is touched: tensors are fake,
and modes and random state are put back.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import fx

from ...errors import UnsupportedError
from ...generated.schemas import OutputType, ViewAndMutationMeta
from ..torch_compat import (
    default_device,
    disable_autocast,
    enable_python_dispatcher,
    given_up,
    in_dual_level,
    refuses_hooks,
    tangents_followed,
    transforms_preserved,
)
from . import handlers
from .autograd.effects import check_effects, gradient_of
from .autograd.forward_mode import DualProgram, tangent_of
from .autograd.joint import Differentiated, Gradients, Saved, differentiate
from .autograd.second import SecondOrder, Twice, differentiate_twice
from .metadata.outcome import Found, analyze
from .randomness.streams import Draws
from .record.dead import finish
from .record.interpret import Called, call, run_graph
from .record.known import Truth
from .record.lifted import LiftedModule
from .record.recorder import Recorder
from .record.restart import Restart
from .storage.inputs import Inputs, Lift, lifted_attributes, of_sizes, sources_of, symbols_of
from .storage.merge import enter_inputs
from .subclasses.border import Border
from .surroundings import Surroundings
from .symbols.numbers import changing_numbers
from .symbols.sizes import guards_tell
from .wrapper.calling import Calling

# What torch raises for programs that fake tensors cannot run (data-dependent, unsupported) and for programs that
# eager refuses as well. Those that opforge's own code raised are its mistakes (`_is_mistake`) and go through.
TRACE_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError, ZeroDivisionError)
Result = TypeVar("Result")


@dataclass
class Traced:
    """One traced program.

    graph    functional; placeholders are `meta.graph_inputs` and then the merged bases; it returns a tuple of
             `meta.num_outputs` values:
             new contents of written inputs, results, bases of aliases, size symbols.
    meta     what its wrapper has to do.
    calling  how the caller's arguments become flat inputs, and flat outputs what the caller gets.
    lifted   parameters, buffers and constants that the program holds, by name: flat inputs after the caller's.
    program  runs the caller's arguments eagerly, for calls that break an assumption of the trace.
    gradients  of a program that autograd follows: what the joint graph holds beyond the results. `graph` then has the
             tangents as further placeholders and returns (results, gradients).
    untracked  autograd is on, but nothing that the graph does is its business (all of it happens under `no_grad`).
    turns_grad_on  the program is called with grad mode off and turns it on.
    border  tensor subclasses among its inputs and outputs, None where there are none. Flat inputs and outputs of `meta` are what is
             inside of them.
    grad_mode_after  the grad mode that the program leaves behind, None where it is the one it was called with.
    twice  traces it once more, for these sizes instead of symbols, with the gradients of its gradients; None where that is not supported.
    """

    graph: fx.GraphModule
    meta: ViewAndMutationMeta
    calling: Calling
    lifted: tuple[Lift, ...]
    program: Callable[..., Any]
    gradients: Gradients | None = None
    untracked: bool = False
    turns_grad_on: bool = False
    border: Border | None = None
    grad_mode_after: bool | None = None
    twice: Twice | None = None

    @property
    def boxed(self) -> bool:
        """Whether the graph takes one list of its arguments, which it empties: the caller gives up some of them."""
        return bool(self.calling.stolen) and self.gradients is None

    @property
    def static_arguments(self) -> set[int]:
        """Positions of the graph's placeholders that are parameters and buffers."""
        return {k for k, i in enumerate(self.meta.graph_inputs) if self.meta.input_info[i].static}

    @property
    def in_place_candidates(self) -> tuple[tuple[int, int], ...]:
        """(graph output, placeholder) pairs: that output may be written straight into that placeholder's tensor,
        which is contiguous or strided as its fake value says, if all reads of its old contents come first. Tell
        `bind` which were. What else is made of that output keeps it out.
        """
        meta = self.meta
        info = meta.input_info
        found = tuple(
            (info[i].updated, k)
            for k, i in enumerate(meta.graph_inputs)
            if info[i].updated is not None and info[i].base is None
        )
        used = Counter(k for k, _ in found)
        used.update(b.updated for b in meta.bases)
        of_inputs = (OutputType.IS_INPUT, OutputType.ALIAS_OF_INPUT, OutputType.SAME_AS_OUTPUT)
        used.update(k for o in meta.output_info for k in (o.value, None if o.output_type in of_inputs else o.source))
        return tuple(
            (k, p)  # type: ignore[misc]
            for k, p in found
            if used[k] == 1 and not any(f"{{out{k}}}" in source for _, source in meta.symbols)
        )


def trace(
    gm: Callable[..., Any],
    example_inputs: Sequence[Any],
    *,
    training: bool = False,
    recorder_type: type[Recorder] = Recorder,
    random: str = "eager",
    may_train: bool = True,
    truth: Callable[..., Truth] | None = None,
) -> Traced:
    """Trace `gm` for inputs like `example_inputs` (positional arguments: real or fake tensors, numbers, size symbols,
    and containers of them). For `training`, autograd follows the program and its gradients are traced too; so it does,
    where it `may_train`, if the program turns grad mode on. `random` is the setting of that name: `philox` makes random
    operators of ones with an explicit seed. `truth` says where masks let scores through (`GraphWriter`). Raises
    `UnsupportedError`, with the user's line, for what cannot be expressed; eager runs that, and raises its own errors.
    """
    calling = Calling.of_inputs(example_inputs)
    calling.stolen = given_up(gm)
    flat = calling.flatten(example_inputs)
    lifted = _lifted(gm)
    given = [*flat, *(t for _, t in lifted)]
    dual_level = in_dual_level()
    if dual_level:
        with tangents_followed(True):
            if any(tangent_of(t) is not None for t in given[len(flat) if isinstance(gm, DualProgram) else 0 :]):
                raise UnsupportedError("what a program reads has a tangent of forward-mode differentiation")
    request = _Request(gm, calling, given, lifted, may_train, recorder_type, random, truth)
    copies: frozenset[int] = frozenset()
    merged: list[frozenset[int]] = []
    for _ in range(2 * len(given) + 3):
        try:
            # The recorder's own work is not differentiated.
            with tangents_followed(False) if dual_level else contextlib.nullcontext():
                return _Attempt(request, copies, merged, training).trace()
        except Restart as again:
            copies |= again.copy
            training |= again.training
            if again.merge:
                merged = [m for m in merged if not m & again.merge] + [
                    again.merge.union(*(m for m in merged if m & again.merge))
                ]
    raise AssertionError("tracing restarts without end")


def _lifted(gm: Callable[..., Any]) -> list[Lift]:
    if isinstance(gm, DualProgram):
        return _lifted(gm.program)
    if isinstance(gm, fx.GraphModule):
        return lifted_attributes(gm)
    if isinstance(gm, torch.nn.Module):
        return [*gm.named_parameters(remove_duplicate=True), *gm.named_buffers(remove_duplicate=True)]
    return []


@dataclass(frozen=True)
class _Request:
    """What `trace` is asked for. `given`: the flat inputs, followed by the values of `lifted`."""

    gm: Callable[..., Any]
    calling: Calling
    given: list[Any]
    lifted: list[Lift]
    may_train: bool
    recorder_type: type[Recorder]
    random: str
    truth: Callable[..., Truth] | None

    @property
    def of_inputs(self) -> Callable[..., Any]:
        """The program that takes the inputs."""
        return self.gm.program if isinstance(self.gm, DualProgram) else self.gm


class _Attempt:
    """One run of the program over fake inputs, some of them copied or merged; `Restart` asks for another attempt."""

    def __init__(self, request: _Request, copies: frozenset[int], merged: list[frozenset[int]], training: bool) -> None:
        self.request, self.copies, self.training = request, copies, training
        self.autocast = torch.is_autocast_enabled("cpu") or (
            torch.cuda.is_available() and torch.is_autocast_enabled("cuda")
        )
        self.border = Border(request.given)
        given = self.border.given
        self.inputs = Inputs.of(given, copies, training, sources_of(request.of_inputs, given))
        self.inputs.merged = merged
        self.recorder = request.recorder_type(self.inputs.fake_mode, self.inputs.overlaps, handlers)
        self.recorder.draws = Draws(self.recorder) if request.random == "philox" else None
        self.recorder.truth = request.truth
        if not torch.is_inference_mode_enabled():
            self.recorder.frozen = frozenset(
                i for i, t in enumerate(given) if isinstance(t, torch.Tensor) and t.is_inference()
            )
        self.entered = enter_inputs(self.inputs, self.recorder)
        self.saved = Saved()
        self.grad_after = torch.is_grad_enabled()

    def trace(self) -> Traced:
        return self._traced(
            *self._ran(lambda found: self._differentiate(found, differentiate) if self.training else None)
        )

    def trace_twice(self, left: Collection[int], absent: Collection[int]) -> SecondOrder:
        self.recorder.twice = True
        how = partial(differentiate_twice, left=left, absent=absent)
        return self._ran(lambda found: self._differentiate(found, how))[1]

    def _ran(self, differentiated: Callable[[Found], Result]) -> tuple[Found, Result]:
        """Run the program, and differentiate it. Raises `UnsupportedError` for what cannot be traced."""
        held = contextlib.ExitStack()
        try:
            found = self._record(held)
            joint = differentiated(found)
            if not guards_tell(self.inputs.fake_mode.shape_env):
                raise UnsupportedError(
                    "the remainder of a float made of sizes decides something, which guards cannot tell"
                )
        except TRACE_ERRORS as error:
            if isinstance(error, UnsupportedError) or _is_mistake(error):
                raise
            where = self.recorder.where()
            if refuses_hooks(error):
                raise UnsupportedError(
                    f"a gradient by torch.func{where} inside of a program that reads tensors which require grad; detach them"
                ) from error
            raise UnsupportedError(f"{type(error).__name__} while tracing{where}: {error}") from error
        finally:
            held.close()
        return found, joint

    def _record(self, held: contextlib.ExitStack) -> Found:
        """Run the program and tell what it did to its inputs and what its outputs are."""
        request, recorder, inputs, border = self.request, self.recorder, self.inputs, self.border
        values = border.enter(inputs, recorder)
        had = [gradient_of(t) for t in values]
        result = self._run_program(values, held)
        flat_result = border.leave(request.calling.flatten_result(result), inputs, recorder)
        found = analyze(inputs, recorder, self.entered, flat_result, self.autocast)
        check_effects(zip(values, had, strict=True), request.calling.flatten_result(result), self.training)
        border.settle(inputs, found, recorder.symbols)
        if isinstance(request.gm, DualProgram):
            request.gm.check(found.meta)
        return found

    def _run_program(self, values: list[Any], held: contextlib.ExitStack) -> Any:
        request, recorder = self.request, self.recorder
        count = len(request.given) - len(request.lifted)
        attributes = {name: t for (name, _), t in zip(request.lifted, values[count:], strict=True)}
        seed_before = torch.initial_seed()
        hooks = self.saved.hooks() if self.training else contextlib.nullcontext()
        # The program itself may enter a level of forward-mode differentiation.
        with preserved_state(), self._dispatcher(), tangents_followed(True), hooks, recorder:
            recorder.training = self.training
            recorder.expects_no_grad = request.may_train and not self.training and _grad_is_off(self.border.given)
            args = request.calling.unflatten_inputs(values[:count])
            result = _run(request.gm, args, attributes, recorder, held)
            seed = torch.initial_seed()
            recorder.expects_no_grad, self.grad_after = False, torch.is_grad_enabled()
        if seed != seed_before and recorder.draws is None:  # draws set it themselves
            raise UnsupportedError("the program seeds the random generator")
        return result

    def _dispatcher(self) -> contextlib.AbstractContextManager[Any]:
        """Composite kernels in C++ read sizes as plain integers; with symbolic sizes their Python counterparts must run."""
        return enable_python_dispatcher() if self._is_symbolic else contextlib.nullcontext()

    @cached_property
    def _is_symbolic(self) -> bool:
        gm = self.request.gm
        if any(layout is not None and not layout.plain for layout in self.inputs.layouts):
            return True
        return _sizes_from_data(self.request.of_inputs) or (isinstance(gm, DualProgram) and bool(gm.moved))

    def _differentiate(self, found: Found, how: Callable[[Differentiated], Result]) -> Result:
        program = Differentiated(self.inputs, self.recorder, self.entered, found, self.saved, self.border)
        with preserved_state(), self._dispatcher(), disable_autocast():
            return how(program)

    def _traced(self, found: Found, joint: tuple[Gradients, list[Any]] | None) -> Traced:
        gm, grad = self.request.gm, torch.is_grad_enabled()
        outputs = tuple(found.outputs)
        graph = finish(self.recorder, outputs if joint is None else (outputs, tuple(joint[1])))
        gradients = None if joint is None else joint[0]
        if gradients is not None and isinstance(gm, DualProgram):
            gradients = replace(gradients, again=gm.again(found.meta, graph))
        return Traced(
            graph=graph,
            meta=found.meta,
            calling=self.request.calling,
            lifted=tuple(self.request.lifted),
            program=gm.forward if isinstance(gm, torch.nn.Module) else gm,
            gradients=gradients,
            untracked=self.training and gradients is None,
            turns_grad_on=self.training and not grad,
            border=self.border if self.border.any else None,
            grad_mode_after=self.grad_after if self.grad_after != grad else None,
            twice=None if gradients is None or isinstance(gm, DualProgram) or self.border.any else self._twice(),
        )

    def _twice(self) -> Twice:
        """Traces the program once more, as it was traced now; holds no input."""
        alike, lifted = self.inputs.alike, self.request.lifted
        fakes = [(name, t) for (name, _), t in zip(lifted, alike[len(alike) - len(lifted) :], strict=True)]
        request = replace(self.request, given=alike, lifted=fakes)
        copies, merged, surroundings = self.copies, self.inputs.merged, Surroundings()

        def twice(sizes: Mapping[Any, Any], left: Collection[int], absent: Collection[int]) -> SecondOrder:
            given = of_sizes(alike, sizes) if symbols_of(alike) else alike
            with surroundings.entered():
                return _Attempt(replace(request, given=given), copies, merged, True).trace_twice(left, absent)

        return twice


def _sizes_from_data(gm: Any) -> bool:
    """Whether Dynamo has seen that a call of the program makes a size, or a number; those that change between calls are none."""
    if not isinstance(gm, fx.GraphModule):
        return False
    given = set(changing_numbers(gm))
    given |= {name for n in gm.graph.nodes if n.op == "placeholder" for name in _symbols(n.meta.get("example_value"))}
    return any(n.meta.get("unbacked_bindings") or _symbols(n.meta.get("example_value")) - given for n in gm.graph.nodes)


def _symbols(value: Any) -> set[str]:
    """The names of those that a symbolic number is made of."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set()
    return {symbol.name for symbol in value.node.expr.free_symbols}


def _grad_is_off(given: Sequence[Any]) -> bool:
    """Whether autograd would follow a program on these inputs if it turned grad mode on."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in given)


def _is_mistake(error: BaseException) -> bool:
    """Whether opforge's own code, but not what calls the program's functions, raised an error other than a RuntimeError, which is what it
    raises in eager's place.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    module = place.tb_frame.f_globals.get("__name__", "") if place is not None else ""
    ours = str(module).startswith(__name__.split(".", maxsplit=1)[0] + ".") and module != call.__module__
    return ours and not isinstance(error, RuntimeError)


def _run(
    gm: Callable[..., Any],
    args: Sequence[Any],
    attributes: dict[str, Any],
    recorder: Recorder,
    held: contextlib.ExitStack,
) -> Any:
    if isinstance(gm, DualProgram):
        return gm.trace(args, lambda *given: _run(gm.program, given, attributes, recorder, held))
    if isinstance(gm, LiftedModule):
        return gm.record(args, recorder, held)
    if isinstance(gm, fx.GraphModule):
        graph = gm.graph  # of an exported program, it takes its arguments apart and puts its results together itself
        with default_device():
            return graph.process_outputs(run_graph(gm, graph.process_inputs(*args), attributes, recorder))
    with Called(recorder):
        if isinstance(gm, torch.nn.Module):
            return torch.func.functional_call(gm, attributes, tuple(args), tie_weights=True)
        return gm(*args)


@contextlib.contextmanager
def preserved_state() -> Iterator[None]:
    """Put grad mode, the transforms of `torch.func`, autocast (whose weight cache must not see fake tensors) and the random state back, however
    the block ends.
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    grad = torch.is_grad_enabled()
    rng = torch.get_rng_state()
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    cache = torch.is_autocast_cache_enabled()
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    torch.set_autocast_cache_enabled(False)
    try:
        with transforms_preserved():
            yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_rng_state(rng)
        torch.set_autocast_cache_enabled(cache)
        while torch.autocast_increment_nesting() > nesting:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
