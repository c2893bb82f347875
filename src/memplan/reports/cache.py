"""What memplan keeps on disk, on the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TextIO

from rich.text import Text

from memplan.cudnn.answer_cache import Kept
from memplan.reports.output import Field, number_field, print_parts

_FIELDS = [
    Field("what", lambda one: one.what),
    Field("number", lambda one: str(one.number), right=True),
    number_field("bytes", lambda one: one.bytes),
    Field("where", lambda one: str(one.path), shrinks_to=20, from_left=True),
]


def dumps(found: Sequence[Kept]) -> str:
    """Write ``{"kept": [...], ...}`` as JSON text, indented."""
    rows = [{"what": one.what, "number": one.number, "bytes": one.bytes, "path": str(one.path)} for one in found]
    return json.dumps({"format": "memplan.cache", "schema": 1, "kept": rows}, indent=1) + "\n"


def print_cache(found: Sequence[Kept], file: TextIO | None = None) -> None:
    """Print a table of what is kept: as wide as the terminal, or 80 columns without colours where ``file`` is not one.

    Args:
        found: what to print, in this order.
        file: where to; stdout by default.
    """
    print_parts(lambda page: [page.rows(found, _FIELDS) if found else Text("nothing is kept")], file)
