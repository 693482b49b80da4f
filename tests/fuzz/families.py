"""Families of random programs: the hostile one of aliases and writes (`generate.py`), and ordinary ones that people write."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from . import ordinary, raw
from .generate import Draft, Filling, generate, try_step
from .program import Program, Step

Groups = dict[str, tuple[str, int, int]]
Sizes = tuple[tuple[int, int], ...]

assert raw.layout  # its operators are registered


@dataclass(frozen=True)
class Family:
    """How programs of one kind are made: `draw(seed)`. `doc` says what they are; `ordinary` ones should all be compiled. Those `on_gpus` make all
    their tensors where they are told to.
    """

    name: str
    doc: str
    draw: Callable[[int], Program]
    ordinary: bool = True
    on_gpus: bool = True


def program_of(family: str, seed: int, device: str = "cpu") -> Program:
    """The program of a seed in a family: always the same one, whose tensors are on the device (of "interpreter": the processor). Raises KeyError
    for a family that there is not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return replace(FAMILIES[family].draw(seed), device=device)


def _inputs(draft: Draft, shapes: tuple[str, ...], count: int, *, leaves: float = 0.7) -> None:
    """Arguments of dtype float32, and some of float64; `leaves` is the share of those that require grad."""
    for _ in range(count):
        name, rng = draft.fresh("p"), draft.rng
        dtype = "float64" if rng.random() < 0.12 else "float32"
        text = f'grid({rng.choice(shapes)}, "{dtype}", {rng.randrange(1000)})'
        if rng.random() < leaves:
            draft.leaves.append(name)
            text += ".requires_grad_()"
        draft.inputs.append(Step(text, (name,)))
        draft.args.append(name)


def _results(draft: Draft) -> tuple[str, ...]:
    """What no step has read, and now and then a value in between."""
    names, rng = draft.names(), draft.rng
    read = set().union(*(step.uses() for step in draft.steps)) if draft.steps else set()
    results = [name for name in names if name not in read and name not in draft.args][-4:] or names[-1:]
    if rng.random() < 0.3:
        results.append(rng.choice(names))
    return tuple(results)


def _finished(draft: Draft, seed: int, family: str, shapes: str = "automatic") -> Program:
    return Program(
        seed,
        tuple(draft.inputs),
        tuple(draft.leaves),
        tuple(draft.args),
        tuple(draft.steps),
        _results(draft),
        (),
        draft.sizes,
        "dynamo",
        draft.mode,
        family,
        tuple(draft.before),
        shapes,
    )


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.strip().splitlines())


def _changing_sizes(rng: random.Random, calls: int, low: int = 3, high: int = 13) -> Sizes:
    ns, ms = rng.sample(range(low, high), calls), rng.sample(range(low, high), calls)
    return tuple(zip(ns, ms, strict=True))


def _numbers(seed: int) -> Program:
    rng = random.Random(f"numbers {seed}")
    groups: Groups = {"numbers": (ordinary.USES, 12, 1), "plain": (ordinary.PLAIN, 6, 1)}
    draft = Draft(rng, _changing_sizes(rng, 3), groups, _lines(ordinary.NUMBERS_OF_SIZES), refused=0.0)
    _inputs(draft, ("(n, m)", "(n, m)", "(m,)", "(2, n, m)", "(n, 1)", "(m, n)"), rng.choice((1, 2, 2)))
    draft.begin()
    draft.draw_steps(rng.choice((1, 2, 3, 4, 6)))
    return _finished(draft, seed, "numbers", rng.choice(("dynamic", "dynamic", "automatic")))


def _counters(seed: int) -> Program:
    rng = random.Random(f"counters {seed}")
    groups: Groups = {
        "numbers": (ordinary.USES, 10, 1),
        "updates": (ordinary.UPDATES, 5, 0),
        "plain": (ordinary.PLAIN, 4, 1),
    }
    draft = Draft(rng, ((4, 6),) * 5, groups, _lines(ordinary.NUMBERS_OF_STEPS), refused=0.0)
    rate = rng.choice(("0.5 / (call + 1)", "0.1 * 0.9 ** call", "[0.1, 0.2, 0.4, 0.4, 0.3][call]", "0.25"))
    first = rng.choice((0, 0, 1, 10))
    draft.before = [Step(f"state.step = call + {first}"), Step(f"state.rate = {rate}")]
    leaves = rng.choice((0.0, 0.6))  # an optimizer's step trains nothing itself
    _inputs(draft, ("(n, m)", "(n, m)", "(m,)"), rng.choice((1, 2, 3)), leaves=leaves)
    draft.begin()
    draft.draw_steps(rng.choice((1, 2, 3, 5)))
    return _finished(draft, seed, "counters")


def _attributes(seed: int) -> Program:
    rng = random.Random(f"attributes {seed}")
    groups: Groups = {
        "attributes": (ordinary.ATTRIBUTES, 12, 1),
        "written": (ordinary.SET_ATTRIBUTES, 3, 0),
        "plain": (ordinary.PLAIN, 5, 1),
    }
    draft = Draft(rng, ((4, 6),) * rng.choice((2, 3, 4)), groups, refused=0.0)
    draft.before = [Step(text) for text in ordinary.BEFORE_ATTRIBUTES]
    _inputs(draft, ("(n, m)", "(n, m)", "(m,)"), rng.choice((1, 2)))
    draft.begin()
    draft.draw_steps(rng.choice((2, 3, 4, 6)))
    return _finished(draft, seed, "attributes")


