"""The largest batch, size or sequence that fits a card or a budget.

A value at which the step raises is kept as failed and passed over. The first one asks in which steps values work, by
recordings next to one that works; from then on only multiples of that step are looked at, and one that fails all the
same counts as one that does not fit. Where the value that the step has now fails, the powers of two around it are
tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan.errors import BudgetError, InputError, MemplanError, StepError
from memplan.explanation.explain import device_of
from memplan.simulation.allocator.settings import parse_settings
from memplan.studies.axes.axes import Axis, Length, Size, axis_of, value_of, without_data
from memplan.studies.axes.sliding_window import Window
from memplan.studies.axes.subject import Subject
from memplan.studies.capacity.after_planning import Planned, planned
from memplan.studies.capacity.bisection import Found, last_fitting
from memplan.studies.capacity.extrapolation import MOST, Sample
from memplan.studies.capacity.limit import Case, Room, room_of
from memplan.studies.sweeps.fits import LABELS, part_bytes
from memplan.studies.sweeps.points import Bytes, measured
from memplan.studies.sweeps.sweep import again
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.recording.session import Environment, public
from memplan.trace.recording.values.known_indices import NoSuchRow
from memplan.trace.step import StepOptions
from memplan.trace.trace import Trace

_CLEARLY = 1.02
"""Segments alone make reserved bytes go up and down by less."""


@dataclass(frozen=True)
class Tried:
    """A value that was recorded, or could not be."""

    value: int
    fits: bool
    need: int
    """Bytes; 0 where the recording failed."""
    bytes: Bytes | None = None
    plan: Planned | None = None
    reason: str = ""
    """Why the recording failed; empty where it did not."""


@dataclass(frozen=True, repr=False)
class Largest(Displayed):
    """The largest value that fits, and how it was found. ``value`` is 0 where none of those that were recorded does."""

    title: str
    axis: str
    unit: str
    room: Room
    value: int
    sizes: tuple[int, ...]
    """Of an image: its spatial dimensions at that value."""
    tried: tuple[Tried, ...]
    """In order; each is one recording, or one plan."""
    step: int = 1
    """The value is a multiple of it: as asked for, or as the model takes no other values."""
    most: int | None = None
    end: int | None = None
    """The next value, which does not fit, or failed; None where the search ended at ``most``."""
    planned: Largest | None = None
    """The same after planning, where that was asked for."""
    notes: tuple[str, ...] = ()

    def at(self, value: int | None) -> Tried | None:
        """Return the recording of a value."""
        return next((one for one in self.tried if one.value == value), None)

    @property
    def recorded(self) -> tuple[Tried, ...]:
        """Return those whose recording did not fail."""
        return tuple(one for one in self.tried if not one.reason)

    @property
    def failed(self) -> tuple[Tried, ...]:
        """Return those whose recording failed."""
        return tuple(one for one in self.tried if one.reason)

    @property
    def answer(self) -> Tried | None:
        """Return the value's own."""
        return self.at(self.value)

    @property
    def following(self) -> Tried | None:
        """Recording of the next value, which does not fit, or failed; None where there is none."""
        return self.at(self.end)

    @property
    def least(self) -> Tried:
        """Return the smallest value that was recorded."""
        return min(self.recorded, key=lambda one: one.value)

    @property
    def unsteady(self) -> tuple[int, int] | None:
        """Two values of which the smaller clearly needs more, or alone does not fit; None where there are none."""
        ordered = sorted(self.recorded, key=lambda one: one.value)
        pairs = [(a, b) for n, a in enumerate(ordered) for b in ordered[n + 1 :]]
        found = [(a, b) for a, b in pairs if a.need > _CLEARLY * b.need or (b.fits and not a.fits)]
        return (found[0][0].value, found[0][1].value) if found else None

    def held_by(self, one: Tried) -> str:
        """Say what is largest at a value that was recorded."""
        if one.bytes is None:
            return f"{format_bytes(one.need)} even when planned"
        parts = part_bytes({**one.bytes.row()})
        parts = {LABELS[part]: size for part, size in parts.items() if self.room.case == "high" or part != "workspace"}
        extra = one.need - sum(parts.values())
        parts |= {"CUDA context and segments": extra} if extra > 0 else {}
        if one.bytes.aggregation:
            parts[LABELS["temporaries"]] -= one.bytes.aggregation
            parts["aggregation of the volume"] = one.bytes.aggregation
        largest = sorted(parts.items(), key=lambda one: -one[1])[:3]
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
) -> int:
    """Find the largest batch, size, patch or sequence that fits a card or a budget, by recordings alone.

    The answer and the next value are both recorded: the one fits, the other does not, or fails. A value at which the
    step raises is passed over: the first such one asks in which steps values work, and only these are looked at then.

    Args:
        what: a module, a callable that makes one, or a ``build`` with an argument for the axis.
        axis: ``"batch"``; ``"size"`` or ``"patch"``, all spatial dimensions of image inputs and of what shares them;
            ``"sequence"``; or the name of an argument of the callable.
        inputs, kwargs, targets, loss, optimizer, autocast, train, dtype, settings, assume, cudnn: as for `explain`.
        device: a card of the catalogue: what it has is the budget, unless one is given. ``"cpu"`` needs one.
        budget: bytes ("20 GiB"), or a card's name. Bounds allocated bytes; on a card, reserved and the CUDA context.
        divisible, most: the answer is a multiple of the one, and not above the other.
        aspect, margin: what a size is multiplied by in each dimension: (1, 1, 0.5); share to be left free: 0.05, "5%".
        workspace: the bound of cuDNN's workspaces to count, known as an interval: the upper ("high") or the lower.
        fit: find the largest after planning (`memplan.plan`).
        window: a `memplan.studies.axes.sliding_window.Window`: infers a volume in patches, with their buffer.

    Raises:
        BudgetError: not even the smallest value fits; says what holds it up.
        InputError, StepError: an axis that the step does not take; no card and no budget; no value can be recorded.

    Example:
        >>> memplan.largest(model, "batch", images, optimizer=torch.optim.AdamW, device="rtx4090")
        82096
    """
    options = StepOptions(inputs, kwargs, targets, loss, optimizer, autocast, train, dtype).checked()
    subject = Subject(again(what), options, window=window.checked() if window is not None else None)
    on = device_of(what) if device is None and budget is None else device
    room = room_of(on, budget, margin, workspace, assume, cudnn)
    found = find_largest(subject, axis, room, divisible=divisible, aspect=aspect, most=most, fit=fit, settings=settings)
    found = found.planned or found
    if found.value == 0:
        raise does_not_fit(found)
    return found.value


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
    """Search as `largest` does, and return everything that was recorded; ``value`` is 0 where nothing fits."""
    axis = _axis(subject, name, divisible, aspect)
    subject = without_data(subject)
    start = _start(subject, axis, divisible)
    if most is not None and most < divisible:
        raise InputError(f"most={most!r}", expected=f"{divisible} or more", do="Raise it, or leave it out")
    notes: dict[str, None] = {}
    allocator = parse_settings(settings or "")

    def record(value: int) -> tuple[Tried, Trace | None]:
        progress(f"{name} {value}")
        outcome = measured(axis.at(subject, value), room.target, settings, keep=True)
        if outcome.bytes is None:
            assert outcome.error is not None, "a point has bytes or an error"
            raise outcome.error
        notes.update(dict.fromkeys(outcome.notes))
        return Tried(value, room.fits(outcome.bytes), room.need(outcome.bytes), outcome.bytes), outcome.trace

    recorder = _Recorder(record, axis, divisible)
    begin, holds = max(1, start // divisible), lambda trace: room.holds(trace, allocator)
    try:
        found = last_fitting(recorder, recorder.measure, room.limit, begin, _places(most, divisible), holds)
    except NoSuchRow as end:  # the model takes no more, whatever fits
        most = end.rows
        notes[f"the model has a table of {most} positions: it takes no more"] = None
        found = last_fitting(recorder, recorder.measure, room.limit, begin, _places(most, divisible), holds)
    made = _largest(found, recorder, title or subject.title, room, most, tuple(notes))
    return replace(made, planned=_find_planned(made, subject, axis, progress)) if fit else made


def _find_planned(found: Largest, subject: Subject, axis: Axis, progress: Callable[[str], None]) -> Largest:
    """Find the largest after planning, starting from the largest without it."""
    room = found.room

    def record(value: int) -> tuple[Tried, None]:
        progress(f"{found.axis} {value}, planned")
        made = planned(axis.at(subject, value), room.target, room.limit)
        return Tried(value, made.fits, made.least, None, made), None

    recorder = _Recorder(record, axis, found.step)
    begin, last = max(1, found.value // found.step), _places(found.most, found.step)
    places = last_fitting(recorder, recorder.measure, room.for_plans, begin, last)
    return _largest(places, recorder, found.title, room, found.most, ())


def _places(most: int | None, divisible: int) -> int:
    return MOST if most is None else most // divisible


@dataclass
class _Recorder:
    """Records places on an axis, each once, and keeps those that fail with their reason."""

    record: Callable[[int], tuple[Tried, Trace | None]]
    """Raises MemplanError where a value cannot be recorded."""
    axis: Axis
    divisible: int
    """What a value is, over its place."""
    tried: dict[int, Tried] = field(default_factory=dict)
    samples: dict[int, Sample | None] = field(default_factory=dict)
    error: StepError | None = None
    """The first that the step raised."""

    def measure(self, place: int) -> float:
        """Return the number that bytes grow with."""
        measure = self.axis.measure(place * self.divisible)
        assert measure is not None, "the axis is one of numbers"
        return measure

    def __call__(self, place: int) -> Sample | None:
        """Return the recording of a place; None where it failed.

        Raises:
            NoSuchRow: the model's table of positions is shorter.
            MemplanError: the first recording failed for another reason than that the step raised.
        """
        if place not in self.samples:
            self.samples[place] = self._sample(place)
        return self.samples[place]

    def _sample(self, place: int) -> Sample | None:
        value = place * self.divisible
        try:
            self.tried[value], trace = self.record(value)
        except MemplanError as error:
            if not self.tried and not isinstance(error, StepError):
                raise
            if isinstance(error, StepError):
                self.error = self.error or error
            self.tried[value] = Tried(value, False, 0, reason=error.found)
            end = error.__cause__
            if isinstance(self.axis, Length) and isinstance(end, NoSuchRow) and self.divisible <= end.rows < value:
                raise end from error
            return None
        return Sample(place, self.measure(place), self.tried[value].need, self.tried[value].fits, trace)


def _largest(
    found: Found, recorder: _Recorder, title: str, room: Room, most: int | None, notes: tuple[str, ...]
) -> Largest:
    axis, divisible, tried = recorder.axis, recorder.divisible, tuple(recorder.tried.values())
    if not found.samples:
        raise _none_works(recorder.error, axis.name, tried)
    end, step = found.following, divisible * found.step
    if end is None and found.last + found.step <= _places(most, divisible):
        raise _grows_not(axis.name, found, divisible)
    value = found.last * divisible
    return Largest(
        title, axis.name, axis.unit, room, value, _sizes(axis, value), tried, step, most,
        None if end is None else end * divisible, None, notes,
    )  # fmt: skip


def does_not_fit(found: Largest) -> BudgetError:
    """Return the error that says so."""
    least = found.least
    failed = [str(one.value) for one in found.failed if one.value < least.value]
    return BudgetError(
        f"{found.title} does not fit at {found.axis} {least.value}: it needs {format_bytes(least.need)} of "
        f"{format_bytes(found.room.limit)}" + (f" ({', '.join(failed)} cannot be recorded)" if failed else ""),
        expected=f"a budget of {format_bytes(least.need)} at least: {found.held_by(least)}",
        do="Give more, vary something else, or plan the step (fit=True, --fit)",
        smallest_budget=least.need,
    )


def _none_works(error: StepError | None, name: str, tried: Sequence[Tried]) -> StepError:
    """Return the first error, with the other values that cannot be recorded either."""
    assert error is not None, "the first recording failed, as the step raised"
    if len(tried) == 1:
        return error
    others = ", ".join(str(one.value) for one in tried[1:])
    joined = StepError(
        f"{error.found}; so {name} {tried[0].value} cannot be recorded, nor can {others}",
        expected=error.expected, do=error.do,
    )  # fmt: skip
    joined.layer, joined.where = error.layer, error.where  # its text names them already
    joined.__cause__ = error.__cause__
    return joined


def _axis(subject: Subject, name: str, divisible: int, aspect: Sequence[float] | None) -> Axis:
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


def _start(subject: Subject, axis: Axis, divisible: int) -> int:
    """Return the value that the step has now."""
    if axis.measure(divisible) is None:
        raise InputError(
            f"the axis {axis.name}", expected="one of numbers: batch, size, patch, sequence", do="Name one"
        )
    value = value_of(axis, subject)
    axis.at(subject, value if value is not None else divisible)  # raises where the step has no such axis
    return value or divisible


def _sizes(axis: Axis, value: int) -> tuple[int, ...]:
    return axis.sizes(value) if isinstance(axis, Size) and value else ()


def _grows_not(name: str, found: Found, divisible: int) -> InputError:
    samples = found.samples
    few, many = min(samples, key=lambda one: one.place), max(samples, key=lambda one: one.place)
    return InputError(
        f"the step needs {format_bytes(few.need)} at {name} {few.place * divisible} and {format_bytes(many.need)} at "
        f"{many.place * divisible}",
        expected="an axis that its memory grows with: any value fits here",
        do="Vary another one",
    )
