"""What the scalar tables say about dtypes and kinds of reductions, as the verifier needs it."""

from __future__ import annotations

from collections.abc import Callable

from ...generated.scalars import REDUCTIONS, SCALARS, SCANS, Reduction
from .nodes import FLOATS, Node

Fail = Callable[[str], None]
ERRORS = ("IndexError", "LinAlgError", "RuntimeError")
"""What a position out of range raises."""


def kind_of(dtype: str) -> str:
    """float, int or bool."""
    return "float" if dtype in FLOATS else "bool" if dtype == "bool" else "int"


_TAKES = {"number": ("float", "int"), "integral": ("int", "bool"), "any": ("float", "int", "bool")}


def accepts(wanted: str, dtype: str) -> bool:
    """Whether a class of dtypes of the tables (`float`, `number`, …) takes the dtype."""
    return wanted == dtype or kind_of(dtype) in _TAKES.get(wanted, (wanted,))


def check_scalar(n: Node, fail: Fail) -> None:
    """One operation: known, with the arguments and the result dtype that its entry gives."""
    if n.op == "bounded":
        _check_bounded(n, fail)
        return
    entry = SCALARS.get(n.op)
    if entry is None:
        fail(f"{n.op!r} is not an operation of specs/scalars.yaml")
        return
    if len(n.args) != entry.arity:
        fail(f"{n.op!r} takes {entry.arity} arguments, not {len(n.args)}")
    dtypes = [a.dtype for a in n.args]
    for k, (wanted, dtype) in enumerate(zip(entry.args, dtypes, strict=True)):
        if wanted == "same":
            if dtype != dtypes[k - 1]:
                fail(f"{n.op!r} has arguments of {dtypes[k - 1]} and {dtype}")
        elif not accepts(wanted, dtype):
            fail(f"argument {k} of {n.op!r} is {dtype}, not {wanted}")
    result = {"same": dtypes[0] if dtypes else n.dtype, "arg1": dtypes[1] if len(dtypes) > 1 else n.dtype}.get(
        entry.result
    )
    result = n.dtype if entry.result == "attr" else result or entry.result
    if n.dtype != result:
        fail(f"{n.op!r} gives {result} here, not {n.dtype}")


def _check_bounded(n: Node, fail: Fail) -> None:
    if [a.dtype for a in n.args] != ["int64", "int64", "bool"] or n.dtype != "int64":
        fail(f"'bounded' takes a position, a size (int64) and a condition, not {', '.join(a.dtype for a in n.args)}")
    if not (isinstance(n.attr, tuple) and len(n.attr) == 2 and n.attr[0] in ERRORS):
        fail(f"'bounded' raises one of {', '.join(ERRORS)} and says where, not {n.attr!r}")


def check_loop(name: str, value: str, result: str, scan: bool, fail: Fail) -> None:
    """A reduction or scan `name` of values of dtype `value` into a buffer of dtype `result`."""
    table: dict[str, Reduction] = SCANS if scan else REDUCTIONS
    what = "scan" if scan else "reduction"
    entry = table.get(name)
    if entry is None:
        fail(f"{name!r} is not a {what} of specs/scalars.yaml")
        return
    if not accepts(entry.args[0], value):
        fail(f"the {what} {name!r} takes {entry.args[0]}, the value is {value}")
    gives = value if entry.result == "same" else entry.result
    if gives != result:
        fail(f"the {what} {name!r} of {value} gives {gives}, the buffer is {result}")
