"""Products of matrices with what is beside them as one kernel: planned as for a GPU, checked, run by Triton's interpreter, judged by float64."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.execute import launch
from opforge.runtime.fuse.products import Selector
from opforge.runtime.kernels.plan import ExternStep, Plan, Tile
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets import cuda
from tests.support.gpu_plan import planned
from tests.support.loops import Ran, agree
from tests.support.triton_run import job_of, launch_interpreted, results

Case = tuple[Callable[..., Tensor | tuple[Tensor, ...]], Callable[[], list[Tensor]]]
SMALL = Tile(32, 16, 32, 4, 2, group_m=2)
INF, NAN = float("inf"), float("nan")


def most(name: str) -> Selector:
    """As much as can be in one kernel."""
    tile = replace(SMALL, descriptors=name.endswith(TOLD))
    return lambda kernels, _: [(float(len(k.parts)), tile) for k in kernels]


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def linear(rows: int = 70, depth: int = 48, columns: int = 50, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [t.to(dtype) for t in (torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns))]


def eight_bits(rows: int, columns: int) -> list[Tensor]:
    return [torch.randint(-128, 128, (rows, columns), dtype=torch.int8), torch.rand(rows).bfloat16() / 64]


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w) * (x @ v)


def two_results(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y.sin(), y > 0


def to_heads(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (F.linear(x, w, b) * 0.5).unflatten(-1, (4, 16)).transpose(1, 2).contiguous()


def dequantized(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, q.to(x.dtype) * s[:, None])


def poisoned(inputs: list[Tensor], which: int, bad: float) -> list[Tensor]:
    inputs[which].view(-1)[7] = bad
    return inputs


CASES: dict[str, Case] = {
    "gelu": (gelu, linear),
    "gelu of float16": (gelu, lambda: linear(dtype=torch.float16)),
    "gelu by tanh": (lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), linear),
    "silu": (lambda x, w, b: F.silu(F.linear(x, w, b)), linear),
    "relu, no bias": (lambda x, w, b: F.relu(F.linear(x, w)), linear),
    "odd sizes": (gelu, lambda: linear(33, 17, 19)),
    "one block": (gelu, lambda: linear(16, 16, 16)),
    "whole blocks": (gelu, lambda: linear(64, 64, 64)),
    "residual": (lambda x, w, b, r: r + F.linear(x, w, b), lambda: [*linear(), half(70, 50)]),
    "residual that is an operand": (lambda x, w: torch.relu(x @ w) + x, lambda: [half(70, 40), half(40, 40)]),
    "bias of rows": (lambda x, w, r: (x @ w) * r, lambda: [half(70, 40), half(40, 50), half(70, 1)]),
    "made wider": (lambda x, w, b: F.linear(x, w, b).float() * 3, linear),
    "made another": (lambda x, w: (x @ w).to(torch.float16), lambda: [half(70, 40), half(40, 50)]),
    "gate": (gated, lambda: [half(70, 40), half(40, 50), half(40, 50)]),
    "two results": (two_results, lambda: [half(70, 40), half(40, 50)]),
    "three dimensions": (gelu, lambda: [half(3, 20, 40), half(50, 40), half(50)]),
    "heads": (to_heads, lambda: [half(3, 20, 40), half(64, 40), half(64)]),
    "scaled batches": (lambda x, y: (x @ y) * 0.125, lambda: [half(3, 20, 40), half(3, 40, 50)]),
    "two dimensions of batches": (lambda x, y: (x @ y.mT).relu(), lambda: [half(2, 3, 20, 40), half(2, 3, 50, 40)]),
    "one matrix for all batches": (lambda x, y: (x @ y.expand(3, 40, 50)).relu(), lambda: [half(3, 20, 40), half(40, 50)]),
    "transposed": (lambda x, y: (x.t() @ y.t()).relu(), lambda: [half(40, 70), half(50, 40)]),
    "slices": (lambda x, y: (x[::2, 1:] @ y[:, ::3]).relu(), lambda: [half(70, 41), half(40, 100)]),
    "an expanded row": (lambda x, y: (x.expand(40, 40) @ y).relu(), lambda: [half(1, 40), half(40, 50)]),
    "transposed result": (lambda x, y: (x @ y).relu().t().contiguous(), lambda: [half(70, 40), half(40, 50)]),
    "sum of matrices": (lambda c, x, y: torch.addmm(c, x, y).relu(), lambda: [half(70, 50), half(70, 40), half(40, 50)]),
    "sum of a column": (lambda c, x, y: torch.addmm(c, x, y).relu(), lambda: [half(70, 1), half(70, 40), half(40, 50)]),
    "sum of batches": (
        lambda c, x, y: torch.baddbmm(c, x, y).relu(), lambda: [half(50), half(3, 20, 40), half(3, 40, 50)],
    ),
    "8 bits": (dequantized, lambda: [half(80, 40), *eight_bits(50, 40)]),
    "8 bits, odd": (dequantized, lambda: [half(81, 33), *eight_bits(37, 33)]),
    "8 bits, gelu": (lambda x, q, s, b: F.gelu(dequantized(x, q, s) + b), lambda: [half(80, 40), *eight_bits(50, 40), half(50)]),
    "cast before": (lambda x, w: x.to(w.dtype) @ w, lambda: [torch.randn(70, 40), half(40, 50)]),
    "scaled before": (lambda x, w: ((x * 2 + 1) @ w).relu(), lambda: [half(70, 33), half(33, 50)]),
    "divided before": (lambda x, w: ((1 / x) @ w).relu(), lambda: [half(70, 33), half(33, 50)]),
    "both before": (lambda x, w: (x * 2) @ (w / 3), lambda: [half(70, 33), half(33, 50)]),
    **{
        f"{bad} in operand {which}": (lambda x, w, b: F.relu(F.linear(x, w, b)), lambda w=which, b=bad: poisoned(linear(), w, b))
        for which in range(3)
        for bad in (INF, -INF, NAN)
    },
}  # fmt: skip
TOLD = ", blocks told by descriptors"
CASES |= {
    name + TOLD: CASES[name]
    for name in (
        *(
            "gelu",
            "one block",
            "transposed",
            "scaled batches",
            "two dimensions of batches",
            "8 bits",
        ),
        *("one matrix for all batches", "8 bits, gelu", "cast before", "nan in operand 0", "nan in operand 1"),
    )
}
CASES["slices of whole vectors" + TOLD] = (
    lambda x, y: (x[8:, 8:] @ y[:40, 16:]).relu(),
    lambda: [half(70, 48), half(48, 64)],
)


@pytest.fixture(scope="module")
def plans() -> dict[str, tuple[Plan, list[Tensor]]]:
    torch.manual_seed(0)
    made = {name: make() for name, (_, make) in CASES.items()}
    return {name: (planned(fn, made[name], select=most(name)), made[name]) for name, (fn, _) in CASES.items()}


def is_whole(plan: Plan) -> bool:
    return not any(isinstance(s, ExternStep) for s in plan.steps)


@pytest.fixture(scope="module")
def ran(plans: dict[str, tuple[Plan, list[Tensor]]]) -> dict[str, Ran]:
    """Every case in one process of Triton's interpreter."""
    some = {name: plan for name, plan in plans.items() if is_whole(plan[0])}
    memories = launch_interpreted([job_of(plan, inputs) for plan, inputs in some.values()])
    found = {}
    for (name, (plan, inputs)), memory in zip(some.items(), memories, strict=True):
        fn = CASES[name][0]
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        exact, eager = (r if isinstance(r, tuple) else (r,) for r in (fn(*wide), fn(*inputs)))
        found[name] = Ran(results(plan, memory), exact, eager, plan, "")
    return found


