"""A tiny spec in, exact text out."""

from opforge.generator.diagnostics import Diagnostics
from opforge.generator.emit import targets, tuning
from opforge.generator.load import load_spec, load_text
from opforge.generator.model import Model
from opforge.generator.render import header
from opforge.generator.run import SPECS_DIR, format_files
from opforge.generator.torch_schemas import TorchSchemas

SPEC = """\
- tuning: sm_80
  doc: "Small."
  machine: "one, with a name"
  command: tune it
  blocks:
  - {kernel: pointwise, strided: true, x: 256, each: 2, warps: 8}
  - {kernel: pointwise, x: 512, each: 4, warps: 8}
  - {kernel: transpose, x: 64, each: 16, warps: 8}
  - {kernel: outer_reduction, x: 64, tile: 4096, each: 16, warps: 8}
  - {kernel: looped_outer_reduction, x: 32, tile: 1024, programs: 100, least: 8, each: 8, warps: 8}
  - {kernel: persistent_reduction, tile: 1024, each: 16, warps: 8}
  - {kernel: looped_reduction, x: 1, r: 2048, each: 4, warps: 8}
  - {kernel: multi_pass_reduction, x: 1, r: 4096, even: 2048, each: 4, warps: 8}
  - {kernel: product, x: 128, r: 64, warps: 4}
  - {kernel: attention, block: 64, x: 128, r: 64, programs: 108, least: 16, warps: 4}
  - {kernel: attention, x: 64, r: 64, programs: 108, least: 16, warps: 4}
  - {kernel: horizontal, x: 1024, r: 16, programs: 864, warps: 1}
  - {kernel: horizontal_table, x: 512, r: 8, programs: 1728, warps: 2}
  contraction: {few_rows: 16, rows: 64, edge: 64, wide_edge: 128, grouped_columns: 512, epilogue: 5, group_m: 3, wide_group_m: 6, num_stages: 3}
  attention: {rows: 32, num_stages: 5, looked_at: 256}
  routine: {elements: 512, across: 8, most_across: 2048, programs: 100, narrow: 64, wide: 1024}
  tiles:
  - {block_m: 128, block_n: 64, block_k: 32, num_warps: 4, num_stages: 3}
  - {block_m: 64, block_n: 64, block_k: 32, num_warps: 4, num_stages: 3, descriptors: true}
  margin: 5
  last: {rows: 16, elements: 1024}
  fused:
  - {odd: true, depth: 100, least: 3000, block_m: 64, block_n: 32, block_k: 32, num_warps: 4, num_stages: 4}
  - {cost: 3, depth: 100, elements: 3000, block_m: 64, block_n: 32, block_k: 32, num_warps: 4, num_stages: 4}
"""
EXPECTED = """\
#: By compute capability.
TUNING: dict[int, Tuning] = {
    # spec: sm_80
    # Small.
    80: Tuning(
        "sm_80",
        80,
        "one, with a name",
        "tune it",
        {
            "pointwise": (
                Rule(strided=True, x=256, each=2, warps=8),
                Rule(x=512, each=4, warps=8),
            ),
            "transpose": (Rule(x=64, each=16, warps=8),),
            "outer_reduction": (Rule(x=64, tile=4096, each=16, warps=8),),
            "looped_outer_reduction": (Rule(x=32, tile=1024, programs=100, least=8, each=8, warps=8),),
            "persistent_reduction": (Rule(tile=1024, each=16, warps=8),),
            "looped_reduction": (Rule(x=1, r=2048, each=4, warps=8),),
            "multi_pass_reduction": (Rule(x=1, r=4096, even=2048, each=4, warps=8),),
            "product": (Rule(x=128, r=64, warps=4),),
            "attention": (
                Rule(block=64, x=128, r=64, programs=108, least=16, warps=4),
                Rule(x=64, r=64, programs=108, least=16, warps=4),
            ),
            "horizontal": (Rule(x=1024, r=16, programs=864, warps=1),),
            "horizontal_table": (Rule(x=512, r=8, programs=1728, warps=2),),
        },
        ContractionSizes(
            few_rows=16,
            rows=64,
            edge=64,
            wide_edge=128,
            grouped_columns=512,
            epilogue=5,
            group_m=3,
            wide_group_m=6,
            num_stages=3,
        ),
        AttentionSizes(rows=32, num_stages=5, looked_at=256),
        RoutineSizes(elements=512, across=8, most_across=2048, programs=100, narrow=64, wide=1024),
        (
            Block(block_m=128, block_n=64, block_k=32, num_warps=4, num_stages=3),
            Block(block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=3, descriptors=True),
        ),
        5,
        (
            FusedProduct(
                odd=True, depth=100, least=3000, block_m=64, block_n=32, block_k=32, num_warps=4, num_stages=4
            ),
            FusedProduct(
                cost=3, depth=100, elements=3000, block_m=64, block_n=32, block_k=32, num_warps=4, num_stages=4
            ),
        ),
        Last(rows=16, elements=1024),
    ),
}
"""


def test_rules_become_a_table() -> None:
    diags = Diagnostics()
    machines = targets.build(load_spec(SPECS_DIR / "targets.yaml", diags), Model(SPECS_DIR, {}, {}, none()), diags)
    doc = load_text(SPEC, "tuning.yaml", diags)
    part = tuning.build(doc, Model(SPECS_DIR, {"tuning": doc}, {"targets": machines}, none()), diags)
    assert not diags, diags.render()
    text = tuning.emit(Model(SPECS_DIR, {"tuning": doc}, {"tuning": part}, none()))[tuning.PATH]
    formatted = format_files({tuning.PATH: text})[tuning.PATH]
    assert formatted.endswith(EXPECTED)
    assert formatted.startswith(header(tuning.PATH, "specs/tuning/*.yaml"))


def test_no_spec_no_file() -> None:
    assert tuning.emit(Model(SPECS_DIR, {}, {}, none())) == {}


def none() -> TorchSchemas:
    return TorchSchemas([])
