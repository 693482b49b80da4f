"""Kernels that run as one launch give what they give one by one, to the bit. By Triton's interpreter, and compiled for sm_90. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.machines import H200

pytest.importorskip("triton")

import triton

from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.check.plan import check
from opforge.runtime.compile_fx import written_inside
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.execute import support
from opforge.runtime.host.from_plan import host_program
from opforge.runtime.host.python import python_source
from opforge.runtime.ir.index import sym
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.machine import tuning_of
from opforge.runtime.render.triton_unit import TritonUnit, render_triton
from opforge.runtime.targets import cuda
from opforge.runtime.targets.cuda import prepared, scheduled
from opforge.runtime.tile.blocks import group_rule
from opforge.runtime.tile.horizontal import HorizontalGroup, can_join, steps
from opforge.runtime.tile.launch import Launch
from tests.support.triton_run import job_of, launch_interpreted

SHAPES: tuple[tuple[int, ...], ...] = (
    (33,),
    (7, 5),
    (16, 16),
    (1,),
    (2, 8, 4),
    (100,),
    (1, 1),
    (48,),
    (3, 16, 1),
    (15, 1),
)
"""Seven of several points, of which four are multiples of 16, and two of one point."""


def adam(*tensors: Tensor) -> None:
    """In place, with a number of steps for each parameter, as an optimizer with `capturable` has it."""
    n = len(tensors) // 5
    p, g, m, v, steps = (list(tensors[k * n : (k + 1) * n]) for k in range(5))
    torch._foreach_add_(steps, 1)
    torch._foreach_lerp_(m, g, 0.1)
    torch._foreach_mul_(v, 0.99)
    torch._foreach_addcmul_(v, g, g, 0.01)
    torch._foreach_addcdiv_(p, m, torch._foreach_add(torch._foreach_sqrt(v), 1e-3), -0.01)
    torch._foreach_div_(p, torch._foreach_sqrt(steps))


def optimizer(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(s) + 0.5 for _ in range(4) for s in shapes] + [
        torch.tensor(float(k)) for k in range(len(shapes))
    ]


def scaled(*tensors: Tensor) -> tuple[Tensor, ...]:
    """New tensors, of several dtypes; empty ones too."""
    return tuple((t * 3).sin() + 1 for t in tensors)


def corrected(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With numbers of steps that are worth a kernel of their own, whose results are in the arena."""
    n = len(tensors) // 2
    steps = torch._foreach_pow(0.9, list(tensors[n:]))
    return tuple(torch._foreach_mul(list(tensors[:n]), steps))


def many_steps() -> list[Tensor]:
    """So long that they are not a program each."""
    return [*(torch.rand(40_000) for _ in range(9)), *(torch.tensor(float(k)) for k in range(9))]


