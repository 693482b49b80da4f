"""Records calls that run functions of the program, or write into their arguments. It stands above the recorder, which has it from the trace, and
loads what a program needs: most have no such call.
"""

from __future__ import annotations

from typing import Any


def control(recorder: Any, op: Any, args: Any, kwargs: Any) -> Any:
    """A call of a higher-order operator below autograd."""
    from .control import record_control

    return record_control(recorder, op, args, kwargs)


def followed_control(recorder: Any, op: Any, args: Any, kwargs: Any) -> Any:
    """A call of a higher-order operator of a graph, which autograd may follow."""
    from .control_grad import call_control

    return call_control(recorder, op, args, kwargs)


def choice(recorder: Any, op: Any, args: Any, kwargs: Any) -> Any:
    """A call that chooses one of several functions."""
    from .choice import call_choice

    return call_choice(recorder, op, args, kwargs)


def launch(recorder: Any, on_copies: bool, kwargs: Any) -> Any:
    """A launch of a kernel of the program's own; `on_copies` of what it writes."""
    from .user_kernels import record_launch, record_launch_on_copies

    return (record_launch_on_copies if on_copies else record_launch)(recorder, **kwargs)


def write(recorder: Any, info: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """A call of an operator of the program's own that writes into its arguments."""
    from .mutable import record_write

    return record_write(recorder, info, types, args, kwargs)
