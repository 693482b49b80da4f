"""The text of each kernel out of the source of all kernels of a graph."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["source_of_kernel"]

_HEAD = re.compile(r"(\w+)\(")


@lru_cache(maxsize=32)
def _blocks(text: str) -> dict[str, str]:
    """Functions at the top level by name, with the comments and decorators above them: of C++ up to the closing brace, of Python up to the next."""
    found: dict[str, str] = {}
    python = "\nimport triton\n" in f"\n{text}"
    lines: list[str] = []
    name = ""

    def close() -> None:
        nonlocal name
        if name:
            found[name] = "\n".join(lines).strip("\n")
        lines.clear()
        name = ""

    for line in text.split("\n"):
        top = line[:1] not in ("", " ", "\t", "}", ")")
        if python and top and name and (line.startswith(("@", "#", "def "))):
            close()
        if not name and not line.strip():
            lines.clear()
            continue
        lines.append(line)
        is_head = line.startswith("def ") if python else top and not line.startswith(("//", "#", "using", "namespace"))
        if is_head and not name and (head := _HEAD.search(line.replace('__attribute__((visibility("default")))', ""))):
            name = head[1]
        if not python and line.startswith("}"):
            close()
    close()
    return found


def source_of_kernel(text: str, symbol: str) -> str:
    """The function `symbol`, after the functions of the same text that it calls; "" where it is not found."""
    blocks = _blocks(text)
    if symbol not in blocks:
        return ""
    wanted, left = {symbol}, [symbol]
    while left:
        called = set(_HEAD.findall(blocks[left.pop()])) & blocks.keys() - wanted
        wanted |= called
        left += called
    return "\n\n".join(code for name, code in blocks.items() if name in wanted)
