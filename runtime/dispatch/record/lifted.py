"""A module as a function of its parameters and buffers: they are swapped in while it is traced, and what it assigns to itself is seen."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx

from ....errors import UnsupportedError
from ...torch_compat import FakeTensor, pytree
from .interpret import run_graph
from .recorder import Recorder

_CHANGEABLE = (list, dict, set, OrderedDict, defaultdict)
_TABLES = ("_parameters", "_buffers", "_modules")


class LiftedModule:
    """`module` as a function of `(*parameters, *buffers, *arguments)`. Tensors that stand in it under several names are passed under each.

    parameters, buffers  dotted names, in the order of the leading arguments.
    arguments  makes (args, kwargs) of the module from what follows them.
    assigned   after `record`: buffers that the module gave another tensor (`self.count = self.count + 1`), by position.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        arguments: Callable[[Sequence[Any]], tuple[Sequence[Any], dict[str, Any]]],
        *,
        keeps_assignments: bool = False,
    ) -> None:
        self.module, self.arguments, self.keeps_assignments = module, arguments, keeps_assignments
        self.parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        self.buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
        self.names = [*self.parameters, *self.buffers]
        self.assigned: dict[int, torch.Tensor] = {}
        tables = ("_parameters",) * len(self.parameters) + ("_buffers",) * len(self.buffers)
        self._slots = [
            (getattr(module.get_submodule(name.rpartition(".")[0]), table), name.rpartition(".")[2])
            for name, table in zip(self.names, tables, strict=True)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers that the module has now."""
        return [table[leaf] for table, leaf in self._slots]

    def __call__(self, *values: Any) -> Any:
        """The module itself, eagerly. Tensors that it holds anyway are not looked at."""
        args, kwargs = self.arguments(values[len(self.names) :])
        return self.module(*args, **kwargs)

    def record(self, values: Sequence[Any], recorder: Recorder, held: ExitStack) -> Any:
        """The module's result for traced values, which it has until `held` is closed: checkpoints run parts of it once more in the backward.
        Raises `UnsupportedError` when it keeps a traced tensor.
        """
        count = len(self.names)
        args, kwargs = self.arguments(values[count:])
        module = self.module
        if isinstance(module, fx.GraphModule) and not kwargs:
            graph, given = module.graph, dict(zip(self.names, values, strict=False))
            return graph.process_outputs(run_graph(module, graph.process_inputs(*args), given, recorder))
        held.enter_context(unchanged(module))
        for (table, leaf), value in zip(self._slots, values, strict=False):
            table[leaf] = value
        result = module(*args, **kwargs)
        self._look(values, recorder)
        return result

    def _look(self, values: Sequence[Any], recorder: Recorder) -> None:
        self.assigned = {}
        known = {id(v) for v in values[: len(self.names)]}
        for k, ((table, leaf), value) in enumerate(zip(self._slots, values, strict=False)):
            now = table.get(leaf)
            if now is value:
                continue
            if not self.keeps_assignments or k < len(self.parameters) or not isinstance(now, torch.Tensor):
                what = "parameter" if k < len(self.parameters) else "buffer"
                raise UnsupportedError(
                    f"the {what} {self.names[k]!r} is assigned anew in the forward; change it in place, with copy_()"
                )
            self.assigned[k] = now
        known |= {id(t) for t in self.assigned.values()}
        for path, module in self.module.named_modules():
            for name, value in _own(module):
                if any(isinstance(t, FakeTensor) and id(t) not in known for t in pytree.tree_leaves(value)):
                    raise UnsupportedError(
                        f"the attribute {'.'.join(filter(None, (path, name)))!r} of the module is assigned a tensor in the forward; "
                        "register it as a buffer (register_buffer), or return the tensor"
                    )


def _own(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module itself holds, by attribute name."""
    for name, value in vars(module).items():
        if name in _TABLES:
            yield from ((leaf, v) for leaf, v in value.items() if not isinstance(v, torch.nn.Module))
        else:
            yield name, value


@contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Put every attribute of a module and its submodules back as it was, and the contents of lists and dicts that they hold."""
    before = [(vars(m), dict(vars(m))) for m in module.modules()]
    held = [(c, c.copy()) for _, attributes in before for v in attributes.values() for c in _containers(v)]
    try:
        yield
    finally:
        for container, contents in (*before, *held):
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)


def _containers(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The lists, dicts and sets in a value, with those in them."""
    seen = set() if seen is None else seen
    if type(value) not in (tuple, *_CHANGEABLE) or id(value) in seen:
        return
    seen.add(id(value))
    if type(value) in _CHANGEABLE:
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        yield from _containers(item, seen)
