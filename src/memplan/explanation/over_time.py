"""Trace -> Course: memory over time by cause, thinned without losing a peak, and what is alive at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from memplan.explanation.course import Alive, Course, OpRow, PeakBlock, PeakSegment, Span
from memplan.explanation.layers import origin_word
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.on_card import drive
from memplan.simulation.simulate import live_at
from memplan.simulation.timeline import Segment, Timeline
from memplan.trace.records import CAUSES, HOST, Op, Storage
from memplan.trace.trace import Trace

MOMENTS = 1600
"""Moments that a course keeps at most, beside the peaks of each cause and the bounds of phases."""
ALIVE = 300
"""Storages at the peak that are listed one by one: the largest."""


def course_of(trace: Trace, timeline: Timeline, settings: str | None = None, moments: int = MOMENTS) -> Course:
    """Return the course of a step.

    Args:
        trace: the step, in the case that was simulated.
        timeline: of this trace.
        settings: of the caching allocator, as they were simulated.
        moments: how many to keep, about.

    Example:
        >>> course = course_of(trace, simulate(trace))
        >>> max(course.allocated) == simulate(trace).peak_allocated
        True
    """
    levels = {tick: (allocated, reserved) for tick, allocated, reserved in timeline.events}
    ticks = np.fromiter(levels, np.int64, len(levels))
    allocated, reserved = np.array([*levels.values()], np.int64).reshape(-1, 2).T
    causes = _by_cause(trace, ticks)
    causes["rounding"] = allocated - sum(causes.values())
    spans = spans_of(trace)
    bounds = np.searchsorted(ticks, [span.start for span in spans], "right")
    kept = thinned(allocated, [*causes.values(), reserved], bounds.tolist(), moments)
    ops, rows = _running(trace, ticks[kept])
    alive, numbers = _alive(trace, timeline.peak_tick)
    return Course(
        _column(ticks[kept]),
        _column(allocated[kept]),
        _column(reserved[kept]),
        {cause: _column(column[kept]) for cause, column in causes.items() if column.any()},
        ops,
        rows,
        spans,
        len(ticks),
        alive,
        _segments(trace, timeline, settings, numbers),
    )


def thinned(
    levels: np.ndarray, others: Sequence[np.ndarray], bounds: Sequence[int], moments: int
) -> np.ndarray:  # fmt: skip
    """Return the places of the moments to keep, in order.

    Kept are the first moment and the last, those on both sides of each of ``bounds``, the highest and the lowest of
    ``levels`` in each of about ``moments / 3`` equal parts, and between each two ``bounds`` the highest of ``levels``
    and of each of ``others``. So between two bounds, and in each part, no moment that is left out is higher than one
    that is kept.
    """
    count = len(levels)
    if count <= moments:
        return np.arange(count)
    bounds = [bound for bound in bounds if 0 < bound < count]
    kept = {0, count - 1, *bounds, *(bound - 1 for bound in bounds)}
    edges = np.linspace(0, count, max(1, moments // 3) + 1).astype(int).tolist()
    for start, end in pairwise(edges):
        if start < end:
            part = levels[start:end]
            kept |= {start, start + int(part.argmax()), start + int(part.argmin())}
    edges = sorted({0, count, *bounds})
    for start, end in pairwise(edges):
        kept |= {start + int(column[start:end].argmax()) for column in (levels, *others)}
    return np.array(sorted(kept))


def _by_cause(trace: Trace, ticks: np.ndarray) -> dict[str, np.ndarray]:
    """Return the bytes of each cause after each tick."""
    found: dict[str, np.ndarray] = {}
    for cause in CAUSES:
        storages = [storage for storage in trace.counted if storage.cause == cause]
        changes = np.zeros(len(ticks) + 1, np.int64)
        died = [storage for storage in storages if storage.died is not None]
        np.add.at(changes, _places(ticks, [s.born for s in storages]), [s.bytes for s in storages])
        np.add.at(changes, _places(ticks, [s.died or 0 for s in died]), [-s.bytes for s in died])
        found[cause] = changes[:-1].cumsum()
    return found


def _places(ticks: np.ndarray, wanted: Sequence[int]) -> np.ndarray:
    return np.searchsorted(ticks, np.array(wanted, np.int64))


def spans_of(trace: Trace) -> tuple[Span, ...]:
    """Return building, and the phases of each step without gaps, in order; an op that runs again in the backward pass
    is part of it."""
    found: list[Span] = [Span("build", -1, 0, trace.steps[0] if trace.steps else trace.end)]
    for op in trace.ops:
        phase = "backward" if op.recomputed else op.phase
        if op.step < 0 or (phase, op.step) == (found[-1].phase, found[-1].step):
            continue
        start = trace.steps[op.step] if op.step != found[-1].step else op.start
        found.append(Span(phase, op.step, start, trace.end))
    ends = [span.start for span in found[1:]] + [trace.end]
    return tuple(
        Span(span.phase, span.step, span.start, end) for span, end in zip(found, ends, strict=True) if span.start < end
    )


def _running(trace: Trace, ticks: np.ndarray) -> tuple[tuple[int, ...], tuple[OpRow, ...]]:
    """Return for each tick the place of the last op that began before it, and these ops."""
    last = np.searchsorted(np.array([op.start for op in trace.ops], np.int64), ticks) - 1
    wanted = np.unique(last[last >= 0])
    rows = tuple(_op_row(trace, trace.ops[place]) for place in wanted)
    places = np.where(last < 0, -1, np.searchsorted(wanted, last))
    return _column(places), rows


def _op_row(trace: Trace, op: Op) -> OpRow:
    return OpRow(origin_word(op, trace), op.layer, op.where, op.phase, op.step)


def _alive(trace: Trace, tick: int) -> tuple[tuple[Alive, ...], dict[int, int]]:
    """Return what is alive after a tick, the largest first, and the places of these storages in it."""
    storages = [storage for storage in live_at(trace, tick) if storage.bytes]
    storages.sort(key=lambda storage: (-storage.bytes, storage.born))
    engines = {one.storage: one.plans[0].engine for one in trace.engines}
    owners = {one: layer.name for layer in trace.layers for one in (*layer.weights, *layer.buffers)}
    rows = [_alive_row(trace, one, owners.get(one.id, ""), engines.get(one.id)) for one in storages[:ALIVE]]
    return tuple(rows), {storage.id: place for place, storage in enumerate(storages[:ALIVE])}


def _alive_row(trace: Trace, storage: Storage, owner: str, engine: str | None) -> Alive:
    op = None if storage.op is None else trace.ops[storage.op]
    name = storage.name or ("" if op is None else origin_word(op, trace))
    layer = owner or ("" if op is None else op.layer)
    where = None if op is None else op.where
    return Alive(
        name, layer, where, storage.cause, storage.shape, storage.dtype, storage.bytes, storage.born, storage.died,
        engine,
    )  # fmt: skip


def _segments(
    trace: Trace, timeline: Timeline, settings: str | None, numbers: Mapping[int, int]
) -> tuple[PeakSegment, ...]:
    """Return what the caching allocator holds at the allocated peak."""
    if trace.device == HOST or not timeline.log:
        return ()
    used = parse_settings(settings) if settings else AllocatorSettings()
    allocator, _ = drive(trace, used, low=True, until=timeline.peak_tick)
    causes = {storage.id: storage.cause for storage in trace.counted}
    return tuple(_segment(one, causes, numbers) for one in allocator.segments())


def _segment(segment: Segment, causes: Mapping[int, str], numbers: Mapping[int, int]) -> PeakSegment:
    blocks = [
        PeakBlock(
            block.address - segment.address, block.size, block.requested, block.state,
            "" if block.owner is None else causes.get(block.owner, ""),
            -1 if block.owner is None else numbers.get(block.owner, -1),
        )
        for block in segment.blocks
    ]  # fmt: skip
    return PeakSegment(segment.size, segment.stream, segment.small, tuple(blocks))


def _column(values: np.ndarray) -> tuple[int, ...]:
    return tuple(values.tolist())
