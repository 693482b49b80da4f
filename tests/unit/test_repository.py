"""The laws of the repository that a reader cannot see in one file: which way imports point, and who may name what."""

import ast
import contextlib
import importlib
import importlib.util
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
COMPAT = ROOT / "runtime" / "torch_compat"

#: The order in which data flows. A package imports itself and packages of a smaller rank.
RANK = {
    name: rank
    for rank, names in enumerate(
        [
            ("errors", "garbage"),
            ("inductor_options",),
            ("inductor_options", "torch_compat"),
            ("config", "machine", "observe", "philox"),
            ("ir",),
            ("dispatch",),
            ("partition",),
            ("graph",),
            ("lower",),
            ("kernels",),
            ("check", "fuse", "memory"),
            ("tile",),
            ("schedule", "render"),
            ("host",),
            ("build",),
            ("execute",),
            ("backward", "capture", "graphs"),
            ("targets",),
            ("cold",),
            ("realize",),
            ("compile_graph", "fallback"),
            ("training", "aot", "forward_mode"),
            ("compile_fx", "checked_inputs"),
        ]
    )
    for name in names
}
PEERS = ("torch._inductor", "torch._functorch.aot_autograd", "torch._functorch._aot_autograd")
PEERS += ("torch._functorch.partitioners", "torch._functorch.compile_utils", "functorch.compile")
GENERATOR_ONLY = {"yaml", "jsonschema", "jinja2"}
OPERATOR = re.compile(r"\b(aten|higher_order)(\.|::)\w")


def sources(*folders: str) -> list[Path]:
    """The Python files of the given top folders ("." is the root's own files), sorted."""
    found: list[Path] = []
    for folder in folders:
        found += ROOT.glob("*.py") if folder == "." else (ROOT / folder).rglob("*.py")
    return sorted(found)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that a module imports; `from a import b` gives `a.b`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    here = ("opforge", *parts[:-1])
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def part_of(module: str) -> str | None:
    """The ranked part that a dotted name of this package belongs to: `opforge.runtime.ir.nodes` → `ir`."""
    names = module.split(".")
    if names[:2] == ["opforge", "errors"]:
        return "errors"
    return names[2] if names[:2] == ["opforge", "runtime"] and len(names) > 2 else None


