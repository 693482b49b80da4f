"""The command line: `opforge generate`, `check`, `new-op`, `schemas`, `lines`, `keys`; torch is imported only where it
must.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from .errors import OpforgeError

app = typer.Typer(
    help="opforge: a torch.compile backend whose knowledge lives in YAML.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(highlight=False, soft_wrap=True)


@app.callback()
def _main() -> None:
    pass


@app.command()
def generate(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 when generated files are stale.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Write nothing; print what would change.")] = False,
    only: Annotated[list[str] | None, typer.Option("--only", help="Run only this emitter (may be repeated).")] = None,
) -> None:
    """Write generated/ from the specs."""
    from .generator import run

    changes = run.generate(only=only or ())
    if diff:
        sys.stdout.write("".join(c.diff() for c in changes))
    if check and changes:
        for c in changes:
            print(f"stale: {c.path}", file=sys.stderr)
        raise typer.Exit(1)
    if not check and not diff:
        run.write_tree(changes, run.ROOT)
        for c in changes:
            print(("removed " if c.new is None else "wrote ") + c.path)


def main() -> None:
    """Entry point of the `opforge` command. A wrong spec prints its mistakes and exits with 2, without a traceback."""
    try:
        app()
    except OpforgeError as e:
        print(e, file=sys.stderr)
        sys.exit(2)