def _norms(seed: int) -> Program:
    rng = random.Random(f"norms {seed}")
    groups: Groups = {
        "cut": (ordinary.CUT, 10, 1),
        "norms": (ordinary.NORMS, 12, 1),
        "losses": (ordinary.LOSSES, 5, 1),
    }
    sizes = rng.choice((((64, 40),), ((33, 17),), ((128, 64),), ((24, 130),), ((256, 48),), ((8, 24), (12, 40))))
    draft = Draft(rng, sizes, groups, elements=20000, refused=0.0)
    _inputs(draft, ("(n, m)",), rng.choice((1, 1, 2)), leaves=0.9)
    draft.begin()
    draft.draw_steps(rng.choice((2, 3, 4, 5)))
    return _finished(draft, seed, "norms", "by sizes")


def _raw(seed: int) -> Program:
    rng = random.Random(f"raw {seed}")
    groups: Groups = {
        "layouts": (ordinary.LAYOUTS, 12, 1),
        "operators": (ordinary.RAW, 12, 1),
        "writes": (ordinary.RAW_WRITES, 4, 0),
        "plain": (ordinary.PLAIN, 6, 1),
    }
    sizes = _changing_sizes(rng, 2) if rng.random() < 0.2 else ((rng.randrange(2, 9), rng.randrange(2, 9)),)
    draft = Draft(rng, sizes, groups, refused=0.0)
    _inputs(draft, ("(n, m)", "(n, m)", "(m, n)", "(2, n, m)"), rng.choice((1, 2)), leaves=0.4)
    draft.begin()
    draft.draw_steps(rng.choice((2, 3, 4, 6)))
    return _finished(draft, seed, "raw")


def _modules(seed: int) -> Program:
    rng = random.Random(f"modules {seed}")
    groups: Groups = {"layers": (ordinary.LAYERS, 1, 1)}
    n, n2 = rng.sample(range(2, 8), 2)
    sizes = ((n, 8), (n2, 8)) if rng.random() < 0.3 else ((n, 8),) * rng.choice((1, 2))
    draft = Draft(rng, sizes, groups, refused=0.0)
    shapes = rng.choice((("(n, m)",), ("(n, 4, m)",), ("(n, 3, 6, m)",)))
    _inputs(draft, shapes, rng.choice((1, 1, 2)), leaves=0.3)
    draft.begin()
    for _ in range(rng.choice((2, 3, 4, 5))):
        if rng.random() < 0.7:
            _add_module(draft)
        else:
            draft.draw_steps(len(draft.steps) + 1)
    if rng.random() < 0.7:
        _add_objective(draft)
    return _finished(draft, seed, "modules")


def _add_module(draft: Draft) -> None:
    """A module as an argument, and a step that calls it; nothing where 20 tries bring none that fits."""
    rng = draft.rng
    for _ in range(20):
        names = draft.names(lambda t: t.is_floating_point() and t.dim() > 0)
        operand = rng.choice(names[-2:])
        if rng.random() < 0.8:
            text, call = rng.choice(_lines(ordinary.MODULES)), "{w}({t})"
        else:
            text, call = rng.choice(ordinary.MODULES_WITH_CALLS)
        value = draft.envs[0][operand]
        channels = value.shape[1] if value.dim() > 1 else 1
        name = draft.fresh("w")
        made = text.replace("{last}", str(value.shape[-1])).replace("{channels}", str(channels))
        if value.dtype == torch.float64:
            made += ".double()"
        draft.inputs.append(Step(f"fill({made}, {rng.randrange(1000)})", (name,)))
        try:
            draft.begin()
            step = Step(call.replace("{w}", name).replace("{t}", operand), (draft.fresh("v"),))
            fits = try_step(draft, step)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            fits = False
        if fits:
            draft.args.append(name)
            return
        draft.inputs.pop()
        draft.begin()


def _add_objective(draft: Draft) -> None:
    for text in draft.rng.sample(ordinary.OBJECTIVES, 4):
        draft_step = Step(Filling(draft).fill(text), (draft.fresh("v"),))
        if try_step(draft, draft_step):
            return


FAMILIES: Mapping[str, Family] = {
    f.name: f
    for f in (
        Family("aliasing", "views, aliases, writes and dtypes of all kinds", generate, ordinary=False, on_gpus=False),
        Family("modules", "torch.nn modules that train", _modules),
        Family("raw", "custom operators that take memory by its address", _raw, on_gpus=False),
        Family("numbers", "numbers made of sizes that change", _numbers),
        Family("counters", "step counters, rates and schedules", _counters),
        Family("attributes", "Python attributes that the program reads, or writes, and that change", _attributes),
        Family("norms", "slices and pads of norms and softmaxes", _norms),
    )
}
ORDINARY = tuple(name for name, family in FAMILIES.items() if family.ordinary)
