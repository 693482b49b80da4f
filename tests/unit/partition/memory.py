"""Memory that a partition really takes: every storage that appears while it runs, until it is freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.runtime.partition import Partition


class Meter(TorchDispatchMode):
    """Counts the bytes of living storages that operators returned; `peak` is the most."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.seen: dict[int, int] = {}
        self.known = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.count(t.untyped_storage())
        return out

    def count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.known or key in self.seen:
            return
        size = self.seen[key] = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self.free, key)

    def free(self, key: int) -> None:
        self.alive -= self.seen.pop(key)


class Boxed(fx.Interpreter):
    """Drops its arguments as it takes them, so that they are freed after their last reader."""

    def run_list(self, args: list[Any]) -> Any:
        return self.boxed_run(args)


def measured_peak(p: Partition, primals: list[Any], tangents: list[Any], outputs: int) -> int:
    """Peak bytes over forward and backward, inputs left out."""
    with Meter([*primals, *tangents]) as meter:
        results = list(Boxed(p.forward).run_list(list(primals)))
        saved = [*results[outputs:], *tangents]
        del results[outputs:]
        grads = Boxed(p.backward).run_list(saved)
        del grads
    return meter.peak
