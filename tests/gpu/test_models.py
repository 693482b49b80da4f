"""Training steps of `benchmarks/gpu_models.py` in float32 on a CUDA device, judged tensor by tensor. `make test-gpu`.

The benchmark's own steps run under autocast to bfloat16, where the gradients of a ResNet are off by their own size in eager too: such a judge lets
anything pass. In float32 they are right to five digits and more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opforge
from tests.support.scripts import importable

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    with importable():
        yield


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Convolutions of float32 are TF32 by torch's default."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def gradients(model: nn.Module, step: Callable[..., Tensor], inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """The loss, the gradient of each parameter and each floating buffer after one step, in float64."""
    loss = step(*inputs)
    loss.backward()
    found = {"loss": loss.detach()} | {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    found |= {k: b for k, b in model.named_buffers() if b.is_floating_point()}
    return {k: t.double() for k, t in found.items()}


def judge(name: str, device: str, tiny: bool, **kwargs: Any) -> None:
    """No tensor is more than twice as far from float64 as eager's, or than a rounding step."""
    from programs.base import to_float64
    from programs.gpu_models import PROGRAMS

    torch._dynamo.reset()
    opforge.reset_stats()
    torch.manual_seed(0)
    model, inputs = PROGRAMS[name].make(torch.device(device), tiny)
    assert isinstance(model, nn.Module)
    model.train()
    again = copy.deepcopy(model)
    wide, wide_inputs = to_float64(model, inputs)
    assert isinstance(wide, nn.Module)
    exact = gradients(wide, wide, wide_inputs)
    eager = gradients(model, model, inputs)
    ours = gradients(again, torch.compile(again, backend="opforge", options={"strict": True}, **kwargs), inputs)

    assert exact.keys() == eager.keys() == ours.keys()
    step = torch.finfo(torch.float32).eps
    # The gradient of a bias before a norm, or of a key's bias, is zero but for the rounding of what it is summed of.
    longest = max(float(p.grad.norm()) for p in wide.parameters() if p.grad is not None)
    wrong = []
    for key, want in exact.items():
        error, theirs = (float((t[key] - want).norm()) for t in (ours, eager))
        if not error <= max(2 * theirs, step * longest if key != "loss" else 0, step * float(want.norm())):
            wrong.append(f"{key}: {error:.3g} from float64, eager {theirs:.3g}, of {float(want.norm()):.3g}")
    assert not wrong, "\n".join(wrong)
    assert opforge.stats()["fallbacks"] == {}


@pytest.mark.parametrize("name", ["gpt2_train", "llama_train", "resnet50_train", "unet_train"])
def test_gradients(name: str) -> None:
    judge(name, "cuda", False)
