"""Few long rows, each gone through by programs that wait for each other: the same to the bit in every launch, beside others, and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge
from tests.support.compiled import compiled
from tests.support.row_programs import kept
from tests.support.streams import same_on_streams

pytestmark = pytest.mark.gpu

Program = Callable[..., Tensor]
PROGRAMS: dict[str, tuple[Program, tuple[tuple[int, ...], ...], torch.dtype]] = {
    "softmax": (lambda x: torch.softmax(x, -1), ((8, 131072),), torch.float32),
    "softmax of one row": (lambda x: torch.softmax(x, -1), ((1, 1 << 20),), torch.float32),
    "odd rows": (lambda x: torch.log_softmax(x.float(), -1), ((16, 50257),), torch.bfloat16),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (65536,), w, b), ((16, 65536), (65536,), (65536,)), torch.float32),
    "group norm": (lambda x: F.group_norm(x, 32), ((2, 320, 64, 64),), torch.float32),
    "batch norm": (lambda x: F.batch_norm(x, None, None, None, None, True), ((32, 64, 32, 32),), torch.float32),
    "norm": (lambda x: x / x.norm(), ((1000, 1001),), torch.float32),
    "a value that is kept": (kept, ((4, 131072),), torch.float32),
    "doubles": (lambda x: x / x.abs().amax(-1, keepdim=True), ((4, 65536),), torch.float64),
    "halves": (lambda x: F.rms_norm(x, (65536,)), ((8, 65536),), torch.float16),
}


def made(name: str) -> tuple[Program, list[Tensor]]:
    torch.manual_seed(0)
    f, shapes, dtype = PROGRAMS[name]
    return f, [torch.randn(s, device="cuda").to(dtype) for s in shapes]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("cudagraphs", [False, True])
def test_every_launch_gives_the_same(name: str, cudagraphs: bool, tmp_path: Path) -> None:
    f, inputs = made(name)
    run = compiled(f, tmp_path, cudagraphs=cudagraphs)
    want = run(*inputs).clone()
    assert opforge.stats()["kernels"] == 1
    exact, eager = f(*(t.double() for t in inputs)), f(*inputs)
    room = float(exact.abs().max()) * torch.finfo(want.dtype).eps
    assert float((want - exact).abs().max()) <= 2 * float((eager - exact).abs().max()) + room
    for _ in range(500):
        assert torch.equal(run(*inputs), want)


def test_streams_side_by_side(tmp_path: Path) -> None:
    """Launches of several streams, graphs that are replayed meanwhile, and a kernel that has all processors for a while: each waits for room."""
    f, _ = made("softmax")
    run = compiled(f, tmp_path)
    large = torch.randn(4096, 4096, device="cuda")
    inputs = [torch.randn(8, 131072, device="cuda") for _ in range(4)]
    same_on_streams(run, inputs, lambda: large @ large)


def test_recorded_on_a_branch_beside_itself(tmp_path: Path) -> None:
    """Two launches of one graph that nothing orders."""
    f, _ = made("norm")
    run = compiled(f, tmp_path)
    inputs = [torch.randn(1000, 1001, device="cuda") for _ in range(2)]
    want = [run(x).clone() for x in inputs]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        one = run(inputs[0])
        with torch.cuda.stream(side):
            other = run(inputs[1])
        main.wait_stream(side)
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(one, want[0])
    assert torch.equal(other, want[1])


def test_odd_addresses(tmp_path: Path) -> None:
    f, _ = made("softmax")
    run = compiled(f, tmp_path)
    memory = torch.randn(8 * 131072 + 1, device="cuda")
    run(memory[:-1].view(8, 131072))
    x = memory[1:].view(8, 131072)
    found, want = run(x), torch.softmax(x.double(), -1)
    error, allowed = (float((y - want).abs().max()) for y in (found, torch.softmax(x, -1)))
    assert error <= 2 * allowed + 1e-7 * float(want.max())
    assert torch.equal(run(x), found)


def test_training_steps(tmp_path: Path) -> None:
    """Gradients of a softmax over few long rows, of a norm, and of both with CUDA graphs."""
    w = torch.randn(8, 131072, device="cuda", dtype=torch.float64)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (torch.log_softmax(x / x.norm(), -1) * w).sum()

    x = torch.randn(8, 131072, device="cuda").requires_grad_()
    (exact,) = torch.autograd.grad(loss(x.double(), w), x)
    (eager,) = torch.autograd.grad(loss(x, w.float()), x)
    for cudagraphs in (False, True):
        run = compiled(loss, tmp_path, cudagraphs=cudagraphs)
        for _ in range(3):
            (found,) = torch.autograd.grad(run(x, w.float()), x)
            error, allowed = (float((g.double() - exact.double()).abs().max()) for g in (found, eager))
            assert error <= 2 * allowed + 1e-6 * float(exact.abs().max())
