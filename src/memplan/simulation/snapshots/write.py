"""A Timeline as a snapshot that torch's memory_viz opens: as if a card had done it, the predicted as well as the real.

The viewer (torch/utils/viz/MemoryViz.js) reads pickles of protocol 2 to 4 that hold nothing but plain values;
`torch.cuda._memory_viz` reads the same files. Frames carry the layer, and so the viewer's stacks name it.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memplan._text import whole_number, write_whole
from memplan.errors import UsageError
from memplan.simulation.allocator.settings import BUCKETS, AllocatorSettings
from memplan.simulation.snapshots.read import Frame
from memplan.simulation.timeline import AllocatorEvent, Block, Segment, Timeline
from memplan.trace.records import Op
from memplan.trace.trace import Trace

Frames = Mapping[int, Sequence[Frame]]
PROTOCOL = 4
_FIRST_ADDRESS = 1 << 32
_ALIGNMENT = 64
_NO_FRAMES: list[dict[str, Any]] = []


def frames_of(trace: Trace) -> dict[int, tuple[Frame, ...]]:
    """Return the stack to show for each storage of a trace, the innermost frame first: the op, then the line and the
    layer."""
    frames = {op.index: _frames(op) for op in trace.ops}
    named = {s.id: (Frame("", 0, s.name),) if s.name else () for s in trace.storages}
    return {s.id: (() if s.op is None else frames[s.op]) + named[s.id] for s in trace.storages}


def _frames(op: Op) -> tuple[Frame, ...]:
    file, _, line = (op.where or "").rpartition(":")
    place = Frame(file, whole_number(line) or 0, op.layer or "(outside of modules)")
    return Frame("torch/aten", 0, f"{op.name} ({op.phase})"), place


def snapshot_of(
    timeline: Timeline,
    frames: Frames | None = None,
    *,
    trace: Trace | None = None,
    settings: AllocatorSettings | None = None,
    causes: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return a timeline as what `torch.cuda.memory._snapshot()` returns.

    Args:
        timeline: with the log of a caching allocator; else ``trace`` is needed.
        frames: the stack of each owner of blocks (storage of a trace), the innermost frame first.
        trace: the trace that the timeline was simulated from. Where a device has no caching allocator, each of its
            storages gets a segment of its own.
        settings: of the caching allocator, where they were not torch's defaults.
        causes: why each owner exists; the viewer colours by it.

    Raises:
        UsageError: a timeline without a log, and no trace.

    Example:
        >>> snapshot_of(simulate(trace), frames_of(trace), trace=trace)["segments"][0]["total_size"]
        2097152
    """
    log, segments = timeline.log, timeline.segments
    if not log and not segments:
        if trace is None:
            raise UsageError(
                f"a timeline of {timeline.device} without what an allocator did",
                expected="the trace that it was simulated from",
                do="Give it as trace",
            )
        log, segments = _laid_out(trace)
    number = re.search(r":(\d{1,4})$", timeline.device)
    device = int(number[1]) if number else 0
    writer = _Writer(frames or {}, causes)
    events = [writer.event(event) for event in log]
    if causes is not None:
        # The viewer fails where there are categories and none is "unknown"; this event changes nothing.
        events.insert(0, {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "category": "unknown"})
    return {
        "segments": [writer.segment(segment, device) for segment in segments],
        "device_traces": [[] for _ in range(device)] + [events],
        "allocator_settings": _settings(settings or AllocatorSettings()),
        "external_annotations": [],
        "memplan": {"device": timeline.device},
    }


def write_snapshot(
    path: str | os.PathLike[str],
    timeline: Timeline,
    frames: Frames | None = None,
    *,
    trace: Trace | None = None,
    settings: AllocatorSettings | None = None,
    causes: Mapping[int, str] | None = None,
) -> None:
    """Write `snapshot_of` as a pickle; a file that is there already is replaced only when the new one is complete.

    Raises:
        UsageError: a timeline without a log, and no trace.
        OSError: the file cannot be written.

    Example:
        >>> write_snapshot("out.pickle", simulate(trace), frames_of(trace), trace=trace)
    """
    data = pickle.dumps(snapshot_of(timeline, frames, trace=trace, settings=settings, causes=causes), PROTOCOL)
    write_whole(path, data)


