"""Calls of routines: C++ templates of `specs/kernels` that compute what no loop nest can (a sort, a factorization), as steps of a program."""

from __future__ import annotations

from .nodes import Extern

PREFIX = "routine."
"""Of the target of such a call, which goes on with the routine's file and its function."""


OWN_MEMORY = ("aten", "prims", "opforge")
"""Namespaces whose operators keep no argument and, given ordinary tensors, return ordinary tensors."""


def is_users(call: Extern) -> bool:
    """Whether a call runs the user's code: a custom operator, or a compiled function (a branch, say) that may call one."""
    if not call.target or routine_of(call) is not None:
        return False
    return call.compiled or call.target.partition(".")[0] not in OWN_MEMORY


def routine_of(call: Extern) -> tuple[str, str] | None:
    """The file and the function of the routine that a call is for; None for calls of eager kernels and of compiled graphs. A routine's arguments
    are tensors, then numbers; it writes all of its results into memory that the plan gives it.
    """
    if not (call.compiled and call.target.startswith(PREFIX)):
        return None
    file, _, function = call.target.removeprefix(PREFIX).partition(".")
    return file, function


__all__ = ["OWN_MEMORY", "PREFIX", "is_users", "routine_of"]
