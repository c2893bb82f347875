"""A step measured on a card beside its prediction: torch's own peaks of each step, and what differs by cause."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import RenderableType
from rich.text import Text

from memplan.reports import compare
from memplan.reports.output import Field, Page, number_field, print_parts
from memplan.studies.comparisons.measured import Beside, Peak


def dumps_beside(explanation: str, beside: Beside) -> str:
    """Return the JSON of an explanation with both beside it, indented. All sizes are bytes."""
    data = {**json.loads(explanation), "beside": to_dict(beside)}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def to_dict(beside: Beside) -> dict[str, Any]:
    """Return plain data. All sizes are bytes."""
    peaks = [{"part": row.part, "predicted": row.predicted, "measured": row.measured} for row in beside.peaks]
    return {"peaks": peaks, "comparison": json.loads(compare.dumps(beside.comparison))}


def print_beside(beside: Beside, file: TextIO | None = None, top: int = 12) -> None:
    """Print both to a file, stdout by default; ``top`` rows of long tables, 0 for all. See `print_parts`."""
    print_parts(lambda page: render(beside, page, top), file)


def render(beside: Beside, page: Page, top: int = 12) -> Iterator[RenderableType]:
    """Yield the parts of the report as rich renderables, in order."""
    fields = [
        Field("Beside the prediction: peak of", lambda row: row.part),
        number_field("predicted", lambda row: row.predicted),
        number_field("measured", lambda row: row.measured),
        Field("off", _off, right=True),
    ]
    yield ""
    yield page.rows(beside.peaks, fields)
    yield ""
    if beside.same:
        yield Text("Every peak is as predicted, to the byte.")
    else:
        yield from compare.render(beside.comparison, page, top)


def _off(row: Peak) -> str:
    return "0" if row.predicted == row.measured else "-" if row.off is None else f"{100 * row.off:+.3f} %"
