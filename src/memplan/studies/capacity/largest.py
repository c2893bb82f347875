"""The largest batch, size or sequence that fits a card or a budget (`memplan.largest`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan._json import Written, named
from memplan.errors import BudgetError, InputError, MemplanError, StepError
from memplan.explanation.explain import device_of
from memplan.simulation.allocator.settings import parse_settings
from memplan.studies.axes.axes import Axis, Length, Size, axis_of, value_of, without_data
from memplan.studies.axes.sliding_window import Window
from memplan.studies.axes.subject import Subject
from memplan.studies.capacity.after_planning import PlanFigures, plan_step
from memplan.studies.capacity.bisection import SearchResult, last_fitting
from memplan.studies.capacity.extrapolation import MOST, Sample
from memplan.studies.capacity.limit import Case, Room, room_of
from memplan.studies.sweeps.fits import LABELS, part_bytes
from memplan.studies.sweeps.points import Bytes, record_point
from memplan.studies.sweeps.sweep import refuse_trace
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.recording.session import Environment, public
from memplan.trace.recording.values.known_indices import NoSuchRow
from memplan.trace.step import StepOptions
from memplan.trace.trace import Trace

_CLEARLY = 1.02
"""Ratio of needs above which growth is not monotonic; the rounding of segments alone stays below it."""


@dataclass(frozen=True)
class Tried:
    """A value that was recorded or planned, or whose recording failed."""

    value: int
    fits: bool
    need: int
    """Bytes; 0 if the recording failed."""
    bytes: Bytes | None = None
    plan: PlanFigures | None = None
    reason: str = ""
    """Why the recording failed; empty if it did not."""

    def row(self) -> dict[str, Any]:
        """Return the bytes and the plan as a row of JSON; of a failed recording only the reason."""
        if self.reason:
            return named(self, "value", "fits", "reason")
        row = named(self, "value", "fits", "reason", "need")
        if self.bytes is not None:
            row |= self.bytes.row() | {"aggregation": self.bytes.aggregation, "needs_band": self.bytes.needs_band}
        if self.plan is not None:
            row |= {"least_budget": self.plan.least, **named(self.plan, "seconds", "step_seconds")}
        return row


@dataclass(frozen=True, repr=False)
class Largest(Written, Displayed):
    """The largest value that fits, and the recordings behind it. ``value`` is 0 if no recorded value fits."""

    FORMAT: ClassVar[str] = "memplan.largest"

    title: str
    axis: str
    unit: str
    room: Room
    value: int
    sizes: tuple[int, ...]
    """Spatial dimensions at ``value``; empty for other axes than sizes."""
    tried: tuple[Tried, ...]
    """In order of the search; each is one recording, or one plan."""
    step: int = 1
    """``value`` is a multiple of it: ``divisible``, or a multiple of that to which the model is limited."""
    most: int | None = None
    end: int | None = None
    """The next value, which does not fit or failed; None if the search ended at ``most``."""
    planned: Largest | None = None
    """The largest value after planning (``fit=True``)."""
    notes: tuple[str, ...] = ()

    def at(self, value: int | None) -> Tried | None:
        """Return the recording of a value; None if it was not recorded."""
        return next((trial for trial in self.tried if trial.value == value), None)

    @property
    def recorded(self) -> tuple[Tried, ...]:
        """Values whose recording did not fail."""
        return tuple(trial for trial in self.tried if not trial.reason)

    @property
    def failed(self) -> tuple[Tried, ...]:
        """Values whose recording failed."""
        return tuple(trial for trial in self.tried if trial.reason)

    @property
    def answer(self) -> Tried | None:
        """The recording of ``value``; None if that is 0."""
        return self.at(self.value)

    @property
    def following(self) -> Tried | None:
        """The recording of ``end``; None if there is none."""
        return self.at(self.end)

    @property
    def least(self) -> Tried:
        """The recording of the smallest value."""
        return min(self.recorded, key=lambda trial: trial.value)

    @property
    def unsteady(self) -> tuple[int, int] | None:
        """(smaller, larger) values of which the smaller needs more memory, or alone does not fit; None if there are
        none."""
        ordered = sorted(self.recorded, key=lambda trial: trial.value)
        for a, b in itertools.combinations(ordered, 2):
            if a.need > _CLEARLY * b.need or (b.fits and not a.fits):
                return a.value, b.value
        return None

    def _plain(self) -> dict[str, Any]:
        return named(self, "title", "axis", "value", "sizes", "step", "notes", "planned") | {
            "tried": [trial.row() for trial in self.tried],
            "following": self.end,
            "likely": self.likely,
            "device": self.room.target.name,
            "limit": self.room.limit,
            "workspace": self.room.case,
        }

    @property
    def likely(self) -> int | None:
        """The largest value that fits in 95 % of steps, by the upper end of its band.

        None if bytes have no band, or if the answer fits only as the allocator gives cached segments back. Between two
        recorded values the upper end is interpolated by a line.
        """
        if self.answer is None or self.answer.need > self.room.limit:
            return None
        bands = {trial.value: trial.bytes.needs_band for trial in self.recorded if trial.bytes is not None}
        ends = sorted((value, band[1]) for value, band in bands.items() if band is not None and value <= self.value)
        if not ends or ends[-1][0] != self.value:
            return None
        if ends[-1][1] <= self.room.limit:
            return self.value
        # (value, bytes) of the last upper end that fits, and of the next
        fitting = [(value, size) for value, size in ends if size <= self.room.limit]
        low, least = fitting[-1] if fitting else (0, 0)
        high, most = next((value, size) for value, size in ends if value > low)
        between = low + (high - low) * (self.room.limit - least) // (most - least)
        return between // self.step * self.step

    def largest_parts(self, trial: Tried) -> str:
        """Return the three largest parts of a recorded value's need: ``1.2 GiB saved activations, ...``.

        Workspaces count only if the room is that of the highest case. The stitched output of sliding windows
        (``aggregation``), which is among the temporaries, is a part of its own.
        """
        if trial.bytes is None:
            return f"{format_bytes(trial.need)} even when planned"
        parts = part_bytes({**trial.bytes.row()})
        parts = {LABELS[part]: size for part, size in parts.items() if self.room.case == "high" or part != "workspace"}
        if trial.bytes.workspace_low != trial.bytes.workspace_high and LABELS["workspace"] in parts:
            parts["workspaces (at their most)"] = parts.pop(LABELS["workspace"])
        overhead = trial.need - sum(parts.values())
        parts |= {"CUDA context and segments": overhead} if overhead > 0 else {}
        if trial.bytes.aggregation:
            parts[LABELS["temporaries"]] -= trial.bytes.aggregation
            parts["aggregation of the volume"] = trial.bytes.aggregation
        largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
        return ", ".join(f"{format_bytes(size)} {name}" for name, size in largest if size > 0)


@public
def largest(
    what: Any,
    axis: str,
    *inputs: Any,
    device: str | torch.device | None = None,
    budget: Any = None,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    autocast: torch.dtype | str | None = None,
    train: bool = True,
    dtype: torch.dtype | str | None = None,
    settings: str | None = None,
    divisible: int = 1,
    aspect: Sequence[float] | None = None,
    margin: float | str = 0.0,
    most: int | None = None,
    workspace: Case = "high",
    fit: bool = False,
    window: Window | None = None,
    assume: Mapping[str, float] | None = None,
    cudnn: Environment = None,
    world: int | None = None,
    rank: int = 0,
) -> int:
    """Find the largest batch, size, patch or sequence that fits a card or a budget, by recordings alone.

    Both the answer and the next value are recorded: the answer fits, the next value does not, or its step raises. The
    first value at which the step raises starts a search for the number whose multiples work, such as the
    downsampling factor of a U-Net; only these are considered from then on.

    Args:
        what: a module, a callable that makes one, or a ``build`` with an argument for the axis.
        axis: ``"batch"``; ``"size"`` or ``"patch"``, all spatial dimensions of image inputs and of what shares them;
            ``"sequence"``; or the name of an argument of the callable.
        inputs, kwargs, targets, loss, optimizer, autocast, train, dtype, settings, assume, cudnn: as for `explain`.
        device: a card of the catalogue, whose capacity is the default of ``budget``; or ``"cpu"``, which needs one.
        budget: bytes ("20 GiB"), or a card's name. Bounds allocated bytes; on a card, reserved and the CUDA context.
        divisible, most: the answer is a multiple of ``divisible``, and at most ``most``.
        aspect: factors of a size, one for each dimension: (1, 1, 0.5).
        margin: share of the budget to leave free: 0.05, "5%".
        workspace: which bound to count of cuDNN workspaces known as an interval: "high" or "low".
        fit: find the largest after planning (`memplan.plan`).
        window: a `memplan.studies.axes.sliding_window.Window`, to infer a volume in patches.
        world, rank: the step is one rank of several, as for `explain`.

    Raises:
        BudgetError: not even the smallest value fits; with the largest parts of its need.
        InputError, StepError: the step has no such axis, there is no card and no budget, or no value can be recorded.

    Example:
        >>> memplan.largest(model, "batch", images, optimizer=torch.optim.AdamW, device="rtx4090")
        209152
    """
    options = StepOptions(inputs, kwargs, targets, loss, optimizer, autocast, train, dtype).checked()
    subject = Subject(refuse_trace(what), options, window=window.checked() if window is not None else None)
    device = device_of(what) if device is None and budget is None else device
    if fit and world is not None:
        raise InputError("fit with a world", expected="a step of one process", do="Leave one out")
    room = room_of(device, budget, margin, workspace, assume, cudnn, world, rank)
    search = find_largest(
        subject, axis, room, divisible=divisible, aspect=aspect, most=most, fit=fit, settings=settings
    )
    search = search.planned or search
    if search.value == 0:
        raise does_not_fit(search)
    return search.value


def find_largest(
    subject: Subject,
    name: str,
    room: Room,
    *,
    divisible: int = 1,
    aspect: Sequence[float] | None = None,
    most: int | None = None,
    fit: bool = False,
    settings: str | None = None,
    title: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> Largest:
    """Search for the largest value of the axis ``name`` that fits ``room``, and return all recordings; ``value`` is 0
    if nothing fits. The other arguments are those of `largest`."""
    axis = _axis_with_aspect(subject, name, divisible, aspect)
    subject = without_data(subject)
    start = _current_value(subject, axis, divisible)
    if most is not None and most < divisible:
        raise InputError(f"most={most!r}", expected=f"{divisible} or more", do="Raise it, or leave it out")
    notes: dict[str, None] = {}
    allocator = parse_settings(settings or "")

    def record(value: int) -> tuple[Tried, Trace | None]:
        """Record the step at a value of the axis. Raises the error of a step that cannot be recorded."""
        progress(f"{name} {value}")
        outcome = record_point(axis.at(subject, value), room.target, settings, keep=True)
        if outcome.bytes is None:
            assert outcome.error is not None, "a point has bytes or an error"
            raise outcome.error
        notes.update(dict.fromkeys(outcome.notes))
        return Tried(value, room.fits(outcome.bytes), room.need(outcome.bytes), outcome.bytes), outcome.trace

    recorder = _Recorder(record, axis, divisible)
    begin = max(1, start // divisible)  # the search counts in multiples of `divisible`

    def guess_fits(trace: Trace) -> bool:
        """Return whether a step that was extrapolated from recordings fits. It only guides the choice of the next value
        to record; whether a recorded step fits, `record` says."""
        return room.holds(trace, allocator)

    try:
        result = last_fitting(
            recorder, recorder.measure, room.limit, begin, _last_position(most, divisible), guess_fits
        )
    except NoSuchRow as error:  # of position embeddings: search again up to their number
        most = error.rows
        notes[f"the model has a table of {most} positions: it takes no more"] = None
        result = last_fitting(
            recorder, recorder.measure, room.limit, begin, _last_position(most, divisible), guess_fits
        )
    unplanned = _search_outcome(result, recorder, title or subject.title, room, most, tuple(notes))
    return replace(unplanned, planned=_find_planned(unplanned, subject, axis, progress)) if fit else unplanned


def _find_planned(unplanned: Largest, subject: Subject, axis: Axis, progress: Callable[[str], None]) -> Largest:
    """Search again, for the largest value that fits with a plan."""
    room = unplanned.room

    def record(value: int) -> tuple[Tried, None]:
        """Plan the step at a value of the axis."""
        progress(f"{unplanned.axis} {value}, planned")
        plan = plan_step(axis.at(subject, value), room.target, room.limit)
        return Tried(value, plan.fits, plan.least, bytes=None, plan=plan), None

    recorder = _Recorder(record, axis, unplanned.step)
    begin, last = max(1, unplanned.value // unplanned.step), _last_position(unplanned.most, unplanned.step)
    result = last_fitting(recorder, recorder.measure, room.for_plans, begin, last)
    return _search_outcome(result, recorder, unplanned.title, room, unplanned.most, ())


def _last_position(most: int | None, divisible: int) -> int:
    """Return the last position to consider; a position is a value of the axis divided by ``divisible``."""
    return MOST if most is None else most // divisible


@dataclass
class _Recorder:
    """Records the step at positions of an axis, each once; a value is ``divisible`` times its position."""

    record: Callable[[int], tuple[Tried, Trace | None]]
    """Records or plans a value. Raises MemplanError if it cannot."""
    axis: Axis
    divisible: int
    tried: dict[int, Tried] = field(default_factory=dict)
    """By value."""
    samples: dict[int, Sample | None] = field(default_factory=dict)
    """By position; None if the recording failed."""
    error: StepError | None = None
    """The first error."""

    def measure(self, position: int) -> float:
        """Return the number that bytes grow with, at a position: a value of the axis divided by ``divisible``."""
        measure = self.axis.measure(position * self.divisible)
        assert measure is not None, "the axis is one of numbers"
        return measure

    def __call__(self, position: int) -> Sample | None:
        """Return the recording at a position; None if it failed.

        Raises:
            NoSuchRow: the model has fewer position embeddings than the value.
            MemplanError: the first recording failed, and not because the step raised.
        """
        if position not in self.samples:
            self.samples[position] = self._sample(position)
        return self.samples[position]

    def _sample(self, position: int) -> Sample | None:
        """Record the step at a position of the search; None if it raises."""
        value = position * self.divisible
        try:
            self.tried[value], trace = self.record(value)
        except MemplanError as error:
            if not self.tried and not isinstance(error, StepError):
                raise
            if isinstance(error, StepError):
                self.error = self.error or error
            self.tried[value] = Tried(value, fits=False, need=0, reason=error.found)
            cause = error.__cause__
            if isinstance(self.axis, Length) and isinstance(cause, NoSuchRow) and self.divisible <= cause.rows < value:
                raise cause from error  # the search is repeated, up to the number of position embeddings
            return None
        return Sample(position, self.measure(position), self.tried[value].need, self.tried[value].fits, trace)


def _search_outcome(
    result: SearchResult, recorder: _Recorder, title: str, room: Room, most: int | None, notes: tuple[str, ...]
) -> Largest:
    """Return the result of a search.

    Raises:
        StepError: nothing was recorded.
        InputError: the need does not grow along the axis.
    """
    axis, divisible, tried = recorder.axis, recorder.divisible, tuple(recorder.tried.values())
    if not result.samples:
        raise _error_of_all(recorder.error, axis.name, tried)
    end, step = result.following, divisible * result.step
    if end is None and result.last + result.step <= _last_position(most, divisible):
        raise _flat_axis_error(axis.name, result, divisible)
    value = result.last * divisible
    sizes = axis.sizes(value) if isinstance(axis, Size) and value else ()
    return Largest(
        title, axis.name, axis.unit, room, value, sizes, tried, step, most,
        end=None if end is None else end * divisible, notes=notes,
    )  # fmt: skip


def does_not_fit(search: Largest) -> BudgetError:
    """Return the error to raise if no value fits."""
    least = search.least
    failed = [str(trial.value) for trial in search.failed if trial.value < least.value]
    return BudgetError(
        f"{search.title} does not fit at {search.axis} {least.value}: it needs {format_bytes(least.need)} of "
        f"{format_bytes(search.room.limit)}" + (f" ({', '.join(failed)} cannot be recorded)" if failed else ""),
        expected=f"a budget of {format_bytes(least.need)} at least: {search.largest_parts(least)}",
        do="Give more, vary something else, or plan the step (fit=True, --fit)",
        smallest_budget=least.need,
    )


def _error_of_all(error: StepError | None, name: str, tried: Sequence[Tried]) -> StepError:
    """Return the error of a search in which every recording failed: the first error, with the values that failed."""
    assert error is not None, "the first recording failed, as the step raised"
    if len(tried) == 1:
        return error
    others = ", ".join(str(trial.value) for trial in tried[1:])
    joined = StepError(
        f"{error.found}; so {name} {tried[0].value} cannot be recorded, nor can {others}",
        expected=error.expected, do=error.do,
    )  # fmt: skip
    joined.layer, joined.where = error.layer, error.where  # not as arguments: the text has them already
    joined.__cause__ = error.__cause__
    return joined


def _axis_with_aspect(subject: Subject, name: str, divisible: int, aspect: Sequence[float] | None) -> Axis:
    """Return the axis of this name; if it is a size, with the aspect of its dimensions. Raises InputError."""
    if isinstance(divisible, bool) or not isinstance(divisible, int) or divisible < 1:
        raise InputError(f"divisible={divisible!r}", expected="a whole number above 0", do="Leave it out for 1")
    axis = axis_of(name, subject)
    if aspect is None:
        return axis
    if not isinstance(axis, Size) or len(aspect) != axis.dims or not all(0 < share <= 1 for share in aspect):
        dims = axis.dims if isinstance(axis, Size) else 0
        raise InputError(
            f"aspect {','.join(f'{share:g}' for share in aspect)} for {name}",
            expected=f"{dims} shares, above 0 and up to 1" if dims else "none: only a size or patch has an aspect",
            do="Write it so, as in 1,1,0.5" if dims else "Leave it out",
        )
    return replace(axis, aspect=tuple(aspect), divisible=divisible)


def _current_value(subject: Subject, axis: Axis, divisible: int) -> int:
    """Return the current value of the step on an axis, or ``divisible`` if unknown. Raises InputError without the
    axis."""
    if axis.measure(divisible) is None:
        raise InputError(
            f"the axis {axis.name}", expected="one of numbers: batch, size, patch, sequence", do="Name one"
        )
    value = value_of(axis, subject)
    axis.at(subject, value if value is not None else divisible)  # raises where the step has no such axis
    return value or divisible


def _flat_axis_error(name: str, result: SearchResult, divisible: int) -> InputError:
    """Return the error of an axis with which the needed bytes do not grow. ``name``: of the axis."""
    ordered = sorted(result.samples, key=lambda sample: sample.position)
    first, last = ordered[0], ordered[-1]
    return InputError(
        f"the step needs {format_bytes(first.need)} at {name} {first.position * divisible} and "
        f"{format_bytes(last.need)} at {last.position * divisible}",
        expected="an axis that its memory grows with: any value fits here",
        do="Vary another one",
    )