class _Writer:
    """Each stack is one list, named by every event that it belongs to: so the file stays small."""

    def __init__(self, frames: Frames, causes: Mapping[int, str] | None) -> None:
        self.frames = frames
        self.causes = causes
        self.stacks: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}

    def stack(self, owner: int | None) -> list[dict[str, Any]]:
        found = tuple(self.frames.get(owner, ())) if owner is not None else ()
        if not found:
            return _NO_FRAMES
        if found not in self.stacks:
            self.stacks[found] = [
                {"filename": frame.filename, "line": frame.line, "name": frame.name} for frame in found
            ]
        return self.stacks[found]

    def event(self, event: AllocatorEvent) -> dict[str, Any]:
        row: dict[str, Any] = {
            "action": event.action,
            "device_free" if event.action == "oom" else "addr": event.address,
            "size": event.size,
            "stream": event.stream,
            "time_us": event.tick,
            "pool_id": list(event.pool),
            "frames": self.stack(event.owner),
        }
        if self.causes is not None and event.action == "alloc":
            row["category"] = self.causes.get(-1 if event.owner is None else event.owner, "unknown")
        return row

    def segment(self, segment: Segment, device: int) -> dict[str, Any]:
        live = [block for block in segment.blocks if block.state == "active_allocated"]
        active = [block for block in segment.blocks if block.state != "inactive"]
        return {
            "device": device,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": sum(block.size for block in live),
            "active_size": sum(block.size for block in active),
            "requested_size": sum(block.requested for block in active),
            "stream": segment.stream,
            "segment_type": "small" if segment.small else "large",
            "segment_pool_id": list(segment.pool),
            "is_expandable": segment.expandable,
            "frames": _NO_FRAMES,
            "blocks": [self.block(block) for block in segment.blocks],
        }

    def block(self, block: Block) -> dict[str, Any]:
        return {
            "address": block.address,
            "size": block.size,
            "requested_size": block.requested,
            "state": block.state,
            "frames": self.stack(block.owner),
        }


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    """As torch writes them; what is not here stands in the text."""
    table = dict(settings.roundup_power2_divisions)
    return {
        "PYTORCH_CUDA_ALLOC_CONF": str(settings),
        "max_split_size": -1 if settings.max_split_size is None else settings.max_split_size,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(1 << k): table.get(1 << k, 0) for k in range(BUCKETS)},
    }


def _laid_out(trace: Trace) -> tuple[tuple[AllocatorEvent, ...], tuple[Segment, ...]]:
    """Return what an allocator without a cache does for a trace: each storage is a segment, at addresses used just
    once."""
    addresses: dict[int, int] = {}
    following = _FIRST_ADDRESS
    counted = [storage for storage in trace.counted if storage.bytes]
    for storage in sorted(counted, key=lambda s: s.born):
        addresses[storage.id] = following
        following += -(-storage.bytes // _ALIGNMENT) * _ALIGNMENT
    changes = [(s.born, True, s.id, s.bytes) for s in counted]
    changes += [(s.died, False, s.id, s.bytes) for s in counted if s.died is not None]
    log: list[AllocatorEvent] = []
    for tick, is_birth, owner, size in sorted(changes):
        log += _life(is_birth, addresses[owner], size, owner, tick)
    held = sorted((addresses[s.id], s.bytes, s.id) for s in counted if s.died is None)
    segments = [_alone(address, size, owner) for address, size, owner in held]
    return tuple(log), tuple(segments)


def _life(is_birth: bool, address: int, size: int, owner: int, tick: int) -> Iterator[AllocatorEvent]:
    if is_birth:
        yield AllocatorEvent("segment_alloc", address, size, tick=tick)
        yield AllocatorEvent("alloc", address, size, owner=owner, tick=tick)
    else:
        yield AllocatorEvent("free_requested", address, size, owner=owner, tick=tick)
        yield AllocatorEvent("free_completed", address, size, owner=owner, tick=tick)
        yield AllocatorEvent("segment_free", address, size, tick=tick)


def _alone(address: int, size: int, owner: int) -> Segment:
    block = Block(address, size, size, "active_allocated", owner)
    return Segment(address, size, 0, size <= 1 << 20, (0, 0), False, (block,))
