"""A card as data: what it holds, how fast it is, and where each figure is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from memplan._bytes import format_bytes
from memplan._display import Printed
from memplan._json import named

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")
"""What `Device.flops` may have, in the order in which it is shown. ``tf32`` is a float32 product with TF32 allowed."""


@dataclass(frozen=True, slots=True)
class Device(Printed):
    """A card. Sizes in bytes, rates per second.

    ``capacity`` is what torch calls the total memory: less than nvidia-smi's total, which is less than what the name
    of the card says in bytes. Drivers differ in it; in the catalogue it is the least that was seen.

    ``rates`` are dense (not sparse) products of matrices of a dtype, summed up in 32 bits or more, as training does;
    with tensor cores where there are any for the dtype. A dtype that the card has no units for is absent.

    ``context`` is what CUDA itself holds in a process before the first tensor (low) and with all kernels loaded (high);
    torch does not see it.

    ``link`` is the rate between card and host in one direction, as the standard has it.

    ``bandwidth``, ``l2`` and ``link`` are None where they are not known, which never happens in the catalogue.
    """

    name: str
    title: str
    capacity: int
    bandwidth: int | None
    rates: tuple[tuple[str, int], ...]
    architecture: tuple[int, int]
    """Compute capability, as (major, minor)."""
    multiprocessors: int
    l2: int | None
    context: tuple[int, int]
    sources: tuple[str, ...]
    """One for each figure, which it names first: ``capacity: ...``."""
    link: int | None = None

    @property
    def flops(self) -> Mapping[str, int]:
        """FLOP/s of each dtype that the card has units for; the names are in `DTYPES`."""
        return MappingProxyType(dict(self.rates))

    def usable(self, context: Literal["low", "high"] = "high") -> int:
        """Return the bytes that the caching allocator can get: the capacity less the CUDA context, at its low or high
        end.

        Example:
            >>> device = find("h100")
            >>> device.usable("high") < device.usable("low") < device.capacity
            True
        """
        low, high = self.context
        return max(0, self.capacity - (high if context == "high" else low))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: sizes in bytes, rates per second."""
        names = ("name", "title", "capacity", "bandwidth", "flops", "architecture", "multiprocessors", "l2", "link")
        return named(self, *names, "sources") | {
            "usable": {"low": self.usable("low"), "high": self.usable("high")},
            "context": {"low": self.context[0], "high": self.context[1]},
        }

    def __str__(self) -> str:
        return f"{self.name}: {self.title}, {format_bytes(self.capacity)}"
