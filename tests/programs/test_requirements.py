"""Conditions on values (`require` of the operator specs): checked in the kernel that reads the value, and not at all by the setting."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import opforge

GOOD = torch.tensor([0.25, 0.5, 1.0])
TARGET = torch.tensor([0.0, 1.0, 1.0])


def loss(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy(x * 1.0, t * 1.0)


def compiled(checks: bool) -> tuple[object, int, str]:
    """The compiled loss, its kernels, and the wrapper."""
    from opforge.runtime.compile_fx import HISTORY

    torch._dynamo.reset()
    opforge.reset_stats()
    with opforge.config.patch({"index_checks": checks}):
        f = torch.compile(loss, backend="opforge", fullgraph=True)
        torch.testing.assert_close(f(GOOD, TARGET), loss(GOOD, TARGET))
    return f, opforge.stats()["kernels"], HISTORY[-1].wrapper


def test_a_check_adds_no_kernel_and_its_flag_is_read_once() -> None:
    _, without, bare = compiled(checks=False)
    f, kernels, wrapper = compiled(checks=True)
    assert kernels == without == 1
    assert "between 0 and 1" not in bare
    assert wrapper.count("all elements of input should be between 0 and 1") == 1
    assert wrapper.count("all elements of target should be between 0 and 1") == 1
    for x, t, what in ((GOOD * 2, TARGET, "input"), (GOOD, TARGET - 0.5, "target"), (GOOD * 2, TARGET * 2, "input")):
        with pytest.raises(
            RuntimeError,
            match=rf"all elements of {what} should be between 0 and 1: binary_cross_entropy "
            r"\(test_requirements.py:\d+ in loss\): return F.binary_cross_entropy",
        ):
            f(x, t)  # type: ignore[operator]
    torch.testing.assert_close(f(GOOD, TARGET), loss(GOOD, TARGET))  # type: ignore[operator]


def test_without_checks_nothing_is_raised() -> None:
    f, _, _ = compiled(checks=False)
    assert f(GOOD * 2, TARGET).isnan()  # type: ignore[operator]


def test_a_condition_of_the_call_leaves_it_to_the_eager_kernel_which_raises() -> None:
    torch._dynamo.reset()
    opforge.reset_stats()
    f = torch.compile(lambda x: x.max() + 1, backend="opforge", fullgraph=True)
    with pytest.raises(RuntimeError, match="max"):
        f(torch.empty(0))
