"""`opforge.install()`: the default backend of torch and of libraries."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import opforge
from opforge import default_backend
from opforge.errors import OpforgeWarning


def graphs() -> int:
    return int(opforge.stats()["graphs"])


def call_default() -> int:
    """How many graphs opforge compiles for a function that is compiled with torch's default backend."""
    torch._dynamo.reset()
    opforge.reset_stats()
    torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
    return graphs()


def default() -> object:
    """Before torch 2.13 it stands in a signature."""
    if hasattr(torch.compiler, "get_default_backend"):
        return torch.compiler.get_default_backend()
    return (torch.compile.__kwdefaults__ or {})["backend"]


def set_default(backend: str | None) -> None:
    if hasattr(torch.compiler, "set_default_backend"):
        torch.compiler.set_default_backend(backend)
    else:
        (torch.compile.__kwdefaults__ or {})["backend"] = backend or "inductor"


def test_torch_compile() -> None:
    """The user's own default comes back."""
    set_default("eager")
    try:
        with opforge.install() as installed:
            assert opforge.install() is installed
            assert call_default() == 1
            assert "torch.compile without backend=" in str(installed)
        assert default() == "eager"
        assert call_default() == 0
        opforge.uninstall()
        assert default() == "eager"
    finally:
        set_default(None)


def test_torch_without_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 2.13: the default stands in the signature."""
    monkeypatch.delattr(torch.compiler, "set_default_backend", raising=False)
    before = dict(torch.compile.__kwdefaults__ or {})
    torch._dynamo.reset()
    opforge.reset_stats()
    with opforge.install():
        torch.compile(lambda x: x.cos() + 1)(torch.ones(3))
        torch.nn.Linear(2, 2).compile()
    assert graphs() == 1
    assert torch.compile.__kwdefaults__ == before


def test_it_is_put_back_after_an_error() -> None:
    before = default()
    with pytest.raises(KeyError), opforge.install():
        raise KeyError("of the program")
    assert default() == before


def test_a_block_inside_of_another_ends_nothing() -> None:
    """It took the outer one's, or the program's, away."""
    before = default()
    with opforge.install():
        with opforge.install() as inner, inner:
            pass
        assert default() == "opforge"
    assert default() == before
    try:
        opforge.install()
        with opforge.install():
            pass
        assert default() == "opforge"
    finally:
        opforge.uninstall()
    with opforge.install() as old:
        opforge.uninstall()
        opforge.install()
    assert default() == "opforge"
    with old:
        pass
    assert default() == "opforge"
    opforge.uninstall()
    assert default() == before


def test_a_library_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import, and `install`, work: there is a warning with the reason."""
    name = "hostile_library"
    (tmp_path / f"{name}.py").write_text("HERE = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(default_backend, "_LIBRARIES", {name: default_backend._accelerate})
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])

    def imported() -> None:
        with opforge.install():
            assert importlib.import_module(name).HERE
            assert default() == "opforge"

    for _ in ("imported later", "imported already"):
        with pytest.warns(OpforgeWarning, match=f"cannot change {name} .AttributeError"):
            imported()
    monkeypatch.setitem(sys.modules, name, None)
    with opforge.install():
        assert default() == "opforge"


LIBRARIES = """
import opforge
{early}
installed = opforge.install()
{late}
from accelerate.utils.dataclasses import DynamoBackend, TorchDynamoPlugin
from transformers.generation.configuration_utils import CompileConfig

waiting = [line for line in str(installed).splitlines() if "when it is imported" in line]
assert not any("accelerate" in line or "transformers" in line for line in waiting), installed
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


def run(folder: Path, text: str, *words: str, command: str = "run") -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(text)
    words = (sys.executable, "-m", "opforge", command, "program.py", *words)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(opforge.__file__).parents[1]), *sys.path])}
    return subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=folder, env=env, check=False)


def test_all_words_after_a_program_are_its_own(tmp_path: Path) -> None:
    words = ("--help", "-abh", "--", "--html", "x", "-h")
    assert run(tmp_path, "import sys; print(sys.argv)", *words).stdout == f"{['program.py', *words]}\n"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, "in <module>\n    raise KeyboardInterrupt\nKeyboardInterrupt\n"),
        (
            "import sys\nsys.excepthook = lambda *a: print(a[0], file=sys.stderr)\n1 / 0",
            1,
            "<class 'ZeroDivisionError'>\n",
        ),
        ("import os\nos.chdir('/')\ndef f(): raise OSError(__file__)\nf()", 1, "program.py\n"),
    ],
)
def test_a_program_ends_as_in_python(tmp_path: Path, text: str, code: int, said: str) -> None:
    ran = run(tmp_path, text)
    assert (ran.returncode, ran.stderr.endswith(said)) == (code, True), ran.stderr


def test_threads_that_outlive_the_program_have_the_default(tmp_path: Path) -> None:
    text = """
import threading, time, torch
def later():
    time.sleep(0.5)
    defaults = torch.compile.__kwdefaults__ or {}
    print(torch.compiler.get_default_backend() if hasattr(torch.compiler, "get_default_backend") else defaults["backend"])
threading.Thread(target=later).start()
"""
    assert run(tmp_path, text).stdout == "opforge\n"


def test_run_no_program(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "opforge", "run", str(tmp_path / "nothing.py")]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2
    assert "there is no program" in ran.stderr
