"""Philox4x32-10 over torch tensors: the reference of the `philox` scalar, and the arithmetic of the eager kernels.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
