"""The cells of the matrix of mutations and aliases: their programs, and each against eager."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from opforge.errors import UnsupportedError
from opforge.runtime.aot.compilers import make_boxed_func
from opforge.runtime.backward.function import bind_function
from opforge.runtime.backward.variants import Variants
from opforge.runtime.dispatch.autograd.needs_grad import wants_grad
from opforge.runtime.dispatch.trace import Traced, trace
from opforge.runtime.dispatch.wrapper.source import bind
from opforge.runtime.torch_compat import FakeTensorMode
from opforge.runtime.training import split

from .observe import Sight, World, differences, see

Axes = Mapping[str, Mapping[str, Mapping[str, Any]]]
Cell = Mapping[str, str]
Note = Callable[[str, object], None]
SIZES = {"static": [(4, 6)], "dynamic": [(4, 6), (5, 8)]}
MODES: dict[str, Callable[[], Any]] = {
    "": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def program_text(axes: Axes, cell: Cell) -> str:
    """Source of `program(x, y)`."""
    mutation, output, history = (axes[a][cell[a]] for a in ("mutation", "output", "history"))
    lines = [
        *output.get("before", ()),
        *mutation.get("code", ()),
        *output.get("after", ()),
        f"return {output['result']}",
    ]
    if "block" in history:
        lines = [f"with {history['block']}:", *(f"    {line}" for line in lines)]
    return "def program(x, y):\n" + "".join(f"    {line}\n" for line in lines)


def matrix_program(axes: Axes, cell: Cell) -> Callable[..., Any]:
    """The cell's program."""
    return _function(program_text(axes, cell), "program")


def make_text(axes: Axes, cell: Cell) -> str:
    """Source of `make(n, m)`, which gives `x` and `y` and reads `leaf`, `parameter` and `keep`."""
    history = axes["history"][cell["history"]]
    lines = [
        "a = torch.arange(1.0, n * m + 1).view(n, m) / 4",
        "b = torch.arange(2.0, n * m + 2).view(n, m) / 8",
        *history.get("owner", ()),
        *axes["inputs"][cell["inputs"]]["inputs"],
        *history.get("arguments", ()),
        "return x, y",
    ]
    return "def make(n, m):\n" + "".join(f"    {line}\n" for line in lines)


