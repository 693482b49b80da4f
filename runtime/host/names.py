"""Names of the wrapper of a graph, and what its comments say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Names:
    """Python names of the buffers while the wrapper runs, and constants made once when the module is loaded."""

    constants: dict[str, str] = field(default_factory=dict)
    workspace: dict[str, str] = field(default_factory=dict)

    def constant(self, stem: str, text: str) -> str:
        for name, known in self.constants.items():
            if known == text:
                return name
        name = f"{stem}_{len(self.constants)}"
        self.constants[name] = text
        return name


MOST_LINES = 3


def source_lines(origins: Iterable[str]) -> str:
    """The program's lines of some origins (`op: line`), each once, the first of them."""
    lines = list(dict.fromkeys(line for o in origins if (line := o.partition(": ")[2])))
    more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return "; ".join(lines[:MOST_LINES] + more)
