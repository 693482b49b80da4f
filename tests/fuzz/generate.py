"""Makes programs: draws a step, runs it by eager, and keeps it if it worked and its values are tame, so that most programs are valid."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .catalog import GROUPS
from .program import GRID, PARTS, Program, Step, names

Env = dict[str, Any]

_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33)
_SHAPES = ("(n, m)",) * 5 + ("(m,)", "(n,)", "()", "(2, n, m)", "(m, n)", "(n, 1)", "(1, m)", "(n, n)", "(n, m, 3)")
_FLOATS = ("float32",) * 7 + ("float64",) * 2 + ("float16", "bfloat16")
_OTHERS = ("int64",) * 4 + ("int32", "bool", "bool", "int16", "uint8", "int8")
_CASTS = ("float32", "float64", "int64", "int32", "float16", "bfloat16", "bool")
_NUMBERS = ("0", "1", "2", "-1", "3", "0.5", "-1.5", "2.0", "0.3")
_SLICES = (":", ":", "1:", ":-1", "::2", "0", "-1", "1:3", "None", "...", "1::2", ":2")
_VIEWS = (
    "{p}[1:]",
    "{p}[:2]",
    "{p}[:-1]",
    "{p}.t()",
    "{p}.transpose(0, -1)",
    "{p}.expand(2, *{p}.shape)",
    "{p}[..., ::2]",
    "{p}[..., 1:]",
    "{p}.view(-1)",
    "{p}.flatten()[1:]",
    "{p}.diagonal()",
    "{p}.unsqueeze(0)",
    "{p}.detach()",
    "{p}[0]",
    "{p}.mT",
    "{p}.view({p}.shape)",
)
_AFTER = (
    "{r}.add_(1)",
    "{r}.mul_(2)",
    "{r}.detach().mul_(2)",
    "{r}.zero_()",
    "{r}[:1].add_(1)",
    "{r}.view(-1)[:1].mul_(3)",
)
_LIMIT = 1000.0


@dataclass
class Draft:
    """A program in the making; `envs` hold its values, one for each call. `groups` are the templates of its steps, `numbers` those of its
    numbers, `elements` is how many a tensor may have, and `before` sets the program's `state`.
    """

    rng: random.Random
    sizes: tuple[tuple[int, int], ...]
    groups: dict[str, tuple[str, int, int]] = field(default_factory=lambda: GROUPS)
    numbers: tuple[str, ...] = ()
    elements: int = 3000
    refused: float = 0.004
    before: list[Step] = field(default_factory=list)
    inputs: list[Step] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)
    args: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    envs: list[Env] = field(default_factory=list)
    mode: str = "enable_grad"
    count: int = 0

    def begin(self) -> None:
        """Values of the inputs, and of all steps so far."""
        self.envs = [_env(n, m, call) for call, (n, m) in enumerate(self.sizes)]
        for env in self.envs:
            for step in (*self.inputs, *self.before):
                _run(step, env, "enable_grad")
            for step in self.steps:
                _run(step, env, self.mode)

    def draw_steps(self, count: int) -> None:
        """Add steps until there are `count`, or none fits."""
        while len(self.steps) < count and _draw_step(self):
            pass

    def names(self, fits: Callable[[torch.Tensor], bool] = lambda _: True) -> list[str]:
        """Tensors that the program knows; those of which `fits` holds."""
        known = [*dict.fromkeys(self.args), *(o for s in self.steps for o in s.outs)]
        env = self.envs[0]
        return [name for name in known if isinstance(env.get(name), torch.Tensor) and fits(env[name])]

    def fresh(self, letter: str) -> str:
        """A new name."""
        self.count += 1
        return f"{letter}{self.count}"


def generate(seed: int) -> Program:
    """The program of a seed: always the same one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _generate(seed, random.Random(seed))


def _generate(seed: int, rng: random.Random) -> Program:
    dynamic = rng.random() < 0.25
    draft = Draft(rng, _sizes(rng, dynamic))
    draft.mode = rng.choices(("enable_grad", "no_grad", "inference_mode"), (85, 13, 2))[0]
    _draw_inputs(draft)
    draft.begin()
    wanted = rng.choice((2, 3, 4, 5, 6, 8, 10, 14))
    draft.draw_steps(wanted)
    results = _draw_results(draft)
    return Program(
        seed,
        tuple(draft.inputs),
        tuple(draft.leaves),
        tuple(draft.args),
        tuple(draft.steps),
        tuple(results),
        tuple(_draw_after(rng, draft.args, len(results))),
        draft.sizes,
        "dynamo" if rng.random() < 0.15 else "direct",
        draft.mode,
    )


def _sizes(rng: random.Random, dynamic: bool) -> tuple[tuple[int, int], ...]:
    if dynamic:
        n, m, n2, m2 = rng.sample(range(4, 20), 4)
        return (n, m), (n2, m2)
    n, m = rng.choice(_SIZES), rng.choice(_SIZES)
    if rng.random() < 0.03:
        n = 0
    return ((n, m),)


