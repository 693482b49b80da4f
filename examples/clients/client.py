"""Shared by the examples of clients: one small program of a library runs eagerly, in float64 and with opforge, and what came of it is printed."""

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # random weights everywhere; nothing is fetched

import torch
from torch import Tensor

import opforge

#: What an example computes: tensors by name. It is given a dtype, and a backend of `torch.compile`, or None for eager.
Program = Callable[[torch.dtype, str | None], dict[str, Tensor]]
#: A compiled result may be this far from float64 (relative norm) where eager happens to be closer: a few roundings.
FLOOR = 8 * torch.finfo(torch.float32).eps


@dataclass
class Report:
    """What a client did with opforge. `graphs` counts forwards, `kernels` forward and backward."""

    client: str
    version: str
    what: str
    graphs: int = 0
    kernels: int = 0
    library_calls: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    error: float = 0.0
    eager_error: float = 0.0

    def __str__(self) -> str:
        calls = ", ".join(f"{name} {n}" for name, n in self.library_calls.items()) or "none"
        eager = ", ".join(f"{why} ({n})" for why, n in self.fallbacks.items()) or "no graph"
        return (
            f"{self.client} {self.version}: {self.what}\n"
            f"  graphs: {self.graphs}, kernels: {self.kernels}, library calls: {calls}\n"
            f"  ran eagerly: {eager}\n"
            f"  largest error against float64: opforge {self.error:.1e}, eager {self.eager_error:.1e}"
        )


def need(package: str, install: str | None = None) -> Any:
    """The module `package`. Where it is missing, the example ends with status 2 and says what to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        print(f"this example needs the package {error.name!r}: pip install {install or package}", file=sys.stderr)
        sys.exit(2)


def _relative(result: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm of `exact`."""
    exact = exact.detach().double()
    return float((result.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30))


def run(package: str, what: str, program: Program, eager: str | None = None) -> None:
    """Run `program` in float64, eagerly and with opforge, each from seed 0; print the report, and write it where `--json FILE` says.

    `eager` may be "eager", torch's name for Dynamo's program run eagerly, where that program computes something else than the user's (the
    corrections of Adam, in float32).

    Results are judged in groups, by what their names have before a ": ". Raises AssertionError where the largest error of opforge against float64
    is more than twice eager's largest in the group, and more than a few roundings; where integers differ; and where nothing was compiled.
    """
    arguments = argparse.ArgumentParser(description=what)
    arguments.add_argument("--json", type=Path, help="also write the report to this file")
    parsed = arguments.parse_args()
    results = []
    cases: Sequence[tuple[torch.dtype, str | None]]
    cases = [(torch.float64, None), (torch.float32, eager), (torch.float32, "opforge")]
    for dtype, backend in cases:
        torch.manual_seed(0)
        torch._dynamo.reset()
        opforge.reset_stats()
        results.append(program(dtype, backend))
    counts = opforge.stats()
    report = Report(package, importlib.metadata.version(package), what)
    report.graphs, report.kernels = counts["graphs"], counts["kernels"]
    report.library_calls = {name.removeprefix("aten."): n for name, n in sorted(counts["externs"].items())}
    report.fallbacks = counts["fallbacks"]
    exact, reference, mine = results
    errors: dict[str, float] = defaultdict(float)
    eager_errors: dict[str, float] = defaultdict(float)
    for name in exact:
        group = name.partition(": ")[0] if ": " in name else ""
        if exact[name].is_floating_point():
            errors[group] = max(errors[group], _relative(mine[name], exact[name]))
            eager_errors[group] = max(eager_errors[group], _relative(reference[name], exact[name]))
        elif not torch.equal(mine[name], reference[name]):
            errors[group] = math.inf
    report.error, report.eager_error = max(errors.values()), max(eager_errors.values())
    print(report)
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    wrong = [group for group in errors if not errors[group] <= max(2 * eager_errors[group], FLOOR)]
    assert not wrong, f"further from float64 than eager is: {wrong}"
    assert report.graphs, "nothing was compiled"
