"""Operators added by YAML alone: in a user's own package at run time, on the command line, and as CONTRIBUTING says.

Every way ends in the same place: the operator fuses with its neighbours into one kernel and its generated test passes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import opforge
from opforge.generated import ops
from opforge.generator.ahead import check_user_file
from opforge.generator.emit.op_tests import PATH, emit

ROOT = Path(__file__).parent.parent.parent

LIBRARY = """
import torch

lib = torch.library.Library("opforge_demo", "DEF")
lib.define("gate(Tensor x, Tensor by, float sharpness=1.0) -> Tensor")
lib.define("mean_square(Tensor x) -> Tensor")


def gate(x, by, sharpness=1.0):
    return x * torch.sigmoid(sharpness * by)


def mean_square(x):
    return (x * x).mean(-1, keepdim=True)


for name, function in (("gate", gate), ("mean_square", mean_square)):
    lib.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"opforge_demo::{name}", function, lib=lib)
"""

SPECS = """\
- op: opforge_demo.gate
  doc: x let through as far as sigmoid(sharpness * by) is open
  kind: pointwise
  promote: float
  expr: x / (1 + exp(-sharpness * by))
- op: opforge_demo.mean_square
  doc: Mean of the squares over the last dimension, which stays with size 1
  kind: reduction
  let: {last: "[rank(x) - 1]", n: "prod(kept(shape(x), last))"}
  shape: reduced(shape(x), last, True)
  over: kept(shape(x), last)
  reduce: sum
  dtype: promoted_dtype(x)
  at: x[*unreduced(i, r, last, True)] * x[*unreduced(i, r, last, True)]
  finish: value / n
  tests: ["F(3, 5)", "F(2, 3, 8)"]