def _draw_inputs(draft: Draft) -> None:
    rng = draft.rng
    bases: list[str] = []
    for k in range(rng.choice((1, 2, 2, 2, 3, 3, 4))):
        draw = rng.random()
        if draft.args and draw < 0.06:
            draft.args.append(rng.choice(draft.args))
            continue
        if not (bases and draw < 0.25):
            bases.append(_draw_base(draft, float_=k == 0 or rng.random() < 0.65))
            if rng.random() < 0.7:
                draft.args.append(bases[-1])
                continue
        base = rng.choice(bases)
        view = Step(rng.choice(_VIEWS).format(p=base), (draft.fresh("x"),))
        draft.inputs.append(view)
        try:
            draft.begin()
        except (RuntimeError, IndexError, TypeError):
            draft.inputs.pop()
            draft.args.append(base)
            continue
        draft.args.append(view.outs[0])


def _draw_base(draft: Draft, float_: bool) -> str:
    rng = draft.rng
    dtype = rng.choice(_FLOATS if float_ else _OTHERS)
    shape, step = rng.choice(_SHAPES), rng.choice((8.0, 8.0, 7.3))
    text = f'grid({shape}, "{dtype}", {rng.randrange(1000)}, {step})'
    state = rng.choices(("plain", "leaf", "computed", "strided leaf"), (40, 35, 18, 7))[0] if float_ else "plain"
    name = draft.fresh("p")
    if state == "plain":
        draft.inputs.append(Step(text, (name,)))
        return name
    if state == "strided leaf":
        text = f"{text}.mT.detach()" if shape.count(",") > 1 else text
    draft.inputs.append(Step(f"{text}.requires_grad_()", (name,)))
    draft.leaves.append(name)
    if state != "computed":
        return name
    computed = draft.fresh("p")
    draft.inputs.append(Step(rng.choice((f"{name}.clone()", f"{name} * 2", f"{name}.sin()")), (computed,)))
    return computed


def _draw_step(draft: Draft) -> bool:
    """Add a step; False where the program ends: with a step that eager refuses, or for want of any that fits."""
    rng = draft.rng
    groups = list(draft.groups)
    for _ in range(40):
        entries, _, count = draft.groups[rng.choices(groups, [draft.groups[g][1] for g in groups])[0]]
        try:
            text = Filling(draft).fill(rng.choice(entries.strip().splitlines()))
        except LookupError:
            continue
        outs = tuple(draft.fresh("v") for _ in range(count))
        mode = rng.choices(("", "no_grad", "enable_grad"), (93, 6, 1))[0] if draft.refused else ""
        step = Step(text, outs, mode)
        fits = try_step(draft, step)
        if fits:
            return True
        if fits is None and rng.random() < draft.refused:
            draft.steps.append(step)
            return False
    return False


def try_step(draft: Draft, step: Step) -> bool | None:
    """Add the step if eager runs it and its values are tame. False where they are not, None where eager refuses it."""
    try:
        for env in draft.envs:
            _run(step, env, draft.mode)
    except Exception:  # noqa: BLE001 - whatever eager raises, the compiled program has to raise too
        if not step.outs or len(draft.envs) > 1:
            draft.begin()
        return None
    touched = step.outs or tuple(step.uses())
    inside = "as_strided(" not in step.text or all(
        _inside(env[name], env, step) for env in draft.envs for name in step.outs
    )
    if inside and all(_tame(env[name], draft.elements) for env in draft.envs for name in touched):
        draft.steps.append(step)
        return True
    for env in draft.envs:
        for name in step.outs:
            del env[name]
    if inside and not step.outs:
        draft.begin()
    return False


def _draw_results(draft: Draft) -> list[str]:
    """Mostly what no other step has read, so that little of the program is dead; also inputs, views and repeats."""
    rng, names = draft.rng, draft.names()
    read = set().union(*(step.uses() for step in draft.steps)) if draft.steps else set()
    unread = [name for name in names if name not in read] or names
    results = unread[-4:] if rng.random() < 0.6 else rng.sample(unread, min(len(unread), 2))
    results += [rng.choice(names) for _ in range(rng.choice((0, 0, 1, 2)))]
    rng.shuffle(results)
    return results


def _draw_after(rng: random.Random, args: list[str], results: int) -> list[Step]:
    if rng.random() < 0.7:
        return []
    names = [f"r{k}" for k in range(results)] * 2 + list(dict.fromkeys(args))
    return [
        Step(rng.choice(_AFTER).format(r=rng.choice(names)), mode=rng.choice(("", "no_grad")))
        for _ in range(rng.choice((1, 1, 2)))
    ]


