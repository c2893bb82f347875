"""What the driver says of a card beside its memory and speed: a card that is only described has to say the same."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.devices.context import KIB, THREADS
from memplan.devices.model import Device
from memplan.errors import DeviceError

REGISTERS = 65536
"""Of a multiprocessor, each 32 bits, from compute capability 5.0 on (CUDA programming guide)."""

_LIMITS = {
    (6, 0): (64, 48, 32), (6, 1): (96, 48, 32), (7, 0): (96, 96, 32), (7, 5): (64, 64, 16),
    (8, 0): (164, 163, 32), (8, 6): (100, 99, 16), (8, 9): (100, 99, 24),
    (9, 0): (228, 227, 32), (10, 0): (228, 227, 32), (12, 0): (100, 99, 24),
}  # fmt: skip
"""Shared memory of a multiprocessor and of a block at most, in KiB; blocks of a multiprocessor."""
_LIMITS_SOURCE = (
    "shared memory, threads, blocks, registers: CUDA C++ programming guide, technical specifications per compute "
    "capability"
)

_QUERY = "deviceQuery (output)"
_BUS = "memory clock and bus: twice their product is the bandwidth of the data sheet"
_CLOCKS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "t4": (1590, 5001, 256, (f"clocks and bus: {_QUERY}, chiemon.github.io, 2024-12-25",)),
    "a100-40gb": (1410, 1215, 5120, (f"clocks and bus: {_QUERY}, PC2 Paderborn, NVIDIA A100 40GB with NVLINK",)),
    "a100-80gb": (1410, 1593, 5120, ("clock: of the 40 GB module, deviceQuery (output)", f"{_BUS} (computed)")),
    "rtx3090": (1695, 9751, 384, ("clock: GA102 whitepaper v2 (copy)", f"{_BUS} (computed)")),
    "rtx4090": (2520, 10501, 384, ("clock and bus: cputronic.com (copy)", f"{_BUS} (computed)")),
    "h100": (1980, 2619, 5120, ("clock: glennklockwood.com (copy)", "bus: archive-lib.hpctech.co.jp (copy)",
                                f"{_BUS} (computed)")),
    "h200": (1980, 3201, 6016, ("clocks and bus: cuDeviceGetAttribute on one, driver 580.159.04 (measured)",)),
}  # fmt: skip
"""Highest clock of the multiprocessors and of the memory in MHz, width of the memory bus in bits, sources."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Figures of a card that kernels' host code and cuDNN ask the driver for. Clocks in kHz, memory in bytes."""

    clock: int
    memory_clock: int
    bus: int
    """Bits."""
    l2: int
    shared_memory: int
    """Of a multiprocessor."""
    shared_memory_of_block: int
    """The most that a block can ask for."""
    threads: int
    """Of a multiprocessor, and so are ``blocks`` and ``registers``."""
    blocks: int
    registers: int
    sources: tuple[str, ...]


def described_cards() -> tuple[str, ...]:
    """Return the names of the cards of which `hardware_of` has all figures."""
    return tuple(sorted(_CLOCKS))


def hardware_of(card: Device, *, estimated: bool = False) -> Hardware:
    """Return the figures of a card that the driver would report.

    Args:
        card: of the catalogue.
        estimated: whether unknown clocks are estimated from the data sheet's speeds. That is enough where they only
            influence a choice.

    Raises:
        DeviceError: the catalogue lacks figures of the card.

    Example:
        >>> hardware_of(find("h100")).shared_memory_of_block
        232448
    """
    clocks = _CLOCKS.get(card.name) or (_estimated_clocks(card) if estimated else None)
    limits = _LIMITS.get(card.architecture)
    if clocks is None or limits is None or card.l2 is None:
        raise DeviceError(
            f"the clocks of {card.name}, which a described card has to have, are not in the catalogue",
            expected=f"one of {', '.join(described_cards())}",
            do="Name one of these",
        )
    clock, memory_clock, bus, sources = clocks  # MHz, MHz, bits
    shared_memory, shared_memory_of_block, blocks = limits  # KiB, KiB, number
    return Hardware(
        clock=clock * 1000,
        memory_clock=memory_clock * 1000,
        bus=bus,
        l2=card.l2,
        shared_memory=shared_memory * KIB,
        shared_memory_of_block=shared_memory_of_block * KIB,
        threads=THREADS[card.architecture],
        blocks=blocks,
        registers=REGISTERS,
        sources=(*sources, _LIMITS_SOURCE),
    )


_LANES: dict[tuple[int, int], int] = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}
"""Units for float32 of a multiprocessor (CUDA programming guide); 128 in the other architectures."""
_BUS_OF_HBM, _BUS_OF_GDDR = 5120, 256
_HBM = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


def _estimated_clocks(card: Device) -> tuple[int, int, int, tuple[str, ...]] | None:
    """Return (clock and memory clock in MHz, width of the memory bus in bits, sources) at which the card has the speeds
    of its data sheet: two operations and two transfers a clock, over a bus of the usual width. None if a speed is
    unknown."""
    flops, bandwidth = card.flops.get("float32"), card.bandwidth
    if flops is None or bandwidth is None:
        return None
    units = card.multiprocessors * _LANES.get(card.architecture, 128)
    bus = _BUS_OF_HBM if card.architecture in _HBM else _BUS_OF_GDDR
    clock, memory_clock = flops / (2 * units) / 1e6, bandwidth * 8 / (2 * bus) / 1e6
    return round(clock), round(memory_clock), bus, ("clocks: computed from the speeds of the data sheet",)
