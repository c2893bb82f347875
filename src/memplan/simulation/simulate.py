"""Simulate a trace: the bytes allocated and reserved after every event."""

from __future__ import annotations

from typing import Literal, get_args

from memplan.errors import UsageError
from memplan.simulation.allocator.occupied import Begin
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.on_card import drive
from memplan.simulation.peaks import timeline_of
from memplan.simulation.timeline import Timeline
from memplan.trace.live_bytes import live_bytes
from memplan.trace.records import HOST, Storage
from memplan.trace.trace import Trace, band_end

Workspace = Literal["expected", "low", "high", "measured"]


def simulate(trace: Trace, *, settings: str | None = None, workspace: Workspace = "expected") -> Timeline:
    """Return the bytes live over build and all steps of a trace.

    On the CPU these are the requested bytes: torch's CPU allocator neither rounds nor caches, so ``reserved`` equals
    ``allocated``. On a card they are the bytes of the caching allocator's blocks and segments.

    Args:
        trace: a recorded or measured step.
        settings: of the caching allocator, as in the variable ``PYTORCH_ALLOC_CONF``; by default torch's.
        workspace: which size to assume for workspaces of convolutions that a model of cuDNN's choice expects
            (``trace.expected``): the most probable, or that of the lower or upper end of the 95 % band. Workspaces
            known as an interval only have its lower end with "low", else its upper end; then the real
            ``peak_allocated`` lies between "low" and "high", up to the 1 MiB that each block can keep unsplit, and for
            ``peak_reserved`` see `memplan.simulation.workspace_bounds`. "measured" needs all of them measured.

    Raises:
        UsageError: unknown ``settings``, or any for the CPU; an unknown ``workspace``; "measured" if a workspace was
            not measured.

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
        raise UsageError(
            f"workspace {workspace!r}", expected="'expected', 'low', 'high' or 'measured'", do="Choose one of these."
        )
    if workspace in ("low", "high"):
        trace = band_end(trace, workspace)
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


def simulate_from(trace: Trace, begin: Begin | None, settings: AllocatorSettings) -> Timeline:
    """Like `simulate`, of a step on a card whose allocator has tensors already. ``begin``: its state; None: it is
    empty."""
    return _on_card(trace, settings, "expected", begin)


def _on_card(trace: Trace, settings: AllocatorSettings, workspace: Workspace, begin: Begin | None = None) -> Timeline:
    """Return the timeline of a step on a card: of two upper bounds, that which reserves more. Raises UsageError for
    "measured" if a workspace was not measured."""

    def run(*, separate: bool) -> Timeline:
        """Return the timeline; ``separate``: whether workspaces get segments of their own, as in `drive`."""
        allocator, levels = drive(trace, settings, low=workspace == "low", separate=separate, begin=begin)
        bounds = (0, *trace.steps, trace.end)
        return timeline_of(trace.device, levels, bounds, tuple(allocator.log), allocator.segments())

    unknown = [storage for storage in trace.counted if storage.low is not None and storage.low != storage.bytes]
    not_measured = [*unknown, *(trace.storages[size.storage] for size in trace.expected)]
    if workspace == "measured" and not_measured:
        op = not_measured[0].op
        name = "an op" if op is None else trace.ops[op].name
        raise UsageError(
            f"workspace 'measured', and that of {name} was not measured",
            expected="a step whose workspaces were all measured",
            do="Take 'low' and 'high', which bound it.",
        )
    timelines = [run(separate=False)]
    if workspace != "low" and unknown:  # either of the two can reserve more
        timelines.append(run(separate=True))
    return max(timelines, key=lambda timeline: timeline.peak_reserved)


def live_at(trace: Trace, tick: int) -> list[Storage]:
    """Return the counted storages that are live right after the event ``tick``."""
    return [
        storage for storage in trace.counted if storage.born <= tick and (storage.died is None or storage.died > tick)
    ]
