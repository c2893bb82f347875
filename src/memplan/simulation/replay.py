"""A snapshot of torch's CUDA memory -> Replay: the same events through the same simulator as every prediction."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan._bytes import format_bytes, parse_bytes
from memplan.simulation.allocator import CachingAllocator
from memplan.simulation.exact import Exact, Mismatch, OutOfMemoryEvent
from memplan.simulation.model import Timeline
from memplan.simulation.peaks import Level, timeline_of
from memplan.simulation.requests import Request, requests_of
from memplan.simulation.rewind import Start, rewind
from memplan.simulation.settings import AllocatorSettings, parse_settings
from memplan.simulation.snapshot import Frame, Snapshot, read_snapshot

_REPAIRS = 20


@dataclass(frozen=True, slots=True)
class Replay:
    """What torch's caching allocator did in a snapshot's history, or would have done. Bytes throughout.

    The ticks of ``timeline`` count the history's events from 1; 0 is its start. The owner of a block is the index
    of the event that allocated it, from 0, and for the blocks of the start a number beyond these.
    """

    snapshot: Snapshot = field(repr=False)
    start: Start = field(repr=False)
    requests: tuple[Request | None, ...] = field(repr=False)
    settings: AllocatorSettings
    """Those of this replay: the recorded ones, unless others were given."""
    capacity: int | None
    """What the card could give to torch; None: as much as torch took."""
    compared: bool
    """Whether addresses and segments were compared; under another capacity or other settings there is nothing to
    compare them with, and ``mismatches`` is empty."""
    mismatches: list[Mismatch]
    timeline: Timeline
    ooms: tuple[OutOfMemoryEvent, ...]
    """Requests that the card could not serve: as recorded, or in this replay."""
    ended: bool = False
    """Whether a request that was served when it was recorded failed: what the program would have done then is not
    known, so the replay ends there, and the peaks are those up to there."""
    from_recorded_start: bool = True
    """Whether it begins with what was held then, block by block; else with the live blocks alone, allocated anew."""

    @property
    def peak_allocated(self) -> int:
        """The most in blocks, as `torch.cuda.max_memory_allocated` counts."""
        return self.timeline.peak_allocated

    @property
    def peak_reserved(self) -> int:
        """The most held from the card, as `torch.cuda.max_memory_reserved` counts."""
        return self.timeline.peak_reserved

    @property
    def fragmentation(self) -> int:
        """What was held and in no block at ``peak_reserved``; where that lasted, when the most of it was in blocks."""
        tick = self.timeline.reserved_tick
        return self.peak_reserved - max(
            (
                allocated
                for at, allocated, reserved in self.timeline.events
                if at == tick and reserved == self.peak_reserved
            ),
            default=self.peak_reserved,
        )

    @property
    def fragmentation_share(self) -> float:
        """``fragmentation`` as a share of ``peak_reserved``."""
        return self.fragmentation / self.peak_reserved if self.peak_reserved else 0.0

    @property
    def recorded_settings(self) -> AllocatorSettings:
        """The settings that the snapshot was recorded under."""
        return self.snapshot.settings

    @property
    def has_history(self) -> bool:
        """Whether the snapshot says what happened; without, only what was held in the end is known."""
        return bool(self.snapshot.entries)

    @property
    def fits(self) -> bool:
        """Whether every request was served."""
        return not self.ooms

    def stack_of(self, owner: int | None) -> Sequence[Frame]:
        """The stack that a block was allocated from, the innermost frame first; () where it is not recorded."""
        count = len(self.snapshot.entries)
        if owner is None or owner >= count + len(self.start.stacks):
            return ()
        index = self.snapshot.entries[owner].stack if owner < count else self.start.stacks[owner - count]
        return self.snapshot.stacks[index]

    def __str__(self) -> str:
        lines = [
            f"{self.snapshot.source}: {len(self.snapshot.entries)} events on {self.timeline.device}, "
            f"settings {str(self.settings) or 'default'}",
            f"peak {format_bytes(self.peak_reserved)} reserved, {format_bytes(self.peak_allocated)} allocated, "
            f"{format_bytes(self.fragmentation)} fragmentation",
        ]
        if not self.has_history:
            lines.append("no history was recorded: this is what was held when the snapshot was taken")
        elif self.compared:
            lines.append(f"{len(self.mismatches)} differences between recorded and replayed addresses and segments")
        lines += [f"out of memory at event {oom.index}: {format_bytes(oom.requested)} requested" for oom in self.ooms]
        return "\n".join(lines)


def replay(
    path_or_dict: str | os.PathLike[str] | Mapping[str, Any],
    *,
    settings: str | AllocatorSettings | None = None,
    capacity: str | int | None = None,
    gpu: int | None = None,
) -> Replay:
    """Replay the history of a snapshot of torch's CUDA memory.

    As it stands, every address and every segment is compared with the recorded ones. With ``settings`` or
    ``capacity`` it is a what-if: the same requests, in the same order, to an allocator with other settings, on a card
    with so much memory.

    Args:
        path_or_dict: a file that `torch.cuda.memory._dump_snapshot` wrote (or JSON of the same, each also as .gz), or
            the dict of `torch.cuda.memory._snapshot()`. A pickle is read without running anything in it.
        settings: as in PYTORCH_ALLOC_CONF; by default as recorded.
        capacity: bytes that the card can give to torch ("24 GiB" or a number). By default, where the recording ran
            out of memory, what there was then; else no end.
        gpu: whose history; needed where the snapshot has more than one.

    Raises:
        TargetError: the file cannot be read.
        SnapshotFormatError: it is no snapshot.
        DeviceError: the snapshot is of several GPUs, or not of the one asked for.
        UsageError: settings that do not exist.
        UnitError: a capacity that is no number of bytes.

    Example:
        >>> replay = memplan.replay("snapshot.pickle")
        >>> replay.mismatches
        []
        >>> memplan.replay("snapshot.pickle", settings="expandable_segments:True").peak_reserved
        17951621120
    """
    chosen = parse_settings(settings) if isinstance(settings, str) else settings
    limit = None if capacity is None else parse_bytes(capacity)
    snapshot = read_snapshot(path_or_dict, gpu)
    start = rewind(snapshot)
    requests = requests_of(snapshot, start)
    exact = replay_exactly(snapshot, start, requests)
    if chosen is None and limit is None:
        return exact
    from memplan.simulation.what_if import what_if

    return what_if(exact, chosen, limit)


def replay_exactly(snapshot: Snapshot, start: Start, requests: Sequence[Request | None]) -> Replay:
    """The replay of a snapshot under its own settings, compared with what is recorded.

    What the start leaves open, the sizes of a few blocks, is settled by where torch put later ones.
    """
    best = exact = Exact(snapshot, start, requests)
    exact.run()
    for _ in range(_REPAIRS):
        if exact.suspect is None:
            break
        start = start.enlarged(*exact.suspect)
        exact = Exact(snapshot, start, requests)
        exact.run()
        if len(exact.mismatches) < len(best.mismatches):
            best = exact
    timeline = timeline_over(snapshot, best.levels, best.allocator)
    return Replay(
        snapshot, best.start, tuple(requests), snapshot.settings, None, True, best.mismatches, timeline,
        tuple(best.ooms),
    )  # fmt: skip


def timeline_over(snapshot: Snapshot, levels: Sequence[Level], allocator: CachingAllocator) -> Timeline:
    """The timeline of a history that was driven through an allocator."""
    bounds = (0, len(snapshot.entries))
    return timeline_of(f"cuda:{snapshot.gpu}", levels, bounds, tuple(allocator.log), allocator.segments())
