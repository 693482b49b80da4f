"""The C++ prelude beneath the scalars: memory access, conversions, lanes, reductions, and the cost of including it."""

from __future__ import annotations

import ctypes
import resource
import subprocess
from pathlib import Path

import pytest
import torch

from opforge.generated.languages import CPP_LANGUAGE
from opforge.generated.targets import CPU_TARGETS
from tests.support.scalars import ROOT, edge_values

PRELUDE = ROOT / "generated" / "kernels"
FLAGS = ("-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-I", str(PRELUDE))
TYPES = {d: (s.memory, s.register) for d, s in CPP_LANGUAGE.dtypes.items()}

HEAD = """
#include "prelude.h"
extern "C" int lanes() { return VL; }
extern "C" int64_t chunk(int64_t n, int parts, int me, int64_t step) { return chunk_begin(n, parts, me, step); }
extern "C" void halves(const f16* a, float* o, int64_t n) {
    for (int64_t i = 0; i < n; i += VL) storeu(o + i, loadu(a + i));
}
extern "C" void halves_one(const f16* a, float* o, int64_t n) { for (int64_t i = 0; i < n; ++i) o[i] = to_float(a[i]); }
"""
# Per memory type M with register R, over arrays that a test fills.
EACH = """
extern "C" void copy_{d}(const {M}* a, {M}* o, int n) {{ storeu(o, loadu(a, n), n); }}
extern "C" void whole_{d}(const {M}* a, {M}* o, int n) {{ (void)n; storeu(o, loadu(a, 1)); storeu(o, loadu(a)); }}
extern "C" void strided_{d}(const {M}* a, {M}* o, int64_t stride, int n) {{
    storeu(o, load_strided(a, stride, n));
}}
extern "C" void gather_{d}(const {M}* a, const int64_t* at, const bool8* live, {M}* o) {{
    storeu(o, gather(a, loadu(at), loadu(live)));
}}
extern "C" void scatter_{d}({M}* o, const int64_t* at, const bool8* live, const {M}* a) {{
    scatter(o, loadu(at), loadu(a), loadu(live));
}}
extern "C" void splat_{d}(const {M}* a, {M}* o) {{ storeu(o, splat<{M}>(cast<{R}>(a[0]))); }}
extern "C" void best_{d}(const {M}* a, int64_t n, int64_t* o) {{
    auto hi = splat<{R}>(lowest_of<{R}>()), lo = splat<{R}>(highest_of<{R}>());
    auto hi_at = splat<int64_t>(0), lo_at = splat<int64_t>(0);
    auto hi_any = no_lanes(), lo_any = no_lanes();
    {R} hi1 = lowest_of<{R}>(); int64_t hi1_at = 0; bool hi1_any = false;
    for (int64_t i = 0; i < n; i += VL) {{
        const int live = n - i < VL ? int(n - i) : VL;
        const auto x = loadu(a + i, live);
        const auto at = splat<int64_t>(i) + iota<int64_t>();
        accumulate_arg<true>(hi, hi_at, hi_any, x, at, lane_mask(live));
        accumulate_arg<false>(lo, lo_at, lo_any, x, at, lane_mask(live));
    }}
    for (int64_t i = 0; i < n; ++i) accumulate_arg<true>(hi1, hi1_at, hi1_any, cast<{R}>(a[i]), i, true);
    o[0] = horizontal_arg<true>(hi, hi_at, hi_any); o[1] = horizontal_arg<false>(lo, lo_at, lo_any); o[2] = hi1_at;
}}
"""
REDUCE = """
extern "C" void reduce_{d}(const {M}* a, {R}* o) {{
    const auto x = loadu(a);
    o[0] = hmax(x); o[1] = hmin(x);
}}
"""
SUMS = """
extern "C" void sums_{d}(const {M}* a, {R}* o) {{ const auto x = loadu(a); o[0] = hsum(x); o[1] = hprod(x); }}
"""
DIVIDE = """
extern "C" void divide_{d}(const {M}* a, const {M}* b, {M}* o) {{
    storeu(o, v_floordiv(loadu(a), loadu(b))); storeu(o + VL, v_truncdiv(loadu(a), loadu(b)));
    storeu(o + 2 * VL, v_remainder(loadu(a), loadu(b))); storeu(o + 3 * VL, v_fmod(loadu(a), loadu(b)));
}}
"""
CAST = """
extern "C" void cast_{d}_{e}(const {M}* a, {N}* o) {{ storeu(o, convert<{N}>(loadu(a))); }}
"""


def source() -> str:
    """All test kernels."""
    out = [HEAD]
    for d, (memory, register) in TYPES.items():
        names = {"d": d, "M": memory, "R": register}
        out.append(EACH.format(**names))
        out.append(REDUCE.format(**names))
        if d != "bool":
            out.append(SUMS.format(**names))
        if "int" in d:
            out.append(DIVIDE.format(**names))
        out += [CAST.format(**names, e=e, N=TYPES[e][0]) for e in TYPES]
    return "".join(out)


