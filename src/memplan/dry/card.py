"""The description of a card that the emulated driver answers from."""

from __future__ import annotations

from memplan.devices import Device, hardware_of

CARD = "MEMPLAN_DRY_CARD"
"""Environment variable that holds the description; ``sources/cudart.c`` reads it."""
DRIVER_LOG = "MEMPLAN_DRY_LOG"
"""Environment variable that names the file of what the emulated driver was asked for and did not know."""
_BINARIES = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))


def description(card: Device) -> str:
    """Return a card as the emulated driver reads it.

    Of the memory that the driver calls the card's, it keeps the larger end of a CUDA context for itself.

    Raises:
        DeviceError: a card whose clocks are not in the catalogue.
    """
    known = hardware_of(card)
    major, minor = card.architecture
    numbers = (
        major, minor, card.multiprocessors, card.capacity, card.context[1], known.l2, known.shared_memory_of_block,
        known.shared_memory, known.threads, known.blocks, known.clock, known.memory_clock, known.bus,
        newest_binary(card.architecture, _BINARIES),
    )  # fmt: skip
    return " ".join(map(str, numbers)) + f" {card.title}"


def newest_binary(architecture: tuple[int, int], built: tuple[tuple[int, int], ...]) -> int:
    """Return the newest of the architectures that code was built for whose code a card runs: of the same major number,
    and not above its own; 0 where there is none.

    Source: CUDA programming guide, binary compatibility.

    Example:
        >>> newest_binary((8, 9), ((8, 0), (8, 6), (9, 0)))
        86
    """
    runs = [one for one in built if one[0] == architecture[0] and one <= architecture]
    return max((10 * major + minor for major, minor in runs), default=0)
