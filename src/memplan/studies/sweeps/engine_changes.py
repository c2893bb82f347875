"""Where along an axis cuDNN plans another engine for a convolution at the peak, with another workspace by a factor."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memplan._bytes import format_bytes
from memplan._display import Printed
from memplan.studies.axes.axes import Axis
from memplan.studies.sweeps.fits import Row, along, place_of, shown
from memplan.studies.sweeps.points import PlannedWorkspace

FACTOR = 1.5
"""Smallest change of a workspace that is named, beside how the axis itself grows."""
_SHARE = 0.05
"""Of the larger peak: the smallest change that is named."""
_PLANNED = "planned workspaces"
"""Key of a row; no axis has a space in its name."""


@dataclass(frozen=True, slots=True)
class EngineChange(Printed):
    """Two neighboring points of an axis with different engines of cuDNN. Workspaces in bytes."""

    axis: str
    at: Mapping[str, Any]
    """Values of the other axes."""
    between: tuple[Any, Any]
    op: str
    engines: tuple[str, str]
    workspaces: tuple[int, int]

    def __str__(self) -> str:
        (below, above), (first, second) = map(shown, self.between), self.engines
        before, after = map(format_bytes, self.workspaces)
        return (
            f"{place_of(self.axis, self.at)}: at {above} cuDNN plans {second} with {after} of workspace for {self.op}, "
            f"at {below} {first} with {before}"
        )


def engine_changes_of(
    axes: Sequence[Axis], rows: Sequence[Row], planned: Sequence[tuple[PlannedWorkspace, ...]]
) -> list[EngineChange]:
    """Find every pair of neighboring points along an axis of numbers between which cuDNN's plan at the peak changes.

    ``planned`` has the workspaces of each row's point. Of a pair the largest change is returned.
    """
    found: list[EngineChange] = []
    known = [{**row, _PLANNED: one} for row, one in zip(rows, planned, strict=True)]
    for axis in axes:
        for at, points in along(axis, axes, known):
            if any(axis.measure(row[axis.name]) is None for row in points):
                continue
            for row, following in itertools.pairwise(points):
                grown = (axis.measure(following[axis.name]) or 0.0) / (axis.measure(row[axis.name]) or 1.0)
                found += _largest(axis.name, at, (row, following), grown)
    return found


def _largest(axis: str, at: Mapping[str, Any], rows: tuple[Row, Row], grown: float) -> list[EngineChange]:
    before, after = (row[_PLANNED] for row in rows)
    if [one.op for one in before] != [one.op for one in after]:  # not the same convolutions
        return []
    least = _SHARE * max(row["peak"] for row in rows)
    changed = [
        (one, other) for one, other in zip(before, after, strict=True)
        if one.engine != other.engine and (one.at_peak or other.at_peak)
        and abs(other.bytes - one.bytes) >= least
        and not one.bytes * grown / FACTOR < other.bytes < one.bytes * grown * FACTOR
    ]  # fmt: skip
    if not changed:
        return []
    one, other = max(changed, key=lambda pair: abs(pair[1].bytes - pair[0].bytes))
    between, sizes = (rows[0][axis], rows[1][axis]), (one.bytes, other.bytes)
    return [EngineChange(axis, at, between, one.op, (one.engine, other.engine), sizes)]