def flags(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Booleans are behind pointers to 8-bit integers."""
    return tuple((t > 0.5) | (t < 0.1) for t in tensors)


def several(times: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    sizes = (0, 5, 0, 0, 64, 7, 0, 96, 80, 31, 0) * times
    return [torch.randn(n).to(t) for t in (torch.float32, torch.bfloat16) for n in sizes]


def chained(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Sums cut it into kernels, of which the second pair reads what the first has written."""
    a, b = x * (x + 1).sum(), y * (y + 1).sum()
    return a, b, a * (a + 1).sum(), b * (b + 1).sum()


def planned(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> Plan:
    with torch.no_grad():
        traced = trace(fn, [t.clone() for t in inputs])
    program = prepared(separate_outputs(lower(traced.graph, written_inside(traced)).program), H200)
    plan = scheduled(program, Config(), H200)
    check(program, plan)
    return plan


def sizes(unit: TritonUnit) -> list[int]:
    return [len(names) for names in unit.groups.values()]


def test_same_to_the_bit() -> None:
    jobs = []
    cases = [
        (adam, optimizer(SHAPES), 16),
        (scaled, several(), 32),
        (chained, [torch.rand(50), torch.rand(70)], 32),
        (adam, optimizer(SHAPES * 3), 16),
        (scaled, several(8), 32),
        (corrected, many_steps(), 1024),
        (flags, [torch.rand(k + 20) for k in range(10)], 8),
    ]
    for fn, inputs, xblock in cases:
        plan = planned(fn, inputs)
        for unit in (None, render_triton(plan)):
            jobs.append(job_of(plan, inputs))
            jobs[-1].unit, jobs[-1].xblock = unit, xblock
    ran = launch_interpreted(jobs)
    for lone, together in zip(ran[::2], ran[1::2], strict=True):
        for name, memory in lone.items():
            assert torch.equal(memory, together[name]), name


def test_few_launches() -> None:
    plan = planned(adam, optimizer(SHAPES))
    unit = render_triton(plan)
    assert len(plan.kernels()) == 2 * len(SHAPES)
    assert sorted(sizes(unit)) == [2, 4, 4, 10]  # one point, multiples of 16, others; the steps
    assert len(unit.programs) == 4
    program = host_program(plan, [b.name for b in plan.inputs], {}, programs=unit.programs, groups=unit.groups)
    wrapper = python_source(program, "cuda")
    assert len(re.findall(r"^    k\d+_", wrapper, re.M)) == 4
    names = [b.name for b in plan.inputs]
    assert max(wrapper.count(f"{n}.data_ptr()") for n in names) == 1
    many = render_triton(planned(adam, optimizer([(64,)] * 70)))
    assert sizes(many) == [70] * 2
    assert many.pointer_tables == set(many.groups)
    assert len(many.kernels) == 3  # one of them fills tables


def test_tables_in_wrappers() -> None:
    """A tensor is named once, whatever its places in the table are; memory in the arena by its address."""
    wrappers = []
    for fn, inputs in ((adam, optimizer([(64,)] * 9)), (corrected, many_steps())):
        plan = planned(fn, inputs)
        unit = render_triton(plan)
        names = [b.name for b in plan.inputs]
        wrappers.append(
            python_source(
                host_program(
                    plan, names, {}, programs=unit.programs, groups=unit.groups, pointer_tables=unit.pointer_tables
                ),
                "cuda",
            )
        )
        assert len(unit.pointer_tables) == len(unit.groups) == 2
    steps, update = re.findall(r"    (k.*)", wrappers[0])
    assert steps == f"k0_foreach_add_x9(9, [{', '.join(f'arg{k}' for k in range(36, 45))}], nowhere_0, order_1)"
    assert update.count("arg") == 5 * 9
    calls = {}
    module: dict[str, Any] = {}
    for name in re.findall(r"^    (k\w+)\(", wrappers[1], re.M):
        module[name] = lambda *given, name=name: calls.update({name: given})
    text = re.sub(r"from opforge.*import.*\n", "", wrappers[1])
    module |= {"Workspaces": support.Workspaces, "empty_strided": support.empty_strided, "profiled": lambda: False}
    exec(text, module)
    inputs = many_steps()
    results = module["call"](*inputs)
    (_, powers, at, first), (_, tensors, also_at, second) = calls.values()
    assert at == also_at
    assert [*powers, *at] == [*inputs[9:], *at]
    assert [(powers + at)[k] for k in first] == [x for pair in zip(inputs[9:], at, strict=True) for x in pair]
    wanted = [x for three in zip(inputs[:9], at, results, strict=True) for x in three]
    found = [(tensors + at)[k] for k in second]
    assert all(a is b for a, b in zip(found, wanted, strict=True))


def test_shapes_and_sizes_do_not_matter() -> None:
    a, b, c = (render_triton(planned(adam, optimizer([s] * 2))) for s in ((64,), (32, 16), (3, 4, 8)))
    assert a.source.count("% ") == 0
    for other in (b, c):
        assert [re.sub(r"#.*", "", k.source) for k in other.kernels.values()] == [
            re.sub(r"#.*", "", k.source) for k in a.kernels.values()
        ]


def test_what_is_written_by_a_member_is_not_read_by_another() -> None:
    plan = planned(chained, [torch.rand(50), torch.rand(50)])
    unit = render_triton(plan)
    known = {k.name: k for k in plan.kernels()}
    for names in unit.groups.values():
        written = {b for n in names for b in known[n].writes}
        assert written.isdisjoint(b for n in names for b in known[n].reads)
    assert sum(sizes(unit)) < len(known) + 1


def test_limits() -> None:
    few, most = H200.costs.group.tree, H200.costs.group.members
    for count in (2, few, few + 1, most):
        for pointers in (1, 7, 100, 300):
            one = HorizontalGroup("g", ("k",) * count, (1,) * count, 1, H200, pointers)
            assert one.pointer_table or (count <= few and count * (pointers + 2) <= H200.limits.arguments // 8 - 2)
            assert one.pointer_table == one.members.pointer_table
            assert one.members.count in ((count,) if not one.pointer_table else (2, 8, 16, most))
    kernel = planned(adam, optimizer([(64,)])).kernels()[-1]
    assert can_join(kernel, Launch(H200, 64, 1, True))
    assert not can_join(kernel, Launch(H200, sym("s0"), 1, True))
    group = HorizontalGroup("g", ("a", "b", "c", "d"), (33, 0, 1, 64), 1, H200)
    assert group.numbers(32) == [33, 0, 1, 64, 0, 2, 2, 3]
    assert group.programs(32) == 5
    assert HorizontalGroup("g", ("a", "b"), (32, 64), 16, H200).numbers(32) == [2, 4, 0, 1]


def test_blocks_of_a_program() -> None:
    """As many as leave enough programs, and no more than the largest member has."""
    rule = group_rule(tuning_of(90))
    shorter = replace(rule, x=512)
    assert (rule.x, rule.r) == (1024, 64)
    assert steps([1000] * 32, shorter) == 1
    assert steps([1 << 20] * 32, shorter) == 32
    assert steps([1 << 20] * 24, shorter) == 16  # 24 would do
    assert steps([1 << 30] * 2, rule) == 64
    assert steps([1 << 25, 8], rule) == 16


def test_compiles_for_sm90_with_wide_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = triton.compile
    monkeypatch.setattr(triton, "compile", lambda *args, **how: made.append(original(*args, **how)) or made[-1])
    for times in (1, 4):
        unit = render_triton(planned(adam, optimizer([(4096,), (100, 16), (32, 32)] * times)))
        update = next(k for k in unit.kernels.values() if "lerp" in k.name)
        for kernel in (*unit.kernels.values(), update):
            assert compile_job(cuda.job_of(kernel, 90), tmp_path).cubin[:4] == b"\x7fELF"
        each = 2 * (update.rblock if times == 1 else 1)  # eight elements a thread; few blocks are written out
        ptx = made[-1].asm["ptx"]
        assert ptx.count("ld.global.v4") == each * 4  # of a parameter, its gradient and two states
        assert ptx.count("st.global.v4") == each * 3
        assert compile_job(cuda.job_of(update, 90, aligned=False), tmp_path).cubin[:4] == b"\x7fELF"
        assert "global.v" not in made[-1].asm["ptx"]


def test_base_of_an_update_is_allocated_once() -> None:
    """Atomic updates went to other memory than the copy of the base, where the result leaves the graph."""
    inputs = [torch.rand(65, 64), torch.randint(0, 65, (300,)), torch.rand(300, 64)]
    plan = planned(lambda x, i, r: x.index_add(0, i, r), inputs)
    unit = render_triton(plan)
    wrapper = python_source(host_program(plan, [b.name for b in plan.inputs], {}, programs=unit.programs), "cuda")
    assert len(unit.programs) == 2
    assert wrapper.count("= empty_strided(") == 1