@dataclass
class Filling:
    """One template being filled. Raises LookupError where the program has no operand that fits."""

    draft: Draft
    first: str = ""
    known: dict[str, str] = field(default_factory=dict)

    def fill(self, template: str) -> str:
        return re.sub(r"\{(\w+'*)\}", lambda m: self.known.get(m[1]) or self._draw(m[1]), template)

    def _draw(self, slot: str) -> str:
        rng, kind = self.draft.rng, slot.rstrip("'")
        if kind == "N":
            return self._number(3)
        if kind == "c":
            return rng.choice(_NUMBERS)
        if kind == "dt":
            value = f"torch.{rng.choice(_CASTS)}"
        elif kind == "z":
            return self._size()
        elif kind in "tfighb":
            value = self._operand(kind)
            self.first = self.first or value
        elif kind == "k":
            value = str(rng.randrange(1, 4))
        else:
            value = self._of_first(kind, self.draft.envs[0][self.first])
        self.known[slot] = value
        return value

    def _size(self) -> str:
        """A size of a tensor that the program was given."""
        given = [a for a in self.draft.args if isinstance(self.draft.envs[0].get(a), torch.Tensor)]
        sized = [(a, d) for a in given for d in range(self.draft.envs[0][a].dim())]
        if not sized:
            raise LookupError("z")
        name, dim = self.draft.rng.choice(sized)
        return self.draft.rng.choice((f"{name}.shape[{dim}]", f"{name}.size({dim})"))

    def _number(self, depth: int) -> str:
        """An expression of the program's numbers."""
        rng = self.draft.rng
        if not depth or (depth < 3 and rng.random() < 0.4):
            simple = [text for text in self.draft.numbers if "{N}" not in text]
            return self.fill(rng.choice(simple))
        text = rng.choice(self.draft.numbers)
        return self.fill(re.sub(r"\{N\}", lambda _: self._number(depth - 1), text))

    def _of_first(self, kind: str, t: torch.Tensor) -> str:
        rng = self.draft.rng
        rank = max(t.dim(), 1)
        if kind in "de":
            return str(rng.randrange(-rank, rank))
        if kind == "q":
            return f"{self.first}.shape[{self.known.get('d', 0)}]"
        if kind == "s":
            return ", ".join(rng.choice(_SLICES) for _ in range(rng.randrange(1, rank + 1)))
        # rows, rows0, rows1: positions in a dimension
        dim = kind[4:] or self.known.get("d", "0")
        ints = self.draft.names(lambda x: x.dtype in (torch.int64, torch.int32) and 0 < x.numel() < 50)
        if ints and rng.random() < 0.7:
            return f"{rng.choice(ints)}.flatten().remainder({self.first}.shape[{dim}]).long()"
        return f"torch.arange({min(t.shape[int(dim)] if t.dim() else 1, 2)})"

    def _operand(self, kind: str) -> str:
        draft = self.draft
        tests: dict[str, Callable[[torch.Tensor], bool]] = {
            "t": lambda _: True,
            "g": lambda _: True,
            "f": lambda x: x.is_floating_point(),
            "h": lambda x: x.is_floating_point(),
            "i": lambda x: not x.is_floating_point() and x.dtype != torch.bool,
            "b": lambda x: x.dtype == torch.bool,
        }
        names = draft.names(tests[kind])
        if kind in "ghb" and self.first:
            near = [n for n in names if _broadcasts(draft.envs, n, self.first)]
            names = [n for n in near if n != self.first or self.draft.rng.random() < 0.2] or near or names
        if not names:
            raise LookupError(kind)
        return draft.rng.choice(names[-3:] if draft.rng.random() < 0.5 else names)


def _broadcasts(envs: list[Env], a: str, b: str) -> bool:
    return all(
        p == q or 1 in (p, q) for env in envs for p, q in zip(env[a].shape[::-1], env[b].shape[::-1], strict=False)
    )


def _env(n: int, m: int, call: int) -> Env:
    env: Env = {**names(), "n": n, "m": m, "call": call, "FLOAT": None, "DEVICE": "cpu"}
    exec(GRID + PARTS, env)
    return env


def _run(step: Step, env: Env, mode: str) -> None:
    with getattr(torch, mode)(), getattr(torch, step.mode or mode)():
        exec(step.line(), env)


def _inside(value: torch.Tensor, env: Env, step: Step) -> bool:
    """Whether `as_strided` reads elements that something has: beside a result that was made smaller in place (a loss, the sum of what its
    kernel wrote there before) the storage holds what nobody promised.
    """
    sources = [env[name] for name in step.uses() if isinstance(env.get(name), torch.Tensor)]
    return any(
        _end(value) <= _end(base)
        for t in sources
        for base in (t, t._base)
        if base is not None and base.untyped_storage()._cdata == value.untyped_storage()._cdata
    )


def _end(t: torch.Tensor) -> int:
    """The element of the storage after the last one of `t`."""
    if not t.numel():
        return int(t.storage_offset())
    return int(t.storage_offset()) + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _tame(value: Any, elements: int) -> bool:
    """Small, finite, dense; and no number that a cast between dtypes might wrap."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, (int, float))
    if value.layout is not torch.strided or value.numel() > elements or value.dim() > 5 or value.is_complex():
        return False
    return value.numel() == 0 or bool(value.detach().double().abs().max() < _LIMIT)
