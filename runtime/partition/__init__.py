"""Cuts a joint forward-and-backward graph in two: what is kept from the forward, what the backward computes again.

`facts` says what every node is and costs, `bans` which values are not computed again, `flow` finds the cheapest cut, `cut` the values
that are kept, `budget` how far a memory budget goes, `split` writes the two graphs.
"""

from .partition import Partition, partition

__all__ = ["Partition", "partition"]
