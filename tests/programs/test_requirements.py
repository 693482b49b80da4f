"""Conditions on values (`require` of the operator specs): checked in the kernel that reads the value, and not at all by the setting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
    assert opforge.stats()["reasons"] == {"aten.max.default: eager raises unless numel(self) > 0": 1}


SPEC = """\
- op: opforge_require.spread
  doc: Each element times one of a table, where it is given
  kind: pointwise
  require:
    - that: rank(x) > 0
      bad: ["F(), F()"]
    - each: {x: value < numel(x)}
      raises: IndexError
      says: too large for its tensor
      bad: ["C(9.0, 3), F(3)"]
    - each: {w: "True if dtype(w) != \\"float32\\" else value == value"}
      raises: RuntimeError
      says: the weight has no value
      bad: ["F(3), C(nan, 3)"]
  expr:
    - if: w is not None
      is: x * w
    - is: x + 1
"""


@pytest.fixture
def library(tmp_path: Path) -> Iterator[None]:
    """An operator of the user's own, with requirements."""
    lib = torch.library.Library("opforge_require", "DEF")
    lib.define("spread(Tensor x, Tensor? w=None) -> Tensor")
    lib.impl("spread", lambda x, w=None: x + 1 if w is None else x * w, "CompositeExplicitAutograd")
    lib.impl("spread", lambda x, w=None: torch.empty_like(x), "Meta")
    (tmp_path / "spread.yaml").write_text(SPEC)
    opforge.load_specs(tmp_path / "spread.yaml")
    yield
    lib._destroy()


def test_a_users_operator_of_symbolic_sizes_and_an_optional_argument(library: None) -> None:
    spread = torch.ops.opforge_require.spread
    torch._dynamo.reset()
    opforge.reset_stats()
    f = torch.compile(lambda x, w: spread(x) * spread(x, w), backend="opforge", fullgraph=True, dynamic=True)
    for n in (3, 7, 40):
        x, w = torch.arange(n) * 1.0, torch.rand(n)
        torch.testing.assert_close(f(x, w), spread(x) * spread(x, w))
        with pytest.raises(IndexError, match="too large for its tensor: spread"):
            f(x + 1, w)
        with pytest.raises(RuntimeError, match="the weight has no value: spread"):
            f(x, w / 0 * 0)
    assert opforge.stats()["externs"] == {}
    assert opforge.stats()["kernels"] == 1


def test_a_condition_that_the_dtype_decides_is_not_checked(library: None) -> None:
    from opforge.runtime.compile_fx import HISTORY

    spread = torch.ops.opforge_require.spread
    torch._dynamo.reset()
    x, w = torch.arange(3) * 1.0, torch.full((3,), torch.nan, dtype=torch.float64)
    assert torch.compile(lambda x, w: spread(x, w), backend="opforge")(x, w).isnan().all()
    assert "has no value" not in HISTORY[-1].wrapper
