"""Conformance of every scalar on a target with torch: inputs, kernels for all scalars and dtypes, and the judgement.

A float32 result may be off from torch's float64 result by the scalar's declared `ulp`, or by twice what torch's own
float32 result is off.
Integers, booleans and conversions must be equal. So must the sign of a zero be.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mpmath
import torch

from opforge.generated.complex_scalars import COMPLEX
from opforge.generated.cpp_scalars import CPP, CPP_KIND
from opforge.generated.languages import CPP_LANGUAGE, TRITON_LANGUAGE
from opforge.generated.scalars import SCALARS, Scalar
from opforge.generated.triton_scalars import TRITON, TRITON_KIND
from opforge.runtime.philox import philox

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"float": ("float32", "float64"), "int": ("uint8", "int8", "int16", "int32", "int64"), "bool": ("bool",)}
CLASSES = {"number": ("float", "int"), "integral": ("int", "bool"), "any": ("float", "int", "bool")}
DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")
NULL_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "fma": lambda a, b, c: (a.double() * b.double() + c.double()).to(a.dtype),
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "philox": philox,
    "trigamma": lambda x: torch.polygamma(1, x),
}
EXACT: dict[str, Callable[..., mpmath.mpf]] = {
    "digamma": mpmath.digamma,
    "lgamma": lambda x: mpmath.log(abs(mpmath.gamma(x))),
    "i0": lambda x: mpmath.besseli(0, x),
    "i0e": lambda x: mpmath.besseli(0, x) * mpmath.exp(-abs(x)),
    "i1": lambda x: mpmath.besseli(1, x),
    "i1e": lambda x: mpmath.besseli(1, x) * mpmath.exp(-abs(x)),
    "log_ndtr": lambda x: mpmath.log(mpmath.ncdf(x)),
    "ndtri": lambda p: mpmath.sqrt(2) * mpmath.erfinv(2 * p - 1),
    "erfcx": lambda x: mpmath.exp(x * x) * mpmath.erfc(x),
    "j0": lambda x: mpmath.besselj(0, x),
    "j1": lambda x: mpmath.besselj(1, x),
    "y0": lambda x: mpmath.bessely(0, x),
    "k0": lambda x: mpmath.besselk(0, x),
    "k1": lambda x: mpmath.besselk(1, x),
    "k0e": lambda x: mpmath.besselk(0, x) * mpmath.exp(x),
    "k1e": lambda x: mpmath.besselk(1, x) * mpmath.exp(x),
    "trigamma": lambda x: mpmath.psi(1, x),
    "zeta": lambda x, q: mpmath.zeta(x, q),
}
RANDOM = 997  # odd: the last vector is a partial one


@dataclass(frozen=True)
class Case:
    """One scalar at given dtypes: `key` names its kernels."""

    scalar: Scalar
    args: tuple[str, ...]
    result: str

    @property
    def key(self) -> str:
        return "_".join((self.scalar.name, *self.args, "to", self.result))

    @property
    def kind(self) -> str:
        return next(k for k, ds in KINDS.items() if self.args[0] in ds)

    def inputs(self) -> list[torch.Tensor]:
        """Edge values of all arguments against each other, then random values."""
        edges = [edge_values(d) for d in self.args]
        grids = torch.meshgrid(*edges, indexing="ij") if len(edges) < 3 else [e.repeat(102)[:203] for e in edges]
        generator = torch.Generator().manual_seed(sum(self.key.encode()))
        random = [_random(d, self.scalar.domain, generator) for d in self.args]
        out = [torch.cat([g.flatten(), r]) for g, r in zip(grids, random, strict=True)]
        if self.scalar.name in DIVISIONS and self.kind == "int":
            # torch raises for 0 and the machine traps for lowest / -1: `test_prelude` has those.
            out[1] = torch.where(
                (out[1] == 0) | (out[1] == -1 if out[1].dtype != torch.uint8 else False),
                torch.full_like(out[1], 3),
                out[1],
            )
        if self.scalar.name in DIVISIONS and self.kind == "float":
            # torch's remainder is NaN where the quotient overflows, which is nobody's definition.
            out[1] = torch.where(
                out[0].isfinite() & (out[0] / out[1]).isinf() & (out[1] != 0), torch.full_like(out[1], 3), out[1]
            )
        if self.scalar.name == "to_dtype" and self.kind == "float" and self.result in KINDS["int"]:
            low, high = (0, 127) if self.result == "uint8" else (-128, 127)
            out[0] = out[0].nan_to_num(0, high, low).clamp(low, high)
        return out

    def reference(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """torch's result on `inputs`."""
        name = self.scalar.torch
        target = getattr(torch, self.result)
        if self.scalar.name == "to_dtype":
            return inputs[0].to(target)
        if self.scalar.name == "bitcast":
            return inputs[0].view(target)
        if name is None:
            return NULL_TORCH[self.scalar.name](*inputs)
        function: object = torch
        for part in name.split(".")[1:]:
            function = getattr(function, part)
        assert callable(function)
        return function(*inputs)


