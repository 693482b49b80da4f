"""The command line. Commands import what they need, so that start-up is quick; torch only for `schemas --refresh`."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .errors import OpforgeError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

app = typer.Typer(
    help="opforge: a torch.compile backend whose knowledge lives in YAML.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What the help texts list, without the imports that the lists themselves would need; a test compares them.
FAULTS = 12
"""How many wrong results of an operator `opforge test` shows."""
KINDS = ("pointwise", "view", "gather", "create", "reduction", "scan", "scatter", "composite", "extern", "decomposed")
EMITTERS: tuple[str, ...] = (
    *("config", "options", "targets", "tuning", "scalars", "scalar_tests", "kernels", "lowerings"),
    *(
        "op_tests",
        "invalid_tests",
        "edge_tests",
        "recompute",
        "linear",
        "random",
        "rewrites",
        "mutations",
        "decompositions",
        "matrix",
        "docs",
    ),
)

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import MODULE first: it registers operators with torch. Found in the current folder, beside the spec file,"
        " or where Python finds it.",
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        print(f"opforge {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """opforge: a torch.compile backend whose knowledge lives in YAML."""


@app.command()
def generate(
    spec: Annotated[
        Path | None, typer.Argument(help="A spec file of your own, of operators (default: opforge's own specs).")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for the module made of SPEC.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when something is stale.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Write nothing; print what would change.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help=f"Run only this emitter (repeatable): {', '.join(EMITTERS)}.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Write generated/ from the specs, or a Python module from a spec file of your own.

    Only files that changed are written; nothing is written when a spec is wrong (exit code 2).
    """
    from .generator import run

    if (spec is None) != (out is None):
        _stop("a spec file of your own needs both: opforge generate my_ops.yaml -o my_pkg/")
    if spec is None or out is None:
        root, changes = run.ROOT, run.generate(only=only or ())
    else:
        from .generator.ahead import user_module

        root, files = out, {spec.with_suffix(".py").name: user_module(spec, imports or ())}
        changes = run.plan_changes(files, root, ())
    if diff:
        sys.stdout.write("".join(c.diff() for c in changes))
    if check:
        for c in changes:
            print(f"stale: {c.path} (run: opforge generate)", file=sys.stderr)
        raise typer.Exit(1 if changes else 0)
    if not diff:
        run.write_tree(changes, root)
        for c in changes:
            print(("removed " if c.new is None else "wrote ") + (c.path if out is None else str(Path(out) / c.path)))
        if not changes:
            print("everything is up to date")


@app.command()
def check(
    files: Annotated[list[Path] | None, typer.Argument(help="Spec files (default: opforge's own).")] = None,
    imports: Imports = None,
) -> None:
    """Check spec files: shows every mistake with its place and what was expected; exit code 2 if there is one.

    A file of opforge's own is checked together with all of them, because they refer to each other.
    """
    from .generator import run

    failed = False
    for path in files or [run.SPECS_DIR]:
        others: list[str] = []
        try:
            if path.resolve().is_relative_to(run.SPECS_DIR):
                count = run.own_entries(path.resolve())
            else:
                from .generator.ahead import check_user_file

                checked = check_user_file(path, imports or ())
                count, others = checked.size, sorted(checked.documents.keys() - {"ops"})
        except OpforgeError as e:
            print(e, file=sys.stderr)
            failed = True
        else:
            print(f"{path}: {count} {'entry' if count == 1 else 'entries'}, no mistake")
            if others:
                print(
                    f"{path}: {' and '.join(others)} belong into opforge's own specs; load_specs() takes operators alone"
                )
    raise typer.Exit(2 if failed else 0)


@app.command("test")
def run_tests(
    spec: Annotated[Path, typer.Argument(help="A spec file of your own, of operators.")],
    imports: Imports = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            "--reference",
            metavar="OP=MODULE:FUNCTION",
            help="What computes the right results of an operator (repeatable; default: the operator's own eager kernel).",
        ),
    ] = None,
    entry: Annotated[
        list[str] | None, typer.Option("--entry", metavar="OP", help="Test only this operator (repeatable).")
    ] = None,
) -> None:
    """Test the operators of a spec file of your own as opforge's own are tested.

    Every overload is compiled and compared with its eager kernel and a float64 run: over dtypes, shapes and layouts, with values drawn for
    its parameters, or with the arguments that `tests` of its entry names; gradients too, where it has a formula. Exit code 1 when a result
    is wrong or the eager kernel had to run, 2 for a mistake in the file.
    """
    from .testing.user_file import check_file

    pairs = [text.partition("=") for text in reference or ()]
    if wrong := [name for name, sign, _ in pairs if not sign]:
        _stop(f"expected --reference OP=MODULE:FUNCTION, found '{wrong[0]}'")
    failed = 0
    for tested in check_file(spec, imports or (), {name: text for name, _, text in pairs}, entry or ()):
        counts = f"{tested.cases} calls, {tested.gradients} of them with gradients, {tested.seconds:.1f} s"
        print(
            f"{tested.id}: {counts}: {f'{len(tested.faults)} results or gradients wrong' if tested.faults else 'right'}",
            flush=True,
        )
        for fault in tested.faults[:FAULTS]:
            print(f"  {fault}")
        if len(tested.faults) > FAULTS:
            print(f"  and {len(tested.faults) - FAULTS} more")
        failed += bool(tested.faults)
    raise typer.Exit(1 if failed else 0)


