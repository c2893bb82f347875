"""`memplan cache`: the files that memplan caches on disk."""

from __future__ import annotations

import click

from memplan.cli.files import ResultFiles
from memplan.cli.options import debug_option, result_options

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
@result_options("the list")
@debug_option
def command(cleared: bool, results: ResultFiles) -> int:
    """List the cached files, after removing them with ``--clear``. Return the exit code."""
    from memplan.cudnn.answer_cache import clear, kept
    from memplan.reports.cache import Caches, report

    if cleared:
        clear()
    files = kept()
    results.write_and_show(Caches(files).to_json, lambda: report(files))
    return 0
