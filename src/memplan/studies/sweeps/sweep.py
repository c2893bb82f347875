"""Sweeps of a step over axes (`memplan.sweep`): bytes by cause at every point, with fits of their growth."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from memplan._display import Displayed
from memplan._json import Saved, Unreadable
from memplan.errors import InputError, MemplanError
from memplan.explanation.explain import device_of
from memplan.studies.axes.axes import Axis, axis_of, without_data
from memplan.studies.axes.ranges import values_of
from memplan.studies.axes.subject import Subject
from memplan.studies.sweeps.engine_changes import EngineChange, engine_changes_of
from memplan.studies.sweeps.fits import Crossing, Fit, crossings_of, fits_of, place_of_all, shown
from memplan.studies.sweeps.parallel import Progress, Task, record_points
from memplan.studies.sweeps.rows import KEYS, SIZES, check_rows
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.recording.session import Environment, Target, choose_target, public
from memplan.trace.step import StepOptions
from memplan.trace.trace import Trace

_LISTED = 6
"""Most points that a message lists."""


@dataclass(frozen=True)
class Point:
    """A single row of a sweep, for use as a side of a comparison."""

    target: str
    device: str
    values: Mapping[str, Any]
    """By axis."""
    row: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Its values as text: ``batch 8, precision bf16``."""
        return place_of_all(self.values)

    @property
    def title(self) -> str:
        """Name for messages and reports: ``resnet18 at batch 8, precision bf16``."""
        return f"{self.target} at {self.place}"


@dataclass(frozen=True, repr=False)
class Sweep(Saved, Displayed):
    """A step at the points of some axes. All sizes are bytes.

    A row has the value of each axis under its name; ``status``, "ok" or "failed", and ``reason``; ``peak``,
    ``reserved`` and ``needs`` (with the CUDA context) for the lower bounds of workspaces, and the same with ``_high``
    for the upper bounds; each cause at the peak; ``workspace_low`` and ``workspace_high``; ``fragmentation``. The
    causes and ``workspace_low`` add up to ``peak``. A row that failed has no bytes.

    Example:
        >>> sweep = memplan.sweep(model, {"batch": [8, 16]}, images, device="h100")
        >>> [row["peak"] for row in sweep.rows if row["status"] == "ok"]
        [68023808, 68955136]
    """

    FORMAT: ClassVar[str] = "memplan.sweep"
    AGAIN: ClassVar[str] = "Sweep again"

    title: str
    device: str
    axes: Mapping[str, tuple[Any, ...]]
    rows: list[dict[str, Any]]
    fits: tuple[Fit, ...]
    crossings: tuple[Crossing, ...]
    notes: tuple[str, ...] = ()
    points: int = 0
    """Number of points; larger than that of rows if Ctrl-C interrupted the sweep."""
    engine_changes: tuple[EngineChange, ...] = ()
    """Neighboring points between which cuDNN changes the engine, and a workspace at the peak by a factor."""

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C interrupted it before all points were done."""
        return len(self.rows) < self.points

    def point(self, number: int | None = None, /, **values: Any) -> Point:
        """Return the point with this number, counted from 1, or with these values of axes.

        Raises:
            InputError: no point or several points match, or the point failed.

        Example:
            >>> sweep = memplan.sweep(model, {"batch": [8, 16]}, images, device="h100")
            >>> memplan.compare(sweep.point(batch=8), sweep.point(batch=16)).difference
            931328
        """
        points = [Point(self.title, self.device, {name: row[name] for name in self.axes}, row) for row in self.rows]
        unknown = sorted(set(values) - set(self.axes))
        if unknown:
            raise InputError(f"the axis {unknown[0]!r} of {self.title}", expected=", ".join(self.axes), do="Name one")

        def is_at(point: Point, name: str, query: Any) -> bool:
            """Return whether a point has this value of an axis, or a value with this text."""
            value = point.values[name]
            return (value == query and type(value) is type(query)) or shown(value) == str(query)

        matches = [
            point for counted, point in enumerate(points, 1)
            if number in (None, counted) and all(is_at(point, name, value) for name, value in values.items())
        ]  # fmt: skip
        if len(matches) != 1:
            query = " and ".join(f"{name} {shown(value)}" for name, value in values.items())
            if number is not None:
                query = f"number {number}"
            listed = "; ".join(f"{counted}: {point.place}" for counted, point in enumerate(points[:_LISTED], 1))
            more = f"; and {len(points) - _LISTED} more" if len(points) > _LISTED else ""
            raise InputError(
                f"The sweep of {self.title} has {len(matches) or 'no'} point{'s' if len(matches) > 1 else ''}"
                + (f" with {query}" if query else ""),
                expected=f"one of {listed}{more}",
                do="Name it by its number, or by the value of each axis: sweep.json#3, sweep.json#batch=8",
            )
        (point,) = matches
        if point.row["status"] != "ok":
            raise InputError(
                f"{point.title} failed: {point.row['reason']}", expected="a point with bytes", do="Name another"
            )
        return point

    def _check(self) -> None:
        """Raise Unreadable for a sweep from a file whose rows do not match its axes, or are too many."""
        check_rows(self.rows, self.axes)
        if self.points < len(self.rows):
            raise Unreadable(f"has {len(self.rows)} rows of {self.points} points")


@public
def sweep(
    what: Any,
    axes: Mapping[str, Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    device: str | torch.device | None = None,
    autocast: torch.dtype | str | None = None,
    train: bool = True,
    dtype: torch.dtype | str | None = None,
    settings: str | None = None,
    assume: Mapping[str, float] | None = None,
    cudnn: Environment = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Record a step at every point of some axes, and fit how its bytes grow along each of them.

    Args:
        what: a module, a callable that makes one, or a ``build`` that returns a step.
        axes: values by the name of an axis: ``batch``; ``size`` or ``patch``, all spatial dimensions of image inputs
            and of the targets that share them (``128`` or ``"96x96x48"``); ``sequence``; ``precision`` ("fp32", "bf16",
            "fp16", "bf16-true", "fp16-true"); an argument of the callable; ``"encoder.*.kernel_size"``, an attribute
            of the layers that match a pattern, which are rebuilt with it, or ``".name"``, an attribute of the model
            itself. Values are an iterable or text: ``"1,2,4"``, ``"64:256:32"`` (with its end). The points are all
            combinations.
        inputs, kwargs, targets, loss, optimizer, device, autocast, train, dtype, settings, assume, cudnn: as for
            `memplan.explain`.
        jobs: number of parallel processes. None: one per core if the points take long enough. The rows do not depend
            on it.
        progress: called with the number of points done and of all points.

    Returns:
        A Sweep. A point that fails has its reason in its row. After Ctrl-C only finished points have rows.

    Raises:
        InputError: the step has no such axis, or an axis has no values.
        MemplanError: the error of the first point, if no point can be recorded.

    Example:
        >>> print(memplan.sweep(model, {"batch": [8, 16, 32]}, images, device="h100"))
        Sequential on h100: 3 points of batch
        ...
    """
    options = StepOptions(inputs, kwargs, targets, loss, optimizer, autocast, train, dtype).checked()
    subject = Subject(refuse_trace(what), options)
    target = choose_target(device_of(what) if device is None else device, assume, cudnn)
    chosen = [(axis_of(str(name), subject), values_of(values, str(name))) for name, values in dict(axes).items()]
    return sweep_subject(subject, chosen, target, settings=settings, jobs=jobs, progress=progress)


