"""The command line. Commands import what they need, so that start-up is quick; torch only for `schemas --refresh`."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

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
    *("config", "options", "languages", "targets", "tuning", "scalars", "scalar_tests", "kernels", "lowerings"),
    *("op_tests", "invalid_tests", "edge_tests", "recompute", "linear", "random"),
    *("rewrites", "mutations", "decompositions", "matrix", "hooks", "docs"),
)


def _flag(name: str, text: str) -> Any:
    """An option without a value, which typer would else show as `<bool>`."""
    return typer.Option(name, metavar="", help=text)


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import MODULE first: it registers operators with torch (for repro and minify it also loads their YAML)."
        " Found in the current folder, beside the YAML file, or where Python finds it.",
    ),
]

USERS, OWN, INSIDE = "Run and debug programs", "Operators of your own", "Work on opforge itself"
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


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


@app.command(rich_help_panel=OWN)
def generate(
    spec: Annotated[Path | None, typer.Argument(help="Your own operators' YAML (default: opforge's specs).")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FOLDER", help="Where the module made of SPEC is written.")
    ] = None,
    check: Annotated[bool, _flag("--check", "Write nothing; exit with 1 if a file is out of date.")] = False,
    diff: Annotated[bool, _flag("--diff", "Write nothing; print what would change.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="EMITTER", help=f"Run only this emitter (repeatable): {', '.join(EMITTERS)}."),
    ] = None,
    imports: Imports = None,
) -> None:
    """Write a Python module from a YAML file of your own, or generated/ from opforge's own specs.

    Only files that change are written. If a spec is wrong, nothing is written (exit code 2).
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


@app.command(rich_help_panel=OWN)
def check(
    files: Annotated[list[Path] | None, typer.Argument(help="Spec files (default: opforge's own).")] = None,
    imports: Imports = None,
) -> None:
    """Check YAML files of operators: show each mistake with its place and what was expected (exit code 2 if there is one).

    A file of opforge's own specs is checked together with the others, because they refer to each other.
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


@app.command("test", rich_help_panel=OWN)
def run_tests(
    spec: Annotated[Path, typer.Argument(help="A YAML file with operators of your own.")],
    imports: Imports = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            "--reference",
            metavar="OP=MODULE:FUNCTION",
            help="A function that computes the right results of an operator (repeatable; default: its eager kernel).",
        ),
    ] = None,
    entry: Annotated[
        list[str] | None, typer.Option("--entry", metavar="OP", help="Test only this operator (repeatable).")
    ] = None,
) -> None:
    """Compare the operators of a YAML file of your own with their eager kernels, as opforge's own are tested.

    Each overload is compared over dtypes, shapes and layouts, and its gradients
    too if it has a formula for them. A float64 run decides. Exit code 1 if a
    result is wrong or the eager kernel had to run, 2 for a mistake in the file.
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


@app.command("run", rich_help_panel=USERS, context_settings={**PASSED_ON, "allow_interspersed_args": False})
def run_script(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python program; whatever follows is passed to it.")],
) -> None:
    """Run a program with opforge as the default backend of `torch.compile`, also in the libraries that it uses.

    The same as `opforge.install()` in its first line. What that changed is
    printed to stderr. A `torch.compile` that names a backend keeps it.
    """
    from .default_backend import install
    from .program import run_program, shown

    if not script.is_file():
        _stop(f"there is no program {script}")
    print(install(), file=sys.stderr)  # and stays: threads of the program may still run
    raise typer.Exit(shown(run_program(script, context.args)))


@app.command("explain", rich_help_panel=USERS, context_settings=PASSED_ON)
def explain_script(
    context: typer.Context,
    script: Annotated[
        Path,
        typer.Argument(help="A Python program and its arguments; after `--` all of them are the program's."),
    ],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with pictures.")] = None,
    details: Annotated[bool, _flag("--details", "Also print the loop IR, kernels and wrapper of each graph.")] = False,
) -> None:
    """Run a program as `opforge run` does, and say what was compiled, what ran eagerly and why, and where the time goes.

    When the program has ended, the first call of each graph is made again and
    timed. The exit code is the program's.
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
    str, typer.Option(metavar="DEVICE", help="Run the graph on cpu or cuda, instead of where it was recorded.")
]
_Seed = Annotated[
    int, typer.Option(min=0, max=(1 << 63) - 1, help="Seed of the random values for inputs that were not saved.")
]


@app.command(rich_help_panel=USERS)
def repro(
    folder: Annotated[Path, typer.Argument(help="A graph's folder, as a run with TORCH_COMPILE_DEBUG=1 writes it.")],
    seed: _Seed = 0,
    device: _Device = "",
    imports: Imports = None,
) -> None:
    """Run one recorded graph eagerly and with opforge, and say whether opforge's results are as right as eager's.

    Exit code 0 if they are, 1 if a result differs or opforge raises an error,
    2 if the folder cannot be run.
    """
    _import_all(imports)
    from .testing.repro import main as run

    gc.enable()
    raise typer.Exit(run(folder, seed, device))


@app.command(rich_help_panel=USERS, context_settings=PASSED_ON)
def minify(
    context: typer.Context,
    path: Annotated[
        Path, typer.Argument(help="A graph's folder, or a Python program; whatever follows is passed to the program.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FOLDER", help="Where to write it (default: beside the graph)."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Stop after this many seconds.")] = 300.0,
    seed: _Seed = 0,
    device: _Device = "",
    imports: Imports = None,
) -> None:
    """Make a recorded graph that fails smaller while it still fails in the same way; write a folder for `opforge repro`.

    A program is run first, as by `opforge run`, and its first graph that fails
    is taken. Exit code 0 if a folder was written, 1 if the graph does not fail,
    2 if it cannot be run or no graph of the program fails.
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
    print(f"wrote {target}; run it with: opforge repro {target}" + _import_options(imports))


def _import_options(modules: list[str] | None) -> str:
    return "".join(f" --import {name}" for name in modules or ())


def _import_all(modules: list[str] | None) -> None:
    """Import what registers a graph's operators."""
    from importlib import import_module

    sys.path.insert(0, "")
    for name in modules or ():
        try:
            import_module(name)
        except ImportError as error:
            _stop(f"cannot import {name}: {error}")


@app.command("new-op", rich_help_panel=OWN)
def new_op(
    name: Annotated[
        str, typer.Argument(help="The operator, for example softplus, aten.sum.dim_IntList or my_lib.my_op.")
    ],
    kind: Annotated[str, typer.Option(help=f"How it is computed: {', '.join(KINDS)}.")] = "pointwise",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Append to this YAML file instead of printing.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Print an operator's schema in torch and a template of its YAML entry, or append them to a file."""
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
    print(f"added to {out}; next: opforge check {out}" + _import_options(imports))


@app.command(rich_help_panel=INSIDE)
def schemas(
    name: Annotated[str | None, typer.Argument(help="Show only operators whose name contains this.")] = None,
    refresh: Annotated[bool, _flag("--refresh", "Update the stored schemas of the installed torch.")] = False,
) -> None:
    """Show the operator schemas of torch that the specs are checked against."""
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


@app.command(rich_help_panel=INSIDE)
def rows() -> None:
    """Count the operators of the installed torch by the kind of their entry. Exit code 1 if one has no entry."""
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


@app.command(rich_help_panel=INSIDE)
def lines() -> None:
    """Count lines of source in each folder, hand-written and generated."""
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


@app.command(rich_help_panel=INSIDE)
def keys() -> None:
    """Count how many entries use each key of the specs; mark a key that fewer than three use."""
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
