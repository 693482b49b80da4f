"""`opforge.explain`: what a new user runs first says something, with gradients, without, a second time, and when nothing compiles."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import opforge


def small() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)), torch.randn(4, 8)


def test_with_gradients_both_halves_are_shown() -> None:
    model, x = small()
    said = opforge.explain(model)(x)
    assert said.fallbacks == {}
    for part in ("# graph 0: ", "# graph 0, backward: ", "## loop IR", "## C++", "## wrapper"):
        assert part in said.details()
    torch.testing.assert_close(said.result, model(x))
    assert said.result.requires_grad


def test_of_what_is_compiled_already_and_without_gradients() -> None:
    """Dynamo's cache answered for the model, and explain showed an empty text."""
    model, x = small()
    with torch.no_grad():
        torch.compile(model, backend="opforge")(x)
        said = opforge.explain(model)(x)
    assert len(said.graphs) == 1
    assert "gelu" in str(said)
    assert "backward" not in str(said)


def test_a_full_history_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from opforge.runtime import compile_fx

    history = [compile_fx.Artifacts() for _ in range(64)]
    monkeypatch.setattr(compile_fx, "HISTORY", history)
    assert len(opforge.explain(lambda x: x.sin() + 1)(torch.randn(4)).graphs) == 1


def test_any_number_of_explanations_of_one_function() -> None:
    """From the ninth on they said that nothing was compiled: Dynamo counts all compiles of a function."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    limit = torch._dynamo.config.recompile_limit
    assert [len(opforge.explain(f)(torch.ones(3)).graphs) for _ in range(limit + 3)] == [1] * (limit + 3)
    assert torch._dynamo.config.recompile_limit == limit


def test_when_nothing_is_compiled_it_says_so() -> None:
    assert "nothing was compiled" in str(opforge.explain(lambda n: n + 1)(2))


def test_kernels_for_a_gpu_are_not_called_c() -> None:
    from opforge.frontend_api import Explanation
    from opforge.runtime.compile_fx import Artifacts

    graphs = [Artifacts(cpp='"""Kernels."""\n\nimport triton\n'), Artifacts(cpp="// import triton\n")]
    said = Explanation(None, graphs, {}).details()
    assert [line for line in said.splitlines() if line.startswith("## ")] == [
        "## Triton",
        "## wrapper",
        "## C++",
        "## wrapper",
    ]


@pytest.mark.parametrize("wrong", [3, None, torch.ones(2)])
def test_what_cannot_be_called_is_refused_at_once(wrong: Any) -> None:
    """It failed inside of Dynamo, at the call of what explain returned."""
    with pytest.raises(TypeError, match=rf"explain\(model\)\(x\); got a {type(wrong).__name__}$"):
        opforge.explain(wrong)
    with pytest.raises(TypeError, match=r"explain\(model\)\(x\), not explain\(model, x\)"):
        opforge.explain(torch.sin, torch.ones(3))
    with pytest.raises(opforge.errors.ConfigError, match="options: unknown setting 'strickt'; did you mean 'strict'"):
        opforge.explain(torch.sin, strickt=True)


def test_the_first_snippet_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent.parent / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```", text, re.S)
    assert found is not None
    opforge.reset_stats()  # a new user's process
    exec(compile(found[1], "README.md", "exec"), {"__name__": "readme"})
    out = capsys.readouterr().out
    assert "'fallbacks': {}" in out
    assert "graph 0, backward" in out
