"""Nodes as calls of eager kernels: their arguments as the program has them, and buffers for their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ...generated.dispatch_tables import ROLES
from ..dispatch.operators.schema import op_info, reads_storage
from ..ir.nodes import Buffer, Ref
from ..ir.pairs import inside
from .language.builder import Builder
from .language.number import Number
from .language.tensor import Tensor
from .layouts import is_empty, is_laid_out_by_rows
from .leaves import DTYPE_NAMES, leaves, refs_to
from .numbers import Numbers
from .sizes.symbolic import Opaque, Sizes


class EagerCalls:
    """A program under construction in which each node may be the call of an eager kernel. `env`: what each node became."""

    def __init__(self, builder: Builder, device: str) -> None:
        self.b, self.device = builder, device
        self.sizes = Sizes()
        self.numbers = Numbers(builder, self.sizes, device)
        builder.may_be_empty = self.sizes.from_data.may_be_zero
        self.env: dict[fx.Node, Any] = {}

    def buffer(self, name: str, val: torch.Tensor) -> Buffer:
        """A buffer as a fake tensor describes it; layouts without strides (sparse) have none. What is complex comes in parts."""
        stride = self.sizes.strides(val.stride()) if val.layout == torch.strided else None
        return inside(Buffer(name, self.sizes.shape(val.shape), DTYPE_NAMES[val.dtype], stride))

    def is_elsewhere(self, t: torch.Tensor) -> bool:
        return t.device.type != self.device

    def argument(self, a: Any) -> Any:
        """An argument as lowerings take it: tensors as handles, sizes as indices, dtypes as strings."""
        if isinstance(a, fx.Node):
            value = self.env[a]
            if isinstance(value, Opaque):
                raise UnsupportedError(f"{value.what} is an argument of {self.b.place}{value.advice}")
            if isinstance(value, Tensor) and a.meta["val"].layout == torch.strided:
                self.b.row_major[value.name] = is_laid_out_by_rows(a.meta["val"])
            return value
        if isinstance(a, (list, tuple)):
            return [self.argument(x) for x in a]
        if isinstance(a, torch.dtype):
            return DTYPE_NAMES[a]
        return a

    def extern(self, node: fx.Node, val: Any, name: str) -> Any:
        args = tuple(self.extern_argument(a) for a in node.args)
        if reads_storage(node.target):
            args = tuple(self.own_storage(a, b) for a, b in zip(node.args, args, strict=True))
        kwargs = tuple((k, self.extern_argument(v)) for k, v in node.kwargs.items())
        # All that a call which makes no elements can do is to raise an error.
        whole = node.meta.get("whole", False)
        effect = op_info(node.target).keep or whole or all(map(is_empty, leaves(val)))
        single = isinstance(val, torch.Tensor)
        tensors = [val] if single else [v for v in val if isinstance(v, torch.Tensor)]
        names = [self.b.fresh(node.name if single else f"{node.name}_{k}") for k in range(len(tensors))]
        learns = self.sizes.from_data.of_results(names, tensors)
        outs = [self.buffer(n, v) for n, v in zip(names, tensors, strict=True)]
        effect = effect or bool(learns)
        about: dict[str, Any] = {"learns": learns, "whole": whole, "elsewhere": any(map(self.is_elsewhere, tensors))}
        if single:
            return self.b.extern(outs, name, args, kwargs, True, effect, **about)[0]
        places = tuple(k for k, v in enumerate(val) if isinstance(v, torch.Tensor)) if len(tensors) < len(val) else ()
        handles = iter(self.b.extern(outs, name, args, kwargs, False, effect, places, **about))
        return [next(handles) if isinstance(v, torch.Tensor) else self.plain_result(v, name) for v in val]

    def plain_result(self, v: Any, name: str) -> Any:
        """A result of an eager kernel beside its tensors: usable when it is known now."""
        if v is None or isinstance(v, (bool, float, int, str)):
            return v
        if isinstance(v, torch.SymInt):
            return self.sizes.index(v)
        return Opaque(f"a {type(v).__name__} from {name}")

    def own_storage(self, node: Any, argument: Any) -> Any:
        """An argument whose storage begins with its first element, as the traced tensor's does: a copy, unless it is an input."""
        if not isinstance(argument, Ref) or node.op == "placeholder":
            return argument
        fake = node.meta["val"]
        if isinstance(fake.storage_offset(), torch.SymInt) or fake.storage_offset() != 0:
            raise UnsupportedError(f"{node.name} does not begin where its storage does")
        copy = self.buffer(self.b.fresh(node.name), fake)
        elsewhere = self.is_elsewhere(fake)
        return refs_to(self.b.extern([copy], str(ROLES["clone"]), (argument,), (), True, elsewhere=elsewhere)[0])

    def extern_argument(self, a: Any) -> Any:
        if isinstance(a, fx.Node):
            fake = a.meta.get("val")
            if isinstance(fake, torch.Tensor) and isinstance(self.env[a], Tensor) and fake.layout == torch.strided:
                t = self.env[a]
                return Ref(t.name, t.strides(self.sizes.strides(fake.stride())), t.is_paired)
            value = self.argument(a)
            return self.numbers.argument(a.meta["val"]) if isinstance(value, Number) else refs_to(value)
        if isinstance(a, (list, tuple)):
            return [self.extern_argument(x) for x in a]
        if isinstance(a, slice):
            raise UnsupportedError("a slice as an operator's argument")
        return a

    def need_storage(self, node: fx.Node) -> None:
        """An eager kernel that reads its argument's storage by strides of its own needs the very layout that eager would have."""
        if not reads_storage(node.target):
            return
        for a in node.all_input_nodes[:1]:  # what it puts there is read by its sizes
            fake = a.meta.get("val")
            if isinstance(fake, torch.Tensor) and not is_laid_out_by_rows(fake):
                raise UnsupportedError(f"{node.target} reads the storage of a tensor that is not contiguous")
