"""The figures in README.md and docs/gpu-reference.md are those of benchmarks/results: whoever measures again writes them again."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of benchmarks, which import each other by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


def result(stem: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{stem}.json").read_text())


def two(value: float) -> str:
    return format(value, ".2f")


def on_the_processor() -> Iterator[str]:
    """Sentences and rows of README.md as the results would have them."""
    latest = result("latest")
    speed = {
        pair: latest["summary"][f"speed {pair}"] for pair in ("inductor/eager", "opforge/eager", "opforge/inductor")
    }
    theirs, ours, both = speed.values()
    n = ours["n"]
    yield f"| speed against eager, geomean of {n} programs | {two(theirs['geomean'])} | {two(ours['geomean'])} | `make bench` |"
    yield f"| speed of opforge against Inductor | | {two(both['geomean'])} (worst {two(both['min'])}) | the same |"
    wrong = latest["summary"]["inaccurate"]
    yield f"error against float64 is more than twice eager's | {len(wrong['inductor'])} | {len(wrong['opforge'])} | the same |"
    cold = latest["summary"]["cold compile beyond Dynamo, opforge/inductor"]
    yield f"geomean of the same programs | | {two(cold['geomean'])} (worst {two(cold['max'])}) | the same |"
    yield f"{ours['below_1']} of the {n} programs are slower than eager ({theirs['below_1']} with Inductor), the worst {two(ours['min'])}"
    slow = [r["ms"]["eager"] for r in latest["programs"] if r["speed"]["opforge/eager"] < 1]
    yield f"all of them take eager less than {int(max(slow) * 10) / 10 + 0.1:.1f} ms"

    overhead = result("overhead")
    one, step = (overhead[k]["us_above_floor"] for k in ("inference", "training"))
    yield f"above Dynamo's guards, µs | {one['inductor']:.1f} | {one['opforge']:.1f} | `benchmarks/overhead.py` |"
    yield f"| its forward and backward, µs | {step['inductor']:.0f} | {step['opforge']:.0f} | the same |"
    yield f"a compiled call that does nothing takes {overhead['inference']['us']['floor']:.0f} µs here"

    training = result("training")
    s = training["summary"]
    worst = min(r["speed"]["opforge/inductor"] for r in training["programs"])
    yield f"`benchmarks/train.py`: {two(s['opforge/eager'])} of eager's speed and {two(s['opforge/inductor'])} of Inductor's"
    yield f"(geometric means; the worst against Inductor is a U-Net, {two(worst)})"
    yield f"allocated memory at its peak {two(s['peak allocated memory opforge/inductor'])} of Inductor's"
    yield f"Tracing, joint graph and partition take {two(result('dispatch')['geomean'])} of the time"


DEFAULT, REDUCED = "speed opforge/inductor", "speed opforge-reduce/inductor-reduce"
CALLED = {
    "lstm_loop": "a small LSTM",
    "lstm_train": "a small LSTM's training",
    "vit": "a vision transformer",
    "gpt2": "GPT-2's inference",
    "llama": "a stack like Llama's",
    "resnet50": "ResNet-50's inference",
    "resnet50_train": "ResNet-50's training",
    "int8_linear": "a linear layer with a weight of bytes",
}


def on_a_gpu() -> Iterator[str]:
    """Those of README.md about a GPU."""
    bound = result("gpu")
    s, n = bound["summary"], len(bound["programs"])
    yield f"{n} memory-bound programs move their data at {two(s['share opforge'])} of the copy bandwidth"
    yield f"(geometric mean; Inductor {two(s['share inductor'])}, eager {two(s['share eager'])})"
    yield f"{two(s['speed opforge/inductor'])} times as fast as Inductor's, none slower than eager"
    assert s["slower opforge/eager"] == []
    assert result("gpu_h100")["summary"]["slower opforge/eager"] == []

    models = result("gpu_models")
    s, n = models["summary"], len(models["programs"])
    yield f"{n} models, training steps and small programs run at {two(s[DEFAULT])} of the speed of Inductor's default"
    yield f"{two(part(s, 'peak_mb opforge/inductor'))} of its peak memory and {two(part(s, 'compile_s opforge/inductor'))} of its compile time"
    assert s["slower opforge/inductor"] == s["slower opforge/eager"] == {}
    yield "none is slower than Inductor's default or than eager"
    yield f"With CUDA graphs they run at {two(s[REDUCED])} of the speed of its `reduce-overhead`"
    slow = s["slower opforge-reduce/inductor-reduce"]
    first, second = sorted(slow, key=slow.__getitem__)
    yield f"{CALLED[first]} ({two(slow[first])}) and {CALLED[second]} ({two(slow[second])}) are slower"
    tuned = result("gpu_models_max")
    n, s = len(tuned["programs"]), tuned["summary"]
    yield f"{n} models and products are at {two(s['speed opforge-max/inductor-max'])} of its `max-autotune`"


def on_the_page_of_the_gpu() -> Iterator[str]:
    """Those of docs/gpu-reference.md."""
    s = result("gpu")["summary"]
    yield "| opforge {}, Inductor {}, eager {} |".format(
        *(two(s[f"share {n}"]) for n in ("opforge", "inductor", "eager"))
    )
    yield f"their speed against Inductor's | {two(s['speed opforge/inductor'])} |"
    other = result("gpu_h100")["summary"]
    yield f"{two(other['speed opforge/inductor'])} at {two(other['share opforge'])} of its copy bandwidth"
    other = result("gpu_models_h100")
    n, s = len(other["programs"]), other["summary"]
    yield f"{n} of the models on"
    yield f"{two(s[DEFAULT])} and, with CUDA graphs, {two(s[REDUCED])}"
    models = result("gpu_models")
    s = models["summary"]
    yield f"against its default, and with CUDA graphs | {two(part(s, DEFAULT + ', train'))}, {two(part(s, REDUCED + ', train'))} |"
    us = {r["name"]: r["us"] for r in models["programs"]}
    adamw, few = (us[name]["inductor"] / us[name]["opforge"] for name in ("adamw", "int8_few_rows"))
    yield f"a weight of bytes | {adamw:.2f}; {few:.1f} |"
    slow = s["slower opforge-reduce/inductor-reduce"]
    yield ", ".join(f"{CALLED[name]} ({two(slow[name])})" for name in sorted(slow, key=slow.__getitem__))
    yield f"speed against Inductor's default | {two(s['speed opforge/inductor'])} |"
    yield f"with CUDA graphs, against its `reduce-overhead` | {two(s['speed opforge-reduce/inductor-reduce'])} |"
    yield f"peak memory against Inductor's default | {two(part(s, 'peak_mb opforge/inductor'))} |"
    yield f"compile time against Inductor's default | {two(part(s, 'compile_s opforge/inductor'))} |"
    yield f"with CUDA graphs, against its `reduce-overhead` | {two(part(s, 'reserved_mb opforge-reduce/inductor-reduce'))} |"


def part(summary: dict[str, Any], key: str) -> float:
    """The mean of `key (number of programs)`."""
    (found,) = (v for k, v in summary.items() if re.fullmatch(rf"{re.escape(key)} \(\d+\)", k))
    return float(found)


@pytest.mark.parametrize(
    ("page", "sentences"),
    [("README.md", on_the_processor), ("README.md", on_a_gpu), ("docs/gpu-reference.md", on_the_page_of_the_gpu)],
)
def test_figures_are_those_of_the_results(page: str, sentences: Any) -> None:
    text = " ".join((ROOT / page).read_text().split())
    missing = [s for s in sentences() if s not in text]
    assert not missing, f"{page} should say:\n" + "\n".join(missing)


@pytest.mark.parametrize(
    "stem",
    [
        "budget",
        "gpu",
        "gpu_again",
        "gpu_h100",
        "gpu_models",
        "gpu_models_h100",
        "gpu_models_logits",
        "gpu_models_max",
        "training",
    ],
)
def test_tables_name_the_machine_and_belong_to_their_results(scripts: None, stem: str) -> None:
    scripts_of = {
        "training": "train",
        "gpu_models": "gpu_models_report",
        "gpu_models_h100": "gpu_models_report",
        "gpu_models_logits": "gpu_models_report",
        "gpu_models_max": "gpu_models_report",
        "gpu_again": "gpu",
        "gpu_h100": "gpu",
    }
    script = importlib.import_module(scripts_of.get(stem, stem))
    text = (ROOT / "benchmarks" / "results" / f"{stem}.md").read_text()
    assert text == script.markdown(result(stem))
    assert text.startswith("Machine: cpu ")


@pytest.mark.usefixtures("scripts")
def test_the_table_of_traffic_names_machine_and_command() -> None:
    traffic, rows = importlib.import_module("traffic"), result("traffic")
    rows = rows["programs"] if isinstance(rows, dict) else rows  # results of before had no machine
    text = traffic.markdown({"machine": {"cpu": "x"}, "command": "python a.py", "programs": rows})
    assert text.startswith(
        "# What the plans of the memory-bound programs move\n\nMachine: cpu x.\n\nCommand: `python a.py`\n\nGeometric mean"
    )


def test_a_result_tells_its_command(scripts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    report = importlib.import_module("report")
    monkeypatch.setattr(
        "sys.argv", [str(ROOT / "benchmarks" / "budget.py"), "--only", "gpt or so", "--resume", "--out", "somewhere"]
    )
    assert report.command() == "python benchmarks/budget.py --only 'gpt or so'"
    assert report.heading({"machine": {"cpu": "x", "cores": 2}, "command": "python a.py"}, "; 3 rounds") == [
        "Machine: cpu x, cores 2; 3 rounds.",
        "",
        "Command: `python a.py`",
        "",
    ]
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        text = path.read_text()
        if "report.machine(" in text:
            assert "report.command()" in text or "gpu_models_report.write" in text, f"{path.name} names no command"


def test_everything_that_is_measured_on_a_processor_is_in_make_bench() -> None:
    bench = re.search(r"^bench:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert bench is not None
    for script in ("overhead", "run", "train", "dispatch", "budget"):
        assert f"benchmarks/{script}.py" in bench[1]
