"""Fits of a sweep: bytes as a line or parabola along an axis, and where another part becomes the largest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy

from memplan._bytes import format_bytes
from memplan._display import Printed
from memplan._json import Signed, Unreadable
from memplan.studies.axes.axes import Argument, Axis, Batch, Layers, Size
from memplan.studies.sweeps.points import KNOWN, PARTS

STRAIGHT = 0.01
"""Residual up to which points lie on a line."""

BENT = 0.05
"""Residual above which a line means nothing: its numbers are not printed."""

_CLEAR = 0.05
"""Share of the peak by which a part must lead on one side of a crossing; below it the two parts count as equal."""

_NOTHING = 1e-6
"""Bytes below which a slope is a rounding error of floating point."""

FITTED = ("peak", "reserved", *KNOWN, "rounding", "workspace_low", "workspace_high", "fragmentation")
"""Keys of a row to fit. ``peak`` is the sum of the causes and ``workspace_low``, and so is its line."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """``fixed + slope * measure ** power`` bytes, with the measure in units of the axis and the power of the `Fit`."""

    fixed: Signed
    slope: Signed
    residual: float = 0.0
    """Largest error of a point, as a share of the largest point."""


@dataclass(frozen=True, slots=True)
class Square:
    """``fixed + slope * measure + square * measure ** 2`` bytes."""

    fixed: Signed
    slope: Signed
    square: Signed
    residual: float


@dataclass(frozen=True, slots=True)
class Fit(Printed):
    """Growth of bytes along an axis at fixed values of the other axes: least-squares lines through the points."""

    DERIVED: ClassVar[tuple[str, ...]] = ("holds",)

    axis: str
    unit: str
    """Unit of the measure: sample, pixel, voxel, token, or the name of the axis."""
    at: Mapping[str, Any]
    """Values of the other axes."""
    values: tuple[Any, ...]
    """Values of the fitted points. The first points are left out if they lie on another line, because the peak is at
    another moment of the step there."""
    power: int
    """1; for arguments and attributes, whose meaning is unknown, 2 or 3 if that fits and a line does not."""
    lines: Mapping[str, Line]
    """By key of a row: the peak, reserved, every cause."""
    residual: float
    """Largest error of the line of the peak, as a share of the point's peak."""
    square: Square | None = None
    """Parabola of the peak, if that fits and a line does not."""
    least: int = 0
    """The smallest peak of these points, in bytes."""

    def _check(self) -> None:
        """Raise Unreadable for a fit from a file without a line of the peak, without values, or with a power above
        3."""
        if self.power not in (1, 2, 3) or "peak" not in self.lines or not self.values:
            raise Unreadable("has no line of the peak, no values, or a power above 3")

    @property
    def holds(self) -> bool:
        """Whether the peaks are within 5 % of the line, or on the parabola. If not, its numbers mean nothing."""
        return self.residual <= BENT or self.square is not None

    @property
    def fixed(self) -> float:
        """Bytes of the peak that do not depend on the axis."""
        return self.lines["peak"].fixed

    @property
    def slope(self) -> float:
        """Bytes by which each unit of the measure raises the peak."""
        return self.lines["peak"].slope

    def __str__(self) -> str:
        prefix = f"{place_of(self.axis, self.at)}, {shown(self.values[0])} to {shown(self.values[-1])}: "
        each = f"a {self.unit}" if self.unit in _COUNTED_UNITS else f"times {self.unit}"  # or the name of an axis
        if self.square is not None:
            square = self.square
            return (
                f"{prefix}no line, but with its square: {self._fixed(square.fixed)}, {_bytes(square.slope)} {each}, "
                f"{_bytes(square.square)} {each} squared, residual {_percent(square.residual)}"
            )
        if not self.holds:
            return f"{prefix}no straight line: the best is up to {_percent(self.residual)} off the peaks"
        power = {1: "", 2: " squared", 3: " cubed"}[self.power]
        line = f"{prefix}{self._fixed(self.fixed)}, {_bytes(self.slope)} {each}{power}"
        return f"{line} (from two points)" if len(self.values) == 2 else f"{line}, residual {_percent(self.residual)}"

    def _fixed(self, fixed: float) -> str:
        """Return the words for the fixed part. Below 0 there is none: such a line only holds between the points."""
        if fixed > -1:
            return f"fixed {_bytes(max(fixed, 0.0))}"
        if -fixed <= STRAIGHT * self.least:
            return "fixed about 0 B"
        return f"no fixed part (the line begins at {_bytes(fixed)})"


