"""Times models, training steps and small programs on a GPU under eager, Inductor and opforge, with and without CUDA graphs, interleaved.

    python benchmarks/gpu_models.py                           everything
    python benchmarks/gpu_models.py --only llama,adamw        the programs whose name contains one of these
    python benchmarks/gpu_models.py --device cpu --tiny       tries the script where there is no GPU; its numbers mean nothing

A step is a call, forward and backward without an optimizer, or the call of one (programs/gpu_models.py says which). Backends start with empty
caches, in rotating order. A float64 run judges results after some replays (`--resume` goes on behind a program that ended the process).
"""

import copy
import functools
import gc
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import gpu_models_report
from compared import chosen
from train import curve_error

import backends
import measure
import report
from programs.base import to_float64
from programs.gpu_models import PROGRAMS, GpuProgram

console = Console(stderr=True)
HERE = Path(__file__).parent
WARM = 3  # calls after the first: kernels are tuned and graphs are recorded in them
CURVE = 5
RATE = 0.01  # of gradient descent
MODES = {
    "inductor": None,
    "inductor-reduce": "reduce-overhead",
    "inductor-max": "max-autotune",
    "opforge": None,
    "opforge-reduce": "reduce-overhead",
    "opforge-max": "max-autotune",
}
Step = Callable[[], Any]


class Autocast(nn.Module):
    """A loss module under autocast to bfloat16."""

    def __init__(self, loss: nn.Module, device: str) -> None:
        super().__init__()
        self.loss, self.device = loss, device

    def forward(self, *batch: Any) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return self.loss(*batch)


@dataclass
class Running:
    """One program under one backend: `step` is what is timed, `checked` does one and gives the tensors to compare, `curve` the losses of steps
    that change the parameters.
    """

    step: Step
    checked: Step
    curve: Callable[[], list[float]] | None = None


def prepare(p: GpuProgram, device: torch.device, tiny: bool, compiled: Callable[..., Any], double: bool) -> Running:
    """The program with weights and inputs of its own; `compiled` wraps what is compiled. `double`: all of it in float64."""
    torch.manual_seed(0)
    fn, inputs = p.make(device, tiny)
    if p.kind == "optimizer":
        return prepare_optimizer(fn, compiled, double)  # type: ignore[arg-type]
    if isinstance(fn, nn.Module):
        fn = fn.train(p.kind == "train")
    if double:
        fn, inputs = to_float64(fn, inputs)
    if p.kind == "inference":
        call = functools.partial(compiled(fn), *inputs)
        return Running(call, call)
    assert isinstance(fn, nn.Module)
    model = fn if double else Autocast(fn, device.type)
    loss, parameters = compiled(model), list(fn.parameters())

    def forget() -> None:
        for q in parameters:
            q.grad = None

    def step() -> None:
        loss(*inputs).backward()
        forget()

    def checked() -> list[Tensor]:
        value = loss(*inputs)
        value.backward()
        buffers = [b.clone() for b in fn.buffers() if b.is_floating_point()]
        grads = [q.grad.clone() for q in parameters if q.grad is not None]
        forget()
        return [value.detach().clone(), *grads, *buffers]

    def curve() -> list[float]:
        losses = []
        for _ in range(CURVE):
            value = loss(*inputs)
            value.backward()
            with torch.no_grad():
                some = [(q, q.grad) for q in parameters if q.grad is not None]
                torch._foreach_add_([q for q, _ in some], [g for _, g in some], alpha=-RATE)
                del some
            forget()
            losses.append(float(value.detach()))
            del value
        return losses

    return Running(step, checked, curve)


def prepare_optimizer(optimizer: torch.optim.Optimizer, compiled: Callable[..., Any], double: bool) -> Running:
    parameters = [q for g in optimizer.param_groups for q in g["params"]]
    if double:
        for q in parameters:
            grad = q.grad.double()
            q.grad = None
            q.data = q.data.double()
            q.grad = grad
    step = compiled(optimizer.step)

    def checked() -> list[Tensor]:
        step()
        return [q.detach().clone() for q in parameters]

    return Running(step, checked)


