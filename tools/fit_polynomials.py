"""Fits the polynomials of the C++ and Triton preludes and writes them to specs/polynomials.yaml.

Run as `python tools/fit_polynomials.py` (about a minute). Each fit is a minimax approximation by weighted least squares
whose weights grow where the error is great (C. Lawson, 1961), in 40-digit arithmetic. Coefficients are rounded to the
element type one by one, from the lowest degree up, and the rest is fitted again to take up what the rounding left. The
error written beside each fit is that of the rounded polynomial evaluated exactly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mpmath as mp
import numpy as np

mp.mp.dps = 40
Real = Callable[[mp.mpf], mp.mpf]
GRID = 160
ROUNDS = 12
OUTPUT = Path(__file__).resolve().parent.parent / "specs" / "polynomials.yaml"


@dataclass(frozen=True)
class Fit:
    """A polynomial in `x` over [lo, hi] that approximates `f`; `weight` says how much an error counts."""

    name: str
    doc: str
    f: Real
    weight: Real
    lo: float
    hi: float
    degree: int
    bits: int = 32


def _round(value: mp.mpf, bits: int) -> float:
    return float(np.float32(float(value))) if bits == 32 else float(value)


def _minimax(xs: Sequence[mp.mpf], ys: Sequence[mp.mpf], ws: Sequence[mp.mpf], powers: Sequence[int]) -> list[mp.mpf]:
    """Coefficients of `powers` with nearly the least greatest |w (y - p)| over the grid."""
    basis = [[w * x**p for p in powers] for x, w in zip(xs, ws, strict=True)]
    goal = [w * y for y, w in zip(ys, ws, strict=True)]
    columns = range(len(powers))
    share = [mp.mpf(1) for _ in xs]
    best: list[mp.mpf] = []
    least = mp.inf
    for _ in range(ROUNDS):
        normal = mp.matrix(
            [[mp.fsum(s * b[i] * b[j] for s, b in zip(share, basis, strict=True)) for j in columns] for i in columns]
        )
        right = mp.matrix([mp.fsum(s * b[i] * g for s, b, g in zip(share, basis, goal, strict=True)) for i in columns])
        coefficients = list(mp.lu_solve(normal, right))
        errors = [abs(g - mp.fdot(coefficients, b)) for b, g in zip(basis, goal, strict=True)]
        if max(errors) < least:
            best, least = coefficients, max(errors)
        total = mp.fsum(s * e for s, e in zip(share, errors, strict=True))
        if total == 0:
            break
        share = [s * e / total for s, e in zip(share, errors, strict=True)]
    return best


def fit(spec: Fit) -> tuple[list[float], float]:
    """The rounded coefficients, lowest degree first, and the greatest weighted error."""
    lo, hi = mp.mpf(spec.lo), mp.mpf(spec.hi)
    xs = [lo + (hi - lo) * (1 - mp.cos(mp.pi * (k + mp.mpf(1) / 2) / GRID)) / 2 for k in range(GRID)]
    ws = [spec.weight(x) for x in xs]
    rest = [spec.f(x) for x in xs]
    fixed: list[float] = []
    for k in range(spec.degree + 1):
        coefficients = _minimax(xs, rest, ws, range(k, spec.degree + 1))
        fixed.append(_round(coefficients[0], spec.bits))
        rest = [y - mp.mpf(fixed[-1]) * x**k for x, y in zip(xs, rest, strict=True)]
    return fixed, float(max(abs(w * y) for w, y in zip(ws, rest, strict=True)))


def _limit(f: Real, at_zero: mp.mpf) -> Real:
    return lambda x: at_zero if x == 0 else f(x)


def _of_square(f: Real) -> Real:
    return lambda z: f(mp.sqrt(z))


LN2 = mp.log(2)
ONE = mp.mpf(1)


def fits() -> list[Fit]:
    """Everything that is fitted. Fits in z are polynomials of a square."""
    half_ln2 = float(LN2 / 2) * 1.001
    log_lo, log_hi = float(mp.sqrt(mp.mpf(1) / 2) - 1) * 1.001, float(mp.sqrt(2) - 1) * 1.001
    quarter = float(mp.pi / 4) * 1.001
    out = [
        Fit(
            "exp",
            "(e**r - 1 - r) / r**2, |r| <= ln(2)/2",
            _limit(lambda r: (mp.expm1(r) - r) / r**2, ONE / 2),
            lambda r: r**2,
            -half_ln2,
            half_ln2,
            4,
        ),
        Fit(
            "exp2",
            "(2**r - 1) / r, |r| <= 1/2",
            _limit(lambda r: mp.expm1(r * LN2) / r, LN2),
            lambda r: abs(r),
            -0.5005,
            0.5005,
            5,
        ),
        Fit(
            "log",
            "(log(1 + f) - f + f**2/2) / f**3",
            _limit(lambda f: (mp.log1p(f) - f + f * f / 2) / f**3, ONE / 3),
            lambda f: abs(f**3 / mp.log1p(f)) if f else mp.mpf(0),
            log_lo,
            log_hi,
            7,
        ),
        Fit(
            "sin",
            "(sin(r) / r - 1) / z, z = r**2, |r| <= pi/4",
            _of_square(_limit(lambda r: (mp.sin(r) / r - 1) / r**2, -ONE / 6)),
            lambda z: z,
            1e-6,
            quarter**2,
            2,
        ),
        Fit(
            "cos",
            "(cos(r) - 1 + z/2) / z**2, z = r**2, |r| <= pi/4",
            _of_square(_limit(lambda r: (mp.cos(r) - 1 + r * r / 2) / r**4, ONE / 24)),
            lambda z: z * z / mp.cos(mp.sqrt(z)),
            1e-6,
            quarter**2,
            2,
        ),
        Fit(
            "atan",
            "(atan(t) / t - 1) / z, z = t**2, t <= 1",
            _of_square(_limit(lambda t: (mp.atan(t) / t - 1) / t**2, -ONE / 3)),
            lambda z: z * mp.sqrt(z) / mp.atan(mp.sqrt(z)),
            1e-6,
            1.0,
            8,
        ),
        Fit(
            "tanh",
            "(tanh(x) / x - 1) / z, z = x**2, |x| <= 0.625",
            _of_square(_limit(lambda x: (mp.tanh(x) / x - 1) / x**2, -ONE / 3)),
            lambda z: z * mp.sqrt(z) / mp.tanh(mp.sqrt(z)),
            1e-6,
            0.625**2,
            4,
        ),
        Fit(
            "asin",
            "(asin(x) / x - 1) / z, z = x**2, |x| <= 0.55",
            _of_square(_limit(lambda x: (mp.asin(x) / x - 1) / x**2, ONE / 6)),
            lambda z: z * mp.sqrt(z) / mp.asin(mp.sqrt(z)),
            1e-6,
            0.3026,
            5,
        ),
        Fit(
            "sinh",
            "(sinh(x) / x - 1) / z, z = x**2, |x| <= 1",
            _of_square(_limit(lambda x: (mp.sinh(x) / x - 1) / x**2, ONE / 6)),
            lambda z: z * mp.sqrt(z) / mp.sinh(mp.sqrt(z)),
            1e-6,
            1.0,
            3,
        ),
        Fit(
            "tan_wide",
            "(tan(r) / r - 1) / z, z = r**2, |r| <= pi/4, in double",
            _of_square(_limit(lambda r: (mp.tan(r) / r - 1) / r**2, ONE / 3)),
            lambda z: z * mp.sqrt(z) / mp.tan(mp.sqrt(z)),
            1e-9,
            quarter**2,
            7,
            64,
        ),
        Fit(
            "log2_wide",
            "log2((1 + s) / (1 - s)) / s, z = s**2, in double",
            _of_square(_limit(lambda s: 2 * mp.atanh(s) / s / LN2, 2 / LN2)),
            lambda z: ONE,
            1e-9,
            float(((mp.sqrt(2) - 1) / (mp.sqrt(2) + 1)) ** 2) * 1.001,
            4,
            64,
        ),
        Fit(
            "exp2_wide", "2**r, |r| <= 1/2, in double", lambda r: mp.mpf(2) ** r, lambda r: ONE, -0.5005, 0.5005, 7, 64
        ),
    ]
    # erf on eight intervals of width 1/2: near zero as x * (1 + p), else as 1 + p, so that p is small and its rounding
    # does not matter.
    for k in range(8):
        middle = mp.mpf(k) / 2 + mp.mpf(1) / 4
        if k == 0:
            f, what = (
                (lambda t: mp.erf(t + 0.25) / (t + 0.25) - 1 if t > -0.25 else 2 / mp.sqrt(mp.pi) - 1),
                "erf(x) / x - 1",
            )
            out.append(Fit("erf_0", f"{what}, x = 1/4 + t, |t| <= 1/4", f, lambda t: ONE, -0.25, 0.25, 6))
        else:
            g, w = (lambda t, m=middle: -mp.erfc(m + t)), (lambda t, m=middle: 1 / mp.erf(m + t))
            out.append(Fit(f"erf_{k}", f"erf(x) - 1, x = {float(middle)} + t, |t| <= 1/4", g, w, -0.25, 0.25, 6))
    return out


def main() -> int:
    """Write all fits; the result does not depend on the machine."""
    head = [
        "# yaml-language-server: $schema=schema/polynomials.schema.json",
        "#",
        "# Written by tools/fit_polynomials.py: change that file and run it. Keys: `polynomial` (name), `doc` (what is",
        "# approximated, over what), `error` (greatest relative error of the function, before rounding in evaluation),",
        "# `coefficients` (lowest degree first).",
    ]
    lines = []
    for spec in fits():
        coefficients, error = fit(spec)
        digits = ", ".join(repr(float(c)) if spec.bits == 64 else f"{c:.9g}" for c in coefficients)
        lines += [
            f"- polynomial: {spec.name}",
            f'  doc: "{spec.doc}"',
            f"  error: {error:.1e}",
            f"  coefficients: [{digits}]",
        ]
        print(f"{spec.name:12s} {error:.2e}")
    OUTPUT.write_text("\n".join([*head, *lines]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