@dataclass(frozen=True, slots=True)
class Crossing(Printed):
    """The place on an axis at which another part becomes the largest."""

    axis: str
    at: Mapping[str, Any]
    below: str
    above: str
    between: tuple[Any, Any]
    """Values of the neighboring points."""
    value: Signed | None
    """Interpolated value; None if values of the axis are not single numbers."""

    def _check(self) -> None:
        """Raise Unreadable for a crossing from a file with unknown parts."""
        if unknown := {self.below, self.above} - LABELS.keys():
            raise Unreadable(f"names the part {min(unknown)!r:.40}, which is unknown")

    def __str__(self) -> str:
        about = f"below about {self.value:.3g}" if self.value is not None else "below"
        return (
            f"{place_of(self.axis, self.at)}: {about} {LABELS[self.below]} are the largest part, above it "
            f"{LABELS[self.above]} (between {' and '.join(shown(value) for value in self.between)})"
        )


LABELS = {
    "weights": "weights",
    "inputs": "inputs",
    "saved": "saved activations",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "temporaries": "temporaries",
    "workspace": "workspaces",
    "rounding": "roundings",
}


def fits_of(axes: Sequence[Axis], rows: Sequence[Row]) -> list[Fit]:
    """Return a fit for every axis of numbers and every combination of the others with at least two points."""
    fits: list[Fit] = []
    for axis in axes:
        for at, points in along(axis, axes, rows):
            measures = [axis.measure(row[axis.name]) for row in points]
            if len(points) >= 2 and all(measure is not None for measure in measures):
                fits.append(_fit(axis, at, points, numpy.array(measures, dtype=float)))
    return fits


def crossings_of(axes: Sequence[Axis], rows: Sequence[Row]) -> list[Crossing]:
    """Return the crossings along every axis of numbers."""
    crossings: list[Crossing] = []
    for axis in axes:
        for at, points in along(axis, axes, rows):
            if all(axis.measure(row[axis.name]) is not None for row in points):
                crossings += _crossings(axis, at, points)
    return crossings


def part_bytes(row: Row) -> dict[str, int]:
    """Return a row's bytes by part, with the upper bounds of workspaces."""
    return {
        part: row["workspace_high"] if part == "workspace" else sum(row[cause] for cause in causes)
        for part, causes in PARTS.items()
    }


def along(axis: Axis, axes: Sequence[Axis], rows: Sequence[Row]) -> list[tuple[dict[str, Any], list[Row]]]:
    """Group rows by the values of the other axes: return (these values by name, rows sorted by this axis's measure).

    Rows that failed are left out.
    """
    groups = rows_along(axis.name, [other.name for other in axes], rows)
    return [(at, sorted(points, key=lambda row: axis.measure(row[axis.name]) or 0.0)) for at, points in groups]


def rows_along(axis: str, axes: Iterable[str], rows: Sequence[Row]) -> list[tuple[dict[str, Any], list[Row]]]:
    """Group the rows that did not fail by the values of all axes other than ``axis``: return (these values by name,
    rows)."""
    groups: list[tuple[dict[str, Any], list[Row]]] = []
    others = [name for name in axes if name != axis]
    for row in rows:
        if row["status"] == "ok":
            at = {name: row[name] for name in others}
            for values, points in groups:  # values can be lists, which are not hashable
                if values == at:
                    points.append(row)
                    break
            else:
                groups.append((at, [row]))
    return groups


def _fit(axis: Axis, at: dict[str, Any], points: list[Row], measures: Any) -> Fit:
    """Return the fit of the points of an axis: a line in some power of the measure, and a parabola if no line is
    straight.
    """
    peaks = _column(points, "peak")
    powers = (1, 2, 3) if isinstance(axis, (Argument, Layers)) else (1,)
    first, power = _choose_line(measures, peaks, powers)
    fitted, x = points[first:], measures[first:] ** power
    _, residual = _fit_line(x, peaks[first:])
    lines = {name: _fit_line(x, _column(fitted, name))[0] for name in FITTED}
    bends = residual > STRAIGHT and len(points) >= 5 and not isinstance(axis, Batch)
    square = _fit_parabola(measures, peaks) if bends else None
    values = tuple(row[axis.name] for row in (points if square else fitted))
    least = min(row["peak"] for row in points if row[axis.name] in values)
    return Fit(axis.name, axis.unit, at, values, power, lines, residual, square, least)


