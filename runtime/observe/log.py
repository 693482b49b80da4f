"""opforge's logger, which `TORCH_LOGS` turns on: `opforge` for a line for each graph, `+opforge` for every stage of it too."""

from __future__ import annotations

import logging

__all__ = ["LOG"]

#: Named after the package, so that `TORCH_LOGS=opforge` finds it.
LOG = logging.getLogger(__name__.partition(".")[0])
