"""Compute what a step takes from a card, as nvidia-smi would show it, and on which cards it fits."""

from __future__ import annotations

from memplan.cudnn.questions import Plans
from memplan.devices import Device, catalogue
from memplan.explanation.layers import origin_word
from memplan.explanation.model import Answer, CardUse, Charge, ChargeName, SmallerPlan, Verdict
from memplan.simulation.allocator.settings import parse_settings
from memplan.simulation.on_card import fits, room_for
from memplan.simulation.simulate import live_at, simulate
from memplan.simulation.timeline import Timeline
from memplan.simulation.workspace_bounds import reserved_bounds
from memplan.trace.trace import Trace, at_least

_NOT_MODELLED = (
    "what other processes hold, CUDA graphs, communication buffers (NCCL), workspaces of cuFFT, cuSOLVER and "
    "kernels of other libraries"
)
_ORDER: tuple[ChargeName, ...] = ("context", "workspace", "tensors", "rounding", "fragmentation")
"""The bytes that the high case adds are attributed to the terms in this order."""


def card_use(trace: Trace, low: Timeline, card: Device, settings: str | None = None) -> CardUse:
    """Return what a step takes from a card, and whether it fits there and on the other cards of the catalogue.

    Args:
        trace: the step, recorded for the card.
        low: its timeline in the low case.
        card: the card.
        settings: of the caching allocator.
    """
    high, reserved = low, (low.peak_reserved, low.peak_reserved)
    if any(s.low is not None or s.used_on for s in trace.counted):
        high = simulate(trace, settings=settings)
        reserved = reserved_bounds(trace, parse_settings(settings or ""))
    least = max(reserved[0], low.peak_allocated)
    cases = (
        Case(at_least(trace), low, least, card, settings, is_high=False),
        Case(trace, high, max(reserved[1], least), card, settings, is_high=True),
    )
    charges = _charges(cases[0].terms, cases[1].terms)
    verdicts = [_verdict(cases, other) for other in catalogue() if other.name not in trace.other_kernels]
    smallest = next((verdict.device for verdict in verdicts if verdict.answer == "fits"), None)
    return CardUse(
        charges, _verdict(cases, card), tuple(verdicts), trace.other_kernels, smallest,
        max(case.timeline.peak_allocated for case in cases), (_NOT_MODELLED,), cases[1].smaller_plans(card),
    )  # fmt: skip


def _charges(low: dict[ChargeName, int], high: dict[ChargeName, int]) -> tuple[Charge, ...]:
    """Return the terms of both cases, with no term lower in the high case.

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
    """A step in its low or its high case."""

    def __init__(
        self, trace: Trace, timeline: Timeline, reserved: int, card: Device, settings: str | None, *, is_high: bool
    ) -> None:
        self.timeline = timeline
        self._reserved = reserved
        self._trace = trace
        self._settings = parse_settings(settings or "")
        self._is_high = is_high
        terms: dict[ChargeName, int] = {"context": card.context[is_high]}
        self.terms = _terms(trace, timeline, reserved) | terms

    def needs(self, card: Device) -> int:
        """Return the bytes that the step takes from a card, including the CUDA context."""
        return self._reserved + card.context[self._is_high]

    def fits(self, card: Device) -> bool:
        """Check whether the step runs in the memory of a card without the CUDA context."""
        room = card.usable("high" if self._is_high else "low")
        if self._reserved <= room:
            return True
        if self.timeline.peak_allocated > room and not self._trace.engines:
            return False
        # The allocator can release cached segments, and cuDNN can use smaller plans: that needs a simulation.
        return fits(self._trace, room, self._settings, low=not self._is_high)

    def smaller_plans(self, card: Device) -> tuple[SmallerPlan, ...]:
        """Return the convolutions that run with a smaller plan than their first, so that the step fits on a card."""
        room = card.usable("high" if self._is_high else "low")
        if self._reserved <= room or not self._trace.engines:
            return ()
        sizes = room_for(self._trace, room, self._settings, low=not self._is_high) or {}
        plans = {engine.storage: engine.plans for engine in self._trace.engines}
        return tuple(_smaller(self._trace, storage, plans[storage], size) for storage, size in sizes.items())


def _smaller(trace: Trace, storage: int, plans: Plans, size: int) -> SmallerPlan:
    op = trace.ops[trace.storages[storage].op or 0]
    plan = next(plan for plan in plans if plan.workspace == size)
    return SmallerPlan(op.layer, origin_word(op, trace), op.where, plans[0], plan)


def _verdict(cases: tuple[Case, Case], card: Device) -> Verdict:
    low, high = cases
    answer: Answer = "fits" if high.fits(card) else "low only" if low.fits(card) else "does not fit"
    return Verdict(card.name, card.title, card.capacity, low.needs(card), high.needs(card), answer)


def _terms(trace: Trace, timeline: Timeline, reserved: int) -> dict[ChargeName, int]:
    """Return the terms of the allocated peak, and as fragmentation what the reserved bytes exceed it by."""
    live = live_at(trace, timeline.peak_tick)
    workspace = sum(s.bytes for s in live if s.cause == "workspace")
    tensors = sum(s.bytes for s in live if s.cause != "workspace")
    return {
        "tensors": tensors,
        "workspace": workspace,
        "rounding": timeline.peak_allocated - tensors - workspace,
        "fragmentation": reserved - timeline.peak_allocated,
    }


def levels_at(timeline: Timeline, tick: int) -> tuple[int, int]:
    """Return the bytes (allocated, reserved) after an event; (0, 0) if none has this tick."""
    return next(((a, r) for t, a, r in timeline.events if t == tick), (0, 0))
