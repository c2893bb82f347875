"""Links between cards: within a machine, and between machines.

Bytes a second of one card in one direction, as the standard has it. Cards without NVLink send over the link to their
host (`memplan.devices.links`).
"""

from __future__ import annotations

from memplan.devices.model import Device

_GB = 10**9
_NVLINK_PAGE = "GB/s both ways by nvidia.com/data-center/nvlink (copy)"
_INFRA_INDEX = "a card, as listed by alpha-one-index.github.io/ai-infra-index (copy)"

_NVLINK: dict[str, tuple[int, str]] = {
    "v100-16gb": (150 * _GB, f"NVLink 2, 300 {_NVLINK_PAGE}; the SXM2 module's, the PCIe card has none"),
    "v100-32gb": (150 * _GB, f"NVLink 2, 300 {_NVLINK_PAGE}; the SXM2 module's, the PCIe card has none"),
    "a100-40gb": (300 * _GB, f"NVLink 3, 600 {_NVLINK_PAGE}"),
    "a100-80gb": (300 * _GB, f"NVLink 3, 600 {_NVLINK_PAGE}"),
    "h100": (450 * _GB, f"NVLink 4, 900 {_NVLINK_PAGE}"),
    "h200": (450 * _GB, f"NVLink 4, 900 {_NVLINK_PAGE}"),
    "b200": (900 * _GB, f"NVLink 5, 1,800 {_NVLINK_PAGE}"),
}
_NETWORK: dict[str, tuple[int, str]] = {
    "v100": (6_250_000_000, "four InfiniBand cards of 100 Gbit/s for eight GPUs (assumed)"),
    "a100": (25 * _GB, f"HDR InfiniBand of 200 Gbit/s {_INFRA_INDEX}"),
    "h100": (50 * _GB, f"NDR InfiniBand of 400 Gbit/s {_INFRA_INDEX}"),
    "h200": (50 * _GB, f"NDR InfiniBand of 400 Gbit/s {_INFRA_INDEX}"),
    "b200": (50 * _GB, f"NDR InfiniBand of 400 Gbit/s, as for H100: many have these; XDR of 800 {_INFRA_INDEX}"),
}
_OTHER_NETWORK = 1_562_500_000, "Ethernet of 100 Gbit/s for eight cards (assumed)"


def within_machine(card: Device) -> tuple[int, str]:
    """Return (bytes a second between two cards of a machine, source of the figure).

    Example:
        >>> within_machine(find("h100"))[0]
        450000000000
    """
    if card.name in _NVLINK:
        return _NVLINK[card.name]
    return card.link or 0, "PCIe, as between card and host"


def between_machines(card: Device) -> tuple[int, str]:
    """Return (bytes a second from a card to another machine, source of the figure)."""
    return _NETWORK.get(card.name.partition("-")[0], _OTHER_NETWORK)