@app.command(
    "run",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run_script(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python program; what follows are its arguments.")],
) -> None:
    """Run a program with opforge as its default backend: `torch.compile(model)` in it, and in libraries it uses, compiles by opforge.

    As `opforge.install()` at its first line; what was changed is printed to stderr.
    """
    from .default_backend import install
    from .program import run_program, shown

    if not script.is_file():
        _stop(f"there is no program {script}")
    print(install(), file=sys.stderr)  # and stays: threads of the program may still run
    raise typer.Exit(shown(run_program(script, context.args)))


@app.command("explain", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def explain_script(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(help="A Python program; what follows are its arguments, after `--` whatever they are.")
    ],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with pictures of all graphs.")] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print loop IR, kernels and wrapper of each graph too.")
    ] = False,
) -> None:
    """Run a program as `opforge run` does, and say what was compiled, what ran eagerly and why, and where the time goes.

    The times are those of each graph's first call, which is made again when the program has ended. The exit code is the program's.
    """
    from .default_backend import install
    from .program import run_program, shown
    from .report.explanation import explained

    if not script.is_file():
        _stop(f"there is no program {script}")
    if html is not None and not html.parent.is_dir():
        _stop(f"there is no folder {html.parent} for the page")
    html = html and html.absolute()  # the program may change the folder
    with install(), explained(script.name) as said:
        ended = run_program(script, context.args)
    if code := shown(ended):
        import traceback

        said.error = "".join(traceback.format_exception_only(ended)).strip()
    if details:
        print(said.details())
    from .report.summary import print_summary

    print_summary(said.report(), _console())
    if html is not None:
        print(f"wrote {said.html(html)}")
    raise typer.Exit(code)


_Device = Annotated[
    str, typer.Option(help="Where the graph's tensors are, instead of where they were recorded: cpu, cuda.")
]
_Seed = Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Seed of the values that were not saved.")]


