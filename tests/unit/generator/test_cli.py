"""The command line: exit codes, what is printed, and that a user's file becomes a module."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opforge import __version__, cli
from opforge.cli import app, main
from opforge.errors import SpecError
from opforge.generated import ops
from opforge.generator import ahead, run, user
from opforge.generator.model import Model
from opforge.generator.new_op import KINDS

GOOD = """\
- op: aten.softplus
  doc: The softplus function
  kind: pointwise
  promote: float
  expr: log1p(exp(self * beta)) / beta
"""


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Opforge = Callable[..., Done]


@pytest.fixture(scope="module")
def base() -> Model:
    return run.load_model()


@pytest.fixture
def opforge(
    base: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Opforge:
    """Run the command line in this process, in `tmp_path`, over specs that are loaded once."""
    monkeypatch.chdir(tmp_path)
    for module in (run, ahead):
        monkeypatch.setattr(module, "load_model", lambda *_: base)
    monkeypatch.setattr(user, "_base", lambda: base)

    def call(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["opforge", *args])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return Done(end.value.code if isinstance(end.value.code, int) else 0, out, err)

    return call


def test_help_names_the_commands() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    for name in ("generate", "check", "new-op", "schemas", "rows", "lines", "keys"):
        assert name in text


def test_check_of_a_right_and_a_wrong_file(opforge: Opforge, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(GOOD.replace("beta)) / beta\n", "beta)) / beat\n"))
    done = opforge("check", "good.yaml")
    assert (done.returncode, done.stdout) == (0, "good.yaml: 1 entry, no mistake\n"), done.stderr
    done = opforge("check", "bad.yaml", "good.yaml")
    assert done.returncode == 2
    assert "bad.yaml:5:35: error: unknown name 'beat'; did you mean 'beta'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_tells_of_what_cannot_be_loaded(opforge: Opforge, tmp_path: Path) -> None:
    rule = "- rule: sub_zero_of_mine\n  doc: x - 0 = x\n  match: sub.Tensor(x, 0)\n  when: same_type(x, out)\n  replace: x\n  test: {x: [3, 5]}\n"
    (tmp_path / "both.yaml").write_text(GOOD + rule)
    done = opforge("check", "both.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "both.yaml: 2 entries, no mistake"
    assert "both.yaml: rewrites belong into opforge's own specs" in done.stdout
    with pytest.raises(SpecError, match="a 'rule' belongs into opforge's own specs"):
        user.generate_module("both.yaml")


def test_check_of_our_own_specs(opforge: Opforge, base: Model) -> None:
    done = opforge("check")
    assert done.returncode == 0, done.stderr
    assert f"{base.size} entries, no mistake" in done.stdout
    done = opforge("check", *(str(run.SPECS_DIR / name) for name in ("ops/math.yaml", "ops", "ops.yaml")))
    math, ops, root = (int(line.split()[-4]) for line in done.stdout.splitlines())
    assert 0 < math < ops == root < base.size


def test_version_and_choices_in_the_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"opforge {__version__}\n"
    assert cli.KINDS == KINDS
    assert tuple(run.EMITTERS) == cli.EMITTERS


def test_new_op_of_ones_own_found_beside_the_file(opforge: Opforge, tmp_path: Path) -> None:
    """The module lies beside the spec file, which is not in the current folder."""
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "opforge_far_lib.py").write_text(
        "import torch\nlib = torch.library.Library('opforge_far', 'DEF')\nlib.define('twice(Tensor x) -> Tensor')\n"
    )
    before = list(sys.path)
    out = ("-o", "far/my_ops.yaml", "--import", "opforge_far_lib")
    done = opforge("new-op", "opforge_far.twice", *out)
    assert done.stdout.endswith("next: opforge check far/my_ops.yaml --import opforge_far_lib\n"), done.stderr
    done = opforge("check", "far/my_ops.yaml", "--import", "opforge_far_lib")
    assert (done.returncode, done.stdout) == (0, "far/my_ops.yaml: 1 entry, no mistake\n"), done.stderr
    assert sys.path == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["check", "nothere.yaml"], "nothere.yaml:1:1: error: cannot read the file"),
        (["check", "."], "cannot read the file"),
        (["check", "good.yaml", "--import", "no_such_module"], "cannot import 'no_such_module'"),
        (["generate", "good.yaml"], "needs both"),
        (["generate", "-o", "out"], "needs both"),
        (["generate", "good.yaml", "-o", "good.yaml/x"], "good.yaml"),
        (["check", "{specs}/nonexist.yaml"], "specs/nonexist.yaml is none of the spec files"),
        (["check", "{specs}/ops/maht.yaml"], "did you mean 'specs/ops/math.yaml'?"),
        (["generate", "--only", "nope"], "no emitter 'nope' (there are config, "),
        (["generate", "--check", "--only", "op_test"], "did you mean 'op_tests'?"),
        (["schemas", "softpluss"], "did you mean 'aten.softplus'?"),
        (["new-op", "aten.special_xlog1py"], "aten.special_xlog1py.default: specs/ops/arithmetic.yaml:"),
        (["new-op", "my_lib.my_op"], "if it is your own, import the module that registers it (--import)"),
        (["new-op", "aten.softpluss"], "did you mean 'aten.softplus'?"),
        (["new-op", "aten.relu"], "'aten.relu' has an entry already: specs/ops/"),
        (["new-op", "aten.relu", "--kind", "pointwize"], "did you mean 'pointwise'?"),
    ],
)
def test_mistakes_exit_with_2_and_no_traceback(args: list[str], message: str, opforge: Opforge, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    done = opforge(*(a.format(specs=run.SPECS_DIR) for a in args))
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_a_module_from_a_users_file(opforge: Opforge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_ops.yaml").write_text(
        "- op: my_lib.scaled_sum\n  doc: x + s * y\n  kind: pointwise\n  expr: x + s * y\n"
    )
    (tmp_path / "my_lib.py").write_text(
        "import torch\nlib = torch.library.Library('my_lib', 'DEF')\n"
        "lib.define('scaled_sum(Tensor x, Tensor y, float s=2.0) -> Tensor')\n"
    )
    done = opforge("generate", "my_ops.yaml", "-o", "pkg")
    assert done.returncode == 2
    assert "import the module that registers it (--import)" in done.stderr
    assert not (tmp_path / "pkg").exists()
    done = opforge("generate", "my_ops.yaml", "-o", "pkg", "--import", "my_lib")
    assert (done.returncode, done.stdout) == (0, "wrote pkg/my_ops.py\n"), done.stderr
    text = (tmp_path / "pkg" / "my_ops.py").read_text()
    assert "# spec: my_lib.scaled_sum\n" in text
    monkeypatch.setattr(ops.LOWERINGS, "_found", dict(ops.LOWERINGS._found))
    monkeypatch.syspath_prepend(tmp_path)
    import_module("pkg.my_ops").register()
    assert ops.LOWERINGS["my_lib.scaled_sum.default"].__name__ == "scaled_sum"
    done = opforge("generate", "my_ops.yaml", "-o", "pkg", "--import", "my_lib", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_templates_of_new_entries_are_valid(kind: str, opforge: Opforge, tmp_path: Path) -> None:
    done = opforge("new-op", "aten.cosine_similarity", "--kind", kind, "-o", "new.yaml")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "new.yaml").read_text()
    assert text.startswith("# aten::cosine_similarity(Tensor x1")
    done = opforge("check", "new.yaml")
    assert done.returncode == 0, done.stderr + text


def test_a_template_says_which_row_it_replaces(opforge: Opforge) -> None:
    text = opforge("new-op", "aten._masked_scale").stdout
    assert text.startswith(
        "# aten::_masked_scale(Tensor self, Tensor mask, float scale) -> Tensor\n# In place of 'aten._masked_scale' there: "
    )
    assert "(extern: " in text
    assert "\n- op: aten._masked_scale\n" in text


def test_rows_counts_what_the_installed_torch_has() -> None:
    done = CliRunner().invoke(app, ["rows"])
    assert "in-place or out= variant" in done.output
    assert "pointwise" in done.output


def test_schemas_shows_operators() -> None:
    lines = CliRunner().invoke(app, ["schemas", "aten.softplus_backward"]).output.splitlines()
    assert any(line.startswith("aten::softplus_backward(Tensor grad_output") for line in lines)
    assert len(lines) < 5


def test_lines_and_keys_print_tables() -> None:
    lines = CliRunner().invoke(app, ["lines"]).output
    assert "hand-written" in lines
    assert "runtime/build" in lines
    assert "setting" in CliRunner().invoke(app, ["keys"]).output


def test_as_a_process(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(GOOD.replace("beta)) / beta\n", "beta)) / beat\n"))
    command = [sys.executable, "-m", "opforge", "check", "bad.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "bad.yaml:5:35: error: unknown name 'beat'; did you mean 'beta'?\n    5 |   expr: log1p("
    )


def test_start_is_quick_and_without_torch() -> None:
    code = "import sys, opforge.cli; assert 'torch' not in sys.modules and 'yaml' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
