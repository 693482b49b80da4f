"""The one place where text of the user's program becomes part of generated source: in a comment, a string, a name or an attribute.

Source lines, function names, messages and attribute names may hold any character. Whatever they hold stays text: nothing in them ends a
comment or a string of C++, Triton or Python, and nothing becomes code.
"""

from __future__ import annotations

import keyword
import re

_NOT_PRINTABLE = re.compile(r"[^\t\x20-\x7e]")
_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def one_line(text: str) -> str:
    """`text` without what ends a line or moves the cursor of a terminal, for error messages: such characters become `<U+000D>`."""
    return _BREAKS.sub(_code_point, text)


def comment_text(text: str) -> str:
    """`text` as it may stand behind `//` or `#`, or between `/*` and `*/`: one line of printable ASCII characters.

    It has no backslash, which would continue a `//` comment on the next line, and no `??`, which begins a trigraph (`??/` is a backslash).
    """
    text = _NOT_PRINTABLE.sub(_code_point, text.replace("\\", "/"))
    return re.sub(r"\?(?=\?)|\*(?=/)", r"\g<0> ", text)


def python_string(text: str) -> str:
    """A literal of Python and Triton with this value, in ASCII. It has no `#`, so that all that follows a `#` in generated source is a comment."""
    return ascii(text).replace("#", "\\x23")


def identifier(text: str) -> str:
    """`text` as a part of a name in C++ and Python: what is no ASCII letter, digit or underscore becomes its code point."""
    return re.sub(r"[^0-9A-Za-z_]", lambda m: f"_u{ord(m[0]):x}_", text)


def attribute(path: str, name: str) -> str:
    """Python source that reads the attribute `name` of the expression `path`; a parser would change or refuse many names after a dot."""
    plain = name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    return f"{path}.{name}" if plain else f"getattr({path}, {python_string(name)})"


def _code_point(found: re.Match[str]) -> str:
    return f"<U+{ord(found[0]):04X}>"


__all__ = ["attribute", "comment_text", "identifier", "one_line", "python_string"]
