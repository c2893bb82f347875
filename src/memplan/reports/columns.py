"""Columns of a table fitted to a width: left out, or their texts cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
                cells=shortened_apart(column.cells, size, column.from_left, ellipsis),
            )
        )
    return cut, gap


def shortened_apart(texts: Sequence[str], width: int, from_left: bool, ellipsis: str = "…") -> tuple[str, ...]:
    """Return texts cut to a width, so that those that differ still do: where they are alike once cut, the cut goes to
    where they are alike, and where no cut helps they are numbered.

    Example:
        >>> shortened_apart(["down.block.attention.out", "up.block.attention.out"], 16, from_left=True)
        ('d….attention.out', 'u….attention.out')
    """
    cut = {text: shortened(text, width, from_left, ellipsis) for text in texts}
    groups: dict[str, list[str]] = {}
    for text, short in cut.items():
        groups.setdefault(short, []).append(text)
    for alike in [group for group in groups.values() if len(group) > 1]:
        taken = {short for text, short in cut.items() if text not in alike}
        cut |= dict(zip(alike, _apart(alike, width, taken, ellipsis), strict=True))
    return tuple(cut[text] for text in texts)


def _apart(texts: Sequence[str], width: int, taken: Collection[str], ellipsis: str) -> list[str]:
    """Return different texts cut so that they differ from each other and from those taken."""
    room = max(1, width - cell_len(ellipsis))
    for begin in (*range(1, room), room):
        tail = room - begin
        found = [
            chop_cells(text, begin)[0] + ellipsis + (chop_cells(text[::-1], tail)[0][::-1] if tail else "")
            for text in texts
        ]
        if len(set(found)) == len(found) and not set(found) & set(taken):
            return found
    marks = [f"{ellipsis}{number}" for number in range(1, len(texts) + 1)]
    return [chop_cells(text, max(1, width - cell_len(mark)))[0] + mark for text, mark in zip(texts, marks, strict=True)]


def shortened(text: str, width: int, from_left: bool, ellipsis: str = "…") -> str:
    """Return a text cut to a width, at its beginning or its end, with an ellipsis where it was cut."""
    if cell_len(text) <= width:
        return text
    room = max(1, width - cell_len(ellipsis))
    if from_left:
        return ellipsis + chop_cells(text[::-1], room)[0][::-1]
    return chop_cells(text, room)[0] + ellipsis
