"""What a Triton kernel writes to, read off its source."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import tma

from opforge.errors import UnsupportedError
from opforge.runtime.dispatch.user_kernels.writes import writes_of


@triton.jit
def put(p, at, value):  # type: ignore[no-untyped-def]
    tl.store(p + at, value)


@triton.jit
def moved(p, n):  # type: ignore[no-untyped-def]
    return p + n


@triton.jit
def total(a, b):  # type: ignore[no-untyped-def]
    return a + b


@triton.jit
def copies(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def by_a_helper(x, y, out, n):  # type: ignore[no-untyped-def]
    p = moved(y, n)
    for i in range(3):
        put(p, i, tl.load(x + i))
    tl.atomic_add(out, tl.load(x).to(out.dtype.element_ty))


@triton.jit
def later(x, out, n):  # type: ignore[no-untyped-def]
    p = x
    for i in range(n):
        q = p + i
        tl.store(q, 1.0)  # in the second round
        p = out


@triton.jit
def blocks(x, out, n):  # type: ignore[no-untyped-def]
    source = tl.make_block_ptr(x, (n,), (1,), (0,), (16,), (0,))
    target = tl.advance(tl.make_block_ptr(out, (n,), (1,), (0,), (16,), (0,)), (16,))
    value = tl.load(source, boundary_check=(0,))
    tl.store(target, tl.cumsum(tl.max(value, 0) + value, 0), boundary_check=(0,))


@triton.jit
def descriptors(x, out):  # type: ignore[no-untyped-def]
    out.store([0], x.load([0]) * 2)


@triton.jit
def pairs(x, y, n):  # type: ignore[no-untyped-def]
    a, b = x, y
    if n > 3:
        a, b = y, x
    tl.store(a, tl.load(b))


@triton.jit
def chosen(x, y, out, n):  # type: ignore[no-untyped-def]
    tl.store(tl.where(n > 3, x, y), tl.load(out))


@triton.jit
def activated(x, out, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out, ACT(tl.load(x), 1))


@triton.jit
def handed_on(x, out, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    ACT(out, tl.load(x))


@triton.jit
def scanned(x, out):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, 16), tl.associative_scan(tl.load(x + tl.arange(0, 16)), 0, total))


@triton.jit
def told(x, out):  # type: ignore[no-untyped-def]
    tl.device_print("x", tl.load(x))


@triton.jit
def in_assembly(x, out):  # type: ignore[no-untyped-def]
    tl.inline_asm_elementwise("st.global [$1], 0;", "=r,l", [out], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def from_memory(table):  # type: ignore[no-untyped-def]
    tl.store(tl.load(table).to(tl.pointer_type(tl.float32)), 1.0)


@triton.jit
def put_and_add(a, b):  # type: ignore[no-untyped-def]
    tl.store(a, 1.0)
    return a + b


@triton.jit
def scanned_by_name(x, out):  # type: ignore[no-untyped-def]
    tl.associative_scan(out + tl.arange(0, 16), axis=0, combine_fn=put_and_add)


@triton.jit
def set_again(x, out, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACT is total:
        ACT = put
    ACT(out, tl.load(x))


@tl.core._aggregate
class Box:
    p: tl.tensor

    def __init__(self, p):  # type: ignore[no-untyped-def]
        self.p = p

    @triton.jit
    def fill(self, value):  # type: ignore[no-untyped-def]
        tl.store(self.p, value)


@triton.jit
def boxed(x, out):  # type: ignore[no-untyped-def]
    Box(out).fill(tl.load(x))


@triton.jit
def by_an_object_without_pointers(x, out):  # type: ignore[no-untyped-def]
    box = Box(3)
    box.fill(tl.load(x), out)


@triton.jit
def handed_in(x, out):  # type: ignore[no-untyped-def]
    x.fill(tl.load(out))


@triton.jit
def copied(x, out):  # type: ignore[no-untyped-def]
    tma.async_copy_shared_to_global(out, [0, 0], tl.load(x))


class Pair(NamedTuple):
    a: Any
    b: Any


@triton.jit
def paired(x, out):  # type: ignore[no-untyped-def]
    both = Pair(x, x + 1)
    tl.store(out, tl.load(both.a) + tl.load(both[1]))


CASES: list[tuple[Any, str, str, dict[str, Any]]] = [
    (copies, "x out", "out", {}),
    (by_a_helper, "x y out", "y out", {}),
    (later, "x out", "x out", {}),
    (blocks, "x out", "out", {}),
    (descriptors, "x out", "out", {}),
    (pairs, "x y", "x y", {}),
    (chosen, "x y out", "x y", {}),
    (activated, "x out", "out", {"ACT": total}),
    (handed_on, "x out", "out", {"ACT": put}),
    (handed_on, "x out", "", {"ACT": total}),
    (scanned, "x out", "out", {}),
    (told, "x out", "", {}),
    (in_assembly, "x out", "out", {}),
    (scanned_by_name, "x out", "out", {}),
    (set_again, "x out", "out", {"ACT": total}),
    (boxed, "x out", "out", {}),
    (by_an_object_without_pointers, "x out", "out", {}),
    (handed_in, "x out", "x", {}),
    (copied, "x out", "out", {}),
    (paired, "x out", "out", {}),
]


@pytest.mark.parametrize(
    ("kernel", "pointers", "written", "constants"), CASES, ids=lambda v: getattr(v, "__name__", None)
)
def test_written(kernel: Any, pointers: str, written: str, constants: dict[str, Any]) -> None:
    assert writes_of(kernel, pointers.split(), constants).names == set(written.split())


def test_effects() -> None:
    effects = {k.__name__: writes_of(k, p.split(), c).effect for k, p, _, c in CASES}
    assert {name for name, effect in effects.items() if effect} == {
        *("told", "in_assembly"),
        *("set_again", "boxed", "by_an_object_without_pointers", "handed_in"),
    }


def test_an_autotuned_kernel_also_writes_what_it_puts_back() -> None:
    tuned = triton.autotune([triton.Config({"BLOCK": 16})], key=["n"], reset_to_zero=["x"])(copies)
    assert writes_of(tuned, ["x", "out"], {}).names == {"x", "out"}


def test_a_kernel_without_source_writes_to_everything() -> None:
    class Unknown:
        fn = staticmethod(eval("lambda x, out: None"))

    found = writes_of(Unknown(), ["x", "out"], {})
    assert (found.names, found.effect) == ({"x", "out"}, True)


def test_an_address_from_memory_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="from_memory writes to an address that none of its arguments is"):
        writes_of(from_memory, ["table"], {})
