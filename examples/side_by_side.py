"""Shared by the examples: one model under eager, Inductor and opforge in one process, and a table of what came out."""

import ctypes
import gc
import os
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

Fn = Callable[..., Any]
console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass
class Run:
    """One system's figures. Seconds of the first call are split into Dynamo's, the backend's and the rest (one run)."""

    name: str
    call: Fn
    result: Any = None
    dynamo_s: float = 0.0
    backend_s: float = 0.0
    kernels: int | None = None
    externs: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    peak_mb: float | None = None


class Steps:
    """What is done now: moving bars on a terminal; elsewhere (a file, a pipe, CI), where those would show up only at the end, a line as each
    step begins and one as it ends.
    """

    def __init__(self) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=console) if console.is_terminal else None

    def __enter__(self) -> "Steps":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    @contextmanager
    def step(self, text: str, total: int = 1) -> Iterator[Callable[[], object]]:
        """One step of `total` parts; gives what is to be called after each part but the last. A step that raises has no end."""
        start = time.perf_counter()
        if self._bars is None:
            console.print(f"{text} …", highlight=False)  # rich flushes after each print
            yield lambda: None
            console.print(f"  done in {time.perf_counter() - start:.1f} s", highlight=False)
            return
        bars, task = self._bars, self._bars.add_task(text, total=total)
        yield lambda: bars.advance(task)
        bars.update(task, completed=total)