ONE_LEFT = ("gate",)  # the other product is the library's: both are read by one kernel


@pytest.mark.parametrize("name", CASES)
def test_one_kernel(plans: dict[str, tuple[Plan, list[Tensor]]], name: str) -> None:
    plan, _ = plans[name]
    assert sum(k.tile is not None for k in plan.kernels()) == 1
    assert is_whole(plan) == (name not in ONE_LEFT)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ONE_LEFT])
def test_right(ran: dict[str, Ran], name: str) -> None:
    agree(ran[name])


@pytest.mark.parametrize(
    "name", ["gelu", "8 bits, gelu", "heads", "slices", "odd sizes", "gelu" + TOLD, "8 bits" + TOLD]
)
def test_compiles_for_sm90(plans: dict[str, tuple[Plan, list[Tensor]]], name: str, tmp_path: Path) -> None:
    for kernel in render_triton(plans[name][0]).kernels.values():
        assert ("make_tensor_descriptor" in kernel.source) == name.endswith(TOLD)
        assert compile_job(cuda.job_of(kernel, 90), tmp_path).cubin[:4] == b"\x7fELF"


def test_products_of_float32_are_the_library_s() -> None:
    """The library's sums in parts are more accurate than one sum after another, and TF32 units cut off what it rounds."""
    for dtype, kernels in ((torch.float32, 0), (torch.bfloat16, 1)):
        plan = planned(gelu, linear(dtype=dtype), select=most(""))
        assert sum(k.tile is not None for k in plan.kernels()) == kernels


def parameters(cubin: bytes) -> int:
    """Bytes of the arguments of a binary's only kernel, as its attributes tell the driver (EIATTR_CBANK_PARAM_SIZE)."""
    found = {int.from_bytes(cubin[k + 2 : k + 4], "little") for k in places(cubin, b"\x03\x19")}
    (size,) = {n for n in found if 0 < n <= 4096 and n % 8 == 0}
    return size


def places(data: bytes, wanted: bytes) -> list[int]:
    return [k for k in range(0, len(data), 4) if data[k : k + 2] == wanted]


@pytest.mark.parametrize("name", ["gelu", "gelu" + TOLD, "8 bits" + TOLD])
def test_a_launch_passes_as_many_arguments_as_the_binary_takes(
    plans: dict[str, tuple[Plan, list[Tensor]]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200 each kernel with descriptors failed with error 701: scratch memory's address was passed beside the two that Triton declares."""
    monkeypatch.setattr(launch, "driver", lambda: types.SimpleNamespace(cuLaunchKernelEx=None))
    sizes: list[int] = []
    block = launch._Block
    monkeypatch.setattr(launch, "_Block", lambda *how: sizes.append(block(*how).keep[0].value))
    for kernel in render_triton(plans[name][0]).kernels.values():
        binary = compile_job(cuda.job_of(kernel, 90), tmp_path)
        scratch = binary.meta.get("scratch", 0)
        assert bool(scratch) == name.endswith(TOLD)
        made: list[Callable[[], object]] = []
        monkeypatch.setattr(launch, "_maker", lambda *_, to=made: lambda **how: to.append(how["fresh"]))
        launch.launcher((1, 0, 32), lambda: (1, 0, 32), "k", len(kernel.pointers), kernel.sizes, 0, (), scratch)
        made[0]()
        assert sizes.pop() == parameters(binary.cubin)
