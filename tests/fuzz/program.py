"""A random program as data: its inputs, steps and results are lines of Python, which can be dropped one by one and printed as a file."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

NAME = re.compile(r"\b[pxvrkw]\d+\b")
_FLOATS = re.compile(r"torch\.(float64|float32|float16|bfloat16)\b")

GRID = '''\
def grid(shape, dtype, seed, step=8.0):
    """Fixed numbers: multiples of 1/step between -3 and 3, integers between -4 and 4, or booleans."""
    g = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return (torch.rand(shape, generator=g, device="cpu") > 0.5).to(DEVICE)
    if dtype[0] in "iu":
        return torch.randint(0 if dtype[0] == "u" else -4, 5, shape, generator=g, device="cpu").to(DEVICE, getattr(torch, dtype))
    bound = int(3 * step)
    t = torch.randint(-bound, bound + 1, shape, generator=g, device="cpu").double() / step
    t = t.to(DEVICE, getattr(torch, dtype))
    return t.to(FLOAT) if FLOAT else t
'''

PARTS = '''\
class State:
    """Python attributes that the caller sets before each call."""


def fill(module, seed):
    """The module with fixed numbers as its parameters."""
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.copy_(grid(tuple(p.shape), "float64", seed + k) / 4)
    return module.to(DEVICE, FLOAT)


state = State()
'''
"""What programs of ordinary families know besides."""


@dataclass(frozen=True)
class Step:
    """One line: `outs = text`, or only `text` where it has an effect; inside `with torch.<mode>():` where `mode` is set."""

    text: str
    outs: tuple[str, ...] = ()
    mode: str = ""

    def line(self) -> str:
        """Its source."""
        return f"{', '.join(self.outs)} = {self.text}" if self.outs else self.text

    def uses(self) -> set[str]:
        """Names that it reads."""
        return set(NAME.findall(self.text))


@dataclass(frozen=True)
class Program:
    """What `generate` makes and `shrink` makes smaller.

    inputs   make tensors, also some that are no arguments but what arguments are views of; `leaves` require grad.
    args     names of the arguments, in order; a name may stand twice.
    steps    the program itself; `results` is what it returns.
    after    what the caller does between the call and the backward; it knows arguments and results (`r0`, `r1`, …).
    sizes    (n, m) of each call; two for dynamic shapes.
    path     "direct" (compile_fx of the callable) or "dynamo" (torch.compile).
    mode     the grad mode of the call: "enable_grad", "no_grad", "inference_mode".
    family   which generator made it (`families.py`); the seed is one of that family.
    before   set attributes of `state` before each call, by its number `call`; the program may read and write them.
    dynamo_shapes  the argument `dynamic` of torch.compile, where it is not told by `sizes`.
    device   where it runs: "cpu", "cuda", or by a GPU's kernels on the processor: "interpreter".
    """

    seed: int
    inputs: tuple[Step, ...]
    leaves: tuple[str, ...]
    args: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    after: tuple[Step, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ((4, 6),)
    path: str = "direct"
    mode: str = "enable_grad"
    family: str = "aliasing"
    before: tuple[Step, ...] = ()
    dynamo_shapes: str = "by sizes"
    device: str = "cpu"

    @property
    def place(self) -> str:
        """The device of its tensors, for torch."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def dynamic(self) -> bool:
        """Whether sizes change between calls."""
        return len(set(self.sizes)) > 1

    @property
    def dynamic_argument(self) -> bool | None:
        """The argument `dynamic` of torch.compile."""
        return {"by sizes": self.dynamic, "automatic": None, "dynamic": True, "static": False}[self.dynamo_shapes]

    @property
    def name(self) -> str:
        """Family and seed, which make the program again."""
        return f"{self.family}:{self.seed}"

    @property
    def options(self) -> str:
        """The options of `python -m tests.fuzz` that make the program again."""
        family = f"--family {self.family} " if self.ordinary else ""
        device = f"--device {self.device} " if self.device != "cpu" else ""
        return f"{family}{device}--seed {self.seed}"

    def valid(self) -> bool:
        """Whether every name is defined before it is used."""
        known: set[str] = set()
        for step in self.inputs:
            if step.uses() - known:
                return False
            known |= set(step.outs)
        if {*self.args, *self.leaves} - known or not self.args:
            return False
        known = set(self.args)
        for step in self.steps:
            if step.uses() - known:
                return False
            known |= set(step.outs)
        outside = set(self.args) | {f"r{k}" for k in range(len(self.results))}
        return not set(self.results) - known and all(step.uses() <= outside for step in self.after)

    def source(self, dtype: str = "") -> str:
        """The functions `make(n, m)`, `before(call)`, `program(*args)` and `steps_after(*args, *results)`; with every floating dtype replaced
        by `dtype`.
        """
        made = [*blocks(self.inputs), f"return [{', '.join(self.args)}], [{', '.join(self.leaves)}]"]
        arguments = list(dict.fromkeys(self.args))
        given = [a if a not in self.args[:k] else f"_{k}" for k, a in enumerate(self.args)]
        body = [
            *blocks(self.steps),
            f"return {''.join(f'{r}, ' for r in self.results)}" if self.results else "return ()",
        ]
        seen = [*arguments, *(f"r{k}" for k in range(len(self.results)))]
        text = (
            f"def make(n, m):\n{_indent(made)}\n\n"
            f"{self._before()}"
            f"def program({', '.join(given)}):\n{_indent(body)}\n\n"
            f"def steps_after({', '.join(seen)}):\n{_indent([_later(s) for s in self.after] or ['yield from ()'])}"
        )
        return _FLOATS.sub(f"torch.{dtype}", text) if dtype else text

    def functions(self, dtype: str = "") -> Functions:
        """The program's functions, compiled from its source."""
        namespace = {**names(), "FLOAT": getattr(torch, dtype or "_", None), "DEVICE": self.place}
        text = GRID + (PARTS if self.ordinary else "") + self.source(dtype)
        exec(compile(text, f"<fuzz {self.name}>", "exec"), namespace)
        return Functions(
            namespace["make"],
            namespace["program"],
            namespace["steps_after"],
            namespace.get("before", lambda call: None),
            namespace.get("state"),
        )

    @property
    def ordinary(self) -> bool:
        """Whether it is what people write, not a hostile mixture of aliases and writes."""
        return self.family != "aliasing"

    def _before(self) -> str:
        return f"def before(call):\n{_indent(blocks(self.before))}\n\n" if self.before else ""


