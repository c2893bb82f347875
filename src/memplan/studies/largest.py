"""The largest batch, size or sequence that fits a card or a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from memplan._bytes import format_bytes, parse_bytes
from memplan.devices import find
from memplan.errors import BudgetError, DeviceError, InputError, MemplanError, UnitError
from memplan.explanation.explain import device_of
from memplan.simulation import caching
from memplan.simulation.liveness import simulate
from memplan.simulation.settings import AllocatorSettings, parse_settings
from memplan.studies.axes import Axis, Length, Size, axis_of, value_of, without_data
from memplan.studies.fits import LABELS, part_bytes
from memplan.studies.guess import MOST, Sample
from memplan.studies.planned import Planned, planned
from memplan.studies.points import Bytes, Outcome, measured
from memplan.studies.search import bracket, last_fitting
from memplan.studies.subject import Subject
from memplan.studies.sweep import again
from memplan.studies.window import Window
from memplan.trace.model import Trace
from memplan.trace.positions import NoSuchRow
from memplan.trace.session import Target, choose_target
from memplan.trace.step import StepOptions

Case = Literal["low", "high"]

_CLEARLY = 1.02
"""Segments alone make reserved bytes go up and down by less."""


@dataclass(frozen=True)
class Room:
    """What a step has to fit into."""

    target: Target
    limit: int
    """Bytes: of a card with the CUDA context, less the margin."""
    case: Case = "high"
    """Of workspaces that are known as an interval: the least or the most of them."""

    def need(self, found: Bytes) -> int:
        """What a step takes of it."""
        return found.needs_high if self.case == "high" else found.needs

    def fits(self, found: Bytes) -> bool:
        """Whether a step does: on a card with all that its allocator does before it gives up."""
        if found.answer is None:
            return self.need(found) <= self.limit
        return found.answer == "fits" or (self.case == "low" and found.answer == "low only")

    def holds(self, trace: Trace, settings: AllocatorSettings) -> bool:
        """Whether a step fits, as `fits` would say of its recording, in a hundredth of the time."""
        if self.target.card is None:
            return simulate(trace).peak_allocated <= self.limit
        room = self.target.card.usable(self.case)
        return caching.fits(trace, room, settings, low=self.case == "low")

    @property
    def title(self) -> str:
        """In words."""
        return f"{format_bytes(self.limit)} ({self.target.card.title if self.target.card else 'CPU'})"


@dataclass(frozen=True)
class Tried:
    """A value that was recorded."""

    value: int
    fits: bool
    need: int
    bytes: Bytes | None = None
    plan: Planned | None = None


@dataclass(frozen=True)
class Largest:
    """The largest value that fits, and how it was found. ``value`` is 0 where not even the smallest does."""

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
    most: int | None = None
    planned: Largest | None = None
    """The same after planning, where that was asked for."""
    notes: tuple[str, ...] = ()

    def at(self, value: int) -> Tried | None:
        """What was recorded for a value."""
        return next((one for one in self.tried if one.value == value), None)

    @property
    def answer(self) -> Tried | None:
        """The value's own."""
        return self.at(self.value)

    @property
    def following(self) -> Tried | None:
        """The next value, which does not fit; None where the search ended at ``most``."""
        return self.at(self.value + self.step)

    @property
    def unsteady(self) -> tuple[int, int] | None:
        """Two of the values of which the smaller clearly needs more; None where there are none."""
        ordered = sorted(self.tried, key=lambda one: one.value)
        pairs = [(a, b) for n, a in enumerate(ordered) for b in ordered[n + 1 :] if a.need > _CLEARLY * b.need]
        return (pairs[0][0].value, pairs[0][1].value) if pairs else None

    def held_by(self) -> str:
        """What is largest at the smallest value that was recorded."""
        least = min(self.tried, key=lambda one: one.value)
        if least.bytes is None:
            return f"{format_bytes(least.need)} even when planned"
        parts = part_bytes({**least.bytes.row()})
        parts = {LABELS[part]: size for part, size in parts.items() if self.room.case == "high" or part != "workspace"}
        extra = least.need - sum(parts.values())
        parts |= {"CUDA context and segments": extra} if extra > 0 else {}
        if least.bytes.aggregation:
            parts[LABELS["temporaries"]] -= least.bytes.aggregation
            parts["aggregation of the volume"] = least.bytes.aggregation
        largest = sorted(parts.items(), key=lambda one: -one[1])[:3]
        return ", ".join(f"{format_bytes(size)} {name}" for name, size in largest if size > 0)


