"""Report of the files that memplan caches on disk, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from memplan._json import Written
from memplan.cudnn.answer_cache import Kept
from memplan.reports.document import Document, Field, document, number_field, table_of

_FIELDS = [
    Field("what", lambda entry: entry.what),
    number_field("number", lambda entry: entry.number, str),
    number_field("bytes", lambda entry: entry.bytes),
    Field("where", lambda entry: str(entry.path), shrinks_to=20, from_left=True),
]


@dataclass(frozen=True, slots=True)
class Caches(Written):
    """The caches, as JSON has them."""

    FORMAT: ClassVar[str] = "memplan.cache"

    kept: Sequence[Kept]


def report(entries: Sequence[Kept]) -> Document:
    """Return a table of the caches."""
    return document(None, [table_of(entries, _FIELDS) if entries else "nothing is kept"])
