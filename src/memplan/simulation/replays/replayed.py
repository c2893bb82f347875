"""The result of replaying a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """A snapshot's history, replayed on a simulated caching allocator. Bytes throughout.

    The ticks of ``timeline`` count the history's events from 1; 0 is its start. The owner of a block is the index
    of the event that allocated it, from 0, and for the blocks of the start a number beyond these.
    """

    snapshot: Snapshot = field(repr=False)
    start: Start = field(repr=False)
    requests: tuple[Request | None, ...] = field(repr=False)
    settings: AllocatorSettings
    """Of this replay: the recorded settings, or those of the what-if."""
    capacity: int | None
    """Bytes of the card available to torch; None: unlimited."""
    compared: bool
    """Whether addresses and segments were compared with the recording. False for a what-if: ``mismatches`` is empty."""
    mismatches: list[Mismatch]
    timeline: Timeline
    ooms: tuple[OutOfMemoryEvent, ...]
    """Requests that ran out of memory: in the recording, or in this what-if."""
    ended: bool = False
    """Whether a request ran out of memory that did not in the recording. The replay and its peaks end there, since the
    program's further requests are unknown."""
    from_recorded_start: bool = True
    """Whether the replay starts in the recorded state; else only the live blocks are allocated again, without cached
    memory."""

    @property
    def peak_allocated(self) -> int:
        """Return the peak bytes in blocks, as `torch.cuda.max_memory_allocated` counts."""
        return self.timeline.peak_allocated

    @property
    def peak_reserved(self) -> int:
        """Return the peak bytes of segments, as `torch.cuda.max_memory_reserved` counts."""
        return self.timeline.peak_reserved

    @property
    def fragmentation(self) -> int:
        """Return ``peak_reserved`` minus the most bytes allocated at its tick."""
        at_peak = (self.timeline.reserved_tick, self.peak_reserved)
        allocated = [allocated for tick, allocated, reserved in self.timeline.events if (tick, reserved) == at_peak]
        return self.peak_reserved - max(allocated, default=self.peak_reserved)

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
        """Return whether the snapshot has events; without them only the state at the end is known."""
        return bool(self.snapshot.entries)

    @property
    def fits(self) -> bool:
        """Return whether every request was served."""
        return not self.ooms

    def stack_of(self, owner: int | None) -> Sequence[Frame]:
        """Return the stack of a block's allocation, the innermost frame first; () if no stack was recorded."""
        count = len(self.snapshot.entries)
        if owner is None or owner >= count + len(self.start.stacks):
            return ()
        index = self.snapshot.entries[owner].stack if owner < count else self.start.stacks[owner - count]
        return self.snapshot.stacks[index]


def timeline_over(snapshot: Snapshot, levels: Sequence[Level], allocator: CachingAllocator) -> Timeline:
    """Return the timeline of a replay from its levels and the allocator at its end."""
    bounds = (0, len(snapshot.entries))
    return timeline_of(f"cuda:{snapshot.gpu}", levels, bounds, tuple(allocator.log), allocator.segments())
