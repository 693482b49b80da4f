"""`opforge.install()`: opforge wherever a program, or a library it uses, compiles with torch's default backend.

Three places name a default, or a closed list of names: `torch.compile` without `backend=`; accelerate's enum of backends, by which its users and
transformers' `Trainer` choose one; and the compile configuration of transformers' `generate`. And `torch._dynamo.config.compiled_autograd = True`
captures backwards by torch's own engine, else by ours. A library that is imported later is changed then.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

import torch

from .errors import OpforgeWarning

__all__ = ["Installed", "install", "uninstall"]

_NAME = "opforge"
_lock = threading.RLock()
_installed: Installed | None = None


class Installed:
    """What `install` has changed; `print` shows it. The end of a `with` block undoes the changes, unless opforge was installed before the block.

    changes  one line for each place, in the order in which they were changed.
    """

    def __init__(self) -> None:
        self.changes: list[str] = []
        self._calls = 0  # of `install` that have returned it
        self._ends: list[bool] = []  # for each block that is open: whether its end undoes everything
        self._undo: list[Callable[[], None]] = []
        self._finder: _OnImport | None = None

    def __str__(self) -> str:
        waiting = self._finder.waiting if self._finder is not None else {}
        later = [f"{name}, when it is imported" for name in waiting]
        return "\n".join(["opforge is the default backend of:", *(f"  {line}" for line in [*self.changes, *later])])

    def __enter__(self) -> Installed:
        self._ends.append(self._calls == 1 and not self._ends)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ends.pop() and _installed is self:
            uninstall()

    def _change(self, change: tuple[str, Callable[[], None]]) -> None:
        text, undo = change
        self.changes.append(text)
        self._undo.append(undo)

    def _everything(self) -> None:
        self._change(_torch_compile())
        waiting: dict[str, Callable[[ModuleType], None]] = {}

        def change(name: str, module: ModuleType) -> None:
            try:
                self._change(_LIBRARIES[name](module))
            except Exception as error:  # noqa: BLE001 - another version of the library, whose import must not fail for it
                text = f"opforge.install() cannot change {name} ({type(error).__name__}: {error}); the rest is changed"
                warnings.warn(text, OpforgeWarning, stacklevel=2)

        for name in _LIBRARIES:
            if (module := sys.modules.get(name)) is not None:
                change(name, module)
            else:
                waiting[name] = functools.partial(change, name)
        self._finder = _OnImport(waiting)
        sys.meta_path.insert(0, self._finder)

    def _nothing(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for undo in reversed(self._undo):
            undo()


def install() -> Installed:
    """Make opforge the default backend of this process: of `torch.compile` without `backend=`, of accelerate (which takes the name "opforge" too)
    and of transformers' `generate`. Returns what was changed; called again it changes nothing. `uninstall()` puts all of it back, and so does the
    end of `with opforge.install():`, unless it was installed before. What a program has compiled already stays as it is.
    """
    global _installed
    with _lock:
        if _installed is None:
            _installed = Installed()
            _installed._everything()
        _installed._calls += 1
        return _installed


def uninstall() -> None:
    """Undo what `install` has changed; without a call of it before, nothing happens."""
    global _installed
    with _lock:
        if _installed is not None:
            _installed._nothing()
            _installed = None


def _torch_compile() -> tuple[str, Callable[[], None]]:
    text = "torch.compile without backend="
    if hasattr(torch.compiler, "set_default_backend"):
        before = torch.compiler.get_default_backend()
        torch.compiler.set_default_backend(_NAME)
        return text, lambda: torch.compiler.set_default_backend(before)
    defaults: dict[str, Any] = torch.compile.__kwdefaults__ or {}
    named = defaults["backend"]
    defaults["backend"] = _NAME
    return text, lambda: defaults.update(backend=named)


def _accelerate(module: ModuleType) -> tuple[str, Callable[[], None]]:
    """A member of an enum whose members are text, in capitals."""
    backends, name = module.DynamoBackend, _NAME.upper()
    if name in backends.__members__:
        return "accelerate: it knows the name", lambda: None
    member = str.__new__(backends, name)
    member._name_ = member._value_ = name
    backends._member_names_.append(name)
    backends._member_map_[name] = backends._value2member_map_[name] = member

    def undo() -> None:
        backends._member_names_.remove(name)
        del backends._member_map_[name], backends._value2member_map_[name]

    return f'accelerate: dynamo_backend="{_NAME}", and transformers\' Trainer: torch_compile_backend="{_NAME}"', undo


def _transformers(module: ModuleType) -> tuple[str, Callable[[], None]]:
    """The default of a dataclass stands in its class, and among the defaults of its `__init__`."""
    config = module.CompileConfig
    before, defaults = config.backend, config.__init__.__defaults__
    config.backend = _NAME
    config.__init__.__defaults__ = tuple(_NAME if value == before else value for value in defaults)

    def undo() -> None:
        config.backend, config.__init__.__defaults__ = before, defaults

    return "transformers: CompileConfig() of generate", undo


def _compiled_autograd(module: ModuleType) -> tuple[str, Callable[[], None]]:
    """What `torch._dynamo.config.compiled_autograd` turns on."""
    before = module._enable

    def enable(*args: Any, **kwargs: Any) -> Any:
        from .compiled_autograd import enable as ours  # it loads the engine

        return ours(*args, **kwargs)

    def undo() -> None:
        module._enable = before  # type: ignore[attr-defined]

    module._enable = enable  # type: ignore[attr-defined]
    return "torch._dynamo.config.compiled_autograd: opforge captures", undo


#: By the module that holds the name.
_LIBRARIES: dict[str, Callable[[ModuleType], tuple[str, Callable[[], None]]]] = {
    "accelerate.utils.dataclasses": _accelerate,
    "transformers.generation.configuration_utils": _transformers,
    "torch._dynamo.compiled_autograd": _compiled_autograd,
}


class _OnImport(importlib.abc.MetaPathFinder):
    """Finds no module itself: once a module that is waited for has been loaded, what waits for it is called."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        self.waiting = waiting

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        then = self.waiting.get(name)
        if then is None:
            return None
        finders = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        spec = next((s for f in finders if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def loaded(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path and self.waiting.pop(name, None) is not None:
                    then(module)

            spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec
