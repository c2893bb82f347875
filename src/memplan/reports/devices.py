"""Reports of known GPUs, a table or all figures of a GPU with their sources, and their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from memplan._bytes import format_bytes
from memplan._json import Written
from memplan.devices.model import DTYPES, Device
from memplan.reports.document import Document, Facts, Field, Line, Section, document, table_of

_GIB, _GIGA, _TERA = 1 << 30, 10**9, 10**12
_LEGEND = (
    "GiB: what torch calls the total memory, and what of it is left when CUDA's own context is taken off, at its "
    "high and its low end. TFLOP/s: dense products of matrices, added up in 32 bits; - where the card has no units "
    "for the dtype. `memplan devices NAME` says where each figure is from."
)


@dataclass(frozen=True, slots=True)
class Catalogue(Written):
    """GPUs, as JSON has them. Sizes are bytes, rates are per second."""

    FORMAT: ClassVar[str] = "memplan.devices"

    devices: Sequence[Device]


def report(devices: Sequence[Device]) -> Document:
    """Return a table of GPUs."""
    return document(None, [table_of(devices, _FIELDS)], [Line(_LEGEND, "dim")])


def device_report(device: Device) -> Document:
    """Return every figure of a GPU and its sources."""
    low, high = device.context
    facts = {
        "capacity": f"{format_bytes(device.capacity)} ({device.capacity} bytes)",
        "CUDA context": f"{format_bytes(low)} to {format_bytes(high)}",
        "usable": f"{format_bytes(device.usable('high'))} to {format_bytes(device.usable('low'))}",
        "bandwidth": "unknown" if device.bandwidth is None else f"{_number(device.bandwidth / _GIGA)} GB/s",
        **{dtype: f"{_number(device.flops[dtype] / _TERA)} TFLOP/s" for dtype in DTYPES if dtype in device.flops},
        "architecture": "{}.{}".format(*device.architecture),
        "multiprocessors": str(device.multiprocessors),
        "L2": "unknown" if device.l2 is None else format_bytes(device.l2),
        "link to host": "unknown" if device.link is None else f"{_number(device.link / _GIGA)} GB/s",
    }
    sources = tuple(Line(source, indent=2) for source in device.sources)
    return document(f"{device.name}: {device.title}", [Facts(facts)], Section(sources, "Sources"))


def _rate_field(header: str, dtype: str, drop: int = 0) -> Field:
    return Field(header, lambda d: _number(d.flops[dtype] / _TERA) if dtype in d.flops else "-", right=True, drop=drop)


_FIELDS = (
    Field("name", lambda d: d.name),
    Field("card", lambda d: _short(d.title), shrinks_to=8, drop=3),
    Field("capacity\nGiB", lambda d: _gib(d.capacity), right=True),
    Field("usable\nGiB", lambda d: f"{_gib(d.usable('high'))}-{_gib(d.usable('low'))}", right=True),
    Field("memory\nGB/s", lambda d: "-" if d.bandwidth is None else _number(d.bandwidth / _GIGA), right=True),
    _rate_field("TFLOP/s\nbf16", "bfloat16"),
    _rate_field("\nfp16", "float16", drop=1),
    _rate_field("\nfp32", "float32", drop=1),
    Field("arch", lambda d: "{}.{}".format(*d.architecture), right=True, drop=2),
)


def _short(title: str) -> str:
    return title.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}"


def _number(value: float) -> str:
    """Return a number rounded to an integer from 100 on, else to three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