"""

OVERLOADS = ["opforge_demo.gate.default", "opforge_demo.mean_square.default"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder: a module that registers two operators, and a spec file of them. The module is imported."""
    path = tmp_path_factory.mktemp("user")
    (path / "opforge_demo_lib.py").write_text(LIBRARY)
    (path / "my_ops.yaml").write_text(SPECS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        import_module("opforge_demo_lib")
        yield path


@pytest.fixture
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test adds to the table of lowerings is gone after it."""
    monkeypatch.setattr(ops.LOWERINGS, "_found", dict(ops.LOWERINGS._found))


def gated_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(torch.ops.opforge_demo.mean_square(x) + 1e-6)
    return torch.ops.opforge_demo.gate(x * scale * w, x, 1.7) + 1.0


def check_gated_norm() -> dict[str, object]:
    """Compile and run; the error against float64 is at most twice eager's. Returns what was counted."""
    torch.manual_seed(0)
    x, w = torch.randn(37, 96), torch.rand(96)
    torch._dynamo.reset()
    opforge.reset_stats()
    with torch.no_grad():
        ours = torch.compile(gated_norm, backend="opforge", fullgraph=True, options={"debug.verify": True})(x, w)
        eager, exact = gated_norm(x, w), gated_norm(x.double(), w.double())
    own = (eager - exact).abs().max()
    assert (ours - exact).abs().max() <= 2 * own + torch.finfo(torch.float32).eps
    return opforge.stats()


@pytest.mark.usefixtures("own_table")
def test_a_file_loaded_at_run_time_makes_operators_that_fuse(folder: Path) -> None:
    before = check_gated_norm()
    assert before["externs"] == dict.fromkeys(OVERLOADS, 1)
    assert opforge.load_specs(folder / "my_ops.yaml") == OVERLOADS
    after = check_gated_norm()
    assert (after["graphs"], after["kernels"], after["externs"], after["fallbacks"]) == (1, 1, {}, {})
    assert opforge.last_artifacts().program is not None


@pytest.mark.usefixtures("own_table")
def test_the_test_generated_from_the_file_passes_and_can_fail(folder: Path) -> None:
    def run(specs: Path) -> None:
        opforge.load_specs(specs)
        text = emit(check_user_file(specs, ["opforge_demo_lib"]))[PATH]
        names: dict[str, object] = {"__name__": "generated_user_tests"}
        exec(compile(text, PATH, "exec"), names)
        assert [op.id for op in names["OPS"]] == ["opforge_demo.gate", "opforge_demo.mean_square"]  # type: ignore[attr-defined]
        for op in names["OPS"]:  # type: ignore[attr-defined]
            names["test_op"](op)  # type: ignore[operator]

    run(folder / "my_ops.yaml")
    wrong = folder / "wrong.yaml"
    wrong.write_text(SPECS.replace("exp(-sharpness * by)", "exp(sharpness * by)"))
    with pytest.raises(AssertionError, match=r"opforge_demo\.gate.*differs at"):
        run(wrong)


def command(*args: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("own_table")
def test_the_command_line_checks_it_and_makes_a_module_that_registers_it(folder: Path) -> None:
    done = command("-m", "opforge", "check", "my_ops.yaml", "--import", "opforge_demo_lib", cwd=folder, path=folder)
    assert (done.returncode, done.stdout) == (0, "my_ops.yaml: 2 entries, no mistake\n"), done.stderr
    args = ("-m", "opforge", "generate", "my_ops.yaml", "-o", "opforge_demo_pkg", "--import", "opforge_demo_lib")
    done = command(*args, cwd=folder, path=folder)
    assert (done.returncode, done.stdout) == (0, "wrote opforge_demo_pkg/my_ops.py\n"), done.stderr
    import_module("opforge_demo_pkg.my_ops").register()
    assert check_gated_norm()["kernels"] == 1


def test_an_operator_of_torch_without_an_entry(tmp_path: Path, own_table: None) -> None:
    """A user's entry may also be for an operator of torch's that runs as an eager kernel so far."""
    (tmp_path / "dot.yaml").write_text(
        "- op: aten.dot\n  doc: Inner product\n  kind: reduction\n  shape: '[]'\n  over: shape(self)\n  reduce: sum\n"
        "  at: self[*r] * tensor[*r]\n  tests: ['F(7), F(7)']\n"
    )
    assert opforge.load_specs(tmp_path / "dot.yaml") == ["aten.dot.default"]
    x, y = torch.randn(1000), torch.randn(1000)
    opforge.reset_stats()
    with torch.no_grad():
        ours = torch.compile(lambda x, y: torch.dot(x.exp(), y) * 2, backend="opforge", fullgraph=True)(x, y)
    exact = torch.dot(x.double().exp(), y.double()) * 2
    own = abs(torch.dot(x.exp(), y) * 2 - exact)
    assert abs(ours - exact) <= 2 * own + torch.finfo(torch.float32).eps * (x.exp() * y).abs().sum()
    assert (opforge.stats()["kernels"], opforge.stats()["externs"]) == (1, {})


@pytest.mark.usefixtures("own_table")
def test_an_entry_whose_expressions_fail_leaves_the_operator_to_the_eager_kernel(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        "- op: aten.sin\n  doc: The sine\n  kind: pointwise\n  let: {n: rank(self) - 2}\n  expr: self + 1 // n\n"
    )
    opforge.load_specs(tmp_path / "bad.yaml")
    x = torch.randn(3, 4)
    opforge.reset_stats()
    with torch.no_grad():
        assert torch.equal(torch.compile(lambda x: x.sin(), backend="opforge", fullgraph=True)(x), x.sin())
    assert opforge.stats()["externs"] == {"aten.sin.default": 1}
    assert "bad.yaml fails with ZeroDivisionError" in str(opforge.stats()["reasons"])


def test_contributing_works_as_written(tmp_path: Path) -> None:
    """CONTRIBUTING, "Add an operator in five minutes", followed to the letter in a copy."""
    steps = (
        (ROOT / "CONTRIBUTING.md")
        .read_text()
        .partition("## Add an operator")[2]
        .partition("\nFor an operator of your own")[0]
    )
    found = re.search(r"```yaml\n(.*?)```", steps, re.S)
    assert found is not None
    entry = textwrap.dedent(found[1])
    (name,) = re.findall(r"- op: aten\.(\w+)\n", entry)
    new_op, tests = re.findall(r"`\.venv/bin/python (-[^`]+)`", steps)
    (family,) = re.findall(rf"delete the entry `aten\.{name}` from `([^`]+)`", steps)

    copy = tmp_path / "opforge"
    skip = shutil.ignore_patterns(".*", "__pycache__", "build-tmp", "benchmarks", "examples", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=skip)
    home = copy / family
    assert f"- op: aten.{name}\n" in home.read_text()
    home.write_text(re.sub(rf"- op: aten\.{name}\n(  .*\n)*", "", home.read_text()))
    done = command("-m", "opforge", "generate", cwd=copy, path=tmp_path)
    assert done.returncode == 0, done.stderr
    table = copy / "generated" / "ops" / "__init__.py"
    assert f'"aten.{name}"' not in table.read_text()

    done = command(*new_op.split(), cwd=copy, path=tmp_path)  # 1: its schema
    assert done.stdout.startswith(f"# aten::{name}("), done.stderr
    home.write_text(home.read_text() + entry)  # 2: the entry
    done = command("-m", "opforge", "generate", cwd=copy, path=tmp_path)  # 3: make generate
    assert done.returncode == 0, done.stderr
    assert f'"aten.{name}"' in table.read_text()
    assert f"`aten.{name}`" in (copy / "docs" / "operators.md").read_text()
    done = command(*tests.split(), "-p", "no:xdist", "-p", "no:cacheprovider", cwd=copy, path=tmp_path)  # 4: its tests
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout


@pytest.mark.parametrize("path", [5, ["a.yaml"], None])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(TypeError, match=r"load_specs takes the path of one file, found .*; call it for each file"):
        opforge.load_specs(path)  # type: ignore[arg-type]