def largest(
    what: Any,
    axis: str,
    *inputs: Any,
    device: str | torch.device | None = None,
    budget: Any = None,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    autocast: torch.dtype | str | None = None,
    train: bool = True,
    dtype: torch.dtype | None = None,
    settings: str | None = None,
    divisible: int = 1,
    aspect: Sequence[float] | None = None,
    margin: float | str = 0.0,
    most: int | None = None,
    workspace: Case = "high",
    fit: bool = False,
    window: Window | None = None,
) -> int:
    """Find the largest batch, size, patch or sequence that fits a card or a budget, by recordings alone.

    The answer and the next value are both recorded: the one fits, the other does not. Most answers take 4 recordings.

    Args:
        what: a module, a callable that makes one, or a ``build`` with an argument for the axis.
        axis: ``"batch"``; ``"size"`` or ``"patch"``, all spatial dimensions of image inputs and of what shares them;
            ``"sequence"``; or the name of an argument of the callable.
        inputs, kwargs, targets, loss, optimizer, autocast, train, dtype, settings: as for `memplan.explain`.
        device: a card of the catalogue: what it has is the budget, unless one is given. ``"cpu"`` needs one.
        budget: bytes ("20 GiB"), or a card's name. Bounds allocated bytes; on a card, reserved and the CUDA context.
        divisible: the answer is a multiple of it.
        aspect: what a size is multiplied by in each dimension: (1, 1, 0.5).
        margin: share of the budget to be left free: 0.05, "5%".
        most: the largest value to look at.
        workspace: of cuDNN's workspaces, which are known as an interval: count the most ("high") or the least.
        fit: the largest after planning (`memplan.plan`), instead of the largest as it is.
        window: a `memplan.studies.window.Window`: inference of a volume in patches, with its aggregation buffer.

    Raises:
        BudgetError: not even the smallest value fits; says what holds it up.
        InputError: an axis that the step does not take, neither a card nor a budget, a value that cannot be recorded.

    Example:
        >>> memplan.largest(resnet18, "batch", "32x3x224x224", optimizer=torch.optim.AdamW, device="rtx4090")
        902
    """
    targets = tuple(targets) if isinstance(targets, (list, tuple)) else (targets,)
    options = StepOptions(inputs, kwargs, targets, loss, optimizer, autocast, train, dtype).checked()
    subject = Subject(again(what), options, window=window.checked() if window is not None else None)
    room = room_of(device_of(what) if device is None and budget is None else device, budget, margin, workspace)
    found = find_largest(subject, axis, room, divisible=divisible, aspect=aspect, most=most, fit=fit, settings=settings)
    found = found.planned or found
    if found.value == 0:
        raise does_not_fit(found)
    return found.value


def room_of(device: Any, budget: Any, margin: float | str = 0.0, case: Case = "high") -> Room:
    """What a card, a budget, or a budget on a card leaves.

    Raises:
        InputError: neither of them, or a margin that is no share.
        UnitError, DeviceError: they are none.
    """
    card = None
    if budget is not None:
        budget, card = _read_budget(budget)
        device = device if card is None or device is not None else card
    target = choose_target(device)
    if budget is None:
        if target.card is None and card is not None:
            raise InputError(
                f"the budget {card} for the CPU", expected="a size such as 20 GiB, or a step on that card",
                do=f"Leave the device out, or say device='{card}' (--device {card})",
            )  # fmt: skip
        if target.card is None:
            raise InputError(
                "neither a card nor a budget",
                expected="one of them: device='rtx4090' or budget='20 GiB'",
                do="Give it (--device rtx4090, --budget 20GiB)",
            )
        budget = target.card.capacity
    elif target.card is not None:
        budget = min(budget, target.card.capacity)
    limit = int(budget * (1 - _share(margin)))
    if target.card is not None:
        target = replace(target, card=replace(target.card, capacity=limit))
    if case not in ("low", "high"):
        raise InputError(f"workspace={case!r}", expected="'low' or 'high'", do="Leave it out for 'high'")
    return Room(target, limit, case)


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
    """As `largest`, with everything that was recorded; ``value`` is 0 where nothing fits."""
    axis = _axis(subject, name, divisible, aspect)
    subject = without_data(subject)
    start = _start(subject, axis, divisible)
    last = MOST if most is None else most // divisible
    if last < 1:
        raise InputError(f"most={most!r}", expected=f"{divisible} or more", do="Raise it, or leave it out")
    recorded: dict[int, Tried] = {}
    notes: dict[str, None] = {}

    def probe(place: int) -> Sample:
        value = place * divisible
        progress(f"{name} {value}")
        outcome = measured(axis.at(subject, value), room.target, settings, keep=True)
        if outcome.bytes is None:
            end = outcome.error.__cause__ if outcome.error is not None else None
            if isinstance(axis, Length) and isinstance(end, NoSuchRow) and divisible <= end.rows < value:
                raise end
            raise _failed(outcome, name, value, divisible, bool(recorded))
        notes.update(dict.fromkeys(outcome.notes))
        need, fits = room.need(outcome.bytes), room.fits(outcome.bytes)
        recorded[value] = Tried(value, fits, need, outcome.bytes)
        return Sample(place, _measure(axis, value), need, fits, outcome.trace)

    allocator = parse_settings(settings or "")
    try:
        samples = last_fitting(
            probe, lambda place: _measure(axis, place * divisible), room.limit, start, last,
            lambda trace: room.holds(trace, allocator),
        )  # fmt: skip
    except NoSuchRow as end:  # the model takes no more, whatever fits
        found = find_largest(
            subject, name, room, divisible=divisible, aspect=aspect, most=end.rows, fit=fit, settings=settings,
            title=title, progress=progress,
        )  # fmt: skip
        return replace(found, notes=(*found.notes, f"the model has a table of {end.rows} positions: it takes no more"))
    value, following = bracket(samples)
    if following is None and value < last:
        raise _grows_not(name, samples, divisible)
    found = Largest(
        title or subject.title, name, axis.unit, room, value * divisible, _sizes(axis, value * divisible),
        tuple(recorded.values()), divisible, most, None, tuple(notes),
    )  # fmt: skip
    if not fit:
        return found
    return replace(found, planned=_find_planned(found, subject, axis, last, progress))


