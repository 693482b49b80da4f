"""Functionalized randomness: random operators of the traced program become operators with an explicit seed and stream (specs/random.yaml).

The graph draws one seed per device at each call, by an operator that advances torch's generator; a draw is a function of that seed, of a
stream number and of the element's position. So a draw can be computed again, in the backward too, and is the same.

Which stream a draw gets follows the state of torch's default generator while tracing: every draw moves it on, and code that puts a state
back (`torch.utils.checkpoint` before it runs a function again) gets the streams that the function had the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ....generated.random import RANDOM
from ... import philox  # noqa: F401  (registers the operators)
from ..operators.schema import OpInfo, functional_arguments
from ..storage.regions import same_strides

if TYPE_CHECKING:
    from ..record.recorder import Recorder

#: Seeds of torch's generator while tracing: beyond those that people choose.
_FIRST = 0x7068_696C_6F78_0000
_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
                     torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))  # fmt: skip


class Draws:
    """The draws of one graph. `replaced` is what its random operators were replaced by, for each how many."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.streams: dict[tuple[int, torch.device], tuple[torch.Tensor, int]] = {}
        self.seeds: dict[tuple[torch.device, bool], torch.Tensor] = {}
        self.count = 0
        self.device = torch.device("cpu")

    # -- while tracing -------------------------------------------------------------------------------------------------
    def replace(self, info: OpInfo, types: Any, args: Any, kwargs: Any) -> Any:
        """What a random operator gives, recorded as draws; `NotImplemented` where it stays as it is."""
        form = info.functional if info.kind == "write" else None
        if info.kind == "write" and (form is None or form.drops_out):
            return NotImplemented
        op = info.op if form is None else form.op
        body = RANDOM.get(str(op))
        if body is None:
            return NotImplemented
        targets = [info.argument(k, args, kwargs) for k in info.written]
        f_args, f_kwargs = (args, kwargs) if form is None else functional_arguments(info, form, args, kwargs)
        given = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
        given |= dict(zip((a.name for a in op._schema.arguments), f_args, strict=False)) | f_kwargs
        if any(isinstance(v, torch.Generator) for v in given.values()):
            return NotImplemented
        # Also raises what eager raises for these arguments.
        out = self.recorder.fake_mode.dispatch(op, types, f_args, f_kwargs)
        outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
        if not all(self._drawable(t) for t in (*outs, *(v for v in given.values() if isinstance(v, torch.Tensor)))):
            return NotImplemented
        self.device = outs[0].device
        values = [given[a.name] for a in op._schema.arguments]
        with self.recorder:
            made = body(self, out, *values)
            if made is NotImplemented:
                return NotImplemented
            made = (made,) if isinstance(made, torch.Tensor) else made
            if form is None:
                laid = [self._laid_out(m, o) for m, o in zip(made, outs, strict=True)]
                return laid[0] if isinstance(out, torch.Tensor) else tuple(laid)
            fresh = iter([self._laid_out(made[k], outs[k]) for k in form.kept])
        self.recorder.overwrite(info, types, args, kwargs, targets, [made[k] for k in form.results])
        returned = [
            next(fresh) if position is None else targets[info.written.index(position)] for position in info.aliased
        ]
        return returned[0] if len(returned) == 1 else tuple(returned)

    def _drawable(self, t: torch.Tensor) -> bool:
        return t.dtype in _DTYPES and t.layout is torch.strided and t.device.type != "meta"

    def _laid_out(self, made: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`made` with the strides of `out`."""
        if same_strides(made, out):
            return made
        new = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        return new.copy_(made)

    # -- what bodies call ----------------------------------------------------------------------------------------------
    def uniform(self, size: Sequence[Any], dtype: Any, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """Numbers in [low, high)."""
        return self._draw(torch.ops.opforge.philox_uniform, size, float(low), float(high), dtype=dtype)

    def normal(self, size: Sequence[Any], dtype: Any, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        """Normally distributed numbers."""
        return self._draw(torch.ops.opforge.philox_normal, size, float(mean), float(std), dtype=dtype)

    def integers(self, size: Sequence[Any], dtype: Any, low: int, last: int) -> torch.Tensor:
        """Integers from low to last."""
        return self._draw(torch.ops.opforge.philox_integers, size, low, last, dtype=dtype)

    def _draw(self, op: Any, size: Sequence[Any], *parameters: Any, dtype: Any) -> torch.Tensor:
        seed, stream = self._stream()
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        result: torch.Tensor = op(seed, stream, list(size), *parameters, dtype=dtype)
        return result

    def _stream(self) -> tuple[torch.Tensor, int]:
        """Seed and stream of the next draw."""
        generator = torch.default_generator
        key = (generator.initial_seed(), self.device)
        found = self.streams.get(key)
        if found is None:
            found = self.streams[key] = (self._seed(), self.count)
            self.count += 1
        generator.manual_seed(_FIRST + found[1])
        return found

    def _seed(self) -> torch.Tensor:
        """The seed of the graph. Draws that only the backward makes have their own: it may run more than once."""
        key = (self.device, self.recorder.backward)
        if key not in self.seeds:
            self.seeds[key] = torch.ops.opforge.philox_seed(device=self.device)
        return self.seeds[key]
