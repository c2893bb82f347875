"""Fit the columns of a table into a width, by leaving columns out and shortening texts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rich.cells import cell_len, chop_cells

from memplan.reports.document import Column


def _width(column: Column) -> int:
    """Return the width of the widest cell or header line, in terminal cells."""
    return max(map(cell_len, (*column.cells, *column.header.split("\n"))))


def _smallest_width(column: Column) -> int:
    """Return the smallest width to which the column can be cut."""
    if column.shrinks_to is None:
        return _width(column)
    return min(_width(column), max(column.shrinks_to, *map(cell_len, column.header.split("\n"))))


def fit(columns: Sequence[Column], width: int, ellipsis: str = "…") -> tuple[list[Column], int]:
    """Return the columns that fit into ``width``, with texts cut where necessary, and the gap between columns (1 or 2).

    While even the smallest widths are too wide together, the column with the largest ``drop`` is left out.

    Example:
        >>> layers = Column("layer", ("encoder.layer.0",), shrinks_to=8, from_left=True)
        >>> fit([layers], 9)[0][0].cells
        ('….layer.0',)
    """
    remaining = list(columns)
    while sum(map(_smallest_width, remaining)) + len(remaining) - 1 > width:
        droppable = [column for column in remaining if column.drop]
        if not droppable:
            break
        remaining.remove(max(droppable, key=lambda column: column.drop))
    gap = 2 if sum(map(_width, remaining)) + 2 * (len(remaining) - 1) <= width else 1
    free = width - sum(map(_smallest_width, remaining)) - gap * (len(remaining) - 1)
    cut: list[Column] = []
    for column in remaining:
        smallest = _smallest_width(column)
        widening = max(0, min(_width(column) - smallest, free))
        free -= widening
        cells = shortened_distinct(column.cells, smallest + widening, column.from_left, ellipsis)
        cut.append(replace(column, cells=cells))
    return cut, gap


def shortened_distinct(texts: Sequence[str], width: int, from_left: bool, ellipsis: str = "…") -> tuple[str, ...]:
    """Cut texts to a width so that different texts stay different.

    Texts that would become equal are cut in the middle instead; if that does not help, they are numbered.

    Example:
        >>> shortened_distinct(["down.block.attention.out", "up.block.attention.out"], 16, from_left=True)
        ('d….attention.out', 'u….attention.out')
    """
    cut = {text: shortened(text, width, from_left, ellipsis) for text in texts}
    by_result: dict[str, list[str]] = {}
    for text, short in cut.items():
        by_result.setdefault(short, []).append(text)
    for clashing in [group for group in by_result.values() if len(group) > 1]:
        used = {short for text, short in cut.items() if text not in clashing}
        cut |= dict(zip(clashing, _cut_distinct(clashing, width, used, ellipsis), strict=True))
    return tuple(cut[text] for text in texts)


def _cut_distinct(texts: Sequence[str], width: int, used: Collection[str], ellipsis: str) -> list[str]:
    """Cut the middle of texts so that the results differ from each other and from the ``used`` texts. Where that fails,
    they end with a number."""
    room = max(1, width - cell_len(ellipsis))
    for begin in range(1, room + 1):  # a short beginning leaves as much of the end as possible
        tail = room - begin
        candidates = []
        for text in texts:
            end = chop_cells(text[::-1], tail)[0][::-1] if tail else ""
            candidates.append(chop_cells(text, begin)[0] + ellipsis + end)
        if len(set(candidates)) == len(candidates) and not set(candidates) & set(used):
            return candidates
    ends = [f"{ellipsis}{number}" for number in range(1, len(texts) + 1)]
    return [chop_cells(text, max(1, width - cell_len(end)))[0] + end for text, end in zip(texts, ends, strict=True)]


def shortened(text: str, width: int, from_left: bool, ellipsis: str = "…") -> str:
    """Cut a text to a width at its beginning or its end, with an ellipsis there."""
    if cell_len(text) <= width:
        return text
    room = max(1, width - cell_len(ellipsis))
    if from_left:
        return ellipsis + chop_cells(text[::-1], room)[0][::-1]
    return chop_cells(text, room)[0] + ellipsis
