"""Runs generated Triton kernels without a GPU: by Triton's interpreter on CPU tensors, and through the compiler to a cubin for sm_90."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from opforge.runtime.ir.facts import evaluate
from opforge.runtime.ir.nodes import Buffer
from opforge.runtime.kernels.plan import Kernel, Plan, ViewOf
from opforge.runtime.kernels.steps import allocation_root
from opforge.runtime.render.triton import render_kernel
from opforge.runtime.render.triton_cooperative import PARTIAL_BYTES, WORKSPACE
from opforge.runtime.render.triton_horizontal import FILL, FILL_NAME
from opforge.runtime.render.triton_unit import TritonUnit
from opforge.runtime.tile.cooperative import reductions
from opforge.runtime.tile.idle import goes_in_strides
from opforge.runtime.tile.launch import launch

SIGNATURES = {
    "float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64", "int8": "*i8", "int16": "*i16", "int32": "*i32",
    "int64": "*i64", "uint8": "*u8", "bool": "*i8",
}  # fmt: skip


@dataclass
class Job:
    """Kernels to run in order over one memory: every global buffer's 1-D storage, in its dtype (aliases share a tensor)."""

    kernels: list[Kernel]
    layouts: dict[str, Buffer]
    memory: dict[str, torch.Tensor]
    sizes: dict[str, int] = field(default_factory=dict)
    xblock: int | None = None
    unit: TritonUnit | None = (
        None  # the functions that a wrapper would call, with blocks of `xblock`; None: each kernel by itself
    )
    tile: tuple[int, int] | None = None  # XBLOCK and RBLOCK of all kernels, instead
    allocation_roots: dict[str, str] = field(
        default_factory=dict
    )  # of buffers that are in the memory of another: which one


def job_of(plan: Plan, inputs: Sequence[torch.Tensor]) -> Job:
    """A job for a plan without extern calls. Memory is not reused, only aliased."""
    memory: dict[str, torch.Tensor] = {}
    for b, t in zip(plan.inputs, inputs, strict=True):
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        memory[b.name] = t.as_strided((span,), (1,)).clone()
    for name, b in plan.layouts.items():
        if name not in memory and plan.allocations[name].kind != "alias":
            assert b.stride is not None
            span = (
                1 + sum((n - 1) * s for n, s in zip(b.shape, b.stride, strict=True)) + b.offset
                if 0 not in b.shape
                else 0
            )
            memory[name] = torch.full((span,), 77, dtype=getattr(torch, b.dtype))
    allocation_roots = {name: allocation_root(plan, name) for name in plan.layouts}
    for name in plan.layouts:
        memory[name] = memory[allocation_roots[name]]
    return Job(plan.kernels(), plan.layouts, memory, allocation_roots=allocation_roots)


