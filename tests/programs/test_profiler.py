"""Profiles: each graph, kernel and call of a library has a range with its name and the program's line; without a profiler there is none."""

import functools
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import profile

import opforge
from opforge.runtime.execute import ranges
from opforge.runtime.execute.ranges import with_ranges
from opforge.runtime.torch_compat import minor_version


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> Any:
        y = F.gelu(self.fc(x))
        y = self.norm(y)
        return torch.linalg.eigvals(y[:, :4, None] * y[:, None, :4]), y


def ranges_of(call: Callable[[], Any], calls: int = 1) -> Counter[str]:
    """How often each of our ranges was met while `call` ran."""
    with profile() as p:
        for _ in range(calls):
            call()
    return Counter(
        {e.key.removeprefix("opforge::"): e.count for e in p.key_averages() if e.key.startswith("opforge::")}
    )


def starting(found: Counter[str], text: str) -> list[str]:
    return [name for name in found if name.startswith(text)]


def test_kernels_and_calls_of_libraries_have_ranges_with_the_programs_lines() -> None:
    model, x = Model(), torch.randn(3, 8)
    compiled = torch.compile(model, backend="opforge")

    def step() -> None:
        model.zero_grad()
        compiled(x)[1].sum().backward()

    step()
    found = ranges_of(step, calls=2)
    assert set(found.values()) == {2}
    assert "k0_addmm_gelu | y = F.gelu(self.fc(x))" in found
    assert any("self.norm(y)" in name for name in starting(found, "k1_native_layer_norm"))
    (library,) = starting(found, "aten.linalg_eig")
    assert "torch.linalg.eigvals(" in library
    (forward, backward) = sorted(starting(found, "graph "))
    assert backward == f"{forward} backward"
    assert any("backward" in name and "y = F.gelu(self.fc(x))" in name for name in found)


def test_a_profiled_call_gives_the_values_of_others() -> None:
    model, x = Model(), torch.randn(3, 8)
    compiled = torch.compile(model, backend="opforge")
    expected = compiled(x)
    with profile():
        seen = compiled(x)
    again = compiled(x)
    for values in (seen, again):
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


def test_ranges_are_made_at_the_first_profiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def noted(source: str, functions: Any, title: str) -> str:
        made.append(title)
        return with_ranges(source, functions, title)

    monkeypatch.setattr(ranges, "with_ranges", noted)
    compiled = torch.compile(lambda x: x.sin() + 1, backend="opforge")
    compiled(torch.ones(3))
    assert not made
    ranges_of(lambda: compiled(torch.ones(3)), calls=3)
    assert len(made) == 1


def test_a_profiler_of_another_thread_sees_its_own_calls_only() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="opforge")
    compiled(torch.ones(3))
    other = threading.Thread(target=lambda: compiled(torch.ones(3)))

    def both() -> None:
        other.start()
        other.join()
        compiled(torch.ones(3))

    found = ranges_of(both)
    assert [found[name] for name in starting(found, "k0_")] == [1]


def test_errors_of_a_profiled_call_are_those_of_others() -> None:
    compiled = torch.compile(lambda x, i: x[i] * 2, backend="opforge")
    x, good, bad = torch.ones(4), torch.tensor([1, 2]), torch.tensor([1, 9])
    compiled(x, good)
    with pytest.raises(IndexError) as plain:
        compiled(x, bad)
    with profile(), pytest.raises(IndexError) as profiled:
        compiled(x, bad)
    assert str(profiled.value) == str(plain.value)
    assert torch.equal(compiled(x, good), torch.tensor([2.0, 2.0]))


def test_branches_and_loops_have_their_own_graphs() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    compiled = torch.compile(f, backend="opforge")
    compiled(torch.ones(3))
    found = ranges_of(lambda: compiled(torch.ones(3)))
    assert starting(found, "k0_sin")
    assert not starting(found, "k0_cos")
    assert len(starting(found, "graph ")) == 2


def test_chrome_traces_have_the_ranges(tmp_path: Path) -> None:
    about = {"a": 1}
    compiled = torch.compile(lambda x: x.sin() + about["a"], backend="opforge")
    compiled(torch.ones(3))
    with profile() as p:
        compiled(torch.ones(3))
    p.export_chrome_trace(str(tmp_path / "trace.json"))
    names = [e.get("name", "") for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert any(name.startswith("opforge::k0_add | ") and "about['a']" in name for name in names)


@pytest.mark.parametrize("name", ["k0_add", "k0_ä"])
@pytest.mark.parametrize("about", ["y" * 300, "a\tb", "ä", "a\\b", 'a "b"', ""])
def test_chrome_traces_keep_any_name(tmp_path: Path, name: str, about: str) -> None:
    """A long line, or one with a tab, was "unknown" there."""
    with profile() as p, torch.profiler.record_function(ranges.range_name(name, about)):
        pass
    p.export_chrome_trace(str(tmp_path / "trace.json"))
    names = [e.get("name", "") for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    (found,) = (name for name in names if name.startswith("opforge::k0_"))
    assert len(found) <= ranges.LONGEST
    assert found.startswith(f"opforge::k0_{'add' if name == 'k0_add' else '<U+00E4>'}{' | ' if about else ''}")


def test_names_are_of_one_line_and_short() -> None:
    source = (
        "op_0 = overload('aten.mm.default')\n\n\n"
        "def call(a, b):\n"
        "    if profiled(): return in_ranges(a, b)\n"
        "    if fault := k0_take(a): out_of_range(fault, '# no comment')  # x = a[\"'#\"]\n"
        f"    c = op_0(a, b)  # mm: {'y' * 200}\n"
        "    return (c,)\n"
    )
    assert with_ranges(source, ["k0_take"], "graph 1/0").splitlines() == [
        "op_0 = overload('aten.mm.default')",
        "",
        "",
        "def call(a, b):",
        "    with span('opforge::graph 1/0'):",
        "        with span(\"opforge::k0_take | x = a[''#']\"):",
        "            if fault := k0_take(a): out_of_range(fault, '# no comment')  # x = a[\"'#\"]",
        f"        with span('opforge::aten.mm | {'y' * 98}...'):",
        f"            c = op_0(a, b)  # mm: {'y' * 200}",
        "        return (c,)",
    ]


def test_reset_stats_and_the_rest_are_as_before() -> None:
    """A profiled call counts as any other."""
    opforge.reset_stats()
    compiled = torch.compile(lambda x: x.sin() + 1, backend="opforge")
    compiled(torch.ones(3))
    before = opforge.stats()["graphs"]
    ranges_of(lambda: compiled(torch.ones(3)))
    assert opforge.stats()["graphs"] == before == 1


def test_a_program_names_its_graphs() -> None:
    """As `torch.compile(f, name="step")` does since torch 2.15."""
    compiled = torch.compile(lambda x: x.sin() + 1, backend=functools.partial(opforge.backend, name="step"))
    compiled(torch.ones(3))
    assert starting(ranges_of(lambda: compiled(torch.ones(3))), "step 0/0")


@pytest.mark.skipif(
    minor_version() in ("2.11", "2.12", "2.13", "2.14"), reason="C16: torch.compile tells backends the name since 2.15"
)
def test_names_given_to_torch_compile() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="opforge", name="step")
    compiled(torch.ones(3))
    assert starting(ranges_of(lambda: compiled(torch.ones(3))), "step 0/0")
