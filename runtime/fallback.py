"""What runs where a graph cannot be compiled: the program by eager kernels, counted and said."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import BuildError, ConfigError, OpforgeWarning, UnsupportedError, first_line
from .config import Config
from .garbage import full_collections_deferred
from .observe import counters
from .realize import Compiled, EagerProgram
from .torch_compat import RESTART


def or_eager(compiled: Callable[[], Compiled], eager: Callable[[], Compiled], cfg: Config) -> Compiled:
    """What `compiled` makes, or `eager` where it cannot be made, counted and said."""
    try:
        with full_collections_deferred():
            return compiled()
    except (UnsupportedError, BuildError) as error:
        if cfg.strict:
            raise
        counters.count_fallback(f"{type(error).__name__}: {first_line(error)}")
        if isinstance(error, BuildError):
            warn_once(first_line(error), error.short)
        return eager()
    except ConfigError:
        raise
    except Exception as error:
        # A mistake of opforge's own: the program still runs, and says so; with checks on, or strict, it is raised.
        if cfg.strict or cfg.debug_verify or type(error).__name__ == RESTART:
            raise
        reason = f"internal error, please report it: {type(error).__name__}: {first_line(error)}"
        counters.count_fallback(reason)
        warn_once(reason)
        return eager()


def eager_program(gm: Any) -> EagerProgram:
    """The program by eager kernels. FX prints a power of a negative number as the negative of a power: such a graph is interpreted."""
    nodes = gm.graph.nodes if isinstance(gm, torch.fx.GraphModule) else ()
    misprinted = any(
        n.target is operator.pow and isinstance(n.args[0], (int, float)) and n.args[0] < 0 for n in nodes if n.args
    )
    if misprinted:
        interpreter = torch.fx.Interpreter(gm)
        return EagerProgram(lambda *args: interpreter.run(*args))
    return EagerProgram(gm.forward)


_warned: set[str] = set()


def warn_once(text: str, below: Sequence[str] = ()) -> None:
    """Warn that a graph runs eagerly, and why. `below`: further lines."""
    if text not in _warned:  # by its first line: paths below it differ from graph to graph
        _warned.add(text)
        head = f"opforge: {text}; the graph runs eagerly (strict=True raises instead)"
        warnings.warn("\n  ".join([head, *below]), OpforgeWarning, stacklevel=4)
