"""PyTorch's entry points for user compilers: `aot_function`, `aot_module`, `aot_module_simplified`, `aot_autograd`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dispatch.record.lifted import LiftedModule
from ..dispatch.storage.regions import beyond_strides
from ..torch_compat import FakeTensorMode, ShapeEnv, pytree
from .compile import compile_program
from .compilers import Compiled, Compiler, Compilers, Decompositions, Partitioner, check_functions
from .partitioners import default_partition


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Decompositions | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool = False,
    enable_log: bool = True,
) -> Callable[..., Any]:
    """`fn` with its forward and backward traced at the first call and compiled by the given functions.

    fn            takes and returns tensors, numbers and containers of them.
    fw_compiler   `(graph module of ATen operators, fake inputs) → callable`; the callable takes the graph's inputs one by one, or as one
                  list when it has `_boxed_call`, and returns the graph's results. Gets the forward, and without `inference_compiler` also
                  graphs that need no gradient.
    bw_compiler   the same for the backward; `fw_compiler` when left out.
    partition_fn  `(joint module, (primals, tangents), *, num_fwd_outputs, **others) → (forward, backward)`; see `partitioners`.
    decompositions  operator overload → Python function that computes the same by other operators, applied to the functional graph.
                  `None` and `{}` mean none: what opforge itself replaces (`specs/decompositions.yaml`), it always does.
    num_params_buffers  so many leading tensors keep fixed sizes with `dynamic`.
    keep_inference_input_mutations  graphs that need no gradient write to their inputs themselves, by a `copy_` at the end.
    dynamic       one graph for all sizes (but 0 and 1) instead of one for each.
    enable_log    accepted for compatibility; nothing is logged here.

    Unlike torch's, the result is traced again for arguments of another kind: shapes, strides, dtypes, numbers, `requires_grad`, grad mode,
    autocast. What cannot be traced runs eagerly with a warning; with the setting `strict` it raises `UnsupportedError`. Raises TypeError for
    what should be a function and is none, and where it is called with an argument that has no hash.
    """
    check_functions(fn=fn)
    compilers = _compilers(
        fw_compiler, bw_compiler, partition_fn, decompositions, keep_inference_input_mutations, inference_compiler
    )

    def program(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(*args, **kwargs)

    compiled = _PerSignature(program, compilers, dynamic, num_params_buffers)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return compiled((), args, kwargs)

    return run


def aot_module(mod: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """A module that runs `mod` with forward and backward compiled; further arguments are those of `aot_function`. Its parameters and buffers
    are `mod`'s own (under `orig_module`), read at every call and passed to the graph first.
    """
    return _AotModule(mod, *args, **kwargs)


def aot_module_simplified(
    mod: torch.nn.Module,
    args: Sequence[Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Decompositions | None = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
) -> Callable[..., Any]:
    """Compile `mod`, whose forward takes positional inputs like `args` (real or fake), now and for these inputs alone. The graph's inputs are
    the parameters, the buffers and then `args`; the result takes only the latter. Other arguments are those of `aot_function`. For callers
    such as Dynamo, which guard what they pass.
    """
    compilers = _compilers(
        fw_compiler, bw_compiler, partition_fn, decompositions, keep_inference_input_mutations, inference_compiler
    )
    return _simplified(mod, args, compilers)


def _simplified(mod: torch.nn.Module, args: Sequence[Any], compilers: Compilers) -> Compiled:
    lifted = LiftedModule(mod, lambda values: (values, {}))
    held = lifted.tensors()
    compiled = compile_program(lifted, [*held, *args], compilers)

    def forward(*runtime_args: Any) -> Any:
        return compiled(*held, *runtime_args)

    return forward if held else compiled


def aot_autograd(
    *,
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Decompositions | Callable[[], Decompositions] | None = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
) -> Callable[..., Any]:
    """A backend for `torch.compile(…, backend=…)` made of compilers for forward and backward graphs. Arguments are those of `aot_function`;
    `decompositions` may also be a function that returns the table, called at the first graph.
    """
    made: list[Compilers] = []
    # Checked now, not inside of Dynamo; the table is asked for at the first graph.
    compilers = _compilers(
        fw_compiler,
        bw_compiler,
        partition_fn,
        None,
        keep_inference_input_mutations,
        inference_compiler,
        wrap_backward=_undisturbed,
    )

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        if not made:
            table = decompositions() if callable(decompositions) else decompositions
            made.append(dataclasses.replace(compilers, decompositions=dict(table or {})))
        return _undisturbed(_simplified(gm, example_inputs, made[0]))

    return backend


def _undisturbed(compiled: Compiled) -> Compiled:
    """A compiled function that Dynamo does not look into."""
    hidden: Compiled = torch.compiler.disable(compiled)
    return hidden


def _compilers(
    fw_compiler: Compiler,
    bw_compiler: Compiler | None,
    partition_fn: Partitioner,
    decompositions: Decompositions | None,
    keep_mutations: bool,
    inference_compiler: Compiler | None,
    **more: Any,
) -> Compilers:
    check_functions(
        fw_compiler=fw_compiler,
        bw_compiler=bw_compiler,
        partition_fn=partition_fn,
        inference_compiler=inference_compiler,
    )
    return Compilers(
        fw_compiler,
        bw_compiler or fw_compiler,
        inference_compiler or fw_compiler,
        partition_fn,
        dict(decompositions or {}),
        keep_mutations,
        **more,
    )


class _AotModule(torch.nn.Module):
    def __init__(self, mod: torch.nn.Module, fw_compiler: Compiler, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.orig_module = mod
        self._lifted = LiftedModule(mod, _nested)
        count = len(self._lifted.names)
        kwargs.setdefault("num_params_buffers", count)
        # Bound by `aot_function`'s own signature, so that positional arguments mean the same.
        self._compiled = _bound(self._lifted, fw_compiler, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the wrapped module."""
        return self._compiled(self._lifted.tensors(), args, kwargs)


