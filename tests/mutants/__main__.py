"""`python -m tests.mutants`: wrong variants of the specs, each run against the generated tests of its entry; survivors are holes in the tests.

python -m tests.mutants                                  all of them (hours); goes on where it was ended
python -m tests.mutants --sample 0.05 --seed 1           a random sample
python -m tests.mutants --file specs/ops/activation.yaml --jobs 2
python -m tests.mutants --entry aten.softplus            one entry
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .report import Results, table
from .run import Task, count_all, run_all, tasks_of

RESULTS = Path("build-tmp/mutants.jsonl")
PAGE = Path("docs/mutants.md")


def main() -> int:
    """Exit status 0 where all were killed, 1 where some survived, 2 for an option that fits nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sample", type=float, default=1.0, help="the share of the mutants that is run (default all)")
    parser.add_argument("--seed", type=int, default=0, help="which sample (default %(default)s)")
    parser.add_argument("--file", action="append", default=[], help="a spec file (repeatable; default: all)")
    parser.add_argument("--entry", action="append", default=[], help="an entry, by its name (repeatable; default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes (default %(default)s)")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="file of the results, to which new ones are added (default %(default)s)",
    )
    parser.add_argument("--again", action="store_true", help="run those again that survived")
    parser.add_argument("--report", action="store_true", help="run nothing: print what the results say")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} from the results")
    options = parser.parse_args()
    results = Results.read(options.results, forget_survivors=options.again)
    try:
        tasks: list[Task] = [] if options.report else tasks_of(options.file, options.entry)
    except LookupError as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 2
    start = time.monotonic()
    run_all(tasks, results, sample=options.sample, seed=options.seed, jobs=options.jobs)
    shown = results.of(options.file, options.entry)
    print(table(shown))
    for report in shown:
        if report["status"] == "survived":
            print(f"survived: {report['file']}: {report['shown']}")
        if report["status"] == "error":
            print(f"not run: {report['entry']}: {report['by']}")
    print(f"{time.monotonic() - start:.0f} s; results in {options.results}")
    if options.write:
        results.write_page(PAGE, count_all())
    return 1 if any(r["status"] in ("survived", "error") for r in shown) else 0


if __name__ == "__main__":
    sys.exit(main())
