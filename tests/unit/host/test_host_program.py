"""Host programs: what the compiler makes can run, survives JSON, and is Python to the letter; what was tampered with is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops import scan, while_loop

from opforge.errors import HostProgramError
from opforge.generated.ops import OUT
from opforge.runtime import cold
from opforge.runtime.host.as_json import from_json, to_json
from opforge.runtime.host.from_control import control_program
from opforge.runtime.host.program import (
    Address,
    Allocate,
    CallGraph,
    Check,
    Copy,
    ForEach,
    Formula,
    Free,
    GiveArena,
    HostProgram,
    If,
    Item,
    LaunchKernel,
    Layout,
    Learn,
    LibraryCall,
    List,
    Return,
    Slot,
    Stack,
    TakeArena,
    Tensor,
    TorchConstant,
    View,
    While,
)
from opforge.runtime.host.python import function_source, python_source
from opforge.runtime.host.verify import follows, verify
from opforge.runtime.ir.index import Expr, Quotient, expr, of, sym

FOUR = Layout("float32", (4,), (1,))


@pytest.fixture(name="made")
def _made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[HostProgram, Any, Any]]:
    """Each host program that is made, with its plan and the kernels that are called as one."""
    made: list[tuple[HostProgram, Any, Any]] = []

    def recorded(plan: Any, names: list[str], out: Any, **given: Any) -> HostProgram:
        program = host_program(plan, names, out, **given)
        made.append((program, plan, given["groups"]))
        return program

    torch._dynamo.reset()
    host_program = cold.host_program
    monkeypatch.setattr(cold, "host_program", recorded)
    return made


def _mlp() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4), torch.nn.Softmax(-1))
    return net, [torch.randn(3, 8, requires_grad=True)]


def _selected(x: torch.Tensor) -> torch.Tensor:
    found = x[x > 0]
    return found.sum() / _root(found) + torch.topk(x.flatten(), 3).values[0]


def _root(x: torch.Tensor) -> float:
    return float(x.size(0)) ** 0.5 + 1


def _written(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.view(-1)[::2] + 1


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.fft.fft(x) * torch.view_as_complex(torch.ones(4, 4, 2)))


PROGRAMS: dict[str, Callable[[], tuple[Callable[..., Any], list[torch.Tensor]]]] = {
    "layers": _mlp,
    "sizes from data": lambda: (_selected, [torch.randn(4, 4)]),
    "a constant": lambda: (lambda x: x[[0, 2, 3], [1, 3, 3]] + torch.tensor([1.0, 2.0, 3.0]), [torch.randn(5, 5)]),
    "written input": lambda: (_written, [torch.randn(4, 4)]),
    "complex": lambda: (_complex, [torch.randn(4, 4)]),
    "attention": lambda: (
        torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(),
        [torch.randn(2, 5, 16, requires_grad=True)],
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_made(name: str, dynamic: bool, made: list[tuple[HostProgram, Any, Any]], tmp_path: Path) -> None:
    fn, inputs = PROGRAMS[name]()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        options = {"cache_dir": str(tmp_path)}
        result = torch.compile(fn, backend="opforge", dynamic=dynamic, options=options)(*inputs)
    if result.requires_grad:
        result.sum().backward()
    assert made
    for program, plan, groups in made:
        verify(program)
        follows(program, plan, OUT, groups)
        again = from_json(to_json(program))
        assert again == program
        assert python_source(again) == python_source(program)


def test_what_runs_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches, loops and scans are programs too."""
    controls: list[HostProgram] = []

    def recorded(control: Any) -> HostProgram:
        controls.append(control_program(control))
        return controls[-1]

    monkeypatch.setattr("opforge.runtime.host.from_control.control_program", recorded)

    def fn(x: torch.Tensor) -> tuple[Any, ...]:
        chosen = torch.cond(x.sum() > 0, lambda a: (a.sin(),), lambda a: (a.cos(),), (x,))
        _, doubled = while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), (torch.tensor(0), x))
        carried, rows = scan(lambda c, row: (c + row, c * row), x[0].clone(), x)
        return *chosen, doubled, carried, rows

    x = torch.randn(4, 3)
    got = torch.compile(fn, backend="opforge", options={"cache": False})(x)
    for a, b in zip(got, fn(x), strict=True):
        torch.testing.assert_close(a, b)
    kinds = {type(one) for program in controls for one in program.instructions}
    assert {If, While, ForEach} <= kinds
    for program in controls:
        verify(program)
        assert from_json(to_json(program)) == program
        assert function_source(from_json(to_json(program))) == function_source(program)


