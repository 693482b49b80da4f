"""The folder of a graph that `opforge repro` runs: the graph as Python, its inputs, the settings and versions.

program.py    the graph (`program_text`); run as a program it is `opforge repro` of its folder
graph.json    inputs and constants (sizes, strides, dtypes, devices, gradients, ranges of values), settings, versions, what torch was set to
tensors.pt    values: of small tensors of integers, of tiny ones, and with the setting `debug.save_inputs` of all
"""

from __future__ import annotations

import io
import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...generated.config import FIELDS, Config, Setting
from ..torch_compat import size_hint
from .program_text import Unwritable, class_name, constants_of, graphs_of, program_text

__all__ = ["FORMAT", "STATES", "folder_files"]

FORMAT = 1
#: Elements up to which a tensor's values are saved: of integers and bools, which are positions and masks; of any other.
SMALL_INTEGERS, SMALL = 65536, 64
#: What torch is set to.
STATES = {
    "grad": torch.is_grad_enabled,
    "inference": torch.is_inference_mode_enabled,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "default_dtype": lambda: _name(torch.get_default_dtype()),
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "seed": torch.initial_seed,
}


def folder_files(
    gm: Any, inputs: Sequence[Any], cfg: Config, notes: Mapping[str, Any] | None = None
) -> dict[str, str | bytes]:
    """File name → contents. Where the graph or an input cannot be written down, graph.json says why, and the program is left out.

    notes  more for graph.json.
    """
    about: dict[str, Any] = {
        "format": FORMAT,
        "versions": _versions(),
        "settings": {
            s.name: getattr(cfg, s.field) for s in FIELDS.values() if _told(s) and getattr(cfg, s.field) != s.default
        },
        "torch": {name: read() for name, read in STATES.items()} | {"autocast": _autocast()},
        **(notes or {}),
    }
    files: dict[str, str | bytes] = {}
    try:
        if not isinstance(gm, fx.GraphModule):
            raise Unwritable(f"it is no graph but a {type(gm).__name__}")
        tensors = Tensors(cfg.debug_save_inputs)
        names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        if len(names) != len(inputs):
            raise Unwritable(f"it takes {len(names)} inputs, and was given {len(inputs)}")
        program = program_text(gm)
        about["symbolic"] = any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in inputs)
        about["graphs"] = {path: class_name(path) for path, _ in graphs_of(gm)}
        about["inputs"] = [{"name": n} | tensors.described(v, n) for n, v in zip(names, inputs, strict=True)]
        about["constants"] = {n: tensors.described(v, n) for n, v in constants_of(gm).items()}
        files["program.py"] = program
        if tensors.saved:
            stream = io.BytesIO()
            torch.save(tensors.saved, stream)
            files["tensors.pt"] = stream.getvalue()
    except Unwritable as error:
        about["unwritten"] = str(error)
    files["graph.json"] = json.dumps(about, indent=1) + "\n"
    return files


class Tensors:
    """Describes values for graph.json, and collects in `saved` the contents of storages that are worth it."""

    def __init__(self, everything: bool) -> None:
        self.everything = everything
        self.saved: dict[str, torch.Tensor] = {}
        self.storages: dict[int, str] = {}
        self.kept: list[torch.Tensor] = []  # so that no other storage takes the place of one

    def described(self, value: Any, name: str) -> dict[str, Any]:
        """What `testing/recorded.py` makes the value of. Raises `Unwritable` for a value of a kind that it does not make."""
        if isinstance(value, torch.SymInt):
            return {"kind": "size", "value": size_hint(value, 8)}
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            return {"kind": "number", "value": None, "symbolic": True}
        if value is None or isinstance(value, (bool, int, float, str)):
            odd = isinstance(value, float) and not math.isfinite(value)
            return {"kind": "number", "value": repr(value) if odd else value, "type": type(value).__name__}
        if type(value) not in (torch.Tensor, torch.nn.Parameter) and not _is_fake(value):
            raise Unwritable(f"the input {name} is a {type(value).__name__}")
        if value.layout != torch.strided or value.is_quantized:
            raise Unwritable(f"the input {name} is a {value.layout} tensor")
        return self._tensor(value, name)

    def _tensor(self, value: torch.Tensor, name: str) -> dict[str, Any]:
        fake = _is_fake(value)
        size = [size_hint(s, 8) for s in value.shape]
        stride = [size_hint(s, 1) for s in value.stride()]
        offset = size_hint(value.storage_offset(), 0)
        storage = name if fake else self.storages.setdefault(value.untyped_storage()._cdata, name)
        extent = 0 if 0 in size else offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        told: dict[str, Any] = {
            "kind": "tensor",
            "size": size,
            "stride": stride,
            "offset": offset,
            "dtype": _name(value.dtype),
            "device": str(value.device),
            "requires_grad": value.requires_grad,
            "leaf": value.is_leaf,
            "parameter": isinstance(value, torch.nn.Parameter),
            "storage": storage,
            "extent": extent,
        }
        if fake or value.device.type == "meta" or not extent:
            return told
        self.kept.append(value)
        plain = value.detach()
        whole = plain.is_floating_point() or plain.is_complex()
        if self.everything or extent <= (SMALL if whole else SMALL_INTEGERS):
            self.saved[name] = plain.as_strided((extent,), (1,), 0).cpu().clone()
        elif not plain.is_complex() and plain.dtype != torch.bool:
            wide = plain.double() if whole else plain
            finite = wide[wide.isfinite()] if whole else wide
            if finite.numel():
                told["range"] = [finite.min().item(), finite.max().item()]
        return told


def _told(setting: Setting) -> bool:
    """Whether a setting may matter to whoever runs the graph; folders are this machine's."""
    return setting.affects != "debug" and setting.type != "path"


def _is_fake(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and "fake" in type(value).__module__ + type(value).__name__.lower()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _autocast() -> dict[str, str]:
    return {d: _name(torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}


def _versions() -> dict[str, str]:
    from ... import __version__

    try:
        import triton

        with_triton = str(triton.__version__)
    except ImportError:
        with_triton = ""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "opforge": __version__,
        "torch": torch.__version__,
        "triton": with_triton,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": device,
    }