@dataclass(frozen=True)
class Functions:
    """A program ready to run."""

    make: Callable[[int, int], tuple[list[torch.Tensor], list[torch.Tensor]]]
    program: Callable[..., tuple[Any, ...]]
    after: Callable[..., Iterable[Callable[[], Any]]] = field(repr=False)
    before: Callable[[int], None] = lambda call: None
    state: Any = None


def on(device: str) -> contextlib.AbstractContextManager[object]:
    """Where new tensors are made meanwhile; the processor's needs no mode."""
    return contextlib.nullcontext() if device == "cpu" else torch.device(device)


def names() -> dict[str, Any]:
    """The modules that every program knows by name."""
    return {"torch": torch, "F": torch.nn.functional, "nn": torch.nn, "math": math}


def blocks(steps: Sequence[Step]) -> list[str]:
    """The lines of steps, those of one mode in a row under one `with`."""
    lines: list[str] = []
    mode = ""
    for step in steps:
        if step.mode != mode and step.mode:
            lines.append(f"with torch.{step.mode}():")
        mode = step.mode
        lines.append(f"    {step.line()}" if mode else step.line())
    return lines


def runnable(program: Program, found: Sequence[str]) -> str:
    """A file that shows the program, eager and compiled."""
    comments = "".join(f"#   {line[:300]}\n" for line in found)
    run = (
        f'compiled = torch.compile(program, backend="opforge", dynamic={program.dynamic_argument})'
        if program.path == "dynamo"
        else "class Direct(torch.nn.Module):\n    def forward(self, *args):\n        return program(*args)\n\n\n"
        "compiled = None"
    )
    given = "symbolic(args)[0]" if program.dynamic else "args"
    imports = "from tests.support.matrix import symbolic\n" if program.dynamic and program.path == "direct" else ""
    if program.family == "raw":
        imports += "import tests.fuzz.raw\n"
    set_state = "        before(call)\n" if program.before else ""
    parts = f"\n\n{PARTS}" if program.ordinary else ""
    return (
        f"# Reproduce: python -m tests.fuzz {program.options}\n{comments}"
        f"# path {program.path}, sizes {program.sizes}, called under {program.mode}\n"
        f"import math\n\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\nimport opforge\n{imports}\n"
        f'opforge.config.configure({{"debug.verify": True}})\nFLOAT, DEVICE = None, "{program.place}"\n'
        f"{'' if program.place == 'cpu' else 'torch.set_default_device(DEVICE)'}\n\n\n{GRID}{parts}\n\n{program.source()}\n\n"
        f"{run}\nfor call, (n, m) in enumerate({list(program.sizes)}):\n"
        "    for name in ('eager', 'opforge'):\n"
        f"        args, leaves = make(n, m)\n{set_state}"
        "        modules = [a for a in args if isinstance(a, nn.Module)]\n"
        "        leaves = [*leaves, *(p for module in modules for p in module.parameters())]\n"
        f"        run = program if name == 'eager' else compiled or opforge.compile_fx(Direct(), {given})\n"
        "        try:\n"
        f"            with torch.{program.mode}():\n                results = run(*args)\n"
        "            for step in steps_after(*dict.fromkeys(args), *results):\n                step()\n"
        "            wanted = [t for t in dict.fromkeys([*results, *args]) if isinstance(t, torch.Tensor) and t.requires_grad]\n"
        "            grads = torch.autograd.grad(wanted, leaves, [torch.ones_like(t) for t in wanted], allow_unused=True)"
        " if wanted and leaves else ()\n"
        "            print(name, 'results', results, 'arguments', args, 'gradients', grads, sep='\\n')\n"
        "        except Exception as error:\n            print(name, 'raises', type(error).__name__, error)\n"
    )


def _later(step: Step) -> str:
    return f"yield torch.{step.mode}()(lambda: {step.text})" if step.mode else f"yield lambda: {step.text}"


def _indent(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
