"""Handlers of calls that run functions of the program, or write to their arguments. They import the recorder, so it is given this module when it is
made. Each is loaded when a program first needs it: most programs have no such call.
"""

from __future__ import annotations

from typing import Any


def control(recorder: Any, op: Any, args: Any, kwargs: Any) -> Any:
    """A call of a higher-order operator below autograd."""
    from .control.functions import record_control

    return record_control(recorder, op, args, kwargs)


def followed_control(recorder: Any, op: Any, args: Any, kwargs: Any) -> Any:
    """A call of a higher-order operator of a graph, which autograd may follow."""
    from .control.gradients import call_control

    return call_control(recorder, op, args, kwargs)


def choice(recorder: Any, op: Any, args: Any, kwargs: Any) -> Any:
    """A call that chooses one of several functions."""
    from .control.choice import call_choice

    return call_choice(recorder, op, args, kwargs)


def launch(recorder: Any, on_copies: bool, kwargs: Any) -> Any:
    """A launch of a kernel that the program brings. `on_copies`: it writes to copies of its arguments."""
    from .user_kernels.launches import record_launch, record_launch_on_copies

    return (record_launch_on_copies if on_copies else record_launch)(recorder, **kwargs)


def write(recorder: Any, info: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """A call of an operator of the program's own that writes into its arguments."""
    from .record.mutable import record_write

    return record_write(recorder, info, types, args, kwargs)
