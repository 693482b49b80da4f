"""The wrapper of one graph: straight-line Python source from the generated steps, for exactly the metadata of that
graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import torch

from ....generated.dispatch_tables import base_steps, history_steps, input_steps, lazy_steps, output_steps
from ....generated.schemas import BaseInfo, NumberInfo, OutputAliasInfo, OutputType, Place
from ....generated.wrapper_steps import STEPS
from ..storage.disjoint import Meeting, SharedOtherwise, pairs
from ..subclasses.wrappers import Names
from ..trace import Traced
from .calling import result_text
from .runtime_support import NAMESPACE

Compiled = Callable[..., Any]
PAIRS = 64  # of inputs compared line by line at most


def bind(traced: Traced, compiled: Compiled, *, in_graph: Collection[int] = ()) -> Compiled:
    """What the caller of the program calls. `compiled` takes the graph's placeholders as positional arguments and
    returns its outputs as a tuple or list; when nothing has to be done around it, it is returned itself. `in_graph`:
    positions of graph outputs that `compiled` has written into their inputs (`Traced.in_place_candidates`); what it
    returns there is not looked at.
    """
    if passes_through(traced):
        return compiled
    writer = _Writer(traced, "compiled", frozenset(in_graph))
    source = writer.write()
    namespace: dict[str, Any] = {
        **NAMESPACE,
        **writer.values.values,
        "compiled": compiled,
        "program": traced.program,
        "torch": torch,
    }
    namespace |= {f"lifted{k}": tensor for k, (_, tensor) in enumerate(traced.lifted)}
    namespace["out_spec"] = traced.calling.out_spec
    exec(compile(source, "<opforge wrapper>", "exec"), namespace)
    run: Compiled = namespace["run"]
    return run


def passes_through(traced: Traced) -> bool:
    """Whether the compiled graph alone is the program."""
    calling = traced.calling
    plain = calling.in_spec is None and calling.out_spec is None and calling.out_type is tuple
    modes = (
        traced.gradients is not None or traced.untracked or traced.turns_grad_on or traced.grad_mode_after is not None
    )
    return traced.meta.passes_through and traced.border is None and not traced.lifted and plain and not modes


def emit_wrapper(traced: Traced, compiled_name: str, *, in_graph: Collection[int] = ()) -> str:
    """Source of `def run(*args)`, which calls `compiled_name`. It reads names of `runtime_support.NAMESPACE`,
    `torch`, `program`, `out_spec` and `lifted0`, ...; `bind` provides them.
    """
    if passes_through(traced):
        return f"run = {compiled_name}\n"
    return _Writer(traced, compiled_name, frozenset(in_graph)).write()


class _Writer:
    def __init__(self, traced: Traced, compiled_name: str, in_graph: frozenset[int]) -> None:
        self.traced, self.compiled_name, self.in_graph = traced, compiled_name, in_graph
        self.meta = traced.meta
        self.inputs: set[int] = set()
        self.wrappers: set[int] = set()
        self.values = Names()
        self.flat = [*traced.calling.paths, *(f"lifted{k}" for k in range(len(traced.lifted)))]
        border = traced.border
        self.dense = self.flat if border is None else border.paths(self.flat)
        self.out = len(traced.calling.paths if border is None else border.paths(traced.calling.paths))

    def write(self) -> str:
        meta = self.meta
        checks = self._checks()
        bases = self._bases()
        call = self._call()
        symbols = [f"{name} = {self._symbol(source)}" for name, source in meta.symbols]
        # New contents first, then layouts; outputs are regenerated while inputs still have their old storage; then storages change.
        # Autograd goes by this order: a write to a tensor ends the views of it that it does not follow.
        contents, layouts, storages = self._input_steps()
        made, returned = self._wrapped()
        skipped = self.traced.border.inside_function() if self.traced.border is not None else set()
        results = [line for k, o in enumerate(meta.output_info) if k not in skipped for line in self._output(k, o)]
        work = [*symbols, *contents, *layouts, *results, *storages, *made]
        work = [*bases, *self._given_up(work), *call, *work]
        if self.traced.turns_grad_on:
            work = ["with enable_grad():", *(f"    {line}" for line in work)]
        if self.traced.grad_mode_after is not None:
            work.append(f"set_grad_enabled({self.traced.grad_mode_after})")
        body = [*checks, *work, self._return(returned)]
        unpack = [f"v{i} = {path}" for i, path in enumerate(self.flat) if i in self.wrappers]
        unpack += [f"{self._name(i)} = {path}" for i, path in enumerate(self.dense) if i in self.inputs]
        lines = ["def run(*args):", *(f"    {line}" for line in (*unpack, *body))]
        return "\n".join(lines) + "\n"

    # --- names

    def _name(self, i: int) -> str:
        return f"x{i}"

    def input(self, i: int) -> str:
        """The variable of flat input `i`, which is unpacked because of this."""
        self.inputs.add(i)
        return self._name(i)

    def wrapper(self, i: int) -> str:
        """The variable of the flat input `i`, a tensor subclass, which is unpacked because of this."""
        self.wrappers.add(i)
        return f"v{i}"

    def _symbol(self, source: str) -> str:
        names: dict[str, str] = {}
        for i in self.meta.graph_inputs:
            if f"{{arg{i}}}" in source:
                names[f"arg{i}"] = self.input(i)
        for k in range(self.meta.num_outputs):
            names[f"out{k}"] = f"out[{k}]"
        return source.format(**names)

    # --- before the call

    def _checks(self) -> list[str]:
        """Assumptions about which inputs share memory, and that autograd is there; when one fails, the program itself runs."""
        lines: list[str] = []
        if self.traced.gradients is not None:
            # Dynamo compiles outside of inference mode, and guards on grad mode alone.
            lines += ["if is_inference_mode_enabled():", "    return program(*args)"]
            # Autograd sees one node, which every result reaches: it would run the hooks of inputs that eager does not reach.
            some = [k for k in self.traced.gradients.reached_by_some() if k < len(self.meta.graph_inputs)]
            if some:
                hooked = ", ".join(self.input(self.meta.graph_inputs[k]) for k in some)
                lines += [f"if is_hooked({hooked}):", "    return program(*args)"]
        pointers: dict[int, str] = {}

        def pointer(i: int) -> str:
            if i not in pointers:
                pointers[i] = f"p{i}"
                lines.append(f"p{i} = {self.input(i)}.data_ptr()")
            return pointers[i]

        for i, same in self.traced.border.same() if self.traced.border is not None else ():
            if i < len(self.traced.calling.paths):
                lines += [f"if {self.wrapper(i)} is not {self.wrapper(same)}:", "    return program(*args)"]
        for i, info in enumerate(self.meta.input_info):
            if info.same_as is not None and i < self.out:
                lines += [f"if {self.input(i)} is not {self.input(info.same_as)}:", "    return program(*args)"]
        if self.meta.static_storages:
            static = [i for i, _ in self.meta.static_storages]
            name = self.values.of(
                SharedOtherwise([static.index(k) for _, k in self.meta.static_storages]), "shared_otherwise"
            )
            lines += [f"if {name}({', '.join(map(self.input, static))}):", "    return program(*args)"]
        lines += self._meetings(pointer)
        for k, number in enumerate(self.meta.numbers):
            lines += [
                f"n{k} = {self._symbol(number.value)}",
                _without_place(f"n{k}", number),
                "    return program(*args)",
            ]
        for k, base in enumerate(self.meta.bases):
            if base.followed:
                lines += self._family(k, base)
            first = pointer(base.first)
            for i, distance in zip(base.members, base.distances, strict=True):
                if i != base.first:
                    lines += [f"if {pointer(i)} - {first} != {distance}:", "    return program(*args)"]
        return lines

    def _meetings(self, pointer: Callable[[int], str]) -> list[str]:
        """Few pairs of inputs are compared line by line."""
        found = self.meta.disjoint
        lines: list[str] = []
        if sum(d.written for d in found) * len(found) > PAIRS:
            name = self.values.of(Meeting(found), "meeting")
            spans = "".join(f"{self._bytes(d.bytes)}, " for d in found)
            return [
                f"if {name}(({spans}), {', '.join(self.input(d.input) for d in found)}):",
                "    return program(*args)",
            ]
        for a, b in pairs(found):
            p, q = pointer(a.input), pointer(b.input)
            apart = "".join(f" and {q} - {p} != {n}" for i, n in a.distances if i == b.input)
            bytes_p, bytes_q = self._bytes(a.bytes), self._bytes(b.bytes)
            lines += [f"if {p} < {q} + {bytes_q} and {q} < {p} + {bytes_p}{apart}:", "    return program(*args)"]
        return lines

    def _family(self, k: int, base: BaseInfo) -> list[str]:
        """The members must be ordinary views of one tensor, as they were while tracing."""
        views = [self.input(i) for i in base.members if i != base.root]
        root = self.input(base.root) if base.root is not None else f"{views[0]}._base"
        tests = [f"{x}._base is not root{k}" for x in views] + [f"refuses_writes({x})" for x in views]
        missing = [] if base.root is not None else [f"root{k} is None"]
        return [f"root{k} = {root}", f"if {' or '.join([*missing, *tests])}:", "    return program(*args)"]

    def _bytes(self, n: int | str) -> str:
        if isinstance(n, int):
            return str(n)
        for name, source in self.meta.symbols:
            if "out" not in source:
                # Not `re.sub`, which would read a backslash in the name of an attribute as an escape.
                n = f"({self._symbol(source)})".join(re.split(rf"\b{re.escape(name)}\b", n))
        return f"({n})"

    def _bases(self) -> list[str]:
        lines = []
        for k, base in enumerate(self.meta.bases):
            first = self.input(base.first)
            start = f" + {base.start}" if base.start > 0 else f" - {-base.start}" if base.start else ""
            source = f"root{k}" if base.followed else first
            lines.append(f"base{k} = as_strided({source}, ({base.length},), (1,), {first}.storage_offset(){start})")
        return lines

    def _call(self) -> list[str]:
        meta = self.meta
        count = len(self.traced.calling.paths)
        flat = self.traced.calling.in_spec is None
        unreached = self.traced.gradients.unreached if self.traced.gradients is not None else ()
        whole = meta.graph_inputs == tuple(range(count)) and not unreached
        if flat and self.traced.border is None and not meta.bases and whole:
            arguments = "*args"
        else:
            arguments = ", ".join(
                [
                    *(self.input(i) + ".detach()" * (k in unreached) for k, i in enumerate(meta.graph_inputs)),
                    *(f"base{k}" for k in range(len(meta.bases))),
                    *self._followed(),
                ]
            )
        call = f"{self.compiled_name}(arguments)" if self.traced.boxed else f"{self.compiled_name}({arguments})"
        self.boxed = f"arguments = [{arguments}]"
        used = bool(meta.num_outputs)
        lines = [f"out = {call}" if used else call]
        if meta.autocast:
            lines = ["with no_autocast():", *(f"    {line}" for line in lines)]
        if self.traced.untracked:
            lines = ["with no_grad():", *(f"    {line}" for line in lines)]
        return lines

    def _given_up(self, after: list[str]) -> list[str]:
        """Lines that leave the arguments to one list, which the graph empties: nobody else holds them, but for those that lines `after` name."""
        if not self.traced.boxed:
            return []
        named = set(re.findall(r"\bx(\d+)\b", "\n".join(after)))
        done = [self._name(i) for i in sorted(self.inputs) if str(i) not in named]
        lines = [self.boxed, *(f"args[{k}].clear()" for k in self.traced.calling.stolen)]
        return [*lines, f"del {', '.join(done)}"] if done else lines

    def _followed(self) -> list[str]:
        """Tensor subclasses that the autograd function takes beside what is inside of them."""
        border = self.traced.border
        if border is None or self.traced.gradients is None:
            return []
        return [self.wrapper(i) for i in border.distinct()]

    # --- after the call

    def _wrapped(self) -> tuple[list[str], list[str]]:
        """Lines that make outputs which are tensor subclasses, and the names of all outputs."""
        if self.traced.border is None:
            return [], [f"r{k}" for k in range(self.meta.num_user_outputs)]
        border = self.traced.border
        names = {f"arg{i}": i for i in self.meta.graph_inputs}
        sizes = [
            f"{symbol} = {self.input(names[node])}{call}" for symbol, node, call in border.symbols if node in names
        ]
        lines, results = border.emit(self.values, self.wrapper)
        return [*sizes, *lines], results

    def _input_steps(self) -> tuple[list[str], list[str], list[str]]:
        contents: list[str] = []
        layouts: list[str] = []
        storages: list[str] = []
        bumped: dict[str, bool] = {}
        for k, base in enumerate(self.meta.bases):
            if base.updated is not None:
                steps = base_steps(followed=base.followed, tracked=base.tracked, seen=base.seen)
                contents += [STEPS[s].code.format(input=f"base{k}", value=f"out[{base.updated}]") for s in steps]
        for i, info in enumerate(self.meta.input_info):
            written_inside = info.updated is not None and info.updated in self.in_graph
            for name in input_steps(
                mutation=info.mutation_type,
                in_graph=written_inside,
                merged=info.base is not None,
                told=info.mutates_data and info.base is not None and self.meta.bases[info.base].tells and info.seen,
                tracked=info.tracked,
                seen=info.seen,
            ):
                x = self.input(i)
                if name == "bump_version":
                    bumped[x] = info.base is not None
                    continue
                contents += _told(bumped)
                if name in ("copy_back", "copy_back_untracked", "copy_back_unseen"):
                    contents.append(STEPS[name].code.format(input=x, value=f"out[{info.updated}]"))
                elif info.place_after is not None:
                    if i in self._viewed():
                        layouts.append(f"f{i} = {x}.storage_offset()")
                    layouts.append(STEPS[name].code.format(input=x, **self._layout(info.place_after, x)))
                else:
                    storages.append(STEPS[name].code.format(input=x, value=f"r{info.storage_from}"))
        contents += _told(bumped)
        return contents, layouts, storages

    def _viewed(self) -> set[int]:
        """Inputs whose layout changes and that outputs are regenerated from: where they began is kept."""
        changed = {i for i, info in enumerate(self.meta.input_info) if info.place_after is not None}
        sources = {o.source for o in self.meta.output_info if o.output_type is OutputType.ALIAS_OF_INPUT}
        return {i for i in changed if i in sources}

    def _output(self, k: int, info: OutputAliasInfo) -> list[str]:
        names: dict[str, str] = {"result": f"r{k}"}
        if info.value is not None:
            names["value"] = f"out[{info.value}]"
        if info.constant is not None:
            names["constant"] = info.constant
        if info.output_type is OutputType.SAME_AS_OUTPUT:
            names["earlier"] = f"r{info.source}"
        elif info.output_type in (OutputType.IS_INPUT, OutputType.ALIAS_OF_INPUT):
            assert info.source is not None
            names["input"] = names["source"] = self.input(info.source)
        elif info.source is not None:
            names["base"] = names["source"] = f"out[{info.source}]"
        if info.place is not None:
            moved = info.output_type is OutputType.ALIAS_OF_INPUT and info.source in self._viewed()
            names |= self._layout(
                info.place,
                names["source"],
                dtype=info.place.dtype if info.requires_dtype_view else None,
                first=f"f{info.source}" if moved else None,
            )
        (step,) = output_steps(
            output=info.output_type,
            known=info.constant is not None,
            dtype_view=info.requires_dtype_view,
            relaid=info.relaid,
        )
        steps = (step, *lazy_steps(info.conjugated), *history_steps(info.history))
        return [STEPS[s].code.format(**names) for s in steps]

    def _layout(self, place: Place, source: str, dtype: str | None = None, first: str | None = None) -> dict[str, str]:
        """Sizes, strides and the offset as source text; offsets count from the source's first element, or from `first`."""
        first = first or f"{source}.storage_offset()"
        offset = str(place.offset) if isinstance(place.offset, int) else f"({place.offset})"
        out = {"size": _tuple(place.size), "stride": _tuple(place.stride)}
        if dtype is not None:
            return {**out, "dtype": dtype, "first": first, "offset": offset}
        return {**out, "offset": first if place.offset == 0 else f"{first} + {offset}"}

    def _return(self, results: list[str]) -> str:
        calling = self.traced.calling
        if calling.out_spec is not None:
            text = result_text(calling.out_spec, list(results))
            return f"return {text}" if text is not None else f"return tree_unflatten([{', '.join(results)}], out_spec)"
        if calling.out_type is list:
            return f"return [{', '.join(results)}]"
        return f"return ({', '.join(results)}{',' if len(results) == 1 else ''})"


def _without_place(name: str, number: NumberInfo) -> str:
    if number.infinite:
        return f"if {number.most} < abs({name}) < math.inf:"
    return f"if not {number.least} <= {name} <= {number.most}:"


def _tuple(values: tuple[int | str, ...]) -> str:
    return f"({', '.join(str(v) for v in values)}{',' if len(values) == 1 else ''})"


def _told(bumped: dict[str, bool]) -> list[str]:
    """The line by which autograd is told of writes to these inputs, which are then forgotten here. `bumped`: whether each lies in the memory of
    another input.
    """
    names = ", ".join(bumped)
    step = STEPS["bump_shared_version" if sum(bumped.values()) > 1 else "bump_version"]
    line = [step.code.format(input=f"({names})" if len(bumped) > 1 else names)] if bumped else []
    bumped.clear()
    return line
