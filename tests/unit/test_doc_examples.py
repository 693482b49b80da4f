"""README.md and the pages in docs/: their examples run, their commands exist, their links lead somewhere, and README.md leads to each page.

The word behind `python` says how a block runs: nothing, in a process of its own; `gpu`, where there is a CUDA device; `torchrun`, in two processes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer.main

from opforge import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
PIECES = ("docs/stages.md",)
"""Pages whose Python is pieces of what one program becomes (`test_stages.py`)."""


@dataclass(frozen=True)
class Block:
    """One block of Python, and the word that says how it runs."""

    how: str
    text: str


BLOCKS = {
    f"{page} {number}": Block(how, text)
    for page, whole in TEXTS.items()
    if page not in PIECES
    for number, (how, text) in enumerate(re.findall(r"^```python *(\w*)\n(.*?)^```", whole, re.M | re.S), 1)
}
BEFORE = {
    "README.md 2": BLOCKS["README.md 1"].text,
    "README.md 3": """
import torch, opforge
from pathlib import Path

fn, args = torch.sin, (torch.ones(3),)
torch.compile(fn, backend="opforge")(*args)
gm, example_inputs = torch.fx.symbolic_trace(lambda x: torch.sin(x)), args
Path("my_ops.yaml").write_text(
    "- op: aten._add_relu\\n  doc: the positive part of a sum\\n  kind: pointwise\\n  expr: relu(self + alpha * other)\\n"
)
""",
}
"""What stands above a block of the README, which tells one story."""
UNSAID = ("README.md",)
"""Pages whose comments say what a line is for, not what it prints."""


def said(block: str) -> list[str]:
    """What comments beside a `print`, or in a line behind one, say that it prints."""
    found = []
    for line, after in zip(block.splitlines(), [*block.splitlines()[1:], ""], strict=True):
        if "print(" in line and "  # " in line:
            found.append(line.rpartition("  # ")[2])
        elif "print(" in line and after.startswith("# "):
            found.append(after.removeprefix("# "))
    return found


def shown(text: str, output: str) -> bool:
    """Whether it is printed: with other text where it has "...", and numbers between commas each by itself."""
    parts = [p.strip() for p in re.split(r"\.\.\.|, (?=\d+$|\d+, )", text)]
    return all(p in output for p in parts)


def check(name: str, folder: Path, *command: str, **more: str) -> None:
    """The block runs, and prints what it says."""
    script = folder / "example.py"
    script.write_text(BEFORE.get(name, "") + BLOCKS[name].text)
    env = os.environ | {"OPFORGE_CACHE_DIR": str(folder / "cache")} | more
    done = subprocess.run(
        [sys.executable, *command, script],
        capture_output=True,
        text=True,
        env=env,
        cwd=folder,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if name.partition(" ")[0] in UNSAID or not torch.__version__.startswith("2.13."):  # others say it in other words
        return
    missing = [text for text in said(BLOCKS[name].text) if not shown(text, done.stdout)]
    assert not missing, f"not printed: {missing}\n{done.stdout}"


@pytest.mark.parametrize("name", [name for name, block in BLOCKS.items() if block.how != "gpu"])
def test_runs_and_prints_what_it_says(name: str, tmp_path: Path) -> None:
    if BLOCKS[name].how == "torchrun":
        two = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        hidden = {} if torch.cuda.device_count() > 1 else {"CUDA_VISIBLE_DEVICES": ""}
        check(name, tmp_path, *two, **hidden)
    else:
        assert BLOCKS[name].how == "", f"no example runs as '{BLOCKS[name].how}'"
        check(name, tmp_path)


ON_A_GPU = [name for name, block in BLOCKS.items() if block.how == "gpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_runs_on_a_gpu(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.parametrize("name", ON_A_GPU)
def test_is_left_to_make_test_gpu(name: str) -> None:
    """So that `make test`, which leaves out what is marked `gpu`, shows what it has not run."""
    pytest.skip("the example needs a CUDA device: make test-gpu runs it")


# --- Commands


COMMAND = re.compile(r"(?:\$ )?(?:\w+=\S+ )*((?:\S*(?:python3?|opforge)|make)\b.*)")


def commands(text: str) -> list[str]:
    """Lines of blocks, and code in backticks, that begin with a command of opforge, a module of ours or `make`."""
    fences = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", text, re.M | re.S)
    lines = [line for fence in fences for line in fence.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))
    found = (COMMAND.match(piece.strip()) for piece in (*lines, *spans))
    return [match[1] for match in found if match]


COMMANDS = sorted({(page, command) for page, text in TEXTS.items() for command in commands(text)})
OPFORGE = typer.main.get_command(cli.app)
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def wrong(command: str) -> str:
    """What does not exist of a command, or ""."""
    words = command.split("  ")[0].split()
    program = Path(words[0]).name
    if program == "make":
        named = [w for w in words[1:] if re.fullmatch(r"[a-z][a-z-]*", w)][:1]
        return "" if set(named) <= TARGETS else f"no target {named}"
    if program.startswith("python"):
        if words[1:3] == ["-m", "opforge"]:
            words = words[2:]
        elif len(words) > 2 and words[1] == "-m" and words[2].split(".")[0] in ("tests", "examples"):
            path = ROOT / words[2].replace(".", "/")
            there = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
            return "" if there else f"no module {words[2]}"
        elif len(words) > 1 and words[1].split("/")[0] in ("benchmarks", "tools", "examples"):
            return "" if (ROOT / words[1]).is_file() else f"no file {words[1]}"
        else:
            return ""
    if len(words) < 2 or not re.fullmatch(r"[a-z][a-z-]*", words[1]):
        return ""
    if (sub := OPFORGE.commands.get(words[1])) is None:  # type: ignore[attr-defined]
        return f"opforge has no command {words[1]}"
    options = {name for p in sub.params for name in p.opts} | {"--help"}
    unknown = [w for w in words[2:] if w.startswith("-") and w.partition("=")[0] not in options]
    return f"opforge {words[1]} has no {unknown}" if unknown else ""


@pytest.mark.parametrize("page", TEXTS)
def test_commands_exist(page: str) -> None:
    faults = [f"`{command}`: {fault}" for at, command in COMMANDS if at == page and (fault := wrong(command))]
    assert not faults, "\n".join(faults)


def test_a_command_that_does_not_exist_is_found() -> None:
    assert wrong("opforge explane x.py") == "opforge has no command explane"
    assert wrong("python -m opforge test a.yaml --improt b") == "opforge test has no ['--improt']"
    assert wrong("make tset") == "no target ['tset']"
    assert wrong("python -m tests.fuz") == "no module tests.fuz"
    assert wrong("python benchmarks/gpus.py --out x") == "no file benchmarks/gpus.py"
    assert len([c for _, c in COMMANDS if "opforge" in c.split()[0]]) > 10


# --- Links


def anchors(text: str) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def links(page: str) -> list[tuple[str, Path, str]]:
    """Each link of a page to a file: its text, the file and the heading."""
    text = re.sub(r"^ *```.*?^ *```", "", TEXTS[page], flags=re.M | re.S)
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = link.partition("#")
        if "://" not in link:
            found.append((link, (ROOT / page).parent / path if path else ROOT / page, heading))
    return found


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    for text, path, heading in links(page):
        assert path.exists(), f"{page}: {text}"
        if heading and path.suffix == ".md":
            assert heading in anchors(path.read_text()), f"{page}: {text}"


def test_each_page_is_linked_from_the_readme() -> None:
    linked = {path.resolve() for _, path, _ in links("README.md")}
    assert [p.name for p in sorted((ROOT / "docs").glob("*.md")) if p.resolve() not in linked] == []
