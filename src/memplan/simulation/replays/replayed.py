"""A replayed snapshot as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memplan._bytes import format_bytes_as_torch as shown
from memplan._display import Displayed
from memplan.simulation.allocator.allocator import CachingAllocator
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.peaks import Level, timeline_of
from memplan.simulation.replays.exact import Mismatch, OutOfMemoryEvent
from memplan.simulation.replays.initial_state import Start
from memplan.simulation.replays.requests import Request
from memplan.simulation.snapshots.read import Frame, Snapshot
from memplan.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True, repr=False)
class Replay(Displayed):
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
        """Return the most in blocks, as `torch.cuda.max_memory_allocated` counts."""
        return self.timeline.peak_allocated

    @property
    def peak_reserved(self) -> int:
        """Return the most held from the card, as `torch.cuda.max_memory_reserved` counts."""
        return self.timeline.peak_reserved

    @property
    def fragmentation(self) -> int:
        """Return what was held and in no block at ``peak_reserved``; where that lasted, when the most of it was in
        blocks."""
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
        """Return the settings that the snapshot was recorded under."""
        return self.snapshot.settings

    @property
    def has_history(self) -> bool:
        """Return whether the snapshot says what happened; without, only what was held in the end is known."""
        return bool(self.snapshot.entries)

    @property
    def fits(self) -> bool:
        """Return whether every request was served."""
        return not self.ooms

    def stack_of(self, owner: int | None) -> Sequence[Frame]:
        """Return the stack that a block was allocated from, the innermost frame first; () where it is not recorded."""
        count = len(self.snapshot.entries)
        if owner is None or owner >= count + len(self.start.stacks):
            return ()
        index = self.snapshot.entries[owner].stack if owner < count else self.start.stacks[owner - count]
        return self.snapshot.stacks[index]

    def __str__(self) -> str:
        lines = [
            f"{self.snapshot.source}: {len(self.snapshot.entries)} events on {self.timeline.device}, "
            f"settings {str(self.settings) or 'default'}",
            f"peak {shown(self.peak_reserved)} reserved, {shown(self.peak_allocated)} allocated, "
            f"{shown(self.fragmentation)} fragmentation",
        ]
        if not self.has_history:
            lines.append("no history was recorded: this is what was held when the snapshot was taken")
        elif self.compared:
            lines.append(f"{len(self.mismatches)} differences between recorded and replayed addresses and segments")
        lines += [f"out of memory at event {oom.index}: {shown(oom.requested)} requested" for oom in self.ooms]
        return "\n".join(lines)


def timeline_over(snapshot: Snapshot, levels: Sequence[Level], allocator: CachingAllocator) -> Timeline:
    """Return the timeline of a history that was driven through an allocator."""
    bounds = (0, len(snapshot.entries))
    return timeline_of(f"cuda:{snapshot.gpu}", levels, bounds, tuple(allocator.log), allocator.segments())
