"""Folders of graphs: written where torch's users look, run alone by `opforge repro`, made smaller by `opforge minify`; and torch's minifier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opforge
from opforge.generated import cpp_scalars
from opforge.runtime import compile_graph, config
from opforge.runtime.observe.program_text import Unwritable, program_text
from opforge.testing import minify, repro
from opforge.testing.recorded import FolderError, Recorded, read_folder

WRONG_TANH = Path(__file__).parents[1] / "support" / "wrong_tanh"
PROGRAM = """\
import torch
torch.manual_seed(1)
def f(x):
    return torch.softmax(torch.tanh((x * 2).relu()) + 1, -1)
torch.compile(f, backend="opforge")(torch.randn(6, 40))
"""


def folder_of(folder: Path, program: Callable[..., Any], *args: Any, dynamic: bool = False, **settings: Any) -> Path:
    """The folder of the program's only graph."""
    torch._dynamo.reset()
    with config.patch(debug_folders=True, dump_dir=str(folder), **settings):
        torch.compile(program, backend="opforge", dynamic=dynamic)(*args)
    (only,) = folder.iterdir()
    return only


@pytest.fixture
def wrong_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpp_scalars.CPP, "tanh", cpp_scalars.CPP["sin"])


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OPFORGE_CACHE": "0"} | more


def run(*command: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=cwd, env=environment(**more), capture_output=True, text=True)


# --- Graphs are read back as they were

LINEAR = torch.nn.Linear(3, 4)


def updates(x: torch.Tensor) -> torch.Tensor:
    y = LINEAR(x)
    y += 1
    y[0] = y[1]
    return y.T[..., 1:].mul_(2), (-2.0) ** torch.ones(3), 3 - y, ~(y > 0), -y


def autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = LINEAR(x)
    return y.float() + 1


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda z: z.sin() + 1, lambda z: z - 1, (x,))


def from_data(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, int]:
    return torch.nn.functional.embedding(i, x).to(torch.float64).reshape(-1, x.shape[1]) * x.shape[0], x.shape[0]


def draws(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)


def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 2


BASE = torch.arange(12.0).reshape(3, 4)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "updates": (updates, (torch.randn(5, 3),), {}),
    "autocast": (autocast, (torch.randn(5, 3),), {}),
    "branches": (branches, (torch.randn(5, 3),), {}),
    "sizes": (from_data, (torch.randn(7, 3), torch.tensor([[3, 6], [0, 6]])), {"dynamic": True}),
    "positions": (from_data, (torch.randn(700, 3), torch.tensor([[3, 699], [0, 6]])), {}),
    "draws": (draws, (torch.randn(5, 30),), {}),
    "one storage": (writes, (BASE[:2], BASE[1:]), {}),
    "non-leaf": (lambda x: x.mul_(2).sin(), (torch.randn(80, 3, requires_grad=True) * 1,), {}),
    "complex": (lambda x: x * 2 + 1j, (torch.randn(80, 3, dtype=torch.complex64),), {}),
    "number": (lambda x, n: x * n, (torch.randn(80, 3), 2.5), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_runs_alone(name: str, tmp_path: Path) -> None:
    program, args, settings = CASES[name]
    folder = folder_of(tmp_path, program, *args, **settings)
    recorded = read_folder(folder)
    assert recorded.symbolic is settings.get("dynamic", False)
    verdict = repro.check(recorded)
    assert not verdict.failed, verdict
    assert (folder / "02_functional_graph.py").exists()


def test_a_graph_that_is_read_back_is_written_alike(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, updates, torch.randn(5, 3))
    text = (folder / "program.py").read_text()
    again = program_text(read_folder(folder).graph)
    assert text.replace(" : torch.Tensor", "").replace(" : torch.nn.parameter.Parameter", "") == again


def test_inputs_are_as_they_were(tmp_path: Path) -> None:
    mask, positions = torch.rand(40, 50) > 0.5, torch.randint(3, 9, (1000, 70))
    large, variance = torch.randn(90, 30).t(), torch.rand(500) + 7
    args = (mask, positions, large, variance)
    program = lambda m, p, x, v: (m.sum(), p + 1, x * 2, v.sqrt())  # noqa: E731
    made = read_folder(folder_of(tmp_path / "some", program, *args)).inputs()
    assert [(t.shape, t.stride(), t.dtype) for t in made] == [(t.shape, t.stride(), t.dtype) for t in args]
    assert torch.equal(made[0], mask)
    assert 3 <= made[1].min() <= made[1].max() <= 8
    assert made[3].min() >= 7
    made = read_folder(folder_of(tmp_path / "all", program, *args, debug_save_inputs=True)).inputs()
    assert all(map(torch.equal, made, args))


def test_storages_are_shared_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, writes, BASE[:2], BASE[1:])
    x, y = read_folder(folder).inputs()
    assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert (y.storage_offset(), y.shape) == (4, (2, 4))


