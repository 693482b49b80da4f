"""What a benchmark program is: a callable without side effects, and its positional inputs."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Any, ...]
Built = tuple[Callable[..., Any], Inputs]


@dataclass(frozen=True)
class Program:
    """One program of the list.

    `make` returns the callable and its inputs; it runs under a fixed seed, so two calls give equal weights and inputs.
    `shape` says in words what runs (printed in the result table).
    """

    name: str
    group: str
    shape: str
    make: Callable[[], Built]
    needs: tuple[str, ...] = ()


def build(program: Program, seed: int = 0) -> Built:
    """Make the callable and its inputs with torch's generator at `seed`; modules come in eval mode.

    Raises ImportError where a package that the program needs is absent.
    """
    torch.manual_seed(seed)
    fn, inputs = program.make()
    if isinstance(fn, torch.nn.Module):
        fn = fn.eval()
    return fn, inputs


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def to_float64(fn: Callable[..., Any], inputs: Inputs) -> Built:
    """The program with every floating weight and input in float64: the reference that errors are measured against."""
    if isinstance(fn, torch.nn.Module):
        fn = copy.deepcopy(fn).double()
    return fn, tuple(_wide(v) for v in inputs)
