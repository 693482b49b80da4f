"""The effective configuration: defaults of `specs/config.yaml`, then environment, `configure`, `patch` and options.

`Config` itself is generated; this module only computes which one holds. A `Config` is frozen: code that compiles takes
it once and passes it on, so that a change halfway cannot mix two configurations in one artifact.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import math
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..errors import ConfigError, OpforgeWarning
from ..generated.config import FIELDS, Config, Setting
from ..generated.options import MODES as _MODES
from . import inductor_options

__all__ = ["FIELDS", "MODES", "Config", "Setting", "configure", "current", "from_options", "key", "patch", "reset"]

#: The modes that `torch.compile(mode=...)` knows, and the settings that each one changes.
MODES: Mapping[str, Mapping[str, object]] = {mode.name: dict(mode.settings or ()) for mode in _MODES}

_ENV_PREFIX = "OPFORGE_"
_BOOL_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

_BY_FIELD: dict[str, Setting] = {setting.field: setting for setting in FIELDS.values()}

# What `patch` has put in force in this thread or task; `None` outside any patch.
_patched: contextvars.ContextVar[Config | None] = contextvars.ContextVar("opforge_config", default=None)

_base_lock = threading.Lock()
_base: Config | None = None


def current() -> Config:
    """The configuration in force in this thread or asynchronous task.

    The environment is read on the first call in the process. Raises `ConfigError` when a variable holds a wrong value.
    """
    patched = _patched.get()
    return _process_wide() if patched is None else patched


def configure(overrides: Mapping[str, object] | None = None, /, **more: object) -> Config:
    """Changes settings for the whole process, all threads; returns the new configuration.

    Names are dotted (`"debug.verify"`) or attribute names (`debug_verify`). A `patch` in force keeps its own values
    until it ends. Raises `ConfigError` for an unknown name or a wrong value, and then changes nothing.
    """
    global _base
    values = _checked({**(overrides or {}), **more}, "configure")
    base = _process_wide()
    with _base_lock:
        _base = dataclasses.replace(base if _base is None else _base, **values)
        return _base


def reset() -> None:
    """Forgets every `configure`; the environment is read again on the next `current()`."""
    global _base
    with _base_lock:
        _base = None


@contextlib.contextmanager
def patch(overrides: Mapping[str, object] | None = None, /, **more: object) -> Iterator[Config]:
    """Changes settings inside a `with` block (or a decorated function), for this thread or asynchronous task only.

    Names are dotted (`"debug.verify"`) or attribute names (`debug_verify`). Raises `ConfigError` for an unknown name
    or a wrong value.
    """
    token = _patched.set(dataclasses.replace(current(), **_checked({**(overrides or {}), **more}, "patch")))
    try:
        yield current()
    finally:
        _patched.reset(token)


def from_options(options: Mapping[str, object] | None = None, mode: str | None = None) -> Config:
    """The configuration of one `torch.compile(mode=..., options=...)` call: the current one, changed by both.

    Options win over the mode. Inductor's names are taken too: those without a meaning here give one warning each. Raises `ConfigError` for
    an unknown mode, an unknown option or a wrong value.
    """
    if mode is not None and (not isinstance(mode, str) or mode not in MODES):
        raise ConfigError(f"unknown mode {mode!r}{_nearest(str(mode), MODES, 0.7)}; modes are {', '.join(MODES)}")
    values = _checked(MODES[mode or "default"], f"mode {mode!r}")
    values.update(_checked_options(options))
    if doc := next((m.doc for m in _MODES if m.name == mode and m.settings is None), ""):
        inductor_options.warn_once(
            f"mode {mode}", f"opforge: Inductor's mode {mode!r} changes nothing here: {doc.rstrip('.')}"
        )
    return dataclasses.replace(current(), **values)


def key(cfg: Config) -> str:
    """Stable text of every setting that changes generated code: one `name=value` line each, sorted by name."""
    lines = (f"{s.name}={getattr(cfg, s.field)!r}\n" for s in FIELDS.values() if s.affects == "code")
    return "".join(sorted(lines))


def _process_wide() -> Config:
    """The process-wide configuration; reads the environment once."""
    global _base
    with _base_lock:
        if _base is None:
            _base = _from_environment(os.environ)
        return _base


def _from_environment(environ: Mapping[str, str]) -> Config:
    values: dict[str, Any] = {}
    for setting in FIELDS.values():
        if setting.env in environ:
            values[setting.field] = _value(setting, environ[setting.env], f"environment variable {setting.env}")
    if environ.get("TORCH_COMPILE_DEBUG") == "1":
        values.setdefault("debug_folders", True)
    known = {setting.env.removeprefix(_ENV_PREFIX): setting.env for setting in FIELDS.values()}
    for name in sorted(environ):
        short = name.removeprefix(_ENV_PREFIX)
        if not name.startswith(_ENV_PREFIX) or short in known:
            continue
        # Others may use the prefix too, so only what looks like a misspelt setting, or is its last part, is worth a warning.
        near = [k for k in known if k.endswith("_" + short)] or difflib.get_close_matches(
            short, known, n=1, cutoff=0.65
        )
        if near:
            warnings.warn(
                f"environment variable {name} is no opforge setting; did you mean {known[near[0]]}?",
                OpforgeWarning,
                stacklevel=2,
            )
    return Config(**values)


def _checked(overrides: Mapping[str, object], where: str) -> dict[str, Any]:
    """Field name -> checked value for `overrides`, whose names are dotted names or field names."""
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"{where}: expected a dict of settings, like {{'strict': True}}; got {overrides!r}")
    values: dict[str, Any] = {}
    for name, value in overrides.items():
        setting = FIELDS.get(name) or _BY_FIELD.get(name)
        if setting is None:
            raise ConfigError(f"{where}: unknown setting {name!r}{_nearest_setting(str(name))}")
        values[setting.field] = _value(setting, value, f"{where}: setting {setting.name!r}")
    return values


def _checked_options(options: Mapping[str, object] | None) -> dict[str, Any]:
    """Field name -> checked value for options of our own names, which win, and of Inductor's, which may have dashes."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        return _checked(options, "options")
    ours: dict[str, object] = {}
    values: dict[str, Any] = {}
    for name, value in options.items():
        theirs = str(name).replace("-", "_")
        if name in FIELDS or name in _BY_FIELD:
            ours[name] = value
        elif theirs in inductor_options.NAMES:
            changed = inductor_options.settings_of(theirs, value)
            values.update(_checked(changed, f"options: {theirs!r} of Inductor"))
        else:
            names = {**dict.fromkeys(FIELDS), **dict.fromkeys(_BY_FIELD), **dict.fromkeys(inductor_options.NAMES)}
            hint = _nearest(theirs, names) or _nearest_setting(theirs)
            raise ConfigError(f"options: unknown setting {name!r}{hint}")
    return {**values, **_checked(ours, "options")}