def _quotient(kind: str) -> Expr:
    """The first size, divided by 0: arithmetic refuses to make it, the text of a program may have it."""
    return of(Quotient(kind, sym("s0"), expr(0)))


KERNEL = LaunchKernel("k0", (Address("x"), Address("y"), Address("z"), sym("s0")))
SMALL = HostProgram(
    ("s0", "x"),
    (
        Learn("s1", Formula("s0*2")),
        Check(Formula("s1 > 2"), "too small"),
        Allocate("z", Layout("float32", (sym("s0"), 4), (4, 1))),
        TakeArena(),
        KERNEL,
        LibraryCall("aten.topk.default", "overload", (View("y", (2, 2), (2, 1), 0), 2), results=("v", "_"), rest=True),
        Free(("v",)),
        GiveArena(),
        Return((Tensor("z"), sym("s1"), None)),
    ),
    arena_bytes=64,
    arena={"y": Slot(0, 16, FOUR)},
)


def _changed(k: int, *others: Any) -> HostProgram:
    """The small program with other instructions instead of one."""
    return replace(SMALL, instructions=(*SMALL.instructions[:k], *others, *SMALL.instructions[k + 1 :]))


TAMPERED: dict[str, tuple[HostProgram, str]] = {
    "one name twice": (replace(SMALL, parameters=("x", "x")), "two parameters or constants have one name"),
    "a formula of what is not there": (_changed(0, Learn("s1", Formula("s7 + 1"))), "instruction 0 (Learn s1): 's7'"),
    "no formula": (_changed(0, Learn("s1", Formula("s0 +"))), "instruction 0 (Learn s1): 's0 +' is no formula"),
    "a formula that divides by 0": (
        _changed(0, Learn("s1", Formula("s0 % 0"))),
        "instruction 0 (Learn s1): 's0 % 0' divides by 0",
    ),
    "a condition that divides by 0": (
        _changed(1, Check(Formula("s1 > s0 // 0"), "too small")),
        "instruction 1 (Check): 's1 > s0 // 0' divides by 0",
    ),
    "a size divided by 0": (
        _changed(2, Allocate("z", Layout("float32", (_quotient("//"), 4), (4, 1)))),
        "instruction 2 (Allocate z): (s0 // 0) divides by 0",
    ),
    "a kernel's argument that is a remainder of 0": (
        _changed(4, replace(KERNEL, arguments=(*KERNEL.arguments[:3], _quotient("%") + 1))),
        "instruction 4 (LaunchKernel k0): (s0 % 0) + 1 divides by 0",
    ),
    "a number returned that is divided by 0": (
        _changed(8, Return((Tensor("z"), _quotient("//"), None))),
        "instruction 8 (Return): (s0 // 0) divides by 0",
    ),
    "a negative size": (
        _changed(2, Allocate("z", Layout("float32", (sym("s0"), -4), (4, 1)))),
        "instruction 2 (Allocate z): the size -4 is negative",
    ),
    "a size that is always negative": (
        _changed(2, Allocate("z", Layout("float32", (-1 - sym("s0"), 4), (4, 1)))),
        "instruction 2 (Allocate z): the size -s0 - 1 is negative",
    ),
    "a negative stride": (
        _changed(5, LibraryCall("f", "function", (View("y", (2, 2), (2, -1), 1),))),
        "instruction 5 (LibraryCall f): the stride -1 is negative",
    ),
    "a negative offset": (
        _changed(5, LibraryCall("f", "function", (View("y", (2, 2), (2, 1), -1),))),
        "instruction 5 (LibraryCall f): the offset -1 is negative",
    ),
    "a negative number of programs": (
        _changed(4, replace(KERNEL, grid=-2)),
        "instruction 4 (LaunchKernel k0): the number of programs -2 is negative",
    ),
    "a negative size in the arena": (
        replace(SMALL, arena={"y": Slot(0, 16, Layout("float32", (-4,), (1,)))}),
        "'y' in the arena is impossible: the size -4 is negative",
    ),
    "a size that is known": (_changed(0, Learn("s0", Formula("1"))), "'s0' is defined already"),
    "not allocated": (_changed(2), "instruction 3 (LaunchKernel k0): 'z' is not defined"),
    "allocated twice": (
        _changed(2, *SMALL.instructions[2:3] * 2),
        "instruction 3 (Allocate z): 'z' is defined already",
    ),
    "no arena": (_changed(3), "'y' lies in the arena, which is not held"),
    "the arena twice": (_changed(3, TakeArena(), TakeArena()), "the arena is taken twice"),
    "the arena is kept": (_changed(7), "the arena is not given back"),
    "the arena is given back first": (_changed(4, GiveArena(), KERNEL), "'y' lies in the arena, which is not held"),
    "freed twice": (_changed(6, Free(("v", "v"))), "it frees a tensor twice"),
    "freed and freed again": (_changed(6, Free(("v",)), Free(("v",))), "'v' was freed"),
    "freed, then returned": (_changed(6, Free(("z",))), "instruction 8 (Return): 'z' was freed"),
    "no return": (_changed(8), "the last instruction does not return"),
    "more after the return": (_changed(8, SMALL.instructions[8], KERNEL), "nothing reaches it"),
    "outside of the arena": (
        replace(SMALL, arena={"y": Slot(56, 16, FOUR)}),
        "'y' in the arena is at 56 to 72, the arena has 64 bytes",
    ),
    "larger than its slot": (
        replace(SMALL, arena={"y": Slot(0, 16, Layout("float64", (4,), (1,)))}),
        "has 16 bytes for a layout of 32",
    ),
    "a view behind its memory": (
        _changed(5, LibraryCall("f", "function", (View("y", (2, 2), (2, 1), 1),))),
        "a view of 'y' ends behind its memory",
    ),
    "one result of two names": (
        _changed(5, LibraryCall("f", "function", (), results=("a", "v"), single=True)),
        "one result has 2 names",
    ),
    "arms that differ": (
        _changed(6, If(Item("x"), (CallGraph("f", ("x",), ("w",)),), ())),
        "only one of its arms defines 'w'",
    ),
    "a loop that defines": (
        _changed(6, While(Item("x"), (CallGraph("f", ("x",), ("w",)),))),
        "'w' would be there only where the body has run",
    ),
    "rows of nothing": (
        _changed(6, ForEach((("row", "x"),), ("w",), (CallGraph("f", ("row",), ("u",)),))),
        "its body does not define 'w'",
    ),
    "no name of a kernel": (
        _changed(4, replace(KERNEL, kernel="k0(); k1")),
        "'k0(); k1' is no name",
    ),
    "a name that Python keeps": (replace(SMALL, parameters=("s0", "x", "lambda")), "'lambda' is no name"),
    "no dtype": (_changed(2, Allocate("z", Layout("float31", (4,), (1,)))), "it has the unknown dtype 'float31'"),
    "a slot without strides": (
        replace(SMALL, arena={"y": Slot(0, 16, Layout("float32", (4,), ()))}),
        "'y' in the arena has other numbers of sizes and strides",
    ),
    "a view without strides": (
        _changed(5, LibraryCall("f", "function", (View("y", (2, 2), (2,), 0),))),
        "a view of 'y' has other numbers of sizes and strides",
    ),
    "memory of the arena freed": (_changed(6, Free(("y",))), "'y' cannot be freed"),
    "a constant freed": (
        replace(_changed(6, Free(("c",))), constants=("c",)),
        "'c' cannot be freed",
    ),
    "freed in a loop": (
        _changed(6, While(Item("x"), (Free(("v",)),))),
        "its body frees 'v', which is there only once",
    ),
    "the arena given back in a loop": (
        _changed(7, While(Item("x"), (GiveArena(),))),
        "its body takes or gives back the arena",
    ),
    "the arena given back in one arm": (
        _changed(7, If(Item("x"), (GiveArena(),), ())),
        "only one of its arms takes or gives back the arena",
    ),
    "the arena given back in both arms and once more": (
        _changed(7, If(Item("x"), (GiveArena(),), (GiveArena(),)), GiveArena()),
        "the arena is not held",
    ),
    "stacked from nowhere": (_changed(8, Return((Stack("w"),))), "nothing gathers 'w'"),
}


