"""Write a timeline, predicted or measured, as a memory snapshot that torch's memory_viz opens.

The viewer (torch/utils/viz/MemoryViz.js) and `torch.cuda._memory_viz` read pickles of protocol 2 to 4 of plain values.
The stack of each storage names its layer.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memplan._text import whole_number, write_whole
from memplan.errors import UsageError
from memplan.simulation.allocator.rounding import LARGEST_SMALL
from memplan.simulation.allocator.settings import BUCKETS, AllocatorSettings
from memplan.simulation.snapshots.read import Frame
from memplan.simulation.timeline import DEFAULT_POOL, AllocatorEvent, Block, Segment, Timeline
from memplan.trace.records import Op
from memplan.trace.trace import Trace

Frames = Mapping[int, Sequence[Frame]]
PROTOCOL = 4
_FIRST_ADDRESS = 1 << 32
_ALIGNMENT = 64
_NO_FRAMES: list[dict[str, Any]] = []


def frames_of(trace: Trace) -> dict[int, tuple[Frame, ...]]:
    """Return the stack to show for each storage of a trace: frames of its op, its source line and layer, and its
    name."""
    frames_of_ops = {op.index: _frames(op) for op in trace.ops}
    frames: dict[int, tuple[Frame, ...]] = {}
    for storage in trace.storages:
        of_op = () if storage.op is None else frames_of_ops[storage.op]
        frames[storage.id] = (*of_op, Frame("", line=0, name=storage.name)) if storage.name else of_op
    return frames


def _frames(op: Op) -> tuple[Frame, ...]:
    """Return the frames to show for an op: its name and phase, then its source line and layer."""
    file, _, line = (op.where or "").rpartition(":")
    source = Frame(file, whole_number(line) or 0, op.layer or "(outside of modules)")
    return Frame("torch/aten", line=0, name=f"{op.name} ({op.phase})"), source


def snapshot_of(
    timeline: Timeline,
    frames: Frames | None = None,
    *,
    trace: Trace | None = None,
    settings: AllocatorSettings | None = None,
    causes: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return a timeline in the format of `torch.cuda.memory._snapshot()`.

    Args:
        timeline: a timeline with the log of a caching allocator; without a log, ``trace`` is needed.
        frames: the stack of each owner of blocks (storage of a trace), the innermost frame first.
        trace: the trace that the timeline was simulated from. On a device without a caching allocator, each of its
            storages gets a segment of its own.
        settings: of the caching allocator; by default torch's.
        causes: the category of each owner, by which the viewer colours blocks.

    Raises:
        UsageError: the timeline has no log, and there is no trace.

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
        log, segments = _without_cache(trace)
    number = re.search(r":(\d{1,4})$", timeline.device)
    device = int(number[1]) if number else 0
    writer = _Writer(frames or {}, causes)
    events = [writer.event(event) for event in log]
    if causes is not None:
        # The viewer fails if no category is "unknown"; this event changes nothing.
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
    """Write `snapshot_of` (with these arguments) as a pickle. An existing file is replaced only when the new file is
    complete.

    Raises:
        UsageError: the timeline has no log, and there is no trace.
        OSError: the file cannot be written.

    Example:
        >>> write_snapshot("out.pickle", simulate(trace), frames_of(trace), trace=trace)
    """
    data = pickle.dumps(snapshot_of(timeline, frames, trace=trace, settings=settings, causes=causes), PROTOCOL)
    write_whole(path, data)


class _Writer:
    """Shares equal stacks between events, so that the pickle stays small."""

    def __init__(self, frames: Frames, causes: Mapping[int, str] | None) -> None:
        self.frames = frames
        """Stack of each owner of blocks, the innermost frame first."""
        self.causes = causes
        """Category of each owner of blocks; None: events get no category."""
        self.stacks: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}
        """Stack -> the stack as torch writes it, shared by all events that have it."""

    def stack(self, owner: int | None) -> list[dict[str, Any]]:
        """Return the stack that allocated ``owner``, as torch writes it."""
        frames = tuple(self.frames.get(owner, ())) if owner is not None else ()
        if not frames:
            return _NO_FRAMES
        if frames not in self.stacks:
            self.stacks[frames] = [
                {"filename": frame.filename, "line": frame.line, "name": frame.name} for frame in frames
            ]
        return self.stacks[frames]

    def event(self, event: AllocatorEvent) -> dict[str, Any]:
        """Return an event as an entry of torch's ``device_traces``."""
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
        """Return a segment as an entry of torch's ``segments``. ``device``: number of the GPU."""
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
        """Return a block as an entry of a segment's ``blocks``."""
        return {
            "address": block.address,
            "size": block.size,
            "requested_size": block.requested,
            "state": block.state,
            "frames": self.stack(block.owner),
        }


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    """Return the settings as torch writes them; those without a key of their own are in PYTORCH_CUDA_ALLOC_CONF."""
    table = dict(settings.roundup_power2_divisions)
    return {
        "PYTORCH_CUDA_ALLOC_CONF": str(settings),
        "max_split_size": -1 if settings.max_split_size is None else settings.max_split_size,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(1 << k): table.get(1 << k, 0) for k in range(BUCKETS)},
    }


def _without_cache(trace: Trace) -> tuple[tuple[AllocatorEvent, ...], tuple[Segment, ...]]:
    """Return the log and final segments of an allocator without a cache: each storage gets a segment of its own."""
    addresses: dict[int, int] = {}
    address = _FIRST_ADDRESS
    counted = [storage for storage in trace.counted if storage.bytes]
    counted.sort(key=lambda storage: storage.born)
    for storage in counted:
        addresses[storage.id] = address
        address += -(-storage.bytes // _ALIGNMENT) * _ALIGNMENT
    changes = [(storage.born, True, storage.id, storage.bytes) for storage in counted]
    changes += [(storage.died, False, storage.id, storage.bytes) for storage in counted if storage.died is not None]
    log: list[AllocatorEvent] = []
    for tick, is_alloc, owner, size in sorted(changes):
        log += _events(is_alloc, addresses[owner], size, owner, tick)
    segments: list[Segment] = []
    for storage in counted:
        if storage.died is None:
            block = Block(
                addresses[storage.id], storage.bytes, requested=storage.bytes, state="active_allocated",
                owner=storage.id,
            )  # fmt: skip
            small = storage.bytes <= LARGEST_SMALL
            segments.append(
                Segment(block.address, block.size, 0, small, DEFAULT_POOL, expandable=False, blocks=(block,))
            )
    return tuple(log), tuple(segments)


def _events(is_alloc: bool, address: int, size: int, owner: int, tick: int) -> Iterator[AllocatorEvent]:
    """Yield the events of allocating or freeing a storage and its segment."""
    if is_alloc:
        yield AllocatorEvent("segment_alloc", address, size, tick=tick)
        yield AllocatorEvent("alloc", address, size, owner=owner, tick=tick)
    else:
        yield AllocatorEvent("free_requested", address, size, owner=owner, tick=tick)
        yield AllocatorEvent("free_completed", address, size, owner=owner, tick=tick)
        yield AllocatorEvent("segment_free", address, size, tick=tick)
