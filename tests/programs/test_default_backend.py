"""`opforge.install()`: the default backend of torch and of libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import opforge


def graphs() -> int:
    return int(opforge.stats()["graphs"])


def call_default() -> int:
    """How many graphs opforge compiles for a function that is compiled with torch's default backend."""
    torch._dynamo.reset()
    opforge.reset_stats()
    torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
    return graphs()


def test_torch_compile() -> None:
    """The user's own default comes back."""
    torch.compiler.set_default_backend("eager")
    try:
        with opforge.install() as installed:
            assert opforge.install() is installed
            assert call_default() == 1
            assert "torch.compile without backend=" in str(installed)
        assert torch.compiler.get_default_backend() == "eager"
        assert call_default() == 0
        opforge.uninstall()
        assert torch.compiler.get_default_backend() == "eager"
    finally:
        torch.compiler.set_default_backend(None)


def test_torch_without_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 2.13: the default stands in the signature."""
    monkeypatch.delattr(torch.compiler, "set_default_backend")
    before = dict(torch.compile.__kwdefaults__ or {})
    torch._dynamo.reset()
    opforge.reset_stats()
    with opforge.install():
        torch.compile(lambda x: x.cos() + 1)(torch.ones(3))
        torch.nn.Linear(2, 2).compile()
    assert graphs() == 1
    assert torch.compile.__kwdefaults__ == before


def test_it_is_put_back_after_an_error() -> None:
    before = torch.compiler.get_default_backend()
    with pytest.raises(KeyError), opforge.install():
        raise KeyError("of the program")
    assert torch.compiler.get_default_backend() == before


LIBRARIES = """
import opforge
{early}
installed = opforge.install()
{late}
from accelerate.utils.dataclasses import DynamoBackend, TorchDynamoPlugin
from transformers.generation.configuration_utils import CompileConfig

assert "when it is imported" not in str(installed), installed
assert DynamoBackend("OPFORGE").value == "OPFORGE" and "OPFORGE" in DynamoBackend.list()
assert TorchDynamoPlugin(backend="opforge").to_kwargs()["backend"] == "opforge"
assert CompileConfig().backend == "opforge" and CompileConfig(backend="eager").backend == "eager"
assert CompileConfig().to_dict()["backend"] == "opforge"
opforge.uninstall()
assert "OPFORGE" not in DynamoBackend.list() and CompileConfig().backend == "inductor"
try:
    TorchDynamoPlugin(backend="opforge")
except ValueError:
    print("put back")
"""


@pytest.mark.parametrize("early", [False, True])
def test_libraries(early: bool) -> None:
    """Imported before and after."""
    pytest.importorskip("accelerate", reason="C17: accelerate is not installed")
    pytest.importorskip("transformers", reason="C17: transformers is not installed")
    imports = "import accelerate.utils.dataclasses\nimport transformers.generation.configuration_utils"
    text = LIBRARIES.format(early=imports if early else "", late="" if early else imports)
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert ran.stdout.endswith("put back\n"), ran.stderr


SCRIPT = """
import sys, torch, helper
assert __name__ == "__main__" and sys.argv[1:] == ["--fast", "3"] and helper.HERE
print(torch.compile(lambda x: x * 2)(torch.ones(2)).tolist())
import opforge
print("graphs", opforge.stats()["graphs"])
"""


def test_run_a_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("HERE = True\n")
    words = [sys.executable, "-m", "opforge", "run", str(tmp_path / "program.py"), "--fast", "3"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ran.stdout == "[2.0, 2.0]\ngraphs 1\n", ran.stderr
    assert "opforge is the default backend of" in ran.stderr


@pytest.mark.parametrize("error", ["OSError('no disk')", "opforge.errors.ConfigError('no such')", "SystemExit(3)"])
def test_the_programs_own_errors(tmp_path: Path, error: str) -> None:
    (tmp_path / "program.py").write_text(f"import gc, opforge\nassert gc.isenabled()\nraise {error}\n")
    words = [sys.executable, "-m", "opforge", "run", str(tmp_path / "program.py")]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if "Exit" in error:
        assert ran.returncode == 3
    else:
        assert ran.returncode == 1
        assert f'program.py", line 3, in <module>\n    raise {error}' in ran.stderr


def test_run_no_program(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "opforge", "run", str(tmp_path / "nothing.py")]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2
    assert "there is no program" in ran.stderr