class Skips(logging.Handler):
    """What Inductor says of CUDA graphs that it does not make."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def listen(self) -> list[logging.Logger]:
        """To the loggers that say it; which one does depends on the version of torch."""
        loggers = [logging.getLogger(f"torch._inductor.cudagraph_utils.__{n}") for n in ("cudagraphs", "perf_hints")]
        for logger in loggers:
            logger.setLevel(logging.WARNING)
            logger.addHandler(self)
        return loggers

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "cudagraph" in text.lower():
            self.found.append(text.strip().splitlines()[0][:200])


@contextmanager
def fresh_caches(name: str) -> Iterator[str]:
    """Empty caches of Inductor, Triton and opforge, on disk and in this process."""
    with tempfile.TemporaryDirectory(prefix="bench-cache-", ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
        if name.startswith("inductor"):
            from torch._inductor.utils import clear_caches

            clear_caches()
        yield folder


class Compiler:
    """Compiles for one column; adds up the seconds inside of the backend, and those of what it compiles later (a backward): Inductor's are those
    of a graph's code, opforge's those of its stages.
    """

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.inside, self.staged, self.active = name, 0.0, 0.0, False
        mode = MODES[name]
        if name.startswith("inductor"):
            from torch._inductor import list_mode_options
            from torch._inductor.compile_fx import compile_fx, compile_fx_inner

            @functools.wraps(compile_fx_inner)
            def inner(*args: Any, **kwargs: Any) -> Any:
                start, late = time.perf_counter(), not self.active
                try:
                    return compile_fx_inner(*args, **kwargs)
                finally:
                    self.inside += (time.perf_counter() - start) * late

            patches = dict(list_mode_options(mode)) if mode else None
            self.call: Callable[..., Any] = functools.partial(compile_fx, inner_compile=inner, config_patches=patches)
        else:
            import opforge

            options = {"cache_dir": f"{folder}/opforge"}
            self.call = functools.partial(opforge.backend, options=options, mode=mode)

    def backend(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        start, staged, self.active = time.perf_counter(), self.stages(), True
        try:
            return self.call(gm, example_inputs)
        finally:
            self.active = False
            self.inside += time.perf_counter() - start
            self.staged += self.stages() - staged

    def stages(self) -> float:
        if self.name.startswith("inductor"):
            return 0.0
        import opforge

        return sum(opforge.stats()["seconds"].values())

    def seconds(self) -> float:
        """Inside of the backend, and in a backward that was compiled when it first ran."""
        return self.inside + self.stages() - self.staged

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        label = self.name.replace("-", "_")
        run = torch.compile(backends.own_entry(fn, label), backend=self.backend, dynamic=False)
        if MODES[self.name] is None or not self.name.startswith("inductor"):
            return run

        def marked(*args: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return run(*args)

        return marked


def counted(name: str, before: dict[str, Any], skips: Skips) -> dict[str, Any]:
    """What the backend has compiled since `before`, and what it left to eager or out of CUDA graphs."""
    if name.startswith("opforge"):
        import opforge

        stats = opforge.stats()
        found = {
            k: stats.get(k)
            for k in ("graphs", "kernels", "externs", "fallbacks", "unrecorded", "retries", "recordings")
        }
        return found | {"reasons": dict(list(stats["reasons"].items())[:12])}
    from torch._dynamo.utils import counters

    now = backends.counts("inductor") | {"cudagraph_skips": counters["inductor"]["cudagraph_skips"]}
    return {k: v - before.get(k, 0) for k, v in now.items()} | {"skip_reasons": sorted(set(skips.found))[:6]}


def why(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:3])}"[:400].replace("|", "/")


class Bench:
    """The columns and where they run."""

    def __init__(self, names: list[str], device: torch.device, tiny: bool, rounds: int) -> None:
        self.names, self.device, self.tiny, self.rounds = names, device, tiny, rounds
        self.cuda = device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def wall_us(self, step: Step, calls: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        self.wait()
        return (time.perf_counter() - start) * 1e6 / calls

    def held(self) -> tuple[int, int]:
        """Bytes allocated and reserved."""
        gc.collect()
        if not self.cuda:
            return 0, 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def peak(self, step: Step) -> int:
        """Bytes that a step allocates at most beyond those that were allocated before it."""
        if not self.cuda:
            return 0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def one(self, p: GpuProgram, name: str, row: dict[str, Any], truth: dict[str, Any]) -> Step:
        """Compile, check and weigh one column; what is left is its step. `truth` has the float64 results, and eager's errors."""
        skips, before = Skips(), {}
        listening = skips.listen() if name.startswith("inductor") else []
        try:
            with fresh_caches(name) as folder:
                compiler = None if name == "eager" else Compiler(name, folder)
                if name.startswith("opforge"):
                    import opforge

                    opforge.reset_stats()
                elif name != "eager":
                    before = counted(name, {}, skips)
                    before.pop("skip_reasons")
                running = prepare(p, self.device, self.tiny, compiler or (lambda fn: fn), double=False)
                start_bytes = self.held()
                start = time.perf_counter()
                running.step()
                self.wait()
                row["first_s"][name] = time.perf_counter() - start
                if compiler is not None:
                    row["compile_s"][name] = compiler.seconds()
                for _ in range(WARM):
                    running.step()
                end_bytes = self.held()
                row["held_mb"][name] = (end_bytes[0] - start_bytes[0]) / 2**20
                row["reserved_mb"][name] = (end_bytes[1] - start_bytes[1]) / 2**20
                row["peak_mb"][name] = self.peak(running.step) / 2**20
                self.check(name, running, row, truth)
                if compiler is not None:
                    row["counts"][name] = counted(name, before, skips)
        finally:
            for logger in listening:
                logger.removeHandler(skips)
        return running.step

    def check(self, name: str, running: Running, row: dict[str, Any], truth: dict[str, Any]) -> None:
        got = running.checked()
        self.wait()
        if "result" in truth:
            error = measure.errors(got, truth["result"])
            mine = truth.setdefault("eager", error)
            row["errors"][name] = error
            row["accurate"][name] = measure.within_twice(error, mine, got)
        del got
        if running.curve is not None:
            losses = running.curve()
            first = truth.setdefault("eager_losses", losses)
            row["losses"][name] = losses
            row["curve_to_eager"][name] = curve_error(losses, first)
            if "losses" in truth:
                row["curve_error"][name] = curve_error(losses, truth["losses"])

    def truth(self, p: GpuProgram) -> dict[str, Any]:
        """Results and losses in float64, after as many steps as each column has made."""
        running = prepare(p, self.device, self.tiny, lambda fn: fn, double=True)
        for _ in range(0 if p.kind == "inference" else WARM + 1 + self.cuda):
            running.step()
        found = {"result": running.checked()}
        if running.curve is not None:
            found["losses"] = running.curve()
        return found

    def program(self, p: GpuProgram, k: int) -> dict[str, Any]:
        """The row of one program; the order of the backends is turned by `k`."""
        row: dict[str, Any] = {"name": p.name, "shape": p.shape, "kind": p.kind, "launch": p.launch, "failed": {}}
        for table in ("errors", "accurate", "losses", "curve_error", "curve_to_eager", "first_s", "compile_s"):
            row[table] = {}
        row |= {"held_mb": {}, "reserved_mb": {}, "peak_mb": {}, "counts": {}, "us": {}}
        torch._dynamo.reset()
        if self.cuda:
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees

            reset_cudagraph_trees()
        steps: dict[str, Step] = {}
        with torch.set_grad_enabled(p.kind == "train"):
            try:
                truth = self.truth(p)
            except Exception as error:  # noqa: BLE001 - the row says so
                truth, row["no_reference"] = {}, why(error)
            shift = k % max(1, len(self.names))
            for name in ["eager", *self.names[shift:], *self.names[:shift]]:
                try:
                    steps[name] = self.one(p, name, row, truth)
                except Exception as error:  # noqa: BLE001 - the row says so
                    row["failed"][name] = why(error)
                self.held()
            truth.clear()
            self.held()
            self.time(p, {n: steps[n] for n in ("eager", *self.names) if n in steps}, row)
        steps.clear()
        return row

    def time(self, p: GpuProgram, steps: dict[str, Step], row: dict[str, Any]) -> None:
        """Medians over interleaved rounds."""
        clock = self.wall_us if p.launch or not self.cuda else measure.device_us
        samples: dict[str, list[float]] = {}
        calls = {}
        for name in list(steps):
            try:
                calls[name] = max(2, min(100, round(2e4 / max(clock(steps[name], 2), 1))))
                samples[name] = []
            except Exception as error:  # noqa: BLE001 - the row says so
                row["failed"][name] = why(error)
                del steps[name]
        for k in range(self.rounds):
            order = list(samples)
            turn = k % max(1, len(order))
            for name in order[turn:] + order[:turn]:
                steps[name]()  # brings its code and data back into the caches
                samples[name].append(clock(steps[name], calls[name]))
        row["us"] = {name: statistics.median(s) for name, s in samples.items()}

    def usable(self) -> bool:
        """Whether the device still computes."""
        try:
            self.held()
            return float(torch.ones(2, device=self.device).sum()) == 2.0
        except RuntimeError:
            return False

    def warm_up(self) -> None:
        """What the first compilation of a process sets up is no program's doing: imports, worker processes, libraries."""
        w = torch.ones(256, 256, device=self.device)
        float((w @ w).sum())
        for name in self.names:
            with fresh_caches(name) as folder:
                compiled = Compiler(name, folder)(copy.copy(_warm_up))
                for _ in range(WARM):
                    compiled(w.clone().requires_grad_()).backward()
        self.wait()