def _choose_line(measures: Any, peaks: Any, powers: Sequence[int]) -> tuple[int, int]:
    """Choose the points that are fitted by a line, and the power of the measure in which it is a line.

    Returns (index of the first of these points, power). The first choice that is straight is taken:

    - all points, in each of ``powers`` in turn;
    - in power 1, all but the first point, all but the first two, and so on, as long as three are left.

    If none is straight: all points, in the power with the smallest residual.
    """
    if len(peaks) == 2:
        return 0, 1
    candidates = [(0, power, _fit_line(measures**power, peaks)[1]) for power in powers]
    candidates += [(first, 1, _fit_line(measures[first:], peaks[first:])[1]) for first in range(1, len(peaks) - 2)]
    straight = next((candidate for candidate in candidates if candidate[2] <= STRAIGHT), None)
    first, power, _ = straight or min(candidates[: len(powers)], key=lambda candidate: candidate[2])
    return first, power


def _column(rows: Sequence[Row], name: str) -> Any:
    return numpy.array([row[name] for row in rows], dtype=float)


def _fit_line(x: Any, y: Any) -> tuple[Line, float]:
    """Return the least-squares line through points ``x``, ``y``, and its largest error as a share of the point."""
    scale = float(numpy.abs(x).max()) or 1.0  # without it large powers lose digits
    slope, fixed = numpy.polyfit(x / scale, y, 1) if numpy.ptp(x) else (0.0, float(y.mean()))
    errors = numpy.abs(fixed + slope * x / scale - y)
    share = float(errors.max() / max(float(numpy.abs(y).max()), 1.0))
    return Line(float(fixed), float(slope / scale), share), _residual(fixed + slope * x / scale, y)


def _fit_parabola(x: Any, y: Any) -> Square | None:
    """Return the least-squares parabola; None if it opens downwards, or points are too far from it."""
    scale = float(x.max())  # without it sums of powers lose digits
    square, slope, fixed = numpy.polyfit(x / scale, y, 2)
    residual = _residual(fixed + slope * (x / scale) + square * (x / scale) ** 2, y)
    if residual > STRAIGHT or square <= 0:
        return None
    return Square(float(fixed), float(slope / scale), float(square / scale**2), residual)


def _residual(fitted: Any, y: Any) -> float:
    return float(numpy.max(numpy.abs(fitted - y) / numpy.maximum(numpy.abs(y), 1)))


def _crossings(axis: Axis, at: dict[str, Any], points: list[Row]) -> list[Crossing]:
    """Return the places between neighboring points of an axis at which another part becomes the largest."""
    crossings: list[Crossing] = []
    for row, following in itertools.pairwise(points):
        before, after = part_bytes(row), part_bytes(following)
        below, above = max(before, key=before.__getitem__), max(after, key=after.__getitem__)
        if below == above:
            continue
        start, end = axis.measure(row[axis.name]) or 0.0, axis.measure(following[axis.name]) or 0.0
        # by how much each of the two parts leads, on its side of the crossing
        ahead, behind = before[below] - before[above], after[above] - after[below]
        if max(ahead / row["peak_high"], behind / following["peak_high"]) < _CLEAR:
            continue
        measure = start + (end - start) * ahead / (ahead + behind) if ahead + behind else start
        values = row[axis.name], following[axis.name]
        crossings.append(Crossing(axis.name, at, below, above, values, _value_of_measure(axis, measure, values)))
    return crossings


def _value_of_measure(axis: Axis, measure: float, values: Sequence[Any]) -> float | None:
    """Return the value of an axis at a measure, which is the number that bytes grow with: of a size all pixels or
    voxels, of other axes the value itself. None if values of the axis are not single numbers."""
    if not all(isinstance(value, (int, float)) for value in values) or (isinstance(axis, Size) and axis.aspect):
        return None
    return measure ** (1 / axis.dims) if isinstance(axis, Size) else measure  # a size is equal in all dimensions


_COUNTED_UNITS = ("sample", "position", "pixel", "voxel", "token")


def _bytes(number: float) -> str:
    """Return bytes as text; a few with two digits, since slopes can be fractions of a byte."""
    if abs(number) < _NOTHING:
        return "0 B"
    return format_bytes(round(number)) if abs(number) >= 10 else f"{number:.2g} B"


def _percent(share: float) -> str:
    """Return a share as text: ``1.5 %``."""
    return f"{100 * share:.1f} %"


def place_of(axis: str, at: Mapping[str, Any]) -> str:
    """Return an axis with the values of the others: ``batch (size 96)``."""
    return f"{axis} ({place_of_all(at)})" if at else axis


def place_of_all(values: Mapping[str, Any]) -> str:
    """Return the values of all axes as text: ``batch 8, precision bf16``."""
    return ", ".join(f"{name} {shown(value)}" for name, value in values.items())


def shown(value: Any) -> str:
    """Return a value of an axis as text: ``96x96x48`` for a tuple."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
