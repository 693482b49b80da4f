"""What is in force where a program is traced, beside its arguments, so that it can be run or traced once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    return tuple((d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))


@dataclass(frozen=True)
class Surroundings:
    """Those of the moment in which it is made.

    autocast  devices on which autocast is on, with its dtype.
    grad      grad mode.
    """

    autocast: tuple[tuple[str, torch.dtype], ...] = field(default_factory=_autocast)
    grad: bool = field(default_factory=torch.is_grad_enabled)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The block runs in them."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield
