"""Every operator of torch has a row: what stands for what, and the installed torch as the judge of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from opforge.generator.coverage import VARIANT, advice, functional_forms, row_of, without_row
from opforge.generator.run import load_model
from opforge.generator.torch_schemas import TorchSchemas, parse_schema

LINES = [
    "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
    "aten::add.out(Tensor self, Tensor other, *, Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)",
    "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)",
    "aten::__and__.Tensor(Tensor self, Tensor other) -> Tensor",
    "aten::__iand__.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)",
    "aten::ones(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None) -> Tensor",
    "aten::ones.out(SymInt[] size, *, Tensor(a!) out) -> Tensor(a!)",
    "aten::normal_functional(Tensor self, float mean=0., float std=1.) -> Tensor",
    "aten::normal_(Tensor(a!) self, float mean=0., float std=1.) -> Tensor(a!)",
    "aten::lonely_(Tensor(a!) self) -> Tensor(a!)",
    "other::add(Tensor self) -> Tensor",
]


def model_kinds() -> dict[str, str]:
    return {s.id: e.kind for e in load_model().part("ops") for s in e.schemas}


def test_a_variant_has_the_row_of_its_functional_form() -> None:
    schemas = TorchSchemas(LINES)
    forms = {s.id: [f.id for f in functional_forms(s, schemas)] for line in LINES if (s := parse_schema(line)).mutates}
    assert forms == {
        "aten.add.out": ["aten.add.Tensor"],
        "aten.add_.Tensor": ["aten.add.Tensor"],
        "aten.__iand__.Tensor": ["aten.__and__.Tensor"],
        "aten.ones.out": ["aten.ones.default"],
        "aten.normal_.default": ["aten.normal_functional.default"],
        "aten.lonely_.default": [],
    }
    kinds = {"aten.add.Tensor": "pointwise"}
    assert row_of(schemas.get("aten.add.Tensor")[0], kinds, schemas) == "pointwise"
    assert row_of(schemas.get("aten.add_.Tensor")[0], kinds, schemas) == VARIANT
    assert row_of(schemas.get("aten.ones.out")[0], kinds, schemas) is None


def test_overloads_without_a_row_are_named_with_what_to_do() -> None:
    schemas = TorchSchemas(LINES)
    kinds = dict.fromkeys(("aten.add.Tensor", "aten.__and__.Tensor", "aten.normal_functional.default"), "extern")
    missing = without_row(schemas, kinds)
    assert [s.id for s in missing] == ["aten.lonely_.default", "aten.ones.default", "aten.ones.out"]
    text = advice(missing)
    assert text.startswith(
        "3 operators of the installed torch without a row in specs/ops/:\n  aten::lonely_(Tensor(a!) self)"
    )
    assert "opforge new-op" in text
    assert advice([]) == ""


@pytest.fixture(scope="module")
def installed() -> list[str]:
    """Torch's schemas, from a process of its own: whatever else a test session imported may have registered operators of its own."""
    code = "from opforge.generator.torch_schemas import torch_lines; print('\\n'.join(torch_lines()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def test_every_operator_of_the_installed_torch_has_a_row(installed: list[str]) -> None:
    missing = without_row(TorchSchemas(installed), model_kinds())
    assert not missing, advice(missing)


def test_every_operator_of_the_snapshot_and_of_older_versions_has_a_row() -> None:
    schemas = TorchSchemas.snapshot()
    assert len(schemas.older) > 50
    missing = without_row(schemas, model_kinds())
    assert not missing, advice(missing)


def composite(overload: str) -> bool | None:
    """Whether torch's kernel of an overload is made of other operators; None where this torch has no such overload."""
    namespace, _, rest = overload.partition(".")
    name = f"{namespace}::{rest.removesuffix('.default')}"
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))
    except RuntimeError:
        return None


def test_what_is_said_to_be_decomposed_is_made_of_other_operators() -> None:
    model = load_model()
    bodies = {e.id for e in model.entries("decompositions") if e.tag == "decomposition"}
    rows = [s.id for e in model.part("ops") if e.kind == "decomposed" for s in e.schemas]
    assert len(rows) > 500
    wrong = [name for name in rows if name not in bodies and composite(name) is False]
    assert not wrong
