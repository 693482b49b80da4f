"""The wrapper of every kind of mutation and of every kind of output, against one file that was read and accepted.

Every step that a decision table can choose stands in one of them. Programs are those of the matrix (`docs/matrix.md`).
"""

from __future__ import annotations

import re
import warnings

from syrupy.assertion import SnapshotAssertion

from opforge.errors import UnsupportedError
from opforge.generated.wrapper_steps import STEPS
from opforge.runtime.dispatch.autograd.needs_grad import wants_grad
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.dispatch.wrapper.source import emit_wrapper
from tests.generated.test_matrix import AXES
from tests.snapshots.test_gallery import MarkdownFiles
from tests.support.matrix import MODES, maker, matrix_program, program_text

PLAIN = {"mutation": "none", "output": "nothing", "history": "none", "inputs": "apart", "shape": "static"}
ROWS = [
    *({**PLAIN, "mutation": m, "history": h} for m in AXES["mutation"] for h in ("none", "computed")),
    *({**PLAIN, "output": o, "history": h} for o in AXES["output"] for h in ("none", "computed")),
    *({**PLAIN, "mutation": "both", "history": h, "inputs": i} for i in AXES["inputs"] for h in ("none", "computed")),
    *({**PLAIN, "mutation": "data", "history": h} for h in AXES["history"]),
    {**PLAIN, "mutation": "no_grad", "history": "computed", "inputs": "overlapping"},
    {**PLAIN, "mutation": "data_attribute", "history": "computed", "inputs": "overlapping"},
]
ELSEWHERE = {
    "coerce_tangent": "a line of the backward",
    "conjugate": "complex numbers: tests/programs/test_complex.py",
    "wrap_subclass": "tensor subclasses: tests/programs/test_subclasses.py",
}


def wrapper(cell: dict[str, str]) -> str:
    """The source, or why there is none."""
    program = matrix_program(AXES, cell)
    arguments = maker(AXES, cell, (4, 6))().arguments
    with warnings.catch_warnings(), MODES[AXES["history"][cell["history"]].get("call", "")]():
        warnings.simplefilter("ignore")
        try:
            return emit_wrapper(trace(program, arguments, training=wants_grad(program, arguments)), "compiled")
        except UnsupportedError as error:
            # Before torch 2.13 the message has the name of the node.
            reason = str(error).splitlines()[0].replace("Backward0 is a view", " is a view")
            return f"# left to eager: {reason}\n"


def test_wrappers(snapshot: SnapshotAssertion) -> None:
    parts, code, known = ["# Wrappers\n"], "", set[str]()
    for cell in {tuple(row.values()): row for row in ROWS}.values():
        title = ", ".join(f"{k} {v}" for k, v in cell.items() if v != PLAIN[k]) or "nothing at all"
        text = wrapper(cell)
        code += text
        shape = re.sub(r"\d+(, )?", "", text)
        if shape in known:  # only numbers differ
            continue
        known.add(shape)
        parts.append(f"## {title}\n\n```python\n{program_text(AXES, cell)}\n{text}```\n")
    missing = [name for name, step in STEPS.items() if name not in ELSEWHERE and not _stands_in(step.code, code)]
    assert not missing, "a step that no program of the gallery needs"
    assert "\n".join(parts) == snapshot(extension_class=MarkdownFiles)


def _stands_in(template: str, code: str) -> bool:
    words = [re.escape(part) for part in re.split(r"\{\w+\}", template)]
    return re.search(".+?".join(words), code) is not None
