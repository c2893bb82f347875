"""Columns of a table fitted to a width: left out, or their texts cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, chop_cells


@dataclass(frozen=True)
class Column:
    """A column of a table.

    ``shrinks_to`` is how narrow its texts may be cut, None where they may not; ``from_left`` cuts the
    beginning, since names differ at their end. ``drop`` says in which order columns are left out where there
    is no room: the highest first, those with 0 never.
    """

    header: str
    cells: tuple[str, ...]
    right: bool = False
    shrinks_to: int | None = None
    from_left: bool = False
    drop: int = 0

    @property
    def width(self) -> int:
        """Width of the widest text and the header's widest line."""
        return max(map(cell_len, (*self.cells, *self.header.split("\n"))))

    @property
    def least(self) -> int:
        """Return the narrowest that it can be."""
        if self.shrinks_to is None:
            return self.width
        return min(self.width, max(self.shrinks_to, *map(cell_len, self.header.split("\n"))))


def fit(columns: Sequence[Column], width: int, ellipsis: str = "…") -> tuple[list[Column], int]:
    """Return the columns that fit, with their texts cut as far as need be, and the gap between each two of them.

    Example:
        >>> layers = Column("layer", ("encoder.layer.0",), shrinks_to=8, from_left=True)
        >>> fit([layers], 9)[0][0].cells
        ('….layer.0',)
    """
    kept = list(columns)
    while sum(column.least for column in kept) + len(kept) - 1 > width:
        droppable = [column for column in kept if column.drop]
        if not droppable:
            break
        kept.remove(max(droppable, key=lambda column: column.drop))
    gap = 2 if sum(column.width for column in kept) + 2 * (len(kept) - 1) <= width else 1
    free = width - sum(column.least for column in kept) - gap * (len(kept) - 1)
    cut: list[Column] = []
    for column in kept:
        more = max(0, min(column.width - column.least, free))
        free -= more
        size = column.least + more
        cut.append(
            replace(
                column,
                cells=tuple(shortened(text, size, column.from_left, ellipsis) for text in column.cells),
            )
        )
    return cut, gap


def shortened(text: str, width: int, from_left: bool, ellipsis: str = "…") -> str:
    """Return a text cut to a width, at its beginning or its end, with an ellipsis where it was cut."""
    if cell_len(text) <= width:
        return text
    room = max(1, width - cell_len(ellipsis))
    if from_left:
        return ellipsis + chop_cells(text[::-1], room)[0][::-1]
    return chop_cells(text, room)[0] + ellipsis
