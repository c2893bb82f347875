"""Build the `MemoryTimeline` of a trace, thinned without losing a peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from memplan.explanation.layers import origin_word
from memplan.explanation.memory_timeline import LiveStorage, MemoryTimeline, OpRow, PeakBlock, PeakSegment, Span
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.on_card import drive
from memplan.simulation.simulate import live_at
from memplan.simulation.timeline import Segment, Timeline
from memplan.trace.records import CAUSES, HOST, Storage
from memplan.trace.trace import Trace

MOMENTS = 1600
"""Ticks of a timeline at most, not counting the peaks of each cause and the bounds of phases."""
ALIVE = 300
"""Number of storages at the peak to list, the largest first."""


def memory_timeline_of(
    trace: Trace, timeline: Timeline, settings: str | None = None, moments: int = MOMENTS
) -> MemoryTimeline:  # fmt: skip
    """Return the bytes of a step over time, by cause.

    Args:
        trace: the step, in the case (low or high workspaces) that was simulated.
        moments: approximate number of ticks to keep.

    Example:
        >>> memory = memory_timeline_of(trace, simulate(trace))
        >>> max(memory.allocated) == simulate(trace).peak_allocated
        True
    """
    levels = {tick: (allocated, reserved) for tick, allocated, reserved in timeline.events}
    ticks = np.fromiter(levels, np.int64, len(levels))
    allocated, reserved = np.array([*levels.values()], np.int64).reshape(-1, 2).T
    causes = _by_cause(trace, ticks)
    causes["rounding"] = allocated - sum(causes.values())
    spans = spans_of(trace)
    bounds = np.searchsorted(ticks, [span.start for span in spans], "right")
    selected = selected_moments(allocated, [*causes.values(), reserved], bounds.tolist(), moments)
    ops, rows = _running_ops(trace, ticks[selected])
    alive, indices = _live_at_peak(trace, timeline.peak_tick)
    return MemoryTimeline(
        ticks=_column(ticks[selected]),
        allocated=_column(allocated[selected]),
        reserved=_column(reserved[selected]),
        causes={cause: _column(column[selected]) for cause, column in causes.items() if column.any()},
        ops=ops,
        op_rows=rows,
        spans=spans,
        total=len(ticks),
        alive=alive,
        segments=_segments(trace, timeline, settings, indices),
    )


def selected_moments(
    levels: np.ndarray, others: Sequence[np.ndarray], bounds: Sequence[int], moments: int
) -> np.ndarray:  # fmt: skip
    """Return the sorted indices to which columns of bytes can be thinned without losing a peak.

    These are the first and last index, both sides of each of ``bounds``, the maximum and minimum of ``levels`` in each
    of about ``moments / 3`` equal parts, and the maxima of ``levels`` and of each of ``others`` between consecutive
    ``bounds``.
    """
    count = len(levels)
    if count <= moments:
        return np.arange(count)
    inner_bounds = [bound for bound in bounds if 0 < bound < count]
    indices = {0, count - 1, *inner_bounds, *(bound - 1 for bound in inner_bounds)}
    edges_of_parts = np.linspace(0, count, max(1, moments // 3) + 1).astype(int).tolist()
    for start, end in pairwise(edges_of_parts):
        if start < end:
            part = levels[start:end]
            indices |= {start, start + int(part.argmax()), start + int(part.argmin())}
    for start, end in pairwise(sorted({0, count, *inner_bounds})):
        indices |= {start + int(column[start:end].argmax()) for column in (levels, *others)}
    return np.array(sorted(indices))


def _by_cause(trace: Trace, ticks: np.ndarray) -> dict[str, np.ndarray]:
    """Return the bytes of each cause after each tick."""
    by_cause: dict[str, np.ndarray] = {}
    for cause in CAUSES:
        storages = [storage for storage in trace.counted if storage.cause == cause]
        changes = np.zeros(len(ticks) + 1, np.int64)  # bytes allocated minus bytes freed at each tick
        allocations = np.array([storage.born for storage in storages], np.int64)
        np.add.at(changes, np.searchsorted(ticks, allocations), [storage.bytes for storage in storages])
        freed = [storage for storage in storages if storage.died is not None]
        frees = np.array([storage.died for storage in freed], np.int64)
        np.add.at(changes, np.searchsorted(ticks, frees), [-storage.bytes for storage in freed])
        by_cause[cause] = changes[:-1].cumsum()
    return by_cause


def spans_of(trace: Trace) -> tuple[Span, ...]:
    """Return the build and the phases of each step, in order and without gaps. Recomputed ops count as backward."""
    spans: list[Span] = [Span("build", -1, 0, trace.steps[0] if trace.steps else trace.end)]
    for op in trace.ops:
        phase = "backward" if op.recomputed else op.phase
        if op.step < 0 or (phase, op.step) == (spans[-1].phase, spans[-1].step):
            continue
        start = trace.steps[op.step] if op.step != spans[-1].step else op.start
        spans.append(Span(phase, op.step, start, trace.end))  # up to the next span, as set below
    ends = [span.start for span in spans[1:]] + [trace.end]
    return tuple(replace(span, end=end) for span, end in zip(spans, ends, strict=True) if span.start < end)


def _running_ops(trace: Trace, ticks: np.ndarray) -> tuple[tuple[int, ...], tuple[OpRow, ...]]:
    """Return for each tick the row of the last op that began before it (-1: none), and the rows."""
    last = np.searchsorted(np.array([op.start for op in trace.ops], np.int64), ticks) - 1
    op_indices = np.unique(last[last >= 0])
    ops = [trace.ops[index] for index in op_indices]
    rows = tuple(OpRow(origin_word(op, trace), op.layer, op.where, op.phase, op.step) for op in ops)
    return _column(np.where(last < 0, -1, np.searchsorted(op_indices, last))), rows


def _live_at_peak(trace: Trace, tick: int) -> tuple[tuple[LiveStorage, ...], dict[int, int]]:
    """Return the largest storages live after a tick, in order of size, and the row index of each by storage id."""
    storages = [storage for storage in live_at(trace, tick) if storage.bytes]
    storages.sort(key=lambda storage: (-storage.bytes, storage.born))
    del storages[ALIVE:]
    engines = {engine.storage: engine.plans[0].engine for engine in trace.engines}
    owners = {storage: layer.name for layer in trace.layers for storage in (*layer.weights, *layer.buffers)}
    rows = [_live_row(trace, each, owners.get(each.id, ""), engines.get(each.id)) for each in storages]
    return tuple(rows), {storage.id: index for index, storage in enumerate(storages)}


def _live_row(trace: Trace, storage: Storage, owner: str, engine: str | None) -> LiveStorage:
    """Return the row of a storage. ``owner``: the layer whose weight or buffer it is, or ""; ``engine``: cuDNN's engine
    whose workspace it is, or None."""
    op = None if storage.op is None else trace.ops[storage.op]
    name = storage.name or ("" if op is None else origin_word(op, trace))
    layer = owner or ("" if op is None else op.layer)
    where = None if op is None else op.where
    return LiveStorage(
        name, layer, where, storage.cause, storage.shape, storage.dtype, storage.bytes, storage.born, storage.died,
        engine,
    )  # fmt: skip


def _segments(
    trace: Trace, timeline: Timeline, settings: str | None, alive_indices: Mapping[int, int]
) -> tuple[PeakSegment, ...]:
    """Return the caching allocator's segments at the allocated peak. ``alive_indices``: storage -> index of its row in
    `MemoryTimeline.alive`."""
    if trace.device == HOST or not timeline.log:
        return ()
    parsed = parse_settings(settings) if settings else AllocatorSettings()
    allocator = drive(trace, parsed, low=True, until=timeline.peak_tick).allocator
    causes = {storage.id: storage.cause for storage in trace.counted}
    return tuple(_segment(segment, causes, alive_indices) for segment in allocator.segments())


def _segment(segment: Segment, causes: Mapping[int, str], alive_indices: Mapping[int, int]) -> PeakSegment:
    """Return a segment for the picture: each block with its cause, and the index of its storage's row.

    ``causes``: storage -> cause. ``alive_indices``: storage -> index in `MemoryTimeline.alive`.
    """
    blocks = [
        PeakBlock(
            block.address - segment.address, block.size, block.requested, block.state,
            "" if block.owner is None else causes.get(block.owner, ""),
            -1 if block.owner is None else alive_indices.get(block.owner, -1),
        )
        for block in segment.blocks
    ]  # fmt: skip
    return PeakSegment(segment.size, segment.stream, segment.small, tuple(blocks))


def _column(values: np.ndarray) -> tuple[int, ...]:
    """Return an array as a tuple of Python integers, for JSON."""
    return tuple(values.tolist())
