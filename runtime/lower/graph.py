"""From a functional ATen graph to a loop program: every node by its lowering, else by the eager kernel (counted)."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ...generated.dispatch_tables import ROLES
from ...generated.languages import CPP_LANGUAGE, TRITON_LANGUAGE
from ...generated.ops import COMPLEX, EXTERN
from ..dispatch.operators.schema import makes_new, reads_storage
from ..dispatch.record.source import user_frame
from ..ir.facts import is_packed
from ..ir.index import expr, product, proves_less, proves_nonnegative
from ..ir.nodes import DTYPES, INTS, Buffer, Extern, Nest, Output, Program, Size, contiguous_strides
from ..ir.pairs import PART
from ..observe.counters import count_extern
from ..torch_compat import OpOverload
from .control import Call, Control, call_control
from .eager_calls import EagerCalls
from .language.builder import Builder
from .language.names import inverse, permuted, unlinear
from .language.number import Number
from .language.tensor import NotNativeError, Tensor
from .layouts import is_dense, is_laid_out_by_rows, repeats, slowest_first
from .leaves import DTYPE_NAMES, complex_part, contradict, leaves, mapped, read_of, tensors_of
from .origins import origin_of, place_of, spec_of
from .overflow import too_large
from .sizes.positive import known_positive
from .sizes.symbolic import Opaque

_SPEC_ERRORS = (ArithmeticError, IndexError, MemoryError, RecursionError, TypeError)
"""What the expressions of a spec entry may raise, which no check of the entry alone can exclude."""
NO_ENTRY = "no spec entry (opforge.load_specs takes those of your operators)"
_NO_MUTATIONS: Mapping[int, int] = {}


@dataclass(frozen=True)
class Lowered:
    """A program, what its inputs beyond the placeholders are, what each placeholder became (a buffer name, a size, or None), the functions of
    compiled graphs that it calls besides operators, and the others.
    """

    program: Program
    constants: tuple[tuple[str, torch.Tensor], ...]
    placeholders: tuple[str | Size | None, ...]
    controls: tuple[Control, ...] = ()
    calls: tuple[Call, ...] = ()


def lower(
    gm: fx.GraphModule,
    mutations: Mapping[int, int] = _NO_MUTATIONS,
    device: str = "cpu",
    checks: bool = True,
    products: int = 0,
) -> Lowered:
    """Lower a functional graph whose nodes carry fake values in `meta["val"]`.

    mutations   position of a placeholder → position of the output that it must hold when the program ends; the program returns None there.
    device      nodes with tensors elsewhere run by their eager kernel.
    checks      positions that data brings are checked when the program runs.
    products    multiply-adds up to which a product that a library has is computed in loops.
    Raises `UnsupportedError` only for what no kernel call can express (a subgraph call, a data-dependent size).
    """
    return _Lowerer(gm, device, checks, products).run(mutations)


def elements_of(gm: fx.GraphModule, device: str) -> tuple[str, list[Nest | Extern]]:
    """The buffer of the one tensor that a functional graph returns, which may be a view, and the items that make it. Raises as `lower`."""
    lowerer = _Lowerer(gm, device, checks=True, products=0)
    lowerer.nodes()
    (result,) = gm.graph.output_node().all_input_nodes
    return lowerer.env[result].name, lowerer.b.items


class _Lowerer(EagerCalls):
    def __init__(self, gm: fx.GraphModule, device: str, checks: bool, products: int) -> None:
        atomic = None if device == "cpu" else _atomic()
        unordered = atomic is not None and not torch.are_deterministic_algorithms_enabled()
        builder = Builder(checks=checks, device=device, atomic=atomic, products=products, unordered=unordered)
        super().__init__(builder, device)
        self.gm = gm
        self.inputs: list[Buffer] = []
        self.constants: list[tuple[str, torch.Tensor]] = []
        self.placeholders: list[str | Size | None] = []
        self.controls: list[Control] = []
        self.calls: list[Call] = []

    def run(self, mutations: Mapping[int, int]) -> Lowered:
        self.nodes()
        outputs = tuple(self.output(a) for a in leaves(self.gm.graph.output_node().args[0]))
        self.sizes.from_data.settle(self.b.items)
        updates = tuple((str(self.placeholders[i]), str(outputs[k].buffer)) for i, k in mutations.items())
        outputs = tuple(Output(None) if k in mutations.values() else o for k, o in enumerate(outputs))
        program = Program(tuple(self.inputs), self.b.items, outputs, updates, self.sizes.names)
        controls, calls = tuple(self.controls), tuple(self.calls)
        return Lowered(program, tuple(self.constants), tuple(self.placeholders), controls, calls)

    def nodes(self) -> None:
        """Lower all nodes before the output."""
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.sizes.from_data.given(node.meta.get("val"))
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.placeholder(node)
            elif node.op == "get_attr":
                self.constant(node)
            elif node.op == "call_function":
                self.call(node)
            elif node.op != "output":
                raise UnsupportedError(f"graph node {node.name} is a {node.op}")

    # -- leaves of the graph -------------------------------------------------------------------------------------------
    def placeholder(self, node: fx.Node) -> None:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            self.env[node] = self.input(node.name, val)
            self.placeholders.append(self.env[node].name)
        elif isinstance(val, (int, torch.SymInt)) and not isinstance(val, bool):
            self.env[node] = self.sizes.argument(val)
            self.placeholders.append(self.env[node])
        elif isinstance(val, (torch.SymFloat, torch.SymBool)):
            self.b.begin(node.name, "number")
            self.env[node], symbol = self.numbers.given(node.name, val)
            self.placeholders.append(symbol)
        else:
            self.env[node] = val
            self.placeholders.append(None)

    def input(self, name: str, val: torch.Tensor) -> Tensor:
        buffer = self.buffer(self.b.fresh(name), val)
        self.inputs.append(buffer)
        return self.b.tensor(buffer)

    def constant(self, node: fx.Node) -> None:
        value: Any = self.gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, fx.GraphModule):
            self.env[node] = value
            return
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(f"graph attribute {node.target} is a {type(value).__name__}")
        if value.ndim == 0 and self.loopable(value) and not isinstance(value, torch.nn.Parameter):
            self.b.begin(node.name, "constant")
            self.env[node] = self.b.define((), value.item(), DTYPE_NAMES[value.dtype])
            return
        self.env[node] = self.input(node.name, value)
        in_parts = value.is_complex() and self.inputs[-1].paired
        self.constants.append((self.env[node].name, torch.view_as_real(value.resolve_conj()) if in_parts else value))

    def output(self, value: Any) -> Output:
        val = self.env[value] if isinstance(value, fx.Node) else value
        if isinstance(val, Tensor):
            fake = value.meta["val"]
            if fake.layout != torch.strided:
                return Output(val.name, paired=val.is_paired)
            stride = self.sizes.strides(fake.stride())
            dense = contiguous_strides(val.shape)
            if stride == self.sizes.reduced(dense):
                stride = dense
            # Results that are such views are made outside of the graph. Gradients may be handed out as views that repeat elements or leave some
            # out: memory of their own, in any layout, does as well. A backward knows the layout of what it is handed.
            if repeats(fake) or not is_packed(val.shape, stride):
                if not makes_new(value.target) and (repeats(fake) or "backward" in value.meta):
                    return Output(val.name, paired=val.is_paired)
                raise UnsupportedError(
                    f"output {value} has gaps between its elements, which compiled code does not leave"
                )
            return Output(val.name, val.strides(stride), paired=val.is_paired)
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), (torch.SymFloat, torch.SymBool)):
            return Output(None, value=self.numbers.argument(value.meta["val"]))
        if isinstance(val, Opaque):
            frame = user_frame(value.meta.get("stack_trace"))
            where = f"output {value}" if frame is None else f"the output of {frame}"
            raise UnsupportedError(f"{val.what} is {where}{val.advice}")
        return Output(None, value=val)

    # -- calls ---------------------------------------------------------------------------------------------------------
    def call(self, node: fx.Node) -> None:
        val = node.meta.get("val")
        if node.target is operator.getitem:
            self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        elif isinstance(val, (int, torch.SymInt)) and not isinstance(val, bool):
            self.env[node] = self.number(node, val)
        elif node.target is ROLES["demand"]:
            condition, message = node.args
            self.sizes.from_data.demand(
                condition.meta["val"] if isinstance(condition, fx.Node) else condition, str(message)
            )
            self.env[node] = None
        elif val is None and isinstance(node.target, OpOverload):
            self.b.begin(node.name, origin_of(str(node.target), node))
            self.env[node] = self.extern(node, (), str(node.target))
        elif val is None or isinstance(val, (bool, float, str)):
            self.env[node] = val
        elif isinstance(val, (torch.SymFloat, torch.SymBool)):
            self.env[node] = self.changing(node, val)
        else:
            self.env[node] = self.tensor_call(node, val)

    def number(self, node: fx.Node, val: Any) -> Size:
        """A number that is known, or computed from others, or that a call reads from data."""
        target = node.target
        # Not a size, a stride or an offset of a tensor: calls of kernels need not lay their results out as traced.
        reads = isinstance(target, OpOverload) and torch.Tag.data_dependent_output in target.tags
        if reads and isinstance(val, torch.SymInt) and (learned := self.sizes.from_data.of_number(val)) is not None:
            name = str(target)
            self.b.begin(node.name, origin_of(name, node), place_of(name, node))
            args = tuple(self.extern_argument(a) for a in node.args)
            kwargs = tuple((k, self.extern_argument(v)) for k, v in node.kwargs.items())
            count_extern(name, EXTERN.get(name, NO_ENTRY))
            self.b.extern([], name, args, kwargs, True, effect=True, learns=(learned,))
        elif isinstance(val, torch.SymInt):
            self.b.begin(node.name, "number")
            self.numbers.tell(val)
        return self.sizes.index(val)

    def changing(self, node: fx.Node, val: Any) -> Number | Opaque:
        """A float or bool that may differ from call to call."""
        if not isinstance(node.target, OpOverload):
            try:
                args = tuple(map(self.argument, node.args))
                self.b.begin(node.name, "number")
                found = self.numbers.computed(node.target, args, val) if isinstance(val, torch.SymFloat) else None
                return self.numbers.in_python(node.name, val) if found is None else found
            except UnsupportedError:
                return Opaque.number(val)
        if isinstance(val, torch.SymBool):
            return Opaque.number(val)
        (read,) = node.all_input_nodes
        tensor, here = self.env[read], self.loopable(read.meta["val"])
        self.b.begin(node.name, origin_of(str(node.target), node))
        return self.numbers.read(node.name, val, str(node.target), tensor, self.extern_argument(read), here)

    def tensor_call(self, node: fx.Node, val: Any) -> Any:
        target = node.target
        b = self.b
        if not isinstance(target, OpOverload):
            b.begin(node.name, origin_of(f"control.{target}", node))
            return call_control(self, node, val)
        name = str(target)
        b.begin(node.name, origin_of(name, node), place_of(name, node))
        reason = self.why_extern(node, val)
        lowering = b.lowerings.get(name)
        if reason is None and lowering is None:
            reason = EXTERN.get(name, NO_ENTRY)
        if reason is None:
            mark = b.mark()
            try:
                args, kwargs = map(self.argument, node.args), {k: self.argument(v) for k, v in node.kwargs.items()}
                with known_positive(self.sizes.positive):
                    result = lowering(b, *args, **kwargs)  # type: ignore[misc]
                read = read_of(node)
                result = self.check(result, val, read)
                b.check_empty(mark)
                self.lay_out(result, val, mark, read)
                return result
            except _Contradiction:
                raise
            except UnsupportedError as error:
                b.rewind(mark)
                reason = EXTERN.get(name, str(error)) if isinstance(error, NotNativeError) else str(error)
            except _SPEC_ERRORS as error:
                b.rewind(mark)
                # Operators take dimension 0 of a tensor that has none; lowerings that index its shape do not.
                flat = isinstance(error, IndexError) and not all(t.ndim for t in tensors_of(node))
                fails = f"its lowering in {spec_of(lowering)} fails with {type(error).__name__}"
                reason = f"{'a tensor without dimensions' if flat else fails}: {error}"
        if any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns):
            return self.view(node, val, name, reason)
        if target._schema.is_mutable:
            raise UnsupportedError(f"{name} writes to its arguments: the graph is not functional")
        self.need_storage(node)
        count_extern(name, reason, "" if EXTERN.get(name) == reason else self.b.place)
        return self.extern(node, val, name)

    def why_extern(self, node: fx.Node, val: Any) -> str | None:
        for leaf in leaves(val):
            if isinstance(leaf, torch.Tensor) and (why := self.unloopable(leaf)):
                return why
        tensors = tensors_of(node)
        for t in tensors:
            if why := self.unloopable(t):
                return why
        if str(node.target) not in COMPLEX and (found := complex_part([node.args, node.kwargs, val])):
            return found
        if found := too_large(node.target, node.args, node.kwargs, leaves(val)):
            return found
        many = (CPP_LANGUAGE if self.device == "cpu" else TRITON_LANGUAGE).operands
        return f"more than {many} tensors" if len(tensors) > many else None

    def unloopable(self, t: torch.Tensor) -> str | None:
        if self.is_elsewhere(t):
            return f"a tensor on {t.device.type}"
        if t.layout != torch.strided:
            return f"layout {t.layout}"
        dtype = DTYPE_NAMES[t.dtype]
        return None if dtype in DTYPES or dtype in PART else f"dtype {dtype}"

    def loopable(self, t: torch.Tensor) -> bool:
        return self.unloopable(t) is None

    def check(self, result: Any, val: Any, read: Container[int]) -> Any:
        """Results that are read must have the shapes and dtypes that tracing found. Returns them, with sizes that are equal by a guard as the
        program has them. Raises `UnsupportedError`.
        """
        results, expected = leaves(result), leaves(val)
        if len(results) != len(expected):
            raise UnsupportedError(f"{len(results)} results where {len(expected)} were traced")
        renamed: dict[int, Tensor] = {}
        for k, (r, v) in enumerate(zip(results, expected, strict=True)):
            if not isinstance(v, torch.Tensor) or k not in read:
                continue
            shape = self.sizes.shape(v.shape)
            if not isinstance(r, Tensor) or r.dtype != DTYPE_NAMES[v.dtype] or self.sizes.reduced(r.shape) != shape:
                # Of two sizes one is wrong, and with the traced one all that was traced of it.
                kind = _Contradiction if isinstance(r, Tensor) and contradict(r.shape, shape) else UnsupportedError
                raise kind(f"lowered to {r} where {DTYPE_NAMES[v.dtype]}{list(v.shape)} was traced")
            if r.shape != shape:
                renamed[id(r)] = self.b.define(shape, self.b.at(r, self.b.coords(shape)))
        return mapped(result, lambda r: renamed.get(id(r), r)) if renamed else result

    def lay_out(self, result: Any, val: Any, mark: int, read: Container[int]) -> None:
        """Note the strides that eager gives the results, where they are dense but not row-major; routines give dimensions of size 1 theirs, too."""
        for i, (r, v) in enumerate(zip(leaves(result), leaves(val), strict=True)):
            if (
                i not in read
                or not isinstance(v, torch.Tensor)
                or v.ndim < 2
                or not (is_laid_out_by_rows(v) or is_dense(v))
            ):
                continue
            rows = is_laid_out_by_rows(v)
            for k in range(len(self.b.items) - 1, mark - 1, -1):
                item = self.b.items[k]
                if isinstance(item, Nest):
                    if item.name == r.name:
                        if not rows:
                            self.b.items[k] = replace(item, stride=r.strides(self.sizes.strides(v.stride())))
                        break
                elif any(out.name == r.name for out in item.outs):  # of a routine
                    stride = r.strides(self.sizes.strides(v.stride()))
                    outs = tuple(replace(out, stride=stride) if out.name == r.name else out for out in item.outs)
                    self.b.items[k] = replace(item, outs=outs)
                    break

    # -- views ---------------------------------------------------------------------------------------------------------
    def view(self, node: fx.Node, val: Any, name: str, reason: str) -> Any:
        """A view without a lowering of its own: by the strides that tracing found, else by the copying variant of the operator."""
        base = next((a for a in node.all_input_nodes if isinstance(self.env[a], Tensor)), None)
        if base is not None and self.why_extern(node, val) is None:
            try:
                return self.strided(self.env[base], base.meta["val"], val, reads_storage(node.target))
            except UnsupportedError as error:
                reason = f"{reason}; {error}"
        namespace, packet, overload = name.split(".")
        copying = getattr(getattr(getattr(torch.ops, namespace), f"{packet}_copy", None), overload, None)
        self.need_storage(node)
        if copying is None:
            raise UnsupportedError(f"view {name} cannot be copied: {reason}")
        count_extern(name, reason, "" if EXTERN.get(name) == reason else self.b.place)
        return self.extern(node, val, str(copying))

    def strided(self, base: Tensor, fake: torch.Tensor, val: Any, anywhere: bool) -> Any:
        """The view `val` of `base`; `anywhere` where it may read what lies beyond the base in its storage."""
        if not isinstance(val, torch.Tensor):
            return [self.strided(base, fake, v, anywhere) for v in val]
        if (
            not (is_laid_out_by_rows(fake) or is_dense(fake))
            or fake.dtype != val.dtype
            or val.is_conj()
            or val.is_neg()
        ):
            raise UnsupportedError("the base is not dense, or is seen as another dtype")
        order = slowest_first(fake)
        shape, stride = self.sizes.shape(val.shape), self.sizes.strides(val.stride())
        i = self.b.coords(shape)
        at: Size = self.sizes.index(val.storage_offset() - fake.storage_offset())
        for x, n in zip(i, stride, strict=True):
            at = at + x * n
        inner = proves_nonnegative(expr(at)) and proves_less(expr(at), expr(product(base.shape)))
        if anywhere and not inner and 0 not in shape:
            raise UnsupportedError("it reaches outside of the base")
        place = unlinear(at, permuted(base.shape, order))
        return self.b.define(shape, self.b.at(base, permuted(place, inverse(order))))


class _Contradiction(UnsupportedError):
    """A lowering and torch's fake kernel disagree about the sizes of a result: the graph runs eagerly."""


def _atomic() -> tuple[str, ...]:
    """Dtypes whose sums a GPU may make in any order."""
    dtypes = TRITON_LANGUAGE.atomics["sum"].dtypes
    return tuple(d for d in dtypes if d in INTS) if torch.are_deterministic_algorithms_enabled() else dtypes


__all__ = ["Lowered", "elements_of", "lower"]