def results(plan: Plan, memory: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The plan's outputs out of the memory that its kernels left."""
    return [memory[v.buffer].as_strided(v.shape, v.stride, v.offset) for v in plan.outputs if isinstance(v, ViewOf)]


def blocks(
    kernel: Kernel, layouts: dict[str, Buffer], sizes: dict[str, int], xblock: int | None = None
) -> tuple[int, int, int]:
    """Number of programs, XBLOCK and RBLOCK for a test: several programs, and several tiles of a loop, where there is enough to do."""
    shape = launch(kernel, layouts)
    outer, inner = (
        n if isinstance(n, int) else evaluate(n, {a: sizes[a.name] for a in n.atoms()})
        for n in (shape.outer, shape.inner)
    )
    if shape.tile is not None:
        return -(-outer // shape.tile[0]), *shape.tile[:2]
    if shape.product:
        # Rows in alignment groups have wide blocks: only there whole vectors are stored.
        x, r = (256, 64) if shape.alignment_groups else (32, 32)
        return -(-outer // x), x, r
    if kernel.splits > 1:
        return outer, 1, 1 << (inner - 1).bit_length()
    whole = 1 << max(inner - 1, 0).bit_length()
    # Loops over rows of which a part stays in registers are unrolled.
    r = whole if shape.persistent else max(256, whole // 16) if shape.passes > 1 else 256
    most = 2**15 // r if r > 1 else 512  # of points, no more than the smallest of the blocks that they get
    x = 1 if outer <= 1 else xblock or max(1, min(1 << (outer // 3).bit_length(), most))
    return -(-outer // x), x, r


def launch_interpreted(jobs: list[Job]) -> list[dict[str, torch.Tensor]]:
    """Run jobs in one process under TRITON_INTERPRET=1. Returns each job's memory as its kernels left it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        plan = []
        for k, job in enumerate(jobs):
            steps = []
            for kernel in job.kernels:
                if job.unit is not None and (chain := _chain_of(job.unit, kernel.name)):
                    if kernel.name == job.unit.chained[chain][0]:
                        steps.append(_chain_step(job, job.unit, chain, root / f"k{k}_"))
                    continue
                if job.unit is not None and kernel.name in job.unit.grouped:
                    if kernel.name == job.unit.grouped[kernel.name].kernels[0]:
                        steps.append(_group_step(job, job.unit, kernel.name, root / f"k{k}_"))
                    continue
                (root / f"k{k}_{kernel.name}.py").write_text(
                    render_kernel(kernel, job.layouts, allocation_roots=job.allocation_roots)
                )
                names = [*kernel.reads, *kernel.writes]
                sizes = [job.sizes[s] for s in kernel.symbols]
                programs, *tile = _blocks_of(job, kernel)
                if goes_in_strides(kernel, job.layouts, job.allocation_roots):
                    programs = min(programs, 2)
                if kernel.splits > 1:
                    job.memory.setdefault("semaphore", torch.zeros(1, dtype=torch.int32))
                    names += ["semaphore", f"workspace of {kernel.name}"]
                    job.memory[names[-1]] = torch.full((PARTIAL_BYTES * reductions(kernel) * programs // 8,), 77)
                steps.append([kernel.name, names, sizes, programs, *tile])
            torch.save(job.memory, root / f"k{k}.pt")
            plan.append(steps)
        (root / "plan.json").write_text(json.dumps(plan))
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", "tests.support.triton_run", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
        if done.returncode:
            sources = [p.read_text() for p in sorted(root.glob("k*.py")) if f"at {p.stem}\n" in done.stderr]
            raise AssertionError("\n".join([f"ended with {done.returncode}", done.stderr[-3000:], *sources]))
        return [torch.load(root / f"k{k}.out.pt") for k in range(len(jobs))]


def _blocks_of(job: Job, kernel: Kernel) -> tuple[int, int, int]:
    if job.tile is None:
        return blocks(kernel, job.layouts, job.sizes, job.xblock)
    outer = launch(kernel, job.layouts).outer
    assert isinstance(outer, int)
    return -(-outer // job.tile[0]), *job.tile


def _chain_of(unit: TritonUnit, kernel: str) -> str:
    """The function that runs a kernel with those that follow it, if there is one."""
    return next((name for name, members in unit.chained.items() if kernel in members), "")


def _chain_step(job: Job, unit: TritonUnit, name: str, prefix: Path) -> list[Any]:
    """The step for one launch of the kernel with those that follow it. All kernels of a job share one semaphore."""
    made = unit.kernels[unit.symbols[name]]
    Path(f"{prefix}{made.name}.py").write_text(made.source)
    known = {k.name: k for k in job.kernels}
    names = [b for member in unit.chained[name] for b in (*known[member].reads, *known[member].writes)]
    job.memory.setdefault("semaphore", torch.zeros(1, dtype=torch.int32))
    return [made.name, [*names, "semaphore"], [], unit.programs[name], made.xblock, made.rblock]


def _group_step(job: Job, unit: TritonUnit, first: str, prefix: Path) -> list[Any]:
    """The one launch of a group of kernels."""
    group = unit.grouped[first]
    kernel = unit.kernels[unit.symbols[group.name]]
    Path(f"{prefix}{kernel.name}.py").write_text(kernel.source)
    known = {k.name: k for k in job.kernels}
    names = [b for member in group.kernels for b in (*known[member].reads, *known[member].writes)]
    x, r = (job.xblock, 2) if job.xblock else (kernel.xblock, kernel.rblock)
    step = [kernel.name, names, group.numbers(x * r), group.programs(x * r), x, r]
    if not group.pointer_table:
        return step
    filling = unit.kernels[FILL_NAME]
    Path(f"{prefix}{FILL_NAME}.py").write_text(filling.source)
    return [*step, len(group.kernels)]


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _run(root: Path) -> None:
    """The interpreter's process."""
    from tests.support.cooperative_interpreted import launch_once
    from tests.support.triton_interpreter import mend

    mend()
    for k, steps in enumerate(json.loads((root / "plan.json").read_text())):
        memory = torch.load(root / f"k{k}.pt")
        for name, names, sizes, programs, x, r, *members in steps:
            arguments: list[Any] = [
                memory[n].view(torch.int8) if memory[n].dtype == torch.bool else memory[n] for n in names
            ]
            if programs == 0:
                continue
            constants = {"XBLOCK": x, "RBLOCK": r}
            if members:
                table = _filled(root / f"k{k}_{FILL_NAME}.py", [*sizes, *(t.data_ptr() for t in arguments)])
                arguments, sizes = [table], members
                constants["ALIGNED"] = 1
            try:
                launch_once(_module(root / f"k{k}_{name}.py"), name, programs, *arguments, *sizes, **constants)
            except Exception:
                print(f"at k{k}_{name}", file=sys.stderr)
                raise
        torch.save(memory, root / f"k{k}.out.pt")


def _filled(path: Path, numbers: list[int]) -> torch.Tensor:
    """A table with these numbers, which a kernel has written."""
    table = torch.full((-(-len(numbers) // FILL) * FILL,), -1)
    for start in range(0, len(numbers), FILL):
        some = numbers[start : start + FILL]
        some += [0] * (FILL - len(some))
        getattr(_module(path), FILL_NAME)[(1,)](table[start:], *some, XBLOCK=1, RBLOCK=1)
    assert table.tolist()[: len(numbers)] == numbers
    return table


def handed_on(text: str) -> list[str]:
    """Assignments in loops that hand a loop's variable to another one: Triton 3.6 loses the values, without a word, where both began with the
    same number (its interpreter does not).
    """
    found: list[str] = []
    for loop in (n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.For, ast.While))):
        names = [n for n in ast.walk(loop) if isinstance(n, ast.Name)]
        read, stored = (
            {n.id: n.lineno for n in sorted(names, key=lambda n: -n.lineno) if isinstance(n.ctx, kind)}
            for kind in (ast.Load, ast.Store)
        )
        carried = {name for name, line in stored.items() if read.get(name, line + 1) <= line}  # read first
        for n in (n for n in ast.walk(loop) if isinstance(n, ast.Assign)):
            values = n.value.elts if isinstance(n.value, ast.Tuple) else [n.value]
            found += [ast.unparse(n) for v in values if isinstance(v, ast.Name) and v.id in carried]
    return found


def compile_sm90(
    kernel: Kernel, layouts: dict[str, Buffer], sizes: dict[str, int] | None = None, warps: int = 4
) -> bytes:
    """The kernel as a cubin for compute capability 9.0, compiled without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kernel.name}.py"
        text = render_kernel(kernel, layouts)
        assert not handed_on(text), text
        path.write_text(text)
        function = getattr(_module(path), kernel.name)
        names = [*kernel.reads, *kernel.writes]
        _, x, r = blocks(kernel, layouts, sizes or dict.fromkeys(kernel.symbols, 100))
        signature = {n: SIGNATURES[layouts[n].dtype] for n in names}
        signature |= {"semaphore": "*i32", "workspace": f"*{WORKSPACE}"} if kernel.splits > 1 else {}
        signature |= dict.fromkeys(kernel.symbols, "i64") | {"XBLOCK": "constexpr", "RBLOCK": "constexpr"}
        constants = {"XBLOCK": x, "RBLOCK": r}
        source = ASTSource(fn=function, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        return compiled.asm["cubin"]


__all__ = ["Job", "blocks", "compile_sm90", "handed_on", "job_of", "launch_interpreted", "results"]

if __name__ == "__main__":
    _run(Path(sys.argv[1]))
