"""Source text of the autograd function of one training graph: straight-line Python that calls the compiled forward and backward.

Autograd sees one node. Its forward keeps what the backward asks for with `save_for_backward`, so that writes to saved inputs and results
are noticed as eager notices them; its backward gets gradients of any layout and gives the compiled graph those that it was made for.

Compiled autograd captures the whole backward of a program. There the backward of each graph is `_opforge_traced`: the same, written with what Dynamo
can follow; and what is asked at each call is asked where the engine asks for a `_compiled_autograd_key`, before the captured graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...generated.wrapper_steps import STEPS
from ..dispatch.subclasses.wrappers import Names
from ..execute.support import LAZY
from .compiled import ALWAYS, CompiledBackward, Place, Watched


def emit_function(backward: CompiledBackward, names: Names | None = None) -> str:
    """Source of the class `Compiled`, a `torch.autograd.Function`. `names` gets the objects that it refers to by name."""
    names = names or Names()
    methods = [_forward(backward, names), _backward(backward, names)]
    if is_traceable(backward):
        methods += [_traced(backward), _key(backward)]
    return (
        "\n\n".join(["class Compiled(Function):\n" + "\n".join(methods[0]), *("\n".join(m) for m in methods[1:])])
        + "\n"
    )


def is_traceable(backward: CompiledBackward) -> bool:
    """Whether Dynamo can follow the backward into its graph: not where gradients or results are tensor subclasses."""
    gradients = backward.gradients
    return not (gradients.wrapped_results or gradients.wrapped_gradients or gradients.wrappers)


def _forward(spec: CompiledBackward, values: Names) -> list[str]:
    gradients = spec.gradients
    names = [f"x{k}" for k in range(spec.arguments)]
    lines = [f"ctx.arguments = kept_arguments(again, {_tuple(names)})"] if gradients.again is not None else []
    lines.append(f"out = forward_graph({', '.join(names)})")
    names += [f"v{k}" for k in range(gradients.wrappers)]
    if gradients.leaves:
        names.append("*ways")
        lines.append("ctx.ways = bool(ways)")
    if spec.partial:
        lines.append("ctx.set_materialize_grads(False)")
        if spec.symbolic:
            lines.append(f"ctx.shapes = {_tuple([f'out[{k}].shape' for k in gradients.tangents])}")
    lines += [f"{symbol} = x{k}{call}" for symbol, k, call in gradients.symbols]
    if gradients.symbols:
        lines.append(f"ctx.symbols = ({', '.join(s for s, _, _ in gradients.symbols)},)")
    for k, r in enumerate(gradients.wrapped_results):
        lines += values.wrap(f"w{k}", r.made, iter([f"out[{d}]" for d in r.dense]))
    lines += [*_kept(spec), *_watched(spec.watched)]
    if spec.constant:
        lines.append(f"ctx.mark_non_differentiable({', '.join(f'out[{k}]' for k in spec.constant)})")
    inside = {k for r in gradients.wrapped_results for k in r.dense}
    results = ["None" if k in inside else f"out[{k}]" for k in range(spec.results)]
    lines.append(f"return {_tuple([*results, *(f'w{k}' for k in range(len(gradients.wrapped_results)))])}")
    return [
        "    @staticmethod",
        f"    def forward({', '.join(['ctx', *names])}):",
        *(f"        {line}" for line in lines),
    ]


def _kept(spec: CompiledBackward) -> list[str]:
    """What the forward keeps, and what is asked of it again in the backward."""
    tensors = [s for s in spec.saved if s.is_tensor]
    sizes = [_variable(s.place) for s in spec.saved if not s.is_tensor]
    names = [_variable(s.place) for s in tensors]
    lines = []
    if tensors or spec.gradients.once:
        lines.append(f"ctx.save_for_backward({', '.join(names or ['nothing'])})")
    if tensors:
        lines.append(f"ctx.hooked = described(({', '.join(names)},)) if saving_is_hooked() else None")
    if _some_need_less(spec):
        # Whether a write to what only some tangents need matters is known in the backward.
        versions = [f"({t}._version{_plus(s.bump)}, {s.needed_for})" for t, s in zip(names, tensors, strict=True)]
        lines.append(f"ctx.versions = ({', '.join(versions)},)")
    if later := [(k, s) for k, s in enumerate(spec.saved) if s.described_by_forward]:
        known = [f"({k}, described(({_variable(s.place)},))[0])" for k, s in later]
        lines.append(f"ctx.given = ({', '.join(known)},)")
    if sizes:
        lines.append(f"ctx.sizes = ({', '.join(sizes)},)")
    if spec.unsaved:
        lines.append(f"ctx.unsaved = {_tuple([f'unsaved(x{k})' for k in spec.unsaved])}")
    return lines


def _watched(watched: Sequence[Watched]) -> list[str]:
    """What is watched beside what is kept. Autograd does not check what hooks have packed."""
    lines = []
    if others := [w for w in watched if not w.is_held]:
        # The program may drop a tensor whose memory a view still changes; a wrapper subclass has no counter to share.
        texts = []
        for w in others:
            t = _variable(w.place)
            reference = "counter_of" if w.place[0] in ("input", "output") else "ref"
            texts.append(f"({reference}({t}), {t}._version{_plus(w.bump)}, {w.needed_for})")
        lines.append(f"ctx.watched = () if saving_is_hooked() else ({', '.join(texts)},)")
    if held := [w for w in watched if w.is_held]:
        tensors = _tuple([_variable(w.place) for w in held])
        versions = ", ".join(f"{_variable(w.place)}._version{_plus(w.bump)}" for w in held)
        lines.append(f"ctx.lasting = () if saving_is_hooked() else ({tensors}, [{versions}])")
    return lines


def _backward(spec: CompiledBackward, values: Names) -> list[str]:
    wrapped = spec.gradients.wrapped_results
    gradients = [f"g{k}" for k in range(spec.results)] + [f"h{k}" for k in range(len(wrapped))]
    lines = ["if in_transform():", f"    return backward_by_rows(Compiled.backward, ctx, {_tuple(gradients)})"]
    own = f"{_tuple(gradients)}, again, {spec.partial}"
    lines += ["if tangents_may_be():", f"    return backward_of_duals(Compiled.backward, ctx, {own})"]
    taken = range(spec.arguments + spec.gradients.wrappers)
    if spec.partial:
        lines.append("undefined = 0")
        for n, k in enumerate(spec.gradients.tangents):
            shape = f"ctx.shapes[{n}]" if spec.symbolic else ""
            lines += [f"if g{k} is None:", f"    undefined |= {1 << n}", f"    g{k} = tangents[{n}].zeros({shape})"]
        nothing = _tuple(["None"] * len(taken))
        lines += [f"if undefined == {spec.every_tangent}:", f"    return {_redirected(nothing, spec)}"]
    lines += _checks(spec)
    # All that may raise does before what is saved is given up: the backward can then be asked for again.
    lines += _dense_tangents(spec, values)
    undefined = "undefined" if spec.partial else "0"
    if spec.weights:
        lines.append("left = left_out(ctx, weights, others)")
    lines += ["if is_grad_enabled():", *(f"    {line}" for line in _followed(spec))]
    plain = f"program({undefined}, left)" if spec.weights else f"program({undefined if spec.partial else ''})"
    program = f"{_over(spec)}(arguments, ctx.hooked is not None)" if spec.into else plain
    if spec.into and spec.weights:
        program = f"{plain} if left else {program}"
    compiled = f"backward_graph = by_eager_kernels({undefined}) if sparse else {program}"
    given_up = (
        ["ctx.maybe_clear_saved_tensors()"] if spec.gradients.once or any(s.is_tensor for s in spec.saved) else []
    )
    if spec.into:
        lines += [*_arguments(spec), *_strided_tangents(spec), compiled, *given_up]
    else:
        lines += [compiled, *_arguments(spec), *given_up, *_strided_tangents(spec)]
    lines.append("out = backward_graph(arguments)")
    position = {k: n for n, k in enumerate(spec.gradients.inputs)}
    returned = [f"out[{position[k]}]" if k in position else "None" for k in taken]
    for g in spec.gradients.wrapped_gradients:
        returned[g.argument] = f"d{g.argument}"
        lines += values.wrap(f"d{g.argument}", g.made, iter([f"out[{d}]" for d in g.dense]))
    lines.append(f"return {_redirected(_tuple(returned), spec)}")
    return [
        "    @staticmethod",
        f"    def backward({', '.join(['ctx', *gradients])}):",
        *(f"        {line}" for line in lines),
    ]


def _followed(spec: CompiledBackward) -> list[str]:
    """The part of the backward that runs under `create_graph=True`: autograd follows its gradients."""
    lines = _arguments(spec, by_version=False)
    position = {k: n for n, k in enumerate(spec.gradients.inputs)}
    taken = range(spec.arguments + spec.gradients.wrappers)
    unsaved = "ctx.unsaved" if spec.unsaved else "()"
    which = f"{'undefined' if spec.partial else 0}, {'left' if spec.weights else 0}"
    lines.append(f"out = followed(arguments, {_tuple(_tangents(spec))}, {unsaved}, {which})")
    if spec.gradients.once or any(s.is_tensor for s in spec.saved):
        lines.append("ctx.maybe_clear_saved_tensors()")
    returned = [f"out[{position[k]}]" if k in position else "None" for k in taken]
    return [*lines, f"return {_redirected(_tuple(returned), spec)}"]


def _traced(spec: CompiledBackward) -> list[str]:
    """The backward for Dynamo. Whether a gradient is None is known when it is traced."""
    gradients = [f"g{k}" for k in range(spec.results)]
    taken = range(spec.arguments)
    lines = ["undefined = 0"]
    for n, k in enumerate(spec.gradients.tangents):
        lines += [f"if g{k} is None:", f"    undefined |= {1 << n}"]
    lines += [
        f"if undefined == {spec.every_tangent}:",
        f"    return {_redirected(_tuple(['None'] * len(taken)), spec)}",
        "saved, sizes = ctx.saved_tensors, " + ("ctx.sizes" if any(not s.is_tensor for s in spec.saved) else "()"),
        "saved = as_traced(saved, ctx.hooked, traced_given)" if any(s.is_tensor for s in spec.saved) else "saved = ()",
    ]
    for n, k in enumerate(spec.gradients.tangents):
        lines += [f"if g{k} is not None:", f"    g{k} = with_strides(g{k}, {spec.tangents[n].strides})"]
    tensors_first = not spec.saved or spec.saved[0].is_tensor
    saved = "*saved, *sizes" if tensors_first else "*sizes, *saved"
    tangents = "".join(f", g{k}" for k in spec.gradients.tangents)
    lines.append(f"out = getattr(traced_graphs, traced_name(undefined))({saved}{tangents})")
    position = {k: n for n, k in enumerate(spec.gradients.inputs)}
    returned = [f"out[{position[k]}]" if k in position else "None" for k in taken]
    lines.append(f"return {_redirected(_tuple(returned), spec)}")
    return [
        "    @staticmethod",
        f"    def _opforge_traced({', '.join(['ctx', *gradients])}):",
        *(f"        {line}" for line in lines),
    ]


def _key(spec: CompiledBackward) -> list[str]:
    """What compiled autograd tells captured graphs apart by: this function, and sizes, which become symbols. It asks before each backward."""
    whole = replace(spec, partial=False)  # which tangents are given is not known yet
    sizes = ", *ctx.sizes" if any(not s.is_tensor for s in spec.saved) else ""
    return [
        "    @staticmethod",
        "    def _compiled_autograd_key(ctx):",
        "        if is_grad_enabled():",
        "            refuse_double_backward()",
        *(f"        {line}" for line in _checks(whole)),
        f"        return (ctx._autograd_function_id{sizes or ','})",
    ]


def _checks(spec: CompiledBackward) -> list[str]:
    """What is asked of tensors that are watched."""
    given = ", ~undefined" if spec.partial else ""
    lines = [f"refuse_written(ctx.watched{given})"] if any(not w.is_held for w in spec.watched) else []
    if needed := [str(w.needed_for) for w in spec.watched if w.is_held]:
        lines.append(f"refuse_moved(ctx.lasting, {_tuple(needed)}{given})")
    return lines


def _arguments(spec: CompiledBackward, by_version: bool = True) -> list[str]:
    """The list of what was saved. Nothing else holds it, so that the graph can free it while it runs; what it frees is gone for autograd too,
    unless the caller retains the graph. `by_version`: without history, where which of it is read is known only now.
    """
    count = sum(s.is_tensor for s in spec.saved)
    sizes = ["*ctx.sizes"] if count < len(spec.saved) else []
    tensors = ["*ctx.saved_tensors"] if count else []
    if by_version and _some_need_less(spec):
        tensors = ["*(as_kept(ctx, ~undefined) if ctx.hooked is None else ctx.saved_tensors)"]
    first = 0 if spec.saved and spec.saved[0].is_tensor else len(spec.saved) - count
    lines = []
    if spec.gradients.once and not count:
        lines.append("ctx.saved_tensors")  # raises where autograd has freed the graph
    lines.append(f"arguments = [{', '.join([*sizes, *tensors] if first else [*tensors, *sizes])}]")
    if count:
        where = f"arguments[{first or ''}:{first + count}]"
        lines += ["if ctx.hooked is not None:", f"    {where} = as_described({where}, ctx.hooked)"]
        otherwise = ["as_given(arguments, given)"] if any(s.expected for s in spec.saved) else []
        otherwise += ["as_given(arguments, ctx.given)"] if any(s.described_by_forward for s in spec.saved) else []
        lines += ["else:", *(f"    {line}" for line in otherwise)] if otherwise else []
    return lines


def _dense_tangents(spec: CompiledBackward, values: Names) -> list[str]:
    """Gradients of results as dense tensors, and whether some of them are `sparse`: no strided tensors."""
    lines = []
    if spec.gradients.symbols:
        lines.append(f"{_tuple([s for s, _, _ in spec.gradients.symbols])} = ctx.symbols")
    for k in spec.gradients.tangents:
        lines += [f"if type(g{k}) is not Tensor:", f"    g{k} = dense_tangent(g{k}, 'result {k} of a compiled graph')"]
    for k, r in enumerate(spec.gradients.wrapped_results):
        place = f"'result {spec.results + k} of a compiled graph'"
        expected = values.of(r.tangent, "tangent")
        lines.append(STEPS["coerce_tangent"].code.format(gradient=f"h{k}", expected=expected, place=place))
        lines += [f"h{k}_{n} = {path}" for n, path in enumerate(r.tangent.paths(f"h{k}"))]
    return [*lines, f"sparse = {' or '.join(f'{name}.layout is not strided' for name in _tangents(spec))}"]


def _strided_tangents(spec: CompiledBackward) -> list[str]:
    """These with the strides that the graph expects, added to the arguments."""
    names = _tangents(spec)
    lines = ["if not sparse:"]
    for name, tangent in zip(names, spec.tangents, strict=True):
        lazy = LAZY.format(t=name)
        if tangent.strides is None:
            lines += [f"    {name} = {name}.contiguous()", f"    if {lazy}:"]
            lines.append(f"        {name} = restride({name}, {name}.stride())")
        else:
            lines.append(f"    if {name}.stride() != {tangent.strides} or {lazy}:")
            lines.append(f"        {name} = restride({name}, {tangent.strides})")
    return [*lines, f"arguments += [{', '.join(names)}]"]


def _tangents(spec: CompiledBackward) -> list[str]:
    """Variables of the dense tangents, in the order in which the graph takes them."""
    inside = [f"h{k}_{n}" for k, r in enumerate(spec.gradients.wrapped_results) for n in range(r.tangent.count)]
    return [*(f"g{k}" for k in spec.gradients.tangents), *inside]


def _some_need_less(spec: CompiledBackward) -> bool:
    """Whether something that is saved is needed by some tangents only."""
    return any(s.needed_for != ALWAYS for s in spec.saved)


def _variable(place: Place) -> str:
    where, k = place
    return {"input": f"x{k}", "output": f"out[{k}]", "wrapper": f"v{k}", "wrapped": f"w{k}"}[where]


def _plus(bump: int) -> str:
    return f" + {bump}" if bump else ""


def _over(spec: CompiledBackward) -> str:
    return "scaled" if spec.scaled else "over_saved"


def _redirected(gradients: str, spec: CompiledBackward) -> str:
    leaves = spec.gradients.leaves
    return f"redirected({gradients}, {leaves}) if ctx.ways else {gradients}" if leaves else gradients


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
