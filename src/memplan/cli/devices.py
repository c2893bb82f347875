"""`memplan devices`: the cards that a step can be planned for."""

from __future__ import annotations

import click

from memplan.cli.files import ResultFiles
from memplan.cli.options import debug_option, result_options

HELP = """List the cards that memplan knows, or show one with the source of each figure.

NAME is what people call the card: h100, "RTX 4090", a100-40gb.

\b
  memplan devices
  memplan devices rtx4090

The second says, among others, that of 23.5 GiB a step can use 22.7 to 23.2, since CUDA's own context takes the
rest, and in which document its bandwidth and FLOP/s were found.

\b
Exit code: 0 done; 2 no such card.
"""


@click.command("devices", help=HELP)
@click.argument("name", required=False)
@result_options("the figures")
@debug_option
def command(name: str | None, results: ResultFiles) -> int:
    """List the cards of the catalogue, or show the one with this name. Return the exit code."""
    from memplan.devices import catalogue, find

    cards = catalogue() if name is None else (find(name),)
    from memplan.reports.devices import Catalogue, device_report, report

    results.write_and_show(Catalogue(cards).to_json, lambda: report(cards) if name is None else device_report(cards[0]))
    return 0
