"""The programs of benchmarks/gpu_models.py are built tiny and run eagerly on the CPU, so that no typo costs time on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.scripts import importable

NAMES = [
    "gpt2",
    "gpt2_train",
    "llama",
    "llama_train",
    "bert",
    "bert_whole",
    "vit_b16",
    "wav2vec2",
    "vit",
    "resnet50",
    "resnet50_train",
    "unet_train",
    "adamw",
    "small_mlp",
    "chain_8",
    "lstm_loop",
    "lstm_train",
    "linear_gelu",
    "linear_residual",
    "int8_linear",
    "int8_few_rows",
    "bmm_softmax",
]


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    with importable():
        yield


def test_every_program_is_named_here() -> None:
    from programs.gpu_models import PROGRAMS

    assert list(PROGRAMS) == NAMES


def test_a_name_that_no_program_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    import typer
    from compared import chosen

    from programs.gpu_models import PROGRAMS

    programs = list(PROGRAMS.values())
    assert [p.name for p in chosen(programs, "vit, adamw")] == ["vit_b16", "vit", "adamw"]
    assert chosen(programs, None) == programs
    with pytest.raises(typer.Exit) as end:
        chosen(programs, "smal_mlp")
    assert end.value.exit_code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "no program's name contains 'smal_mlp'; there are: gpt2, " in told


def test_results_of_another_gpu_are_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import typer
    from gpu_models import main

    (tmp_path / "gpu_models.json").write_text('{"machine": {"gpu": "Another"}, "programs": []}')
    with pytest.raises(typer.Exit) as end:
        main(only="chain_8", device="cpu", tiny=True, resume=True, out=tmp_path)
    assert end.value.exit_code == 2
    assert "was measured on Another" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", NAMES)
def test_runs_tiny_on_the_cpu(name: str) -> None:
    if name.startswith(("gpt2", "bert")):
        pytest.importorskip("transformers", reason="C8: the GPU models come from transformers, which is not installed")
    from gpu_models import CURVE, prepare

    import measure
    from programs.gpu_models import PROGRAMS

    program = PROGRAMS[name]
    with torch.set_grad_enabled(program.kind == "train"):
        run, exact = (prepare(program, torch.device("cpu"), True, lambda fn: fn, double=d) for d in (False, True))
        assert measure.errors(run.checked(), exact.checked())["rel_norm"] < 0.2
        if program.kind == "train":
            assert run.curve is not None
            losses = run.curve()
            assert len(losses) == CURVE
            assert all(math.isfinite(x) for x in losses)
