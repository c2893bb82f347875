"""What a planned step would reserve on a card with the other kind of segments: expandable, or of a fixed size.

A free block serves no request that is larger, so that a plan's live bytes leave gaps in segments of a fixed size. In
expandable segments free blocks that are neighbours are one, whatever segment they were reserved for; but they grow by
pages of 20 MiB, which costs small steps more than it saves them. Which of both reserves less is known exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memplan._bytes import format_bytes
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.schedule.scheduler import Schedule
from memplan.planning.schedule.to_trace import reserved_bytes
from memplan.simulation.allocator.settings import is_native_in_process

WORTH_SAYING = 0.05
"""Share of the reserved bytes from which on the other kind of segments is worth a note."""


def segments_note(schedule: Schedule, outside_memory: OutsideMemory) -> Iterator[str]:
    """Yield a note where the other kind of segments reserves at least 5 % less for a planned step; none where the
    process has another allocator than torch's own. The note names all settings that both were computed with.

    Args:
        schedule: the planned step.
        outside_memory: memory in addition to the graph's, and the card with the settings of its allocator.
    """
    if not is_native_in_process():
        return
    home = outside_memory.home
    expandable = home.allocator.expandable_segments
    # both from an empty card: where weights would lie in the other kind of segments is not known
    this = replace(home, occupied=None)
    other = replace(this, allocator=replace(home.allocator, expandable_segments=not expandable))
    reserved = reserved_bytes(schedule, replace(outside_memory, home=this))
    reserved_by_other = reserved_bytes(schedule, replace(outside_memory, home=other))
    if reserved_by_other > (1 - WORTH_SAYING) * reserved:
        return
    # the text of settings leaves out defaults, such as segments of a fixed size
    parts = str(other.allocator), "expandable_segments:False" if expandable else ""
    setting = ",".join(filter(None, parts))
    yield (
        f"with PYTORCH_ALLOC_CONF={setting} the allocator would reserve {format_bytes(reserved_by_other)} instead of "
        f"{format_bytes(reserved)} for this plan: set it before the program starts, and plan again"
    )