def edge_values(dtype: str) -> torch.Tensor:
    """Values at which implementations differ."""
    target: torch.dtype = getattr(torch, dtype)
    if dtype == "bool":
        return torch.tensor([False, True])
    if target.is_floating_point:
        f = torch.finfo(target)
        values = [
            0.0,
            f.smallest_normal * f.eps,
            f.smallest_normal,
            1e-5,
            0.5,
            1 - f.eps / 2,
            1.0,
            1 + f.eps,
            1.5,
            2.0,
            2.5,
            3.0,
            7.25,
            88.8,
            127.5,
        ]
        values += [1e5, 3e9, f.max, math.inf]
        return torch.tensor([*values, *(-v for v in values), math.nan], dtype=target)
    i = torch.iinfo(target)
    values = [v for v in (0, 1, 2, 3, 7, 8, 63, i.max - 1, i.max, -1, -2, -7, i.min, i.min + 1) if i.min <= v <= i.max]
    return torch.tensor(values, dtype=target)


def _random(dtype: str, domain: tuple[float, float], generator: torch.Generator) -> torch.Tensor:
    target: torch.dtype = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(RANDOM, generator=generator) < 0.5
    if target.is_floating_point:
        return torch.rand(RANDOM, generator=generator, dtype=target) * (domain[1] - domain[0]) + domain[0]
    info = torch.iinfo(target)
    low, high = max(info.min, int(domain[0])), min(info.max, int(domain[1]))
    return torch.randint(low, high + 1, (RANDOM,), generator=generator).to(target)


@cache
def cases(name: str) -> tuple[Case, ...]:
    """The scalar at every dtype that it takes."""
    return tuple(_cases(SCALARS[name]))


def _cases(s: Scalar) -> Iterator[Case]:
    # The argument that decides the others' dtype: the last one that is not `same`.
    lead = max(k for k, a in enumerate(s.args) if a != "same")
    for kind in CLASSES.get(s.args[lead], (s.args[lead],)):
        for dtype in KINDS.get(kind, (kind,)):
            args = tuple("bool" if k < lead else dtype for k in range(s.arity))
            if s.result != "attr":
                yield Case(s, args, {"same": args[0], "arg1": args[-1]}.get(s.result, s.result))
                continue
            size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
            for result in CPP_LANGUAGE.dtypes:
                other: torch.dtype = getattr(torch, result)
                if s.name != "bitcast" or (
                    result not in ("bool", "float16", "bfloat16") and torch.empty(0, dtype=other).element_size() == size
                ):
                    yield Case(s, args, result)


