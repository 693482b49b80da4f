"""Runs all examples of clients with the packages at hand: `python -m examples.clients` writes docs/clients.md and benchmarks/results/clients.json.

With names of examples (`python -m examples.clients generate hf_trainer`) only these are run, and the others' rows stay as they are.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "clients.json"
PAGE = ROOT / "docs" / "clients.md"
#: In the order of the table.
EXAMPLES = (
    "generate",
    "hf_trainer",
    "optimizer_step",
    "lightning_fit",
    "diffusers_blocks",
    "timm_families",
    "sentence_embeddings",
    "geometric_graphs",
    "torchao_int8",
)
HEAD = """\
<!-- Written by `python -m examples.clients`. Do not edit. -->

# Libraries that compile with opforge

Each row is a program of at most 60 lines in [`examples/clients/`](../examples/clients), which uses the library as its users do, with a small
random model on the CPU. It runs in float64, eagerly in float32, and with opforge. It works if the error of opforge's results against float64 is at
most twice eager's, or a few roundings.

| client | version | what is run | works | graphs | kernels | library calls | runs eagerly | largest error (eager's) |
|---|---|---|---|---|---|---|---|---|
"""
FOOT = """
Measured with torch {torch}. `graphs` counts what Dynamo handed over (a training step is one); `library calls` are calls of eager kernels inside of
compiled graphs, such as products.

vLLM and SGLang do not run where this page was written. Their adaptors are [`clients/vllm.py`](../clients/vllm.py) and
[`clients/sglang.py`](../clients/sglang.py); `tests/programs/test_client_adaptors.py` drives them as these programs do. vLLM uses opforge for
the pieces of a model with `VLLM_PLUGINS=opforge` (name the other plugins that you need there too), SGLang with `SGLANG_PLATFORM=opforge`.
"""


def run(name: str) -> dict[str, Any]:
    """The report of an example, with `works`: "yes", or why not."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(out)]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        report: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    last = (ran.stderr.strip() or "no message").splitlines()[-1]
    return report | {"works": "yes" if ran.returncode == 0 else last}


def row(name: str, report: dict[str, Any]) -> str:
    """One line of the table."""
    if "client" not in report:
        return f"| `{name}.py` | | | {report['works']} | | | | | |\n"
    calls = sum(report["library_calls"].values())
    errors = f"{report['error']:.0e} ({report['eager_error']:.0e})"
    what = f"[{report['what']}](../examples/clients/{name}.py)"
    cells = [report["client"], report["version"], what, report["works"], report["graphs"], report["kernels"], calls]
    return "| " + " | ".join(map(str, [*cells, report["ran_eagerly"], errors])) + " |\n"


def main() -> None:
    """Run the examples, and write what came of them."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "names", nargs="*", metavar="name", help=f"of {', '.join(EXAMPLES)}; all where none is given"
    )
    names = arguments.parse_args().names or EXAMPLES
    if unknown := [name for name in names if name not in EXAMPLES]:
        arguments.error(f"there is no example {unknown[0]!r}; there are {', '.join(EXAMPLES)}")
    reports: dict[str, Any] = json.loads(RESULTS.read_text())["clients"] if RESULTS.exists() else {}
    for name in names:
        print(f"{name} …", flush=True)
        reports[name] = run(name)
        print(f"  works: {reports[name]['works']}", flush=True)
    ordered = {name: reports[name] for name in EXAMPLES if name in reports}
    RESULTS.write_text(json.dumps({"torch": torch.__version__, "clients": ordered}, indent=2) + "\n")
    rows = "".join(row(name, report) for name, report in ordered.items())
    PAGE.write_text(HEAD + rows + FOOT.format(torch=torch.__version__))


if __name__ == "__main__":
    main()
