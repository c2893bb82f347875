"""Trace -> Timeline: how many bytes are live, and held from the device, after every event."""

from __future__ import annotations

from typing import Literal, get_args

from memplan.errors import UsageError
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.on_card import drive
from memplan.simulation.peaks import timeline_of
from memplan.simulation.timeline import Timeline
from memplan.trace.live_bytes import live_bytes
from memplan.trace.records import HOST, Storage
from memplan.trace.trace import Trace

Workspace = Literal["low", "high", "measured"]


def simulate(trace: Trace, *, settings: str | None = None, workspace: Workspace = "high") -> Timeline:
    """Return the bytes live over build and all steps of a trace.

    On the CPU bytes are as requested: torch's CPU allocator neither rounds nor caches, so ``reserved`` equals
    ``allocated``. On a card they are those of the caching allocator's blocks and segments.

    Args:
        trace: a recorded or measured step.
        settings: of the caching allocator, as in the variable ``PYTORCH_ALLOC_CONF``; its defaults where None.
        workspace: the case to take of workspaces that are known as an interval: the least, the most, or what was
            measured (where every one was). Between the two lies ``peak_allocated``, to the 1 MiB that each block can
            keep unsplit; of ``peak_reserved`` see `memplan.simulation.workspace_bounds`.

    Raises:
        UsageError: unknown ``settings``, or any for the CPU; no such ``workspace``; "measured" where one was not.

    Example:
        >>> memplan.simulate(memplan.record(build, device="h100")).peak_allocated
        70521856
        >>> memplan.simulate(memplan.record(build, device="h100"), settings="expandable_segments:True").peak_reserved
        88080384
    """
    if settings is not None and not isinstance(settings, str):
        raise UsageError(
            f"settings={settings!r}", expected="a text such as 'expandable_segments:True'", do="Write it so."
        )
    if workspace not in get_args(Workspace):
        raise UsageError(f"workspace {workspace!r}", expected="'low', 'high' or 'measured'", do="Choose one of these.")
    if trace.device != HOST:
        return _on_card(trace, parse_settings(settings) if settings else AllocatorSettings(), workspace)
    if settings is not None:
        raise UsageError(
            f"allocator settings {settings!r} for device {trace.device!r}",
            expected="settings only for a device with a caching allocator; the CPU has none",
            do="Leave settings out.",
        )
    events = [(tick, level, level) for tick, level in live_bytes(trace.storages)]
    return timeline_of(trace.device, events, (0, *trace.steps, trace.end))


def _on_card(trace: Trace, settings: AllocatorSettings, workspace: Workspace) -> Timeline:
    unknown = [storage for storage in trace.counted if storage.low is not None and storage.low != storage.bytes]
    if workspace == "measured" and unknown:
        op = unknown[0].op
        name = "an op" if op is None else trace.ops[op].name
        raise UsageError(
            f"workspace 'measured', and that of {name} is known as an interval only",
            expected="a step whose workspaces were all measured",
            do="Take 'low' and 'high', which bound it.",
        )
    found = [_driven(trace, settings, low=workspace == "low", apart=False)]
    if workspace == "high" and unknown:  # whichever of the two holds more
        found.append(_driven(trace, settings, low=False, apart=True))
    return max(found, key=lambda timeline: timeline.peak_reserved)


def _driven(trace: Trace, settings: AllocatorSettings, *, low: bool, apart: bool) -> Timeline:
    allocator, events = drive(trace, settings, low=low, apart=apart)
    bounds = (0, *trace.steps, trace.end)
    return timeline_of(trace.device, events, bounds, tuple(allocator.log), allocator.segments())


def live_at(trace: Trace, tick: int) -> list[Storage]:
    """Return the storages that count and are allocated right after the event ``tick``."""
    return [s for s in trace.counted if s.born <= tick and (s.died is None or s.died > tick)]
