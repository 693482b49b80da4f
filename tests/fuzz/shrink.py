"""Makes a failing program smaller while it fails in the same way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from .check import Outcome, check
from .program import NAME, Program, Step


def shrink(program: Program, outcome: Outcome, seconds: float = 60.0) -> tuple[Program, Outcome]:
    """The smallest program found within `seconds` that shows a difference of the kind that `outcome` shows first."""
    kind = outcome.kinds[0]
    end = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for smaller in candidates(program):
            if time.monotonic() > end:
                return program, outcome
            if smaller == program or not smaller.valid():
                continue
            tried = check(smaller)
            if kind in tried.kinds:
                program, outcome, changed = smaller, tried, True
                break
    return program, outcome


def candidates(program: Program) -> Iterator[Program]:
    """Programs that are a bit smaller, the boldest first."""
    replace: Callable[..., Program] = lambda **kw: dataclasses.replace(program, **kw)  # noqa: E731
    if program.path == "dynamo" and not program.ordinary:
        yield replace(path="direct")
    for calls in range(1, len(program.sizes)):
        yield replace(sizes=program.sizes[:calls])
    steps = program.steps
    for width in (len(steps) // 2, len(steps) // 4, 1):
        for k in range(len(steps), 0, -width) if width else ():
            yield _without_dead(replace(steps=steps[: max(k - width, 0)] + steps[k:]))
    for k, step in enumerate(steps):
        if len(step.outs) == 1:
            for name in sorted(step.uses()):
                yield _renamed(replace(steps=steps[:k] + steps[k + 1 :]), step.outs[0], name)
    for k in range(len(program.after)):
        yield replace(after=program.after[:k] + program.after[k + 1 :])
    if not program.after:
        for k in range(len(program.results)):
            yield _without_dead(replace(results=program.results[:k] + program.results[k + 1 :]))
    for k in range(len(program.args)):
        yield _without_inputs(replace(args=program.args[:k] + program.args[k + 1 :]))
    if program.mode != "enable_grad":
        yield replace(mode="enable_grad")
    for k, step in enumerate(steps):
        if step.mode:
            yield replace(steps=(*steps[:k], dataclasses.replace(step, mode=""), *steps[k + 1 :]))
    yield from _simpler_inputs(program)
    for k, (n, m) in enumerate(program.sizes):
        for small in ((2, 3), (n, 2), (2, m), (n, 4), (4, m), (3, 5)):
            if small[0] <= n and small[1] <= m:
                yield replace(sizes=(*program.sizes[:k], small, *program.sizes[k + 1 :]))


def _simpler_inputs(program: Program) -> Iterator[Program]:
    for k, step in enumerate(program.inputs):
        texts = [
            step.text.removesuffix(".requires_grad_()"),
            step.text.replace("(2, n, m)", "(n, m)").replace("(n, m, 3)", "(n, m)"),
            step.text.replace(", 7.3)", ", 8.0)"),
        ]
        for dtype in ("float64", "float16", "bfloat16"):
            texts.append(step.text.replace(f'"{dtype}"', '"float32"'))
        for text in dict.fromkeys(texts):
            if text != step.text:
                inputs = (*program.inputs[:k], Step(text, step.outs), *program.inputs[k + 1 :])
                leaves = tuple(n for n in program.leaves if n not in step.outs or text.endswith("requires_grad_()"))
                yield dataclasses.replace(program, inputs=inputs, leaves=leaves)


def _without_dead(program: Program) -> Program:
    """Without steps that only define what nobody reads."""
    needed = set(program.results)
    kept: list[Step] = []
    for step in reversed(program.steps):
        if not step.outs or needed & set(step.outs):
            kept.insert(0, step)
            needed |= step.uses()
    return dataclasses.replace(program, steps=tuple(kept))


def _without_inputs(program: Program) -> Program:
    """Without inputs that no argument needs."""
    needed = set(program.args)
    kept: list[Step] = []
    for step in reversed(program.inputs):
        if needed & set(step.outs):
            kept.insert(0, step)
            needed |= step.uses()
    leaves = tuple(n for n in program.leaves if n in needed)
    return dataclasses.replace(program, inputs=tuple(kept), leaves=leaves)


def _renamed(program: Program, old: str, new: str) -> Program:
    def text(source: str) -> str:
        return NAME.sub(lambda m: new if m[0] == old else m[0], source)

    steps = tuple(dataclasses.replace(s, text=text(s.text)) for s in program.steps)
    return dataclasses.replace(program, steps=steps, results=tuple(new if r == old else r for r in program.results))