def judge(
    case: Case, inputs: list[torch.Tensor], got: torch.Tensor, device: str = "cpu", interpreted: bool = False
) -> None:
    """Raises AssertionError with an element where `got` breaks the contract; `device` is where eager runs. interpreted: a GPU's kernel, elsewhere."""
    expected = case.reference([i.to(device) for i in inputs]).cpu()
    assert got.dtype == expected.dtype, f"{case.key}: {got.dtype}"
    if case.scalar.name == "bitcast" and got.dtype.is_floating_point:
        got, expected = (
            got.view(torch.int64 if got.dtype == torch.float64 else torch.int32),
            expected.view(torch.int64 if got.dtype == torch.float64 else torch.int32),
        )
    both_nan = got.isnan() & expected.isnan()
    exact = (got == expected) | both_nan
    bad = ~exact
    other_zero = (got == 0) & (expected == 0) & (got.signbit() != expected.signbit())
    if case.scalar.zero_sign == "either" and case.kind == "float":
        for i in inputs:
            other_zero = other_zero & ((i != 0) | (i.signbit() != got.signbit()))
    if case.scalar.zero_sign == "device" and interpreted:
        other_zero = torch.zeros_like(other_zero)
    if got.dtype.is_floating_point and (case.scalar.ulp or device == "cuda") and case.kind == "float":
        wide = got.dtype == torch.float32
        true = case.reference([i.double() for i in inputs]) if wide else expected
        unit = ulp(true, got.dtype)
        off = (got.double() - true.double()).abs() / unit
        allowed = torch.maximum(
            (expected.double() - true.double()).abs() / unit * 2, torch.full_like(unit, case.scalar.ulp)
        )
        if not wide:
            # There is no wider reference: torch's own error (1 ulp as documented, some near a zero) stands beside ours.
            allowed = allowed + 1.5 + 16 * torch.finfo(torch.float64).eps / unit
        rounded_up = got.isinf() & (true.abs() >= torch.finfo(got.dtype).max) & (got.sign() == true.sign())
        agrees = (got.isnan() & true.isnan()) | (got.double() == true.to(got.dtype).double()) | rounded_up
        bad = bad & ~agrees & ~(off <= allowed)
        if device == "cuda":
            # Triton links the device library so that it takes subnormal numbers, and what is next to them, as zero.
            for t in (*inputs, true):
                bad = bad & ~((t != 0) & (t.abs() < 2 * torch.finfo(got.dtype).smallest_normal))
        for at in bad.nonzero().flatten().tolist():
            # torch's float64 may itself be off near a pole or a zero: what is in doubt is compared with many digits.
            bad[at] = not _agrees_exactly(
                case.scalar,
                [i[at].item() for i in inputs],
                got[at].item(),
                float(unit[at]) * case.scalar.ulp * (1 if wide else 4),
            )
    bad = bad | other_zero
    if bad.any():
        at = int(bad.nonzero()[0])
        values = ", ".join(repr(i[at].item()) for i in inputs)
        raise AssertionError(
            f"{case.key}({values}) = {got[at].item()!r}, torch gives {expected[at].item()!r}; "
            f"{int(bad.sum())} of {bad.numel()} are off"
        )


def _agrees_exactly(s: Scalar, args: list[float], got: float, allowed: float) -> bool:
    if s.name not in EXACT or not all(map(math.isfinite, (*args, got))):
        return False
    with mpmath.workdps(60):
        return bool(abs(EXACT[s.name](*map(mpmath.mpf, args)) - mpmath.mpf(got)) <= allowed)


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbouring numbers of `dtype` at `x`, in float64."""
    f = torch.finfo(dtype)
    exponent = torch.frexp(x.double().abs().nan_to_num(1.0, f.max).clamp(f.smallest_normal, f.max))[1]
    return torch.ldexp(torch.full_like(x, f.eps / 2, dtype=torch.float64), exponent.double())


# -- what the spec says of a scalar beside its spellings ----------------------------------------------------------------
def check_declared(name: str) -> None:
    """A scalar that is said to be commutative is: torch's function gives the same for exchanged arguments."""
    for case in cases(name) if SCALARS[name].commutative else ():
        first, second, *rest = case.inputs()
        one, other = case.reference([first, second, *rest]), case.reference([second, first, *rest])
        assert bool(((one == other) | ((one != one) & (other != other))).all()), f"{case.key} is not commutative"


class _OfParts:
    """The scalars as functions of tensors, for the complex forms, which call them by name."""

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        function: Any = torch
        for part in str(SCALARS[name].torch).split(".")[1:]:
            function = getattr(function, part)
        return lambda *args: function(
            *(torch.as_tensor(a, dtype=torch.float64) if type(a) is not torch.Tensor else a for a in args)
        )


