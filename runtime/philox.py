"""Random numbers from a seed, a stream and a position: the operators that stand for random ones in a graph, as eager kernels over torch.

Compiled code computes the same numbers (the bits are equal; a logarithm may differ in its last place). These kernels are what runs where
no loop code can (another device), what fake tensors need, and what the tests compare with. Importing this module registers them.

Philox4x32-10: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..generated.random import SCHEMAS

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(seed: Tensor, stream: Tensor, index: Tensor) -> Tensor:
    """32 random bits as int32, of the broadcast shape: word `index % 4` of the block with the key `seed` and the counter
    (`index / 4`, `stream`). All arguments are int64, taken as unsigned.
    """
    seed, stream, index = torch.broadcast_tensors(seed, stream, index)
    words = [(index >> 2) & _LOW, (index >> 34) & (_LOW >> 2), stream & _LOW, (stream >> 32) & _LOW]
    keys = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(ROUNDS):
        # A product of two words fills 64 bits; that int64 wraps does not change its bits.
        p, q = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [((q >> 32) & _LOW) ^ words[1] ^ keys[0], q & _LOW, ((p >> 32) & _LOW) ^ words[3] ^ keys[1], p & _LOW]
        keys = [(k + w) & _LOW for k, w in zip(keys, _WEYL, strict=True)]
    word = torch.stack(words).gather(0, (index & 3)[None])[0]
    return torch.where(word < 2**31, word, word - 2**32).to(torch.int32)


# -- kernels -----------------------------------------------------------------------------------------------------------
def _words(seed: Tensor, stream: int, size: Sequence[int], part: int) -> Tensor:
    index = torch.arange(math.prod(size), device=seed.device).reshape(list(size))
    return philox(seed.reshape(()), torch.tensor(4 * stream + part, device=seed.device), index)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _uniform(seed: Tensor, stream: int, size: Sequence[int], low: float, high: float, *, dtype: torch.dtype) -> Tensor:
    bits = round(-math.log2(torch.finfo(dtype).eps)) + 1
    first = _words(seed, stream, size, 0)
    if dtype == torch.float64:
        second = _words(seed, stream, size, 1) & -(1 << (64 - bits))
        unit = first.double() * 2.0**-32 + 0.5 + (second.double() * 2.0**-64 + 2.0**-33)
    else:
        unit = (first & -(1 << (32 - bits))).float() * 2.0**-32 + 0.5
    if low == 0 and high == 1:
        return unit.to(dtype)
    scaled = (low + unit * (high - low)).to(dtype)
    return torch.where(scaled < torch.tensor(high, dtype=dtype, device=seed.device), scaled, low)


def _normal(seed: Tensor, stream: int, size: Sequence[int], mean: float, std: float, *, dtype: torch.dtype) -> Tensor:
    first, second, third, fourth = (_words(seed, stream, size, part) for part in range(4))
    first = (first & 2**31 - 1).to(_wide(dtype))
    if dtype == torch.float64:
        fraction = (first + (second.double() * 2.0**-32 + (0.5 + 2.0**-34))) * 2.0**-31
        turn = third.double() * 2.0**-32 + fourth.double() * 2.0**-64
    else:
        fraction, turn = (first + 0.5) * 2.0**-31, second.float() * 2.0**-32
    standard = torch.sqrt(-2.0 * torch.log(fraction)) * torch.cos(turn * (2 * math.pi))
    return (mean + standard * std).to(dtype)


def _integers(seed: Tensor, stream: int, size: Sequence[int], low: int, last: int, *, dtype: torch.dtype) -> Tensor:
    count, parts = last - low + 1, 2 if last - low < 2**31 else 3
    words = [_words(seed, stream, size, k).long() for k in range(parts)]
    if parts == 2:
        rest = ((words[0] & _LOW) * count + ((words[1] & _LOW) * count >> 32)) >> 32
        return (low + rest).to(dtype)
    upper, lower, rest = count >> 32, count & _LOW, torch.zeros_like(words[0])
    for word in reversed(words):
        digit = word & (_LOW >> 1)
        small = digit * lower + (rest & _LOW)
        rest = (digit * upper + (rest >> 32 & _LOW) + (small >> 32)) * 2 + ((small & _LOW) >> 31)
    return (low + rest).to(dtype)


def _seed(*, device: torch.device) -> Tensor:
    # One call instead of `empty` and `random_`: it is made at every call of a graph.
    return torch.randint(-(2**63), 2**63 - 1, (1,), device=device)


# -- registration ------------------------------------------------------------------------------------------------------
def _like_seed(seed: Tensor, stream: int, size: Sequence[int], *_: Any, dtype: torch.dtype) -> Tensor:
    return seed.new_empty(size, dtype=dtype)


def _empty_seed(*, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=device)


#: Name → the eager kernel, and what it gives on fake tensors.
KERNELS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "philox_uniform": (_uniform, _like_seed),
    "philox_normal": (_normal, _like_seed),
    "philox_integers": (_integers, _like_seed),
    "philox_seed": (_seed, _empty_seed),
}
_library = torch.library.Library("opforge", "FRAGMENT")
for _schema in SCHEMAS:
    _name = _schema.partition("(")[0]
    _kernel, _fake = KERNELS[_name]
    # The seed is what depends on the state of a generator: it is drawn once, whatever is computed again.
    _library.define(_schema, tags=(torch.Tag.nondeterministic_seeded,) if _kernel is _seed else ())
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"opforge::{_name}", _fake, lib=_library)

__all__ = ["KERNELS", "philox"]
