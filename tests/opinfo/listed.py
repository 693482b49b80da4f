"""The rows that cannot be held to eager's values, each with the reason. Nothing else is left out of any comparison."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import torch

from tests.fuzz.observe import Sight

from .database import Case

_MEMORY = "the values of an empty tensor are whatever was in its memory"
UNSPECIFIED = dict.fromkeys(
    ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"], _MEMORY
)

UNSPECIFIED_RESULTS: dict[str, tuple[str, ...]] = {
    # Seed and offset of a dropout by 0, which nothing writes.
    "torch.ops.aten._efficient_attention_forward": ("result 2", "result 3"),
    "torch.ops.aten._flash_attention_forward": ("result 2", "result 3"),
}
"""As `UNSPECIFIED`, of some results of a row only."""

_LAZY = "torch: its kernels for a GPU mark what they computed as lazily conjugated, which their fake kernels do not foretell; ours is computed"
UNTOLD = dict.fromkeys(["svd", "linalg.svd", "svd_lowrank", "pca_lowrank"], _LAZY)
"""Rows whose results need not be lazily conjugated as eager's are on a GPU; their values are compared."""

BY_DYNAMO = {
    "jiterator_*": "its kernel does not go through the dispatcher and is launched on the addresses of fake tensors, which are none; Dynamo "
    "leaves the call to Python"
}
"""What nobody can trace without Dynamo in front, which knows it: these rows go through it."""

_DRAWS = "a compiled graph draws from a seeded Philox stream of its own (docs/random.md), not from eager's generator"
RANDOM = dict.fromkeys(
    [
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "multinomial",
        "normal",
        "normal.in_place",
        "normal.number_mean",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "uniform",
        "svd_lowrank",
        "pca_lowrank",
        "nn.functional.alpha_dropout",
        "nn.functional.dropout",
        "nn.functional.dropout2d",
        "nn.functional.dropout3d",
        "nn.functional.feature_alpha_dropout.*",
        "nn.functional.fractional_max_pool2d",
        "nn.functional.fractional_max_pool3d",
        "nn.functional.multi_head_attention_forward",
        "nn.functional.rrelu",
        "nn.functional.scaled_dot_product_attention",
        "modules.nn.FractionalMaxPool*",
        "modules.nn.RNN",
        "modules.nn.GRU",
        "modules.nn.LSTM",
        "modules.nn.MultiheadAttention",
        "modules.nn.Transformer*",
    ],
    _DRAWS,
)
HEAVY = ("cauchy", "exponential", "geometric", "log_normal")
"""Their tails are too long for some runs to say where another one may be."""

_BESSEL = "torch: its numbers are up to 4e-7 from the right ones between 5 and 8, in float64 too; ours are not"
KNOWN: dict[str, str] = {
    "native_group_norm * noncontiguous*": "ours: eager's CPU kernel refuses what is not contiguous (F.group_norm makes it so), and we compute it",
    "linalg.householder_product complex128 backward*": "the judge: no dtype is wider, and eager's run in complex64 had "
    "luck; against 80-bit numbers eager's gradients are 3.8e-11 off, ours 3.6e-11 (geometric means of twelve)",
    "*polygamma* float64*": "torch: its trigamma is up to 5e-10 from the right one in float64 (against 30 digits; ours 2e-16)",
    **dict.fromkeys(
        ("scatter_reduce.prod float64 twice*", "index_reduce.prod float64 twice*"),
        "G5: no second gradient: its formula asks how many zeros there are, and the trace cannot follow that (create_graph=True raises)",
    ),
    **dict.fromkeys(
        ("mvlgamma* float64 twice*", "digamma float64 twice*", "lgamma float64 twice*"),
        "torch: the second gradient is its trigamma, up to 5e-10 from the right one in float64",
    ),
    **dict.fromkeys(
        ("special.bessel_j0 float64*", "special.bessel_j1 float64*", "special.bessel_y0 float64*"), _BESSEL
    ),
    "special.bessel_j1 float* cuda": "torch: its numbers, in float64 too, are up to 5e-7 from the right ones between 5 and 8; ours are not",
    "sparse.mm.reduce * dynamic cuda": "the harness: sparse tensors have no sizes that are symbols; eager refuses the call for another reason",
    "split_with_sizes_copy * out* cuda": "torch: its kernel for a GPU does not count its writes to the versions of `out`; ours are counted",
    "*native_batch_norm* * out* cuda": "torch: its kernel for a GPU ends in an assertion of its own for an `out` with gaps; ours writes its elements",
    "narrow_copy * out* cuda": "torch: there is no kernel of `narrow_copy.out` for CUDA, and we copy into it",
    **dict.fromkeys(
        (
            "nn.functional.hardswish float64* cuda",
            "nn.functional.hardsigmoid float64* cuda",
            "modules.nn.Hardswish float64* cuda",
        ),
        "torch: its kernels for a GPU multiply by a sixth in float32 (3e-8 off in float64; a hardsigmoid of 1.00000003)",
    ),
    "digamma float64 backward cuda": "torch: the gradient is its trigamma, up to 5e-10 from the right one in float64",
    "nn.functional.soft_margin_loss float16 backward cuda": "torch: an exponential overflows in float16, and the gradient is nan; ours is right",
    "clamp uint8 inplace cuda": "torch: on a GPU it limits in the dtype of what it writes (-1 is 255 there), on a CPU in the promoted one, as ours",
    **dict.fromkeys(
        ("nn.functional.dropout float32 noncontiguous dynamic", "nn.functional.dropout float32 backward dynamic"),
        "torch: without training its Python kernels for symbolic sizes copy where eager's returns its input (Inductor and aot_eager too)",
    ),
    "narrow_copy * out*": "torch: the kernel writes into an `out` with gaps as if it had none; ours writes its elements",
}
"""Cases (`entry dtype variant`, with wildcards) that fail, and why; each must fail until it is mended."""


def known(case: Case) -> str:
    """Why a case is known to fail, or ""."""
    return next((why for name, why in KNOWN.items() if fnmatch.fnmatchcase(str(case), name)), "")


def is_in(table: Mapping[str, object], case: Case) -> bool:
    """Whether one of the table's names means the case's row."""
    return any(fnmatch.fnmatchcase(case.entry, name) for name in table)


def strays(case: Case, runs: Sequence[Sight], ours: Sight) -> list[tuple[str, str]]:
    """Values of a random row: those on which eager's runs agree must be equal, others within their range and half of it on either side."""
    found = []
    for name, t in ours.values.items():
        seen = [r.values[name] for r in runs if name in r.values and r.values[name].shape == t.shape]
        if not seen or not t.numel():
            continue
        if all(torch.equal(s.nan_to_num(), seen[0].nan_to_num()) for s in seen[1:]):
            if not torch.allclose(t.double(), seen[0].double(), equal_nan=True):
                found.append(("value", f"{name}: eager's {len(seen)} runs agree on it, and it is another here"))
            continue
        every = torch.stack(seen).double()
        if not t.isfinite().all() and every.isfinite().all():
            found.append(("value", f"{name}: not finite"))
        low, high = every.min(), every.max()
        slack = (high - low) / 2
        inside = bool(((t.double() >= low - slack) & (t.double() <= high + slack)).all())
        if not inside and case.entry not in HEAVY:
            found.append(("value", f"{name}: outside of {low - slack}..{high + slack}"))
    return found
