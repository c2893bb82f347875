"""Reports of the files that memplan caches on disk, on the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TextIO

from rich.text import Text

from memplan._json import Written
from memplan.cudnn.answer_cache import Kept
from memplan.reports.output import Field, number_field, print_parts

_FIELDS = [
    Field("what", lambda entry: entry.what),
    Field("number", lambda entry: str(entry.number), right=True),
    number_field("bytes", lambda entry: entry.bytes),
    Field("where", lambda entry: str(entry.path), shrinks_to=20, from_left=True),
]


@dataclass(frozen=True, slots=True)
class Caches(Written):
    """The caches, as JSON has them."""

    FORMAT: ClassVar[str] = "memplan.cache"

    kept: Sequence[Kept]


def print_cache(entries: Sequence[Kept], file: TextIO | None = None) -> None:
    """Print a table of the caches. See `print_parts`.

    Args:
        entries: the caches, in the order of the rows.
        file: where to; stdout by default.
    """
    print_parts(lambda page: [page.rows(entries, _FIELDS) if entries else Text("nothing is kept")], file)