def dotted(node: ast.AST) -> str:
    """`a.b.c` for an attribute chain on a plain name, else an empty string."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def docstrings(tree: ast.Module) -> set[int]:
    """Ids of the constants that are only text for readers: docstrings and other bare strings."""
    return {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


def private(module: str) -> bool:
    """Whether a dotted name reaches into torch's private parts (dunder names are not; operators of `torch.ops` are public)."""
    names = module.split(".")
    if names[:2] == ["torch", "ops"]:
        return False
    return names[0] in ("torch", "functorch") and any(n.startswith("_") and not n.startswith("__") for n in names[1:])


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sources("runtime"):
        mine = path.relative_to(ROOT / "runtime").parts[0].removesuffix(".py")
        if mine == "__init__":
            continue
        assert mine in RANK, f"runtime/{mine} has no place in the order of packages: add it to RANK here"
        for line, module in imports(path):
            other = part_of(module)
            if other is not None and other != mine and RANK.get(other, -1) >= RANK[mine]:
                wrong.append(f"{place(path, line)}: {mine} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_modules_form_no_circles() -> None:
    """Imports for type checking and inside of functions count too."""
    folders = "runtime", "generator", "clients", "testing"
    files = {".".join(("opforge", *p.relative_to(ROOT).with_suffix("").parts)): p for p in sources(*folders)}
    edges = [
        (name, found)
        for name, path in files.items()
        for _, module in imports(path)
        if (found := module if module in files else module.rpartition(".")[0]) in files and found != name
    ]
    assert [sorted(c) for c in networkx.strongly_connected_components(networkx.DiGraph(edges)) if len(c) > 1] == []


def test_writers_of_kernels_refuse_nothing() -> None:
    """What cannot be one kernel is known when the plan is made. Products are still matched where they are written, groups where they are tiled."""
    refusals = ("opforge.errors", "opforge.runtime.fuse", "opforge.runtime.memory", "opforge.runtime.schedule")
    matched = ("opforge.runtime.fuse.attention.", "opforge.runtime.fuse.products.", "opforge.runtime.fuse.horizontal.")
    found = [
        f"{path.name}:{line}: {name}"
        for path in sources("runtime/render", "runtime/tile")
        for line, name in imports(path)
        if name.startswith(refusals) and not name.startswith(matched)
    ]
    assert found == []


def test_runtime_does_not_import_the_generator_or_the_public_face() -> None:
    outside = ("opforge.generator", "opforge.frontend_api", "opforge.report", "opforge.cli")
    wrong = [
        f"{place(p, line)}: {m}"
        for p in sources("runtime", "generated")
        for line, m in imports(p)
        if m.startswith(outside)
    ]
    assert not wrong, "\n".join(wrong)


def test_generator_does_not_import_what_it_generates() -> None:
    wrong = [
        f"{place(p, line)}: {m}"
        for p in sources("generator")
        if p != ROOT / "generator" / "user.py"  # adds a user's operators to the tables of the running process
        for line, m in imports(p)
        if m.startswith("opforge.generated")
    ]
    assert not wrong, "\n".join(wrong)


def test_runtime_needs_no_spec_reader() -> None:
    wrong = [
        f"{place(p, line)}: {m}"
        for p in sources("runtime", "generated", "report", ".")
        for line, m in imports(p)
        if m.split(".")[0] in GENERATOR_ONLY
    ]
    assert not wrong, "\n".join(wrong)


def higher_order_names() -> frozenset[str]:
    """Names of torch's higher-order operators that are no words of English: `scan` is also a kind of loop."""
    for module in pkgutil.iter_modules(torch._higher_order_ops.__path__, "torch._higher_order_ops."):
        with contextlib.suppress(ImportError):  # what one of them needs may be missing here
            importlib.import_module(module.name)
    return frozenset(name for name in torch._ops._higher_order_ops if "_" in name)


def named_operators(tree: ast.Module, higher_order: frozenset[str]) -> Iterator[ast.expr]:
    """Where a module names an operator: by its full name, by that of a higher-order operator, or asking an operator for its name."""
    text = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in text:
            if OPERATOR.search(node.value) or node.value in higher_order:
                yield node
        elif isinstance(node, ast.Attribute):
            if OPERATOR.search(dotted(node)):
                yield node
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            told = any(isinstance(n, ast.Constant) and isinstance(n.value, str) for s in sides for n in ast.walk(s))
            if told and any(map(asks_for_a_name, sides)):
                yield node


def asks_for_a_name(node: ast.expr) -> bool:
    """Whether it is `op.name()`; `self.name()` is no operator's."""
    return isinstance(node, ast.Call) and dotted(node.func).endswith(".name") and dotted(node.func) != "self.name"


def test_engines_name_no_operator() -> None:
    wrong = []
    known = higher_order_names()
    for path in sources("runtime", "generator"):
        lists_imports = COMPAT in path.parents
        found = named_operators(parsed(path), frozenset() if lists_imports else known)
        wrong += [f"{place(path, node.lineno)}: {ast.unparse(node)[:80]}" for node in found]
    for path in sorted((ROOT / "generator").rglob("*.j2")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if OPERATOR.search(line):
                wrong.append(f"{place(path, number)}: {line.strip()[:80]}")
    assert not wrong, "operators belong in specs/:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.ops.aten.relu.default",
        "TABLE = {'aten::relu': 1}",
        "known = op.name() in ('triton_kernel_wrapper_mutation', 'triton_kernel_wrapper_functional')",
        "known = isinstance(op, HigherOrderOperator) and op.name() == 'scan'",
        "launch = 'triton_kernel_wrapper_mutation'",
        "launch = torch.ops.higher_order.cond",
    ],
)
def test_the_search_for_names_of_operators_finds(line: str) -> None:
    """Two that launch Triton kernels of programs stood in the engine for weeks: the search knew names of `aten` only."""
    assert [*named_operators(ast.parse(line), higher_order_names())]


def test_private_torch_names_come_through_torch_compat() -> None:
    wrong = []
    for path in sources("runtime", "generator", "generated", "clients", "report", "."):
        if COMPAT in path.parents:
            continue
        wrong += [f"{place(path, line)}: import of {m}" for line, m in imports(path) if private(m)]
        wrong += [
            f"{place(path, node.lineno)}: {dotted(node)}"
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Attribute) and private(dotted(node))
        ]
    assert not wrong, "import them in runtime/torch_compat, with what they are for:\n" + "\n".join(wrong)


