"""An export on the terminal and as JSON: RAM and flash, what holds the arena up, what each lever gives, the proof."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.errors import BudgetError
from memplan.exporting.exported import Exported
from memplan.exporting.update_search import UpdateChoice
from memplan.reports.output import Field, Page, facts_table, name_field, number_field, print_parts

FORMAT = "memplan.export"
SCHEMA = 1
HOLDERS = 8
"""Rows of what is in RAM at the peak."""


def dumps(found: Exported) -> str:
    """Write the figures as JSON text. Bytes."""
    return json.dumps({"format": FORMAT, "schema": SCHEMA, **found.to_dict()}, indent=1, allow_nan=False) + "\n"


def print_export(found: Exported, file: TextIO | None = None) -> None:
    """Print an export to a file, stdout by default. See `print_parts`."""
    print_parts(lambda page: render(found, page), file)


def render(found: Exported, page: Page) -> Iterator[RenderableType]:
    """Yield the parts of the report as rich renderables, in order."""
    yield Text(f"{found.folder}/{found.name}.c: a training step in {format_bytes(found.ram)} of RAM", "bold")
    renamed = found.name != found.given_name.lower()
    yield facts_table(
        {
            **({"name": f"{found.name}, for {printable(found.given_name)}"} if renamed else {}),
            "arena": f"{format_bytes(found.arena)} ({format_bytes(found.live)} in use at once)",
            "weights and state": f"{format_bytes(found.state)} ({found.trained} weights are trained)",
            "inputs": format_bytes(found.inputs),
            "flash": f"{format_bytes(found.flash)} of weights, beside the code ({found.frozen} are frozen)",
            **({} if found.rounding is None else {"in eight bits": str(found.rounding)}),
            "smallest budget": format_bytes(found.smallest_budget),
            "in the backward pass": f"{found.recomputed} results made again",
            "updated element by element": f"{found.fused} parameters",
        }
    )
    yield ""
    yield page.rows(
        found.levers,
        [name_field("One after another", lambda one: one[0], 20), number_field("in use at once", lambda one: one[1])],
    )
    yield ""
    if found.choice is not None:
        yield from _choice(found.choice, page)
    fields = [
        name_field("In RAM at the peak", lambda one: printable(str(one)), 20),
        number_field("bytes", lambda one: one.bytes),
    ]
    yield page.rows(found.held_by, fields, HOLDERS, "all")
    yield ""
    yield Text(f"Proof: {found.verdict}")
    if found.core is not None:
        yield Text(f"On {found.core}")


def _choice(choice: UpdateChoice, page: Page) -> Iterator[RenderableType]:
    """Yield what a search chose to train."""
    yield Text(str(choice))
    fields = [
        name_field("Trained", lambda one: printable(one.path), 20),
        number_field("bytes", lambda one: one.bytes),
        Field("gradient norm", lambda one: f"{one.gradient:.3g}", right=True),
    ]
    yield page.rows(sorted(choice.trained, key=lambda one: -one.gradient), fields, HOLDERS, "all")
    yield ""


def print_shortfall(error: BudgetError, file: TextIO | None = None) -> None:
    """Print why no plan fits."""
    least = format_bytes(error.smallest_budget)
    ram = error.timeline is not None
    lines = [
        Text(f"It does not fit. The smallest {'budget' if ram else 'flash'} that it fits is {least}.", "bold red"),
        Text(printable(str(error))),
    ]
    print_parts(lambda page: lines, file)
