"""Memory that a step takes on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from memplan._bytes import format_bytes, parse_bytes
from memplan.devices import Device
from memplan.errors import InputError, UnitError
from memplan.explanation.model import HostNeed, PeakRow
from memplan.simulation.host import host_use
from memplan.simulation.timeline import Timeline
from memplan.trace.records import HOST
from memplan.trace.trace import Trace

_EXPECTED = "the host's memory, such as 32 GiB"


def read_host(value: Any, *, measured: bool = False) -> int | None:
    """Return the budget of the host's memory in bytes; None for None.

    Raises:
        UnitError: no size, a text without a unit, or no bytes at all.
        InputError: a budget of a ``measured`` step, whose host's memory nobody counted.
    """
    if value is None:
        return None
    if measured:
        raise InputError(
            "host with a measured step", expected="a recorded one: a measurement counts the device's memory alone",
            do="Leave out the measurement, or the host",
        )  # fmt: skip
    if isinstance(value, str) and value.strip().isdecimal() and int(value):
        number = value.strip()
        raise UnitError(
            f"host {number!r} has no unit",
            expected=_EXPECTED,
            do=f"Write it so: --host {number}GiB, host='{number} GiB'",
        )
    size = parse_bytes(value)
    if not size:
        raise UnitError(
            f"host {value!r} is no memory at all", expected=_EXPECTED, do="Give what is free, or leave it out"
        )
    return size


def host_need(
    trace: Trace, timeline: Timeline, card: Device | None, context: int, budget: int | None,
    op_at: Callable[[int], PeakRow | None],
) -> HostNeed | None:  # fmt: skip
    """Return the host's memory of a recorded step; None for a step on the CPU without further host memory. ``context``:
    bytes of the CUDA context; ``op_at(tick)`` returns the op that runs at a tick."""
    if trace.origin != "recorded":
        return None
    if trace.device == HOST and budget is None and not any(use.workers for use in trace.loaders):
        return None
    use = host_use(trace, budget)
    exceeded: list[tuple[int, Literal["host", "card"]]] = []  # (first tick, memory)
    if use.exceeded is not None:
        exceeded.append((use.exceeded, "host"))
    if card is not None:
        room = card.capacity - context
        ticks = [tick for tick, allocated, _ in timeline.events if allocated > room]
        if ticks:
            exceeded.append((ticks[0], "card"))
    first: Literal["", "host", "card"] = min(exceeded, key=lambda pair: pair[0])[1] if exceeded else ""
    return HostNeed(use, op_at(use.peak.tick), budget, first)


def host_sentence(need: HostNeed, device: str) -> str:
    """Return the sentence on the host's need, and on the memory that is exceeded first."""
    needs = format_bytes(need.use.peak.bytes)
    beside = "" if device == HOST else f" beside {device}"
    where = f", at {need.peak.where}" if need.peak is not None and need.peak.where else ""
    if need.budget is None:
        return f"{needs} of the host's memory{beside} at most{where}."
    verdict = "fits in" if need.fits else "does not fit in"
    first = {
        "": "",
        "host": " The host's memory is exceeded first." if device != HOST else "",
        "card": f" The memory of {device} is exceeded first.",
    }[need.first]
    return f"{verdict} the host's {format_bytes(need.budget)}: needs {needs} at most{where}.{first}"
