"""Reports of exported C training steps, on the terminal and as JSON: RAM and flash, memory techniques, the proof."""

from __future__ import annotations

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

HOLDERS = 8
"""Rows of the tables of what is in RAM at the peak and of the trained tensors."""


def print_export(exported: Exported, file: TextIO | None = None) -> None:
    """Print an export to a file, stdout by default. See `print_parts`."""
    print_parts(lambda page: render(exported, page), file)


def render(exported: Exported, page: Page) -> Iterator[RenderableType]:
    """Yield the parts of the report as rich renderables, in order."""
    yield Text(f"{exported.folder}/{exported.name}.c: a training step in {format_bytes(exported.ram)} of RAM", "bold")
    renamed = exported.name != exported.given_name.lower()
    yield facts_table(
        {
            **({"name": f"{exported.name}, for {printable(exported.given_name)}"} if renamed else {}),
            "arena": f"{format_bytes(exported.arena)} ({format_bytes(exported.live)} in use at once)",
            "weights and state": f"{format_bytes(exported.state)} ({exported.trained} weights are trained)",
            "inputs": format_bytes(exported.inputs),
            "flash": f"{format_bytes(exported.flash)} of weights, beside the code ({exported.frozen} are frozen)",
            **({} if exported.rounding is None else {"in eight bits": str(exported.rounding)}),
            "smallest budget": format_bytes(exported.smallest_budget),
            "in the backward pass": f"{exported.recomputed} results made again",
            "updated element by element": f"{exported.fused} parameters",
        }
    )
    yield ""
    yield page.rows(
        exported.levers,
        [
            name_field("One after another", lambda lever: lever[0], 20),
            number_field("in use at once", lambda lever: lever[1]),
        ],
    )
    yield ""
    if exported.choice is not None:
        yield from _choice(exported.choice, page)
    fields = [
        name_field("In RAM at the peak", lambda tensor: printable(str(tensor)), 20),
        number_field("bytes", lambda tensor: tensor.bytes),
    ]
    yield page.rows(exported.held_by, fields, HOLDERS, "all")
    yield ""
    yield Text(f"Proof: {exported.verdict}")
    if exported.core is not None:
        yield Text(f"On {exported.core}")


def _choice(choice: UpdateChoice, page: Page) -> Iterator[RenderableType]:
    """Yield the parameters that the update search chose to train, largest gradient first."""
    yield Text(str(choice))
    fields = [
        name_field("Trained", lambda tensor: printable(tensor.path), 20),
        number_field("bytes", lambda tensor: tensor.bytes),
        Field("gradient norm", lambda tensor: f"{tensor.gradient:.3g}", right=True),
    ]
    yield page.rows(sorted(choice.trained, key=lambda tensor: -tensor.gradient), fields, HOLDERS, "all")
    yield ""


def print_shortfall(error: BudgetError, file: TextIO | None = None) -> None:
    """Print the smallest budget or flash size that would fit, and why the export does not."""
    least = format_bytes(error.smallest_budget)
    ram = error.timeline is not None
    lines = [
        Text(f"It does not fit. The smallest {'budget' if ram else 'flash'} that it fits is {least}.", "bold red"),
        Text(printable(str(error))),
    ]
    print_parts(lambda page: lines, file)
