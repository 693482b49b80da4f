"""One program, compiled and run beside eager."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import opforge
from opforge.runtime.build.toolchain import find_toolchain
from opforge.runtime.render import cpp_unit as unit
from opforge.testing.noise import NoiseOfStatistics
from tests.support.matrix import symbolic

from .exact import exactly
from .judge import differences
from .observe import Direct, Sight, default_dtype, is_foretold, on_fakes, see
from .program import Functions, Program, on


@dataclass
class Outcome:
    """How a program came out.

    different  (kind, text) of each difference from eager; none is the aim.
    eager      why it was left to eager kernels as a whole, or "".
    raised     stages at which eager raises.
    kernels, externs  how many kernels were compiled, and how many operators ran by eager kernels.
    fake_strides  strides differ, as torch's fake tensors say.
    graphs, eager_graphs  how many graphs there were, and how many of them ran eagerly as a whole.
    """

    different: list[tuple[str, str]] = field(default_factory=list)
    eager: str = ""
    raised: tuple[str, ...] = ()
    kernels: int = 0
    externs: int = 0
    backward: bool = False
    fake_strides: bool = False
    graphs: int = 0
    eager_graphs: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of differences, each once."""
        return tuple(dict.fromkeys(kind for kind, _ in self.different))


@dataclass
class Prepared:
    """A compiled program that was not called yet; `call` is None where compiling it failed."""

    program: Program
    functions: Functions
    outcome: Outcome
    call: Callable[..., Any] | None = None
    fits: Callable[[tuple[int, int]], bool] = lambda _: True


def check(program: Program) -> Outcome:
    """Compile the program, call it for each of its sizes, and compare with eager. Never raises for what the program does."""
    return finish(prepare(program))


def check_all(programs: Sequence[Program]) -> list[Outcome]:
    """`check` of each, but compiled before the first is called, so that their kernels are built together. Of every second one the backward
    is compiled with the forward instead of when it first runs.
    """
    ahead = {}
    for k, program in enumerate(programs):
        if program.path == "direct":
            with opforge.config.patch({"lazy_backward": k % 2 == 1}):
                ahead[k] = prepare(program)
    return [finish(ahead[k]) if k in ahead else check(program) for k, program in enumerate(programs)]


def prepare(program: Program) -> Prepared:
    """Compile the program."""
    prepared = Prepared(program, program.functions(), Outcome())
    torch._dynamo.reset()
    with _noted(prepared.outcome), on(program.place):
        prepared.call, prepared.fits = _compile(program, prepared.functions)
    return prepared


def finish(prepared: Prepared) -> Outcome:
    """Call it and compare with eager."""
    outcome = prepared.outcome
    with _noted(outcome):
        for number, size in enumerate(prepared.program.sizes if prepared.call is not None else ()):
            if prepared.fits(size):
                _compare(prepared.program, prepared.functions, size, prepared.call, outcome, number)
            if outcome.different:
                break
    if "BuildError" in outcome.eager:
        outcome.different.append(("build error", outcome.eager))
    return outcome


@contextlib.contextmanager
def _noted(outcome: Outcome) -> Iterator[None]:
    """Exceptions are findings; what the engine counts meanwhile is noted."""
    opforge.reset_stats()
    logging.disable(logging.ERROR)  # torch's fake tensors print the errors that programs are meant to make
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a mistake of the compiler is a finding
        outcome.different.append(("internal error", f"{type(error).__name__}: {error}"))
    finally:
        logging.disable(logging.NOTSET)
    stats = opforge.stats()
    outcome.kernels += stats["kernels"]
    outcome.externs += sum(stats["externs"].values())
    left = sum(stats["fallbacks"].values())
    outcome.graphs += stats["graphs"] + left
    outcome.eager_graphs += left
    outcome.eager = outcome.eager or next(iter(stats["fallbacks"]), "")