def _value(setting: Setting, raw: object, where: str) -> bool | int | float | str:
    """`raw` as a value of the setting's type; text is parsed, since environment and command line hold only text."""
    parsed = _PARSERS[setting.type](setting, raw)
    if parsed is not None:
        return parsed
    if setting.type == "choice":
        message = f"one of {', '.join(map(repr, setting.choices or ()))}{_nearest(str(raw), setting.choices or ())}"
    else:
        message = _EXPECTED[setting.type]
    raise ConfigError(f"{where} is {raw!r}; expected {message}")


def _parse_bool(setting: Setting, raw: object) -> bool | None:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, (int, str)):
        return _BOOL_WORDS.get(str(raw).strip().lower())
    return None


def _parse_int(setting: Setting, raw: object) -> int | None:
    if isinstance(raw, str) and raw.strip().isdecimal():
        return int(raw)
    return raw if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0 else None


def _parse_float(setting: Setting, raw: object) -> float | None:
    if isinstance(raw, str):
        try:
            raw = float(raw)
        except ValueError:
            return None
    if isinstance(raw, (int, float)) and not isinstance(raw, bool) and math.isfinite(raw) and raw >= 0:
        return float(raw)
    return None


def _parse_part(setting: Setting, raw: object) -> float | None:
    number = _parse_float(setting, raw)
    return None if number is None or number > 1 else number


def _parse_str(setting: Setting, raw: object) -> str | None:
    return raw if isinstance(raw, str) else None


def _parse_choice(setting: Setting, raw: object) -> str | None:
    text = str(raw) if isinstance(raw, (str, int)) and not isinstance(raw, bool) else None
    if text in (setting.choices or ()):
        return text
    # A setting with the choices on and off takes every word for yes and no.
    word = _parse_bool(setting, raw) if {"on", "off"} <= set(setting.choices or ()) else None
    return None if word is None else ("on" if word else "off")


def _parse_path(setting: Setting, raw: object) -> str | None:
    if isinstance(raw, os.PathLike):
        raw = os.fspath(raw)
    return os.path.expanduser(raw) if isinstance(raw, str) and "\0" not in raw else None


_PARSERS: dict[str, Callable[[Setting, object], bool | int | float | str | None]] = {
    "bool": _parse_bool,
    "int": _parse_int,
    "float": _parse_float,
    "part": _parse_part,
    "str": _parse_str,
    "choice": _parse_choice,
    "path": _parse_path,
}

_EXPECTED = {
    "bool": "a bool (or 1/0, true/false, yes/no, on/off)",
    "int": "an integer, 0 or more",
    "float": "a number, 0 or more",
    "part": "a number from 0 to 1",
    "str": "a string",
    "path": "a path, as a string or os.PathLike",
}


def _nearest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """`; did you mean 'x'?` for the name most like `name`, or nothing."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def _nearest_setting(name: str) -> str:
    """`; did you mean 'x'?` for an unknown setting, or all settings where none is like it."""
    return _nearest(name, [*FIELDS, *_BY_FIELD]) or f"; settings are {', '.join(FIELDS)}"


class _ConfigModule(types.ModuleType):
    """This module, with a word for who takes its settings for attributes: an assignment would do nothing, and say nothing.

    It does not become `configure`: inside of a `patch` that would have no effect, and outside it would reach every thread.
    """

    def __getattr__(self, name: str) -> Any:
        # Only names that the module does not have come here; hasattr and copies of modules need AttributeError.
        if name in _BY_FIELD:
            raise AttributeError(f"settings are no attributes of opforge.config; read opforge.config.current().{name}")
        hint = "" if name.startswith("_") else _nearest(name, [*_BY_FIELD, *__all__])
        raise AttributeError(f"module 'opforge.config' has no attribute {name!r}{hint}")

    def __setattr__(self, name: str, value: object) -> None:
        if not (name.startswith("_") or name in vars(self)):
            known = name in _BY_FIELD
            field = name if known else "name"
            what = f"opforge.config.{name} = ... sets nothing" if known else f"opforge.config: unknown setting {name!r}"
            raise ConfigError(
                f"{what}{'' if known else _nearest_setting(name)}; call opforge.config.configure({field}=...) for the whole process, "
                f"or use `with opforge.config.patch({field}=...):`"
            )
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _ConfigModule
