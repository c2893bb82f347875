"""Memory of a function line by line: the value, and its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memplan import _json
from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan._text import printable

WORDS = {"recorded": "predicted", "measured": "measured", "dry": "measured on an emulated card"}


@dataclass(frozen=True, slots=True)
class LineRow:
    """A line of a function. All sizes are bytes; of a line that ran more than once, each is the most of any run.

    ``held`` is what is allocated after it, ``peak`` the most while it ran, what was there before included. ``added``
    was allocated by it and is still there after it, ``freed`` was there before it and is not after it: of one run,
    what is held after it is what was held before it + added - freed.
    """

    line: int
    hits: int
    held: int
    added: int
    freed: int
    peak: int
    source: str


@dataclass(frozen=True, slots=True, repr=False)
class LineProfile(Displayed):
    """Memory of a function, line by line; what a line calls belongs to it, and ``loss.backward()`` all of backward.

    ``rows`` are its lines in order, those that never ran with 0 ``hits``. ``origin`` is that of the Trace.

    Example:
        >>> def build():
        ...     layer, data = nn.Linear(256, 256), torch.randn(64, 256)
        ...
        ...     @memplan.profile
        ...     def step():
        ...         layer(data).sum().backward()
        ...
        ...     return step
        >>> memplan.explain(build, device="h100").lines[0].function
        'build.step'
    """

    function: str
    file: str
    device: str
    origin: str
    rows: tuple[LineRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes allocated at most while a line of it ran."""
        return max((row.peak for row in self.rows), default=0)

    @property
    def title(self) -> str:
        """Say whose memory this is, of which kind and where."""
        name = self.file if self.function == "<module>" else f"{self.function} ({self.file})"
        return printable(f"{name}, line by line, {WORDS.get(self.origin, self.origin)} on {self.device}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: all fields, rows as mappings."""
        return dataclasses.asdict(self) | {"peak": self.peak}

    def to_json(self) -> str:
        """Return it as JSON text; `from_json` reads it back to an equal value."""
        return _json.text_of(_json.to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> LineProfile:
        """Read what `to_json` wrote. Raises ValueError where it is something else."""
        return _json.from_plain(cls, _json.parse(text), "it")

    def __str__(self) -> str:
        rows = [tuple(column.header for column in COLUMNS)]
        rows += [tuple(column.cell(row) for column in COLUMNS) for row in self.rows]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        table = [
            "  ".join(
                cell.ljust(width) if column.header == "code" else cell.rjust(width)
                for column, cell, width in zip(COLUMNS, row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *table, *(f"note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return f"<LineProfile of {self.function}: {format_bytes(self.peak)} peak, {len(self.rows)} lines>"


@dataclass(frozen=True)
class LineColumn:
    """A column of the table: the field of a row that it shows."""

    header: str
    name: str

    def cell(self, row: LineRow) -> str:
        """Return its text for a row; of a line that never ran, only its number and its text."""
        value = getattr(row, self.name)
        if self.name == "source":
            return printable(value.expandtabs(4))
        if self.name == "line":
            return str(value)
        if not row.hits and not row.peak:
            return ""
        return str(value) if self.name == "hits" else format_bytes(value) if value else "-"


COLUMNS = (
    LineColumn("line", "line"),
    LineColumn("hits", "hits"),
    LineColumn("held", "held"),
    LineColumn("added", "added"),
    LineColumn("freed", "freed"),
    LineColumn("peak", "peak"),
    LineColumn("code", "source"),
)


def merged(profiles: Iterable[LineProfile]) -> tuple[LineProfile, ...]:
    """Return one profile for each function, of the runs in several: hits add up, of sizes the largest counts."""
    found: dict[tuple[str, str, int], LineProfile] = {}
    for one in profiles:
        key = one.file, one.function, one.rows[0].line if one.rows else 0
        old = found.get(key)
        found[key] = one if old is None else _both(old, one)
    return tuple(found.values())


def _both(a: LineProfile, b: LineProfile) -> LineProfile:
    rows = tuple(_most(pair) for pair in zip(a.rows, b.rows, strict=True))
    return dataclasses.replace(a, rows=rows, notes=tuple(dict.fromkeys((*a.notes, *b.notes))))


def _most(rows: Sequence[LineRow]) -> LineRow:
    most = {name: max(getattr(row, name) for row in rows) for name in ("held", "added", "freed", "peak")}
    return dataclasses.replace(rows[0], hits=sum(row.hits for row in rows), **most)
