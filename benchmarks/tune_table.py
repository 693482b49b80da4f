"""A table of `specs/tuning` from measured kernels: the rules of the table that they were launched by, each with the sizes that were fastest over
all kernels that it holds for. A rule that no kernel met stays as it is.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log

import torch

from opforge.generated.targets import GPU_TARGETS
from opforge.generated.tuning import AttentionSizes, Block, ContractionSizes, RoutineSizes, Rule, Tuning
from opforge.runtime.render.triton_unit import TritonKernel
from opforge.runtime.tile.blocks import kind_of
from opforge.runtime.tile.launch import Launch

GAIN = 1.03  # times as fast: less is no difference
CONDITIONS = ("strided", "loads", "bytes", "sums", "points", "row", "buffers", "block")
ORDER = (*CONDITIONS, "x", "r", "tile", "programs", "least", "even", "each", "warps")
SIZES = ("contraction", "attention", "routine")
Factors = tuple[float, float, float]
"""By which XBLOCK, RBLOCK and warps are multiplied."""


@dataclass(frozen=True)
class Sample:
    """A kernel: how it is launched, by which rule, and the time of each configuration in µs, that of the rule first."""

    shape: Launch
    rule: Rule
    times: list[tuple[TritonKernel, float]]


def best(samples: Sequence[Sample]) -> tuple[Factors, float]:
    """The factors with which the kernels are fastest on average, of those that all of them were run with, and how many times as fast."""
    gains: dict[Factors, list[float]] = defaultdict(list)
    for sample in samples:
        (first, us), *_ = sample.times
        for one, other in sample.times:
            key = one.xblock / first.xblock, one.rblock / first.rblock, one.warps / first.warps
            gains[key].append(log(us / other))
    mean = {key: exp(statistics.mean(some)) for key, some in gains.items() if len(some) == len(samples)}
    key = max(mean, key=lambda k: mean[k])
    return (key, mean[key]) if mean[key] >= GAIN else ((1.0, 1.0, 1.0), 1.0)


def scaled(rule: Rule, by: Factors, most: int) -> Rule:
    """The rule with other sizes; what it does not limit stays without a limit. `most`: warps of a program, at most."""
    x, r, w = by
    warps = max(1, int(rule.warps * w))
    if rule.each:  # which gives the warps, up to that number
        warps = min(most, max(rule.warps, warps))
    return replace(
        rule,
        x=_times(rule.x, x),
        r=_times(rule.r, r),
        tile=_times(rule.tile, x * r),
        least=_times(rule.least, min(x, 1)),
        each=_times(rule.each, x * r / w),
        warps=warps,
    )


def _times(n: int, by: float) -> int:
    return max(1, int(n * by)) if n else 0


def rule_text(kind: str, rule: Rule) -> str:
    """One line of YAML."""
    default = {f.name: f.default for f in fields(Rule)}
    given = {name: getattr(rule, name) for name in ORDER}
    parts = [f"{n}: {'true' if v is True else v}" for n, v in given.items() if v != default[n] or n == "warps"]
    return f"  - {{{', '.join([f'kernel: {kind}', *parts])}}}"


def table_text(tuning: Tuning, samples: Sequence[Sample], capability: int) -> str:
    """The entry for the GPU that was measured. Its name must be one of targets.yaml."""
    name = next((n for n, t in GPU_TARGETS.items() if t.capability == capability), f"sm_{capability}")
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if torch.cuda.is_available() else None
    where = f"{gpu.name} ({gpu.multi_processor_count} multiprocessors)" if gpu else "?"
    lines = [
        f"- tuning: {name}",
        '  doc: "?"',
        f'  machine: "{where}, CUDA {torch.version.cuda}, torch {torch.__version__}"',
        "  command: python benchmarks/tune.py --table",
        "  blocks:",
    ]
    for kind, rules in tuning.rules.items():
        for rule in rules:
            some = [s for s in samples if s.rule is rule and kind_of(s.shape) == kind]
            if not some:
                lines += [f"  # kernels: 0, as for {tuning.name}", rule_text(kind, rule)]
                continue
            by, gain = best(some)
            what = f"{gain:.2f} times as fast as before" if gain > 1 else "as before"
            lines += [
                f"  # kernels: {len(some)}, {what}",
                rule_text(kind, scaled(rule, by, some[0].shape.gpu.limits.warps)),
            ]
    lines += [f"  # other sizes: as for {tuning.name}", *(sizes_text(name, getattr(tuning, name)) for name in SIZES)]
    lines += [f"  # products: as for {tuning.name}", "  tiles:", *map(product_text, tuning.tiles)]
    # Nothing is fused without being measured where nobody has measured: `max_autotune` and benchmarks/products.py say where it is worth it.
    return "\n".join([*lines, f"  margin: {tuning.margin}", "  fused: []"])


def sizes_text(name: str, sizes: ContractionSizes | AttentionSizes | RoutineSizes) -> str:
    """Sizes of one kind of kernel, as a line of a spec."""
    return f"  {name}: {{{', '.join(f'{f.name}: {getattr(sizes, f.name)}' for f in fields(sizes))}}}"


def product_text(block: Block) -> str:
    """A block of products, as a line of a spec."""
    names = "block_m", "block_n", "block_k", "num_warps", "num_stages"
    sizes = ", ".join(f"{name}: {getattr(block, name)}" for name in names)
    return f"  - {{{sizes}{', descriptors: true' if block.descriptors else ''}}}"
