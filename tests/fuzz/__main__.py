"""`python -m tests.fuzz`: random programs beside eager, in worker processes; failures are made small and printed as files that run.

python -m tests.fuzz --programs 10000               the nightly run (`make fuzz`)
python -m tests.fuzz --family norms --family raw    some families alone
python -m tests.fuzz --campaign FILE --minutes 30   goes on where the file's last run ended; --minutes 0 prints its totals
python -m tests.fuzz --family norms --seed 1234     one program: its file, and how it comes out
python -m tests.fuzz --device cuda --jobs 16        on a GPU
python -m tests.fuzz --device interpreter           by a GPU's kernels, without one
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from . import campaign
from .check import check, kernels_of, quick_builds
from .families import FAMILIES, program_of
from .program import runnable
from .shrink import shrink
from .workers import Range, Summary, run_all


def main() -> int:
    """Exit status 1 where a program differs from eager."""
    families = "\n".join(f"  {f.name:12} {f.doc}" for f in FAMILIES.values())
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__.splitlines()[0],
        epilog=f"families:\n{families}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--family",
        action="append",
        choices=[*FAMILIES],
        metavar="NAME",
        help="a family of programs (repeatable; default: all, or 'aliasing' with --seed)",
    )
    parser.add_argument(
        "--programs",
        type=int,
        default=1000,
        help="how many programs, in equal parts of each family (default %(default)s)",
    )
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default %(default)s)")
    parser.add_argument("--seed", type=int, help="only the program of this seed and family, printed as a file")
    parser.add_argument(
        "--device",
        default="cpu",
        choices=["cpu", "cuda", "interpreter"],
        help="where programs run, but for those that take memory of the processor: interpreter is Triton's, for the kernels of a GPU "
        "(default %(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default %(default)s)")
    parser.add_argument(
        "--shrink", type=float, default=60.0, help="seconds to make a failure smaller (default %(default)s)"
    )
    parser.add_argument("--failures", type=Path, help="folder for the failures' files (default: printed only)")
    parser.add_argument("--campaign", type=Path, help="a file of counts, which this run adds to, after the seeds in it")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="when a campaign begins no further part (default %(default)s)"
    )
    parser.add_argument("--part", type=int, default=100, help="programs in a part of a campaign (default %(default)s)")
    options = parser.parse_args()
    if options.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is loaded, here and by the workers
    with tempfile.TemporaryDirectory(prefix="opforge-fuzz-", ignore_cleanup_errors=True) as folder:
        if options.seed is not None:
            with quick_builds(Path(folder)), kernels_of(options.device, Path(folder)):
                return _one((options.family or ["aliasing"])[0], options.seed, options.shrink, options.device)
        summary = Summary()
        start = time.monotonic()
        chosen = options.family or [f.name for f in FAMILIES.values() if options.device == "cpu" or f.on_gpus]
        if options.campaign is not None:
            differences = campaign.run(options.campaign, chosen, options, Path(folder))
            print(campaign.totals(campaign.read(options.campaign)))
            return 1 if differences else 0
        each = -(-options.programs // len(chosen))
        ranges = [Range(family, range(options.first, options.first + each)) for family in chosen]
        run_all(ranges, options, Path(folder), summary)
        print(summary.text(time.monotonic() - start))
        return 1 if summary.failures else 0


def _one(family: str, seed: int, seconds: float, device: str) -> int:
    program = program_of(family, seed, device)
    print(runnable(program, []))
    outcome = check(program)
    if not outcome.different:
        print(f"# as eager; {outcome.kernels} kernels, {outcome.externs} eager kernels; {outcome.eager or 'compiled'}")
        return 0
    print("\n".join(f"# {kind}: {text}" for kind, text in outcome.different), flush=True)
    small, found = shrink(program, outcome, seconds)
    print("\n# made smaller:\n" + runnable(small, [f"{kind}: {text}" for kind, text in found.different]))
    return 1


if __name__ == "__main__":
    sys.exit(main())