def _nested(values: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    args, kwargs = values
    return args, kwargs


def _bound(
    program: Any,
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Decompositions | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool = False,
    enable_log: bool = True,
) -> _PerSignature:
    compilers = _compilers(
        fw_compiler, bw_compiler, partition_fn, decompositions, keep_inference_input_mutations, inference_compiler
    )
    return _PerSignature(program, compilers, dynamic, num_params_buffers)


class _PerSignature:
    """A program compiled once for each kind of arguments. It is called with leading tensors, positional and keyword arguments."""

    def __init__(self, program: Any, compilers: Compilers, dynamic: bool, fixed: int) -> None:
        self.program, self.compilers, self.dynamic, self.fixed = program, compilers, dynamic, fixed
        self.module = program.module if isinstance(program, LiftedModule) else None
        self._made: dict[Any, list[tuple[Callable[[Sequence[Any]], bool], Compiled]]] = {}

    def __call__(self, tensors: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        leaves = [*tensors, *flat]
        key = self._key(leaves, spec)
        try:
            variants = self._made.setdefault(key, [])
        except TypeError:
            _check_hashes(flat, key[-1][len(tensors) :])
            raise
        for holds, compiled in variants:
            if holds(leaves):
                return compiled(*tensors, args, kwargs)
        inputs, holds = leaves, _always
        if self.dynamic:
            inputs, holds = _symbolic(leaves, self.fixed)
        # Trace before anything is remembered: a compiler that raises is asked again.
        nested = pytree.tree_unflatten(inputs[len(tensors) :], spec)
        compiled = compile_program(self.program, [*inputs[: len(tensors)], *nested], self.compilers)
        variants.append((holds, compiled))
        return compiled(*tensors, args, kwargs)

    def _key(self, leaves: Sequence[Any], spec: Any) -> Any:
        modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            *(
                torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
                for device in ("cpu", "cuda")
            ),
        )
        states = () if self.module is None else tuple([m.training for m in self.module.modules()])
        return spec, modes, states, tuple([self._leaf(k, t) for k, t in enumerate(leaves)])

    def _leaf(self, k: int, t: Any) -> Any:
        if isinstance(t, (float, slice)):
            return type(t), repr(t)  # 0.0 and -0.0 are equal; slices have no hash before Python 3.12
        if not isinstance(t, torch.Tensor):
            return type(t), t
        kind = type(t), t.dtype, t.device, t.requires_grad, t.is_leaf, t.is_inference(), t.is_neg(), t.is_conj()
        if beyond := beyond_strides(t):
            return *kind, beyond  # such a program runs eagerly
        if self.dynamic and k >= self.fixed:
            return *kind, t.dim()
        return *kind, t.shape, t.stride(), t.storage_offset()


def _check_hashes(arguments: Sequence[Any], keys: Sequence[Any]) -> None:
    """Raises TypeError for an argument whose key has no hash: nothing would tell that a graph was traced for another value of it."""
    for k, (a, key) in enumerate(zip(arguments, keys, strict=True)):
        try:
            hash(key)
        except TypeError:
            raise TypeError(
                f"argument {k} (containers counted by their items) is a {type(a).__name__}, which has no hash: a graph holds the values of all "
                "arguments that are not tensors, and must be made again for others. Pass tensors, numbers and strings in tuples, lists and "
                "dicts, or give the type a hash"
            ) from None


def _always(leaves: Sequence[Any]) -> bool:
    return True


def _symbolic(leaves: Sequence[Any], fixed: int) -> tuple[list[Any], Callable[[Sequence[Any]], bool]]:
    """Fake leaves whose sizes are symbols (of the first `fixed` they are not), and a check whether others meet what the trace assumed."""
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    plain = [isinstance(t, torch.Tensor) and not beyond_strides(t) for t in leaves]
    fakes = [mode.from_tensor(t, static_shapes=k < fixed) if plain[k] else t for k, t in enumerate(leaves)]
    positions = [k for k, t in enumerate(leaves) if plain[k]]
    placeholders = [fakes[k] for k in positions]
    guards: list[str | None] = []

    def holds(given: Sequence[Any]) -> bool:
        if not guards:
            guards.append(shape_env.produce_guards_expression(placeholders, ignore_static=False))
        code = guards[0]
        return code is None or bool(shape_env.evaluate_guards_expression(code, [given[k] for k in positions]))

    return fakes, holds