def _find_planned(found: Largest, subject: Subject, axis: Axis, last: int, progress: Callable[[str], None]) -> Largest:
    """The largest after planning, starting from the largest as it is."""
    step = found.step
    recorded: dict[int, Tried] = {}

    def probe(place: int) -> Sample:
        progress(f"{found.axis} {place * step}, planned")
        made = planned(axis.at(subject, place * step), found.room.target, found.room.limit)
        recorded[place * step] = Tried(place * step, made.fits, made.least, None, made)
        return Sample(place, _measure(axis, place * step), made.least, made.fits)

    limit = planning_budget(found.room)
    samples = last_fitting(probe, lambda place: _measure(axis, place * step), limit, max(1, found.value // step), last)
    value, following = bracket(samples)
    if following is None and value < last:
        raise _grows_not(found.axis, samples, step)
    value *= step
    return replace(found, value=value, sizes=_sizes(axis, value), tried=tuple(recorded.values()), notes=())


def planning_budget(room: Room) -> int:
    """What a plan is given: of a card what it has beside the context, since plans count allocated bytes."""
    return room.limit if room.target.card is None else room.target.card.usable("high")


def does_not_fit(found: Largest) -> BudgetError:
    """The error that says so."""
    least = min(found.tried, key=lambda one: one.value)
    return BudgetError(
        f"{found.title} does not fit at {found.axis} {least.value}: it needs {format_bytes(least.need)} of "
        f"{format_bytes(found.room.limit)}",
        expected=f"a budget of {format_bytes(least.need)} at least: {found.held_by()}",
        do="Give more, vary something else, or plan the step (fit=True, --fit)",
        smallest_budget=least.need,
    )


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
    """The place of the value that the step has now."""
    if axis.measure(divisible) is None:
        raise InputError(
            f"the axis {axis.name}", expected="one of numbers: batch, size, patch, sequence", do="Name one"
        )
    value = value_of(axis, subject)
    axis.at(subject, value if value is not None else divisible)  # raises where the step has no such axis
    return max(1, (value or divisible) // divisible)


def _measure(axis: Axis, value: int) -> float:
    measure = axis.measure(value)
    assert measure is not None, "the axis is one of numbers"
    return measure


def _sizes(axis: Axis, value: int) -> tuple[int, ...]:
    return axis.sizes(value) if isinstance(axis, Size) and value else ()


def _failed(outcome: Outcome, name: str, value: int, divisible: int, began: bool) -> MemplanError:
    assert outcome.error is not None, "a point has bytes or an error"
    if not began and divisible == 1:
        return outcome.error
    return InputError(
        f"{name} {value} cannot be recorded: {outcome.error.found}",
        expected="a step that runs at every value that is a multiple of divisible"
        + (f", {divisible}" if divisible > 1 else ""),
        do="Give what the model's sizes have to be divisible by (divisible=32, --divisible 32), or the largest value "
        "that it takes (most=1024, --most 1024)",
    )


def _grows_not(name: str, samples: list[Sample], step: int) -> InputError:
    few, many = min(samples, key=lambda one: one.place), max(samples, key=lambda one: one.place)
    return InputError(
        f"the step needs {format_bytes(few.need)} at {name} {few.place * step} and {format_bytes(many.need)} at "
        f"{many.place * step}",
        expected="an axis that its memory grows with: any value fits here",
        do="Vary another one",
    )


def _read_budget(budget: Any) -> tuple[int | None, str | None]:
    """Bytes, or the name of a card."""
    try:
        return parse_bytes(budget), None
    except UnitError:
        try:
            return None, find(str(budget)).name
        except DeviceError:
            return parse_bytes(budget), None  # raises what is wrong with it as a size


def _share(margin: float | str) -> float:
    text = str(margin).strip()
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise InputError(f"margin {margin}", expected="a share of the budget, such as 5% or 0.05", do="Write it so")
    return share
