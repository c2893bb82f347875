"""The memory limit of a step: a card, a budget, or a budget on a card, minus a margin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from memplan._bytes import format_bytes
from memplan.devices import Device, read_budget
from memplan.errors import InputError
from memplan.explanation.card import context_of, is_interval
from memplan.simulation import on_card
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.simulate import simulate
from memplan.studies.sweeps.points import Bytes
from memplan.trace.recording.session import Environment, Target, choose_target
from memplan.trace.trace import Trace

Case = Literal["low", "high"]


@dataclass(frozen=True)
class Room:
    """The memory limit that a step has to fit into."""

    target: Target
    limit: int
    """Bytes after the margin; on a card they include the CUDA context."""
    case: Case = "high"
    """Which bound to use of workspaces that are known as an interval."""

    def need(self, step: Bytes) -> int:
        """Return the bytes of a step that count against the limit."""
        return step.needs_high if self.case == "high" else step.needs

    def fits(self, step: Bytes) -> bool:
        """Return whether a step fits; on a card after all that the caching allocator tries before it raises."""
        if step.answer is None:
            return self.need(step) <= self.limit
        return step.answer == "fits" or (self.case == "low" and step.answer == "low only")

    def holds(self, trace: Trace, settings: AllocatorSettings) -> bool:
        """Return whether a traced step fits, as `fits` does, about 100 times as fast: it is simulated, but not
        explained."""
        if self.target.card is None:
            return simulate(trace).peak_allocated <= self.limit
        room = self.target.card.capacity - self.context_of(trace)
        return on_card.fits(trace, room, settings, low=self.case == "low")

    def context_of(self, trace: Trace) -> int:
        """Return the bytes of the CUDA context that count for a step; 0 on the CPU.

        They are the expected bytes, or an end of the catalogue's interval if the step's own bytes are an interval, too.
        """
        card = self.target.card
        if card is None:
            return 0
        return card.capacity - card.usable(self.case) if is_interval(trace) else context_of(trace, card)

    @property
    def for_plans(self) -> int:
        """Budget of plans: on a card without the CUDA context, since plans count allocated bytes."""
        return self.limit if self.target.card is None else self.target.card.usable("high")

    @property
    def device(self) -> str:
        """Name of the device to record for."""
        return self.target.name

    @property
    def title(self) -> str:
        """Limit and device, for reports."""
        return f"{format_bytes(self.limit)} ({self.target.card.title if self.target.card else 'CPU'})"


def room_of(
    device: Any,
    budget: Any,
    margin: float | str = 0.0,
    case: Case = "high",
    assume: Mapping[str, float] | None = None,
    cudnn: Environment = None,
    world: int | None = None,
    rank: int = 0,
) -> Room:
    """Return the limit set by a card, a budget, or a budget on a card.

    Args:
        device: a card, or "cpu".
        budget: bytes ("20 GiB"), or the name of a card.
        margin: share of the limit to leave free: 0.05, "5%".
        case, assume, cudnn, world, rank: as for `memplan.largest`.

    Raises:
        InputError: no card and no budget, or the margin is no share.
        UnitError, DeviceError: the budget or the device is unknown.
    """
    card = None
    if budget is not None and isinstance(budget := read_budget(budget), Device):
        budget, card = None, budget.name
        device = card if device is None else device
    target = choose_target(device, assume, cudnn, world, rank)
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
    limit = int(budget * (1 - _parse_margin(margin)))
    if target.card is not None:
        target = replace(target, card=replace(target.card, capacity=limit))
    if case not in ("low", "high"):
        raise InputError(f"workspace={case!r}", expected="'low' or 'high'", do="Leave it out for 'high'")
    return Room(target, limit, case)


def _parse_margin(margin: float | str) -> float:
    """Return a margin such as 0.05 or "5%" as a share, from 0 to below 1."""
    text = str(margin).strip()
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise InputError(f"margin {margin}", expected="a share of the budget, such as 5% or 0.05", do="Write it so")
    return share
