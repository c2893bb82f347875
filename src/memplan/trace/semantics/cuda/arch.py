"""The properties of a CUDA card that determine the temporaries of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Arch:
    """A CUDA architecture and its number of multiprocessors."""

    capability: tuple[int, int]
    """Compute capability, (major, minor)."""
    multiprocessors: int
    """Streaming multiprocessors: they decide how far a kernel splits its work."""

    @property
    def threads(self) -> int:
        """Maximum number of resident threads per multiprocessor.

        Source: the table of technical specifications per compute capability in the CUDA programming guide.
        """
        major, minor = self.capability
        if self.capability == (7, 5):
            return 1024
        return 1536 if major == 12 or (major == 8 and minor != 0) else 2048

    @property
    def shared_memory(self) -> int:
        """Maximum shared memory per block, after opting in, in KiB; from the same table."""
        major, minor = self.capability
        if major < 7:
            return 48
        if major == 7:
            return 64 if minor == 5 else 96
        if major == 8:
            return 163 if minor in (0, 7) else 99
        return 99 if major == 12 else 227


class WatchedArch(Arch):
    """An Arch that records whether its properties were read."""

    read = False

    def reset(self) -> None:
        """Set `read` to False."""
        object.__setattr__(self, "read", False)

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute, and note that it was read."""
        if name in ("capability", "multiprocessors"):
            object.__setattr__(self, "read", True)
        return object.__getattribute__(self, name)


A100 = Arch((8, 0), multiprocessors=108)
"""NVIDIA A100: the default of formulas."""