def sweep_subject(
    subject: Subject,
    axes: Sequence[tuple[Axis, tuple[Any, ...]]],
    target: Target,
    *,
    settings: str | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    title: str = "",
) -> Sweep:
    """Sweep a subject over axes with their values; see `sweep`. ``title`` replaces that of the subject."""
    _check_arguments(axes, jobs)
    subject = without_data(subject)
    for axis, values in axes:
        for value in values:
            axis.at(subject, value)  # raises before anything is recorded
    only_axes = [axis for axis, _ in axes]
    values_of_axes = {axis.name: values for axis, values in axes}
    points = [dict(zip(values_of_axes, point, strict=True)) for point in itertools.product(*values_of_axes.values())]
    tasks: list[Task] = []
    for point in points:
        changed = subject
        for axis, _ in axes:
            changed = axis.at(changed, point[axis.name])
        tasks.append((changed, target, settings))
    outcomes = record_points(tasks, jobs, progress or (lambda done, total: None))
    numbers = sorted(outcomes)  # fewer than points after Ctrl-C
    errors = [outcomes[number].error for number in numbers]
    rows: list[dict[str, Any]] = []
    for number, error in zip(numbers, errors, strict=True):
        figures = outcomes[number].bytes
        reason = "" if error is None else error.found
        row = {**points[number], "status": "ok" if error is None else "failed", "reason": reason}
        rows.append(row if figures is None else row | figures.row())
    if all(errors) and len(errors) == len(points):
        raise _all_failed(errors[0], points)
    notes = dict.fromkeys(note for number in numbers for note in outcomes[number].notes)
    return Sweep(
        title or subject.title, target.name, values_of_axes, rows, tuple(fits_of(only_axes, rows)),
        tuple(crossings_of(only_axes, rows)), tuple(notes), len(points),
        tuple(engine_changes_of(only_axes, rows, [outcomes[number].planned for number in numbers])),
    )  # fmt: skip


def refuse_trace(what: Any) -> Any:
    """Return ``what`` unless it is a Trace, which cannot be recorded again with other values. Raises InputError if it
    is a Trace."""
    if isinstance(what, Trace):
        raise InputError(
            "a Trace, whose step is recorded",
            expected="what can be recorded again: a module or a callable",
            do="Pass it",
        )
    return what


def _check_arguments(axes: Sequence[tuple[Axis, tuple[Any, ...]]], jobs: int | None) -> None:
    """Raise InputError if there is no axis, an axis is repeated or named like a key of rows, or ``jobs`` is invalid."""
    if not axes:
        raise InputError("no axis to sweep over", expected="one at least, such as batch", do="Give its values")
    names = [axis.name for axis, _ in axes]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(f"the axis {repeated} twice", expected="each axis once", do="Join its values")
    reserved_name = next((name for name in names if name in (*KEYS, *SIZES)), None)
    if reserved_name is not None:
        raise InputError(
            f"the axis {reserved_name}, and rows hold something else by that name",
            expected="an argument of another name",
            do="Vary a function that calls yours with it under another name",
        )
    if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1):
        raise InputError(f"jobs={jobs!r}", expected="a number of processes, 1 or more", do="Leave it out for all cores")


def _all_failed(error: MemplanError | None, points: Sequence[Mapping[str, Any]]) -> MemplanError:
    """Return the error of a sweep without a successful point: that of its first point."""
    assert error is not None, "each point failed"
    first = error.about(f"at {place_of_all(points[0])}")
    if len(points) == 1:
        return first
    return InputError(
        f"none of the {len(points)} points can be recorded; the first, {first.found}",
        expected=error.expected, do=error.do,
    )  # fmt: skip
