"""Links between cards: within a machine, and between machines.

Bytes a second of one card in one direction, as the standard or the data sheet has it. Cards without NVLink send over
the link to their host (`memplan.devices.links`).
"""

from __future__ import annotations

from memplan.devices.model import Device

_GB = 10**9

_NVLINK: dict[str, tuple[int, str]] = {
    "v100-16gb": (150 * _GB, "NVLink 2, 300 GB/s both ways: Volta whitepaper (SXM2; the PCIe card has none)"),
    "v100-32gb": (150 * _GB, "NVLink 2, 300 GB/s both ways: Volta whitepaper (SXM2; the PCIe card has none)"),
    "a100-40gb": (300 * _GB, "NVLink 3, 600 GB/s both ways: A100 data sheet"),
    "a100-80gb": (300 * _GB, "NVLink 3, 600 GB/s both ways: A100 data sheet"),
    "h100": (450 * _GB, "NVLink 4, 900 GB/s both ways: H100 data sheet"),
    "h200": (450 * _GB, "NVLink 4, 900 GB/s both ways: H200 data sheet"),
    "b200": (900 * _GB, "NVLink 5, 1.8 TB/s both ways: DGX B200 data sheet"),
}
_NETWORK: dict[str, tuple[int, str]] = {
    "v100": (6_250_000_000, "four EDR InfiniBand of 100 Gbit/s for eight cards: DGX-1 data sheet"),
    "a100": (25 * _GB, "HDR InfiniBand of 200 Gbit/s a card: DGX A100 data sheet"),
    "h100": (50 * _GB, "NDR InfiniBand of 400 Gbit/s a card: DGX H100 data sheet"),
    "h200": (50 * _GB, "NDR InfiniBand of 400 Gbit/s a card: DGX H200 data sheet"),
    "b200": (50 * _GB, "NDR InfiniBand of 400 Gbit/s a card: DGX B200 data sheet"),
}
_OTHER_NETWORK = 1_562_500_000, "Ethernet of 100 Gbit/s for eight cards (assumed)"


def within_machine(card: Device) -> tuple[int, str]:
    """Return the bytes a second between two cards of a machine, and the source.

    Example:
        >>> within_machine(find("h100"))[0]
        450000000000
    """
    if card.name in _NVLINK:
        return _NVLINK[card.name]
    return card.link or 0, "PCIe, as between card and host"


def between_machines(card: Device) -> tuple[int, str]:
    """Return the bytes a second of a card to another machine, and the source."""
    return _NETWORK.get(card.name.partition("-")[0], _OTHER_NETWORK)
