"""`python -m opforge` is the `opforge` command."""

from .cli import main

main()