def _compile(program: Program, functions: Functions) -> tuple[Callable[..., Any], Callable[[tuple[int, int]], bool]]:
    """The compiled program, and whether it may be called for given sizes (Dynamo compiles again where it may not)."""
    if program.path == "dynamo":
        return torch.compile(functions.program, backend="opforge", dynamic=program.dynamic_argument), lambda _: True
    arguments, _ = functions.make(*program.sizes[0])
    fits: Callable[[tuple[int, int]], bool] = lambda _: True  # noqa: E731
    if program.dynamic:
        arguments, others = symbolic(arguments)
        fits = lambda size: others(functions.make(*size)[0])  # noqa: E731
    with getattr(torch, program.mode)(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = opforge.compile_fx(Direct(functions.program), arguments)  # type: ignore[arg-type]
    return compiled, fits


def _compare(
    program: Program,
    functions: Functions,
    size: tuple[int, int],
    call: Callable[..., Any],
    outcome: Outcome,
    number: int,
) -> None:
    eager = see(program, functions, size, number=number)
    outcome.raised += tuple(eager.raised)
    outcome.backward |= any(name.startswith("gradient") for name in eager.facts)
    ours = see(program, functions, size, call, number=number)
    found = differences(
        eager,
        ours,
        lambda dtype: in_dtype(dtype, program, size, number),
        lambda seed: see(program, functions, size, around=lambda: NoiseOfStatistics(seed), number=number),
    )
    if any(kind == "strides" for kind, _ in found):
        told = see(program, functions, size, on_fakes(functions.program), only_strides=True, number=number)
        known = [f for f in found if f[0] == "strides" and is_foretold(f[1].partition(": eager ")[0], ours, told)]
        outcome.fake_strides |= bool(known)
        found = [f for f in found if f not in known]
    if found and program.path == "dynamo":
        # What Dynamo itself does to the program is not ours.
        torch._dynamo.reset()
        captured = torch.compile(functions.program, backend="eager", dynamic=program.dynamic_argument)
        for earlier in range(number):  # which Dynamo's later graphs depend on
            see(program, functions, program.sizes[earlier], captured, number=earlier)
        base = see(program, functions, size, captured, number=number)
        same = differences(eager, base, lambda dtype: in_dtype(dtype, program, size, number), lambda _: Sight())
        found = [f for f in found if f[0] not in {kind for kind, _ in same}]
    outcome.different += found


def in_dtype(dtype: str, program: Program, size: tuple[int, int], number: int = 0) -> Sight:
    """The program with every floating dtype replaced by one; float64 is evaluated in more than itself where its operators allow it."""
    if dtype == "float64":
        program = replace(program, device="cpu")  # where more exact numbers are known
    with default_dtype(dtype):
        functions = program.functions(dtype)
        if dtype != "float64":
            return see(program, functions, size, number=number)
        return exactly(lambda around: see(program, functions, size, around=around, number=number))


@contextlib.contextmanager
def quick_builds(folder: Path) -> Iterator[None]:
    """For many small programs: a low optimization level, checks on, and the prelude compiled once ahead, not in every unit. Processes may
    share `folder`: one that starts again changes no file that others read.
    """
    header = folder / "prelude.h"
    stub = folder / "include.h"
    for path, text in ((header, unit.PRELUDE.read_text()), (stub, f'#include "{header}"\n')):
        _make_once(path, lambda new, text=text: new.write_text(text))  # type: ignore[misc]
    settings = {"debug.verify": True, "opt_level": "1", "cache_dir": str(folder / "cache"), "progress": "off"}
    with opforge.config.patch(settings) as cfg:
        tools = find_toolchain(cfg)
        ahead = [*tools.command, *tools.compile_flags, "-w", "-x", "c++-header", str(header), "-o"]
        _make_once(Path(f"{header}.gch"), lambda new: subprocess.run([*ahead, str(new)], check=True))
        original, unit.PRELUDE = unit.PRELUDE, stub
        try:
            yield
        finally:
            unit.PRELUDE = original


@contextlib.contextmanager
def kernels_of(device: str, folder: Path) -> Iterator[None]:
    """On "interpreter", programs are compiled for a GPU while this lasts, and Triton's interpreter runs them. It needs `TRITON_INTERPRET=1`."""
    if device != "interpreter":
        yield
        return
    from tests.support.interpreted import interpreted  # loads Triton

    modules = folder / f"kernels.{os.getpid()}"
    modules.mkdir(exist_ok=True)
    with interpreted(modules):
        yield


def _make_once(path: Path, make: Callable[[Path], object]) -> None:
    """The file at `path`, made by `make` under another name first: nobody sees half of it."""
    if not path.exists():
        new = path.with_name(f"{path.name}.{os.getpid()}")
        make(new)
        new.replace(path)


def reason(text: str) -> str:
    """A reason without its numbers and places, for counting."""
    return re.sub(r"\d+", "N", re.sub(r" \(.*| at .*|'[^']*'", "", text))[:110]
