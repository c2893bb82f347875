"""Link of each card of the catalogue to its host: PCIe, of which generation and how many lanes.

What copies really reach is less than what the standard allows: see `memplan.planning.graph.roofline.LINK_SHARE`.
"""

from __future__ import annotations

TRANSFERS = {3: 8e9, 4: 16e9, 5: 32e9}
"""Transfers of a bit a second and lane, by generation. Of 130 bits, 128 are data."""

_SYSRQMTS = "as listed by sysrqmts.com (copy)"
_ALLDBIN = "as listed by cpu-gpu.alldbin.com (copy)"
_SOURCECODE = "as listed by store.sourcecode.com (copy)"
_HOPPER = "128 GB/s both ways, of the H100 SXM5 by hawkvelt.id.au and of the H200 by saulelectric.com (copy)"

LINKS: dict[str, tuple[int, int, str]] = {
    "gtx1080ti": (3, 16, f"of the P40, which has the same chip, {_SYSRQMTS}"),
    "p100": (3, 16, "as listed by cputronic.com (copy)"),
    "p40": (3, 16, _SYSRQMTS),
    "t4": (3, 16, _SYSRQMTS),
    "v100-16gb": (3, 16, f"of the PCIe and the SXM3 module {_SYSRQMTS}"),
    "v100-32gb": (3, 16, f"of the PCIe and the SXM3 module {_SYSRQMTS}"),
    "a100-40gb": (4, 16, _SYSRQMTS),
    "a100-80gb": (4, 16, f"of the 40 GB module {_SYSRQMTS}"),
    "a100-pcie": (4, 16, f"of the 40 GB card {_SYSRQMTS}"),
    "a10": (4, 16, _SYSRQMTS),
    "l4": (4, 16, _SOURCECODE),
    "l40s": (4, 16, _SOURCECODE),
    "rtx3060": (4, 16, _ALLDBIN),
    "rtx3090": (4, 16, _ALLDBIN),
    "rtx4060": (4, 8, _ALLDBIN),
    "rtx4090": (4, 16, _ALLDBIN),
    "rtx5090": (5, 16, "as listed by elprocus.com (copy)"),
    "h100": (5, 16, _HOPPER),
    "h100-pcie": (5, 16, f"as the SXM5 module's: {_HOPPER}"),
    "h200": (5, 16, _HOPPER),
    "b200": (5, 16, "what x86 servers have; the chip itself has 6.0, by glennklockwood.com (copy)"),
}
"""Generation, lanes, where that is from."""


def link_of(name: str) -> tuple[int, str]:
    """Return (bytes a second between a card and its host, source of the figure), in one direction, as the standard has
    it."""
    generation, lanes, source = LINKS[name]
    rate = TRANSFERS[generation] * lanes * 128 / 130 / 8  # 128 of 130 bits are data; in bytes
    return round(rate), f"link: PCIe {generation}.0 x{lanes}, {source}; one direction by the standard (computed)"