# --- What fails


def test_a_wrong_kernel_differs_and_shrinks(tmp_path: Path, wrong_tanh: None) -> None:
    def program(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (LINEAR(x).relu() + 1).softmax(-1)
        z = (y * 3).tanh().transpose(0, 1)[i] + 2
        return z.sum(0), y.exp()

    folder = folder_of(tmp_path, program, torch.randn(20, 3), torch.tensor([3, 1]), cache=False)
    recorded = read_folder(folder)
    verdict = repro.check(recorded)
    assert (verdict.kind, verdict.what) == ("differs", "value of a result")
    assert ", float64 " in str(verdict)
    told: list[int] = []
    found = minify.minified(recorded, told=lambda calls, elements, tried: told.append(calls))
    assert found is not None
    assert (minify.calls(found.recorded), minify.elements(found.recorded)) == (1, 1)
    assert found.recorded.graph.code.count("tanh()") == 1
    assert told
    minify.write_folder(found.recorded, tmp_path / "small", {"from": str(folder)})
    assert repro.check(read_folder(tmp_path / "small")).kind == "differs"


def test_a_mistake_inside_of_opforge_raises_and_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = compile_graph.lower

    def broken(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if any("cumsum" in n.name for n in graph.graph.nodes):
            raise KeyError("no such sum")
        return lower(graph, *args, **kwargs)

    monkeypatch.setattr(compile_graph, "lower", broken)
    with config.patch(debug_verify=False), pytest.warns(UserWarning, match="internal error"):
        folder = folder_of(tmp_path, lambda x: (x.sin() + 1).cumsum(0).exp(), torch.randn(40, 3))
    with config.patch(debug_verify=False):
        found = minify.minified(read_folder(folder))
    assert found is not None
    assert (found.verdict.kind, found.verdict.what) == ("raises", "internal error, please report it KeyError")
    assert minify.calls(found.recorded) == 1


def test_nothing_fails_nothing_shrinks(tmp_path: Path) -> None:
    assert minify.minified(read_folder(folder_of(tmp_path, torch.sin, torch.randn(3)))) is None


def test_errors_of_eager_are_the_same(tmp_path: Path) -> None:
    table, positions = torch.randn(5, 3), torch.tensor([0, 4])
    folder = folder_of(tmp_path, lambda t, i: t[i], table, positions)
    recorded = read_folder(folder)
    name = recorded.about["inputs"][1]["name"]
    wrong = Recorded(recorded.graph, recorded.about, {**recorded.tensors, name: torch.tensor([0, 5])})
    verdict = repro.check(wrong)
    assert (verdict.kind, "both raise IndexError" in str(verdict)) == ("same", True)


# --- Folders that cannot be run


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _json(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "graph.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _text(name: str, old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("graph.json"), "it has no graph.json; TORCH_COMPILE_DEBUG=1 writes such folders"),
        (_without("program.py"), "program.py"),
        (lambda folder: (folder / "graph.json").write_text("{"), "graph.json cannot be read"),
        (lambda folder: (folder / "tensors.pt").write_bytes(b"PK nothing"), "cannot be read"),
        (_json(format=99), "format 99 of graph.json is not known"),
        (_json(unwritten="it holds a secret"), "could not be written down: it holds a secret"),
        (_json(versions={}), "graph.json describes no graph: its versions or graphs have no names"),
        (_json(torch={"grad": True}), "describes no graph: what torch was set to is not all there"),
        (_json(inputs=[]), "program.py takes 1 inputs, graph.json describes 0"),
        (_json(inputs=[{"kind": "tensor"}]), "describes no graph: a tensor has no extent"),
        (_json(constants=None), "describes no graph: constants is no dict"),
        (_text("graph.json", '"cpu"', '"abacus"'), "graph.json describes no graph: RuntimeError"),
        (_text("graph.json", '"cpu"', '"cuda:7"'), "the graph's tensors are on cuda:7, which is not here"),
        (
            _text("program.py", "import torch\n", "import torch\nimport no_such_module\n"),
            "program.py needs no_such_module",
        ),
        (_text("program.py", "torch.sin", "torch.sinn"), "AttributeError: module 'torch' has no attribute 'sinn'"),
        (
            _text("program.py", "torch.sin", "torch.ops.no_such.sin"),
            "no attribute 'sin'; --import MODULE imports what registers operators",
        ),
        (_text("program.py", "sin =", "while True: sin ="), "a statement that no graph has"),
    ],
)
def test_bad_folders(
    spoil: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, lambda x: torch.sin(x), torch.randn(3))
    spoil(folder)
    with pytest.raises(FolderError) as caught:
        read_folder(folder)
    assert message in str(caught.value)
    assert repro.main(folder) == 2
    assert message in capsys.readouterr().err


def test_inputs_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, lambda x: torch.sin(x), torch.randn(3))
    _text("graph.json", '"float32"', '"float33"')(folder)
    assert repro.main(folder) == 2
    assert "inputs cannot be made as graph.json says" in capsys.readouterr().err


