"""Compute the memory of a step on a card, as nvidia-smi would show it, and the cards on which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from memplan.cudnn.questions import Plans
from memplan.devices import Device, catalogue
from memplan.devices.context import READINGS, expected_context
from memplan.explanation.layers import origin_word
from memplan.explanation.model import Answer, CardUse, Charge, ChargeName, SmallerPlan, Verdict
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.on_card import fits, room_for
from memplan.simulation.simulate import live_at, simulate
from memplan.simulation.timeline import Timeline
from memplan.simulation.workspace_bounds import reserved_bounds
from memplan.trace.trace import Trace, at_least, band_end

_NOT_MODELLED = (
    "what other processes hold, CUDA graphs, communication buffers (NCCL), workspaces of cuFFT, cuSOLVER and "
    "kernels of other libraries"
)
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.linear.")
_ORDER: tuple[ChargeName, ...] = ("context", "workspace", "tensors", "rounding", "fragmentation")
"""The bytes that the high case adds are attributed to the terms in this order."""


def card_use(trace: Trace, timeline: Timeline, card: Device, settings: str | None = None) -> CardUse:
    """Return the memory of a step on a card, and whether it fits this card and the others of the catalogue.

    ``timeline``: its timeline, in the low case where a workspace is known as an interval only.
    """
    cases, band = _cases(trace, timeline, settings)
    charges = _charges(cases[0].terms_on(card), cases[1].terms_on(card))
    verdict = _verdict(cases, band, card)
    others = [
        verdict if other == card else _verdict(cases, band, other)
        for other in catalogue()
        if other.name not in trace.other_kernels
    ]
    smallest = next((other.device for other in others if other.answer == "fits"), None)
    allocated = max(case.timeline.peak_allocated for case in cases)
    return CardUse(
        charges=charges, verdict=verdict, others=tuple(others), other_kernels=trace.other_kernels, smallest=smallest,
        peak_allocated_high=allocated, not_modelled=(_NOT_MODELLED,), smaller=cases[1].smaller_plans(card),
        allocated_band=band.allocated if band is not None and trace.expected else None,
    )  # fmt: skip


def verdicts_on(trace: Trace, cards: Iterable[Device], settings: str | None = None) -> tuple[int, tuple[Verdict, ...]]:
    """Return the allocated peak of a step in bytes, and whether the step fits on each of several cards with the same
    kernels."""
    cases, band = _cases(trace, simulate(at_least(trace), settings=settings), settings)
    peak = max(case.timeline.peak_allocated for case in cases)
    return peak, tuple(_verdict(cases, band, card) for card in cards)


def _cases(trace: Trace, timeline: Timeline, settings: str | None) -> tuple[tuple[Case, Case], _Band | None]:
    """Return the low and the high case of a step, the same where its bytes are no interval: then with a band.

    ``timeline`` is that of the low case.
    """
    parsed = parse_settings(settings or "")
    if is_interval(trace):
        high = simulate(trace, settings=settings)
        reserved = reserved_bounds(trace, parsed)
        least = max(reserved[0], timeline.peak_allocated)
        cases = (
            Case(at_least(trace), timeline, least, parsed, lambda other: other.context[0], low=True),
            Case(trace, high, max(reserved[1], least), parsed, lambda other: other.context[1]),
        )
        return cases, None
    expected = Case(trace, timeline, timeline.peak_reserved, parsed, lambda other: context_of(trace, other))
    ends = [_band_case(trace, timeline, end, settings) for end in ("low", "high")]
    return (expected, expected), _Band(expected, *ends)


def context_of(trace: Trace, card: Device) -> int:
    """Return the bytes of CUDA context that are expected on a card once the step has run."""
    names = {op.name for op in trace.ops}
    return expected_context(
        card.context[0],
        convolutions=any(name.startswith("aten.convolution") for name in names),
        products=any(name.startswith(_PRODUCTS) for name in names),
    )


def is_interval(trace: Trace) -> bool:
    """Return whether the bytes of the step are an interval: of a workspace, or of blocks that other streams use."""
    return any(storage.low is not None or storage.used_on for storage in trace.counted)


def _band_case(trace: Trace, timeline: Timeline, end: Literal["low", "high"], settings: str | None) -> Case:
    """Return the case at one end of the band; ``timeline``: of the expected case."""
    if trace.expected:
        trace = band_end(trace, end)
        timeline = simulate(trace, settings=settings)
    factor = READINGS[0] if end == "low" else READINGS[1]
    return Case(
        trace, timeline, timeline.peak_reserved, parse_settings(settings or ""),
        lambda card: round(context_of(trace, card) * factor),
    )  # fmt: skip


def _charges(low: dict[ChargeName, int], high: dict[ChargeName, int]) -> tuple[Charge, ...]:
    """Return the terms, in bytes, of the low and the high case, with no term lower in the high case.

    With large workspaces the peak can move to a moment with fewer tensors. Then part of the workspaces replaces
    tensors, and only the remainder is added.
    """
    added = sum(high.values()) - sum(low.values())
    raised: dict[ChargeName, int] = {}
    for name in sorted(high, key=_ORDER.index):
        increase = min(added, max(0, high[name] - low[name]))
        raised[name] = low[name] + increase
        added -= increase
    return tuple(Charge(name, low[name], raised[name]) for name in high)


class Case:
    """A step with one assumption about its workspaces and the CUDA context."""

    def __init__(
        self,
        trace: Trace,
        timeline: Timeline,
        reserved: int,
        settings: AllocatorSettings,
        context_on: Callable[[Device], int],
        *,
        low: bool = False,
    ) -> None:
        """``trace``, ``timeline``: the step with the assumed workspaces, and its simulation. ``reserved``: the most
        bytes of the allocator's segments."""
        self.timeline = timeline
        self.reserved = reserved
        self.context_on = context_on
        """Returns the bytes of the CUDA context on a card."""
        self._trace = trace
        self._settings = settings
        self._low = low
        """Whether it is the low case, in which sizes known as intervals are at their lower ends."""

    def terms_on(self, card: Device) -> dict[ChargeName, int]:
        """Return the terms of the step's memory on a card, in bytes."""
        terms = _terms(self._trace, self.timeline, self.reserved)
        terms["context"] = self.context_on(card)
        return terms

    def needs(self, card: Device) -> int:
        """Return the bytes that the step takes from a card, including the CUDA context."""
        return self.reserved + self.context_on(card)

    def fits(self, card: Device) -> bool:
        """Check whether the step runs in the memory of a card without the CUDA context."""
        room = card.capacity - self.context_on(card)
        if self.reserved <= room:
            return True
        if self.timeline.peak_allocated > room and not self._trace.engines:
            return False
        # The allocator can release cached segments, and cuDNN can use smaller plans: that needs a simulation.
        return fits(self._trace, room, self._settings, low=self._low)

    def smaller_plans(self, card: Device) -> tuple[SmallerPlan, ...]:
        """Return the convolutions that run with a smaller plan than their first, so that the step fits on a card."""
        room = card.capacity - self.context_on(card)
        if self.reserved <= room or not self._trace.engines:
            return ()
        sizes = room_for(self._trace, room, self._settings, low=self._low) or {}
        plans = {engine.storage: engine.plans for engine in self._trace.engines}
        return tuple(_smaller(self._trace, storage, plans[storage], size) for storage, size in sizes.items())