@contextmanager
def empty_caches() -> Iterator[Path]:
    """Both compilers start with empty caches, so that the compile times shown are cold ones; gives their folder."""
    with tempfile.TemporaryDirectory(prefix="example-cache-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        os.environ["OPFORGE_CACHE_DIR"] = f"{folder}/opforge"
        os.environ["OPFORGE_PROGRESS"] = "off"  # the comparison shows its own
        yield Path(folder)


def _own_entry(fn: Fn, label: str) -> Fn:
    """`fn` behind a code object of its own: backends on one code object would share Dynamo's cache entries."""

    def call(*args: Any) -> Any:
        return fn(*args)

    code = call.__code__.replace(co_name=f"call_{label}")
    return types.FunctionType(code, globals(), code.co_name, None, call.__closure__)


def _compiled(name: str, fn: Fn, inputs: tuple[Any, ...]) -> Run:
    """Compile `fn` under the backend `name` and run it once; whatever the backend raises is passed on."""
    backend = lookup_backend(name)
    inside = [0.0]

    def timed(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Fn:
        start = time.perf_counter()
        compiled = backend(gm, example_inputs)
        inside[0] += time.perf_counter() - start
        return compiled

    run = Run(name, torch.compile(_own_entry(fn, name), backend=timed, dynamic=False))
    start = time.perf_counter()
    run.result = run.call(*inputs)
    first = time.perf_counter() - start
    start = time.perf_counter()
    run.call(*inputs)
    once = time.perf_counter() - start
    run.backend_s, run.dynamo_s = inside[0], max(first - inside[0] - once, 0.0)
    return run


def _count(run: Run, caches: Path) -> None:
    """Kernels, extern calls and fallbacks since the process started (each backend compiles one program in it)."""
    if run.name == "inductor":
        run.kernels = _inductor_kernels(caches / "inductor")
        if calls := counters["inductor"]["extern_calls"]:
            run.externs = {"calls": calls}
    elif run.name == "opforge":
        import opforge

        stats = opforge.stats()
        run.kernels = stats["kernels"]
        run.externs, run.fallbacks = dict(stats["externs"]), dict(stats["fallbacks"])


def _inductor_kernels(folder: Path) -> int:
    """The kernels in the modules that Inductor wrote to its cache."""
    texts = (path.read_text(errors="replace") for path in folder.rglob("*.py"))
    return sum(line.count(" = async_compile.") for text in texts for line in text.splitlines())


def _resident(key: str) -> float:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith(key))


def _peak_of_one_call(run: Run, inputs: tuple[Any, ...]) -> None:
    """MB of resident memory that one call needs above the memory at rest (Linux; elsewhere left empty)."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # give freed memory back first, or its reuse would hide the need
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        rest = _resident("VmRSS:")
        run.call(*inputs)
        run.peak_mb = max(_resident("VmHWM:") - rest, 0.0)
    except (OSError, AttributeError):
        run.peak_mb = None


def _time(runs: Mapping[str, Run], inputs: tuple[Any, ...], rounds: int, advance: Callable[[], object]) -> None:
    """One sample of each run per round, in rotating order."""
    names = list(runs)
    for r in range(rounds):
        shift = r % len(names)
        for name in names[shift:] + names[:shift]:
            runs[name].call(*inputs)
            start = time.perf_counter()
            runs[name].call(*inputs)
            runs[name].samples.append(time.perf_counter() - start)
        advance()


def compare(
    fn: Fn, inputs: tuple[Any, ...], rounds: int = 15, names: Sequence[str] = ("inductor", "opforge")
) -> dict[str, Run]:
    """Run `fn` under eager, Inductor and opforge with progress shown; Inductor is left out, with a word, if unusable.

    Raises what opforge raises: it is the subject here.
    """
    runs = {"eager": Run("eager", fn)}
    with torch.no_grad(), empty_caches() as caches, Steps() as steps:
        runs["eager"].result = fn(*inputs)
        with steps.step("Dynamo's first trace in this process"):
            torch.compile(_own_entry(fn, "nothing"), backend=lambda gm, _: gm.forward, dynamic=False)(*inputs)
        for name in names:
            with steps.step(f"compiling with {name}, cold"):
                try:
                    run = _compiled(name, fn, inputs)
                except Exception as error:
                    if name != "inductor":
                        raise
                    why = (str(error).strip() or "no message").splitlines()[0]
                    console.print(
                        f"[yellow]Inductor is unavailable here and left out:[/] {type(error).__name__}: {why}"
                    )
                    continue
                _count(run, caches)
                runs[name] = run
        with steps.step("timing, interleaved", rounds) as advance:
            _time(runs, inputs, rounds, advance)
        for run in runs.values():
            _peak_of_one_call(run, inputs)
    return runs


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{why} {n}" for why, n in counts.items()) or "none"


def _named(counts: Mapping[str, int]) -> str:
    merged: Counter[str] = Counter()
    for name, n in counts.items():
        merged[name.split(": ")[0].removeprefix("aten.")] += n  # "operator: reason" is shown by operator
    return ", ".join(f"{name} {n}" for name, n in merged.items()) or "none"


def table(title: str, runs: Mapping[str, Run], difference: Callable[[Any, Any], float], unit: str) -> Table:
    """Latency, compile seconds, kernels, externs, memory; `difference(result, eager's)` is shown in `unit`."""
    out = Table(title=title, title_justify="left")
    out.add_column("")
    for name in runs:
        out.add_column(name, justify="right", overflow="fold")
    eager = runs["eager"]
    out.caption_justify = "left"
    out.caption = (
        "Kernels are the loops that the backend wrote; library calls are eager kernels that it calls (products, attention); "
        "the memory is that above the process at rest."
    )
    if any(max(r.samples) > 2 * min(r.samples) for r in runs.values()):
        out.caption += (
            "\nOne system's samples differ by more than a factor of 2: the machine was busy, the times mean little."
        )

    def row(label: str, cell: Callable[[Run], str]) -> None:
        out.add_row(label, *[cell(r) for r in runs.values()])

    row("latency, median ms", lambda r: f"{statistics.median(r.samples) * 1e3:.2f}")
    row("fastest and slowest, ms", lambda r: f"{min(r.samples) * 1e3:.2f} – {max(r.samples) * 1e3:.2f}")
    row(
        "speed against eager, by the medians",
        lambda r: f"{statistics.median(eager.samples) / statistics.median(r.samples):.2f}",
    )
    row("first call, cold: Dynamo, s", lambda r: "–" if r is eager else f"{r.dynamo_s:.2f}")
    row("first call, cold: the backend, s", lambda r: "–" if r is eager else f"{r.backend_s:.2f}")
    row("first call, cold: both, s", lambda r: "–" if r is eager else f"{r.dynamo_s + r.backend_s:.2f}")
    row("kernels", lambda r: "–" if r.kernels is None else str(r.kernels))
    row("library calls (externs)", lambda r: "–" if r is eager else _named(r.externs))
    row("fallbacks", lambda r: _reasons(r.fallbacks) if r.name == "opforge" else "–")
    row("peak memory of a call, MB", lambda r: "–" if r.peak_mb is None else f"{r.peak_mb:.1f}")
    row(f"largest difference, {unit}", lambda r: "–" if r is eager else f"{difference(r.result, eager.result):.1e}")
    return out


def find_kernel(word: str) -> str:
    """The C++ text of the first kernel, in the graphs compiled last, whose function is named after `word`.

    Raises LookupError where there is none.
    """
    import opforge

    graphs = opforge.stats()["graphs"]
    for n in range(1, graphs + 1):
        for block in opforge.last_artifacts(n).cpp.split("\n}\n"):
            lines = block.strip("\n").split("\n")
            heads = [i for i, line in enumerate(lines) if word in line and "(" in line and not line.startswith(" ")]
            if heads:
                start = heads[0]
                while start > 0 and lines[start - 1].strip():  # the comment above the function belongs to it
                    start -= 1
                return "\n".join(lines[start:]) + "\n}"
    raise LookupError(f"no kernel is named after {word!r}")


def command_line(main: Callable[..., None]) -> None:
    """Run an example's `main` with its arguments from the command line."""
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.command()(main)
    app()


def quiet() -> None:
    """Two threads, as in the benchmarks, and no warnings of third parties between the progress lines."""
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    warnings.filterwarnings("ignore", category=FutureWarning)