def test_a_device_that_torch_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 would say that results differ."""
    folder = folder_of(tmp_path, lambda x: torch.sin(x), torch.randn(3))
    assert repro.main(folder, device="abacus") == 2
    assert "--device: torch knows no device 'abacus'" in capsys.readouterr().err


def test_what_cannot_be_written_down_is_said(tmp_path: Path) -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(Unwritable, match="the graph calls a module, 0"):
        program_text(graph)
    with config.patch(debug_folders=True, dump_dir=str(tmp_path)):
        opforge.compile_fx(graph, [torch.ones(1, 2)])
    with pytest.raises(FolderError, match="could not be written down: the graph calls a module"):
        read_folder(tmp_path / "graph_0000")


# --- In processes of their own


@pytest.mark.slow
def test_from_torch_compile_debug_to_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = f"{WRONG_TANH}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = run("program.py", cwd=tmp_path, TORCH_COMPILE_DEBUG="1")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "torch_compile_debug").glob("run_*/opforge/graph_0000")
    right = run("-m", "opforge", "repro", str(folder), cwd=tmp_path)
    assert (right.returncode, "SAME: 2 tensors are as right as eager's" in right.stdout) == (0, True), right
    wrong = run(str(folder / "program.py"), cwd=tmp_path, PYTHONPATH=path)
    assert (wrong.returncode, "DIFFERS: result 0: " in wrong.stdout) == (1, True), wrong
    none = run("-m", "opforge", "repro", str(tmp_path), cwd=tmp_path)
    assert (none.returncode, "did you mean " in none.stderr) == (2, True), none


@pytest.mark.slow
def test_a_program_shrinks_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = f"{WRONG_TANH}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = run("-m", "opforge", "minify", "program.py", "-o", "small", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "5 calls, 240 elements -> 1 calls, 1 elements" in done.stdout
    again = run("-m", "opforge", "repro", "small", cwd=tmp_path, PYTHONPATH=path)
    assert (again.returncode, "DIFFERS" in again.stdout) == (1, True), again


@pytest.mark.slow
def test_torchs_minifier_finds_a_wrong_kernel(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = f"{WRONG_TANH}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    settings = {"PYTHONPATH": path, "TORCHDYNAMO_REPRO_AFTER": "dynamo", "TORCHDYNAMO_REPRO_LEVEL": "4"}
    done = run("program.py", cwd=tmp_path, **settings)
    assert "Bad accuracy detected" in done.stderr
    (launcher,) = tmp_path.glob("torch_compile_debug/run_*/minifier/minifier_launcher.py")
    done = run(str(launcher), cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    small = (tmp_path / "repro.py").read_text()
    assert "torch.tanh(" in small
    assert "softmax" not in small
    assert "backend='opforge'" in small


def test_results_answer_torchs_minifiers() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x.sin())
    compiled = opforge.backend(graph, [torch.ones(3)])
    assert list(compiled.named_parameters()) == list(compiled.named_buffers()) == []