def _warm_up(x: Tensor) -> Tensor:
    return torch.softmax(x @ x, -1).square().sum()


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 7,
    backend: Annotated[str | None, typer.Option(help=f"columns beside eager, of {', '.join(MODES)}")] = None,
    device: Annotated[str, typer.Option(help="cuda; cpu tries the script")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="tiny sizes, to try the script")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="leave out the programs that the results have")] = False,
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
) -> None:
    """Models, training steps and small programs on a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    programs = chosen(list(PROGRAMS.values()), only)
    every = "inductor,inductor-reduce,opforge,opforge-reduce" if device == "cuda" else "inductor,opforge"
    names = (backend or every).split(",")
    if unknown := [n for n in names if n not in MODES]:
        console.print(f"[red]unknown backends {unknown}; there are {', '.join(MODES)}")
        raise typer.Exit(2)
    for base in ("inductor", "opforge"):
        if any(n.startswith(base) for n in names):
            backends.load(base)
    torch._dynamo.config.recompile_limit = 64
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(names, torch.device(device), tiny, rounds)
    machine = report.machine(torch.get_num_threads())
    machine |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if bench.cuda else {"tiny": tiny}
    try:
        rows = gpu_models_report.measured(out, machine) if resume else []
    except ValueError as error:
        console.print(f"[red]{error}: name another folder with --out")
        raise typer.Exit(2) from error
    left = [p for p in programs if p.name not in {r["name"] for r in rows}]
    console.print(f"{len(left)} of {len(programs)} programs are left to measure; {out} has {len(rows)}", soft_wrap=True)
    if left:
        start = time.perf_counter()
        bench.warm_up()
        console.print(f"warmed up in {time.perf_counter() - start:.0f} s")
    for k, p in enumerate(left, 1 + len(programs) - len(left)):
        start = time.perf_counter()
        # What a program that ends the process leaves behind.
        rows.append({"name": p.name, "shape": p.shape, "kind": p.kind, "failed": {"all": "the process ended"}})
        gpu_models_report.write(out, machine, names, rows)
        try:
            row = bench.program(p, k)
        except Exception as error:  # noqa: BLE001 - the row says so
            row = rows[-1] | {"failed": {"all": why(error)}}
        row["took_s"] = time.perf_counter() - start
        rows[-1] = row
        gpu_models_report.write(out, machine, names, rows)
        console.print(f"{k}/{len(programs)} {gpu_models_report.one_line(row, names)}", highlight=False, soft_wrap=True)
        if not bench.usable():
            console.print("[red]the device is unusable; going on in a new process")
            os.execv(sys.executable, [sys.executable, *sys.argv, *([] if resume else ["--resume"])])
    print((out / "gpu_models.md").read_text() if rows else "nothing was measured")


if __name__ == "__main__":
    typer.run(main)