def test_the_small_program_can_run() -> None:
    verify(SMALL)
    assert from_json(to_json(SMALL)) == SMALL


@pytest.mark.parametrize("name", TAMPERED)
def test_what_cannot_run(name: str) -> None:
    program, says = TAMPERED[name]
    with pytest.raises(HostProgramError) as error:
        verify(program)
    assert says in str(error.value)
    with pytest.raises(HostProgramError):
        from_json(to_json(program))


def _damaged() -> Iterator[tuple[str, Callable[[dict[str, Any]], Any], str]]:
    yield "no program", lambda d: [], "a list"
    yield "another version", lambda d: d | {"version": 7}, "this is version 7"
    yield "a form that is none", lambda d: d | {"instructions": [{"is": "Jump"}]}, "there is no 'Jump'"
    yield "a field too many", lambda d: d | {"speed": 3}, "HostProgram has no 'speed'"
    yield "a field too few", lambda d: d | {"instructions": [{"is": "Allocate", "name": "a"}]}, "lacks 'layout'"
    yield "another type", lambda d: d | {"parameters": [1, 2]}, "HostProgram.parameters: (1, 2) does not belong here"
    call = {"is": "LibraryCall", "operator": "f", "how": "by hand", "arguments": []}
    yield (
        "an unknown way to call",
        lambda d: d | {"instructions": [call]},
        "LibraryCall.how: by hand does not belong here",
    )
    yield "a value of no kind", lambda d: d | {"arena": {"x": 1}}, "is no value"
    yield "a wrong size", lambda d: d | {"arena_bytes": {"size": [["a", 1]]}}, "HostProgram.arena_bytes"


