"""Points of a sweep between which cuDNN changes a convolution's engine, and its workspace by a factor, at the peak."""

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
"""Smallest change of a workspace to report, as a factor on top of the growth of the axis."""
_SHARE = 0.05
"""Smallest change of a workspace to report, as a share of the larger peak."""
_PLANNED = "planned workspaces"
"""Key of a row; no axis has a space in its name."""


@dataclass(frozen=True, slots=True)
class EngineChange(Printed):
    """Two neighboring points of an axis with different cuDNN engines for an op. Workspaces in bytes."""

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
    """Return the largest engine change between each pair of neighboring points along axes of numbers."""
    changes: list[EngineChange] = []
    rows_with_workspaces = [{**row, _PLANNED: workspaces} for row, workspaces in zip(rows, planned, strict=True)]
    for axis in axes:
        for at, points in along(axis, axes, rows_with_workspaces):
            if any(axis.measure(row[axis.name]) is None for row in points):
                continue
            for row, following in itertools.pairwise(points):
                growth = (axis.measure(following[axis.name]) or 0.0) / (axis.measure(row[axis.name]) or 1.0)
                change = _largest_change(axis.name, at, (row, following), growth)
                changes += [change] if change is not None else []
    return changes


def _largest_change(axis: str, at: Mapping[str, Any], rows: tuple[Row, Row], growth: float) -> EngineChange | None:
    """Return the change of the largest workspace between two neighboring points; None if none changes by much.

    ``growth``: ratio of their measures, by which workspaces grow with the same engine.
    """
    first, second = (row[_PLANNED] for row in rows)
    if [workspace.op for workspace in first] != [workspace.op for workspace in second]:  # other convolutions
        return None
    least = _SHARE * max(row["peak"] for row in rows)
    changed: list[tuple[PlannedWorkspace, PlannedWorkspace]] = []
    for a, b in zip(first, second, strict=True):
        as_expected = a.bytes * growth / FACTOR < b.bytes < a.bytes * growth * FACTOR
        is_large = abs(b.bytes - a.bytes) >= least and (a.at_peak or b.at_peak)
        if a.engine != b.engine and is_large and not as_expected:
            changed.append((a, b))
    if not changed:
        return None
    a, b = max(changed, key=lambda pair: abs(pair[1].bytes - pair[0].bytes))
    between = rows[0][axis], rows[1][axis]
    return EngineChange(axis, at, between, a.op, (a.engine, b.engine), (a.bytes, b.bytes))