@pytest.fixture(scope="module", params=["native", "portable"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels for this machine, and as portable code."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "t.cpp").write_text(source())
    extra = ["-DOPFORGE_SCALAR"] if request.param == "portable" else []
    command = [
        "g++",
        "-O2",
        "-march=native",
        *FLAGS,
        *extra,
        "-shared",
        str(folder / "t.cpp"),
        "-o",
        str(folder / "t.so"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "t.so"))


def call(library: ctypes.CDLL, name: str, *args: torch.Tensor | int) -> None:
    """Call a kernel with pointers and 64-bit integers."""
    getattr(library, name)(
        *(ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int64(a) for a in args)
    )


def values(dtype: str, n: int, seed: int = 0) -> torch.Tensor:
    """Random values and edge values of a dtype, without NaN."""
    edges = edge_values(dtype)
    if edges.is_floating_point():
        edges = edges[~edges.isnan()]
    order = torch.randperm(max(n, len(edges)), generator=torch.Generator().manual_seed(seed)) % len(edges)
    return edges[order][:n].clone()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in bits, but for the payload of NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", TYPES)
def test_partial_access_touches_nothing_else(library: ctypes.CDLL, dtype: str) -> None:
    vl = library.lanes()
    for n in range(1, vl + 1):
        a, guard = values(dtype, vl, n), values(dtype, vl, n + 50)
        out = guard.clone()
        call(library, f"copy_{dtype}", a, out, n)
        assert torch.equal(out[:n], a[:n])
        assert torch.equal(out[n:], guard[n:])
    out = torch.zeros_like(a)
    call(library, f"whole_{dtype}", a, out, vl)
    assert torch.equal(out, a)
    call(library, f"splat_{dtype}", a, out)
    assert torch.equal(out, a[:1].expand(vl))


@pytest.mark.parametrize("dtype", TYPES)
def test_strided_gather_scatter(library: ctypes.CDLL, dtype: str) -> None:
    vl = library.lanes()
    a = values(dtype, 5 * vl)
    for stride in (-3, 0, 2, 5):
        base = a[3 * vl :] if stride < 0 else a
        for n in (1, vl - 1, vl):
            out = torch.ones(vl, dtype=a.dtype)
            call(library, f"strided_{dtype}", base, out, stride, n)
            index = torch.arange(n) * stride + (3 * vl if stride < 0 else 0)
            assert torch.equal(out[:n], a[index])
            assert not out[n:].any()
    at = torch.randint(0, 5 * vl, (vl,), generator=torch.Generator().manual_seed(1))
    live = torch.arange(vl) % 3 != 1
    wild = torch.where(live, at, 2**60)  # a dead lane's address is never used
    out = torch.empty(vl, dtype=a.dtype)
    call(library, f"gather_{dtype}", a, wild, live, out)
    assert torch.equal(out, torch.where(live, a[at], torch.zeros_like(a[at])))
    target, expected = values(dtype, 5 * vl, 3), values(dtype, 5 * vl, 3)
    for lane in range(vl):
        if live[lane]:
            expected[at[lane]] = out[lane]
    call(library, f"scatter_{dtype}", target, wild, live, out)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_best_position_is_the_first(library: ctypes.CDLL, dtype: str) -> None:
    for n in (1, 3, 17, 64, 101):
        for seed in range(4):
            a = values(dtype, n, seed)
            if a.is_floating_point() and seed == 3 and n > 3:
                a[[n // 2, n - 1]] = float("nan")
            out = torch.zeros(3, dtype=torch.int64)
            call(library, f"best_{dtype}", a, n, out)
            b = a.to(torch.uint8) if dtype == "bool" else a
            nan = b.isnan() if b.is_floating_point() else torch.zeros(n, dtype=torch.bool)
            high = nan.nonzero()[0] if nan.any() else (b == b.max()).nonzero()[0]
            low = nan.nonzero()[0] if nan.any() else (b == b.min()).nonzero()[0]
            assert out.tolist() == [high.item(), low.item(), high.item()], (n, seed)


@pytest.mark.parametrize("dtype", TYPES)
def test_reductions_over_lanes(library: ctypes.CDLL, dtype: str) -> None:
    vl = library.lanes()
    wide = getattr(torch, {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype))
    for seed in range(5):
        a = values(dtype, vl, seed)
        out = torch.empty(2, dtype=wide)
        call(library, f"reduce_{dtype}", a, out)
        assert out.tolist() == [a.to(wide).max().item(), a.to(wide).min().item()]
        if a.is_floating_point():
            a[seed % vl] = float("nan")
            call(library, f"reduce_{dtype}", a, out)
            assert out.isnan().all()
            a = (torch.arange(vl) + 1 + seed).to(a.dtype) / 2
        if dtype != "bool":
            call(library, f"sums_{dtype}", a, out)
            assert out[0] == a.to(wide).sum().to(wide)
            assert torch.allclose(out[1], a.to(wide).prod().to(wide), rtol=1e-6)


@pytest.mark.parametrize("dtype", [d for d in TYPES if "int" in d])
def test_integer_division_never_traps(library: ctypes.CDLL, dtype: str) -> None:
    vl = library.lanes()
    info = torch.iinfo(getattr(torch, dtype))
    low, minus = info.min, -1 if info.min else info.max
    a = torch.tensor([low, info.max, 7, 0] * (vl // 4), dtype=getattr(torch, dtype))
    b = torch.tensor([minus, 0, 0, 0] * (vl // 4), dtype=a.dtype)
    out = torch.full((4 * vl,), 5, dtype=a.dtype)
    call(library, f"divide_{dtype}", a, b, out)
    quotient, remainder = (low, 0) if info.min else (0, 0)
    assert out.view(4, vl)[:, 0].tolist() == [quotient, quotient, remainder, remainder]
    assert not out.view(4, vl)[:, 1:4].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_casts_of_every_pair(library: ctypes.CDLL, dtype: str) -> None:
    vl = library.lanes()
    for other in TYPES:
        target = getattr(torch, other)
        a = values(dtype, vl, 2)
        if a.is_floating_point() and "int" in other:
            a = a.nan_to_num(0, 100, -100).clamp(0 if other == "uint8" else -100, 100)
        out = torch.empty(vl, dtype=target)
        call(library, f"cast_{dtype}_{other}", a, out)
        assert same(out, a.to(target)), (other, a, out, a.to(target))


def test_every_float16_and_every_rounding(library: ctypes.CDLL) -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for name in ("halves", "halves_one"):
        out = torch.empty(65536)
        call(library, name, bits, out, 65536)
        assert same(out, bits.view(torch.float16).float())
    vl = library.lanes()
    # Halfway cases and their neighbours, subnormal results, overflow.
    floats = torch.cat([bits.view(d).float() for d in (torch.float16, torch.bfloat16)])
    patterns = floats.view(torch.int32).unsqueeze(1) + torch.tensor(
        [0, 1, -1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x18000]
    )
    everything = patterns.flatten().view(torch.float32)
    some = everything[torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))[: 2000 * vl]]
    for other in ("float16", "bfloat16"):
        out = torch.empty(len(some), dtype=getattr(torch, other))
        for i in range(0, len(some), vl):
            call(library, f"cast_float32_{other}", some[i : i + vl], out[i : i + vl])
        assert same(out, some.to(out.dtype))


def test_chunks_cover_everything_once(library: ctypes.CDLL) -> None:
    library.chunk.restype = ctypes.c_int64
    for n in (0, 1, 7, 64, 1000):
        for parts in (1, 2, 3, 16):
            for step in (1, 8):
                ends = [library.chunk(ctypes.c_int64(n), parts, me, ctypes.c_int64(step)) for me in range(parts + 1)]
                assert ends[0] == 0
                assert ends[-1] == n
                assert ends == sorted(ends)
                assert all(e % step == 0 for e in ends[:-1] if e < n)


def _time_to_include(folder: Path) -> float:
    """CPU seconds, the least of a few: other work on the machine only adds to it."""
    (folder / "empty.cpp").write_text('#include "prelude.h"\n')
    best = 9.0
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            ["g++", "-O3", "-march=native", *FLAGS, "-c", str(folder / "empty.cpp"), "-o", str(folder / "empty.o")],
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def test_inclusion_is_cheap(tmp_path: Path) -> None:
    # 0.15 s on the 2 cores that this was written on; torch's headers take more than 4 s.
    assert _time_to_include(tmp_path) < 0.6


@pytest.mark.parametrize("target", [t.name for t in CPU_TARGETS.values() if t.name != "neon"])
def test_compiles_for_every_target_of_this_architecture(target: str, tmp_path: Path) -> None:
    kernel = 'extern "C" void k(const bf16* a, const double* b, float* o) { storeu(o, v_pow(v_erf(loadu(a)), '
    kernel += "cast<float>(loadu(b)))); }"
    (tmp_path / "t.cpp").write_text(
        f'#include "prelude.h"\nstatic_assert(VL == {CPU_TARGETS[target].lanes});\n{kernel}\n'
    )
    command = [
        "g++",
        "-O1",
        *CPU_TARGETS[target].flags,
        *FLAGS,
        "-c",
        str(tmp_path / "t.cpp"),
        "-o",
        str(tmp_path / "t.o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
