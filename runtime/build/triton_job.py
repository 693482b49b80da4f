"""Compiles one Triton kernel to a binary, in whichever process calls it. Imports Triton, never torch: a worker is ready in half a second."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import BuildError
from ...generated.languages import TRITON_LANGUAGE
from ..machine import gpu_target
from .ptx import with_halves_added_apart

# Positions out of range end a kernel by an assertion, as eager's do; without `debug` Triton leaves assertions out. Numbers below the least normal
# one count: Triton's own choice is to link libdevice so that its functions (`div_rn`, `floor`, `exp`, ...) take them for 0. A product is rounded
# before it is added, as between eager's kernels: fused, `x * c - max(x * c)` is the rounding error of the product where it should be 0.
_OPTIONS = {"debug": True, "sanitize_overflow": False, "enable_reflect_ftz": False, "enable_fp_fusion": False}
_OPTIONS_OF_PRODUCTS = _OPTIONS | {"enable_fp_fusion": True}
"""Of kernels that multiply tiles: the device adds their products unrounded anyway."""
ALIGNED = TRITON_LANGUAGE.aligned


@dataclasses.dataclass(frozen=True)
class Job:
    """All that shapes one binary: a module's source with the function `name`, the types behind its pointers, and how it is compiled.

    sizes    64-bit integers after the pointers.
    aligned  all addresses are multiples of 16, those too that the kernel reads from a table.
    """

    name: str
    source: str
    pointers: tuple[str, ...]
    sizes: int
    xblock: int
    rblock: int
    warps: int
    capability: int
    aligned: bool = True


@dataclasses.dataclass(frozen=True)
class Binary:
    """A compiled kernel: the cubin, and what its launch needs: `name` of the function, bytes of `shared` memory, `warps`, and bytes
    of `scratch` memory of a program, if it has some.
    """

    cubin: bytes
    meta: dict[str, Any]


def compile_job(job: Job, folder: Path) -> Binary:
    """The binary of one kernel. Needs no GPU. `folder` keeps the source, which Triton reads from its file, for this process's life.

    Raises `BuildError` where Triton refuses the source, and for what a launch cannot give.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(_module(job, folder), job.name)
    # ALIGNED is of those kernels that read their addresses from memory.
    values = {"XBLOCK": job.xblock, "RBLOCK": job.rblock, "ALIGNED": ALIGNED if job.aligned else 1}
    constants = {name: values[name] for name in function.arg_names if name in values}
    types = [f"*{p}" for p in job.pointers] + ["i64"] * job.sizes + ["constexpr"] * len(constants)
    source = ASTSource(
        fn=function,
        signature=dict(zip(function.arg_names, types, strict=True)),
        constexprs=constants,
        attrs={(k,): [["tt.divisibility", ALIGNED]] for k in range(len(job.pointers))} if job.aligned else {},
    )
    target = GPUTarget("cuda", job.capability, gpu_target(job.capability).limits.warp)
    options = (_OPTIONS_OF_PRODUCTS if "tp.dot(" in job.source else _OPTIONS) | {"num_warps": job.warps}
    try:
        made = triton.compile(source, target=target, options=options)
        cubin, ptx = made.asm["cubin"], with_halves_added_apart(made.asm["ptx"])
        if ptx != made.asm["ptx"]:
            cubin = _assembled(ptx, source, target, options, made.metadata._asdict())
    except Exception as error:  # Triton's errors have no common base
        raise BuildError(f"{type(error).__name__}: {error}") from error
    m = made.metadata
    if m.profile_scratch_size:
        raise BuildError("the kernel needs scratch memory for a profile, which is not supported")
    meta = {"name": m.name, "shared": m.shared, "warps": m.num_warps}
    return Binary(cubin, meta | ({"scratch": m.global_scratch_size} if m.global_scratch_size else {}))


def _assembled(ptx: str, source: Any, target: Any, options: dict[str, Any], metadata: dict[str, Any]) -> bytes:
    """The cubin that Triton's last stage makes of PTX."""
    from triton.compiler import make_backend

    backend = make_backend(target)
    stages: dict[str, Callable[[str, dict[str, Any]], bytes]] = {}
    backend.add_stages(stages, backend.parse_options(dict(options)), source.language)
    return stages["cubin"](ptx, metadata)


def _module(job: Job, folder: Path) -> Any:
    digest = hashlib.sha256(job.source.encode()).hexdigest()[:16]
    path = folder / f"{job.name[:80]}_{digest}.py"
    if not path.exists():
        # Written beside and renamed: workers share the folder.
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(job.source, encoding="utf-8")
        draft.replace(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


__all__ = ["ALIGNED", "Binary", "Job", "compile_job"]
