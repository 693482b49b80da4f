"""`python -m tests.opinfo`: torch's tables of operators and modules beside eager, in worker processes.

python -m tests.opinfo --dtypes fp32 --variants forward          one sweep, with progress and tables
python -m tests.opinfo --ops '^nn.functional.conv' --dynamic     rows that a regular expression finds, sizes as symbols
python -m tests.opinfo --device cuda --jobs 8             on a GPU; `interpreter`: a GPU's kernels, without one
python -m tests.opinfo --samples 4 --out build-tmp/opinfo.json   at most four calls of each case; everything as JSON
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .database import DEVICES, DTYPES, VARIANTS, Case, cases
from .report import FAILED, Summary, keep, kept, show
from .workers import run_all


def main() -> int:
    """Exit status 1 where a case fails that is not listed as known to, 2 for options that choose nothing."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tests.opinfo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", default="", help="rows whose name the regular expression finds (default all)")
    parser.add_argument("--dtypes", nargs="*", default=(), help=f"of {', '.join(DTYPES)} (default all)")
    parser.add_argument("--variants", nargs="*", default=(), help=f"of {', '.join(VARIANTS)} (default all)")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where they run (default %(default)s)")
    parser.add_argument("--dynamic", action="store_true", help="sizes are symbols")
    parser.add_argument(
        "--samples", type=int, default=0, help="calls of one case at most, chosen by its name (default all)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=180.0, help="seconds without a sign of life that are a hang (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end after so many, whatever is left (default never)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="a sweep in sittings: add reports to this file as they come; leave out the cases that it has",
    )
    parser.add_argument("--out", type=Path, help="all reports as JSON")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 200)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; `--device interpreter` runs a GPU's kernels without one")
    try:
        chosen = cases(options.ops, options.dtypes, options.variants, options.dynamic, options.device)
    except ValueError as error:
        parser.error(str(error))
    if not chosen:
        parser.error("no case is chosen")
    summary, start = Summary(), time.monotonic()
    found: Counter[str] = Counter()
    if options.keep is not None:
        wanted = set(chosen)
        for report in kept(options.keep):
            if Case(**report["case"]) in wanted:
                summary.add(report)
        done = {Case(**report["case"]) for report in summary.reports}
        chosen = [case for case in chosen if case not in done]
        console.print(f"{len(done)} cases are in {options.keep}, {len(chosen)} are left")
    with tempfile.TemporaryDirectory(prefix="opforge-opinfo-", ignore_cleanup_errors=True) as folder:
        reports = run_all(
            chosen,
            Path(folder),
            jobs=options.jobs,
            limit=options.samples,
            timeout=options.timeout,
            seconds=options.seconds,
        )
        with _progress(console) as progress:
            task = progress.add_task("", total=len(chosen), state="starting")
            for k, report in enumerate(reports, 1):
                summary.add(report)
                if options.keep is not None:
                    keep(options.keep, report)
                found["fail" if report["outcome"] in FAILED else report["outcome"]] += 1
                state = ", ".join(f"{n} {name}" for name, n in found.most_common())
                progress.update(task, advance=1, state=state)
                if report["outcome"] in FAILED:
                    progress.console.print(
                        f"{report['outcome']}: {Case(**report['case'])}", highlight=False, soft_wrap=True
                    )
                if not console.is_terminal and k % 100 == 0:
                    print(f"# {k} of {len(chosen)}, {time.monotonic() - start:.0f} s: {state}", flush=True)
    seconds = time.monotonic() - start
    if left := len(chosen) - found.total():
        console.print(f"{left} of {len(chosen)} cases were left when the time was over")
    show(summary, console, seconds)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        summary.write(options.out, seconds)
        console.print(f"written to {options.out}")
    return 1 if summary.failures else 0


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
        disable=not console.is_terminal,
    )


if __name__ == "__main__":
    sys.exit(main())