@functools.lru_cache(maxsize=4096)
def _function(source: str, name: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(source, "<matrix>", "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return function


def maker(axes: Axes, cell: Cell, size: tuple[int, int]) -> Callable[[], World]:
    """Makes the arguments of a cell anew."""
    make = _function(make_text(axes, cell), "make")

    def world() -> World:
        out = World([])

        def leaf(t: torch.Tensor) -> torch.Tensor:
            if t.is_floating_point():
                t = t.detach().requires_grad_()
                out.leaves.append(t)
            return t

        def parameter(t: torch.Tensor) -> torch.Tensor:
            if t.is_floating_point():
                t = torch.nn.Parameter(t.detach())
                out.leaves.append(t)
            return t

        def keep(t: torch.Tensor) -> torch.Tensor:
            out.held.append(t)
            return t

        make.__globals__.update(leaf=leaf, parameter=parameter, keep=keep)
        out.arguments = list(make(*size))
        return out

    return world


@dataclass(frozen=True)
class Outcome:
    """How a cell came out: `eager` says why its program was left to eager, `refused` that eager itself raises; `different` are the
    differences (none is the aim).
    """

    eager: str = ""
    refused: bool = False
    different: tuple[str, ...] = ()


def run_cell(axes: Axes, cell: Cell) -> Outcome:
    """Trace the cell's program, interpret its graphs in their wrapper, and compare with eager in all that a caller can see."""
    program = _function(program_text(axes, cell), "program")
    history = axes["history"][cell["history"]]
    mode = MODES[history.get("call", "")]
    sizes = SIZES[cell["shape"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = maker(axes, cell, sizes[0])

        def moded(f: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                with mode():
                    return f(*args)

            return call

        text = program_text(axes, cell)
        grad = "enable_grad" in text or ("requires_grad_" in text and mode is torch.enable_grad)
        try:
            arguments = make().arguments
            with mode():
                run, fits = compiled(program, arguments, cell["shape"] == "dynamic", grad)
        except UnsupportedError as error:
            sight, _ = see(moded(program), maker(axes, cell, sizes[0]), None)
            return Outcome(str(error).splitlines()[0], bool(sight.raised))
        found: list[str] = []
        refused = False
        for size in sizes:
            make = maker(axes, cell, size)
            if not fits(make().arguments):
                continue
            follows: list[int | None] = [None]
            for follow in follows:
                expected, count = see(moded(program), make, follow)
                actual, _ = see(moded(run), make, follow)
                found += differences(expected, actual, functools.partial(_exact, moded(program), make, follow))
                refused |= bool(expected.raised)
                if follow is None and not found and not refused:
                    follows += range(min(count, 4))
    return Outcome(refused=refused, different=tuple(dict.fromkeys(found)))


def run_whole(axes: Axes, cell: Cell) -> list[str]:
    """The cell's program through `torch.compile(backend="opforge")`, Dynamo and native kernels included: what differs from eager."""
    program = _function(program_text(axes, cell), "program")
    history = axes["history"][cell["history"]]
    mode = MODES[history.get("call", "")]
    found: list[str] = []
    torch.compiler.reset()
    run = torch.compile(program, backend="opforge", dynamic=cell["shape"] == "dynamic")

    def moded(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with mode():
                return f(*args)

        return call

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in SIZES[cell["shape"]]:
            make = maker(axes, cell, size)
            _, count = see(moded(program), make, None)
            for follow in [None, *range(min(count, 2))]:
                expected, _ = see(moded(program), make, follow)
                actual, _ = see(moded(run), make, follow)
                if (
                    actual.raised == "TorchRuntimeError"
                ):  # Dynamo's own, a RuntimeError: it met eager's before it asked for a backend
                    actual.raised = "RuntimeError"
                exact = functools.partial(_exact, moded(program), make, follow)
                found += differences(expected, actual, exact, kernels=True)
    return found


def _exact(program: Callable[..., Any], make: Callable[[], World], follow: int | None) -> Sight:
    torch.set_default_dtype(torch.float64)
    try:
        return see(program, make, follow)[0]
    finally:
        torch.set_default_dtype(torch.float32)


def compiled(
    program: Callable[..., Any], arguments: Sequence[Any], dynamic: bool, grad: bool
) -> tuple[Callable[..., Any], Callable[..., bool]]:
    """The program through dispatch, its graphs interpreted; and whether it may be called with other arguments, as guards would tell.
    Raises `UnsupportedError`.
    """
    given = list(arguments)
    fits: Callable[..., bool] = lambda _: True  # noqa: E731
    if dynamic:
        given, fits = symbolic(arguments)
    traced = trace(program, given, training=grad or wants_grad(program, given))
    return bind(traced, interpreted(traced)), fits


def interpreted(traced: Traced) -> Callable[..., Any]:
    """The functional graph, or the autograd function of the two halves of the joint graph."""
    if traced.gradients is None:
        return _like_compiled(traced.graph)
    parts = split(traced)
    spec = replace(parts.backward, into={})
    variants = Variants(spec, lambda graph, _: make_boxed_func(_like_compiled(graph)))
    return bind_function(spec, _like_compiled(parts.forward), variants)


def _like_compiled(graph: Callable[..., Any]) -> Callable[..., Any]:
    """As compiled code does it: below autograd, and every result has memory of its own."""

    def run(*args: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            out = list(graph(*args))
            seen = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
            for k, t in enumerate(out):
                if isinstance(t, torch.Tensor):
                    if t.untyped_storage()._cdata in seen:
                        t = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)
                    seen.add(t.untyped_storage()._cdata)
                    out[k] = t.data if t._is_view() else t
        return tuple(out)

    return run


def symbolic(arguments: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], bool]]:
    """Fake arguments of unknown sizes, and a check of other arguments against what the trace has assumed of them meanwhile."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fakes = [
        mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * t.dim()))
        for t in arguments
    ]
    places = [
        (k, d, size.node.expr)
        for k, t in enumerate(fakes)
        for d, size in enumerate(_numbers(t))
        if isinstance(size, torch.SymInt)
    ]

    def fits(others: Sequence[Any]) -> bool:
        known: dict[Any, int] = {}
        values = [(expr, _numbers(others[k])[d]) for k, d, expr in places]
        for expr, value in values:
            if expr.is_Symbol and known.setdefault(expr, value) != value:
                return False
        if any(expr.subs(known) != value for expr, value in values):
            return False
        if any(found.subs(known) != known[s] for s, found in env.replacements.items() if s in known):
            return False
        # Other symbols are sizes of tensors that an argument is a view of, asked for by checks of their storages.
        return all(bool(g.expr.subs(known)) for g in env.guards if g.expr.free_symbols <= set(known))

    return fakes, fits


def _numbers(t: Any) -> tuple[Any, ...]:
    """Sizes, strides and offset of a tensor: equal ones of the example inputs may be one symbol."""
    return (*t.shape, *t.stride(), t.storage_offset())


def runnable(axes: Axes, cell: Cell) -> str:
    """A file that shows the cell."""
    history = axes["history"][cell["history"]]
    mode = history.get("call", "enable_grad")
    return (
        f"# {', '.join(f'{k}={v}' for k, v in cell.items())}\n"
        "import torch, opforge\n\n"
        "leaf = lambda t: t.detach().requires_grad_() if t.is_floating_point() else t\n"
        "parameter = lambda t: torch.nn.Parameter(t.detach()) if t.is_floating_point() else t\n"
        "keep = lambda t: t\n\n\n"
        f"{program_text(axes, cell)}\n\n{make_text(axes, cell)}\n\n"
        f'compiled = torch.compile(program, backend="opforge", dynamic={cell["shape"] == "dynamic"})\n'
        f"for run in (program, compiled):\n    x, y = make(4, 6)\n    with torch.{mode}():\n        print(run(x, y), x, y)\n"
    )


@dataclass(frozen=True)
class Matrix:
    """The cells of a spec: those of its planes, once each, without those that an `impossible` condition names."""

    axes: Axes
    planes: Sequence[Mapping[str, Sequence[str]]]
    impossible: Sequence[Callable[..., bool]]

    def cells(self, **members: str) -> Iterator[Cell]:
        """All cells, or those that have these `members` of axes."""
        seen: set[tuple[str, ...]] = set()
        for plane in self.planes:
            choices = [
                [m for m in plane.get(axis, tuple(self.axes[axis])) if members.get(axis, m) == m] for axis in self.axes
            ]
            for found in itertools.product(*choices):
                cell = dict(zip(self.axes, found, strict=True))
                if found not in seen and not any(c(**cell) for c in self.impossible):
                    seen.add(found)
                    yield cell


def whole_cells(matrix: Matrix, count: int) -> Iterator[Cell]:
    """`count` cells, fixed, at least one of every mutation."""
    rows = [list(matrix.cells(mutation=m)) for m in matrix.axes["mutation"]]
    chosen = [random.Random(str(k)).sample(row, -(-count // len(rows))) for k, row in enumerate(rows)]
    yield from itertools.islice((cell for members in zip(*chosen, strict=True) for cell in members), count)


def check_whole(matrix: Matrix, cell: Cell) -> None:
    """Fail when the whole path differs from eager, with a file that shows it."""
    logging.disable(logging.ERROR)
    try:
        found = run_whole(matrix.axes, cell)
    finally:
        logging.disable(logging.NOTSET)
    if found:
        lines = "\n".join(line[:300] for line in found[:5])
        pytest.fail(f"differs from eager:\n{lines}\n\n{runnable(matrix.axes, cell)}", pytrace=False)


def check_row(matrix: Matrix, mutation: str, note: Note, sample: int | None = None) -> None:
    """Run the cells of one mutation, or a fixed sample of them; fail with every cell that differs, and a file that shows the first. The
    counts go to `note`, and with it into pytest's summary.
    """
    cells = list(matrix.cells(mutation=mutation))
    if sample is not None and len(cells) > sample:
        cells = random.Random(mutation).sample(cells, sample)
    counts, reasons, different = Counter(), Counter(), []
    logging.disable(logging.ERROR)  # torch's fake tensors print the errors that programs are meant to make
    try:
        for cell in cells:
            outcome = run_cell(matrix.axes, cell)
            counts[
                "differing"
                if outcome.different
                else "refused as by eager"
                if outcome.refused
                else "left to eager"
                if outcome.eager
                else "compiled and equal"
            ] += 1
            if outcome.different:
                different.append((cell, outcome.different))
            elif outcome.eager and not outcome.refused:
                reasons[re.sub(r"\d+", "N", outcome.eager)[:120]] += 1
    finally:
        logging.disable(logging.NOTSET)
    note("matrix", dict(counts))
    print(f"{mutation}: {len(cells)} cells: {dict(counts)}")
    for reason, count in reasons.most_common():
        print(f"  {count} left to eager: {reason}")
    if different:
        lines = [
            f"{', '.join(f'{k}={v}' for k, v in cell.items())}\n    " + "\n    ".join(d[:300] for d in found[:3])
            for cell, found in different
        ]
        text = "\n".join(lines[:20])
        pytest.fail(
            f"{len(different)} of {len(cells)} cells differ from eager:\n{text}\n\n{runnable(matrix.axes, different[0][0])}",
            pytrace=False,
        )
