"""The runtime reads every key of specs/targets and specs/languages, and each GPU gets the target of its capability."""

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opforge.generated.targets import GPU_TARGETS, GpuTarget
from opforge.generator.check import schema_of
from opforge.generator.emit.targets import TargetSet
from opforge.generator.run import load_model
from opforge.runtime.kernels.plan import Kernel
from opforge.runtime.machine import gpu_target
from tests.support.machines import H200
from tests.support.scripts import importable

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"


def keys_of(device: str) -> list[str]:
    """`limits.line` and so on: what a target's entry says of its machine, as its readers spell it."""
    definitions = schema_of("targets").root["$defs"]

    def below(part: str, name: str) -> list[str]:
        fields = definitions[name]["properties"].items()
        nested = {key: field["$ref"].rpartition("/")[2] for key, field in fields if "$ref" in field}
        return [k for key, _ in fields for k in (below(key, nested[key]) if key in nested else [f"{part}.{key}"])]

    parts = ("limits", "budgets", "costs")
    target = definitions[device]["properties"]
    return [key for part in parts for key in below(part, target[part]["$ref"].rpartition("/")[2])]


def tuning_keys() -> list[str]:
    """The sizes of a table in specs/tuning that are no rules."""
    definitions = schema_of("tuning").root["$defs"]
    return sorted({k for n in ("contraction", "attention", "routine") for k in definitions[f"{n}_sizes"]["properties"]})


def language_keys(name: str) -> list[str]:
    """What an entry of specs/languages, or a part of one, says for the runtime."""
    return [k for k in schema_of("languages").root["$defs"][name]["properties"] if k not in ("language", "doc")]


@pytest.mark.parametrize("key", sorted({*keys_of("cpu"), *keys_of("cuda")}))
def test_every_fact_of_a_machine_has_a_reader(key: str) -> None:
    wanted = re.compile(rf"\b{re.escape(key)}\b")
    assert any(wanted.search(path.read_text()) for path in RUNTIME.rglob("*.py")), f"nothing in runtime/ reads {key}"


@pytest.mark.parametrize("key", tuning_keys())
def test_every_size_of_a_table_has_a_reader(key: str) -> None:
    wanted = re.compile(rf"\b(sizes|contraction|attention)\.{key}\b")
    assert any(wanted.search(path.read_text()) for path in RUNTIME.rglob("*.py")), f"nothing in runtime/ reads {key}"


@pytest.mark.parametrize(
    "key", sorted({k for name in ("cpp", "triton", "cpp_dtype", "triton_dtype", "atomic") for k in language_keys(name)})
)
def test_every_fact_of_a_language_has_a_reader(key: str) -> None:
    wanted = re.compile(rf"\b([A-Z]+_LANGUAGE\)?|dtype|found|dtypes\[.*\])\.{key}\b")
    assert any(wanted.search(path.read_text()) for path in RUNTIME.rglob("*.py")), f"nothing in runtime/ reads {key}"


@pytest.mark.parametrize(
    ("capability", "name"), [(61, "sm_70"), (75, "sm_70"), (80, "sm_80"), (86, "sm_80"), (90, "sm_90"), (120, "sm_90")]
)
def test_a_gpu_without_an_entry_gets_that_of_the_capability_below(capability: int, name: str) -> None:
    assert gpu_target(capability) is GPU_TARGETS[name]


@pytest.mark.parametrize("target", GPU_TARGETS.values(), ids=lambda t: t.name)
def test_limits_of_gpus_agree_with_each_other(target: GpuTarget) -> None:
    limits, budgets = target.limits, target.budgets
    assert limits.vector <= limits.sector <= limits.line
    assert budgets.row <= budgets.tile


def test_a_kernel_for_a_processor_is_not_launched_on_a_gpu() -> None:
    with pytest.raises(AssertionError, match="k"):
        _ = Kernel("k", (), (), (), ()).gpu
    assert Kernel("k", (), (), (), (), machine=H200).gpu is H200


def measured() -> list[dict[str, Any]]:
    targets: TargetSet = load_model().part("targets")
    return [one for gpu in targets.gpu.values() for one in gpu.get("measured", ())]


@pytest.mark.parametrize("one", measured(), ids=lambda one: one["gpu"])
def test_what_was_measured_stands_in_the_results(one: dict[str, Any]) -> None:
    result = json.loads((RUNTIME.parent / one["results"]).read_text())
    assert result["machine"]["gpu"] == one["gpu"]
    assert round(result["bandwidth"] / 1e9) == one["copy_bandwidth"]
    assert result["command"].startswith(one["command"])


def test_benchmarks_compare_the_device_with_what_such_a_one_reached() -> None:
    with importable():
        from gpu import below

    name, reached = "NVIDIA H200", 4230
    assert below(reached, name, GPU_TARGETS.values()) == ""
    assert "another NVIDIA H200 moved 4.23 TB/s" in below(0.9 * reached, name, GPU_TARGETS.values())
    assert below(1, "of another kind", GPU_TARGETS.values()) == ""


ROOMS = (
    "execute",
    "fuse",
    "graphs",
    "kernels",
    "lower",
    "memory",
    "partition",
    "render",
    "schedule",
    "targets",
    "tile",
)


def numbers_without_a_reason(path: Path) -> Iterator[str]:
    """Constants of a module that are numbers, with neither a comment beside or above them nor a text below."""
    source = path.read_text()
    body = ast.parse(source).body
    for st, after in itertools.zip_longest(body, body[1:]):
        if not isinstance(st, ast.Assign) or not is_number(st.value):
            continue
        lines = source.splitlines()[max(st.lineno - 2, 0) : st.end_lineno]
        told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if not told and not any("#" in line for line in lines):
            yield f"{path.relative_to(RUNTIME)}:{st.lineno}: {ast.unparse(st)}"


def is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return bool(value.elts) and all(map(is_number, value.elts))
    if isinstance(value, ast.BinOp):
        return is_number(value.left) and is_number(value.right)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def test_numbers_that_are_no_machines_say_what_they_are() -> None:
    """What depends on a machine stands in specs/targets or specs/tuning; others bound the time of a compilation, its text, or errors of sums."""
    wrong = [
        w for room in ROOMS for path in sorted((RUNTIME / room).rglob("*.py")) for w in numbers_without_a_reason(path)
    ]
    assert not wrong, "\n".join(wrong)
