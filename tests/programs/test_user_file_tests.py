"""`opforge test my_ops.yaml`: right and wrong entries, references, gradients, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opforge.testing.arguments import random_tensor
from opforge.testing.gradients import check_gradients
from opforge.testing.op_check import Case
from opforge.testing.parameters import numbers_of, put_numbers

ROOT = Path(__file__).parent.parent.parent

LIBRARY = """
import torch


@torch.library.custom_op("opforge_tested::soft", mutates_args=())
def soft(x: torch.Tensor, strength: float = 1.0) -> torch.Tensor:
    return x / (1 + strength * x.abs())


@soft.register_fake
def _(x, strength=1.0):
    return torch.empty_like(x, dtype=torch.result_type(x, 1.0))


def setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.strength = inputs[1]


soft.register_autograd(lambda ctx, g: (g / (1 + ctx.strength * ctx.saved_tensors[0].abs()) ** 2, None), setup_context=setup)


def twice(x, strength=1.0):
    return 2 * x / (1 + strength * x.abs())
"""
ENTRY = """\
- op: opforge_tested.soft
  doc: x, made smaller where it is large
  kind: pointwise
  promote: float
  expr: {expr}
  tests: ["F(3, 5)"]
  test_dtypes: [float32, float64]
"""
RIGHT, WRONG = "x / (1 + strength * abs(x))", "x / (1 + abs(x))"


def _run(folder: Path, expr: str, *options: str, library: str = LIBRARY) -> subprocess.CompletedProcess[str]:
    (folder / "opforge_tested_lib.py").write_text(library)
    (folder / "my_ops.yaml").write_text(ENTRY.format(expr=expr))
    words = ["-m", "opforge", "test", "my_ops.yaml", "--import", "opforge_tested_lib", *options]
    return subprocess.run([sys.executable, *words], cwd=folder, env={**os.environ}, capture_output=True, text=True)


def test_a_right_entry(tmp_path: Path) -> None:
    done = _run(tmp_path, RIGHT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("opforge_tested.soft: ")
    assert done.stdout.rstrip().endswith(": right")
    assert ", 0 of them with gradients" not in done.stdout


def test_a_parameter_that_is_not_used_is_found(tmp_path: Path) -> None:
    """The calls of `tests:` leave it at its default, with which the entry is right; the drawn ones do not."""
    done = _run(tmp_path, WRONG)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong" in done.stdout
    assert "{'strength': 0.7}" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_reference_decides(tmp_path: Path) -> None:
    done = _run(tmp_path, RIGHT, "--reference", "opforge_tested.soft=opforge_tested_lib:twice")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differs at" in done.stdout


@pytest.mark.parametrize(
    ("fake", "says"),
    [
        (
            "torch.empty_like(x, dtype=torch.float64)",
            "returns torch.float32[3, 5], and its fake kernel says torch.float64[3, 5]",
        ),
        ("x.new_empty(x.shape[::-1])", "returns torch.float32[3, 5], and its fake kernel says torch.float32[5, 3]"),
    ],
)
def test_a_wrong_fake_kernel_is_named(tmp_path: Path, fake: str, says: str) -> None:
    """The entry is right: it was said to give another dtype than eager."""
    right = "torch.empty_like(x, dtype=torch.result_type(x, 1.0))"
    done = _run(tmp_path, RIGHT, library=LIBRARY.replace(right, fake))
    assert done.returncode == 1, done.stdout + done.stderr
    assert says in done.stdout
    assert "mend the function that is registered with register_fake" in done.stdout
    assert "differs at" not in done.stdout


def test_calls_whose_fake_kernel_is_right_are_tested_beside_wrong_ones(tmp_path: Path) -> None:
    """The fake kernel is wrong of float64; the entry of all."""
    fake = "torch.empty_like(x, dtype=torch.result_type(x, 1.0))"
    done = _run(
        tmp_path, "x / (1 + 2 * abs(x))", library=LIBRARY.replace(fake, "torch.empty_like(x, dtype=torch.float32)")
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "returns torch.float64[3, 5], and its fake kernel says torch.float32[3, 5]" in done.stdout
    assert "torch.float32): result 0 differs at" in done.stdout


def test_the_example_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "programs.md").read_text()
    library = page[page.index('@torch.library.custom_op("my_lib::shrink"') : page.index('Path("my_ops.yaml")')]
    entry = page[page.index("- op: my_lib.shrink") :]
    (tmp_path / "my_lib.py").write_text(f"import torch\nfrom torch import Tensor\n\n{library}")
    (tmp_path / "my_ops.yaml").write_text(entry[: entry.index('""")')])
    command = [sys.executable, "-m", "opforge", "test", "my_ops.yaml", "--import", "my_lib"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.strip().rpartition(",")
    assert f"{told[0]}, " in page  # but for the seconds
    assert told[2].endswith("right")


@pytest.mark.parametrize(
    ("expr", "options", "says"),
    [
        ("x / (1 + strenght * abs(x))", (), "did you mean 'strength'"),
        (RIGHT, ("--entry", "opforge_tested.hard"), "no operator 'opforge_tested.hard'"),
        (RIGHT, ("--reference", "opforge_tested.soft"), "expected --reference OP=MODULE:FUNCTION"),
        (RIGHT, ("--reference", "opforge_tested.soft=nowhere:f"), "cannot import the reference 'nowhere:f'"),
        (
            RIGHT,
            ("--reference", "opforge_tested.soft=nowhere"),
            "expected --reference operator=module:function, found 'nowhere' after the '='",
        ),
    ],
)
def test_mistakes_exit_with_2(tmp_path: Path, expr: str, options: tuple[str, ...], says: str) -> None:
    done = _run(tmp_path, expr, *options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_gradients_are_found() -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * 0.5

    x = random_tensor((3, 5), torch.float32)
    right = Case("aten.sigmoid.default", "x", [x], {}, [x.sigmoid()])
    assert check_gradients(right) == []
    assert "gradient 0 differs" in str(
        check_gradients(Case("aten.sigmoid.default", "x", [x], {}, [half(x)], reference=half))
    )
    assert check_gradients(Case("aten.ceil.default", "x", [x.long()], {}, [x.long()])) is None


def test_numbers_of_parameters_stand_among_the_elements() -> None:
    assert numbers_of(torch.ops.aten.softplus.default._schema) == [1, 20]
    few, many = torch.zeros(4), torch.zeros(3, 5).t()
    put_numbers([few, many, 3, None], [0.7, True, 1e9, 20])
    assert not few.any()
    assert sorted(many.flatten().tolist(), key=abs)[-4:] == pytest.approx([0.7, -0.7, 20, -20])
