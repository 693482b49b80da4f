"""A worker for the harness's own tests: it ends at the row `add`, and is silent at the row `sub`."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from .check import Result
from .database import Case
from .worker import report


def main() -> None:
    """`dying_worker FILE FOLDER LIMIT`"""
    for case in (Case(**c) for c in json.loads(Path(sys.argv[1]).read_text())):
        print(json.dumps({"at": asdict(case), "label": "test"}), flush=True)
        if case.entry == "add":
            os.abort()
        if case.entry == "sub":
            time.sleep(600)
        print(json.dumps(report(case, [Result(0, "", "native")])), flush=True)


if __name__ == "__main__":
    main()
