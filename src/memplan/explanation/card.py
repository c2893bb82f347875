"""What a step takes from a card: the sum that nvidia-smi would show, and on which cards it fits."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.devices import Device, catalogue
from memplan.explanation.model import Answer, CardUse, Charge, Verdict
from memplan.simulation.caching import fits
from memplan.simulation.liveness import live_at, simulate
from memplan.simulation.model import Timeline
from memplan.simulation.settings import AllocatorSettings
from memplan.trace.model import Storage, Trace

_NOT_MODELLED = (
    "what other processes hold, CUDA graphs, communication buffers (NCCL), workspaces of cuFFT, cuSOLVER and "
    "kernels of other libraries"
)


def card_use(trace: Trace, low: Timeline, card: Device) -> CardUse:
    """What a step for a card takes from it, and whether it fits there and on every other card of the catalogue.

    ``low`` is the trace's timeline in the low case.
    """
    high = simulate(trace, workspace="high") if _is_interval(trace) else low
    charges = _charges(trace, low, high, card)
    needs = Case(trace, low, False), Case(trace, high, True)
    verdicts = [_verdict(needs, other) for other in catalogue()]
    smallest = next((verdict.device for verdict in verdicts if verdict.answer == "fits"), None)
    return CardUse(charges, _verdict(needs, card), tuple(verdicts), smallest, high.peak_allocated, (_NOT_MODELLED,))


class Case:
    """A step in its low or its high case."""

    def __init__(self, trace: Trace, timeline: Timeline, is_high: bool) -> None:
        self.timeline = timeline
        self._trace = trace
        self._is_high = is_high

    def fits(self, card: Device) -> bool:
        """Whether the step runs in what the card has beside the context."""
        room = card.capacity - card.context[int(self._is_high)]
        if self.timeline.peak_reserved <= room:
            return True
        if self.timeline.peak_allocated > room:
            return False
        # in between, the allocator gives cached segments back before it gives up: it has to be tried
        return fits(self._trace, room, AllocatorSettings(), low=not self._is_high)


def _verdict(cases: tuple[Case, Case], card: Device) -> Verdict:
    low, high = cases
    answer: Answer = "fits" if high.fits(card) else "low only" if low.fits(card) else "does not fit"
    # more bytes asked for can fit the segments better: the high case is not always the higher one
    peaks = sorted(case.timeline.peak_reserved for case in cases)
    least, most = peaks[0] + card.context[0], peaks[1] + card.context[1]
    return Verdict(card.name, card.title, card.capacity, least, most, answer)


def _is_interval(trace: Trace) -> bool:
    return any(s.low is not None or s.used_on for s in trace.counted)


def _charges(trace: Trace, low: Timeline, high: Timeline, card: Device) -> tuple[Charge, ...]:
    """The terms of the sum, in the low and in the high case."""
    least, most = _terms(trace, low, True), _terms(trace, high, False)
    terms = {name: (least[name], most[name]) for name in most} | {"context": card.context}
    return tuple(Charge(name, *pair) for name, pair in terms.items())


def _terms(trace: Trace, timeline: Timeline, low: bool) -> dict[str, int]:
    """What is in blocks at the allocated peak, and how much more than that is ever held from the card."""
    live = live_at(trace, timeline.peak_tick)
    workspace = sum(_size(s, low) for s in live if s.cause == "workspace")
    tensors = sum(_size(s, low) for s in live if s.cause != "workspace")
    return {
        "tensors": tensors,
        "workspace": workspace,
        "rounding": timeline.peak_allocated - tensors - workspace,
        "fragmentation": timeline.peak_reserved - timeline.peak_allocated,
    }


def _size(storage: Storage, low: bool) -> int:
    return storage.low if low and storage.low is not None else storage.bytes


def levels_at(timeline: Timeline, tick: int) -> tuple[int, int]:
    """Bytes allocated and reserved after an event."""
    return next(((a, r) for t, a, r in timeline.events if t == tick), (0, 0))


def verdict_sentence(use: CardUse) -> str:
    """Whether the step fits on its card, and which is the smallest that it fits on."""
    verdict = use.verdict
    needs = format_bytes(verdict.low)
    if verdict.low != verdict.high:
        needs += f" to {format_bytes(verdict.high)}"
    words = {"fits": "fits", "low only": "fits in the low case, not in the high one", "does not fit": "does not fit"}
    smallest = f"the smallest card that it fits on: {use.smallest}" if use.smallest else "it fits on no card known here"
    return f"{words[verdict.answer]} on {verdict.title}: needs {needs} of {format_bytes(verdict.capacity)}; {smallest}"