@pytest.mark.parametrize(("change", "says"), [pytest.param(c, s, id=n) for n, c, s in _damaged()])
def test_damaged_json(change: Callable[[dict[str, Any]], Any], says: str) -> None:
    with pytest.raises(HostProgramError) as error:
        from_json(json.dumps(change(json.loads(to_json(SMALL)))))
    assert says in str(error.value)


def test_no_json() -> None:
    with pytest.raises(HostProgramError, match="no JSON"):
        from_json("{")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        json.dumps({"version": 1, "is": "HostProgram", "parameters": ["x"]})[:-1]
        + ', "instructions": [{"is": "Check", "message": "", "condition": {"is": "Formula", "source": "'
        + "1+" * 20_000
        + '1"}}]}',
    ],
    ids=["json", "a formula"],
)
def test_nested_too_deeply(text: str) -> None:
    with pytest.raises(HostProgramError, match="nested too deeply"):
        from_json(text)


def test_a_size_counts_whole_times() -> None:
    text = to_json(SMALL).replace('{"size": [[1, "s0"]]}', '{"size": [[1.5, "s0"]]}')
    with pytest.raises(HostProgramError, match=r"1\.5 is no coefficient"):
        from_json(text)


def test_values_in_json() -> None:
    """What operators take: numbers that JSON does not know, constants of torch, sequences in sequences."""
    values = (1, 1.0, True, None, "a", float("inf"), complex(0, -1), List((1, 2.5)), (sym("s0") // 2 * 3 + 1, (None,)))
    call = LibraryCall(
        "f", "function", (*values, TorchConstant("float32"), TorchConstant("device:cpu")), results=("v",)
    )
    program = HostProgram(("s0",), (call, Return((Tensor("v"),))))
    again = from_json(to_json(program))
    assert again == program
    kinds = [type(v) for v in again.instructions[0].arguments]  # type: ignore[union-attr]
    assert kinds == [type(v) for v in call.arguments]
    line = "    v, = f(1, 1.0, True, None, 'a', float('inf'), complex(0.0, -1.0), [1, 2.5], "
    assert f"{line}(3*((s0) // (2)) + 1, (None,)), torch.float32, torch.device('cpu'))\n" in python_source(again)


def test_each_call_is_a_step_of_the_plan(made: list[tuple[HostProgram, Any, Any]], tmp_path: Path) -> None:
    """A program that calls something else, in another order or with other memory is not the plan's."""
    fn, inputs = PROGRAMS["attention"]()
    torch.compile(fn, backend="opforge", options={"cache_dir": str(tmp_path)})(*inputs)
    program, plan, groups = made[0]
    body = program.instructions
    launches = [k for k, x in enumerate(body) if isinstance(x, LaunchKernel)]
    calls = [k for k, x in enumerate(body) if isinstance(x, (LaunchKernel, LibraryCall))]
    kernel = body[launches[0]]
    assert isinstance(kernel, LaunchKernel)
    turned = replace(kernel, arguments=kernel.arguments[::-1])
    swapped = list(body)
    swapped[calls[0]], swapped[calls[1]] = swapped[calls[1]], swapped[calls[0]]
    for instructions, says in (
        (body[: calls[0]] + body[calls[0] + 1 :], "calls for"),
        ((*body[: launches[0]], turned, *body[launches[0] + 1 :]), "its buffers are at"),
        (tuple(swapped), "it is another call"),
        ((*body, Copy("arg0", Tensor("arg1"), input=True)), "calls for"),
    ):
        with pytest.raises(HostProgramError) as error:
            follows(replace(program, instructions=instructions), plan, OUT, groups)
        assert says in str(error.value)
