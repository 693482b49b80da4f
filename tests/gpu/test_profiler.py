"""Profiles of a GPU's work: ranges around launches, and around replays of CUDA graphs."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="C16: needs a GPU")]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(64, 128)
        self.norm = torch.nn.LayerNorm(128)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(F.gelu(self.fc(x)))


def ranges_of(call: Callable[[], Any], calls: int) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    on_cpu = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CPU]
    return Counter(e.name.removeprefix("opforge::") for e in on_cpu if e.name.startswith("opforge::"))


def test_kernels_and_library_calls_of_training() -> None:
    model, x = Model().cuda(), torch.randn(32, 64, device="cuda")
    compiled = torch.compile(model, backend="opforge")

    def step() -> None:
        model.zero_grad()
        compiled(x).sum().backward()

    step()
    found = ranges_of(step, 2)
    assert set(found.values()) == {2}
    assert any("self.norm(F.gelu(self.fc(x)))" in name for name in found)
    assert len([name for name in found if name.startswith("graph ")]) == 2


def test_replays_of_cuda_graphs() -> None:
    model, x = Model().cuda().eval(), torch.randn(32, 64, device="cuda")
    compiled = torch.compile(model, backend="opforge", mode="reduce-overhead")
    with torch.no_grad():
        expected = [compiled(x).clone() for _ in range(4)][-1]
        found = ranges_of(lambda: compiled(x), 3)
        assert [n for name, n in found.items() if name.endswith("| replayed")] == [3]
        assert not any(name.startswith("k0") for name in found)
        assert torch.equal(compiled(x), expected)


def test_a_first_call_may_be_profiled() -> None:
    """The recording is made by the copy with ranges, and replayed without a profiler."""
    model, x = Model().cuda().eval(), torch.randn(32, 64, device="cuda")
    compiled = torch.compile(model, backend="opforge", mode="reduce-overhead")
    with torch.no_grad():
        ranges_of(lambda: compiled(x), 4)
        torch.testing.assert_close(compiled(x), model(x))


def test_nvtx() -> None:
    model, x = Model().cuda(), torch.randn(32, 64, device="cuda")
    compiled = torch.compile(model, backend="opforge")
    expected = compiled(x)
    with torch.autograd.profiler.emit_nvtx():
        assert torch.equal(compiled(x), expected)
