"""`memplan cache`: what memplan keeps on disk."""

from __future__ import annotations

import click

from memplan.cli.files import check_writable, write
from memplan.cli.options import debug_option, json_option

HELP = """Show what memplan keeps on disk, or remove it.

Below XDG_CACHE_HOME/memplan, by default ~/.cache/memplan: cuDNN's answers, a file for each card and version of cuDNN,
and the libraries that dry runs build. Both are made again when they are needed.

\b
  memplan cache
  memplan cache --clear

The first lists, among others, ~/.cache/memplan/cudnn/h100-91900-ba361ab0.json with 68 answers.

\b
Exit code: 0 done.
"""


@click.command("cache", help=HELP)
@click.option("--clear", "cleared", is_flag=True, help="Remove all of it.")
@json_option("the list")
@debug_option
def command(cleared: bool, json_file: str | None) -> int:
    """Run the command and return its exit code."""
    from memplan.cudnn.answer_cache import clear, kept
    from memplan.reports.cache import dumps, print_cache

    check_writable(json_file, "--json")
    if cleared:
        clear()
    found = kept()
    if json_file is not None:
        write(json_file, dumps(found))
    if json_file != "-":
        print_cache(found)
    return 0
