"""What torch's own switches show of a compile: TORCH_LOGS, and TORCH_TRACE with the pages that tlparse makes of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from opforge.runtime.observe.torch_logs import LINES, TOLD

PROGRAM = """
import torch

def model(x, w):
    h = torch.nn.functional.gelu(x @ w)  # the first line
    return (h.softmax(-1) * x).sum()

x, w = (torch.rand(64, 64, requires_grad=True) for _ in range(2))
torch.compile(model, backend="opforge", options={"cache_dir": CACHE})(x, w).backward()
with torch.no_grad():
    torch.compile(model, backend="opforge", options={"cache_dir": CACHE, "cudagraphs": True})(x, w)
"""
ANOTHER = """
import torch

def again(x):
    return x.to(torch.complex64).sqrt().abs() + 1  # which has no loops

run = torch.compile(again, backend="opforge", options={"cache_dir": CACHE})
run(torch.rand(3)), run(torch.rand(4))
from torch._dynamo.utils import counters
print("counted", counters["opforge"], counters["opforge_eager_kernels"])
"""
CAPTURE = """
import torch
from opforge import compiled_autograd

x = torch.rand(3, requires_grad=True)
with compiled_autograd.enable(lambda graph: graph):
    x.sin().sum().backward()
"""
OF_CAPTURE = ("compiled_autograd", "compiled_autograd_verbose")
EXPECTED = {
    "pre_grad_graphs": ["softmax", "gelu"],
    "aot_joint_graph": ["aten.gelu_backward", "aten._softmax.default"],
    "aot_graphs": ["forward graph", "backward graph", "functional graph", "aten.gelu_backward"],
    "post_grad_graphs": ["aten._softmax"],
    "ir_pre_fusion": ["softmax"],
    "schedule": ["kernel k0_gelu_softmax", "memory: arena"],
    "fusion": ["kernel k0_gelu_softmax", "gelu: ", "the first line", "extern aten.mm.default"],
    "kernel_code": ["k0_gelu_softmax(", "v_exp"],
    "output_code": ["def call(", "k0_gelu_softmax(", "v_exp"],
    "inductor_metrics": [
        "k0_gelu_softmax: reads ",
        "aten.mm.default: ",
        "524,288 operations",
        "all: moves ",
    ],
    "cudagraphs": ["graph 0/1 is not recorded: it runs on the device cpu"],
}


def run(folder: Path, program: str = PROGRAM, **switches: str) -> str:
    script = folder / "program.py"
    script.write_text(program.replace("CACHE", repr(str(folder / "cache"))))
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCH_LOGS", "TORCH_TRACE")} | switches
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, str]:
    """What each switch prints, in one run with all of them on."""
    lines = run(folder, TORCH_LOGS=",".join(EXPECTED)).splitlines()
    return {switch: "\n".join(line for line in lines if f"[__{switch}]" in line) for switch in EXPECTED}


def test_every_switch_is_tried() -> None:
    assert {*EXPECTED, *OF_CAPTURE, "perf_hints"} == {told.switch for told in TOLD.values()} | set(LINES)


@pytest.mark.parametrize("switch", EXPECTED)
def test_switches(told: dict[str, str], switch: str) -> None:
    for text in EXPECTED[switch]:
        assert text in told[switch]


def test_a_captured_backward(folder: Path) -> None:
    lines = run(folder, CAPTURE, TORCH_LOGS=",".join(OF_CAPTURE)).splitlines()
    graph, reasons = ("\n".join(line for line in lines if f"[__{switch}]" in line) for switch in OF_CAPTURE)
    assert "def forward(self, inputs, sizes, scalars, hooks, packed)" in graph
    assert "code: SinBackward0 (node 2)" in graph
    assert "captured because of" in reasons
    assert "new autograd node" in reasons


def test_hints_recompiles_and_counters(folder: Path) -> None:
    """`recompiles` is Dynamo's own."""
    lines = run(folder, ANOTHER, TORCH_LOGS="perf_hints,recompiles").splitlines()
    hints = [line for line in lines if "[__perf_hints]" in line]
    assert len(hints) == 2  # for each of the two graphs
    assert all("aten.sqrt.default runs by its eager kernel: dtype complex64, in sqrt" in line for line in hints)
    assert all("which has no loops" in line for line in hints)
    assert any("[__recompiles]" in line and "size mismatch" in line for line in lines)
    (counted,) = [line for line in lines if line.startswith("counted")]
    for part in ("'graphs': 2", "'cache_misses': 2", "'extern_calls': 2", "'aten.sqrt.default: dtype complex64': 2"):
        assert part in counted


def test_a_warm_start_shows_its_code_too(told: dict[str, str], folder: Path) -> None:
    assert "k0_gelu_softmax(" in told["output_code"]
    again = run(folder, TORCH_LOGS="output_code")
    assert again.count("def call(") == told["output_code"].count("def call(") > 0
    assert "[__aot_graphs]" not in again


def test_nothing_without_a_switch(folder: Path) -> None:
    assert run(folder) == ""


def test_no_text_is_made_without_a_switch() -> None:
    """Also where Dynamo has not compiled anything in the process yet."""
    text = "from opforge.runtime.observe.watch import Watch; print(Watch('off', '').wanted)"
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCH_LOGS", "TORCH_TRACE")}
    ran = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.stdout == "False\n", ran.stderr


def test_pages_of_tlparse(told: dict[str, str], folder: Path) -> None:
    tlparse = shutil.which("tlparse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if tlparse is None:
        pytest.skip("C16: tlparse is not installed (pip install tlparse)")
    run(folder, TORCH_TRACE=str(folder / "trace"))
    (log,) = (folder / "trace").iterdir()
    command = [tlparse, str(log), "-o", str(folder / "pages"), "--no-browser"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    names = [p.name.rpartition("_")[0] for p in (folder / "pages").rglob("*.*")]
    for name in ("aot_joint_graph", "aot_forward_graph", "aot_backward_graph", "aot_inference_graph"):
        assert name in names
    pages = [p.read_text() for p in (folder / "pages").rglob("inductor_output_code*.html")]
    assert any("def" in page and "call" in page and "k0_gelu_softmax" in page for page in pages)
    index = (folder / "pages" / "index.html").read_text()
    assert "inductor_output_code" in index
    # A backward that is compiled when it first runs stands with its forward's number.
    compiles = Counter(p.parent.name.rpartition("_")[0] for p in (folder / "pages").rglob("*schedule_*.txt"))
    assert compiles == {"-_0_0": 2, "-_0_1": 1}


def test_a_checkpointed_region_is_printed(folder: Path) -> None:
    """Torch prints what a node's `recompute` says, and expects its own kind of it there."""
    text = f"""
import torch
from torch.utils.checkpoint import checkpoint

def model(x):
    return checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False).sum()

torch.compile(model, backend="opforge", options={{"cache_dir": {str(folder / "cache")!r}}})(torch.rand(8, requires_grad=True)).backward()
"""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_TRACE"} | {
        "TORCH_LOGS": "aot_joint_graph,aot_graphs"
    }
    ran = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "backward graph" in ran.stderr