class _Band:
    """The expected case between the ends of its band. Equal workspaces can reserve more in the low case."""

    def __init__(self, expected: Case, low: Case, high: Case) -> None:
        """The step with expected workspaces, and with those at the ends of the band of 95 %."""
        self._expected, self._low, self._high = expected, low, high
        peaks = [case.timeline.peak_allocated for case in (low, expected, high)]
        self.allocated = min(peaks), max(peaks)
        """Bytes of the ends of the band of the peak."""

    def needs(self, card: Device) -> tuple[int, int]:
        """Return the ends of the band of the step's memory on a card."""
        reserved = [case.reserved for case in (self._low, self._expected, self._high)]
        return min(reserved) + self._low.context_on(card), max(reserved) + self._high.context_on(card)


def _smaller(trace: Trace, storage: int, plans: Plans, size: int) -> SmallerPlan:
    """Return the row of a convolution that runs with the plan whose workspace has ``size`` bytes. ``storage``: of the
    workspace; ``plans``: cuDNN's, the first of which does not fit."""
    op = trace.ops[trace.storages[storage].op or 0]
    plan = next(plan for plan in plans if plan.workspace == size)
    return SmallerPlan(op.layer, origin_word(op, trace), op.where, plans[0], plan)


def _verdict(cases: tuple[Case, Case], band: _Band | None, card: Device) -> Verdict:
    """Return whether the step fits on a card, by its (low, high) cases. ``band``: of the expected case, or None."""
    low, high = cases
    answer: Answer = "fits" if high.fits(card) else "does not fit"
    if answer != "fits" and low is not high and low.fits(card):
        answer = "low only"
    ends = None if band is None else band.needs(card)
    return Verdict(card.name, card.title, card.capacity, low.needs(card), high.needs(card), answer, ends)


def _terms(trace: Trace, timeline: Timeline, reserved: int) -> dict[ChargeName, int]:
    """Return the terms of the allocated peak, and as fragmentation the reserved bytes beyond it."""
    live = live_at(trace, timeline.peak_tick)
    workspace = sum(storage.bytes for storage in live if storage.cause == "workspace")
    tensors = sum(storage.bytes for storage in live if storage.cause != "workspace")
    return {
        "tensors": tensors,
        "workspace": workspace,
        "rounding": timeline.peak_allocated - tensors - workspace,
        "fragmentation": reserved - timeline.peak_allocated,
    }


def levels_at(timeline: Timeline, tick: int) -> tuple[int, int]:
    """Return the bytes (allocated, reserved) after an event; (0, 0) if none has this tick."""
    for event_tick, allocated, reserved in timeline.events:
        if event_tick == tick:
            return allocated, reserved
    return 0, 0
