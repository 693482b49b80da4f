"""opforge: a `torch.compile` backend whose knowledge lives in YAML.

    torch.compile(model, backend="opforge")

Public names are loaded on first use, so that `import opforge` and the command line stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "aot": "",
    "aot_autograd": "aot",
    "aot_export_joint_simple": "aot",
    "aot_export_module": "aot",
    "aot_function": "aot",
    "aot_module": "aot",
    "aot_module_simplified": "aot",
    "install": "default_backend",
    "uninstall": "default_backend",
    "backend": "frontend_api",
    "compile_fx": "frontend_api",
    "stats": "frontend_api",
    "reset_stats": "frontend_api",
    "explain": "frontend_api",
    "last_artifacts": "frontend_api",
    "load_cache_artifacts": "frontend_api",
    "load_specs": "frontend_api",
    "compiled_autograd": "",
    "config": "runtime",
    "errors": "",
}

if TYPE_CHECKING:
    from . import aot as aot
    from . import compiled_autograd as compiled_autograd
    from . import errors as errors
    from .aot import (
        aot_autograd,
        aot_export_joint_simple,
        aot_export_module,
        aot_function,
        aot_module,
        aot_module_simplified,
    )
    from .default_backend import install, uninstall
    from .frontend_api import (
        backend,
        compile_fx,
        explain,
        last_artifacts,
        load_cache_artifacts,
        load_specs,
        reset_stats,
        stats,
    )
    from .runtime import config as config

__all__ = [
    "__version__",
    "aot",
    "aot_autograd",
    "aot_export_joint_simple",
    "aot_export_module",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "backend",
    "compile_fx",
    "compiled_autograd",
    "config",
    "errors",
    "explain",
    "install",
    "last_artifacts",
    "load_cache_artifacts",
    "load_specs",
    "reset_stats",
    "stats",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'opforge' has no attribute {name!r}")
    if name in ("aot", "compiled_autograd", "config", "errors"):
        return import_module(f".{where}.{name}" if where else f".{name}", __name__)
    return getattr(import_module(f".{where}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