def test_peers_are_not_used() -> None:
    wrong = []
    for path in sources("runtime", "generator", "generated", "clients", "examples", "report", "."):
        tree = parsed(path)
        text = docstrings(tree)
        wrong += [f"{place(path, line)}: import of {m}" for line, m in imports(path) if m.startswith(PEERS)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and dotted(node).startswith(PEERS):
                wrong.append(f"{place(path, node.lineno)}: {dotted(node)}")
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in text:
                wrong += [f"{place(path, node.lineno)}: {peer!r} in a string" for peer in PEERS if peer in node.value]
    assert not wrong, "\n".join(wrong)


def test_no_exception_is_swallowed() -> None:
    wrong = []
    for path in sources("runtime", "generator", "clients", "report", "."):
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or dotted(node.type) in ("Exception", "BaseException")
            empty = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
            if node.type is None or (broad and empty):
                wrong.append(place(path, node.lineno))
    assert not wrong, "\n".join(wrong)


def test_text_files_have_an_encoding() -> None:
    """An ASCII locale (`LC_ALL=C` without UTF-8 mode) made every graph run eagerly: the C++ prelude was read by it."""
    wrong = []
    for path in sources("runtime", "generator", "clients", "report", "."):
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            names = {k.arg for k in node.keywords}
            reads = node.func.attr in ("read_text", "write_text") or "text" in names
            if reads and "encoding" not in names:
                wrong.append(place(path, node.lineno))
    assert not wrong, "\n".join(wrong)


#: Lines of a file.
LIMITS = {"runtime": 450, "generator": 450} | dict.fromkeys(["clients", "benchmarks", "examples", "report", "."], 499)
LINES_OF_A_FUNCTION = 70


@pytest.mark.parametrize("folder", LIMITS)
def test_files_stay_readable(folder: str) -> None:
    lines = {str(p.relative_to(ROOT)): p.read_text().count("\n") for p in sources(folder)}
    assert {name: n for name, n in lines.items() if n > LIMITS[folder]} == {}


@pytest.mark.parametrize("folder", ["runtime", "generator"])
def test_functions_stay_readable(folder: str) -> None:
    """The functions inside of a function count as a part of it."""
    long = [
        f"{place(path, node.lineno)}: {node.name}"
        for path in sources(folder)
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno >= LINES_OF_A_FUNCTION
    ]
    assert long == []


def test_tests_and_tools_import_what_exists() -> None:
    """mypy does not read these folders, and an import inside a function fails only when that function runs."""
    missing: list[str] = []
    for path in sources("tests", "tools"):
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in ("opforge", "tests"):
                continue
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if hasattr(module, alias.name):
                    continue
                if not (hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{alias.name}")):
                    missing.append(f"{place(path, node.lineno)}: {node.module} has no {alias.name}")
    assert not missing, missing


def test_pyproject_lists_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(("opforge", *p.parent.relative_to(ROOT).parts))
        for p in sources("runtime", "generator", "generated", "clients", "report", "testing", ".")
        if p.name == "__init__.py"
    }
    assert sorted(listed) == sorted(found)


def test_every_room_has_tests_that_make_can_run() -> None:
    """`make test ROOM=aot` looked for a folder that was not there."""
    named = dict(re.findall(r"^ROOM_(\w+) := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for room in sorted(p.parent.name for p in (ROOT / "runtime").glob("*/__init__.py")):
        paths = named.pop(room, "").split() or [f"tests/unit/{room}"]
        assert all((ROOT / path).exists() for path in paths), (room, paths)
    assert not named, "no such rooms"


def test_make_names_the_rooms_where_there_is_no_such_one() -> None:
    if (make := shutil.which("make")) is None:
        pytest.skip("C8: make is not installed")
    ran = subprocess.run([make, "test", "ROOM=nosuch"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.startswith("ROOM=nosuch is no room of the runtime; there are: aot backward build ")


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'__version__ = "{version}"' in (ROOT / "__init__.py").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_import_needs_neither_torch_nor_a_spec_reader() -> None:
    """`import opforge` is quick, and compiling works where PyYAML, jsonschema and Jinja2 are not installed."""
    code = """
import sys
import opforge
assert "torch" not in sys.modules
for name in ("yaml", "jsonschema", "jinja2"):
    sys.modules[name] = None
opforge.compile_fx
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=False)
    assert done.returncode == 0, done.stderr