PARTS = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e-3, 90.0, 709.9, -700.0, 1e200, -1e200, 5e-324)
ODD_PARTS = (math.inf, -math.inf, math.nan)
"""For functions of one number; torch's sums make NaN of an infinite imaginary part, since they multiply by `alpha`."""


def check_complex(name: str) -> None:
    """The complex form of a scalar against torch's function of complex128 numbers, at parts of all signs and magnitudes."""
    scalar = SCALARS[name]
    parts = torch.tensor(PARTS + ODD_PARTS * (scalar.arity == 1), dtype=torch.float64)
    grids = torch.meshgrid(parts, parts, indexing="ij")
    numbers = torch.complex(*(g.flatten() for g in grids))
    count = scalar.arity - (scalar.args[0] == "bool" and scalar.arity == 3)
    numbers_of = [g.flatten() for g in torch.meshgrid(*[numbers] * count, indexing="ij")]
    given: list[Any] = [part for z in numbers_of for part in (z.real, z.imag)]
    if count < scalar.arity:
        condition = torch.arange(numbers_of[0].numel()) % 3 == 0
        given, numbers_of = [condition, condition, *given], [condition, *numbers_of]
    case = Case(scalar, ("complex128",) * scalar.arity, "complex128")
    expected = torch.sgn(numbers_of[0]) if scalar.torch == "torch.sign" else case.reference(numbers_of)
    found = COMPLEX[name](_OfParts(), *given)
    whole = expected.to(torch.complex128)
    magnitude = torch.maximum(whole.real.abs(), whole.imag.abs()).nan_to_num(0, 1e308)
    pairs = zip(found, (expected.real, expected.imag), strict=True) if isinstance(found, tuple) else [(found, expected)]
    for got, wanted in pairs:
        got, wanted = torch.as_tensor(got).double(), wanted.double()
        # A part that others cancel to is as exact as the whole number.
        close = (got - wanted).abs() <= 1e-14 * magnitude + 1e-307
        bad = ~((got == wanted) | (got.isnan() & wanted.isnan()) | close)
        if bad.any():
            at = int(bad.nonzero()[0])
            raise AssertionError(
                f"{name}{tuple(n[at].item() for n in numbers_of)}: {got[at].item()}, torch gives {wanted[at].item()}"
            )


# -- C++ ---------------------------------------------------------------------------------------------------------------
def cpp_source(names: Sequence[str] = ()) -> str:
    """One file with two kernels per case: vectors with a partial one at the end, and single elements (`_one`). No names: all scalars."""
    lines = ['#include "prelude.h"']
    for name in names or SCALARS:
        for case in cases(name):
            memory = [CPP_LANGUAGE.dtypes[d].memory for d in case.args]
            out = CPP_LANGUAGE.dtypes[case.result]
            spelled = CPP_KIND.get((name, case.kind), CPP[name])
            types = {
                "T": out.memory if case.result in ("float16", "bfloat16") else out.register,
                "A": CPP_LANGUAGE.dtypes[case.args[0]].register,
            }
            params = ", ".join(f"const {m}* a{k}" for k, m in enumerate(memory)) + f", {out.memory}* o, int64_t n"
            body, tail = (
                spelled.format(*(f"loadu(a{k} + i{n})" for k in range(len(memory))), **types) for n in ("", ", live")
            )
            one = spelled.format(
                *(f"cast<{CPP_LANGUAGE.dtypes[d].register}>(a{k}[i])" for k, d in enumerate(case.args)), **types
            )
            lines.append(f'extern "C" void {case.key}({params}) {{')
            lines.append(f"    int64_t i = 0;\n    for (; i + VL <= n; i += VL) storeu(o + i, {body});")
            lines.append(f"    const int live = int(n - i);\n    if (live) storeu(o + i, {tail}, live);\n}}")
            lines.append(f'extern "C" void {case.key}_one({params}) {{')
            lines.append(f"    for (int64_t i = 0; i < n; ++i) o[i] = cast<{out.memory}>({out.register}({one}));\n}}")
    return "\n".join(lines) + "\n"


