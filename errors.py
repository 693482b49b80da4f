"""Every error and warning type of opforge, in one place.

An error says what went wrong, where (the operator and the user's source line, or a spec position), and what to do about it.
"""

from collections.abc import Sequence


class OpforgeError(Exception):
    """Base of all errors raised by opforge."""


class SpecError(OpforgeError):
    """A spec file is wrong; the message holds one block per mistake with `file:line:column`."""


class BuildError(OpforgeError):
    """A native kernel could not be compiled; the message holds the compiler's output and the path of the kept source.

    short  the lines of it that a warning shows below the first one: what the compiler complains of, and where the source is kept.
    """

    def __init__(self, message: str = "", short: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.short = tuple(short)


class ResourceError(BuildError):
    """A compiled kernel asks for more registers or shared memory than its device has; another configuration of it is tried."""


class CacheError(OpforgeError):
    """The on-disk cache cannot be used at all (never raised for a damaged entry: that one is rebuilt)."""


class ConfigError(OpforgeError):
    """A setting has an unknown name or a value outside its declared type or choices."""


class IRError(OpforgeError):
    """A loop-IR program breaks a rule of the IR (found by `ir.verify` or `ir.parse`)."""


class PlanError(OpforgeError):
    """A schedule or memory plan would read a wrong value (found by `runtime.check`)."""


class HostProgramError(OpforgeError):
    """A host program cannot run, or is not what its plan says (found by `runtime.host.verify`)."""


class UnsupportedError(OpforgeError):
    """Something that this version cannot compile; the caller runs it by the eager kernel and counts it."""


class ExportError(UnsupportedError, RuntimeError):
    """A program that `aot_export_module` or `aot_export_joint_simple` refuses: the message names the input or output and what to change."""


class MetadataError(OpforgeError):
    """What is said of a graph's values contradicts itself (a bug in dispatch, found when it is written down), or what a kernel returns."""


class InputError(OpforgeError, ValueError):
    """A compiled graph was called with inputs that it was not compiled for."""


class OpforgeWarning(UserWarning):
    """Base of all warnings issued by opforge."""


def first_line(error: BaseException) -> str:
    """What an error says first, or its type where it says nothing: reasons are counted and warned of by it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
