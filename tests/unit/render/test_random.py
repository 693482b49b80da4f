"""The `philox` scalar and the seeded operators in every loop shape: the numbers of the reference, at every lane count and in Triton (A8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from opforge.errors import IRError
from opforge.generated import ops
from opforge.runtime.ir.index import var
from opforge.runtime.ir.nodes import Buffer, Nest, Node, Output, Program, const, index_node, load
from opforge.runtime.ir.text import dump
from opforge.runtime.ir.verify import verify
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.philox import philox
from tests.support.ir_text import parse
from tests.support.loops import agree, permute, plan_of, pointwise, program_of, reduce, run
from tests.support.triton_run import compile_sm90, job_of, launch_interpreted, results

SEED = torch.tensor([-1234567890123456789])
LOW = torch.tensor(0xFFFFFFFF)


def draw(op: str, *args: Any, dtype: str) -> Callable[..., Any]:
    """A lowering of a seeded operator, over the seed that is the first input."""
    lowering = ops.LOWERINGS[f"opforge.{op}.default"]
    return lambda b, seed: lowering(b, seed, *args, dtype=dtype)


def test_known_answers() -> None:
    """Random123's known answers, and the counter's upper words."""

    def words(seed: int, stream: int, block: int) -> list[int]:
        index = torch.arange(4) + 4 * block
        return (philox(torch.tensor(seed), torch.tensor(stream), index).long() & LOW).tolist()

    assert words(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    # key a4093822 299f31d0, of a block whose upper bits an index can say
    assert words(0x299F31D0A4093822, 0x0370734413198A2E, 0x05A308D3243F6A88) != words(0, 0, 0)


def words_by_hand(key: tuple[int, int], counter: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers, as the paper has it."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p, q = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (q >> 32) ^ c1 ^ k0, q & 0xFFFFFFFF, (p >> 32) ^ c3 ^ k1, p & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def test_reference_is_the_paper() -> None:
    assert words_by_hand((0, 0), [0, 0, 0, 0]) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert words_by_hand((ones, ones), [ones] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert words_by_hand((0xA4093822, 0x299F31D0), pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    seed, stream, block = 0x299F31D0A4093822, 0x0370734413198A2E, 0x05A308D3243F6A88
    index = torch.arange(4) + 4 * block
    found = (philox(torch.tensor(seed), torch.tensor(stream), index).long() & LOW).tolist()
    assert found == words_by_hand((0xA4093822, 0x299F31D0), [0x243F6A88, 0x05A308D3, 0x13198A2E, 0x03707344])


CASES: dict[str, Callable[..., Any]] = {
    "flat": draw("philox_uniform", 0, [999], 0.0, 1.0, dtype="float32"),
    "rows of odd length": draw("philox_uniform", 2, [9, 33], 0.0, 1.0, dtype="float32"),
    "short rows": draw("philox_uniform", 3, [50, 3], 0.0, 1.0, dtype="float32"),
    "float64": draw("philox_uniform", 1, [7, 41], 0.0, 1.0, dtype="float64"),
    "bfloat16": draw("philox_uniform", 1, [7, 41], 0.0, 1.0, dtype="bfloat16"),
    "float16": draw("philox_uniform", 1, [7, 41], 0.0, 1.0, dtype="float16"),
    "scaled": draw("philox_uniform", 1, [7, 40], -3.0, 5.0, dtype="float32"),
    "integers": draw("philox_integers", 1, [7, 41], -3, 1000, dtype="int64"),
    "many integers": draw("philox_integers", 1, [7, 41], -(2**63), 2**62, dtype="int64"),
    "small integers": draw("philox_integers", 1, [7, 41], -3, 100, dtype="int8"),
    "one": draw("philox_uniform", 1, [], 0.0, 1.0, dtype="float32"),
    "nothing": draw("philox_uniform", 1, [0, 4], 0.0, 1.0, dtype="float32"),
    "transposed": lambda b, seed: permute(b, draw("philox_uniform", 1, [37, 21], 0.0, 1.0, dtype="float32")(b, seed), [1, 0]),
    "sum of rows": lambda b, seed: reduce(b, "sum", draw("philox_integers", 1, [9, 133], 0, 9, dtype="int64")(b, seed), 1),
    "sum of columns": lambda b, seed: reduce(b, "sum", draw("philox_integers", 1, [133, 19], 0, 9, dtype="int64")(b, seed), 0),
    "maximum of columns": lambda b, seed: reduce(b, "max", draw("philox_uniform", 1, [133, 19], 0.0, 1.0, dtype="float32")(b, seed), 0),
    "two streams": lambda b, seed: pointwise(
        b, s.sub, *(draw("philox_uniform", k, [8, 40], 0.0, 1.0, dtype="float32")(b, seed) for k in (0, 1))
    ),
}  # fmt: skip
NORMAL: dict[str, Callable[..., Any]] = {
    "normal": draw("philox_normal", 0, [31, 33], 0.0, 1.0, dtype="float32"),
    "normal float64": draw("philox_normal", 0, [31, 33], 1.0, 2.0, dtype="float64"),
    "normal bfloat16": draw("philox_normal", 0, [31, 33], 0.0, 1.0, dtype="bfloat16"),
}


@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_equal_at_every_lane_count(name: str, lanes: int) -> None:
    ran = run(CASES[name], [SEED], lanes=lanes, threshold=100)
    for got, expected in zip(ran.got, ran.eager, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("name", NORMAL)
def test_normal_numbers(name: str, lanes: int) -> None:
    agree(run(NORMAL[name], [SEED], lanes=lanes))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, tuple[Any, Any]]:
    pytest.importorskip("triton")
    from tests.support.ir_interpreter import interpret

    plans = {}
    for name, build in {**CASES, **NORMAL}.items():
        program = program_of(build, [SEED])
        plans[name] = (program, plan_of(program))
    memories = launch_interpreted([job_of(plan, [SEED]) for _, plan in plans.values()])
    return {
        name: (results(plan, memory), interpret(program, [SEED]))
        for (name, (program, plan)), memory in zip(plans.items(), memories, strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_triton_has_the_same_numbers(interpreted: dict[str, tuple[Any, Any]], name: str) -> None:
    for got, expected in zip(*interpreted[name], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", NORMAL)
def test_triton_normal_numbers(interpreted: dict[str, tuple[Any, Any]], name: str) -> None:
    for got, expected in zip(*interpreted[name], strict=True):
        unit = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, expected, rtol=8 * unit, atol=8 * unit)


@pytest.mark.parametrize("name", ["flat", "float64", "integers", "sum of rows", "normal"])
def test_compiles_for_sm90(name: str) -> None:
    pytest.importorskip("triton")
    plan = plan_of(program_of({**CASES, **NORMAL}[name], [SEED]))
    for k in plan.kernels():
        assert compile_sm90(k, plan.layouts)[:4] == b"\x7fELF"


def program(value: Node) -> Program:
    nest = Nest("y", (8,), value.dtype, (var("i0", 8),), value)
    return Program((Buffer("seed", (1,), "int64", (1,)),), [nest], (Output("y", (1,)),))


def test_text_and_verifier() -> None:
    seed, k = load("seed", (0,), "int64"), index_node(var("i0", 8))
    good = program(Node("philox", (seed, const(3, "int64"), k), "int32"))
    verify(good)
    text = dump(good)
    assert "philox(seed[0], 3, i0)" in text.replace(":int64", "").replace("[i0]", "i0")
    assert parse(text) == good
    with pytest.raises(IRError, match="'philox' gives int32 here, not int64"):
        verify(program(Node("philox", (seed, const(3, "int64"), k), "int64")))
    narrow = const(3, "int32")
    with pytest.raises(IRError, match="argument 0 of 'philox' is int32, not int64"):
        verify(program(Node("philox", (narrow, narrow, narrow), "int32")))
