"""Export: a module as one functional graph with a signature, its parameters and buffers inputs of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ...errors import ExportError, UnsupportedError
from ...generated.schemas import OutputType
from ..dispatch.record.lifted import LiftedModule
from ..dispatch.storage.regions import beyond_strides
from ..dispatch.trace import trace
from ..torch_compat import (
    FakeTensor,
    FakeTensorMode,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    is_traceable_wrapper_subclass,
    pytree,
)
from .compilers import Decompositions
from .decompose import decompose
from .frames import FrameRecorder, where_raised
from .partitioners import joint_module
from .record import Recorded, record
from .signature import BackwardSignature, GraphSignature


def aot_export_module(
    mod: torch.nn.Module,
    args: Iterable[Any],
    *,
    decompositions: Decompositions | None = None,
    trace_joint: bool,
    output_loss_index: int | None = None,
    pre_dispatch: bool = False,
    dynamic_shapes: bool | None = None,
    kwargs: dict[str, Any] | None = None,
) -> tuple[fx.GraphModule, GraphSignature]:
    """`mod` as a functional graph of ATen operators `(*parameters, *buffers, *flat inputs) → (*updated inputs, *flat outputs, *gradients)`, and
    what these are. Nothing is run and `mod` is left as it was.

    args, kwargs   example inputs of the forward: tensors, numbers and containers of them. Whoever runs the graph puts the updated inputs back.
    trace_joint    with the gradients of the output at `output_loss_index` (a position among the flat outputs) for every parameter and input that
                   requires grad; without, the graph is that under `no_grad`.
    decompositions  as for `aot_function`.
    pre_dispatch   must be False: graphs are recorded below autograd.
    dynamic_shapes  sizes of the inputs (not of parameters and buffers) become symbols. None: as the fake inputs say; real ones are static.

    Buffers may be written in place or assigned anew; both are updates. Raises `ExportError` (a `RuntimeError`) for other changes of the
    module, for changes of an input's shape, stride or storage, writes to inputs that share memory or (with `trace_joint`) require grad, tensor
    subclasses, seeded random operators, branches and Python numbers that depend on data, and losses that are not one real number or are not
    the only output that requires grad.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    if pre_dispatch:
        joint = " (and trace_joint is True, which torch refuses too)" if trace_joint else ""
        raise ExportError(f"pre_dispatch=True is not supported: graphs are recorded below autograd{joint}; pass False")
    if trace_joint and output_loss_index is None:
        raise ExportError("trace_joint=True needs output_loss_index: the position of the loss among the outputs")
    leaves, spec = pytree.tree_flatten((args, kwargs))
    program = LiftedModule(mod, lambda values: pytree.tree_unflatten(list(values), spec), keeps_assignments=True)
    held = program.tensors()
    given = [*held, *leaves]
    names = _names(program, args, kwargs)
    _check_inputs(given, names)
    fakes = _own_fakes(given, len(held), dynamic_shapes, mod)
    try:
        recorded = record(program, given, fakes, names, output_loss_index if trace_joint else None)
        graph = decompose(recorded.graph, decompositions) if decompositions else recorded.graph
    except (UnsupportedError, GuardOnDataDependentSymNode) as error:
        if isinstance(error, ExportError):
            raise
        raise _refusal(error) from error
    _check_random(graph)
    in_spec = pytree.tree_structure(((*held, *args), kwargs))
    return _module(graph), _signature(graph, recorded, program, in_spec, output_loss_index if trace_joint else None)


def aot_export_joint_simple(
    func: Callable[..., Any],
    args: Sequence[Any],
    *,
    trace_joint: bool,
    num_params_buffers: int = 0,
    decompositions: Decompositions | None = None,
) -> fx.GraphModule:
    """`func` of flat `args` (tensors and numbers), which returns a tuple or list of tensors and numbers, as a graph with the same inputs and
    outputs. With `trace_joint`, and where a result needs a gradient, a joint graph `(primals, tangents) → (*outputs, *gradients)` as partition
    functions take it. `num_params_buffers` changes nothing here.

    Raises `ExportError` for a function that changes an input, or of which an output is an input, or shares memory with one or with another output.
    """
    args = tuple(args)
    names = [f"input {k}" for k in range(len(args))]
    for k, a in enumerate(args):
        if not isinstance(
            a, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, complex, str, type(None))
        ):
            raise ExportError(f"input {k} is a {type(a).__name__}; pass its tensors one by one")
    _check_inputs(args, names)
    training = trace_joint and torch.is_grad_enabled() and any(getattr(a, "requires_grad", False) for a in args)
    try:
        with torch.set_grad_enabled(training):
            traced = trace(func, args, training=training, recorder_type=FrameRecorder, may_train=False)
        graph = decompose(traced.graph, decompositions) if decompositions else traced.graph
    except UnsupportedError as error:
        raise _refusal(error) from error
    if traced.calling.out_spec is not None:
        raise ExportError("the outputs are no flat tuple or list of tensors and numbers; return them one by one")
    for k, info in enumerate(traced.meta.input_info):
        if info.mutates_data or info.mutates_metadata or info.mutates_storage:
            raise ExportError(
                f"input {k} is changed ({info.mutation_type.value}){_line(graph, info.updated)}; write to a clone of it"
            )
        if info.same_as is not None:
            raise ExportError(f"input {k} is the same tensor as input {info.same_as}; pass it once")
    for k, out in enumerate(traced.meta.output_info):
        if out.output_type not in (OutputType.NON_ALIAS, OutputType.NOT_TENSOR):
            raise ExportError(f"output {k} shares memory ({_told(out.output_type, out.source)}); return a clone of it")
    _check_random(graph)
    constants = [o.constant for o in traced.meta.output_info]
    _put_constants(graph, constants)
    if traced.gradients is None:
        return _module(graph)
    return joint_module(graph, traced.gradients.inputs)


