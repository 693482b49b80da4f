"""What ends an attempt to trace so that another one begins."""

from __future__ import annotations


class Restart(Exception):
    """Tracing must begin again: inputs at `merge` are to be one base, those at `copy` need tensor objects of their own; for `training`,
    autograd follows the program, which has turned grad mode on.
    """

    def __init__(self, merge: frozenset[int] = frozenset(), copy: frozenset[int] = frozenset(), training: bool = False):
        super().__init__()
        self.merge, self.copy, self.training = merge, copy, training
