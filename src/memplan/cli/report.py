"""`memplan report`: saved results as one page for any browser."""

from __future__ import annotations

import os

import click

from memplan.cli.files import OUTPUT, write
from memplan.cli.options import debug_option
from memplan.errors import InputError

HELP = """Turn saved results into one HTML file that opens anywhere, without a network.

FILE is what another command wrote with --json, --trace or --plan: an explanation, a trace, a plan, a fit, a proof, a
sweep, findings, a replay, a comparison, what memplan.watch saved. Several are shown side by side, each by its title.

\b
  memplan explain examples/resnet18.py:build --device rtx4090 --json step.json
  memplan report step.json
  memplan report rank0.json rank1.json --html ranks.html --force

The page has the verdict first, then memory over time by cause, layers, what is alive at the peak, the allocator's
blocks, sliders for the points of a sweep. Every other command writes the same page with --html FILE.

\b
Exit code: 0 done; 2 a file that is not memplan's, is cut off or of another version, or a report that is there already.
"""


@click.command("report", help=HELP)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--html",
    "page",
    type=OUTPUT,
    metavar="FILE",
    default="memplan-report.html",
    show_default=True,
    help="Where the page goes.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
@debug_option
def command(files: tuple[str, ...], page: str, force: bool) -> int:
    """Write the saved results in ``files`` as a page, and return the exit code. ``force`` replaces an existing file."""
    if page == "-":
        raise InputError("--html -", expected="a file: a page of some megabytes is for a browser", do="Name one")
    if os.path.exists(page) and not force:
        raise InputError(f"{page} is there already", expected="a new file", do="Name another, or add --force")
    from memplan.reports.html.page import check_installed, page_of
    from memplan.reports.html.saved_results import read_results

    check_installed("memplan report")
    write(page, page_of([result for path in files for result in read_results(path)]))
    click.echo(f"{page}: {len(files)} result{'s' * (len(files) > 1)}, {os.path.getsize(page) / 1e6:.1f} MB")
    return 0
