"""Report of the files that memplan caches on disk, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from memplan.cudnn.answer_cache import Kept
from memplan.reports.document import Document, Field, document, number_field, table_of

_FIELDS = [
    Field("what", lambda entry: entry.what),
    number_field("number", lambda entry: entry.number, str),
    number_field("bytes", lambda entry: entry.bytes),
    Field("where", lambda entry: str(entry.path), shrinks_to=20, from_left=True),
]


def dumps(entries: Sequence[Kept]) -> str:
    """Return ``{"kept": [...], ...}`` as indented JSON, an object for each cache. All sizes are bytes."""
    rows = [
        {"what": entry.what, "number": entry.number, "bytes": entry.bytes, "path": str(entry.path)} for entry in entries
    ]
    return json.dumps({"format": "memplan.cache", "schema": 1, "kept": rows}, indent=1) + "\n"


def report(entries: Sequence[Kept]) -> Document:
    """Return a table of the caches, in the order given."""
    return document(None, [table_of(entries, _FIELDS) if entries else "nothing is kept"])
