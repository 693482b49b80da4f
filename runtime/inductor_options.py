"""What `torch.compile(options=...)` takes for Inductor, as settings of opforge (`specs/options.yaml` declares each name).

A value that a setting stands for is taken over. Any other name or value changes nothing and gives one warning for each name.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Mapping

from ..errors import OpforgeWarning
from ..generated.options import OPTIONS, Option

__all__ = ["NAMES", "settings_of", "warn_once"]

#: Option by its name in Inductor.
NAMES: Mapping[str, Option] = {name: option for option in OPTIONS for name in option.names}

_lock = threading.Lock()
_warned: set[str] = set()


def settings_of(name: str, value: object) -> dict[str, object]:
    """Setting → value for one of `NAMES`; empty where nothing has to be done, or where a warning says that nothing is done."""
    option = NAMES[name]
    text = _json(value)
    if text in option.holds:
        return {}
    values = dict(option.values)
    if option.setting and not values:
        if isinstance(value, (list, tuple)):
            value = next((item for item in value if isinstance(item, str)), value)
        return {option.setting: value}
    if text in values:
        return {option.setting: values[text]}
    shown = repr(value)
    shown = shown if len(shown) < 60 else f"{shown[:57]}..."
    if option.setting:
        understood = ", ".join([*values, *option.holds])
        told = f"is not understood (values are {understood}, as JSON)"
    else:
        told = f"changes nothing here: {option.doc.rstrip('.')}"
    warn_once(f"option {name}", f"opforge: Inductor's option {name!r} = {shown} {told}")
    return {}


def warn_once(key: str, text: str) -> None:
    """Warn with `text`, once for each key in the process."""
    with _lock:
        seen = key in _warned
        _warned.add(key)
    if not seen:
        warnings.warn(text, OpforgeWarning, stacklevel=5)


def _json(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return ""
