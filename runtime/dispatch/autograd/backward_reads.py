"""What a recorded backward reads of that which others may write to before it runs: graph inputs, merged bases, results, tensor subclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ....errors import UnsupportedError
from ....generated.schemas import InputAliasInfo, MutationType
from ..metadata.outcome import Found
from ..record.recorder import Recorder, Restart
from ..storage.inputs import Inputs
from ..storage.merge import Entered
from ..subclasses.border import Argument, Border


@dataclass
class BackwardReads:
    """`needed`: the storages that are read, with the tangents for which they are, as bits. The methods answer for `Gradients`, which says what
    each answer is for. Graph inputs are told by their positions; merged bases follow the others.
    """

    inputs: Inputs
    recorder: Recorder
    entered: Entered
    found: Found
    border: Border
    needed: Mapping[int, int]

    def __contains__(self, t: Any) -> bool:
        return self.recorder.regions.key(t) in self.needed

    def check(self) -> None:
        """Raises `Restart` or `UnsupportedError` where it cannot be told whether somebody wrote to what is read."""
        self._check_shared_counters()
        for i in self.entered.graph_inputs:
            if self._moves(i) and self.inputs.fakes[i] in self:
                raise UnsupportedError(
                    f"input {i} is given another layout or storage, and its elements are needed by the backward"
                )

    def _check_shared_counters(self) -> None:
        """Inputs that lie apart in one storage of which one is written, and that the backward reads, share a version counter: how often the
        wrapper moves it is known when they are one base. Raises `Restart` for that.
        """
        fakes, regions = self.inputs.fakes, self.recorder.regions
        for i in (self.entered.graph_inputs[k] for k in sorted(self.beside)):
            key = regions.key(fakes[i])
            if key in self.needed:
                raise Restart(
                    merge=frozenset(
                        j
                        for j, t in enumerate(fakes)
                        if isinstance(t, torch.Tensor) and self.inputs.same_as[j] is None and regions.key(t) == key
                    )
                )

    @cached_property
    def beside(self) -> set[int]:
        """Graph inputs in a storage of which another input is mutated: they may share its version counter."""
        fakes, regions = self.inputs.fakes, self.recorder.regions
        mutated = {
            i: regions.key(fakes[i])
            for i, info in enumerate(self.found.meta.input_info)
            if info.mutation_type is not MutationType.NOT_MUTATED
        }
        return {
            k
            for k, i in enumerate(self.entered.graph_inputs)
            if isinstance(fakes[i], torch.Tensor)
            and any(j != i and key == regions.key(fakes[i]) for j, key in mutated.items())
        }

    def _moves(self, i: int) -> bool:
        """Whether the wrapper changes more of an input than its elements: how often its version moves then is not known here."""
        return self._info(i).mutation_type not in (MutationType.NOT_MUTATED, MutationType.DATA)

    def _info(self, i: int) -> InputAliasInfo:
        return self.found.meta.input_info[i]

    # -- graph inputs --------------------------------------------------------------------------------------------------
    @property
    def bases(self) -> tuple[int, ...]:
        first = len(self.entered.graph_inputs)
        return tuple(range(first, first + len(self.entered.bases)))

    @cached_property
    def _needed_bases(self) -> list[int]:
        return [
            k
            for k, t, base in zip(self.bases, self.entered.base_tensors, self.found.meta.bases, strict=True)
            if t in self and not any(self._moves(i) for i in base.members)
        ]

    def watched_inputs(self) -> tuple[int, ...]:
        inside = {i for a in self.distinct_wrappers() for i in a.dense}
        alone = tuple(
            k
            for k, i in enumerate(self.entered.graph_inputs)
            if isinstance(self.inputs.fakes[i], torch.Tensor)
            and self.inputs.fakes[i] in self
            and not self._moves(i)
            and k not in self.beside
            and i not in inside
        )
        first = len(self.entered.graph_inputs)
        return alone + tuple(k for k in self._needed_bases if self.found.meta.bases[k - first].followed)

    def unkept(self) -> tuple[int, ...]:
        alone = tuple(
            k
            for k, i in enumerate(self.entered.graph_inputs)
            if isinstance(self.inputs.fakes[i], torch.Tensor)
            and (self.inputs.fakes[i] not in self or k in self.beside or self._moves(i))
        )
        return alone + tuple(k for k in self.bases if k not in self._needed_bases)

    def overwritten(self) -> tuple[int, ...]:
        alone = tuple(k for k, i in enumerate(self.entered.graph_inputs) if self._info(i).mutates_data)
        return alone + tuple(
            k for k, base in zip(self.bases, self.found.meta.bases, strict=True) if base.updated is not None
        )

    def bumped(self) -> tuple[int, ...]:
        first = len(self.entered.graph_inputs)
        return tuple(
            k
            for k in self.overwritten()
            if (self._info(self.entered.graph_inputs[k]) if k < first else self.found.meta.bases[k - first]).seen
        )

    # -- results -------------------------------------------------------------------------------------------------------
    def watched_results(self) -> tuple[int, ...]:
        return tuple(
            k
            for k, t in enumerate(self.found.tensors)
            if (t is not None and t in self and t.requires_grad) or self.found.shown.get(k) in self.needed
        )

    def lent(self) -> tuple[int, ...]:
        return tuple(k for k, key in self.found.shown.items() if key not in self.needed)

    def read_for(self) -> dict[tuple[str, int], int]:
        needed, regions = self.needed, self.recorder.regions
        fakes = [*(self.inputs.fakes[i] for i in self.entered.graph_inputs), *self.entered.base_tensors]
        found: dict[tuple[str, int], int] = {}
        for where, values in (("input", fakes), ("output", self.found.tensors)):
            keys = ((k, regions.key(t)) for k, t in enumerate(values) if isinstance(t, torch.Tensor))
            found |= {(where, k): needed[key] for k, key in keys if key in needed}
        found |= {("output", k): needed[key] for k, key in self.found.shown.items() if key in needed}
        return found

    # -- tensor subclasses ---------------------------------------------------------------------------------------------
    def distinct_wrappers(self) -> list[Argument]:
        return [self.border.arguments[i] for i in self.border.distinct()]

    def watched_wrappers(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (k, int(a.moved))
            for k, a in enumerate(self.distinct_wrappers())
            if any(self.inputs.fakes[i] in self for i in a.dense)
        )
