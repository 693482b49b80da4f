"""The summary of `opforge.explain` and of `opforge explain`: counts, times, bytes, what ran eagerly, and what is said of programs that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import opforge
from opforge.report.explanation import explained
from opforge.report.units import bytes_text, count_text, operations_text, percent_text, seconds_text

ROOT = Path(opforge.__file__).parent


def rows(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1) + 1


def test_bytes_and_operations_are_those_of_the_tensors() -> None:
    """One kernel that reads 64 x 512 floats and writes as many is at the least."""
    x = torch.randn(64, 512)
    (graph,) = opforge.explain(rows)(x).report()["graphs"]
    assert graph["kernels"] == 1
    assert graph["moved"] == graph["least"] == 2 * x.nbytes
    (step,) = graph["steps"]
    assert step["operations"] >= 5 * x.numel()
    assert step["kind"] == "kernel"
    line = rows.__code__.co_firstlineno + 1
    assert step["lines"] == [f"test_explain_summary.py:{line} in rows: return torch.softmax(x * 2, -1) + 1"]
    assert f"{step['name']}(" in step["code"]
    assert graph["measured"]["seconds"] > 0
    assert step["measured"] > 0
    assert step["predicted"] > 0


def test_a_product_has_the_operations_of_its_formula() -> None:
    a, b = torch.randn(48, 32), torch.randn(32, 40)
    (graph,) = opforge.explain(lambda a, b: (a @ b).relu())(a, b).report()["graphs"]
    product = next(s for s in graph["steps"] if s["kind"] == "library")
    assert product["operations"] == 2 * 48 * 32 * 40
    assert product["moved"] == a.nbytes + b.nbytes + 48 * 40 * 4
    assert product["why_library"]


def test_sizes_that_are_symbols_are_those_of_the_call() -> None:
    f = torch.compile(lambda x: x.sin() * 2, backend="opforge", dynamic=True)
    with explained() as said:
        f(torch.randn(7, 33))
    (graph,) = said.report()["graphs"]
    assert graph["moved"] == 2 * 7 * 33 * 4


def test_what_it_measures_changes_nothing() -> None:
    """A graph that writes to its input and one that draws random numbers are called again on copies, and the generator is put back."""

    def program(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.rand_like(x) + x

    x = torch.zeros(16)
    with torch.no_grad():
        said = opforge.explain(program)(x)
        state = torch.get_rng_state()
        assert said.report()["graphs"][0]["measured"] is not None
    torch.testing.assert_close(x, torch.ones(16))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("inside", [False, True])
def test_operators_of_the_program_are_not_called_again(inside: bool) -> None:
    """Their functions may count, print or talk to other processes; also in the branch of a condition."""
    seen: list[float] = []

    @torch.library.custom_op(f"explained::seen_{inside}".lower(), mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x[0]))
        return x.clone()

    noted.register_fake(torch.empty_like)

    def program(x: torch.Tensor) -> torch.Tensor:
        if not inside:
            return noted(x * 2) + 1
        return torch.cond(x.sum() > 0, lambda x: noted(x * 2) + 1, lambda x: x.sin(), (x,))

    said = opforge.explain(program)(torch.ones(3))
    text = str(said)
    assert "was not timed: it calls explained.seen" in text
    assert "may do more than compute its results" in " ".join(text.split())
    assert seen == [2.0]
    assert torch.equal(said.result, torch.full((3,), 3.0))


def test_a_cached_graph_has_a_plan_too() -> None:
    x = torch.randn(8, 16)
    first, again = (opforge.explain(rows)(x) for _ in range(2))
    assert again.graphs[0].cached
    names = [[s["name"] for s in said.report()["graphs"][0]["steps"]] for said in (first, again)]
    assert names[0] == names[1]


def test_the_summary_is_short_and_says_where_the_time_goes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.LayerNorm(256))
    said = str(opforge.explain(model)(torch.randn(64, 128)))
    lines = said.splitlines()
    assert lines[0].startswith("opforge: 1 graph, ")
    assert "no graph ran eagerly" in lines[0]
    assert len(lines) < 30
    assert max(map(len, lines)) <= 110
    for part in (
        "graph 0, forward",
        "graph 0, backward",
        "where the time goes",
        "library calls:",
        "addmm",
        "roofline",
        "least",
    ):
        assert part in said
    assert "## loop IR" not in said


def test_a_backward_that_nobody_asked_for_is_no_failure() -> None:
    said = opforge.explain(lambda x: x.sin() * x)(torch.randn(300, requires_grad=True))
    text = " ".join(str(said).split())
    assert "graph 0, backward was not timed: nothing called backward() on the result while it was explained" in text
    assert "# graph 0: 1 kernel, 0 library calls, arena of 0 bytes, " in said.details()


def test_a_graph_that_runs_eagerly_is_said_with_its_reason() -> None:
    said = opforge.explain(lambda x: x + 1)(torch.ones(3, device="meta"))
    assert "1 graph ran eagerly: UnsupportedError: a tensor is on the device meta" in str(said)


def test_why_kernels_are_apart() -> None:
    def two(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1).sum(0)

    (graph,) = opforge.explain(two)(torch.randn(64, 512)).report()["graphs"]
    whys = [why for _, _, _, _, why in graph["edges"]]
    assert whys
    assert "unknown" not in whys


def test_the_data_is_json() -> None:
    said = opforge.explain(rows)(torch.randn(4, 8))
    assert json.loads(json.dumps(said.report(), allow_nan=False)) == said.report()


def test_what_the_program_raises_has_a_note() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        torch._dynamo.graph_break()
        raise ValueError(f"boom {y.shape}")

    with pytest.raises(ValueError, match="boom") as caught:
        opforge.explain(program)(torch.randn(4))
    (note,) = caught.value.__notes__
    assert note.startswith("opforge compiled until then:\nopforge: 1 graph, 1 kernel, 0 library calls")


def test_a_graph_that_raises_when_it_is_called_again_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from opforge.report import data

    def broken(*args: Any) -> None:
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr(data, "measure", broken)
    said = str(opforge.explain(rows)(torch.randn(4, 8)))
    assert "graph 0 was not timed: calling it again raised RuntimeError: no memory" in said
    assert "1 kernel" in said


def command(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "opforge", "explain", *args]
    return subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=False)


SCRIPT = """
import sys, torch
step = torch.compile(lambda x: torch.softmax(x, -1) * 2)
print("given", sys.argv[1:], step(torch.ones(4, 8)).sum().item())
if "--raise" in sys.argv:
    raise ValueError("boom")
