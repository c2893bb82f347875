"""The description of a card that the emulated driver answers from."""

from __future__ import annotations

from memplan.devices import Device, hardware_of

CARD = "MEMPLAN_DRY_CARD"
"""Environment variable that holds the description; ``sources/cudart.c`` reads it."""
DRIVER_LOG = "MEMPLAN_DRY_LOG"
"""Environment variable that names the file of what the emulated driver was asked for and did not know."""
_BINARIES = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))


def description(card: Device) -> str:
    """Return a card as text for the emulated driver: numbers in the order in which `describe` in ``sources/cudart.c``
    reads them, then its title.

    The emulated driver reserves the higher end of the card's CUDA context (`Device.context`) of its memory.

    Raises:
        DeviceError: a card whose clocks are not in the catalogue.
    """
    hardware = hardware_of(card)
    major, minor = card.architecture
    numbers = (
        major, minor, card.multiprocessors, card.capacity, card.context[1], hardware.l2,
        hardware.shared_memory_of_block, hardware.shared_memory, hardware.threads, hardware.blocks,
        hardware.clock, hardware.memory_clock, hardware.bus, newest_binary(card.architecture, _BINARIES),
    )  # fmt: skip
    return " ".join(map(str, numbers)) + f" {card.title}"


def newest_binary(architecture: tuple[int, int], built: tuple[tuple[int, int], ...]) -> int:
    """Return the newest of the architectures in ``built`` whose code a card runs, as a number: 86 is sm_86. 0 if there
    is none.

    It has the card's major number, and is not above the card's own. Source: CUDA programming guide, binary
    compatibility.

    Example:
        >>> newest_binary((8, 9), ((8, 0), (8, 6), (9, 0)))
        86
    """
    runnable = [version for version in built if version[0] == architecture[0] and version <= architecture]
    return max((10 * major + minor for major, minor in runnable), default=0)
