"""A process's caching allocator before a step: the segments in which tensors lie already, with the gaps between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from memplan.simulation.allocator.allocator import CachingAllocator
from memplan.simulation.allocator.device_memory import ascending_addresses
from memplan.simulation.allocator.expandable_segments import UNKNOWN_CARD
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.timeline import Segment


@dataclass(frozen=True)
class Occupied:
    """Segments that stay in the allocator as they hold tensors, after its cache was emptied."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, segments: Iterable[Segment], settings: AllocatorSettings, freed: Collection[int] = ()) -> Occupied:
        """Return what is left of an allocator's segments.

        Args:
            segments: all of them.
            settings: of the allocator.
            freed: addresses of blocks that are free when the step begins. Others than live blocks are ignored.
        """
        every = cls(tuple(segments))
        allocator = every.allocator(settings)
        for address in every.live.keys() & freed:
            allocator.free(address)
        allocator.empty_cache()
        return cls(allocator.segments())

    @cached_property
    def live(self) -> dict[int, int]:
        """Bytes of the allocated blocks, by address."""
        return {
            block.address: block.size
            for segment in self.segments
            for block in segment.blocks
            if block.state == "active_allocated"
        }

    def allocator(self, settings: AllocatorSettings) -> CachingAllocator:
        """Return an allocator in this state, with an empty log."""
        return restored(self.segments, settings)


@dataclass(frozen=True)
class Begin:
    """The state of the allocator when a trace begins."""

    occupied: Occupied
    addresses: dict[int, int]
    """Addresses of the trace's storages that are allocated already."""

    @cached_property
    def others(self) -> int:
        """Bytes of the allocator's live blocks that are not the trace's. They count neither as allocated nor as
        reserved."""
        addresses_of_trace = {*self.addresses.values()}
        return sum(size for address, size in self.occupied.live.items() if address not in addresses_of_trace)


def restored(
    segments: Sequence[Segment],
    settings: AllocatorSettings,
    *,
    capacity: int | None = None,
    place: Callable[[int], int] | None = None,
) -> CachingAllocator:
    """Return a caching allocator with these segments. Other arguments: as of `CachingAllocator`; by default new
    segments lie above those."""
    if place is None:  # also above the addresses reserved for expandable ones
        end = max((segment.address + segment.size for segment in segments), default=0)
        expandable = any(segment.expandable for segment in segments)
        place = ascending_addresses(end + (2 * (capacity or UNKNOWN_CARD) if expandable else 0))
    allocator = CachingAllocator(settings, capacity=capacity, place=place)
    allocator.restore(segments)
    return allocator