"""


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    done = command(tmp_path, "program.py", "--details", "--rate", "3")
    assert done.returncode == 0, done.stderr
    assert "given ['--rate', '3'] 8.0" in done.stdout
    assert "opforge: 1 graph, 1 kernel, 0 library calls; no graph ran eagerly" in done.stdout
    assert "## loop IR" in done.stdout
    assert "program.py:3" in done.stdout


def test_the_command_of_a_program_that_raises(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    done = command(tmp_path, "program.py", "--raise")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: boom"
    assert "runpy" not in done.stderr
    assert "opforge: 1 graph, 1 kernel" in done.stdout
    assert "the program raised ValueError: boom" in done.stdout


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(0)", 0), ("sys.exit(5)", 5), ("sys.exit('no data')", 1), ("raise KeyboardInterrupt", 130)],
)
def test_the_command_of_a_program_that_exits(tmp_path: Path, end: str, code: int) -> None:
    """Nothing was said of a program that ends by `sys.exit(main())`."""
    (tmp_path / "program.py").write_text(
        f"import os, sys, torch\ntorch.compile(lambda x: x.sin() + 1)(torch.ones(3))\nos.chdir('/')\n{end}\n"
    )
    words = [sys.executable, "-m", "opforge", "explain", "program.py", "--html", "page.html", "--", "--html", "-h"]
    path = os.pathsep.join([str(ROOT.parent), *sys.path])
    ran = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert ran.returncode == code, ran.stderr
    assert "opforge: 1 graph, 1 kernel" in ran.stdout
    assert ("the program raised" in ran.stdout) == bool(code)
    assert (tmp_path / "page.html").is_file()


def test_the_command_where_nothing_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('hello')\n")
    done = command(tmp_path, "program.py")
    assert done.returncode == 0, done.stderr
    assert "nothing was compiled" in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["missing.py"], "error: there is no program missing.py\n"),
        (["program.py", "--html", "no/such/folder.html"], "error: there is no folder no/such for the page\n"),
    ],
)
def test_the_command_refuses(tmp_path: Path, args: list[str], said: str) -> None:
    (tmp_path / "program.py").write_text("print('hello')\n")
    done = command(tmp_path, *args)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: seconds_text(1.234e-6), "1.23 µs"),
        (lambda: seconds_text(None), "unknown"),
        (lambda: seconds_text(0.0999e-3), "99.9 µs"),
        (lambda: seconds_text(123e-3), "123 ms"),
        (lambda: bytes_text(0), "0 B"),
        (lambda: bytes_text(1536), "1.50 KiB"),
        (lambda: operations_text(2.5e9), "2.50 G"),
        (lambda: percent_text(0.634), "63 %"),
        (lambda: percent_text(0.0123), "1.2 %"),
        (lambda: count_text(1, "kernel"), "1 kernel"),
        (lambda: count_text(0, "library call"), "0 library calls"),
    ],
)
def test_units(made: Any, text: str) -> None:
    assert made() == text
