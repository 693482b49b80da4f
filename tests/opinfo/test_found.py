"""What the tables have found, each as small as it could be made; the rows themselves are run by `test_opinfo`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opforge
from tests.fuzz.check import quick_builds

from .check import Result, check
from .database import Call, Case


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of prepared headers and compiled kernels of the session."""
    return tmp_path_factory.mktemp("opinfo")


@pytest.fixture(autouse=True)
def quick(prepared: Path) -> Iterator[None]:
    """Quick builds in force for one test."""
    with quick_builds(prepared):
        yield


def _check(function: Any, *leaves: Any, variant: str = "forward", dynamic: bool = False) -> Result:
    return check(Call(Case("a program", "float32", variant, dynamic), 0, function, list(leaves)))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_internal_operators_get_the_strides_that_they_were_traced_with(mode: str) -> None:
    """`embedding_bag` makes its indices contiguous for a kernel that relies on it. The copy was taken for a view that strides express: the
    kernel read what lies between the indices.
    """
    indices = torch.tensor([[1, 7], [5, 7], [4, 7], [5, 7], [9, 7]])[:, 0]
    weight, offsets = torch.randn(10, 5), torch.tensor([0, 3])
    bag = lambda w, i, o: F.embedding_bag(i, w, o, mode=mode)  # noqa: E731
    assert not _check(bag, weight, indices, offsets).different


def test_public_operators_take_any_strides() -> None:
    """No copy is made for a matrix product, which takes strides as they are."""
    opforge.reset_stats()
    x, y = torch.randn(40, 60), torch.randn(40, 50)  # more than loops take
    result = _check(lambda a, b: a.t().contiguous() @ b, x, y)
    assert not result.different
    assert result.kernels == 0


def test_a_new_tensor_that_repeats_elements_has_the_strides_asked_for() -> None:
    """It came back dense: only gradients may."""
    result = _check(lambda: torch.empty_strided((2, 3, 4), (0, 1, 3)).zero_())
    assert not result.different


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clone().as_strided((3,), (1,), 0) + 1,
        lambda x: x.clone().as_strided((3,), (2,), 0),
        lambda x: x.clone().resize_(3),
        lambda x: (x * 1).as_strided((2, 2), (2, 1), 1),
    ],
)
def test_a_copy_does_not_begin_where_its_original_lies_in_a_storage(function: Any) -> None:
    """The copy of an input was taken for the input (a rewrite): what counts from the start of the storage read other elements."""
    assert not _check(function, torch.arange(10.0)[4:]).different


@pytest.mark.parametrize("size", [(2,), (2, 3), (2, 1), (2, 2, 1)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_index_add_of_other_sizes_is_refused(size: tuple[int, ...], dynamic: bool) -> None:
    """Torch's fake kernel takes them: the compiled code wrote beyond the rows, and beyond the tensor."""
    add = lambda x, i, s: x.index_add(0, i, s)  # noqa: E731
    result = _check(add, torch.zeros(3, 2), torch.tensor([0, 1]), torch.ones(size), dynamic=dynamic)
    assert result.outcome == "raises"


@pytest.mark.parametrize("correction", [0.5, 1.3, 1, 3])
def test_corrections_of_symbolic_sizes(correction: float) -> None:
    """Of a symbolic size 1.3 was taken off as 1; more than the size gave negative variances."""
    variance = lambda x: (x.var(0, correction=correction), x.std(correction=correction))  # noqa: E731
    assert not _check(variance, torch.randn(2, 5), dynamic=True).different


def test_the_variance_of_nothing_is_nan() -> None:
    """With a negative correction too, where the divisor is positive."""
    compiled = torch.compile(lambda t: t.var(0, correction=-1), backend="opforge", dynamic=False)
    assert bool(compiled(torch.randn(0, 3)).isnan().all())
    some = torch.randn(4, 3)
    torch.testing.assert_close(compiled(some), some.var(0, correction=-1))
    dynamic = torch.compile(lambda t: t.var(0, correction=-1.5), backend="opforge", dynamic=True)
    for rows in (3, 0, 1, 2):
        t = torch.randn(rows, 3)
        torch.testing.assert_close(dynamic(t), t.var(0, correction=-1.5), equal_nan=True)


def test_an_imaginary_part_of_nothing() -> None:
    """The view begins one number behind the start of a storage that holds none."""
    assert not _check(torch.imag, torch.zeros(1, 0, 3, dtype=torch.complex64)).different
    assert not _check(lambda x: x.imag * 2, torch.zeros(0, dtype=torch.complex128)).different


def test_a_result_whose_size_only_a_guard_compares_with_out() -> None:
    """`debug.verify` refused it: the diagonal's size is an expression of the input's, that of `out` a symbol of its own."""
    x, out = torch.randn(3, 5), torch.empty(3)
    result = _check(lambda a, o: torch.diagonal_copy(a, 2, out=o), x, out, variant="out", dynamic=True)
    assert not result.different
    assert not any(reason.startswith("graph:") for reason in result.why)


def test_sizes_that_a_fake_kernel_gives_an_input_are_not_asked_of_the_callers() -> None:
    """Torch's Python kernel for symbolic sizes resizes the number that `addr_` is called with; eager refuses it, and so must we."""
    x, a, b = torch.tensor(1.0), torch.randn(5), torch.randn(10)
    result = _check(lambda x, a, b: x.addr_(a, b), x, a, b, variant="inplace", dynamic=True)
    assert not result.different
    assert result.outcome == "raises"