def _refusal(error: Exception) -> ExportError:
    """What users are told where the program cannot be recorded."""
    asked = error if isinstance(error, GuardOnDataDependentSymNode) else error.__cause__
    if not isinstance(asked, GuardOnDataDependentSymNode):
        return ExportError(str(error))
    return ExportError(
        f"the program asks for a value that only its data tells{where_raised(asked)}: {asked.cond}. A graph is one for all data: compute both "
        "and take one with torch.where, or take the number as an input"
    )


def _line(graph: fx.GraphModule, position: int | None) -> str:
    """Where a result of the graph is computed."""
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    flat = pytree.tree_leaves(output.args[0]) if position is not None else ()
    place = flat[position].meta.get("source") if position is not None and isinstance(flat[position], fx.Node) else None
    return f" ({place})" if place else ""


def _told(kind: OutputType, source: int | None) -> str:
    if kind in (OutputType.IS_INPUT, OutputType.ALIAS_OF_INPUT):
        return f"with input {source}"
    return "with another output"


def _put_constants(graph: fx.GraphModule, constants: Sequence[str | None]) -> None:
    """Outputs that are known numbers, which a wrapper would make, as outputs of the graph."""
    if all(c is None for c in constants):
        return
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    joint = len(output.args[0]) == 2 and isinstance(output.args[0][0], (tuple, list))
    values = iter(output.args[0][0] if joint else output.args[0])
    results = tuple(next(values) if c is None else eval(c, {"__builtins__": {"float": float}}) for c in constants)
    output.args = ((results, output.args[0][1]) if joint else results,)


def _module(graph: fx.GraphModule) -> fx.GraphModule:
    """A plain graph module, which prints and pickles as users expect."""
    return fx.GraphModule(graph, graph.graph, class_name="Exported")


def _names(program: LiftedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    paths = [f"input args{pytree.keystr(path)}" for path, _ in pytree.tree_flatten_with_path(args)[0]]
    paths += [f"input kwargs{pytree.keystr(path)}" for path, _ in pytree.tree_flatten_with_path(kwargs)[0]]
    return [
        *(f"parameter {name!r}" for name in program.parameters),
        *(f"buffer {name!r}" for name in program.buffers),
        *paths,
    ]


def _check_inputs(given: Sequence[Any], names: Sequence[str]) -> None:
    for t, name in zip(given, names, strict=True):
        if is_traceable_wrapper_subclass(t):
            raise ExportError(
                f"{name} is a {type(t).__name__}, a tensor subclass; export the program of its inner tensors"
            )
        if isinstance(t, torch.Tensor) and (beyond := beyond_strides(t)):
            raise ExportError(f"{name} {beyond}; only strided tensors can be exported")


def _check_random(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "opforge":
            raise ExportError(
                f"{node.target} ({node.meta.get('source') or node.name}) is functionalized random state, which a graph to export cannot hold; "
                "export the program itself, not what opforge traced of it"
            )


def _own_fakes(given: Sequence[Any], held: int, dynamic: bool | None, mod: torch.nn.Module) -> list[Any]:
    """Fakes of the inputs, each in a storage of its own: what shares memory is written separately, or not at all."""
    mode = next((t.fake_mode for t in given if isinstance(t, FakeTensor)), None)
    if mode is None and isinstance(mod, fx.GraphModule):
        vals = (n.meta.get("val") for n in mod.graph.nodes)
        mode = next((v.fake_mode for v in vals if isinstance(v, FakeTensor)), None)
    mode = mode or FakeTensorMode(shape_env=ShapeEnv())
    seen: set[int] = set()
    fakes = []
    for k, t in enumerate(given):
        fake = t
        if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor):
            fake = mode.from_tensor(t, static_shapes=k < held or not dynamic)
        if isinstance(fake, torch.Tensor):
            if fake.untyped_storage()._cdata in seen:
                with mode, torch.no_grad():
                    own = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
                fake = own.requires_grad_(t.requires_grad)
            seen.add(fake.untyped_storage()._cdata)
        fakes.append(fake)
    return fakes


def _signature(
    graph: fx.GraphModule, recorded: Recorded, program: LiftedModule, in_spec: Any, loss: int | None
) -> GraphSignature:
    inputs = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    outputs = [getattr(o, "name", None) for o in output.args[0]]
    parameters, buffers = program.parameters, program.buffers
    count, first_user = len(parameters), len(program.names)
    updated = dict(zip(outputs, recorded.updated, strict=False))
    results = outputs[len(updated) : len(updated) + recorded.results]
    gradients = dict(zip(outputs[len(updated) + recorded.results :], recorded.gradients, strict=True))
    backward = None
    if loss is not None:
        backward = BackwardSignature(
            {str(o): parameters[i] for o, i in gradients.items() if i < count},
            {str(o): inputs[i] for o, i in gradients.items() if i >= count},
            str(results[loss]),
        )
    return GraphSignature(
        parameters=list(parameters),
        buffers=list(buffers),
        user_inputs=inputs[first_user:],
        user_outputs=results,
        inputs_to_parameters=dict(zip(inputs, parameters, strict=False)),
        inputs_to_buffers=dict(zip(inputs[count:], buffers, strict=False)),
        buffers_to_mutate={str(o): program.names[i] for o, i in updated.items() if count <= i < first_user},
        parameters_to_mutate={str(o): program.names[i] for o, i in updated.items() if i < count},
        user_inputs_to_mutate={str(o): inputs[i] for o, i in updated.items() if i >= first_user},
        in_spec=in_spec,
        out_spec=recorded.out_spec,
        backward_signature=backward,
    )
