"""The limit of a step: a card, a budget, or a budget on a card, less a margin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from memplan._bytes import format_bytes
from memplan.devices import Device, read_budget
from memplan.errors import InputError
from memplan.simulation import on_card
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.simulate import simulate
from memplan.studies.sweeps.points import Bytes
from memplan.trace.recording.session import Environment, Target, choose_target
from memplan.trace.trace import Trace

Case = Literal["low", "high"]


@dataclass(frozen=True)
class Room:
    """Limit that a step has to fit into."""

    target: Target
    limit: int
    """Bytes: of a card with the CUDA context, less the margin."""
    case: Case = "high"
    """Lower or upper bound of workspaces that are known as an interval."""

    def need(self, found: Bytes) -> int:
        """Return the bytes that count against the limit."""
        return found.needs_high if self.case == "high" else found.needs

    def fits(self, found: Bytes) -> bool:
        """Return whether a step does: on a card with all that its allocator does before it gives up."""
        if found.answer is None:
            return self.need(found) <= self.limit
        return found.answer == "fits" or (self.case == "low" and found.answer == "low only")

    def holds(self, trace: Trace, settings: AllocatorSettings) -> bool:
        """Return whether a step fits, as `fits` would say of its recording, in a hundredth of the time."""
        if self.target.card is None:
            return simulate(trace).peak_allocated <= self.limit
        room = self.target.card.usable(self.case)
        return on_card.fits(trace, room, settings, low=self.case == "low")

    @property
    def for_plans(self) -> int:
        """Budget of a plan: of a card its bytes without the context, since plans count allocated bytes."""
        return self.limit if self.target.card is None else self.target.card.usable("high")

    @property
    def device(self) -> str:
        """Device to record a step for."""
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
) -> Room:
    """Return the limit that a card, a budget, or a budget on a card sets.

    Raises:
        InputError: neither of them, or a margin that is no share.
        UnitError, DeviceError: they are none.
    """
    card = None
    if budget is not None and isinstance(budget := read_budget(budget), Device):
        budget, card = None, budget.name
        device = card if device is None else device
    target = choose_target(device, assume, cudnn)
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


def _share(margin: float | str) -> float:
    text = str(margin).strip()
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise InputError(f"margin {margin}", expected="a share of the budget, such as 5% or 0.05", do="Write it so")
    return share