def compile_cpp(folder: Path, flags: tuple[str, ...], compiler: str = "g++", names: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile `cpp_source` with `flags` and load it."""
    source, library = folder / "scalars.cpp", folder / "scalars.so"
    source.write_text(cpp_source(names))
    command = [
        compiler,
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fPIC",
        "-shared",
    ]
    command += [*flags, "-I", str(ROOT / "generated" / "kernels"), str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))


def check_cpp(library: ctypes.CDLL, name: str) -> None:
    """Judge all kernels of one scalar; vectors and single elements must agree bit by bit."""
    for case in cases(name):
        inputs = case.inputs()
        results = []
        for suffix in ("", "_one"):
            out = torch.empty(inputs[0].shape, dtype=getattr(torch, case.result))
            pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*inputs, out)]
            getattr(library, case.key + suffix)(*pointers, ctypes.c_int64(out.numel()))
            results.append(out)
            judge(case, inputs, out)
        vector, single = (r.nan_to_num(0.25) if r.dtype.is_floating_point else r for r in results)
        assert torch.equal(vector, single), f"{case.key}: vectors and single elements differ"
        assert torch.equal(vector.signbit(), single.signbit()), (
            f"{case.key}: vectors and single elements differ in sign"
        )


# -- Triton ------------------------------------------------------------------------------------------------------------
def triton_source(names: Sequence[str] = ()) -> str:
    """A module with one Triton kernel per case, each over one block. No names: all scalars."""
    lines = [
        "import triton",
        "import triton.language as tl",
        "",
        "import opforge.generated.kernels.triton_prelude as tp",
        "",
    ]
    for name in names or SCALARS:
        for case in cases(name):
            arity = len(case.args)
            params = ", ".join([*(f"a{k}" for k in range(arity)), "o", "n", "BLOCK: tl.constexpr"])
            spelled = TRITON_KIND.get((name, case.kind), TRITON[name]).format(
                *(f"x{k}" for k in range(arity)), T=TRITON_LANGUAGE.dtypes[case.result].value
            )
            lines += [
                "",
                "@triton.jit",
                f"def {case.key}({params}):",
                "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
                "    live = at < n",
            ]
            for k, dtype in enumerate(case.args):
                lines.append(
                    f"    x{k} = tl.load(a{k} + at, mask=live, other=1)" + (" != 0" if dtype == "bool" else "")
                )
            lines += [f"    tl.store(o + at, {spelled}, mask=live)", ""]
    return "\n".join(lines)


def run_triton(folder: Path, device: str, names: Sequence[str] = ()) -> Path:
    """Run all kernels in a process of their own (on the CPU: interpreted); returns the file of their results."""
    (folder / "scalar_kernels.py").write_text(triton_source(names))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    results = folder / "results.pt"
    command = [sys.executable, "-m", "tests.support.scalars", device, str(results), *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return results


def check_triton(results: dict[str, torch.Tensor | str], name: str, device: str = "cpu") -> None:
    """Judge all kernels of one scalar."""
    for case in cases(name):
        got = results[case.key]
        assert isinstance(got, torch.Tensor), f"{case.key}: {got}"
        judge(case, case.inputs(), got, device, interpreted=device == "cpu")


def _main(device: str, results: str, *names: str) -> None:
    import importlib

    import numpy as np

    kernels = importlib.import_module("scalar_kernels")
    found: dict[str, torch.Tensor | str] = {}
    with np.errstate(all="ignore"):
        for name in names or SCALARS:
            for case in cases(name):
                inputs = [t.to(device) for t in case.inputs()]
                out = torch.empty(inputs[0].shape, dtype=getattr(torch, case.result), device=device)
                try:
                    getattr(kernels, case.key)[((out.numel() + 1023) // 1024,)](*inputs, out, out.numel(), BLOCK=1024)
                    found[case.key] = out.cpu()
                except Exception as error:  # noqa: BLE001 - reported by the test of this scalar
                    found[case.key] = f"{type(error).__name__}: {str(error)[-600:]}"
    torch.save(found, results)


if __name__ == "__main__":
    _main(*sys.argv[1:])
