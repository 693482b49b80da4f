"""One program compiled by one backend in this fresh process; prints one line of JSON. Started by `run.py`.

Fields: `import_s` (the backend's own imports), `first_call_s` (the first call: Dynamo, compilation and one run),
`backend_s` (the part spent inside the backend), `peak_mb` (resident memory, whole process), `run_peak_mb` (during three
later calls), `kernels`, `externs` and what else the backend counts.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def measure(program_name: str, backend_name: str) -> dict[str, Any]:
    """Compile and run in this process."""
    import torch
    import torch._dynamo

    import backends
    from measure import peak_rss_mb, reset_peak
    from programs import PROGRAMS, build

    torch.set_num_threads(2)
    start = time.perf_counter()
    backends.load(backend_name)
    import_s = time.perf_counter() - start
    with torch.no_grad():
        # Dynamo's first compilation in a process sets up much that is no backend's doing.
        torch.compile(lambda x: x + 1, backend=backends.pass_through)(torch.ones(1))
        fn, inputs = build(PROGRAMS[program_name])
        inside = [0.0]
        # A backend that is registered by its name imports itself when it is looked up.
        start = time.perf_counter()
        timed = backends.timed_backend(backend_name, inside)
        import_s += time.perf_counter() - start
        compiled = (
            fn if timed is None else torch.compile(backends.own_entry(fn, backend_name), backend=timed, dynamic=False)
        )
        start = time.perf_counter()
        compiled(*inputs)
        first = time.perf_counter() - start
        peak = peak_rss_mb()
        reset_peak()
        for _ in range(3):
            compiled(*inputs)
    return {
        "import_s": import_s,
        "first_call_s": first,
        "backend_s": inside[0],
        "peak_mb": peak,
        "run_peak_mb": peak_rss_mb(),
        **backends.counts(backend_name),
    }


def main() -> None:
    """`cold.py PROGRAM BACKEND`, with empty caches in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        os.environ["OPFORGE_CACHE_DIR"] = f"{folder}/opforge"
        row = measure(sys.argv[1], sys.argv[2])
    print(json.dumps(row))


if __name__ == "__main__":
    main()