@app.command()
def repro(
    folder: Annotated[Path, typer.Argument(help="A graph's folder, as TORCH_COMPILE_DEBUG=1 writes it.")],
    seed: _Seed = 0,
    device: _Device = "",
    imports: Imports = None,
) -> None:
    """Run one recorded graph by eager kernels and by opforge, and say whether opforge's results are as right.

    Exit code 0 when they are, 1 when a result differs or opforge raises, 2 for a folder that cannot be run.
    """
    _import_all(imports)
    from .testing.repro import main as run

    gc.enable()
    raise typer.Exit(run(folder, seed, device))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def minify(
    context: typer.Context,
    path: Annotated[
        Path, typer.Argument(help="A graph's folder, or a Python program; what follows are its arguments.")
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder for the small graph (default: beside the graph's).")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for it.")] = 300.0,
    seed: _Seed = 0,
    device: _Device = "",
    imports: Imports = None,
) -> None:
    """Make a recorded graph that fails smaller while it fails in the same way, and write it to a folder for `opforge repro`.

    A program is run first, with opforge as its default backend, and its first graph that fails is taken. Exit code 0 when a folder was
    written, 1 when nothing fails, 2 for a folder that cannot be run.
    """
    if not path.exists():
        _stop(f"there is no folder or program {path}")
    _import_all(imports)
    from .testing.minify import calls, elements, failing_folder, minified, write_folder

    gc.enable()
    folder, recorded, lines = failing_folder(path, context.args, device)
    for line in lines:
        print(line)
    from rich.console import Console

    with Console(stderr=True).status("the graph as it is") as status:
        found = minified(
            recorded,
            seconds,
            seed,
            device,
            lambda c, e, n: status.update(f"{c} calls, {e} elements left; graph {n} is tried"),
        )
    if found is None:
        print(f"{folder}: opforge's results are as right as eager's; nothing to make smaller", file=sys.stderr)
        raise typer.Exit(1)
    target = out or folder.with_name(f"{folder.name}_small")
    write_folder(found.recorded, target, {"from": str(folder)})
    print(
        f"{calls(recorded)} calls, {elements(recorded)} elements -> {calls(found.recorded)} calls, {elements(found.recorded)} elements "
        f"({found.tried} graphs tried)"
    )
    print(found.recorded.graph.code.strip())
    print(found.verdict)
    print(f"wrote {target}; run it by: opforge repro {target}")


def _import_all(modules: list[str] | None) -> None:
    """Import what registers a graph's operators."""
    from importlib import import_module

    sys.path.insert(0, "")
    for name in modules or ():
        try:
            import_module(name)
        except ImportError as error:
            _stop(f"cannot import {name}: {error}")


@app.command("new-op")
def new_op(
    name: Annotated[str, typer.Argument(help="The operator: softplus, aten.sum.dim_IntList, my_lib.my_op.")],
    kind: Annotated[str, typer.Option(help=f"The way it is computed: {', '.join(KINDS)}.")] = "pointwise",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Append to this spec file instead of printing.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Print (or append to a file) a template entry for an operator, below its schema in torch."""
    from .generator.ahead import new_entry

    text = new_entry(name, kind, out, imports or ())
    if out is None:
        sys.stdout.write(text)
        return
    try:
        with out.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as e:
        _stop(f"cannot write {out}: {e.strerror}")
    print(f"added to {out}; next: opforge check {out}" + "".join(f" --import {m}" for m in imports or ()))


@app.command()
def schemas(
    name: Annotated[str | None, typer.Argument(help="Show operators whose name has this in it.")] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Bring the installed torch's version up to date in the snapshot.")
    ] = False,
) -> None:
    """Show torch's operator schemas, which the specs are checked against, and which versions have them."""
    from .generator.torch_schemas import SNAPSHOT, matching, nearest_operator, refreshed

    if refresh:
        file = refreshed()
        SNAPSHOT.write_text(file.text(), encoding="utf-8", newline="\n")
        print(f"wrote {len(file.lines)} schemas of torch {', '.join(file.versions)} to {SNAPSHOT.name}")
        if name is None:
            return
    found = matching(name)
    if name is not None and not found:
        _stop(f"no operator of torch has '{name}' in its name{nearest_operator(name)}")
    for line in found:
        print(line)


@app.command()
def rows() -> None:
    """Which row each operator of the installed torch has. Exit code 1 where one has none."""
    from .generator import coverage
    from .generator.run import load_model
    from .generator.torch_schemas import TorchSchemas, torch_lines

    live = TorchSchemas(torch_lines(coverage.NAMESPACES))
    kinds = {s.id: e.kind for e in load_model().part("ops") for s in e.schemas}
    table = _table("row", *coverage.NAMESPACES)
    for kind, counts in coverage.counts(live, kinds).items():
        table.add_row(kind, *(str(counts[n] or "") for n in coverage.NAMESPACES))
    _console().print(table)
    if missing := coverage.without_row(live, kinds):
        print(coverage.advice(missing), file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def lines() -> None:
    """Lines of source by folder, hand-written and generated."""
    from .generator.report import line_counts
    from .generator.run import ROOT

    written, made, long = line_counts(ROOT)
    table = _table("folder", "hand-written", "generated")
    for folder in sorted({*written, *made}):
        table.add_row(folder, str(written.get(folder, "")), str(made.get(folder, "")))
    table.add_section()
    table.add_row("all", str(sum(written.values())), str(sum(made.values())))
    _console().print(table)
    for text in long:
        print(text)


@app.command()
def keys() -> None:
    """How many entries use each key of the specs; a key that fewer than three use is marked."""
    from .generator.report import key_usage
    from .generator.run import load_model

    table = _table("entry", "key", "users")
    for tag, counts in key_usage(load_model()).items():
        for n, (key, users) in enumerate(counts.items()):
            table.add_row(tag if not n else "", key, str(users) + ("" if users > 2 else "  (few)"))
        table.add_section()
    _console().print(table)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def _table(first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name == "key" else "right")
    return table


def _stop(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(2)


def main() -> None:
    """Entry point of the `opforge` command. A wrong spec prints its mistakes and exits with 2, without a traceback."""
    gc.disable()  # a command ends after seconds and leaves few cycles: collecting them is a fifth of its time
    try:
        app(prog_name="opforge")
    except OpforgeError as e:
        print(e, file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output has gone (`opforge schemas | head`): nothing is left to say.
        sys.stderr.close()
        sys.exit(1)
    except OSError as e:
        print(f"error: {e.filename}: {e.strerror}", file=sys.stderr)
        sys.exit(2)
